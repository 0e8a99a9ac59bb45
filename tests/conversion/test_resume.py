"""Interrupted conversions go on from finished shards and end with the same bytes; replacing what is there."""

import contextlib
import errno
import itertools
import json
import os
import shutil
from pathlib import Path

import command_line
import pytest
import torch
from damage import contents, cut, flip_bit, interrupted, partial_of
from orbax_writer import maxtext_leaves, write_checkpoint
from safetensors.torch import load_file
from tiny_models import tiny_model

from dcformer.common.files import LockHeldError, file_lock
from dcformer.conversion import REPORT_FILE, Destination, convert_maxtext, convert_to_maxtext, convert_torch, to_maxtext


SHARDS = {"max_shard_size": "50KB", "verify": False}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    leaves = maxtext_leaves(0, embed=32, channels=8, mlp=64, vocab=64)
    write_checkpoint(folder / "checkpoints" / "7" / "state", leaves)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ours")
    jax = {"compose_activation": "gelu_pytorch_tanh", "norm_eps": 1e-5, "qk_norm_eps": 1e-5}
    tiny_model("all_branches", num_hidden_layers=4, **jax).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(run, tmp_path_factory):
    destination = tmp_path_factory.mktemp("whole") / "model"
    assert convert_maxtext(run, destination, **SHARDS).resumed_shards == 0
    assert len(list(destination.glob("*.safetensors"))) > 4
    return contents(destination)


@pytest.fixture
def unfinished(run, tmp_path):
    """A destination with two finished shards beside it."""
    destination = tmp_path / "model"
    with interrupted(after=2):
        convert_maxtext(run, destination, **SHARDS)
    assert not destination.exists()
    return destination


def test_resumes_from_finished_shards(run, expected, unfinished):
    (partial_of(unfinished) / "model" / "config.json").write_text("of an earlier run that ended before the renaming")
    counts = []
    report = convert_maxtext(run, unfinished, progress=lambda total: (counts.append(total), counts.append)[1], **SHARDS)
    assert report.resumed_shards == 2
    assert counts[0] == sum(counts[1:]) == report.source_bytes
    assert contents(unfinished) == expected
    assert not partial_of(unfinished).exists()


DAMAGES = {"flipped": flip_bit, "cut": lambda path: cut(path, 0.99), "missing": Path.unlink}
NOTES = {
    "changed": lambda path: path.write_text(path.read_text().replace('rounding_error": 0.0', 'rounding_error": 9.0')),
    "of_another": lambda path: path.write_text(path.read_text().replace('"fingerprint": "', '"fingerprint": "0')),
    "cut": cut,
    "garbage": lambda path: path.write_bytes(b"\xff\x00"),
    "missing": Path.unlink,
}


@pytest.mark.parametrize(
    ("files", "damage", "resumed"),
    [
        *(pytest.param("model/*.safetensors", damage, 1, id=f"shard-{how}") for how, damage in DAMAGES.items()),
        *(pytest.param("notes.json", damage, 0, id=f"notes-{how}") for how, damage in NOTES.items()),
    ],
)
def test_what_is_damaged_of_an_unfinished_conversion_is_written_again(
    run, expected, unfinished, files, damage, resumed
):
    damage(min(partial_of(unfinished).glob(files)))
    assert convert_maxtext(run, unfinished, **SHARDS).resumed_shards == resumed
    assert contents(unfinished) == expected


def test_a_source_replaced_with_its_time_kept_starts_again(tmp_path):
    for seed in (0, 1):
        torch.manual_seed(seed)
        tiny_model(num_hidden_layers=2).save_pretrained(tmp_path / str(seed))
    weights = tmp_path / "0" / "model.safetensors"
    stat = weights.stat()
    with interrupted(after=2):
        convert_torch(tmp_path / "0", tmp_path / "model", max_shard_size="20KB")
    shutil.copy(tmp_path / "1" / "model.safetensors", weights)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert weights.stat().st_size == stat.st_size
    assert convert_torch(tmp_path / "0", tmp_path / "model", max_shard_size="20KB").resumed_shards == 0
    wanted, converted = load_file(weights), {}
    for path in (tmp_path / "model").glob("*.safetensors"):
        converted |= load_file(path)
    assert converted.keys() == wanted.keys() and all(torch.equal(converted[name], wanted[name]) for name in wanted)


@contextlib.contextmanager
def killed_at(step):
    """The block ends as if the process were killed at its n-th change of folders: none of its clean-up is done."""
    done = []

    def failing(function):
        def call(*arguments, **options):
            done.append(function)
            if len(done) >= step:
                raise KeyboardInterrupt
            return function(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        for name in ("rename", "replace", "unlink", "rmdir"):
            patch.setattr(os, name, failing(getattr(os, name)))
        yield done


def test_other_options_start_again_even_if_killed_while_they_do(run, unfinished):
    assert convert_maxtext(run, unfinished, **{**SHARDS, "verify": True}).resumed_shards == 0
    for step in range(1, 6):
        shutil.rmtree(unfinished)
        with interrupted(after=2):  # with shards of the same names
            convert_maxtext(run, unfinished, **SHARDS, dtype="float16")
        with killed_at(step):
            convert_maxtext(run, unfinished, **SHARDS, dtype="bfloat16")
        report = convert_maxtext(run, unfinished, **SHARDS, dtype="bfloat16")
        assert {record["dtype"] for record in report.tensors} == {"bfloat16"}


def test_what_is_put_at_the_destination_meanwhile_stays(model, tmp_path):
    def put(total):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "notes.txt").write_text("mine")
        return lambda nbytes: None

    with pytest.raises(FileExistsError, match="exists already"):
        convert_torch(model, tmp_path / "out", verify=False, progress=put)
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_a_full_disk_keeps_finished_shards_and_a_wrong_source_nothing(run, tmp_path):
    with interrupted(after=2, error=OSError(errno.ENOSPC, "full")):
        convert_maxtext(run, tmp_path / "model", **SHARDS)
    assert convert_maxtext(run, tmp_path / "model", **SHARDS).resumed_shards == 2
    leaves = maxtext_leaves(0, layers=2)
    leaves["params.decoder.layers.mlp_1.wo.kernel"][0] = float("nan")
    write_checkpoint(tmp_path / "bad", leaves)
    model = tiny_model(num_hidden_layers=2)
    model.model.layers[0].mlp.down_proj.weight.data.fill_(3e38)
    model.save_pretrained(tmp_path / "infinite")
    for convert, source, words in (
        (convert_maxtext, "bad", "NaN"),
        (convert_torch, "infinite", "output of layer 0 is not finite"),
    ):
        with pytest.raises(ValueError, match=words):
            convert(tmp_path / source, tmp_path / "other", max_shard_size="4KB")
        assert not partial_of(tmp_path / "other").exists()


def test_the_way_back_resumes_from_finished_arrays_that_are_whole(model, tmp_path, monkeypatch):
    convert_to_maxtext(model, tmp_path / "whole")
    back = tmp_path / "back"

    def convert_until(function, after=0):
        with interrupted(after, module=to_maxtext, function=function) as before:
            convert_to_maxtext(model, back)
        return {arguments[0] for arguments in before}

    convert_until("_write_array")
    assert not partial_of(back).exists()
    finished = convert_until("_write_array", after=3)
    write, written = to_maxtext._write_array, []
    monkeypatch.setattr(to_maxtext, "_write_array", lambda *a: (written.append(a[0]), write(*a)))
    convert_until("orbax_tree")  # when all arrays are finished
    assert written and not finished & {*written}
    array = partial_of(back) / "model" / "0" / "state" / "params.decoder.layers.mlp_1.wo.kernel"
    for how, file in zip(DAMAGES, (".zarray", "0.*", "0.*")):
        written.clear()
        DAMAGES[how](min(array.glob(file)))
        (array / "extra").write_text("of no array")
        convert_until("orbax_tree")
        assert written == [array], how
    convert_to_maxtext(model, back)
    assert contents(back) == contents(tmp_path / "whole")


def test_force_replaces_a_converted_model_and_nothing_else(model, tmp_path):
    folder = tmp_path / "out"
    convert_torch(model, folder, dtype="bfloat16", verify=False)
    with pytest.raises(FileExistsError, match="--force"):
        convert_torch(model, folder, verify=False)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"notes\.txt"):
        convert_torch(model, folder, force=True, verify=False)
    (folder / "notes.txt").unlink()
    convert_torch(model, folder, force=True, verify=False)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "model.safetensors").write_text("mine")
    with pytest.raises(FileExistsError, match="conversion_report"):
        convert_torch(model, tmp_path / "plain", force=True)
    convert_to_maxtext(model, tmp_path / "run")
    (tmp_path / "run" / "100" / "state").mkdir(parents=True)
    (tmp_path / "run" / "100" / "state" / "_METADATA").write_text("of a training that went on")
    with pytest.raises(FileExistsError, match="100/state"):
        convert_to_maxtext(model, tmp_path / "run", force=True)


def test_the_source_is_not_replaced(model, tmp_path):
    convert_torch(model, tmp_path / "out", verify=False)
    for destination in (tmp_path / "out", tmp_path):
        with pytest.raises(ValueError, match="inside the destination"):
            convert_torch(tmp_path / "out", destination, force=True)
    with pytest.raises(ValueError, match="gs://"):
        convert_torch(model, "gs://bucket/out")


@pytest.mark.parametrize("force", [False, True])
def test_killed_at_each_step_the_same_command_completes_and_another_is_refused(tmp_path, force):
    for layers in (1, 2):
        tiny_model(num_hidden_layers=layers, layer_types=None).save_pretrained(tmp_path / str(layers))
    source, out, options = tmp_path / "1", tmp_path / "out", {"verify": False, "force": force}
    convert_torch(source, out, **options)
    convert_torch(tmp_path / "2", tmp_path / "old", verify=False)
    whole, old, states = contents(out), contents(tmp_path / "old"), set()
    for step in itertools.count(1):
        shutil.rmtree(out)
        if force:
            shutil.copytree(tmp_path / "old", out)
        with killed_at(step):
            convert_torch(source, out, **options)
        if not partial_of(out).exists() or not any(partial_of(out).iterdir()):
            break
        is_renamed, is_replacing = out.exists() and contents(out) == whole, (partial_of(out) / "replaced").exists()
        assert is_renamed or not force or old in (contents(partial_of(out) / "replaced"), contents(out))
        states.add((is_renamed, is_replacing))
        if is_renamed:
            with pytest.raises(FileExistsError):
                convert_torch(tmp_path / "2", out, verify=False)
            assert contents(out) == whole
        report = convert_torch(source, out, **options)
        assert (report.was_complete, contents(out)) == (is_renamed, whole) and not partial_of(out).exists()
    assert states == {(False, False), (True, False), *([(False, True), (True, True)] if force else [])}


def test_what_was_changed_after_the_renaming_is_not_called_complete(model, tmp_path):
    convert_torch(model, tmp_path / "other", verify=False, dtype="bfloat16")
    for change in (
        lambda path: flip_bit(path / "config.json"),
        lambda path: (path / REPORT_FILE).unlink(),
        lambda path: (shutil.rmtree(path), shutil.copytree(tmp_path / "other", path)),
    ):
        with interrupted(after=0, module=Destination, function="_remove_partial"):
            convert_torch(model, tmp_path / "out", verify=False)
        change(tmp_path / "out")
        with pytest.raises(FileExistsError, match="exists already"):
            convert_torch(model, tmp_path / "out", verify=False)
        shutil.rmtree(tmp_path / "out")
    for command, convert in (("torch", convert_torch), ("to-maxtext", convert_to_maxtext)):
        out = tmp_path / command
        with interrupted(after=0, module=Destination, function="_remove_partial"):
            convert(model, out, verify=False)
        result = command_line.call("convert", command, model, out, "--no-verify")
        assert result.exit_code == 0 and f"{out} is complete: an earlier run wrote it" in result.stdout
        assert not partial_of(out).exists()


def test_two_conversions_to_one_folder(model, tmp_path):
    with file_lock(partial_of(tmp_path / "out") / "lock"), pytest.raises(LockHeldError):
        convert_torch(model, tmp_path / "out")


def test_a_link_stays_and_the_folder_lands_where_it_points(model, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "model")
    convert_torch(model, tmp_path / "out", verify=False)
    assert (tmp_path / "out").is_symlink() and (tmp_path / "disk" / "model" / "model.safetensors").is_file()
