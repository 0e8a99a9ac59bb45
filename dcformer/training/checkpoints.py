"""Checkpoints of a run, of which one counts only when it is complete.

<output>/checkpoint-<step>/...              as transformers.Trainer writes them
<output>/checkpoint-<step>/complete.json    written last, after all others are on the disk
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any


MARKER = "complete.json"
_FOLDER = re.compile(r"checkpoint-(\d+)")


def step_of(checkpoint: Path) -> int:
    """Optimiser steps done when the checkpoint was written."""
    return int(_FOLDER.fullmatch(checkpoint.name).group(1))


def checkpoint_folders(output: Path) -> list[Path]:
    """Every checkpoint of a run, complete or not, oldest first."""
    folders = [folder for folder in output.glob("checkpoint-*") if _FOLDER.fullmatch(folder.name) and folder.is_dir()]
    return sorted(folders, key=step_of)


def newest_checkpoint(output: Path) -> Path | None:
    """The last complete checkpoint of a run, if there is one."""
    return next((folder for folder in reversed(checkpoint_folders(output)) if (folder / MARKER).is_file()), None)


def mark_complete(checkpoint: Path, values: dict[str, Any]) -> None:
    """Declare a checkpoint complete, with values to be read back by `read_marker`."""
    for file in checkpoint.rglob("*"):
        if file.is_file():
            with file.open("rb") as written:
                os.fsync(written.fileno())
    partial = checkpoint / f"{MARKER}.partial"
    with partial.open("w", encoding="utf-8") as marker:
        json.dump(values, marker, indent=1)
        marker.flush()
        os.fsync(marker.fileno())
    partial.rename(checkpoint / MARKER)
    for folder in (checkpoint, checkpoint.parent):
        _sync_folder(folder)


def read_marker(checkpoint: Path) -> dict[str, Any]:
    """The values that `mark_complete` wrote."""
    return json.loads((checkpoint / MARKER).read_text(encoding="utf-8"))


def remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint, which is incomplete from the first moment on."""
    (checkpoint / MARKER).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def remove_incomplete(output: Path) -> None:
    """Remove what a run that was stopped while saving left behind."""
    for checkpoint in checkpoint_folders(output):
        if not (checkpoint / MARKER).is_file():
            shutil.rmtree(checkpoint)


def remove_old(output: Path, keep: int) -> None:
    """Remove all complete checkpoints but the newest `keep`."""
    for checkpoint in checkpoint_folders(output)[:-keep]:
        remove_checkpoint(checkpoint)


def _sync_folder(folder: Path) -> None:
    # So that the new names in it outlive a power cut; Windows opens no folders.
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
