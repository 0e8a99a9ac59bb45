"""Where an evaluation writes: found out before it begins, locked while it runs, and nothing of others overwritten."""

import json
import multiprocessing
import os
import shutil

import pytest
from typer.testing import CliRunner

from dcformer.cli import app
from dcformer.common.files import write_atomically
from dcformer.eval.output import check_places, locked_folders
from dcformer.eval.records import (
    DamagedResult,
    Record,
    read_record,
    read_records,
    read_samples,
    samples_path,
    write_record,
)


SAMPLES = [{"doc_id": place, "doc_hash": str(place), "metrics": {"acc": 1.0}} for place in range(3)]


def make_record(model="mine", **values):
    return Record(model, "piqa", 0, {"acc": {"value": 1.0, "stderr": None}}, 3, 3, None, {"dtype": "float32"}, **values)


# Locks


def hold(output, names, locked, done):
    with locked_folders(output, names):
        locked.set()
        done.wait(60)


@pytest.fixture
def another(tmp_path):
    """Another process, which has locked the folders of `mine` in tmp_path / "out"."""
    context = multiprocessing.get_context("fork")
    locked, done = context.Event(), context.Event()
    process = context.Process(target=hold, args=(tmp_path / "out", ["mine"], locked, done))
    process.start()
    assert locked.wait(60)
    process.leave = done.set
    yield process
    process.kill()
    process.join()


def test_a_locked_folder_is_refused_until_it_is_left(another, tmp_path):
    message = r"Another evaluation is writing results to '.*out/mine'; wait for it"
    with pytest.raises(ValueError, match=message), locked_folders(tmp_path / "out", ["yours", "mine"]):
        pass
    with locked_folders(tmp_path / "out", ["yours"]):
        pass
    another.leave()
    another.join()
    assert not (tmp_path / "out").exists()
    with locked_folders(tmp_path / "out", ["mine"]):
        pass


def test_a_lock_ends_with_its_process(another, tmp_path):
    another.kill()
    another.join()
    assert (tmp_path / "out" / "mine" / ".lock").exists()
    with locked_folders(tmp_path / "out", ["mine"]):
        pass
    assert list((tmp_path / "out" / "mine").iterdir()) == []


def test_folders_with_results_stay_and_empty_ones_go(tmp_path):
    with locked_folders(tmp_path / "deep" / "out", ["a", "b"]):
        (tmp_path / "deep/out/a/result").touch()
    assert [path.name for path in (tmp_path / "deep/out").iterdir()] == ["a"]
    assert [path.name for path in (tmp_path / "deep/out/a").iterdir()] == ["result"]


def test_an_error_inside_leaves_the_lock(tmp_path):
    with pytest.raises(KeyboardInterrupt), locked_folders(tmp_path / "out"):
        raise KeyboardInterrupt
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("file", "'{root}/file' is a file"),
        ("file/below", "'{root}/file' is a file"),
        ("link", "'{root}/link' is a link to nothing"),
        ("link/below", "'{root}/link' is a link to nothing"),
        ("out", "'{root}/out/mine' is a file"),
        ("taken", "Is a directory"),
    ],
    ids=["a file", "below a file", "dangling link", "below a dangling link", "file of the model", "lock is a folder"],
)
def test_an_output_that_cannot_be_written_is_named_with_its_obstacle(path, words, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nothing")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    (tmp_path / "taken" / "mine" / ".lock").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    failing = pytest.raises(ValueError, match="Results cannot be written to")
    with failing as raised, locked_folders(tmp_path / path, ["mine"]):
        pass
    assert words.format(root=tmp_path) in str(raised.value) and "\n" not in str(raised.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_place_that_makes_no_folders_is_refused_and_not_tried_for_ever():
    if not os.path.isdir("/proc/self"):
        pytest.skip("no /proc")
    failing = pytest.raises(ValueError, match="Results cannot be written to '/proc/self/results'")
    with failing, locked_folders("/proc/self/results"):
        pass


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path):
    (tmp_path / "piqa-0shot.json").mkdir()
    with pytest.raises(ValueError, match=r"piqa-0shot\.json' is a folder, where a file of results is to be written"):
        check_places([tmp_path / "piqa-0shot.json"])


@pytest.mark.parametrize("suite", ["table4", "head_tasks"])
def test_the_command_finds_out_before_it_reads_anything(suite, tmp_path, monkeypatch):
    if suite != "head_tasks":
        pytest.importorskip("lm_eval")
        from dcformer.eval import provenance as room
    else:
        from dcformer.head_tasks import comparison as room
    monkeypatch.setattr(room, "find_model", None)
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors", "out"):
        (tmp_path / "model" / name).touch()
    arguments = ["eval", str(tmp_path / "model"), "--suite", suite, "--output", str(tmp_path / "model" / "out")]
    failed = CliRunner().invoke(app, arguments)
    assert failed.exit_code == 1 and failed.stderr.count("\n") == 1, failed.output
    assert "Results cannot be written to" in failed.stderr and "out' is a file" in failed.stderr


def test_a_file_that_is_no_comparison_is_not_overwritten(tmp_path, monkeypatch):
    from dcformer.head_tasks.report import reserved_output

    file = tmp_path / "head_tasks.json"
    for text, is_refused in (('{"scores": [1]}', True), ("[]", True), ('{"settings"', False), ("", False)):
        file.write_text(text)
        if is_refused:
            with pytest.raises(ValueError, match=r"head_tasks\.json' is no comparison"), reserved_output(tmp_path):
                pass
        else:
            with reserved_output(tmp_path):
                pass
        assert file.read_text() == text


# Files


def test_a_file_is_the_old_or_the_new_one_when_its_writing_stops(tmp_path, monkeypatch):
    write_atomically(tmp_path / "file", b"old")
    for step in ("fsync", "replace"):

        def stop(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(*((os, "fsync", stop) if step == "fsync" else ("pathlib.Path.replace", stop)))
            write_atomically(tmp_path / "file", b"new")
        assert (tmp_path / "file").read_bytes() == b"old"
    write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_record_knows_its_samples(tmp_path):
    path = write_record(tmp_path, make_record(), SAMPLES)
    (record,) = read_records(tmp_path)
    assert read_samples(tmp_path, record) == SAMPLES
    samples = samples_path(path)
    whole = samples.read_bytes()
    for damaged, words in (
        (whole[:-20], "a line is no JSON"),
        (whole.replace(b"1.0", b"0.0"), "its SHA-256 is not that in its record"),
        (b"".join(whole.splitlines(keepends=True)[:-1]), "its SHA-256"),
        (b"", "its SHA-256"),
    ):
        samples.write_bytes(damaged)
        with pytest.raises(DamagedResult, match=rf"The samples '.*samples\.jsonl' are damaged \({words}"):
            read_samples(tmp_path, record)


def test_results_of_the_first_format_are_read_and_their_samples_counted(tmp_path):
    path = write_record(tmp_path, make_record(), SAMPLES)
    values = json.loads(path.read_text())
    del values["samples_sha256"]
    path.write_text(json.dumps({**values, "format": 1}))
    (record,) = read_records(tmp_path)
    assert record.samples_sha256 is None and read_samples(tmp_path, record) == SAMPLES
    samples = samples_path(path)
    samples.write_bytes(b"".join(samples.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(DamagedResult, match="it has 2 lines, and its record 3 samples"):
        read_samples(tmp_path, record)


DAMAGES = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "not text": lambda text: b"\xff\xfe\x00",
    "nested": lambda text: "[" * 100_000,
    "NaN": lambda text: text.replace('"value": 1.0', '"value": NaN'),
    "a word for a number": lambda text: text.replace('"value": 1.0', '"value": "high"'),
    "no value": lambda text: text.replace('"value": 1.0', '"worth": 1.0'),
    "no metrics": lambda text: json.dumps({**json.loads(text), "metrics": {}}),
    "metrics are a list": lambda text: json.dumps({**json.loads(text), "metrics": [1]}),
    "a metric is a number": lambda text: json.dumps({**json.loads(text), "metrics": {"acc": 1}}),
    "settings are missing": lambda text: json.dumps({**json.loads(text), "settings": None}),
    "a field too many": lambda text: json.dumps({**json.loads(text), "mood": "good"}),
    "a field too few": lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "model"}),
    "no samples": lambda text: text.replace('"num_samples": 3', '"num_samples": 0'),
    "shots below 0": lambda text: text.replace('"num_fewshot": 0', '"num_fewshot": -1'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_named(damage, tmp_path):
    path = write_record(tmp_path, make_record(), SAMPLES)
    damaged = DAMAGES[damage](path.read_text())
    path.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode())
    with pytest.raises(DamagedResult, match=r"piqa-0shot\.json' is damaged \(") as raised:
        read_record(path)
    assert "\n" not in str(raised.value)
    shown = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert shown.exit_code == 1 and shown.stderr == f"Error: {raised.value}\n"


FOREIGN = {
    "a list": "[1, 2]",
    "a number": "7",
    "another object": '{"results": {"piqa": {"acc,none": 0.7}}}',
    "another format": '{"format": "csv"}',
}


@pytest.mark.parametrize("content", FOREIGN)
def test_a_file_of_others_is_told_from_a_damaged_one(content, tmp_path):
    path = write_record(tmp_path, make_record(), SAMPLES)
    path.write_text(FOREIGN[content])
    with pytest.raises(ValueError, match=r"piqa-0shot\.json' is not a result of `dcformer eval`") as raised:
        read_record(path)
    assert not isinstance(raised.value, DamagedResult)


def test_a_record_of_a_later_version_is_told(tmp_path):
    path = write_record(tmp_path, make_record(), SAMPLES)
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 3}))
    with pytest.raises(ValueError, match="is a result in format 3, and this version of dcformer reads up to 2"):
        read_record(path)


def test_a_copied_folder_is_the_same_results(tmp_path):
    write_record(tmp_path / "one", make_record(), SAMPLES)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert read_records(tmp_path / "one") == read_records(tmp_path / "two")


def test_an_interrupted_comparison_says_that_nothing_is_kept(tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("dcformer.head_tasks.comparison.document_sets", stop)
    stopped = CliRunner().invoke(app, ["eval", "--suite", "head_tasks", "--output", str(tmp_path / "out")])
    assert stopped.exit_code == 130 and "nothing was written" in stopped.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change", [("1.0", "0.7"), ('"num_documents": 3', '"num_documents": 2')], ids=["metric", "count"]
)
def test_a_number_that_was_changed_in_a_record_is_damage(tmp_path, change):
    path = write_record(tmp_path, make_record(), SAMPLES)
    assert read_record(path).metrics["acc"]["value"] == 1.0
    path.write_text(path.read_text().replace(*change, 1))
    with pytest.raises(DamagedResult, match="its values are not those that were written"):
        read_record(path)
