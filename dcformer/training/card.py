"""The model card of a finished run: how the model was trained, beside what every saved model's card says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ..common.files import write_atomically
from ..model_card import CARD_FILE, known_origin, table, users_card, write_card
from .recipe import Recipe


def write_training_card(folder: Path, recipe: Recipe, records: list[dict[str, Any]]) -> None:
    """
    Write the README.md of a trained model, unless somebody else has written or edited the one that is there.

    Args:
        folder: Folder of the model.
        recipe: Recipe that it was trained by.
        records: Log of the run.
    """
    if users_card(folder) is not None:
        return
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    licence, base_model = known_origin(recipe.model.get("pretrained") or "", recipe.name)
    text = write_card(
        recipe.name,
        config,
        class_name=(config.architectures or [""])[0],
        parameters=parameters,
        dtype="float32",
        licence=licence,
        base_model=base_model,
        sections=[("Training", table(("", ""), _rows(recipe, records)))],
    )
    write_atomically(folder / CARD_FILE, text)


def _rows(recipe: Recipe, records: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    training, source, pretrained = recipe.training, recipe.data.source, recipe.model.get("pretrained")
    rows: list[tuple[str, Any]] = [
        ("started from", Path(pretrained).name if pretrained else "random weights"),
        ("data", Path(source).name if Path(source).exists() else source),
        ("steps", f"{training.steps:,}"),
        ("optimiser", f"{training.optimizer}, highest learning rate of AdamW {training.learning_rate:g}"),
        ("seed", recipe.seed),
    ]
    for key, title in (("loss", "last training loss"), ("eval_loss", "last evaluation loss")):
        values = [record[key] for record in records if key in record]
        if values:
            rows.append((f"{title}, nats per token", f"{values[-1]:.4f}"))
    return rows
