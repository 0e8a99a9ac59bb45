"""Hashes of a report, comparison of two checkpoints, inspection, formats, and the code beside the weights."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from damage import contents, cut, flip_bit
from orbax_writer import maxtext_leaves, write_checkpoint
from pax_arrays import PAX_CONFIG, PAX_STATE, pax_arrays
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from dcformer.conversion import (
    REPORT_FILE,
    compare,
    convert_maxtext,
    convert_pax,
    convert_to_maxtext,
    convert_torch,
    detect_format,
    inspect_checkpoint,
    verify_hashes,
)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A checkpoint of every format, and conversions."""
    folder = tmp_path_factory.mktemp("originals")
    write_checkpoint(folder / "maxtext" / "7" / "state", maxtext_leaves(0, layers=2, optimizer=True))
    convert_maxtext(folder / "maxtext", folder / "model", max_shard_size="10KB")
    convert_to_maxtext(folder / "model", folder / "back")
    write_checkpoint(folder / "pax_zarr", {**pax_arrays(), **PAX_STATE})
    np.savez(folder / "pax.npz", **pax_arrays(), **PAX_STATE)
    (folder / "pax_npy").mkdir()
    for name, values in pax_arrays().items():
        np.save(folder / "pax_npy" / f"{name}.npy", values)
    (folder / "config.json").write_text(json.dumps(PAX_CONFIG))
    return folder


@pytest.fixture
def work(originals, tmp_path):
    shutil.copytree(originals, tmp_path, dirs_exist_ok=True)
    return tmp_path


def last_shard(folder):
    return max(folder.glob("model-*.safetensors"))


INDEX = "model.safetensors.index.json"
# A change of a converted folder, and the file that is reported; None: the last shard.
CHANGES = {
    "bit": (lambda folder: flip_bit(last_shard(folder)), None),
    "cut": (lambda folder: cut(last_shard(folder), 0.99), None),
    "missing": (lambda folder: last_shard(folder).unlink(), None),
    "another_file": (lambda folder: save_file({"a": torch.ones(1)}, folder / "model.safetensors"), "model.safetensors"),
    "index": (lambda folder: (folder / INDEX).write_text("{}"), INDEX),
    "torch_file": (lambda folder: (folder / "pytorch_model.bin").write_bytes(b""), "pytorch_model.bin"),
    "config": (lambda folder: (folder / "config.json").write_text("{}"), "config.json"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_every_change_is_reported_and_the_changed_folder_refused(work, case):
    change, file = CHANGES[case]
    file = file or last_shard(work / "model").name
    assert verify_hashes(work / "model").same
    change(work / "model")
    assert list(verify_hashes(work / "model").problems) == [file]
    if case == "config":  # an edited configuration is the user's
        return
    for convert in (convert_torch, convert_to_maxtext):
        with pytest.raises(ValueError, match=file):
            convert(work / "model", work / "out")
    assert not (work / "out").exists()


def test_changed_files_of_a_run_are_reported_and_refused(work):
    counts = []
    check = verify_hashes(work / "back", progress=lambda total: (counts.append(total), counts.append)[1])
    assert check.same and counts[0] == sum(counts[1:]) == check.nbytes
    array = work / "back" / "7" / "state" / "params.decoder.layers.mlp_1.wo.kernel"
    flip_bit(array / "0.0.0")
    (array / "extra").write_text("")
    shutil.copytree(array, work / "back" / "7" / "state2")  # of another item: it is reported, and not converted
    problems = verify_hashes(work / "back").problems
    assert [Path(file).name for file in problems][:2] == ["0.0.0", "extra"] and len(problems) == 5
    with pytest.raises(ValueError, match="mlp_1"):
        convert_maxtext(work / "back", work / "out")
    shutil.rmtree(array)
    shutil.copytree(work / "back" / "7" / "state2", array)
    flip_bit(array / "0.0.0")
    (array / "extra").unlink()
    convert_maxtext(work / "back", work / "out")


def test_a_step_of_a_report_that_is_no_number_is_refused(work):
    path = work / "model" / REPORT_FILE
    report = json.loads(path.read_text())
    before = sorted(work.rglob("*"))
    for step in ("../../x", "/tmp/x", "7", -1, 7.0, True, 2**31, [7]):
        path.write_text(json.dumps({**report, "source": {**report["source"], "step": step}}))
        with pytest.raises(ValueError, match=f"step must be a whole number .* got {re.escape(repr(step))}"):
            convert_to_maxtext(work / "model", work / "out")
    assert sorted(work.rglob("*")) == before
    assert convert_to_maxtext(work / "model", work / "out", step=7).step == 7


DIGEST = {"size": 1, "sha256": "0" * 64}
REPORTS = [
    ({"config.json": "0" * 64}, "for every file its size and sha256"),  # an older one
    ({"config.json": {**DIGEST, "size": "1"}}, "for every file its size and sha256"),
    (["config.json"], "for every file its size and sha256"),
    ({"../config.json": DIGEST}, "must stay inside its folder, got '../config.json'"),
    ({"/etc/passwd": DIGEST}, "must stay inside its folder, got '/etc/passwd'"),
]


def test_a_report_with_other_entries_is_refused(work):
    path = work / "model" / REPORT_FILE
    report = json.loads(path.read_text())
    for files, words in REPORTS:
        path.write_text(json.dumps(report | {"files": files}))
        for use in (
            lambda: verify_hashes(work / "model"),
            lambda: convert_torch(work / "model", work / "out"),
            lambda: convert_torch(work / "maxtext", work / "model", force=True),
        ):
            with pytest.raises(ValueError, match=re.escape(words)):
                use()


def test_a_folder_without_a_report_is_not_checked(work):
    for path, words in (("maxtext", "no conversion_report"), ("nowhere", "no folder .*nowhere'; check the path")):
        with pytest.raises(FileNotFoundError, match=words):
            verify_hashes(work / path)
    with pytest.raises(ValueError, match="local folders, got 'gs://bucket'"):
        verify_hashes("gs://bucket")
    (work / "model" / REPORT_FILE).unlink()
    flip_bit(last_shard(work / "model"))
    convert_torch(work / "model", work / "out", verify=False)


@pytest.mark.parametrize("b", ["maxtext", "back"])
def test_the_same_model_in_two_formats(originals, b):
    comparison = compare(originals / "model", originals / b)
    assert comparison.same and comparison.result == "identical" and comparison.logits.max_abs == 0


def test_rounded_changed_and_broken_models_are_distinguished_and_weights_that_are_not_finite_named(work):
    convert_torch(work / "model", work / "rounded", dtype="bfloat16")
    assert compare(work / "model", work / "rounded").result == "same up to rounding"
    path = work / "rounded" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    comparison = compare(work / "model", work / "rounded")
    assert not comparison.same and comparison.tensors["model.norm.weight"] > 0.9 and comparison.logits.max_abs > 0
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    comparison = compare(work / "rounded", work / "rounded")
    assert comparison.same and comparison.logits is None and comparison.note.endswith("is not finite")
    assert not compare(work / "model", work / "rounded").same
    (work / "rounded" / REPORT_FILE).unlink()
    report = convert_torch(work / "rounded", work / "out", verify=False)
    assert "model.norm.weight" in report.verification["values"]
    with pytest.raises(ValueError, match="scale holds NaN or infinity"):
        convert_to_maxtext(work / "rounded", work / "run")
    tiny_model(hidden_size=64).save_pretrained(work / "wider")
    comparison = compare(work / "model", work / "wider")
    assert not comparison.same and comparison.shapes and comparison.config["hidden_size"] == [16, 64]


def test_settings_that_differ_are_a_difference(work):
    shutil.copytree(work / "model", work / "other")
    config = work / "other" / "config.json"
    changed = {"sliding_window": 5, "norm_eps": 0.5, "compose_pre": False, "max_position_embeddings": 77}
    config.write_text(json.dumps({**json.loads(config.read_text()), **changed, "bos_token_id": 3}))
    comparison = compare(work / "model", work / "other")
    assert not comparison.same and not comparison.tensors
    before = {"sliding_window": 256, "norm_eps": 1e-5, "compose_pre": True, "max_position_embeddings": 2048}
    assert comparison.config == {name: [before[name], changed[name]] for name in before}


FORMATS = {
    "maxtext": ("maxtext", "MaxText (zarr 2)"),
    "maxtext/7/state": ("maxtext", "MaxText (zarr 2)"),
    "pax_zarr": ("pax", "PAX (zarr 2)"),
    "pax.npz": ("pax", "PAX (flat .npz)"),
    "pax_npy": ("pax", "PAX (folder of .npy files)"),
    "model": ("torch", "torch files, our names"),
}


@pytest.mark.parametrize("path", FORMATS)
def test_formats_are_detected_and_inspected(originals, path):
    name, format = FORMATS[path]
    assert detect_format(originals / path) == name
    config = {"config": originals / "config.json"} if name == "pax" else {}
    inspection = inspect_checkpoint(originals / path, **config)
    assert inspection.format == format and not inspection.note
    layers = next(origin.value for origin in inspection.architecture if origin.field == "num_hidden_layers")
    assert layers == 2 and inspection.total_parameters > 0
    assert inspection.total_bytes == sum(tensor.nbytes for tensor in inspection.tensors)
    assert json.loads(json.dumps(inspection.to_dict(), default=str))["step"] == (7 if name == "maxtext" else None)
    if path in ("pax_zarr", "pax.npz"):
        assert (inspection.optimizer_arrays, inspection.state_arrays) == (1, ["step"])
    if name == "maxtext":
        assert inspection.optimizer_arrays == 2 * len(inspection.tensors) + 1 and inspection.state_arrays == ["step"]


def test_a_report_gives_size_and_sha256_of_every_other_file_and_all_have_the_usual_mode(originals):
    content = contents(originals / "model")
    files = json.loads(content.pop(REPORT_FILE))["files"]
    assert files == {
        name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in content.items()
    }
    os.umask(mask := os.umask(0))
    assert {path.stat().st_mode & 0o777 for path in (originals / "model").iterdir()} == {0o666 & ~mask}


def test_pax_is_listed_without_its_configuration_and_converted_without_its_training_state(originals, tmp_path):
    config = originals / "config.json"
    report = convert_pax(originals / "pax.npz", tmp_path / "model", config=config, verify=False)
    assert set(PAX_STATE) <= report.ignored.keys()
    inspection = inspect_checkpoint(originals / "pax.npz")
    assert "--config" in inspection.note and not inspection.architecture
    assert len(inspection.tensors) == len(pax_arrays())
    with pytest.raises(FileNotFoundError, match="nowhere"):
        detect_format(tmp_path / "nowhere")


def test_the_code_is_written_if_asked_and_not_passed_on(originals, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    convert_torch(originals / "model", folder, with_code=True, verify=False)
    assert "trust_remote_code=True" in (folder / "README.md").read_text()
    assert verify_hashes(folder).same
    references = json.loads((folder / "config.json").read_text())["auto_map"]
    assert {"AutoConfig", "AutoModelForCausalLM"} <= references.keys()
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    model_class = get_class_from_dynamic_module(references["AutoModelForCausalLM"], str(folder))
    assert model_class.__module__.startswith("transformers_modules") and model_class.__name__ == "DCFormerForCausalLM"
    assert not any(re.search(r"^\s*(from|import) dcformer", path.read_text(), re.M) for path in folder.glob("*.py"))
    convert_torch(folder, tmp_path / "plain", verify=False)
    assert "auto_map" not in json.loads((tmp_path / "plain" / "config.json").read_text())
