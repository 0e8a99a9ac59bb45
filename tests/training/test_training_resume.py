"""Killed runs are resumed as if they had not been killed, from undamaged checkpoints of the same recipe and data."""

import contextlib
import itertools
import json
import math
import os
import shutil
import signal
from dataclasses import replace

import datasets
import killable
import pytest
from tiny_recipes import deterministic, tiny_mapping, tiny_recipe

from dcformer.common.files import file_lock, find_damage, read_sealed, seal
from dcformer.training import Recipe, load_recipe, merge_recipes, run_files, train
from dcformer.training.run_files import MARKER, UNFINISHED, checkpoint_folders, find_newest, step_of
from dcformer.training.trainer import RecipeTrainer


# Evaluations and saves at different steps, accumulation over two passes, several passes over the data.
PLAIN = {"compose_pre": False, "compose_post": False, "attention_dropout": 0.2}
MUON = {"optimizer": "muon", "muon_learning_rate": 0.02}
# Sections of a recipe, the step at which it is killed, and the checkpoints that it has then.
KILLED = {
    "plain_with_dropout": ({"model": PLAIN, "data": {"documents": 2}}, 5, [3]),
    "muon_streaming": ({"data": {"streaming": True, "documents": 2}, "training": MUON}, 5, [3]),
    "while_saving": ({}, 6, [3]),
    "while_saving_first": ({}, 3, []),
}
RUN = {"max_steps": 8, "logging_steps": 2, "evaluation_steps": 5, "save_steps": 3}
EVERY_STEP = {"max_steps": 12, "save_steps": 1, "logging_steps": 4}


def train_until_killed(step, recipe, while_saving):
    """Train until this process kills itself after a step, or amid the saving that follows it."""
    save = RecipeTrainer._save_rng_state

    def kill_at(reached):
        if reached:
            os.kill(os.getpid(), signal.SIGKILL)

    def save_or_die(self, folder):
        kill_at(while_saving and folder.endswith(f"-{step}"))
        save(self, folder)

    RecipeTrainer._save_rng_state = save_or_die
    train(recipe, on_progress=lambda done, total, record: kill_at(done >= step and not while_saving))


def damage(file, how):
    """Damage a file as disks, copies and people do."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.unlink() if how == "missing" else file.write_bytes(content if how == "flipped" else content[:-9])


def tree(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def log(folder):
    return deterministic([json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()])


def steps_in(folder):
    return [step_of(checkpoint) for checkpoint in checkpoint_folders(folder)]


@pytest.mark.parametrize("variant", KILLED)
def test_a_killed_run_is_resumed_with_the_same_losses(variant, tmp_path, tmp_path_factory):
    sections, step, saved = KILLED[variant]
    whole, stopped = tmp_path_factory.getbasetemp() / "-".join(["whole", *sections]), tmp_path / "stopped"
    sections = merge_recipes(sections, {"training": RUN})
    train(tiny_recipe(whole, **sections))  # which the variants that are killed while saving share
    recipe = tiny_recipe(stopped, **sections)
    process = killable.Process(train_until_killed, step, recipe, step != 5)
    process.join()
    assert process.exitcode == -signal.SIGKILL and steps_in(stopped) == saved
    assert (stopped / UNFINISHED / f"checkpoint-{step}").is_dir() == (step != 5)
    assert train(recipe)["resumed_from"] == sum(saved) and not (stopped / UNFINISHED).exists()
    expected, resumed = log(whole), log(stopped)
    # A record of the loss every two steps and before every checkpoint, of an evaluation at 5 and the end.
    assert [record["step"] for record in expected] == [2, 3, 4, 5, 6, 8, 8]
    assert [record.keys() for record in resumed] == [record.keys() for record in expected]
    for record, other in zip(resumed, expected):
        assert record == pytest.approx(other, abs=1e-6)


def test_a_finished_run_is_left_as_it_is_and_mended(tmp_path, caplog):
    recipe = tiny_recipe(tmp_path, training={"max_steps": 3})
    first = train(recipe)
    (tmp_path / "final" / "notes.txt").touch()
    again = train(recipe)
    assert again["resumed_from"] == 3 and again["loss"] == first["loss"]
    assert (tmp_path / "final" / "notes.txt").exists()
    marker = json.loads((tmp_path / "checkpoint-3" / MARKER).read_text())
    assert marker["step"] == 3 and marker["loss"] == first["loss"]
    weights = (tmp_path / "final" / "model.safetensors").read_bytes()
    final_marker = tmp_path / "final" / MARKER
    for name, how in (("model.safetensors", "missing"), ("model.safetensors", "cut"), ("tokenizer.json", "flipped")):
        damage(tmp_path / "final" / name, how)
        train(recipe)
        assert (tmp_path / "final" / name).read_bytes() == (tmp_path / "checkpoint-3" / name).read_bytes()
        assert (tmp_path / "final" / "notes.txt").exists() and str(tmp_path) not in final_marker.read_text()
        assert "final' is damaged: " + name in caplog.text
    shutil.rmtree(tmp_path / "final")
    (tmp_path / "log.jsonl").write_text("{")
    (tmp_path / "recipe.yaml").write_text("name: [")
    train(recipe)
    assert load_recipe(tmp_path / "recipe.yaml") == recipe
    assert (tmp_path / "final" / "model.safetensors").read_bytes() == weights and log(tmp_path)[-1]["step"] == 3
    train(tiny_recipe(tmp_path, training={"max_steps": 2}), resume=False)
    assert steps_in(tmp_path) == [2] and (tmp_path / "final" / "model.safetensors").read_bytes() != weights


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A finished run; beside it `stopped`, what it had written after its eleventh step, before that was saved."""
    folder = tmp_path_factory.mktemp("runs") / "whole"

    def copy(step, total, record):
        if step == 11 and not folder.with_name("stopped").exists():
            shutil.copytree(folder, folder.with_name("stopped"))

    train(tiny_recipe(folder, training=EVERY_STEP), on_progress=copy)
    return folder


@pytest.fixture
def copied(whole_run, tmp_path):
    return shutil.copytree(whole_run.with_name("stopped"), tmp_path / "run", symlinks=True)


@pytest.mark.parametrize("where", ["optimizer.pt", "folder", "link"])
def test_a_damaged_checkpoint_is_named_and_written_anew_from_the_one_before(where, copied, whole_run, caplog):
    newest, moved = copied / "checkpoint-10", copied.parent / "moved"
    if where == "folder":
        newest = newest.rename(copied / "checkpoint-00010")
    elif where == "link":  # to a disk that is not there
        newest.rename(moved)
        newest.symlink_to(moved / "nowhere")
    else:
        damage(newest / where, "flipped")
    assert train(tiny_recipe(copied, training={**EVERY_STEP, "keep_checkpoints": 3}))["resumed_from"] == 9
    assert f"{newest / where if where == 'optimizer.pt' else newest}' " in caplog.text
    assert steps_in(copied) == [10, 11, 12] and find_newest(copied) == (copied / "checkpoint-12", [])
    assert find_damage(copied / "checkpoint-10", read_sealed(copied / "checkpoint-10" / MARKER)["files"]) is None
    assert log(copied) == log(whole_run)
    for file in ("final/model.safetensors", "checkpoint-12/model.safetensors"):
        assert (copied / file).read_bytes() == (whole_run / file).read_bytes()
    assert where != "link" or find_damage(moved, read_sealed(moved / MARKER)["files"]) is None


def resealed(**changes):
    """Changes the values of a marker, or takes those away that are None."""

    def change(marker):
        values = {**read_sealed(marker), **changes}
        marker.write_text(seal({key: value for key, value in values.items() if value is not None}))

    return change


def list_a_file_elsewhere(marker):
    resealed(files={**read_sealed(marker)["files"], "../a": {"size": 3, "sha256": "a"}})(marker)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("trainer_state.json", "flipped", "was changed"),
        ("rng_state.pth", "missing", "is missing"),
        ("scheduler.pt", "cut", "bytes instead of"),
        (MARKER, "missing", "is not complete"),
        (MARKER, "cut", "is damaged: it is not JSON"),
        *((MARKER, resealed(**{key: None}), f"{key}' is missing") for key in run_files._VALUES),
        (MARKER, resealed(files=[]), "'files' is missing or of a wrong type"),
        (MARKER, list_a_file_elsewhere, "must stay inside its folder"),
        (MARKER, resealed(recipe={"tokenizer": "a", "unknown": 1}), "is damaged: Key 'unknown'"),
        (MARKER, resealed(step=9), "was renamed"),
        ("scaler.pt", lambda file: file.touch(), "is not among the files"),
    ],
)
def test_damage_is_named_and_where_no_checkpoint_is_whole_nothing_is_removed(name, change, words, copied):
    file = copied / "checkpoint-10" / name
    damage(file, change) if isinstance(change, str) else change(file)
    checkpoint, (flaw,) = find_newest(copied)
    assert checkpoint.name == "checkpoint-9" and words in flaw
    assert repr(str(file)) in flaw or (name == MARKER and repr(str(file.parent)) in flaw)
    shutil.rmtree(copied / "checkpoint-9")
    before = tree(copied)
    with pytest.raises(ValueError, match=r"None is whole, and nothing was removed; .* start over with --no-resume"):
        train(tiny_recipe(copied, training=EVERY_STEP))
    assert tree(copied) == before


def test_folders_that_are_links_are_followed_and_only_the_link_is_removed(copied):
    moved = copied.parent / "moved"
    moved.mkdir()
    for name in ("checkpoint-9", "checkpoint-10"):
        shutil.move(copied / name, moved / name)
        (copied / name).symlink_to(moved / name)
    (moved / "final").mkdir()
    (moved / "final" / "notes.txt").touch()
    (copied / "final").symlink_to(moved / "final")
    before = tree(moved)
    recipe = tiny_recipe(copied, training=EVERY_STEP)
    assert train(recipe)["resumed_from"] == 10
    assert steps_in(copied) == [11, 12] and (copied / "final" / MARKER).is_file()
    (copied / "final" / "model.safetensors").unlink()
    shutil.move(copied / "final", moved / "newer")
    (copied / "final").symlink_to(moved / "newer")
    assert train(recipe)["resumed_from"] == 12 and (moved / "newer" / "model.safetensors").is_file()
    assert {path: content for path, content in tree(moved).items() if "newer" not in path.parts} == before


@pytest.mark.parametrize("name", ["checkpoint-11", "final", UNFINISHED])
def test_a_file_where_a_folder_belongs_is_refused_before_the_first_step(name, copied):
    shutil.rmtree(copied / name, ignore_errors=True)
    (copied / name).write_text("mine")
    before = tree(copied)
    for resume in (True, False):
        with pytest.raises(ValueError, match=f"{name}' is a file .* move it away"):
            train(tiny_recipe(copied, training=EVERY_STEP), resume=resume)
    assert tree(copied) == before


class PowerCut(BaseException):
    """The end of everything, between two changes of the disk."""


def write_checkpoint(output, step, *names):
    """A checkpoint in its place, that held these files before it was marked as complete."""
    folder = output / UNFINISHED / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    for name in ("model.safetensors", *names):
        (folder / name).write_text(f"{name} {step}")
    values = {"step": step, "loss": 1.0, "recipe": tiny_recipe("a").to_mapping(), "fingerprints": {}}
    return run_files.finish_checkpoint(folder, values)


def cut_power(patch, number):
    """Let so many changes of the disk happen; returns these, and the inodes of what was flushed."""
    changes, flushed = [], []

    def patched(name, original):
        def change(*arguments, **options):
            if len(changes) == number:
                raise PowerCut
            if name == "fsync":
                flushed.append(os.fstat(arguments[0]).st_ino)
            changes.append((name, flushed[-1] if name == "fsync" else str(arguments[0])))
            return original(*arguments, **options)

        patch.setattr(os, name, change)

    for name in ("rename", "replace", "unlink", "rmdir", "fsync"):
        patched(name, getattr(os, name))
    return changes, flushed


def test_a_power_cut_at_any_moment_leaves_whole_folders(tmp_path, monkeypatch):
    """What was not flushed is lost: the content of files, or the new place of a checkpoint."""
    shown = ["chat_template.jinja", "vocab.txt", "tokenizer.model", "code.py", "a.json"]
    for number in itertools.count():
        output, ended = tmp_path / str(number), False
        run_files.write_final(write_checkpoint(output, 9, *shown, "trainer_state.json"), output / "final")
        assert {path.name for path in (output / "final").iterdir()} == {"model.safetensors", MARKER, *shown}
        known = {path.stat().st_ino for path in output.rglob("*")}
        with monkeypatch.context() as patch, contextlib.suppress(PowerCut):
            changes, flushed = cut_power(patch, number)
            new = write_checkpoint(output, 10, "a.json", "optimizer.pt")
            run_files.remove_folder(output / "checkpoint-9")
            run_files.write_final(new, output / "final")
            ended = True
        for file in output.rglob("*"):
            if file.is_file() and file.stat().st_ino not in {*known, *flushed}:
                file.write_bytes(b"")
        newest, flaws = find_newest(output)
        final = output / "final"
        assert newest is not None and flaws == []
        assert not final.exists() or find_damage(final, read_sealed(final / MARKER)["files"]) is None
        run_files.write_final(newest, final)
        assert (final / "model.safetensors").read_text() == f"model.safetensors {step_of(newest)}"
        if ended:
            break
    assert number > 20 and {path.name for path in final.iterdir()} == {"model.safetensors", MARKER, "a.json"}
    places = [("rename", str(output / UNFINISHED / "checkpoint-10")), ("fsync", output.stat().st_ino)]
    places += [("rename", str(output / "checkpoint-9"))]
    assert [change for change in changes if change in places] == places


CHANGES = [
    ("data.source", "data.jsonl", b"John", b"Anne"),
    ("tokenizer", "tokenizer.json", b'"normalizer": null', b'"normalizer": {"type": "Lowercase"}'),
    ("model.pretrained", "model.safetensors", b"{", b"{ "),
    ("model.pretrained", "config.json", b"{", b"{ "),
]


def test_other_data_tokenizers_or_weights_are_refused_and_touched_files_are_not(whole_run, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    base, evaluation = shutil.copytree(whole_run / "final", tmp_path / "base"), tmp_path / "evaluation.jsonl"
    for file, name in ((base / "data.jsonl", "John"), (evaluation, "Mary")):
        file.write_text("".join(json.dumps({"text": f"{name} has {number}"}) + "\n" for number in range(40)))
    data = {"source": f"{base}/data.jsonl", "evaluation": {"source": str(evaluation)}}
    values = tiny_mapping(tmp_path / "run", tokenizer=str(base), data=data, training={"max_steps": 2, "save_steps": 1})
    recipe = Recipe.from_mapping({**values, "model": {"pretrained": str(base)}})
    first = train(recipe)
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")
    unfinished = replace(recipe, output=str(shutil.copytree(tmp_path / "run", tmp_path / "unfinished")))
    for file in base.iterdir():
        os.utime(file, (5, 5))
    (base / "README.md").write_text("no loss depends on this")
    evaluation.write_text(evaluation.read_text().replace("has", "saw"))  # nor a training loss on this
    again = train(recipe)
    assert again["resumed_from"] == 1 and again["loss"] == pytest.approx(first["loss"], abs=1e-6)
    assert again["evaluation_loss"] != first["evaluation_loss"]
    for key, name, old, new in CHANGES:
        content = (base / name).read_bytes()
        assert old in content
        (base / name).write_bytes(content.replace(old, new))
        os.utime(base / name, (5, 5))  # as if it had not been written
        for step, run in ((2, recipe), (1, unfinished)):
            with pytest.raises(ValueError, match=rf"{key} '.*' has other content than .*checkpoint-{step}"):
                train(run)
        (base / name).write_bytes(content)
    assert train(unfinished)["resumed_from"] == 1
    shutil.rmtree(base)
    assert train(recipe)["resumed_from"] == 2  # nothing is read


def test_settings_that_no_loss_depends_on_may_change_and_others_are_named(copied):
    for sections, words in (
        ({"model": {"compose_post": False}}, "model.compose_post is None there and False here"),
        ({"training": {"learning_rate": 1e-3}}, "learning_rate is 0.003 there and 0.001 here"),
        ({"training": {"max_steps": 19}}, "steps is 12 there and 19 here"),
        ({"data": {"documents": 41}}, "data.documents is 40 there and 41 here"),
        ({"data": {"sample_by": "line"}}, "data.sample_by is 'document' there and 'line' here"),
        ({"seed": 1}, "seed is 0 there and 1 here"),
    ):
        with pytest.raises(ValueError, match=words):
            train(tiny_recipe(copied, **merge_recipes({"training": EVERY_STEP}, sections)))
    assert steps_in(copied) == [9, 10]
    (copied / "recipe.yaml").write_text("name: [")  # is not read
    free = {"per_device_batch_size": 1, "logging_steps": 1, "gradient_checkpointing": True, "keep_checkpoints": 3}
    recipe = tiny_recipe(copied, name="other", data={"evaluation": None}, training={**EVERY_STEP, **free})
    assert train(recipe)["resumed_from"] == 10 and load_recipe(copied / "recipe.yaml") == recipe


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

    recipe = tiny_recipe(tmp_path, training={**EVERY_STEP, "max_steps": 4})
    with monkeypatch.context() as patch:
        patch.setattr(RecipeTrainer, "compute_loss", broken)
        with pytest.raises(FloatingPointError, match=rf"{what} became nan by step 4.*checkpoint-3; .* than 0.003\.$"):
            train(recipe)
    assert steps_in(tmp_path) == [2, 3]
    assert train(recipe)["resumed_from"] == 3
