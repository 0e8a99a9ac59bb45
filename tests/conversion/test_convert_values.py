"""NaN and infinity in weights, values and options out of range, and configurations that contradict the weights."""

import json

import numpy as np
import pytest
import torch
from orbax_writer import BFLOAT16, maxtext_leaves, write_checkpoint
from safetensors.torch import load_file
from test_convert_errors import PAX_CONFIG, pax_arrays
from tiny_models import tiny_model
from typer.testing import CliRunner

from dcformer.cli import app
from dcformer.conversion import compare, convert_maxtext, convert_pax, convert_to_maxtext, convert_torch
from dcformer.conversion.convert import parse_size
from dcformer.conversion.tensor_bytes import is_finite


JAX = {"compose_activation": "gelu_pytorch_tanh", "norm_eps": 1e-5, "qk_norm_eps": 1e-5}
EMBEDDING = "model.embed_tokens.weight"


def save(folder, changed=lambda tensors: None, **overrides):
    model = tiny_model(**{**JAX, **overrides})
    with torch.no_grad():
        changed(model.state_dict())
    model.save_pretrained(folder)
    return folder


def bad_row(tensors):
    tensors[EMBEDDING][50, 3:] = float("nan")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_one_value_that_is_not_finite_is_seen_wherever_it_is(dtype, bad):
    values = torch.randn(1003).to(dtype)
    values[7] = torch.finfo(dtype).max
    assert is_finite(values)
    for position in range(len(values)):
        exact = values[position].clone()
        values[position] = bad
        assert not is_finite(values), position
        values[position] = exact


def test_values_without_numbers_are_finite():
    assert is_finite(torch.zeros(0)) and is_finite(torch.tensor([1, 2]))


@pytest.mark.parametrize("convert", [convert_torch, convert_to_maxtext], ids=["torch", "to_maxtext"])
def test_a_row_that_the_check_forward_does_not_read_is_refused(tmp_path, convert):
    save(tmp_path / "model", bad_row)
    with pytest.raises(ValueError, match=r"embed_tokens.weight has 29 such values, the first at \[50, 3\]; pass --no-"):
        convert(tmp_path / "model", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    convert(tmp_path / "model", tmp_path / "out", verify=False)


def test_without_verification_the_report_names_what_is_not_finite(tmp_path):
    save(tmp_path / "model", bad_row)
    report = convert_torch(tmp_path / "model", tmp_path / "out", verify=False)
    assert report.verification["values"] == f"NaN or infinity in {EMBEDDING}"
    assert f"NaN or infinity in {EMBEDDING}" in (tmp_path / "out" / "README.md").read_text()
    assert load_file(tmp_path / "out" / "model.safetensors")[EMBEDDING].isnan().sum() == 29


def test_an_interrupted_run_without_verification_is_not_taken_over_unchecked(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    save(tmp_path / "model", bad_row)
    with monkeypatch.context() as patch:
        patch.setattr("dcformer.conversion.convert.write_model_card", interrupt)
        with pytest.raises(KeyboardInterrupt):
            convert_torch(tmp_path / "model", tmp_path / "out", verify=False)
    assert (tmp_path / ".out.partial").exists()
    with pytest.raises(ValueError, match="NaN or infinity"):
        convert_torch(tmp_path / "model", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "name, index, parameter",
    [
        ("params.token_embedder.embedding", (9, 1), f"{EMBEDDING} has 1 such value, at [9, 1]"),
        ("params.decoder.logits_dense.kernel", (1, 9), "lm_head.weight has 1 such value, at [9, 1]"),
        (
            "params.decoder.layers.self_attention_1.AttentionOp_0.dyn_w_proj.qkw",
            (0, 0, 2, 3, 1, 2),
            "layer 1 hold NaN or infinity, as after a run that diverged: "
            "model.layers.1.self_attn.compose.low_rank_weight has 1 such value, at [0, 2, 3, 1, 2]",
        ),
    ],
    ids=["embedding", "head", "bfloat16"],
)
@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
@pytest.mark.parametrize("chunks", [None, lambda name, shape: tuple(-(-n // 2) for n in shape)], ids=["whole", "cut"])
def test_maxtext_arrays_that_are_not_finite_are_refused(tmp_path, name, index, parameter, dtype, chunks):
    leaves = maxtext_leaves(0, layers=2)
    leaves[name][index] = np.inf if leaves[name].dtype == BFLOAT16 else np.nan
    write_checkpoint(tmp_path / "run" / "7" / "state", leaves, chunks=chunks)
    with pytest.raises(ValueError, match="NaN or infinity") as error:
        convert_maxtext(tmp_path / "run", tmp_path / "out", dtype=dtype)
    assert parameter in str(error.value)


def test_pax_arrays_that_are_not_finite_are_refused(tmp_path):
    arrays = pax_arrays()
    arrays["state.mdl_vars.params.lm.embedding_lookup.emb_var"][29, 2] = np.inf
    np.savez(tmp_path / "pax.npz", **arrays)
    (tmp_path / "config.json").write_text(json.dumps(PAX_CONFIG))
    with pytest.raises(ValueError, match=r"embed_tokens.weight has 1 such value, at \[29, 2\]"):
        convert_pax(tmp_path / "pax.npz", tmp_path / "out", config=tmp_path / "config.json")


@pytest.mark.parametrize("convert", [convert_torch, convert_to_maxtext], ids=["torch", "to_maxtext"])
def test_a_configuration_of_quantised_weights_is_refused(tmp_path, convert):
    path = save(tmp_path / "model") / "config.json"
    values = json.loads(path.read_text())
    path.write_text(
        json.dumps({**values, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}})
    )
    with pytest.raises(ValueError, match=r"model has a quantization_config, and the weights are not"):
        convert(tmp_path / "model", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "size, nbytes",
    [
        ("4GB", 4 * 10**9),
        ("4GiB", 2**32),
        ("1.5 kb", 1500),
        ("7", 7),
        (8, 8),
        ("9" * 400, 2**62),
        ("9" * 5000 + "TB", 2**62 * 10**12),
    ],
    ids=["GB", "GiB", "KB", "bytes", "int", "400 digits", "5000 digits"],
)
def test_sizes_of_any_length(size, nbytes):
    assert parse_size(size) == nbytes


@pytest.mark.parametrize("size", ["1e9", "inf", "nan", "4XB", "0.1", "", "٤GB", "-1"])
def test_sizes_that_are_none(size):
    with pytest.raises(ValueError, match="max_shard_size must be a size such as 4GB"):
        parse_size(size)


@pytest.mark.parametrize("step", [-1, 2**31, 10**25])
def test_steps_that_do_not_fit_are_refused(tmp_path, step):
    with pytest.raises(ValueError, match=f"between 0 and 2147483647, got {step}"):
        convert_to_maxtext(tmp_path, tmp_path / "out", step=step)


def test_a_step_in_a_report_that_does_not_fit_is_not_used(tmp_path):
    save(tmp_path / "model")
    for step in (10**25, None):
        (tmp_path / "model" / "conversion_report.json").write_text(json.dumps({"source": {"step": step}}))
        assert convert_to_maxtext(tmp_path / "model", tmp_path / f"out {step}").step == 0


@pytest.mark.parametrize("step", [-3, "five", 2.5, True])
def test_a_step_in_a_report_that_is_none_is_refused(tmp_path, step):
    save(tmp_path / "model")
    (tmp_path / "model" / "conversion_report.json").write_text(json.dumps({"source": {"step": step}}))
    with pytest.raises(ValueError, match=r"source in .*conversion_report.json is not what a conversion writes"):
        convert_to_maxtext(tmp_path / "model", tmp_path / "out")


def test_models_that_compute_nan_are_compared_by_their_tensors(tmp_path):
    save(tmp_path / "good")
    save(tmp_path / "bad", lambda tensors: tensors["model.layers.1.mlp.down_proj.weight"].fill_(float("nan")))
    call = lambda *names: CliRunner().invoke(app, ["verify", *(str(tmp_path / name) for name in names)])  # noqa: E731
    different = call("good", "bad")
    assert different.exit_code == 1 and different.stderr == ""
    assert "model.layers.1.mlp.down_proj.weight" in different.stdout and "different" in different.stdout
    assert "Logits: not compared" in different.stdout and "bad: The output of layer 1 is not finite" in different.stdout
    assert "--no-verify" not in different.stdout
    same = call("bad", "bad")
    assert same.exit_code == 0 and "identical" in same.stdout and "not compared" in same.stdout


def test_infinities_in_a_head_are_compared(tmp_path):
    save(tmp_path / "a", lambda tensors: tensors["lm_head.weight"][3].fill_(float("inf")))

    def also_changed(tensors):
        tensors["lm_head.weight"][3] = float("inf")
        tensors["lm_head.weight"][4, 0] += 0.5

    save(tmp_path / "b", also_changed)
    result = compare(tmp_path / "a", tmp_path / "b")
    assert result.verdict == "different" and result.logits is None and "logits are not finite" in result.note
    assert result.tensors == {"lm_head.weight": pytest.approx(0.5, abs=1e-6)}
