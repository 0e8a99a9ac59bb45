"""Runs that are killed are resumed as if they never had been, and a half-written checkpoint is none."""

import json
import multiprocessing
import os
import signal

import pytest
from tiny_recipes import deterministic, tiny_recipe

from dcformer.training import merge_recipes as merged
from dcformer.training import train
from dcformer.training.checkpoints import MARKER, checkpoint_folders, newest_checkpoint, step_of


# Saving between records, evaluations and saves at different steps, accumulation over two passes, dropout.
SECTIONS = {
    "composing": {},
    "plain_with_dropout": {"model": {"compose_pre": False, "compose_post": False, "attention_dropout": 0.2}},
    "muon": {"training": {"optimizer": "muon", "muon_learning_rate": 0.02}},
    "streaming": {"data": {"streaming": True}},
    "streaming_several_passes": {"data": {"streaming": True, "documents": 2}},
    "several_passes": {"data": {"documents": 2}},
}
RUN = {"max_steps": 8, "logging_steps": 2, "evaluation_steps": 5, "save_steps": 3}


def killed_at(step, recipe, while_saving=False):
    """Train in another process that kills itself with SIGKILL after a step, or amid the saving that follows it."""

    def kill(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def run():
        if while_saving:
            from dcformer.training.trainer import RecipeTrainer

            save = RecipeTrainer._save_rng_state
            RecipeTrainer._save_rng_state = lambda self, folder: (
                kill() if folder.endswith(f"-{step}") else save(self, folder)
            )
        train(recipe, on_progress=lambda done, total, record: None if done < step or while_saving else kill())

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def log(folder):
    return deterministic([json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()])


@pytest.mark.parametrize("variant", SECTIONS)
def test_a_killed_run_goes_on_with_the_same_losses(variant, tmp_path):
    sections = merged(SECTIONS[variant], {"training": RUN})
    whole, stopped = tiny_recipe(tmp_path / "whole", **sections), tiny_recipe(tmp_path / "stopped", **sections)
    train(whole)
    killed_at(5, stopped)
    assert step_of(newest_checkpoint(tmp_path / "stopped")) == 3
    assert train(stopped)["resumed_from"] == 3
    expected, found = log(tmp_path / "whole"), log(tmp_path / "stopped")
    assert [record["step"] for record in expected] == [2, 4, 5, 6, 8, 8]
    assert [record.keys() for record in found] == [record.keys() for record in expected]
    for record, other in zip(found, expected):
        assert record == pytest.approx(other, abs=1e-6)


def test_a_run_killed_while_saving_goes_on_from_the_checkpoint_before(tmp_path):
    recipe = tiny_recipe(tmp_path / "run", training=RUN)
    killed_at(6, recipe, while_saving=True)
    assert [step_of(folder) for folder in checkpoint_folders(tmp_path / "run")] == [3, 6]
    assert step_of(newest_checkpoint(tmp_path / "run")) == 3
    assert train(recipe)["resumed_from"] == 3
    train(tiny_recipe(tmp_path / "whole", training=RUN))
    assert log(tmp_path / "run") == log(tmp_path / "whole")
    assert all((folder / MARKER).is_file() for folder in checkpoint_folders(tmp_path / "run"))


def test_a_finished_run_is_left_as_it_is(tmp_path):
    recipe = tiny_recipe(tmp_path / "run", training={"max_steps": 3})
    first = train(recipe)
    weights = (tmp_path / "run" / "final" / "model.safetensors").read_bytes()
    again = train(recipe)
    assert again["resumed_from"] == 3
    assert (again["loss"], again["evaluation_loss"]) == (first["loss"], first["evaluation_loss"])
    assert (tmp_path / "run" / "final" / "model.safetensors").read_bytes() == weights


def test_starting_over_removes_the_checkpoints_of_the_run_before(tmp_path):
    train(tiny_recipe(tmp_path, training={"max_steps": 4}))
    result = train(tiny_recipe(tmp_path, training={"max_steps": 3}, seed=1), resume=False)
    assert result["resumed_from"] == 0
    assert [step_of(folder) for folder in checkpoint_folders(tmp_path)] == [3]


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    train(tiny_recipe(tmp_path, training={"max_steps": 5, "save_steps": 1, "keep_checkpoints": 2}))
    assert [step_of(folder) for folder in checkpoint_folders(tmp_path)] == [4, 5]
