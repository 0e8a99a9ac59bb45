"""One process writes a folder at a time, and a folder that cannot be written is found before training."""

import errno
import multiprocessing
import signal

import pytest
import yaml
from tiny_recipes import tiny_mapping, tiny_recipe
from typer.testing import CliRunner

from dcformer.cli import app
from dcformer.experiments.runner import run_sweep
from dcformer.training import train
from dcformer.training.run_folder import LOCK, locked_folder


SWEEP = {"seeds": [0], "variants": {"plain": {}}}


@pytest.mark.parametrize(
    "start", [train, run_sweep, lambda recipe: train(recipe, resume=False)], ids=["train", "sweep", "no_resume"]
)
def test_a_second_run_in_a_folder_is_refused_before_it_changes_anything(start, tmp_path):
    recipe = tiny_recipe(tmp_path, sweep=SWEEP)
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "recipe.yaml").touch()
    with locked_folder(tmp_path), pytest.raises(ValueError, match=r"Another run is writing .*; wait for it to end"):
        start(recipe)
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, "checkpoint-1", "recipe.yaml"]


def test_a_run_of_a_sweep_is_kept_apart_from_a_run_of_its_own(tmp_path):
    with locked_folder(tmp_path / "plain" / "seed-0"), pytest.raises(ValueError, match=r"plain/seed-0'; wait for it"):
        run_sweep(tiny_recipe(tmp_path, sweep=SWEEP), on_progress=lambda *_: None)


def test_a_lock_ends_with_its_process_however_that_ends(tmp_path):
    def hold(sender):
        with locked_folder(tmp_path):
            sender.send("locked")
            signal.pause()

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=hold, args=(sender,))
    process.start()
    assert receiver.recv() == "locked"
    with pytest.raises(ValueError, match="Another run"), locked_folder(tmp_path):
        pass
    process.kill()
    process.join()
    with locked_folder(tmp_path), pytest.raises(ValueError, match="Another run"), locked_folder(tmp_path):
        pass


def test_a_file_system_without_locks_is_told_and_used(tmp_path, monkeypatch, caplog):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with locked_folder(tmp_path):
        assert "cannot be locked (Operation not supported)" in caplog.text


def run_command(folder, output):
    """Exit status and lines on stderr of the command with a tiny recipe."""
    recipe = folder / "recipe_to_run.yaml"
    recipe.write_text(yaml.safe_dump(tiny_mapping(output)))
    result = CliRunner().invoke(app, ["train", str(recipe)])
    return result.exit_code, result.stderr.splitlines()


def below_a_file(folder):
    (folder / "file").touch()
    return folder / "file" / "run"


def with_a_folder_for_the_recipe(folder):
    (folder / "run" / "recipe.yaml").mkdir(parents=True)
    return folder / "run"


def with_a_file_for_a_checkpoint(folder):
    (folder / "run").mkdir()
    (folder / "run" / "checkpoint-3").touch()
    return folder / "run"


def with_a_broken_link_for_the_model(folder):
    (folder / "run").mkdir()
    (folder / "run" / "final").symlink_to("nowhere")
    return folder / "run"


def with_checkpoints_of_another_trainer(folder):
    (folder / "run" / "checkpoint-500").mkdir(parents=True)
    (folder / "run" / "checkpoint-500" / "model.safetensors").touch()
    return folder / "run"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (below_a_file, "file/run' cannot be written (Not a directory); give another output"),
        (with_a_folder_for_the_recipe, "recipe.yaml' cannot be written (Is a directory)"),
        (with_a_file_for_a_checkpoint, "checkpoint-3' is no folder, and the run writes one of that name; remove it"),
        (with_a_broken_link_for_the_model, "final' is no folder, and the run writes one of that name; remove it"),
        (with_checkpoints_of_another_trainer, "holds checkpoint-500, which is of no run of a recipe"),
    ],
)
def test_a_folder_that_cannot_be_used_ends_the_command_with_one_line(make, message, tmp_path, monkeypatch):
    monkeypatch.setattr("dcformer.training.trainer.RecipeTrainer.train", lambda *_, **__: pytest.fail("it trained"))
    output = make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    status, lines = run_command(tmp_path, output)
    assert status == 1
    assert len(lines) == 1 and lines[0].startswith("Error: ") and message in lines[0], lines
    assert set(before) <= set(tmp_path.rglob("*"))


def test_a_read_only_folder_is_named(tmp_path, monkeypatch):
    def read_only(**_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    status, lines = run_command(tmp_path, tmp_path / "run")
    assert status == 1 and len(lines) == 1 and "run' cannot be written (Read-only file system)" in lines[0]
