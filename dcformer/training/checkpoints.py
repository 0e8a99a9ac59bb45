"""
The folder of a run: its checkpoints, the lock that keeps other processes out, and the final model.

    <output>/.lock                              held while a process writes the folder, and ends with it
    <output>/recipe.yaml                        the recipe, with all its defaults
    <output>/checkpoint-<step>/...              as transformers.Trainer writes them
    <output>/checkpoint-<step>/complete.json    step, loss and seconds; written last, after all others are on the disk
    <output>/log.jsonl                          a record per line: loss, learning rate, throughput, evaluation
    <output>/composition.safetensors            what was trained, of a run with training.trainable: compose
    <output>/losses.png                         curves
    <output>/final/                             the trained model, with its tokenizer
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from ..common.files import write_atomically


LOCK_FILE, RECIPE_FILE, LOG_FILE = ".lock", "recipe.yaml", "log.jsonl"
COMPOSITION_FILE = "composition.safetensors"
MARKER = "complete.json"
_FOLDER = re.compile(r"checkpoint-(\d+)")
_MODEL_SUFFIXES = (".json", ".safetensors", ".jinja", ".txt", ".model", ".py")


def step_of(checkpoint: Path) -> int:
    """Optimiser steps done when a checkpoint was written, by its name."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def checkpoint_folders(output: Path) -> list[Path]:
    """Every checkpoint of a run, complete or not, oldest first."""
    folders = (path for path in output.glob("checkpoint-*") if path.is_dir() and _FOLDER.fullmatch(path.name))
    return sorted(folders, key=step_of)


def read_marker(checkpoint: Path) -> dict[str, Any] | None:
    """The values of `mark_complete`; `None` for a checkpoint that is not complete."""
    try:
        return json.loads((checkpoint / MARKER).read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def newest_checkpoint(output: Path) -> Path | None:
    """The last complete checkpoint of a run."""
    return next((folder for folder in reversed(checkpoint_folders(output)) if read_marker(folder)), None)


def mark_complete(checkpoint: Path, values: dict[str, Any]) -> None:
    """Mark a checkpoint as complete, after all processes have written their files."""
    for file in checkpoint.rglob("*"):
        if file.is_file():
            with file.open("rb") as written:
                os.fsync(written.fileno())
    write_atomically(checkpoint / MARKER, json.dumps(values))


def remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint, which is incomplete from the first moment on."""
    (checkpoint / MARKER).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def remove_incomplete(output: Path) -> list[Path]:
    """Remove what a run left that was stopped while it saved, and return these folders."""
    incomplete = [folder for folder in checkpoint_folders(output) if read_marker(folder) is None]
    for folder in incomplete:
        remove_checkpoint(folder)
    return incomplete


def remove_old(output: Path, keep: int) -> None:
    """Remove all checkpoints but the newest `keep`."""
    for folder in checkpoint_folders(output)[:-keep]:
        remove_checkpoint(folder)


def write_final(checkpoint: Path, folder: Path) -> None:
    """Copy the model of a checkpoint, unless it is there; `folder` never holds half of it."""
    marker = folder / MARKER
    if marker.is_file() and marker.read_bytes() == (checkpoint / MARKER).read_bytes():
        return
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for file in checkpoint.iterdir():
        if file.name.endswith(_MODEL_SUFFIXES) and file.name != "trainer_state.json":
            shutil.copyfile(file, partial / file.name)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def read_records(checkpoint: Path) -> list[dict[str, Any]]:
    """The log of a run up to a checkpoint."""
    return json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]


def write_log(output: Path, records: list[dict[str, Any]]) -> None:
    """Write the log of a run anew, a record a line."""
    write_atomically(output / LOG_FILE, "".join(json.dumps(record) + "\n" for record in records))
