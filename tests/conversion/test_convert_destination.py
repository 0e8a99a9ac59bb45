"""Where a conversion puts its folder: links, what --force may delete, and what a process that was killed leaves."""

import contextlib
import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model

from dcformer.conversion import convert_to_maxtext, convert_torch
from dcformer.conversion.destination import Destination


JAX = {"compose_activation": "gelu_pytorch_tanh", "norm_eps": 1e-5, "qk_norm_eps": 1e-5}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Two models, `a` and `b`, that MaxText can express."""
    folder = tmp_path_factory.mktemp("sources")
    for seed, name in enumerate("ab"):
        tiny_model(seed=seed, **JAX).save_pretrained(folder / name)
    return folder


@pytest.fixture
def work(sources, tmp_path):
    shutil.copytree(sources, tmp_path, dirs_exist_ok=True)
    return tmp_path


CONVERTERS = {"torch": convert_torch, "to_maxtext": convert_to_maxtext}
both_ways = pytest.mark.parametrize("convert", CONVERTERS.values(), ids=CONVERTERS)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    "convert, there",
    [
        (convert_torch, "nothing"),
        (convert_torch, "empty folder"),
        (convert_torch, "converted model"),
        (convert_to_maxtext, "converted model"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_link_stays_and_the_folder_lands_where_it_points(work, convert, there):
    (work / "disk").mkdir()
    place = work / "disk" / "place"
    if there == "empty folder":
        place.mkdir()
    if there == "converted model":
        convert(work / "a", place)
    (work / "link").symlink_to(place)
    report = convert(work / "b", work / "link", force=there == "converted model")
    assert (work / "link").is_symlink() and (place / "conversion_report.json").is_file()
    assert report.destination == str(work / "link")
    convert(work / "b", work / "plain")
    assert contents(place).keys() == contents(work / "plain").keys()
    assert not hidden(work) and not hidden(work / "disk")


def test_a_link_through_a_linked_folder(work):
    (work / "disk").mkdir()
    (work / "models").symlink_to(work / "disk")
    convert_torch(work / "a", work / "models" / "out")
    assert (work / "disk" / "out" / "config.json").is_file() and (work / "models").is_symlink()


@pytest.mark.parametrize("path", ["link", "link/out", "link/deep/out"])
def test_a_link_to_a_disk_that_is_not_there_is_refused_before_any_work(work, path):
    (work / "link").symlink_to(work / "not mounted" / "models")
    with pytest.raises(ValueError, match=r"is a link to .*not mounted.*does not exist"):
        convert_torch(work / "nowhere", work / path)  # the source is not even looked at
    assert sorted(os.listdir(work)) == ["a", "b", "link"]


def test_a_loop_of_links_is_refused(work):
    (work / "one").symlink_to(work / "two")
    (work / "two").symlink_to(work / "one")
    with pytest.raises(ValueError, match="one"):
        convert_torch(work / "a", work / "one")
    assert sorted(os.listdir(work)) == ["a", "b", "one", "two"]


def test_the_source_by_a_link_is_refused(work):
    (work / "link").symlink_to(work / "a")
    for source, destination in (("a", "link"), ("link", "a"), ("link", "a/out")):
        with pytest.raises(ValueError, match="inside"):
            convert_torch(work / source, work / destination, force=True)


def test_the_root_and_mount_points_are_refused(work, monkeypatch):
    with pytest.raises(ValueError, match="'/' is a mount point"):
        convert_torch(work / "a", "/", force=True)
    (work / "volume").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == work / "volume")
    with pytest.raises(ValueError, match=r"mount point.*volume/model"):
        convert_torch(work / "a", work / "volume")
    convert_torch(work / "a", work / "volume" / "model")


def test_no_name_is_refused(work):
    with pytest.raises(ValueError, match="name of a folder"):
        convert_torch(work / "a", "")


def test_a_read_only_folder_is_refused_before_any_work(work, monkeypatch):
    (work / "locked").mkdir()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != work / "locked" and access(path, mode))
    with pytest.raises(PermissionError, match="locked' is not writable"):
        convert_torch(work / "nowhere", work / "locked" / "deep" / "out")


@both_ways
def test_parents_are_created_and_removed_with_a_failure(work, convert):
    with pytest.raises(RuntimeError):
        convert(work / "a", work / "new" / "deep" / "out", progress=failing(RuntimeError("no")))
    assert sorted(os.listdir(work)) == ["a", "b"]
    convert(work / "a", work / "new" / "deep" / "out")
    assert os.listdir(work / "new" / "deep") == ["out"]


def failing(error: BaseException):
    """Progress that raises as soon as something is done."""

    def advance(nbytes):
        if nbytes:
            raise error

    return lambda total: advance


def test_force_refuses_a_model_that_no_conversion_wrote(work):
    before = contents(work / "b")
    with pytest.raises(FileExistsError, match="not a converted model"):
        convert_torch(work / "a", work / "b", force=True)
    assert contents(work / "b") == before


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"tensors": [1]}', '{"files": 3, "tensors": []}'])
def test_force_refuses_a_report_that_no_conversion_wrote(work, text):
    (work / "b" / "conversion_report.json").write_text(text)
    before = contents(work / "b")
    with pytest.raises(FileExistsError, match="not a converted model"):
        convert_torch(work / "a", work / "b", force=True)
    assert contents(work / "b") == before


@pytest.mark.parametrize(
    "convert, precious",
    [
        (convert_torch, "precious.txt"),
        (convert_torch, "results/piqa.json"),
        (convert_torch, "model-00002-of-00002.safetensors"),
        (convert_to_maxtext, "precious.txt"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_force_refuses_and_names_files_that_no_conversion_wrote(work, convert, precious):
    convert(work / "a", work / "out")
    (work / "out" / precious).parent.mkdir(exist_ok=True)
    (work / "out" / precious).write_text("keep me")
    before = contents(work / "out")
    with pytest.raises(FileExistsError, match=f"no conversion wrote: {precious};"):
        convert(work / "b", work / "out", force=True)
    assert contents(work / "out") == before
    (work / "out" / precious).unlink()
    convert(work / "b", work / "out", force=True)
    assert not hidden(work)


def test_force_refuses_a_run_that_was_trained_on(work):
    convert_to_maxtext(work / "a", work / "run", step=1)
    shutil.copytree(work / "run" / "1", work / "run" / "2")
    with pytest.raises(FileExistsError, match=r"2/state/.* and \d+ more"):
        convert_to_maxtext(work / "b", work / "run", force=True)


@both_ways
def test_force_replaces_what_older_versions_wrote(work, convert):
    """Their reports do not list the files."""
    convert(work / "a", work / "out")
    path = work / "out" / "conversion_report.json"
    report = json.loads(path.read_text())
    del report["files"]
    path.write_text(json.dumps(report))
    (work / "out" / "precious.txt").write_text("keep me")
    with pytest.raises(FileExistsError, match=r"no conversion wrote: precious\.txt;"):
        convert(work / "b", work / "out", force=True)
    (work / "out" / "precious.txt").unlink()
    convert(work / "b", work / "out", force=True)
    assert "files" in json.loads(path.read_text())


@both_ways
@pytest.mark.parametrize("force", [False, True], ids=["new", "force"])
def test_a_file_that_comes_during_the_conversion_costs_neither_it_nor_the_result(work, convert, force):
    out = work / "out"
    if force:
        convert(work / "a", out)

    def come(total):
        out.mkdir(exist_ok=True)
        (out / "precious.txt").write_text("keep me")
        return lambda nbytes: None

    with pytest.raises(OSError, match=r"complete but could not be moved.*run the same command again"):
        convert(work / "b", out, force=force, progress=come)
    assert (out / "precious.txt").read_text() == "keep me"
    (out / "precious.txt").unlink()
    read = []
    convert(work / "b", out, force=force, progress=lambda total: read.append)
    convert(work / "b", work / "plain")
    assert contents(out) == contents(work / "plain") or convert is convert_torch  # whose model card has the name
    assert not hidden(work)


@pytest.fixture
def snapshots(work, tmp_path_factory, monkeypatch):
    """
    What a kill at every rename of a replacement leaves, as copies of the disk; `renames` are the moves that were made.
    """

    def take(convert, out="out"):
        taken = []
        rename = Path.rename

        def record(moment):
            copy = tmp_path_factory.mktemp("killed") / "work"
            shutil.copytree(work, copy, symlinks=True)
            taken.append((moment, copy))

        def recording(self, target):
            if self.name not in ("model", "out"):
                return rename(self, target)
            record(f"before {self.name}")
            result = rename(self, target)
            record(f"after {self.name}")
            return result

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", recording)
            convert(work / "b", work / out, force=True)
        return taken

    return take


def model_in(folder: Path) -> str:
    """Which of the two models a converted folder holds."""
    source = json.loads((folder / "conversion_report.json").read_text())["source"]["location"]
    return Path(source).name


@both_ways
def test_a_kill_between_the_renames_loses_neither_model(work, convert, snapshots, monkeypatch):
    convert(work / "a", work / "out")
    # The copies of the disk lie elsewhere and have other times, but hold the same.
    monkeypatch.setattr("dcformer.conversion.plan.Plan.fingerprint", lambda self: {"dtype": str(self.config.dtype)})
    states = snapshots(convert)
    assert [moment for moment, _ in states] == ["before out", "after out", "before model", "after model"]
    for moment, copy in states:
        # The next run, without --force: the old model or the new one is there.
        shutil.copytree(copy, copy.with_name("again"), symlinks=True)
        with pytest.raises(FileExistsError, match="exists already"):
            convert(copy.with_name("again") / "b", copy.with_name("again") / "out")
        expected = "b" if moment == "after model" else "a"
        assert model_in(copy.with_name("again") / "out") == expected, moment
        # The same command: done without converting anew.
        written = count_writes(monkeypatch)
        convert(copy / "b", copy / "out", force=True)
        assert model_in(copy / "out") == "b"
        assert bool(written) == (moment == "after model"), moment
        assert not hidden(copy)


def count_writes(monkeypatch) -> list:
    """Grows when a converter writes a piece of an array (but the step counter, a number)."""
    from dcformer.conversion import to_maxtext
    from dcformer.conversion.shard_writer import ShardWriter

    written, write, write_array = [], ShardWriter._write, to_maxtext.write_array
    monkeypatch.setattr(ShardWriter, "_write", lambda self, *piece: written.append(1) or write(self, *piece))
    monkeypatch.setattr(
        to_maxtext,
        "write_array",
        lambda part, values: (written.append(1) if values.dim() else None, write_array(part, values))[1],
    )
    return written


@both_ways
def test_other_options_after_a_kill_between_the_renames(work, convert, snapshots):
    convert(work / "a", work / "out")
    moment, copy = snapshots(convert)[1]
    assert moment == "after out" and not (copy / "out").exists()
    convert(copy / "a", copy / "out", force=True)
    assert model_in(copy / "out") == "a" and not hidden(copy)


def test_a_failure_after_a_kill_between_the_renames_brings_the_old_model_back(work, snapshots):
    convert_torch(work / "a", work / "out")
    _, copy = snapshots(convert_torch)[1]
    before = contents(copy / ".out.partial" / "replaced")
    (copy / "b" / "config.json").unlink()
    with pytest.raises(FileNotFoundError):
        convert_torch(copy / "b", copy / "out", force=True)
    assert contents(copy / "out") == before


def test_an_interruption_between_the_renames_keeps_both(work, monkeypatch):
    convert_torch(work / "a", work / "out")
    before, rename = contents(work / "out"), Path.rename

    def interrupted(self, target):
        if self.name == "model":
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert_torch(work / "b", work / "out", force=True)
    assert contents(work / "out") == before
    report = convert_torch(work / "b", work / "out", force=True)
    assert report.resumed_shards == 1 and not hidden(work)


@both_ways
@pytest.mark.parametrize("error", [RuntimeError, OverflowError, MemoryError, ValueError, PermissionError])
def test_only_interruptions_keep_a_partial_folder(work, convert, error, monkeypatch):
    """Here after all arrays have been written, so that there would be something to keep."""
    monkeypatch.setattr("dcformer.conversion.convert.write_model_card", raising(error("no")))
    monkeypatch.setattr("dcformer.conversion.to_maxtext.file_digests", raising(error("no")))
    with pytest.raises(error):
        convert(work / "a", work / "out")
    assert sorted(os.listdir(work)) == ["a", "b"]


@both_ways
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(1), OSError(28, "full")], ids=["ctrl-c", "exit", "full"]
)
def test_interruptions_and_a_full_disk_keep_what_is_finished(work, convert, error, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("dcformer.conversion.convert.write_model_card", raising(error))
        patch.setattr("dcformer.conversion.to_maxtext.file_digests", raising(error))
        with pytest.raises(type(error)):
            convert(work / "a", work / "out")
    assert hidden(work) == [".out.partial"]
    written = count_writes(monkeypatch)
    convert(work / "a", work / "out")
    assert not written and not hidden(work)


def raising(error):
    def function(*_, **__):
        raise error

    return function


@both_ways
def test_two_conversions_to_one_place(work, convert):
    """The second is told so, at whatever moment it comes; the first ends well."""
    told = []

    def second(total):
        with pytest.raises(ValueError, match=r"Another conversion is writing .*out"):
            convert(work / "b", work / "out", force=True)
        told.append(total)
        return lambda nbytes: None

    convert(work / "a", work / "out", progress=second)
    assert told and model_in(work / "out") == "a" and not hidden(work)


def test_a_result_that_appears_while_another_waits_is_not_replaced(work):
    """The destination was free when the second looked, and is not when it gets the lock."""
    late = Destination(work / "out", work / "b")
    convert_torch(work / "a", work / "out")
    before = contents(work / "out")
    with pytest.raises(FileExistsError, match="exists already"), late.open({}, lambda: True):
        raise AssertionError("unreachable")
    assert contents(work / "out") == before and not hidden(work)


def test_a_lock_that_was_removed_is_not_one(work):
    """A process may have opened the lock of another one that ended, and removed it, before it was locked."""
    destination = Destination(work / "out", work / "a")
    locks, flock = [], fcntl.flock

    def removing(lock, operation):
        flock(lock, operation)
        locks.append(lock)
        if len(locks) == 1:
            shutil.rmtree(work / ".out.partial")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", removing)
        with destination.open({}, lambda: False) as folder:
            (folder / "a.txt").write_text("a")
    assert len(locks) == 2 and contents(work / "out") == {"a.txt": b"a"}


def test_a_file_system_without_locks_is_named(work, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", raising(OSError(38, "Function not implemented")))
    with pytest.raises(OSError, match=r"cannot be locked \(Function not implemented"):
        convert_torch(work / "a", work / "out")


def test_torn_notes_of_a_power_cut_cost_only_time(work, monkeypatch):
    for torn in ("fingerprint", "progress/model.safetensors.json"):
        with monkeypatch.context() as patch:
            patch.setattr("dcformer.conversion.convert.write_model_card", raising(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                convert_torch(work / "a", work / "out")
        (work / ".out.partial" / torn).write_bytes(b"\x00\xff" * 20)
        assert convert_torch(work / "a", work / "out").resumed_shards == 0
        assert not hidden(work)
        shutil.rmtree(work / "out")


def test_files_of_an_interrupted_run_with_a_tokenizer_do_not_stay(work, tokenizer_folder, monkeypatch):
    config = {**JAX, "vocab_size": 50304}
    torch.manual_seed(0)
    tiny_model(**config).save_pretrained(work / "wide")
    with monkeypatch.context() as patch:
        patch.setattr("dcformer.conversion.convert.write_model_card", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            convert_torch(work / "wide", work / "out", tokenizer=tokenizer_folder, verify=False)
    assert (work / ".out.partial" / "model" / "tokenizer.json").is_file()
    convert_torch(work / "wide", work / "out", verify=False)
    assert not list((work / "out").glob("tokenizer*"))


def test_the_partial_folder_of_an_older_version_is_no_obstacle(work):
    partial = work / ".out.partial"
    (partial / "14000" / "state").mkdir(parents=True)
    for name in (".lock", ".fingerprint", "model.safetensors"):
        (partial / name).write_text("")
    for convert in CONVERTERS.values():
        convert(work / "a", work / "out")
        assert not hidden(work)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(work / "out")
