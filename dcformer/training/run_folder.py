"""The folder of a run or a sweep: one process writes it at a time, and what cannot be written is found before training.

<output>/.lock    held while something is written; the lock ends with its process, however that ends, and the file stays
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..common.files import write_atomically
from ..common.locks import LockHeldError, file_lock
from ..common.yaml_text import write_yaml
from .checkpoints import checkpoint_folders, checkpoint_names, remove_checkpoint, remove_incomplete, was_completed
from .recipe import Recipe


LOCK = ".lock"
RECIPE = "recipe.yaml"
FINAL = "final"

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def locked_folder(output: Path) -> Iterator[None]:
    """
    Create a folder if it is not there, and keep other runs and sweeps out of it until the block ends.

    Raises:
        ValueError: if another process is writing the folder.
        OSError: if nothing can be written there.
    """
    with contextlib.ExitStack() as stack:
        with _writing(output):
            output.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=output):
                pass
            try:
                unsupported = stack.enter_context(file_lock(output / LOCK))
            except LockHeldError as error:
                raise ValueError(
                    f"Another run is writing {str(output)!r}; wait for it to end, or give another output."
                ) from error
        if unsupported is not None:
            reason = unsupported.strerror or unsupported
            logger.warning(f"{str(output)!r} cannot be locked ({reason}): take care that no other run writes there.")
        yield


def check_folder(output: Path) -> None:
    """
    Raise ValueError if a folder holds what is not of a run, or something where a run puts its folders.

    Checkpoints that `transformers.Trainer` wrote by itself have no marker either, and would be taken for those of a run
    that was stopped while saving.
    """
    folders = checkpoint_folders(output)
    if folders and not (output / RECIPE).exists() and not any(map(was_completed, folders)):
        raise ValueError(
            f"{str(output)!r} holds {folders[0].name}, which is of no run of a recipe and would be removed; give "
            "another output."
        )
    for path in (*checkpoint_names(output), output / FINAL):
        if os.path.lexists(path) and not path.is_dir():
            raise ValueError(f"{str(path)!r} is no folder, and the run writes one of that name; remove it.")
    if (output / FINAL).is_symlink():
        raise ValueError(f"{str(output / FINAL)!r} is a link, and the run writes a folder of that name; remove it.")


def prepare_folder(recipe: Recipe, output: Path, resume: bool) -> None:
    """Remove what a run that was stopped while saving left, or all unless it is resumed; and write the recipe."""
    for checkpoint in remove_incomplete(output):
        logger.warning(f"{str(checkpoint)!r} was not complete and is removed.")
    if not resume:
        for checkpoint in checkpoint_folders(output):
            remove_checkpoint(checkpoint)
        shutil.rmtree(output / FINAL, ignore_errors=True)
    with _writing(output / RECIPE):
        write_atomically(output / RECIPE, write_yaml(recipe.to_mapping()))


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Say in one sentence why something cannot be written; a full disk has a sentence of its own."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        reason = error.strerror or error
        raise OSError(f"{str(path)!r} cannot be written ({reason}); give another output, or clear the way.") from error
