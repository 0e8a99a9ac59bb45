"""Logits of the reference implementations: the authors' JAX runs (A), torch checkpoints (B) and PAX weights (C).

Float32 against float32: the references differ from a float64 run by up to 2.2e-5; README promises 5e-5.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from golden_runs import JAX_RUNS, TOLERANCE, TORCH_RUNS, convert_jax
from orbax_writer import write_checkpoint
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from dcformer.conversion import convert_pax, convert_torch


# How a cache is made, and the number of tokens that are passed at a time.
CACHES = [
    (lambda model, length: DynamicCache(config=model.config), 1),
    (lambda model, length: DynamicCache(), 3),
    (lambda model, length: StaticCache(config=model.config, max_cache_len=length + 3), 1),
    (lambda model, length: StaticCache(config=model.config, max_cache_len=length + 3), 4),
]


@torch.no_grad()
def load_golden(folder, arrays, field="logits", caches=CACHES, **options):
    """The model of a folder and its tokens, once it was loaded without a report and has given the logits expected."""
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **options)
    model, info = loaded
    assert not any(info.values()), info
    tokens, expected = torch.from_numpy(arrays["tokens"]).long(), torch.from_numpy(arrays[field])
    torch.testing.assert_close(model(tokens).logits, expected, atol=TOLERANCE, rtol=0)
    for make_cache, piece in caches:
        cache = make_cache(model, tokens.shape[1])
        logits = torch.cat([model(part, cache=cache).logits for part in tokens.split(piece, dim=1)], dim=1)
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    return model, tokens


def test_the_data_have_the_hashes_that_are_written_beside_them(golden):
    reference = Path(__file__).parents[1] / "reference"
    archive = hashlib.sha256((reference / "golden.tar.gz").read_bytes()).hexdigest()
    assert archive in (reference / "README.md").read_text(encoding="utf-8")
    hashes = [line.split() for line in (golden / "MANIFEST.sha256").read_text().splitlines()]
    assert len(hashes) > 1800
    assert all(hashlib.sha256((golden / name).read_bytes()).hexdigest() == digest for digest, name in hashes)


@torch.no_grad()
@pytest.mark.parametrize("name", JAX_RUNS)
def test_runs_of_jax_keep_their_logits_losses_and_compose_weights(golden, name, tmp_path):
    """Of the weights: order of the slots and normalisation, against the intermediates that JAX recorded."""
    root = golden / "A_jax" / name
    report = convert_jax(golden, name, tmp_path / "out")
    assert report.source["step"] == (0 if name == "A1_param_only" else 14000)
    assert report.source["format"].startswith("MaxText (OCDBT" if name in ("A3_ocdbt", "A3_default") else "MaxText (z")
    arrays = np.load(root / "io.npz")
    model, tokens = load_golden(tmp_path / "out", arrays, caches=CACHES if name in JAX_RUNS.values() else [])
    if name in JAX_RUNS.values():
        assert model(tokens, labels=tokens).loss.item() == pytest.approx(arrays["nll_next"].mean().item(), abs=1e-5)
    if name != "A1":
        return
    recorded = np.load(root / "layer0.npz")
    weights = model.model.layers[0].self_attn.compose(torch.tensor(recorded["attn_in"]))
    for stage, prefix in zip(weights, ("pre", "post")):
        for side, letter in ((stage.query, "q"), (stage.key, "k")):
            for field, name in (("w1", f"{letter}w1"), ("w2", f"{letter}w2")):
                expected = torch.tensor(recorded[f"{prefix}_{name}"])[:, :, 0].permute(0, 3, 1, 2)  # (b, head, t, rank)
                torch.testing.assert_close(getattr(side, field), expected, atol=2e-5, rtol=2e-5)
            expected = torch.tensor(recorded[f"{prefix}_{letter}dd"])[:, :, 0].transpose(1, 2)
            torch.testing.assert_close(side.gate, expected, atol=2e-5, rtol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", TORCH_RUNS)
def test_files_of_the_authors_keep_their_logits_loaded_and_converted_and_are_written_as_read(golden, name, tmp_path):
    root, out = golden / "B_torch" / name, tmp_path / "out"
    arrays, field = np.load(root / "io.npz"), TORCH_RUNS[name]
    convert_torch(root, out, max_shard_size="40KB")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = {path.name for path in out.glob("model-*.safetensors")}
    assert len(shards) > 2 and set(index["weight_map"].values()) == shards
    load_golden(out, arrays, field, caches=[])
    load_golden(root, arrays, field, caches=[], use_safetensors=True)
    model, tokens = load_golden(root, arrays, field, use_safetensors=False)
    if field == "logits_train_f32_winexact":
        loss = arrays["loss_train_f32_winexact"].item()
        assert model(tokens, labels=tokens).loss.item() == pytest.approx(loss, abs=1e-5)
    model.save_pretrained(tmp_path / "again", save_original_format=True)
    written, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "again", root))
    assert len(written) == len(model.state_dict())
    assert all(torch.equal(theirs[key].to(value.dtype), value) for key, value in written.items())


@pytest.mark.parametrize("name, form", [("C1", "npy"), ("C1", "zarr"), ("C2", "npz")])
def test_weights_of_pax_keep_their_logits_with_the_window_of_its_torch_code(golden, name, form, tmp_path):
    folder, config = golden / "C_pax", tmp_path / "config.json"
    source, arrays = folder / f"{name}_pax_weights.npz", np.load(folder / f"{name}_io.npz")
    values = json.loads((folder / f"{name}_info.json").read_text())["config"]
    options = {"config": config, "reference_logits": folder / f"{name}_io.npz"}
    config.write_text(json.dumps(values))
    if form == "npz":
        with pytest.raises(ValueError, match=rf"window of {values['window_size'] + 1}"):
            convert_pax(source, tmp_path / "narrow", **options)
        assert not (tmp_path / "narrow").exists()
    config.write_text(json.dumps(values | {"window_size": values["window_size"] + 1}))
    if form != "npz":
        weights, source = dict(np.load(source)), tmp_path / "source"
        source.mkdir()
    if form == "npy":
        for key, array in weights.items():
            np.save(source / f"{key}.npy", array)
    elif form == "zarr":
        write_checkpoint(source / "checkpoint_00000040" / "state", weights, metadata=False)
    report = convert_pax(source, tmp_path / "out", **options)
    load_golden(tmp_path / "out", arrays, caches=[])
    assert report.source["step"] == (40 if form == "zarr" else None)
    assert sum(reason == "padding of the vocabulary" for reason in report.ignored.values()) == 2
    assert "max abs" in report.verification["reference logits"]
    if form == "npz":
        with pytest.raises(ValueError, match="1e-09"):
            convert_pax(source, tmp_path / "strict", tolerance=1e-9, **options)
        assert not (tmp_path / "strict").exists()
