"""Checkpoints of a run, of which one counts only when it is complete and its files are as they were written.

<output>/checkpoint-<step>/...              as transformers.Trainer writes them
<output>/checkpoint-<step>/complete.json    written last, after all others are on the disk: their sizes and SHA-256

A folder without `complete.json` was interrupted while it was written. One whose `complete.json` or any other file has
changed since is damaged: it is named and kept, and the complete one before it is taken.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from ..common.files import unfinished_path, write_atomically
from .integrity import describe_files, find_damage


MARKER = "complete.json"
_FOLDER = re.compile(r"checkpoint-(\d+)")
# What a run is resumed from; of several names in a row one is enough.
_NEEDED = (
    ("model.safetensors", "model.safetensors.index.json", "pytorch_model_fsdp.bin"),
    ("optimizer.pt", "optimizer.bin"),
    ("scheduler.pt",),
    ("trainer_state.json",),
    ("config.json",),
)
# Names that transformers.Trainer would read if they were there; anything else beside the run's files does no harm.
_WOULD_BE_READ = re.compile(
    r"(pytorch_model|optimizer).*|(model|adapter|scheduler|scaler|rng_state).*\.(bin|pt|pth|safetensors|index\.json)"
)

logger = logging.getLogger(__name__)


class DamagedCheckpointError(ValueError):
    """A checkpoint was complete once and has changed since."""


def step_of(checkpoint: Path) -> int:
    """Optimiser steps done when the checkpoint was written."""
    match = _FOLDER.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"{str(checkpoint)!r} is no checkpoint of a run; its name must be checkpoint-<step>.")
    return int(match.group(1))


def checkpoint_names(output: Path) -> list[Path]:
    """Everything in the folder of a run that is called as a checkpoint is, oldest first."""
    return sorted((path for path in output.glob("checkpoint-*") if _FOLDER.fullmatch(path.name)), key=step_of)


def checkpoint_folders(output: Path) -> list[Path]:
    """Every checkpoint of a run, complete or not, oldest first."""
    return [path for path in checkpoint_names(output) if path.is_dir()]


def was_completed(checkpoint: Path) -> bool:
    """Whether the marker was written; it may have been damaged since."""
    return os.path.lexists(checkpoint / MARKER)


def newest_checkpoint(output: Path) -> Path | None:
    """
    The last complete checkpoint of a run whose files are as they were written, if there is a complete one.

    Every file of it is read. Damaged ones after it are told in warnings.

    Raises:
        DamagedCheckpointError: if every complete checkpoint is damaged, so that nothing is left to resume from.
    """
    faults = []
    for checkpoint in filter(was_completed, reversed(checkpoint_folders(output))):
        try:
            check_checkpoint(checkpoint)
        except DamagedCheckpointError as error:
            faults.append(str(error))
            continue
        for fault in faults:
            logger.warning(f"{fault}; the run is resumed from {checkpoint.name}, the complete one before.")
        return checkpoint
    if faults:
        raise DamagedCheckpointError(
            f"There is no complete checkpoint left: {'; '.join(faults)}. Put back what was there, or remove "
            f"{str(output)!r} or give --no-resume (resume=False) to start over."
        )
    return None


def check_checkpoint(checkpoint: Path) -> None:
    """Raise DamagedCheckpointError, which says what is wrong, unless all files are as they were written."""
    files = read_marker(checkpoint).get("files")
    names = files if files is not None else {path.name for path in checkpoint.iterdir() if path.is_file()}
    for alternatives in _NEEDED:
        if not any(name in names for name in alternatives):
            raise _damaged(checkpoint, f"{alternatives[0]} is missing")
    if files is None:
        empty = next((name for name in sorted(names) if (checkpoint / name).stat().st_size == 0), None)
        if empty is not None:
            raise _damaged(checkpoint, f"{empty} is empty")
        logger.warning(
            f"{str(checkpoint)!r} was written by an earlier version, without checksums, and is taken as it is."
        )
        return
    unknown = next((name for name in _unlisted(checkpoint, files) if _WOULD_BE_READ.fullmatch(name)), None)
    fault = find_damage(checkpoint, files) or (unknown and f"{unknown} was not written by the run")
    if fault:
        raise _damaged(checkpoint, fault)


def mark_complete(checkpoint: Path, values: dict[str, Any]) -> None:
    """
    Declare a checkpoint complete, after all processes have written their files.

    Args:
        checkpoint (`Path`): Its folder.
        values (`dict`): To be read back by `read_marker`: `step`, `loss_since_log`, `logged_step` and `recipe`.
    """
    for file in checkpoint.rglob("*"):
        if file.is_file():
            with file.open("rb") as written:
                os.fsync(written.fileno())
    marker = checkpoint / MARKER
    files = describe_files(checkpoint, leave_out=(MARKER, unfinished_path(marker).name))
    values = {**values, "files": files}
    write_atomically(marker, json.dumps({**values, "sha256": _digest(values)}, indent=1))
    for folder in (checkpoint, checkpoint.parent):
        _sync_folder(folder)


def read_marker(checkpoint: Path) -> dict[str, Any]:
    """
    The values that `mark_complete` wrote, and `files` as [`~integrity.describe_files`] gives them; markers of earlier
    versions have no `files`.

    Raises:
        DamagedCheckpointError: if the marker is not as it was written.
    """
    file = checkpoint / MARKER
    if not file.is_file():
        raise _damaged(checkpoint, f"{MARKER} is no file")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise _damaged(checkpoint, f"{MARKER} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(checkpoint, f"{MARKER} is no JSON") from error
    if not isinstance(values, dict):
        raise _damaged(checkpoint, f"{MARKER} holds no mapping")
    digest = values.pop("sha256", None)
    if digest is None and "files" not in values:
        _check_earlier_marker(checkpoint, values)
    elif digest != _digest(values):
        raise _damaged(checkpoint, f"{MARKER} is not as it was written")
    if values["step"] != step_of(checkpoint):
        raise _damaged(checkpoint, f"{MARKER} is of step {values['step']}")
    return values


def remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint, which is incomplete from the first moment on."""
    for path in (checkpoint / MARKER, checkpoint):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def remove_incomplete(output: Path) -> list[Path]:
    """Remove what a run that was stopped while saving left behind, and return the folders that are gone."""
    incomplete = [checkpoint for checkpoint in checkpoint_folders(output) if not was_completed(checkpoint)]
    for checkpoint in incomplete:
        remove_checkpoint(checkpoint)
    return incomplete


def remove_old(output: Path, keep: int, damaged: Collection[Path] = ()) -> None:
    """Remove all checkpoints before the newest `keep`; damaged ones are not counted as any of these."""
    folders = checkpoint_folders(output)
    kept = [checkpoint for checkpoint in folders if checkpoint not in damaged][-keep:]
    if len(kept) < keep:
        return
    for checkpoint in folders:
        if step_of(checkpoint) < step_of(kept[0]):
            remove_checkpoint(checkpoint)


def _damaged(checkpoint: Path, fault: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{str(checkpoint)!r} is damaged ({fault})")


def _digest(values: dict[str, Any]) -> str:
    """Of values as they come back from JSON, which has no keys but text."""
    canonical = json.dumps(json.loads(json.dumps(values)), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _check_earlier_marker(checkpoint: Path, values: dict[str, Any]) -> None:
    """Types alone: markers of earlier versions have no checksum of their own."""
    types = {"step": int, "loss_since_log": float | int, "logged_step": int, "recipe": dict}
    for key, kind in types.items():
        value = values.get(key)
        is_wrong = isinstance(value, bool) or not isinstance(value, kind)
        if is_wrong or (kind is not dict and not (math.isfinite(value) and value >= 0)):
            raise _damaged(checkpoint, f"{MARKER} has no {key}" if value is None else f"{MARKER} has a wrong {key}")


def _unlisted(checkpoint: Path, files: Iterable[str]) -> list[str]:
    """Entries of a checkpoint that the run did not write."""
    listed = {name.partition("/")[0] for name in files} | {MARKER}
    return sorted(entry.name for entry in checkpoint.iterdir() if entry.name not in listed)


def _sync_folder(folder: Path) -> None:
    # So that the new names in it outlive a power cut; Windows opens no folders.
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
