"""Logits of the reference implementations: the authors' JAX runs (A) and their torch checkpoints (B).

Float32 against float32: the references differ from a float64 run by up to 2.2e-5, so 2e-4 is asked everywhere.
"""

import numpy as np
import pytest
import torch
from golden_runs import JAX_RUNS, TOLERANCE, TORCH_RUNS
from jax_loader import load_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache


CACHES = {
    "dynamic": lambda model, length: DynamicCache(config=model.config),
    "dynamic_without_config": lambda model, length: DynamicCache(),
    "static": lambda model, length: StaticCache(config=model.config, max_cache_len=length + 3),
}


def logits_in_pieces(model, tokens, cache, piece):
    """Logits of a sequence fed `piece` tokens at a time."""
    logits = []
    for start in range(0, tokens.shape[1], piece):
        outputs = model(tokens[:, start : start + piece], cache=cache, use_cache=True)
        logits.append(outputs.logits)
    return torch.cat(logits, dim=1)


def load_jax(fixtures, name):
    root = fixtures / "golden" / "A_jax"
    model = load_model(root / name, root / JAX_RUNS[name])
    arrays = np.load(root / name / "io.npz")
    return model, torch.tensor(arrays["tokens"]).long(), torch.tensor(arrays["logits"])


def load_torch(fixtures, name, **kwargs):
    """The model (with its loading report if `output_loading_info`), the tokens and the logits expected."""
    folder = fixtures / "golden" / "B_torch" / name
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **kwargs)
    arrays = np.load(folder / "io.npz")
    return loaded, torch.tensor(arrays["tokens"]).long(), torch.tensor(arrays[TORCH_RUNS[name]])


@torch.no_grad()
@pytest.mark.parametrize("name", JAX_RUNS)
def test_jax_logits_in_one_forward(fixtures, name):
    model, tokens, expected = load_jax(fixtures, name)
    torch.testing.assert_close(model(tokens).logits, expected, atol=TOLERANCE, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("piece, cache", [(1, "static"), (3, "dynamic_without_config")])
@pytest.mark.parametrize("name", ["A1", "A2", "A3", "A4", "A5", "A6"])
def test_jax_logits_through_a_cache(fixtures, name, cache, piece):
    model, tokens, expected = load_jax(fixtures, name)
    logits = logits_in_pieces(model, tokens, CACHES[cache](model, tokens.shape[1]), piece)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@torch.no_grad()
def test_jax_loss_is_the_mean_of_the_golden_token_losses(fixtures):
    model, tokens, _ = load_jax(fixtures, "A1")
    expected = np.load(fixtures / "golden" / "A_jax" / "A1" / "io.npz")["nll_next"].mean()
    assert model(tokens, labels=tokens).loss.item() == pytest.approx(expected, abs=1e-5)


@torch.no_grad()
def test_compose_weights_of_the_first_layer(fixtures):
    """Slot order and normalisation, against the intermediates that JAX recorded."""
    model, _, _ = load_jax(fixtures, "A1")
    recorded = np.load(fixtures / "golden" / "A_jax" / "A1" / "layer0.npz")
    weights = model.model.layers[0].self_attn.compose(torch.tensor(recorded["attn_in"]))
    for stage, prefix in zip(weights, ("pre", "post")):
        for side, letter in ((stage.query, "q"), (stage.key, "k")):
            for field, name in (("w1", f"{letter}w1"), ("w2", f"{letter}w2")):
                expected = torch.tensor(recorded[f"{prefix}_{name}"])[:, :, 0].permute(0, 3, 1, 2)  # (b, head, t, rank)
                torch.testing.assert_close(getattr(side, field), expected, atol=2e-5, rtol=2e-5)
            expected = torch.tensor(recorded[f"{prefix}_{letter}dd"])[:, :, 0].transpose(1, 2)
            torch.testing.assert_close(side.gate, expected, atol=2e-5, rtol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("file_format", ["bin", "safetensors"])
@pytest.mark.parametrize("name", TORCH_RUNS)
def test_authors_files_load_without_a_report_and_match(fixtures, name, file_format):
    (model, info), tokens, expected = load_torch(
        fixtures, name, use_safetensors=file_format == "safetensors", output_loading_info=True
    )
    assert not any(info.values()), info
    torch.testing.assert_close(model(tokens).logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", TORCH_RUNS)
def test_authors_files_are_written_as_they_were_read(fixtures, name, tmp_path):
    model, _, _ = load_torch(fixtures, name)
    model.save_pretrained(tmp_path, save_original_format=True)
    written = load_file(tmp_path / "model.safetensors")
    theirs = load_file(fixtures / "golden" / "B_torch" / name / "model.safetensors")
    assert len(written) == len(model.state_dict())
    assert all(torch.equal(theirs[key].to(value.dtype), value) for key, value in written.items())


@torch.no_grad()
@pytest.mark.parametrize("piece, cache", [(1, "dynamic"), (4, "static")])
@pytest.mark.parametrize("name", TORCH_RUNS)
def test_authors_files_through_a_cache(fixtures, name, cache, piece):
    model, tokens, expected = load_torch(fixtures, name)
    logits = logits_in_pieces(model, tokens, CACHES[cache](model, tokens.shape[1]), piece)
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@torch.no_grad()
def test_authors_training_loss(fixtures):
    model, tokens, _ = load_torch(fixtures, "B3_dcformer_head")
    arrays = np.load(fixtures / "golden" / "B_torch" / "B3_dcformer_head" / "io.npz")
    assert model(tokens, labels=tokens).loss.item() == pytest.approx(float(arrays["loss_train_f32_winexact"]), abs=1e-5)
