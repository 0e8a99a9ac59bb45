"""Going on with an evaluation: after an interruption at any moment, over damaged results, beside files of others."""

import json
import logging
import os
import shutil

import pytest


pytest.importorskip("lm_eval")

import datasets
from test_eval_scoring import save_model
from typer.testing import CliRunner

from dcformer.cli import app
from dcformer.eval import output as output_room
from dcformer.eval import records, runner
from dcformer.eval.records import read_records, read_samples, record_path, samples_path, write_record
from dcformer.eval.runner import evaluate
from dcformer.eval.scoring import TargetScorer
from dcformer.head_tasks import build_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()  # which is quick to read
    save_model(folder, "dcformer", rows=len(tokenizer))
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Three documents of two tasks."""
    folder = tmp_path_factory.mktemp("data")
    goals = [{"goal": f"Goal {n}", "sol1": "one way", "sol2": "another", "label": n % 2} for n in range(3)]
    names = ("support", "question", "distractor1", "distractor2", "distractor3", "correct_answer")
    questions = [{name: f"{name} {n}" for name in names} for n in range(3)]
    for task, split, rows in (("piqa", "validation", goals), ("sciq", "test", questions)):
        (folder / task).mkdir()
        datasets.Dataset.from_list(rows).to_parquet(folder / task / f"{split}.parquet")
    return folder


@pytest.fixture
def run(model, data, tmp_path):
    def run(name="out", **options):
        settings = {"tasks": "piqa,sciq", "dtype": "float32", "device": "cpu", "data_dir": data, **options}
        return evaluate(str(model), output=tmp_path / name, **settings)

    return run


@pytest.fixture(scope="module")
def whole(model, data, tmp_path_factory):
    """The results of a run without interruption; copy them before they are changed."""
    folder = tmp_path_factory.mktemp("whole")
    evaluate(str(model), output=folder, tasks="piqa,sciq", dtype="float32", device="cpu", data_dir=data)
    return folder


@pytest.fixture
def copied(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "out")


@pytest.fixture
def scored(monkeypatch):
    """The tasks that are computed."""
    tasks, original = [], runner.score_task
    monkeypatch.setattr(runner, "score_task", lambda *given: tasks.append(given[2].task) or original(*given))
    return tasks


def contents(folder):
    """Every file, without timings."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found[path.relative_to(folder).as_posix()] = path.read_bytes()
            if path.suffix == ".json":
                found[path.relative_to(folder).as_posix()] = {**json.loads(path.read_text()), "timings": None}
    return found


def place_of(folder, model, task="piqa"):
    return record_path(folder, str(model), task, 0)


MOMENTS = {
    "before the configuration": (runner.provenance, "find_model", 1),
    "while data are read": (runner, "task_manager", 2),
    "while the model is loaded": (runner, "build_scorer", 1),
    "in the second task": (TargetScorer, "score", 2),
    "while the samples are written": (os, "fsync", 1),
    "between the samples and the record": (records, "write_atomically", 2),
    "while the record is written": (os, "fsync", 2),
    "after the first record": (runner, "score_task", 2),
    "while the results are read": (runner, "finished", 3),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_goes_on_to_the_same_files_after_an_interruption_at_any_moment(
    moment, run, whole, tmp_path, monkeypatch, scored
):
    place, name, which = MOMENTS[moment]
    original, calls = getattr(place, name), []

    def stop(*given, **options):
        calls.append(name)
        if len(calls) == which:
            raise KeyboardInterrupt
        return original(*given, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(place, name, stop)
        run()
    left = [path.name for path in (tmp_path / "out").rglob("*")] if (tmp_path / "out").exists() else []
    assert not any(name.endswith(".partial") or name == ".lock" for name in left)
    kept = [name for name in left if name.endswith("shot.json")]
    before = len(scored)
    run()
    assert len(scored) - before == 2 - len(kept)
    assert contents(tmp_path / "out") == contents(whole)


def cut(path):
    path.write_bytes(path.read_bytes()[:-30])


def empty(path):
    path.write_bytes(b"")


def lose(path):
    path.unlink()


def other_numbers(path):
    path.write_bytes(path.read_bytes().replace(b'"doc_id": 1', b'"doc_id": 7'))


@pytest.mark.parametrize(
    ("which", "damage", "words"),
    [
        ("record", cut, "is damaged (it is no JSON"),
        ("record", empty, "is damaged (it is no JSON"),
        ("samples", cut, "are damaged (a line is no JSON"),
        ("samples", empty, "are damaged (its SHA-256"),
        ("samples", other_numbers, "are damaged (its SHA-256"),
        ("samples", lose, "There is no file"),
    ],
    ids=["record cut", "record empty", "samples cut", "samples empty", "samples changed", "samples lost"],
)
def test_a_damaged_result_is_named_and_its_task_alone_run_again(
    which, damage, words, run, copied, whole, model, scored, caplog
):
    path = place_of(copied, model)
    path = samples_path(path) if which == "samples" else path
    damage(path)
    with caplog.at_level(logging.WARNING):
        run()
    (warning,) = [record.getMessage() for record in caplog.records if record.name.startswith("dcformer")]
    assert words in warning and str(path) in warning and warning.endswith("; piqa, 0-shot, is run again.")
    assert scored == ["piqa"]
    assert contents(copied) == contents(whole)


def test_the_command_names_what_it_runs_again(model, data, copied):
    path = place_of(copied, model)
    cut(path)
    arguments = ["eval", str(model), "--tasks", "piqa,sciq", "--dtype", "float32", "--device", "cpu"]
    done = CliRunner().invoke(app, [*arguments, "--data-dir", str(data), "--output", str(copied)])
    assert done.exit_code == 0, done.output
    assert done.stderr.splitlines()[0] == (
        f"The result {str(path)!r} is damaged (it is no JSON; it may have been cut); piqa, 0-shot, is run again."
    )
    assert "Device: cpu, " in done.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1, 2]", "is not a result of `dcformer eval`"),
        ('{"results": {}}', "is not a result of `dcformer eval`"),
        ('{"format": 99}', "is a result in format 99, and this version of dcformer reads up to 2"),
    ],
    ids=["a list", "another object", "a later format"],
)
def test_a_file_of_others_stops_the_run_before_it_is_overwritten(content, words, run, copied, model, scored):
    path = place_of(copied, model, "sciq")
    path.write_text(content)
    samples_path(place_of(copied, model)).unlink()
    with pytest.raises(ValueError, match=words) as raised:
        run()
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)
    assert path.read_text() == content and scored == []


def test_a_result_of_another_model_is_not_overwritten(run, copied, model, scored):
    path = place_of(copied, model)
    path.write_text(json.dumps({**json.loads(path.read_text()), "model": "somebody/else"}))
    with pytest.raises(ValueError, match=r"is a result of 'somebody/else', where that of .* is to be written"):
        run()
    assert scored == []


def test_results_of_vllm_are_not_taken_for_those_of_transformers(run, copied, scored):
    for record in read_records(copied):
        samples = read_samples(copied, record)
        record.settings["scorer"] = "vllm"
        write_record(copied, record, samples)
    with pytest.raises(ValueError, match=r"was scored by vLLM \(--engine vllm\), and this run scores by DCFormerLM"):
        run(tasks="piqa")
    assert scored == []


def test_models_whose_names_share_a_folder_are_refused_and_the_same_one_is_run_once(run, model, data, tmp_path):
    with pytest.raises(ValueError, match="'a/b' and 'a__b' would have one folder of results, 'a__b'"):
        evaluate(["a/b", "a__b"], output=tmp_path / "out")
    options = {"tasks": "piqa", "dtype": "float32", "data_dir": data, "output": tmp_path / "out"}
    assert len(evaluate([str(model), f"{model}/"], **options)) == 1


def test_a_folder_in_the_place_of_a_later_result_is_found_before_the_first_task(run, model, tmp_path, scored):
    place_of(tmp_path / "out", model, "sciq").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"sciq-0shot\.json' is a folder, where a file of results is to be written"):
        run()
    assert scored == []


def test_a_second_evaluation_of_the_model_is_refused_while_the_first_runs(run, model, tmp_path, monkeypatch):
    original = runner.score_task
    seen = []

    def meanwhile(*given):
        with pytest.raises(ValueError, match="Another evaluation is writing results to") as raised:
            run()
        seen.append(str(raised.value))
        return original(*given)

    monkeypatch.setattr(runner, "score_task", meanwhile)
    run(tasks="piqa")
    assert len(seen) == 1 and str(place_of(tmp_path / "out", model).parent) in seen[0]
    assert [record.task for record in read_records(tmp_path / "out")] == ["piqa"]
    assert [path.name for path in place_of(tmp_path / "out", model).parent.iterdir() if path.name[0] == "."] == []


def test_on_a_file_system_without_locks_the_run_goes_on(run, monkeypatch):
    def no_locks(*_):
        raise OSError(output_room.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(output_room.fcntl, "flock", no_locks)
    assert len(run(tasks="piqa")) == 1


def test_a_full_disk_is_told_with_its_file_and_leaves_nothing_half(run, model, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", "samples")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left") as raised:
        patch.setattr(os, "fsync", full)
        run()
    assert raised.value.errno == 28
    assert not (tmp_path / "out").exists()


def test_results_that_are_finished_are_said_to_be_when_another_models_are_damaged(model, data, copied, tmp_path):
    other = copied / "other"
    shutil.copytree(place_of(copied, model).parent, other)
    empty(other / "piqa-0shot.json")
    arguments = ["eval", str(model), "--tasks", "piqa", "--dtype", "float32", "--data-dir", str(data)]
    done = CliRunner().invoke(app, [*arguments, "--output", str(copied)])
    assert done.exit_code == 1
    assert "The evaluation is finished and kept, but no table can be printed" in done.stderr
    assert str(other / "piqa-0shot.json") in done.stderr
