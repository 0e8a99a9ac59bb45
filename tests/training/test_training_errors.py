"""What goes wrong in training ends in one sentence, and the checkpoints before stay whole."""

import errno
import math
import re
import shutil
import types

import pytest
import yaml
from safetensors import SafetensorError
from tiny_recipes import tiny_mapping, tiny_recipe
from typer.testing import CliRunner

from dcformer.cli import app
from dcformer.training import train
from dcformer.training.checkpoints import MARKER, checkpoint_folders, step_of
from dcformer.training.trainer import RecipeTrainer


EVERY_STEP = {"max_steps": 5, "save_steps": 1, "logging_steps": 2}


def whole_checkpoints(folder):
    folders = checkpoint_folders(folder)
    assert all((checkpoint / MARKER).is_file() for checkpoint in folders)
    return [step_of(checkpoint) for checkpoint in folders]


def break_at(monkeypatch, step, what):
    """From a step on, losses are NaN, or losses are finite and their gradients are not."""
    compute_loss = RecipeTrainer.compute_loss

    def broken(self, model, inputs, *args, **kwargs):
        loss = compute_loss(self, model, inputs, *args, **kwargs)
        if self.state.global_step + 1 < step:
            return loss
        if what == "loss":
            return loss * math.nan
        parameter = next(model.parameters())
        # A root has an infinite slope at 0.
        return loss + (parameter - parameter.detach()).sum().abs().sqrt()

    monkeypatch.setattr(RecipeTrainer, "compute_loss", broken)


@pytest.mark.parametrize("what", ["loss", "gradients"])
def test_numbers_that_are_not_finite_stop_training_at_their_step(what, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        break_at(patch, 4, what)
        with pytest.raises(FloatingPointError, match=rf"{what} became nan at step 4 .*checkpoint-3; try a lower"):
            train(tiny_recipe(tmp_path, training=EVERY_STEP))
    assert whole_checkpoints(tmp_path) == [2, 3]
    assert train(tiny_recipe(tmp_path, training=EVERY_STEP))["resumed_from"] == 3


@pytest.mark.parametrize("logging_steps", [2, 100], ids=["found_when_logging", "found_when_saving"])
@pytest.mark.parametrize("what", ["loss", "gradients"])
def test_broken_weights_are_not_saved_where_not_every_step_is_checked(what, logging_steps, tmp_path, monkeypatch):
    break_at(monkeypatch, 4, what)
    create = RecipeTrainer.__init__

    def as_on_a_gpu(self, *args, **kwargs):
        create(self, *args, **kwargs)
        self.checks_every_step = False

    monkeypatch.setattr(RecipeTrainer, "__init__", as_on_a_gpu)
    training = {**EVERY_STEP, "save_steps": 2, "logging_steps": logging_steps}
    with pytest.raises(FloatingPointError, match=r"at step 4 or in the .*checkpoint-2;"):
        train(tiny_recipe(tmp_path, training=training))
    assert whole_checkpoints(tmp_path) == [2]


# What the writers raise on a full disk, each of its own kind.
FULL_DISK = {
    "weights": (
        "transformers.modeling_utils.safe_save_file",
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ),
    "optimizer": ("torch.save", RuntimeError("basic_ios::clear: iostream error")),
    "state": ("transformers.TrainerState.save_to_json", OSError(errno.ENOSPC, "No space left on device")),
    "marker": ("dcformer.training.trainer.mark_complete", OSError(errno.ENOSPC, "No space left on device")),
}


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory):
    """A run that was stopped after its second step."""
    folder = tmp_path_factory.mktemp("stopped")

    def stop(step, total, record):
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tiny_recipe(folder, training=EVERY_STEP), on_progress=stop)
    assert whole_checkpoints(folder) == [1, 2]
    return folder


@pytest.mark.parametrize("writer", FULL_DISK)
def test_a_full_disk_leaves_the_checkpoint_before(writer, stopped_run, monkeypatch):
    name, error = FULL_DISK[writer]

    def full(*args, **kwargs):
        raise error

    monkeypatch.setattr(name, full)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: types.SimpleNamespace(free=0))
    with pytest.raises(OSError) as raised:
        train(tiny_recipe(stopped_run, training={**EVERY_STEP, "keep_checkpoints": 1}))
    assert raised.value.errno == errno.ENOSPC
    assert whole_checkpoints(stopped_run) == [1, 2]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"hidden_size": 32}}, "of another architecture: hidden_size is 16 there and 32 in the recipe"),
        ({"model": {"compose_post": False}}, "another architecture: compose_post is True there and False"),
        ({"training": {"learning_rate": 1e-3}}, "another recipe: training.learning_rate is 0.003 there and 0.001 here"),
        ({"training": {"max_steps": 9}}, "another recipe: training.steps is 5 there and 9 here"),
        ({"data": {"documents": 41}}, "another recipe: data.documents is 40 there and 41 here"),
        ({"seed": 1}, "another recipe: seed is 0 there and 1 here"),
    ],
    ids=["width", "composition", "learning_rate", "steps", "data", "seed"],
)
def test_a_folder_of_another_run_is_refused(sections, message, stopped_run):
    sections = {**sections, "training": {**EVERY_STEP, **sections.get("training", {})}}
    with pytest.raises(ValueError, match=message) as raised:
        train(tiny_recipe(stopped_run, **sections))
    assert "--no-resume" in str(raised.value)
    assert whole_checkpoints(stopped_run) == [1, 2]


def test_what_moves_no_loss_may_change_between_the_parts_of_a_run(stopped_run, tmp_path):
    folder = tmp_path / "moved"
    shutil.copytree(stopped_run, folder)
    free = {"per_device_batch_size": 1, "logging_steps": 1, "gradient_checkpointing": True, "keep_checkpoints": 3}
    recipe = tiny_recipe(folder, name="other", data={"evaluation": None}, training={**EVERY_STEP, **free})
    assert train(recipe)["resumed_from"] == 2


def run_command(tmp_path, **sections):
    """Exit status and lines on stderr of the command with a recipe of these sections."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tiny_mapping(tmp_path / "run", **sections)))
    result = CliRunner().invoke(app, ["train", str(recipe)])
    return result.exit_code, result.stderr.splitlines()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"source": "missing/folder/data.jsonl"}}, "missing/folder/data.jsonl"),
        ({"data": {"source": "{folder}/empty.jsonl"}}, "empty.jsonl"),
        ({"tokenizer": "./missing"}, "no tokenizer at './missing'"),
        ({"model": {"num_attention_heads": 3}}, "num_attention_heads must divide hidden_size"),
        ({"training": {"batch_tokens": 100}}, "multiple of 32 .*got 100; take 96 or 128"),
        ({"training": {"learning_rat": 1}}, "'training.learning_rat' is no key .*learning_rate"),
    ],
    ids=["missing_data", "empty_data", "missing_tokenizer", "impossible_model", "batch", "unknown_key"],
)
def test_wrong_recipes_end_the_command_with_one_line(sections, message, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    if "data" in sections:
        source = sections["data"]["source"].replace("{folder}", str(tmp_path))
        sections = {"data": {"source": source, "evaluation": None}}
    status, lines = run_command(tmp_path, **sections)
    assert status == 1
    assert len(lines) == 1, lines
    assert lines[0].startswith("Error: ")
    assert re.search(message, lines[0]), lines[0]
    assert not (tmp_path / "run" / "final").exists()


def test_the_command_says_what_to_do_on_a_full_disk(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dcformer.training.trainer.mark_complete", full)
    status, lines = run_command(tmp_path, training={"max_steps": 1})
    assert status == 1
    assert lines[-1].startswith("Error: The disk is full; free some space and run the same command again")
