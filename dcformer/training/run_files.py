"""
The folder of a run. Folders come to their places, and leave them, by being renamed: they are whole, or damaged later.

    <output>/.lock                              held while a process writes the folder, and ends with it
    <output>/recipe.yaml                        the recipe, with all its defaults
    <output>/checkpoint-<step>/...              as transformers.Trainer writes them
    <output>/checkpoint-<step>/complete.json    step, loss, recipe, hashes of files and data; written last
    <output>/log.jsonl                          a record per line: loss, learning rate, throughput, evaluation
    <output>/composition.safetensors            the trained parameters, with training.trainable: compose
    <output>/losses.png                         curves
    <output>/tensorboard/, <output>/wandb/      files of these trackers
    <output>/final/                             the trained model, with its tokenizer
    <output>/unfinished/                        what is being written or removed, and does not count
"""

import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

from ..common.files import find_damage, make_manifest, read_sealed, seal, set_usual_mode, write_atomically
from .recipe import Recipe, omegaconf


LOCK_FILE, RECIPE_FILE, LOG_FILE = ".lock", "recipe.yaml", "log.jsonl"
COMPOSITION_FILE = "composition.safetensors"
MARKER = "complete.json"
FINAL, UNFINISHED = "final", "unfinished"
_VALUES = {"step": int, "loss": float, "recipe": dict, "fingerprints": dict, "files": dict}  # of a marker
_FOLDER = re.compile(r"checkpoint-(\d+)")
_MODEL_FILE = re.compile(r"(?!trainer_state\.json)[^/]+\.(json|safetensors|jinja|txt|model|py)")

logger = logging.getLogger(__name__)


def step_of(checkpoint: Path | None) -> int:
    """Optimiser steps done when a checkpoint was written, by its name; 0 without one."""
    return 0 if checkpoint is None else int(checkpoint.name.removeprefix("checkpoint-"))


def checkpoint_folders(output: Path) -> list[Path]:
    """Every checkpoint of a run, whole or not, also links to folders that are gone; oldest first."""
    paths = (path for path in output.glob("checkpoint-*") if _FOLDER.fullmatch(path.name))
    return sorted((path for path in paths if path.is_dir() or path.is_symlink()), key=step_of)


def check_free(output: Path) -> None:
    """Raise ValueError for a file that stands where a run would put a folder."""
    for path in output.iterdir():
        if path.is_file() and (path.name in (FINAL, UNFINISHED) or _FOLDER.fullmatch(path.name)):
            raise ValueError(f"{str(path)!r} is a file where the run would write a folder; move it away.")


def find_newest(output: Path) -> tuple[Path | None, list[str]]:
    """The newest undamaged checkpoint of a run, and what is wrong with later ones."""
    flaws: list[str] = []
    for checkpoint in reversed(checkpoint_folders(output)):
        if (flaw := _find_flaw(checkpoint)) is None:
            return checkpoint, flaws
        flaws.append(flaw)
    return None, flaws


def _find_flaw(checkpoint: Path) -> str | None:
    """Describe what is wrong with a checkpoint, in a sentence that names the file; None if it is whole."""
    path = checkpoint / MARKER
    if not path.is_file():
        return f"{str(checkpoint)!r} is not complete: it has no {MARKER}."
    try:
        marker = read_sealed(path)
    except ValueError as error:
        return str(error)
    if wrong := [key for key, kind in _VALUES.items() if not isinstance(marker.get(key), kind)]:
        return f"{str(path)!r} is damaged: {wrong[0]!r} is missing or of a wrong type."
    if checkpoint.name != f"checkpoint-{marker['step']}":
        return f"{str(checkpoint)!r} was renamed."
    for file in sorted(checkpoint.rglob("[!.]*")):  # Trainer would load some
        if file.is_file() and file != path and file.relative_to(checkpoint).as_posix() not in marker["files"]:
            return f"{str(file)!r} is not among the files that {MARKER} lists."
    try:
        Recipe.from_mapping(marker["recipe"])
        return find_damage(checkpoint, marker["files"])
    except (ValueError, omegaconf.errors.OmegaConfBaseException) as error:
        return f"{str(path)!r} is damaged: {str(error).splitlines()[0]}"


def finish_checkpoint(written: Path, values: dict[str, Any]) -> Path:
    """Mark a checkpoint as complete, after all processes have written their files, and move it to its place."""
    set_usual_mode(*written.glob("*.safetensors"))
    write_atomically(written / MARKER, seal({**values, "files": make_manifest(written)}))
    output = written.parent.parent
    checkpoint = written.rename(output / written.name)
    descriptor = os.open(output, os.O_RDONLY)  # it must be on the disk before others are removed
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return checkpoint


def remove_folder(folder: Path) -> None:
    """Remove a folder of a run, if there is one: it leaves its place at once. Of a link the link is removed."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        leaving = folder.parent / UNFINISHED / f"{folder.name}.removed"
        shutil.rmtree(leaving, ignore_errors=True)
        leaving.parent.mkdir(exist_ok=True)
        shutil.rmtree(folder.rename(leaving))


def write_final(checkpoint: Path, folder: Path) -> None:
    """Copy the model of a checkpoint to `folder`, or only the files that are damaged there, never half of the model."""
    marker = read_sealed(checkpoint / MARKER)
    del marker["recipe"]  # it has paths of this machine, and the folder is meant to be shared
    files = {name: entry for name, entry in marker["files"].items() if _MODEL_FILE.fullmatch(name)}
    sealed, target = seal({**marker, "files": files}), folder
    if (folder / MARKER).is_file() and (folder / MARKER).read_bytes() == sealed.encode():
        files = {name: entry for name, entry in files.items() if find_damage(folder, {name: entry})}
        if files:
            logger.warning(f"{str(folder)!r} is damaged: {', '.join(files)} is copied again from {checkpoint.name}.")
    else:
        target = folder.parent / UNFINISHED / folder.name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
    for name in files:
        shutil.copyfile(checkpoint / name, target / name)
    make_manifest(target, [target / name for name in files])  # flushes them to the disk
    if target != folder:
        write_atomically(target / MARKER, sealed)
        if folder.is_symlink():
            logger.warning(f"{str(folder)!r} is a link and is replaced by a folder; what it names stays as it is.")
        remove_folder(folder)
        target.rename(folder)


def write_log(output: Path, records: list[dict[str, Any]]) -> None:
    """Replace the log of a run, a record a line."""
    write_atomically(output / LOG_FILE, "".join(json.dumps(record) + "\n" for record in records))
