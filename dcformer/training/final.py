"""What a finished run leaves beside its checkpoints: the model alone, the log and the curves.

All of it is made from the last checkpoint, so that the same command mends what was damaged or stopped half-way.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from ..common.files import write_atomically
from .card import write_training_card
from .checkpoints import MARKER, read_marker
from .integrity import find_damage
from .recipe import Recipe
from .run_folder import FINAL
from .trainer import LOG_FILE, log_lines


_MODEL_SUFFIXES = (".json", ".safetensors", ".jinja", ".txt", ".model", ".py")
_OF_TRAINING = ("trainer_state.json", MARKER)

logger = logging.getLogger(__name__)


def finish_run(checkpoint: Path, recipe: Recipe) -> None:
    """
    Write `final/`, `log.jsonl` and `losses.png`, unless they are there as they should be.

    Args:
        checkpoint (`Path`): The complete checkpoint of the last step.
        recipe (`Recipe`): What was trained; its `output` is the folder of the run.
    """
    output = Path(recipe.output)
    _write_final(checkpoint, output / FINAL)
    records = read_records(checkpoint)
    write_training_card(output / FINAL, recipe, records)
    _write_log(records, output / LOG_FILE)
    _plot(records, output / "losses.png")


def read_records(checkpoint: Path) -> list[dict[str, Any]]:
    """The log of a run up to a checkpoint."""
    from transformers import TrainerState

    return TrainerState.load_from_json(str(checkpoint / "trainer_state.json")).log_history


def _write_final(checkpoint: Path, folder: Path) -> None:
    """The model of a checkpoint without what only training needs; there is never half of it under that name."""
    listed = read_marker(checkpoint).get("files")
    names = [file.name for file in checkpoint.iterdir() if file.is_file()] if listed is None else list(listed)
    names = [name for name in names if name.endswith(_MODEL_SUFFIXES) and "/" not in name and name not in _OF_TRAINING]
    if listed is not None and find_damage(folder, {name: listed[name] for name in names}) is None:
        return  # with whatever else was put there
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for name in names:
        shutil.copyfile(checkpoint / name, partial / name)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def _write_log(records: list[dict[str, Any]], file: Path) -> None:
    text = "".join(log_lines(records))
    if not file.is_file() or file.read_bytes() != text.encode():
        write_atomically(file, text)


def _plot(records: list[dict[str, Any]], path: Path) -> None:
    try:
        from .plot import plot_losses

        plot_losses(records, path)
    except ImportError as error:
        logger.warning(f"No curves are drawn: {error}")
