"""The `dcformer` command on the golden checkpoints."""

import json

import pytest
from typer.testing import CliRunner

from dcformer import __version__, conversion
from dcformer.cli import app


def call(*arguments, **options):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)


@pytest.fixture
def maxtext(fixtures):
    pytest.importorskip("tensorstore")
    return fixtures / "golden/A_jax/A1/checkpoints"


@pytest.fixture
def torch_folder(fixtures):
    return fixtures / "golden/B_torch/B1_dcformer_9769ae6"


@pytest.fixture
def pax(fixtures, tmp_path):
    config = json.loads((fixtures / "golden/C_pax/C2_info.json").read_text())["config"]
    # The golden logits were computed with one key more than window_size.
    path = tmp_path / "pax_config.json"
    path.write_text(json.dumps({**config, "window_size": config["window_size"] + 1}))
    return fixtures / "golden/C_pax/C2_pax_weights.npz", path


def test_version_and_help():
    assert call("--version").output.strip() == f"dcformer {__version__}"
    assert "to-maxtext" in call("convert", "--help").output


def test_maxtext_to_a_folder_that_verifies(maxtext, tmp_path):
    done = call("convert", "maxtext", maxtext, tmp_path / "model", "--step", 14000, "--max-shard-size", "20KB")
    assert done.exit_code == 0, done.output
    assert "│ default │" in done.output and "optimizer state" in done.output and "finite logits" in done.output
    assert str(tmp_path / "model") in done.output.splitlines()[-1]
    assert "0 shards resumed" in done.output.splitlines()[-1]
    same = call("verify", maxtext, tmp_path / "model")
    assert same.exit_code == 0 and "identical" in same.output
    assert call("inspect", tmp_path / "model").output.startswith("torch files, our names")


def test_pax(pax, tmp_path):
    weights, config = pax
    done = call("convert", "pax", weights, tmp_path / "model", "--config", config)
    assert done.exit_code == 0 and "padding of the vocabulary" in done.output
    assert "needs its configuration" in call("inspect", weights).output
    found = json.loads(call("inspect", weights, "--config", config, "--json").output)
    assert found["format"] == "PAX (flat .npz)" and found["architecture"] and found["note"] == ""
    assert call("verify", weights, tmp_path / "model", "--config", config).exit_code == 0


def test_torch_options(torch_folder, tmp_path):
    reference = tmp_path / "missing.npz"
    refused = call("convert", "torch", torch_folder, tmp_path / "model", "--reference-logits", reference)
    assert refused.exit_code == 1 and str(reference) in refused.stderr
    done = call("convert", "torch", torch_folder, tmp_path / "model", "--dtype", "bfloat16", "--no-verify")
    assert done.exit_code == 0 and "finite logits" not in done.output
    again = call("convert", "torch", torch_folder, tmp_path / "model")
    assert again.exit_code == 1 and "--force" in again.stderr
    assert call("convert", "torch", torch_folder, tmp_path / "model", "--force").exit_code == 0


def test_to_maxtext(maxtext, tmp_path):
    if not hasattr(conversion, "convert_to_maxtext"):
        pytest.skip("no conversion to MaxText in this version")
    assert call("convert", "maxtext", maxtext, tmp_path / "model").exit_code == 0
    done = call("convert", "to-maxtext", tmp_path / "model", tmp_path / "run", "--step", 7, "--approximate")
    assert done.exit_code == 0 and "step 7" in done.output


def test_inspect_reports_arrays_and_counts_the_optimizer(maxtext, torch_folder):
    found = json.loads(call("inspect", maxtext, "--json").output)
    stored = [path for path in (maxtext / "14000/state").iterdir() if path.name.startswith("opt_state.")]
    assert found["format"] == "MaxText (zarr 2)" and found["step"] == 14000
    assert found["optimizer_arrays"] == len(stored)
    assert not any(tensor["name"].startswith("opt_state") for tensor in found["tensors"])
    assert found["total_bytes"] == sum(tensor["nbytes"] for tensor in found["tensors"])
    assert sum(found["dtypes"].values()) == len(found["tensors"])
    assert json.loads(call("inspect", torch_folder, "--json").output)["format"] == "torch files, the authors' names"


def test_verify_tells_different_models_apart(maxtext, torch_folder):
    different = call("verify", maxtext, torch_folder, "--json")
    assert different.exit_code == 1 and json.loads(different.output)["verdict"] == "different"
    assert "different" in call("verify", maxtext, torch_folder).output


@pytest.mark.parametrize(
    "command", (("inspect",), ("verify", "b"), ("convert", "maxtext", "b"), ("convert", "torch", "b"))
)
def test_a_wrong_path_is_one_line_and_a_traceback_with_debug(command, tmp_path):
    words = [tmp_path / word if word == "b" else word for word in command]
    words.insert(2 if "convert" in command else 1, tmp_path / "nothing")
    failed = call(*words)
    assert failed.exit_code == 1 and failed.stdout == ""
    assert failed.stderr.startswith("Error: ") and failed.stderr.count("\n") == 1
    with pytest.raises(FileNotFoundError):
        call(*words, "--debug", catch_exceptions=False)


def test_interrupt_and_full_disk(torch_folder, tmp_path, monkeypatch):
    for error, status, words in ((KeyboardInterrupt(), 130, "finished shards"), (OSError(28, "no"), 1, "disk is full")):

        def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr("dcformer.conversion.convert_torch", fail)
        failed = call("convert", "torch", torch_folder, tmp_path / "model")
        assert failed.exit_code == status and words in failed.stderr and failed.stderr.count("\n") == 1


def test_the_output_names_the_checkpoint_and_the_step(maxtext, torch_folder, tmp_path):
    done = call("convert", "maxtext", maxtext, tmp_path / "model", "--no-verify")
    assert done.output.splitlines()[0] == f"MaxText (zarr 2), {maxtext / '14000' / 'state'}, step 14000"
    done = call("convert", "torch", torch_folder, tmp_path / "torch", "--no-verify")
    assert done.output.splitlines()[0] == f"torch files, {torch_folder}"


@pytest.mark.parametrize(
    "command, words",
    [
        (("convert", "torch", "{source}", "/"), "mount point"),
        (("convert", "torch", "{source}", "{out}", "--max-shard-size", "0" * 99), "max_shard_size"),
        (("convert", "to-maxtext", "{source}", "{out}", "--step", 10**25), "step must be between"),
        (("convert", "to-maxtext", "{source}", "/proc/nothing/out", "--approximate"), "cannot be created"),
        (("verify", "{source}"), "no conversion_report.json"),
        (("verify", "gs://bucket/model"), "gs://bucket/model"),
    ],
    ids=["root", "shard_size", "step", "proc", "hashes", "bucket"],
)
def test_what_cannot_be_done_is_one_line(torch_folder, tmp_path, command, words):
    failed = call(*(str(word).format(source=torch_folder, out=tmp_path / "out") for word in command))
    assert failed.exit_code == 1 and failed.stdout == "", failed.output
    assert failed.stderr.startswith("Error: ") and failed.stderr.count("\n") == 1 and words in failed.stderr
    assert not list(tmp_path.iterdir())


def test_a_shard_size_of_any_length_is_one_file(torch_folder, tmp_path):
    done = call("convert", "torch", torch_folder, tmp_path / "model", "--max-shard-size", "9" * 400, "--no-verify")
    assert done.exit_code == 0 and (tmp_path / "model" / "model.safetensors").is_file()


def test_help_of_verify_names_both_uses():
    text = call("verify", "--help").output
    assert "conversion_report.json" in text and "compare" in text
