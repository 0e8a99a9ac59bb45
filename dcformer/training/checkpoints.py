"""
The folder of a run: its checkpoints, the lock that keeps other processes out, and the final model.

    <output>/.lock                              held while a process writes the folder, and ends with it
    <output>/recipe.yaml                        the recipe, with all its defaults
    <output>/checkpoint-<step>/...              as transformers.Trainer writes them
    <output>/checkpoint-<step>/complete.json    step, loss, recipe, hashes of files and data; written last
    <output>/log.jsonl                          a record per line: loss, learning rate, throughput, evaluation
    <output>/composition.safetensors            the trained parameters, with training.trainable: compose
    <output>/losses.png                         curves
    <output>/final/                             the trained model, with its tokenizer
"""

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

from ..common.files import find_damage, make_manifest, read_sealed, seal, write_atomically


LOCK_FILE, RECIPE_FILE, LOG_FILE = ".lock", "recipe.yaml", "log.jsonl"
COMPOSITION_FILE = "composition.safetensors"
MARKER = "complete.json"
_FOLDER = re.compile(r"checkpoint-(\d+)")
_MODEL_FILE = re.compile(r"(?!trainer_state\.json)[^/]+\.(json|safetensors|jinja|txt|model|py)")

logger = logging.getLogger(__name__)


def step_of(checkpoint: Path | None) -> int:
    """Optimiser steps done when a checkpoint was written, by its name; 0 without one."""
    return 0 if checkpoint is None else int(checkpoint.name.removeprefix("checkpoint-"))


def checkpoint_folders(output: Path) -> list[Path]:
    """Every checkpoint of a run, complete or not, oldest first."""
    folders = (path for path in output.glob("checkpoint-*") if path.is_dir() and _FOLDER.fullmatch(path.name))
    return sorted(folders, key=step_of)


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint was written completely, unlike one of a run that was killed while it saved."""
    return (checkpoint / MARKER).is_file()


def find_newest(output: Path) -> tuple[Path | None, list[str]]:
    """The newest undamaged checkpoint of a run, and what is wrong with later ones that were written completely."""
    flaws: list[str] = []
    for checkpoint in filter(is_complete, reversed(checkpoint_folders(output))):
        try:
            marker = read_sealed(checkpoint / MARKER)
            is_renamed = marker["step"] != step_of(checkpoint)
            flaw = f"{str(checkpoint)!r} was renamed." if is_renamed else find_damage(checkpoint, marker["files"])
        except ValueError as error:
            flaw = str(error)
        if flaw is None:
            return checkpoint, flaws
        flaws.append(flaw)
    return None, flaws


def mark_complete(checkpoint: Path, values: dict[str, Any]) -> None:
    """Mark a checkpoint as complete, after all processes have written their files."""
    write_atomically(checkpoint / MARKER, seal({**values, "files": make_manifest(checkpoint)}))


def remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint; it counts as incomplete at once, should the removal be interrupted."""
    (checkpoint / MARKER).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def write_final(checkpoint: Path, folder: Path) -> None:
    """Copy the model of a checkpoint to `folder`, or only the files that are damaged there, never half of the model."""
    marker = read_sealed(checkpoint / MARKER)
    del marker["recipe"]  # it has paths of this machine, and the folder is meant to be shared
    files = {name: entry for name, entry in marker["files"].items() if _MODEL_FILE.fullmatch(name)}
    sealed, target = seal({**marker, "files": files}), folder
    if is_complete(folder) and (folder / MARKER).read_bytes() == sealed.encode():
        files = {name: entry for name, entry in files.items() if find_damage(folder, {name: entry})}
        if files:
            logger.warning(f"{str(folder)!r} is damaged: {', '.join(files)} is copied again from {checkpoint.name}.")
    else:
        target = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
    for name in files:
        shutil.copyfile(checkpoint / name, target / name)
    if target != folder:
        write_atomically(target / MARKER, sealed)
        shutil.rmtree(folder, ignore_errors=True)
        target.rename(folder)


def write_log(output: Path, records: list[dict[str, Any]]) -> None:
    """Replace the log of a run, a record a line."""
    write_atomically(output / LOG_FILE, "".join(json.dumps(record) + "\n" for record in records))
