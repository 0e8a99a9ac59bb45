"""Checkpoints that changed after they were written are found and named, and the complete one before is taken."""

import json
import os
import shutil

import pytest
from tiny_recipes import deterministic, tiny_recipe

from dcformer.training import train
from dcformer.training.checkpoints import (
    MARKER,
    DamagedCheckpointError,
    checkpoint_folders,
    mark_complete,
    newest_checkpoint,
    read_marker,
    remove_checkpoint,
    remove_incomplete,
    remove_old,
    step_of,
)
from dcformer.training.integrity import describe_files, find_damage


FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "config.json")


def make_checkpoint(output, step):
    """Files with the names of a checkpoint's, of other bytes in every one."""
    folder = output / f"checkpoint-{step}"
    (folder / "optimizer_0").mkdir(parents=True)
    for name in (*FILES, "optimizer_0/part_0.distcp"):
        (folder / name).write_bytes(f"{name} of step {step}".encode() * 9)
    mark_complete(folder, {"step": step, "loss_since_log": 0.5, "logged_step": step, "recipe": {"seed": 0}})
    return folder


@pytest.fixture
def run(tmp_path):
    """A run with two complete checkpoints, 20 and 40."""
    for step in (20, 40):
        make_checkpoint(tmp_path, step)
    return tmp_path


def flip_bit(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def replace_by_folder(file):
    file.unlink()
    file.mkdir()


def replace_by_broken_link(file):
    file.unlink()
    file.symlink_to("nowhere")


def replace_by_that_of_another_checkpoint(file):
    shutil.copy(file.parents[1] / "checkpoint-20" / file.name, file)


DAMAGES = {
    "cut": lambda file: os.truncate(file, file.stat().st_size // 2),
    "empty": lambda file: os.truncate(file, 0),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "missing": lambda file: file.unlink(),
    "flipped_bit": flip_bit,
    "of_another_checkpoint": replace_by_that_of_another_checkpoint,
    "folder": replace_by_folder,
    "broken_link": replace_by_broken_link,
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_the_checkpoint_before_taken(damage, name, run, caplog):
    DAMAGES[damage](run / "checkpoint-40" / name)
    assert newest_checkpoint(run).name == "checkpoint-20"
    (warning,) = caplog.messages
    assert f"checkpoint-40' is damaged ({name} " in warning and "is resumed from checkpoint-20" in warning
    assert step_of(checkpoint_folders(run)[-1]) == 40


def test_files_in_sub_folders_are_looked_at_too(run, caplog):
    flip_bit(run / "checkpoint-40" / "optimizer_0" / "part_0.distcp")
    assert newest_checkpoint(run).name == "checkpoint-20"
    assert "optimizer_0/part_0.distcp has another SHA-256" in caplog.text


@pytest.mark.parametrize("damage", sorted(set(DAMAGES) - {"missing"}))
def test_a_damaged_marker_is_no_interruption(damage, run, caplog):
    DAMAGES[damage](run / "checkpoint-40" / MARKER)
    assert newest_checkpoint(run).name == "checkpoint-20"
    assert f"checkpoint-40' is damaged ({MARKER} " in caplog.text
    assert remove_incomplete(run) == []


def changed(**changes):
    return lambda values: json.dumps({**values, **changes})


def without(*keys):
    return lambda values: json.dumps({key: value for key, value in values.items() if key not in keys})


MARKERS = {
    "list": (lambda values: "[1, 2]", "holds no mapping"),
    "null": (lambda values: "null", "holds no mapping"),
    "no_text": (lambda values: b"\xff\xfe", "is no JSON"),
    "nested": (lambda values: "[" * 100_000, "is no JSON"),
    "negative_step": (changed(step=-40), "is not as it was written"),
    "another_loss": (changed(loss_since_log=0.25), "is not as it was written"),
    "no_recipe": (without("recipe"), "is not as it was written"),
    "no_files": (without("files"), "is not as it was written"),
    "no_checksum": (without("sha256"), "is not as it was written"),
    "files_no_mapping": (changed(files=[1]), "is not as it was written"),
    "earlier_without_recipe": (without("files", "sha256", "recipe"), "has no recipe"),
    "earlier_of_another_step": (
        lambda values: without("files", "sha256")({**values, "step": 20}),
        "is of step 20",
    ),
    "earlier_with_a_negative_step": (
        lambda values: without("files", "sha256")({**values, "step": -40}),
        "has a wrong step",
    ),
    "earlier_with_text_for_a_number": (
        lambda values: without("files", "sha256")({**values, "logged_step": "40"}),
        "has a wrong logged_step",
    ),
}


@pytest.mark.parametrize("kind", MARKERS)
def test_a_marker_with_wrong_values_is_damaged(kind, run, caplog):
    write, message = MARKERS[kind]
    file = run / "checkpoint-40" / MARKER
    text = write(json.loads(file.read_text()))
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert newest_checkpoint(run).name == "checkpoint-20"
    assert f"checkpoint-40' is damaged ({MARKER} {message})" in caplog.text


def test_a_checkpoint_under_another_name_is_damaged(run, caplog):
    (run / "checkpoint-40").rename(run / "checkpoint-60")
    assert newest_checkpoint(run).name == "checkpoint-20"
    assert f"checkpoint-60' is damaged ({MARKER} is of step 40)" in caplog.text


@pytest.mark.parametrize(
    "name", ["pytorch_model_fsdp.bin", "scaler.pt", "model.safetensors.index.json", "rng_state_1.pth"]
)
def test_a_file_that_would_be_read_must_be_of_the_run(name, run, caplog):
    (run / "checkpoint-40" / name).write_bytes(b"{}")
    assert newest_checkpoint(run).name == "checkpoint-20"
    assert f"checkpoint-40' is damaged ({name} was not written by the run)" in caplog.text


@pytest.mark.parametrize("name", ["notes.txt", ".DS_Store", "eval_results.json", "model_card.md"])
def test_other_files_beside_those_of_the_run_do_no_harm(name, run, caplog):
    (run / "checkpoint-40" / name).write_text("{}")
    assert newest_checkpoint(run).name == "checkpoint-40"
    assert caplog.messages == []


def test_a_link_to_the_same_bytes_is_sound(run):
    file = run / "checkpoint-40" / "model.safetensors"
    file.rename(run / "elsewhere")
    file.symlink_to(run / "elsewhere")
    assert newest_checkpoint(run).name == "checkpoint-40"


def test_checkpoints_of_earlier_versions_are_taken_with_a_word(run, caplog):
    file = run / "checkpoint-40" / MARKER
    file.write_text(without("files", "sha256")(json.loads(file.read_text())))
    assert newest_checkpoint(run).name == "checkpoint-40"
    assert "by an earlier version, without checksums" in caplog.text
    (run / "checkpoint-40" / "scheduler.pt").unlink()
    assert newest_checkpoint(run).name == "checkpoint-20"
    assert "checkpoint-40' is damaged (scheduler.pt is missing)" in caplog.text


def test_nothing_is_taken_silently_when_all_are_damaged(run):
    flip_bit(run / "checkpoint-40" / "optimizer.pt")
    (run / "checkpoint-20" / "scheduler.pt").unlink()
    with pytest.raises(DamagedCheckpointError) as raised:
        newest_checkpoint(run)
    message = str(raised.value)
    assert "checkpoint-40' is damaged (optimizer.pt has another SHA-256" in message
    assert "checkpoint-20' is damaged (scheduler.pt is missing)" in message
    assert "--no-resume" in message and "\n" not in message


def test_a_folder_without_checkpoints_has_none(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "missing") is None


def test_a_folder_without_a_marker_was_interrupted(run):
    (run / "checkpoint-40" / MARKER).unlink()
    assert newest_checkpoint(run).name == "checkpoint-20"
    assert remove_incomplete(run) == [run / "checkpoint-40"]
    assert checkpoint_folders(run) == [run / "checkpoint-20"]


def test_the_marker_lists_every_file_below_the_checkpoint(run):
    files = read_marker(run / "checkpoint-40")["files"]
    assert set(files) == {*FILES, "optimizer_0/part_0.distcp"}
    assert files == describe_files(run / "checkpoint-40", leave_out=[MARKER])
    assert find_damage(run / "checkpoint-40", files) is None


@pytest.mark.parametrize(
    ("damaged", "left"),
    [((), [40, 60]), ((60,), [20, 40, 60]), ((40,), [20, 40, 60]), ((20, 40), [20, 40, 60])],
    ids=["none", "newest", "middle", "all_but_one"],
)
def test_damaged_checkpoints_are_not_counted_among_those_that_are_kept(damaged, left, run):
    make_checkpoint(run, 60)
    remove_old(run, 2, [run / f"checkpoint-{step}" for step in damaged])
    assert [step_of(folder) for folder in checkpoint_folders(run)] == left


@pytest.mark.parametrize("damage", [lambda file: None, replace_by_folder, replace_by_broken_link])
def test_checkpoints_are_removed_whatever_their_marker_is(damage, run):
    damage(run / "checkpoint-40" / MARKER)
    remove_checkpoint(run / "checkpoint-40")
    assert not (run / "checkpoint-40").exists()


RUN = {"max_steps": 8, "logging_steps": 2, "evaluation_steps": 5, "save_steps": 3, "keep_checkpoints": 3}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a finished run with the checkpoints 3, 6 and 8."""
    folder = tmp_path_factory.mktemp("whole")
    train(tiny_recipe(folder, training=RUN))
    return folder


@pytest.fixture
def copy(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "copy")
    return tmp_path / "copy"


def log(folder):
    return deterministic([json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()])


def remove_optimizer(checkpoint):
    (checkpoint / "optimizer.pt").unlink()


def swap_weights(checkpoint):
    shutil.copy(checkpoint.parent / "checkpoint-3" / "model.safetensors", checkpoint)


@pytest.mark.parametrize("damage", [remove_optimizer, swap_weights])
def test_training_past_damaged_checkpoints_is_that_of_a_run_without(damage, copy, whole, caplog):
    for step in (6, 8):
        damage(copy / f"checkpoint-{step}")
        (copy / f"checkpoint-{step}" / "pytorch_model.bin").touch()
    assert train(tiny_recipe(copy, training=RUN))["resumed_from"] == 3
    assert sum("is damaged" in message for message in caplog.messages) == 2
    assert len(log(copy)) == len(log(whole))
    for record, other in zip(log(copy), log(whole)):
        assert record == pytest.approx(other, abs=1e-6)
    assert (copy / "final/model.safetensors").read_bytes() == (whole / "final/model.safetensors").read_bytes()
    # Nothing of the damaged ones stays among the files of the new ones.
    assert [step_of(folder) for folder in checkpoint_folders(copy)] == [3, 6, 8]
    assert not list(copy.rglob("pytorch_model.bin"))
    assert newest_checkpoint(copy).name == "checkpoint-8"


def test_a_run_stopped_again_before_it_replaced_a_damaged_checkpoint_keeps_it(copy, whole, caplog):
    flip_bit(copy / "checkpoint-8" / "optimizer.pt")
    flip_bit(copy / "checkpoint-6" / "optimizer.pt")

    def stop(step, total, record):
        if step == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tiny_recipe(copy, training={**RUN, "keep_checkpoints": 1}), on_progress=stop)
    assert [step_of(folder) for folder in checkpoint_folders(copy)] == [6, 8]
    caplog.clear()
    assert train(tiny_recipe(copy, training=RUN))["resumed_from"] == 6
    (warning,) = (message for message in caplog.messages if "is damaged" in message)
    assert "checkpoint-8' is damaged (optimizer.pt " in warning
    assert (copy / "final/model.safetensors").read_bytes() == (whole / "final/model.safetensors").read_bytes()


def test_a_run_of_which_all_is_damaged_is_neither_removed_nor_started_over(copy):
    for checkpoint in checkpoint_folders(copy):
        flip_bit(checkpoint / "model.safetensors")
    before = describe_files(copy)
    with pytest.raises(DamagedCheckpointError, match=r"checkpoint-8' is damaged .*checkpoint-3' is damaged"):
        train(tiny_recipe(copy, training=RUN))
    assert describe_files(copy) == before
    assert train(tiny_recipe(copy, training={**RUN, "max_steps": 1}), resume=False)["resumed_from"] == 0


@pytest.mark.parametrize("name", ["final/model.safetensors", "log.jsonl"])
@pytest.mark.parametrize("damage", ["cut", "missing", "flipped_bit"])
def test_what_a_finished_run_leaves_is_mended_by_the_same_command(name, damage, copy, whole):
    DAMAGES[damage](copy / name)
    train(tiny_recipe(copy, training=RUN))
    assert (copy / name).read_bytes() == (whole / name).read_bytes()


def test_what_was_put_beside_a_finished_model_stays(copy):
    (copy / "final" / "README.md").write_text("A model of mine.")
    train(tiny_recipe(copy, training=RUN))
    assert (copy / "final" / "README.md").read_text() == "A model of mine."


def test_half_of_a_final_model_is_written_anew(copy, whole):
    (copy / "final").rename(copy / "final.partial")
    (copy / "final.partial" / "model.safetensors").unlink()
    train(tiny_recipe(copy, training=RUN))
    assert describe_files(copy / "final") == describe_files(whole / "final")
    assert not (copy / "final.partial").exists()
