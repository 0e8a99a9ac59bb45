"""Runs that are killed are resumed as if they never had been, and nothing else is taken for a checkpoint."""

import json
import math
import multiprocessing
import os
import shutil
import signal

import pytest
from tiny_recipes import deterministic, tiny_recipe

from dcformer.common.files import file_lock
from dcformer.training import merge_recipes, train
from dcformer.training.checkpoints import MARKER, checkpoint_folders, newest_checkpoint, step_of
from dcformer.training.trainer import RecipeTrainer


# Evaluations and saves at different steps, accumulation over two passes, dropout.
SECTIONS = {
    "plain_with_dropout": {"model": {"compose_pre": False, "compose_post": False, "attention_dropout": 0.2}},
    "muon_several_passes": {
        "data": {"documents": 2},
        "training": {"optimizer": "muon", "muon_learning_rate": 0.02},
    },
    "streaming_several_passes": {"data": {"streaming": True, "documents": 2}},
}
RUN = {"max_steps": 8, "logging_steps": 2, "evaluation_steps": 5, "save_steps": 3}
EVERY_STEP = {"max_steps": 5, "save_steps": 1, "logging_steps": 2}


def killed_at(step, recipe, while_saving=False):
    """Train in another process that kills itself with SIGKILL after a step, or amid the saving that follows it."""

    def kill(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def run():
        if while_saving:
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


def steps_in(folder):
    return [step_of(checkpoint) for checkpoint in checkpoint_folders(folder)]


@pytest.mark.parametrize("variant", SECTIONS)
def test_a_killed_run_goes_on_with_the_same_losses(variant, tmp_path):
    sections = merge_recipes(SECTIONS[variant], {"training": RUN})
    whole, stopped = tiny_recipe(tmp_path / "whole", **sections), tiny_recipe(tmp_path / "stopped", **sections)
    train(whole)
    killed_at(5, stopped)
    assert train(stopped)["resumed_from"] == 3
    expected, found = log(tmp_path / "whole"), log(tmp_path / "stopped")
    # A record of the loss every two steps and before every checkpoint, of an evaluation at 5 and the end.
    assert [record["step"] for record in expected] == [2, 3, 4, 5, 6, 8, 8]
    assert [record.keys() for record in found] == [record.keys() for record in expected]
    for record, other in zip(found, expected):
        assert record == pytest.approx(other, abs=1e-6)


def test_a_run_killed_while_saving_goes_on_from_the_checkpoint_before(tmp_path):
    recipe = tiny_recipe(tmp_path / "run", training=RUN)
    killed_at(6, recipe, while_saving=True)
    assert steps_in(tmp_path / "run") == [3, 6]
    assert step_of(newest_checkpoint(tmp_path / "run")) == 3
    assert train(recipe)["resumed_from"] == 3
    train(tiny_recipe(tmp_path / "whole", training=RUN))
    assert log(tmp_path / "run") == log(tmp_path / "whole")


def test_a_finished_run_is_left_as_it_is_and_mended(tmp_path):
    recipe = tiny_recipe(tmp_path, training={"max_steps": 3})
    first = train(recipe)
    (tmp_path / "final" / "notes.txt").touch()
    again = train(recipe)
    assert again["resumed_from"] == 3 and again["loss"] == first["loss"]
    assert (tmp_path / "final" / "notes.txt").exists()
    shutil.rmtree(tmp_path / "final")
    (tmp_path / "log.jsonl").write_text("{")
    train(recipe)
    assert (tmp_path / "final" / "model.safetensors").is_file() and log(tmp_path)[-1]["step"] == 3
    marker = json.loads((tmp_path / "checkpoint-3" / MARKER).read_text())
    assert marker == {"step": 3, "loss": first["loss"]}
    weights = (tmp_path / "final" / "model.safetensors").read_bytes()
    train(tiny_recipe(tmp_path, training={"max_steps": 2}), resume=False)
    assert steps_in(tmp_path) == [2] and (tmp_path / "final" / "model.safetensors").read_bytes() != weights


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory):
    """A run that was stopped after its third step."""
    folder = tmp_path_factory.mktemp("stopped")

    def stop(step, total, record):
        if step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tiny_recipe(folder, training=EVERY_STEP), on_progress=stop)
    assert steps_in(folder) == [2, 3]  # the newest two
    return folder


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_checkpoint_without_a_whole_marker_is_replaced(damage, stopped_run, tmp_path):
    shutil.copytree(stopped_run, tmp_path / "run")
    marker = tmp_path / "run" / "checkpoint-3" / MARKER
    marker.unlink() if damage == "missing" else marker.write_text('{"step": 3')
    assert train(tiny_recipe(tmp_path / "run", training=EVERY_STEP))["resumed_from"] == 2
    assert steps_in(tmp_path / "run") == [4, 5]


def test_what_moves_no_loss_may_change_and_anything_else_is_named(stopped_run, tmp_path):
    for sections, words in (
        ({"model": {"compose_post": False}}, "model.compose_post is None there and False here"),
        ({"training": {"learning_rate": 1e-3}}, "learning_rate is 0.003 there and 0.001 here"),
        ({"training": {"max_steps": 9}}, "steps is 5 there and 9 here"),
        ({"data": {"documents": 41}}, "data.documents is 40 there and 41 here"),
        ({"seed": 1}, "seed is 0 there and 1 here"),
    ):
        with pytest.raises(ValueError, match=words):
            train(tiny_recipe(stopped_run, **merge_recipes({"training": EVERY_STEP}, sections)))
    assert steps_in(stopped_run) == [2, 3]
    shutil.copytree(stopped_run, tmp_path / "moved")
    free = {"per_device_batch_size": 1, "logging_steps": 1, "gradient_checkpointing": True, "keep_checkpoints": 3}
    recipe = tiny_recipe(tmp_path / "moved", name="other", data={"evaluation": None}, training={**EVERY_STEP, **free})
    assert train(recipe)["resumed_from"] == 3


def test_a_folder_in_use_or_of_another_trainer_is_left_alone(tmp_path):
    (tmp_path / "checkpoint-500").mkdir()
    recipe = tiny_recipe(tmp_path)
    with pytest.raises(ValueError, match="checkpoint-500"):
        train(recipe, resume=False)
    with file_lock(tmp_path / ".lock"), pytest.raises(ValueError, match="lock"):
        train(recipe)
    assert (tmp_path / "checkpoint-500").is_dir() and not (tmp_path / "recipe.yaml").exists()


@pytest.mark.parametrize("what", ["loss", "grad_norm"])
def test_numbers_that_are_not_finite_stop_training_before_they_are_saved(what, tmp_path, monkeypatch):
    compute_loss = RecipeTrainer.compute_loss

    def broken(self, model, inputs, *args, **kwargs):
        loss = compute_loss(self, model, inputs, *args, **kwargs)
        if self.state.global_step + 1 < 4:
            return loss
        if what == "loss":
            return loss * math.nan
        parameter = next(model.parameters())
        # A root has an infinite slope at 0.
        return loss + (parameter - parameter.detach()).sum().abs().sqrt()

    with monkeypatch.context() as patch:
        patch.setattr(RecipeTrainer, "compute_loss", broken)
        with pytest.raises(FloatingPointError, match=rf"{what} became nan by step 4.*checkpoint-3"):
            train(tiny_recipe(tmp_path, training=EVERY_STEP))
    assert steps_in(tmp_path) == [2, 3]
    assert train(tiny_recipe(tmp_path, training=EVERY_STEP))["resumed_from"] == 3
