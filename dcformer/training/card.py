"""The model card of a finished run: how the model was trained, beside what every saved model's card says."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from ..common.files import write_atomically
from ..conversion.formats.transformers_folder import open_weights
from ..conversion.pieces import dtype_name
from ..model_card import CARD_FILE, known_origin, table, users_card, write_card
from .recipe import Recipe


def write_training_card(folder: Path, recipe: Recipe, records: list[dict[str, Any]]) -> None:
    """
    Write the README.md of a trained model, unless somebody else has written or edited the one that is there.

    Args:
        folder (`Path`): The model.
        recipe (`Recipe`): What it was trained by.
        records: The log of the run.
    """
    if users_card(folder) is not None:
        return
    config, leaves = AutoConfig.from_pretrained(folder), open_weights(folder).values()
    pretrained = recipe.model.get("pretrained") or ""
    licence, base_model = known_origin(pretrained, recipe.name)
    text = write_card(
        recipe.name,
        config,
        class_name=(config.architectures or [""])[0],
        parameters=sum(math.prod(leaf.shape) for leaf in leaves),
        dtype=Counter(dtype_name(leaf.dtype) for leaf in leaves).most_common(1)[0][0],
        licence=licence,
        base_model=base_model,
        sections=[("Training", table(("", ""), _rows(recipe, records)))],
    )
    path = folder / CARD_FILE
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_atomically(path, text)


def _rows(recipe: Recipe, records: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    training, source = recipe.training, recipe.data.source
    rows: list[tuple[str, Any]] = [
        ("started from", Path(recipe.model["pretrained"]).name if recipe.model.get("pretrained") else "random weights"),
        ("data", Path(source).name if Path(source).exists() else source),
        ("steps", f"{training.steps:,}"),
        ("optimiser", f"AdamW, highest learning rate {training.learning_rate:g}"),
        ("seed", recipe.seed),
    ]
    for key, title in (("loss", "last training loss"), ("eval_loss", "last evaluation loss")):
        values = [record[key] for record in records if key in record]
        if values:
            rows.append((f"{title}, nats per token", f"{values[-1]:.4f}"))
    return rows
