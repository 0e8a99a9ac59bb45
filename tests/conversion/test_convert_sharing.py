"""Conversions for sharing: the code beside the weights, the notes in their headers, the model card."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from orbax_writer import maxtext_leaves, write_checkpoint
from safetensors import safe_open
from tiny_models import tiny_model
from typer.testing import CliRunner

import dcformer
from dcformer.cli.main import app
from dcformer.conversion import convert_maxtext, convert_torch, inspect_checkpoint, verify_hashes
from dcformer.conversion.shard_writer import ShardWriter


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    leaves = maxtext_leaves(0, layers=2, embed=32, heads=4, channels=8, mlp=64, vocab=64)
    write_checkpoint(folder / "checkpoints" / "7" / "state", leaves)
    return folder


def headers(folder: Path) -> list[dict[str, str]]:
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found.append(file.metadata())
    return found


def auto_map(folder: Path) -> dict[str, str] | None:
    return json.loads((folder / "config.json").read_text()).get("auto_map")


def test_the_code_is_written_if_asked_and_is_part_of_what_is_checked(run, tmp_path):
    convert_maxtext(run, tmp_path / "plain")
    convert_maxtext(run, tmp_path / "model", with_code=True)
    assert auto_map(tmp_path / "plain") is None and not list((tmp_path / "plain").glob("*.py"))
    assert auto_map(tmp_path / "model")["AutoModelForCausalLM"] == "modeling_dcformer.DCFormerForCausalLM"
    assert "trust_remote_code=True" in (tmp_path / "model" / "README.md").read_text()
    assert verify_hashes(tmp_path / "model").same
    with (tmp_path / "model" / "dcmha.py").open("a") as file:
        file.write("\n# changed\n")
    assert [problem.file for problem in verify_hashes(tmp_path / "model").problems] == ["dcmha.py"]


def test_force_replaces_a_folder_with_its_code_and_no_other_files(run, tmp_path):
    folder = tmp_path / "model"
    convert_maxtext(run, folder, with_code=True)
    convert_maxtext(run, folder, force=True)
    assert not list(folder.glob("*.py"))
    convert_maxtext(run, folder, with_code=True, force=True)
    (folder / "my_code.py").write_text("mine = 1\n")
    with pytest.raises(FileExistsError, match=r"my_code\.py"):
        convert_maxtext(run, folder, force=True)
    assert (folder / "my_code.py").is_file() and (folder / "dcmha.py").is_file()


def test_a_folder_with_its_code_passes_it_on(run, tmp_path):
    convert_maxtext(run, tmp_path / "model", with_code=True)
    convert_torch(tmp_path / "model", tmp_path / "half", dtype="bfloat16")
    assert auto_map(tmp_path / "half") == auto_map(tmp_path / "model") and (tmp_path / "half" / "dcmha.py").is_file()


def test_the_command_takes_the_option(run, tmp_path):
    words = ["convert", "maxtext", str(run), str(tmp_path / "model"), "--with-code"]
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 0, ended.output
    assert (tmp_path / "model" / "modeling_dcformer.py").is_file()


def test_every_header_has_the_version_and_one_checksum_of_the_source(run, tmp_path):
    report = convert_maxtext(run, tmp_path / "model", max_shard_size="40KB")
    found = headers(tmp_path / "model")
    checksum = report.source["sha256"]
    assert len(found) > 2 and len(checksum) == 64 and set(checksum) != {"0"}
    expected = {"format": "pt", "dcformer_version": dcformer.__version__, "source_sha256": checksum}
    assert all(header == expected for header in found)
    assert json.loads((tmp_path / "model" / "conversion_report.json").read_text())["source"]["sha256"] == checksum
    assert checksum in (tmp_path / "model" / "README.md").read_text()


def test_the_checksum_is_that_of_the_values_wherever_they_lie(run, tmp_path):
    expected = convert_maxtext(run, tmp_path / "a", verify=False).source["sha256"]
    shutil.copytree(run, tmp_path / "elsewhere")
    moved = convert_maxtext(tmp_path / "elsewhere", tmp_path / "b", dtype="bfloat16", max_shard_size="40KB")
    assert moved.source["sha256"] == expected
    leaves = maxtext_leaves(0, layers=2, embed=32, heads=4, channels=8, mlp=64, vocab=64)
    name = max(leaves, key=lambda name: leaves[name].size)
    leaves[name].flat[0] += 1
    write_checkpoint(tmp_path / "other" / "checkpoints" / "7" / "state", leaves)
    assert convert_maxtext(tmp_path / "other", tmp_path / "c", verify=False).source["sha256"] != expected


def test_a_conversion_that_stopped_before_its_last_note_ends_with_the_same_checksum(run, tmp_path, monkeypatch):
    expected = convert_maxtext(run, tmp_path / "whole", max_shard_size="40KB").source["sha256"]
    note = ShardWriter.note_source

    def stopping(self):
        note(self)
        # As after a power cut: the headers are there, and a line of what was read is lost.
        reads = self._progress / "read.jsonl"
        reads.write_text("".join(reads.read_text().splitlines(keepends=True)[1:]) + '["half a li')
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "note_source", stopping)
        with pytest.raises(KeyboardInterrupt):
            convert_maxtext(run, tmp_path / "model", max_shard_size="40KB")
    report = convert_maxtext(run, tmp_path / "model", max_shard_size="40KB")
    assert report.resumed_shards == len(headers(tmp_path / "model")) and report.source["sha256"] == expected
    for path in (tmp_path / "whole").glob("*.safetensors"):
        assert (tmp_path / "model" / path.name).read_bytes() == path.read_bytes()


def test_inspect_shows_what_the_header_notes(run, tmp_path):
    checksum = convert_maxtext(run, tmp_path / "model", verify=False).source["sha256"]
    notes = {"dcformer_version": dcformer.__version__, "source_sha256": checksum}
    assert inspect_checkpoint(tmp_path / "model").notes == notes
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "model")]).output
    assert f"dcformer_version {dcformer.__version__}, source_sha256 {checksum}" in shown
    assert inspect_checkpoint(run).notes == {}


def test_the_card_says_where_the_weights_come_from(run, tmp_path):
    convert_maxtext(run, tmp_path / "model")
    text = (tmp_path / "model" / "README.md").read_text()
    assert ModelCard(text).data.pipeline_tag == "text-generation"
    for part in ("## Where the weights come from", "Training step: 7", "## Checks after the conversion", "[dcformer]"):
        assert part in text
    assert "[More Information" not in text


def test_licence_and_base_model_of_the_source_are_kept(tmp_path):
    torch.manual_seed(0)
    tiny_model().save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "README.md").write_text("---\nlicense: mit\nbase_model: you/it\n---\n# It\n")
    convert_torch(tmp_path / "source", tmp_path / "model")
    data = ModelCard.load(tmp_path / "model" / "README.md").data
    assert (data.license, data.base_model) == ("mit", "you/it")
