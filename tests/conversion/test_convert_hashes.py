"""The SHA-256 hashes of `conversion_report.json`: `dcformer verify FOLDER`, and conversions from a converted folder."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from orbax_writer import maxtext_leaves, write_checkpoint
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from dcformer.cli import app
from dcformer.conversion import convert_maxtext, convert_to_maxtext, convert_torch, verify_hashes


JAX = {"compose_activation": "gelu_pytorch_tanh", "norm_eps": 1e-5, "qk_norm_eps": 1e-5}
GATE = "model.layers.1.mlp.gate_proj.weight"
RUN_CHUNK = "3/state/params.decoder.layers.mlp_0.wo.kernel/0.0.0"


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A converted model in one file, in several, with unused arrays, and as a MaxText run."""
    folder = tmp_path_factory.mktemp("originals")
    tiny_model(**JAX).save_pretrained(folder / "model")
    convert_torch(folder / "model", folder / "single")
    convert_torch(folder / "model", folder / "sharded", max_shard_size="40KB")
    (folder / "off.yml").write_text("{window_size: [null, null], pre_compose: false, post_compose: false}")
    write_checkpoint(folder / "jax" / "7" / "state", maxtext_leaves(0, layers=2))
    convert_maxtext(folder / "jax", folder / "unused", train_config=folder / "off.yml")
    convert_to_maxtext(folder / "model", folder / "run", step=3)
    return folder


@pytest.fixture
def work(originals, tmp_path):
    shutil.copytree(originals, tmp_path, dirs_exist_ok=True)
    return tmp_path


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def flip_last_bit(path: Path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "name, unit", [("single", "tensors"), ("sharded", "tensors"), ("unused", "tensors"), ("run", "files")]
)
def test_a_folder_as_it_was_written_is_right(work, name, unit):
    report = json.loads((work / name / "conversion_report.json").read_text())
    told = []
    result = verify_hashes(work / name, progress=lambda total: (told.append(total), told.append)[1])
    assert result.same and result.problems == [] and result.unit == unit
    assert result.checked == len(report["tensors"] if unit == "tensors" else report["files"])
    assert told[0] == sum(told[1:]) == result.nbytes > 0


def change(folder, changed):
    tensors = weights_of(folder)
    changed(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def last_shard(folder):
    return max(folder.glob("model-*.safetensors"))


def drop_from_index(folder):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    lost = last_shard(folder).name
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != lost}
    path.write_text(json.dumps(index))


def tensor_in_two_files(folder):
    first = min(folder.glob("model-*.safetensors"))
    moved = load_file(last_shard(folder)) | dict([next(iter(load_file(first).items()))])
    save_file(moved, last_shard(folder))


CHANGES = {
    "flipped_bit": ("single", lambda f: flip_last_bit(f / "model.safetensors"), "model.safetensors", "SHA-256"),
    "flipped_bit_in_a_shard": ("sharded", lambda f: flip_last_bit(last_shard(f)), "model-", "SHA-256"),
    "flipped_bit_in_unused_arrays": (
        "unused",
        lambda f: flip_last_bit(f / "unused_leaves.safetensors"),
        "unused_leaves.safetensors",
        "SHA-256",
    ),
    "one_value": ("single", lambda f: change(f, lambda t: t[GATE][3, 5].add_(1)), "model.safetensors", GATE),
    "sign_of_zero": ("single", lambda f: change(f, lambda t: t[GATE].neg_()), "model.safetensors", GATE),
    "tensor_missing": ("single", lambda f: change(f, lambda t: t.pop(GATE)), "model.safetensors", f"{GATE} is missing"),
    "tensor_extra": (
        "single",
        lambda f: change(f, lambda t: t.update(extra=torch.zeros(2))),
        "model.safetensors",
        "extra is not in conversion_report.json",
    ),
    "tensor_of_another_shape": (
        "single",
        lambda f: change(f, lambda t: t.update({GATE: t[GATE].view(32, 48)})),
        "model.safetensors",
        f"{GATE} is float32 [32, 48], but float32 [48, 32]",
    ),
    "tensor_of_another_dtype": (
        "single",
        lambda f: change(f, lambda t: t.update({GATE: t[GATE].bfloat16()})),
        "model.safetensors",
        f"{GATE} is bfloat16",
    ),
    "tensor_in_two_files": ("sharded", tensor_in_two_files, "model-", "is in model-00001-of"),
    "file_missing": ("single", lambda f: (f / "model.safetensors").unlink(), "model.safetensors", "is missing"),
    "shard_missing": ("sharded", lambda f: last_shard(f).unlink(), "model-", "is missing"),
    "index_missing": ("sharded", lambda f: (f / "model.safetensors.index.json").unlink(), "", "no weights"),
    "index_damaged": ("sharded", lambda f: (f / "model.safetensors.index.json").write_text("{"), "", "index"),
    "index_lost_a_shard": ("sharded", drop_from_index, "model-", "does not name it"),
    "file_cut": (
        "single",
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]),
        "model.safetensors",
        "truncated",
    ),
    "file_empty": ("single", lambda f: (f / "model.safetensors").write_bytes(b""), "model.safetensors", "truncated"),
    "other_weights_first": (
        "sharded",
        lambda f: save_file({"other": torch.zeros(2)}, f / "model.safetensors"),
        "model.safetensors",
        "other is not in conversion_report.json",
    ),
    "run_chunk": (
        "run",
        lambda f: flip_last_bit(f / RUN_CHUNK),
        RUN_CHUNK,
        "SHA-256",
    ),
    "run_chunk_missing": (
        "run",
        lambda f: (f / RUN_CHUNK).unlink(),
        RUN_CHUNK,
        "is missing",
    ),
    "run_file_extra": ("run", lambda f: (f / "3" / "state" / "x").write_text(""), "3/state/x", "is not in"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_every_change_is_found_and_named(work, case):
    name, changed, file, words = CHANGES[case]
    changed(work / name)
    result = verify_hashes(work / name)
    assert not result.same
    found = [(problem.file, f"{problem.tensor} {problem.problem}") for problem in result.problems]
    assert any(where.startswith(file) and words in text for where, text in found), found
    called = CliRunner().invoke(app, ["verify", str(work / name)])
    assert called.exit_code == 1 and f"{len(found)} wrong" in called.output and called.stderr == ""


def test_the_command_says_what_was_checked(work):
    right = CliRunner().invoke(app, ["verify", str(work / "sharded")])
    assert right.exit_code == 0, right.output
    count = len(weights_of(work / "single"))
    assert f"SHA-256 of {count} tensors checked" in right.output and "all as in conversion_report.json" in right.output
    assert json.loads(CliRunner().invoke(app, ["verify", str(work / "sharded"), "--json"]).output)["same"] is True


REFUSED = {
    "no_report": (lambda f: (f / "conversion_report.json").unlink(), "has no conversion_report.json with hashes"),
    "report_not_json": (lambda f: (f / "conversion_report.json").write_text("{"), "is not valid JSON"),
    "report_nested_too_deep": (
        lambda f: (f / "conversion_report.json").write_text("[" * 100_000),
        "is not valid JSON",
    ),
    "report_without_hashes": (
        lambda f: (f / "conversion_report.json").write_text('{"step": 1, "leaves": []}'),
        "lists no hashes",
    ),
    "file_outside": (
        lambda f: (f / "conversion_report.json").write_text(
            '{"tensors": [{"parameter": "a", "file": "../model/model.safetensors", "sha256": ""}]}'
        ),
        "not in its own folder",
    ),
    "run_file_outside": (
        lambda f: (f / "conversion_report.json").write_text('{"files": {"../model/config.json": ""}}'),
        "not in its own folder",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_without_hashes_gets_one_sentence(work, case):
    changed, words = REFUSED[case]
    changed(work / "single")
    called = CliRunner().invoke(app, ["verify", str(work / "single")])
    assert called.exit_code == 1 and called.stdout == ""
    assert words in called.stderr and called.stderr.startswith("Error: ") and called.stderr.count("\n") == 1


def test_options_of_the_comparison_are_refused(work):
    called = CliRunner().invoke(app, ["verify", str(work / "single"), "--config", "x"])
    assert called.exit_code == 1 and "give B too" in called.stderr


CONVERTERS = {"hub": convert_torch, "to_maxtext": convert_to_maxtext}
both_ways = pytest.mark.parametrize("convert", CONVERTERS.values(), ids=CONVERTERS)


@both_ways
@pytest.mark.parametrize("case", ["flipped_bit", "flipped_bit_in_a_shard", "tensor_of_another_dtype", "one_value"])
def test_a_source_that_was_changed_is_refused(work, convert, case):
    name, changed, file, _ = CHANGES[case]
    changed(work / name)
    before = sorted(work.iterdir())
    with pytest.raises(ValueError, match=r"conversion_report.json: .*damaged, or changed.*remove") as error:
        convert(work / name, work / "out")
    assert file in str(error.value) and ".weight" in str(error.value)
    assert sorted(work.iterdir()) == before
    (work / name / "conversion_report.json").unlink()  # as the message says
    convert(work / name, work / "out")


def test_changed_unused_arrays_are_refused(work):
    flip_last_bit(work / "unused" / "unused_leaves.safetensors")
    with pytest.raises(ValueError, match=r"unused_leaves.safetensors has another SHA-256"):
        convert_to_maxtext(work / "unused", work / "out")


@both_ways
def test_a_report_of_other_weights_says_what_to_do(work, convert):
    """As after training a converted model and saving it to the same folder."""
    model = AutoModelForCausalLM.from_pretrained(work / "single")
    with torch.no_grad():
        model.lm_head.weight.add_(0.5)
    model.save_pretrained(work / "single")
    with pytest.raises(
        ValueError, match=r"lm_head.weight .*remove conversion_report.json if they were changed on purpose"
    ):
        convert(work / "single", work / "out")


def test_a_rewritten_folder_is_taken_and_has_the_right_hashes(work):
    report = convert_torch(work / "sharded", work / "out", dtype="bfloat16", max_shard_size="30KB")
    assert {record["dtype"] for record in report.tensors} == {"bfloat16"}
    assert verify_hashes(work / "out").same


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("damage", ["changed", "missing", "folder"])
def test_the_other_files_are_checked_too(work, file, damage):
    path = work / "single" / file
    text = path.read_text()
    path.unlink()
    if damage == "changed":
        path.write_text(text.replace("0", "1", 1))
    elif damage == "folder":
        path.mkdir()
    problems = verify_hashes(work / "single").problems
    assert [problem.file for problem in problems] == [file]


def test_files_that_to_maxtext_wrote_are_checked_as_they_are_converted(work):
    options = {"train_config": work / "run" / "train_config.yml"}
    convert_maxtext(work / "run", work / "before", **options)
    flip_last_bit(work / "run" / RUN_CHUNK)
    with pytest.raises(ValueError, match=r"mlp_0\.wo\.kernel/0\.0\.0 has another SHA-256"):
        convert_maxtext(work / "run", work / "after", **options)
    assert not (work / "after").exists()


@pytest.mark.parametrize("source", [{"step": "x"}, {"step": -5}, {"step": 3.5}, {"layers_per_block": 0}], ids=str)
def test_a_report_with_a_wrong_step_is_refused(work, source):
    report = json.loads((work / "single" / "conversion_report.json").read_text())
    report["source"] |= source
    (work / "single" / "conversion_report.json").write_text(json.dumps(report))
    with pytest.raises(ValueError, match=r"source in .*conversion_report.json is not what a conversion writes"):
        convert_to_maxtext(work / "single", work / "again")
