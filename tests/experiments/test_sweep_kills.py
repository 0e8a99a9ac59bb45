"""Sweeps that are killed at any moment, or of which checkpoints are damaged, end with the results of any other."""

import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest
from tiny_recipes import tiny_recipe

from dcformer.experiments.runner import run_sweep


SWEEP = {"seeds": [0], "variants": {"plain": {"model": {"compose_pre": False, "compose_post": False}}, "composed": {}}}
TRAINING = {"max_steps": 3, "save_steps": 2, "evaluation_steps": 3, "logging_steps": 1}


@pytest.fixture(scope="module", autouse=True)
def without_a_plot():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dcformer.experiments.runner._plot", lambda *_: None)
        yield


def recipe(output, **values):
    return tiny_recipe(output, training=TRAINING, sweep={**SWEEP, **values})


def ignore(*_):
    """No bar and no table."""


def numbers(results):
    """Runs without the time that they took."""
    return [
        {**run, **{part: {**run[part], "seconds": None} for part in ("training", "curve")}} for run in results["runs"]
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a sweep that nothing stopped."""
    output = tmp_path_factory.mktemp("sweeps") / "whole"
    run_sweep(recipe(output), on_progress=ignore)
    return output


def read(output):
    return json.loads((output / "results.json").read_text())


def kill_amid(name, step=None):
    """What makes the process kill itself after a step of a run, or before a file of the sweep has its name."""
    if step is not None:
        return lambda run, done, *_: (run, done) == (name, step) and os.kill(os.getpid(), signal.SIGKILL)
    replace = Path.replace

    def killing(self, target):
        if str(target).endswith(name):
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(self, target)

    Path.replace = killing
    return ignore


@pytest.mark.parametrize(
    "moment",
    [
        ("plain, seed 0", 1),
        ("composed, seed 0", 0),
        ("composed, seed 0", 3),
        ("plain/seed-0/result.json",),
        ("composed/seed-0/recipe.yaml",),
        ("composed/seed-0/result.json",),
    ],
    ids=["before_a_checkpoint", "between_runs", "after_a_checkpoint", "first_result", "second_recipe", "last_result"],
)
def test_a_sweep_that_is_killed_ends_with_the_same_results(moment, tmp_path, whole):
    def run():
        run_sweep(recipe(tmp_path), on_progress=kill_amid(*moment))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert numbers(run_sweep(recipe(tmp_path), on_progress=ignore)) == numbers(read(whole))
    assert numbers(read(tmp_path)) == numbers(read(whole))


@pytest.fixture
def unfinished(tmp_path, whole):
    """A sweep of which the first run has no result yet."""
    shutil.copytree(whole, tmp_path / "copy")
    (tmp_path / "copy/plain/seed-0/result.json").unlink()
    return tmp_path / "copy"


def test_a_damaged_checkpoint_of_a_run_moves_no_result(unfinished, whole, caplog):
    (unfinished / "plain/seed-0/checkpoint-3/optimizer.pt").unlink()
    (unfinished / "plain/seed-0/log.jsonl").write_text('{"loss": 1, "st')
    assert numbers(run_sweep(recipe(unfinished), on_progress=ignore)) == numbers(read(whole))
    assert "plain/seed-0/checkpoint-3' is damaged (optimizer.pt is missing)" in caplog.text


def test_a_cut_log_of_a_finished_run_is_written_anew(unfinished, whole):
    (unfinished / "plain/seed-0/log.jsonl").write_text('{"loss": 1, "st')
    assert numbers(run_sweep(recipe(unfinished), on_progress=ignore)) == numbers(read(whole))
    assert (unfinished / "plain/seed-0/log.jsonl").read_bytes() == (whole / "plain/seed-0/log.jsonl").read_bytes()


def test_a_run_without_a_sound_checkpoint_fails_and_the_others_finish(unfinished):
    (unfinished / "composed/seed-0/result.json").unlink()
    for step in (2, 3):
        (unfinished / f"plain/seed-0/checkpoint-{step}/model.safetensors").write_bytes(b"")
    with pytest.raises(RuntimeError, match=r"1 of 2 runs failed. plain, seed 0: There is no complete checkpoint left"):
        run_sweep(recipe(unfinished), on_progress=ignore)
    results = read(unfinished)
    assert [run["variant"] for run in results["runs"]] == ["composed"]
    assert [failure["variant"] for failure in results["failures"]] == ["plain"]
    assert (unfinished / "plain/seed-0/checkpoint-3").is_dir()
