"""The results of a finished run: a plot of its losses, and the model card."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ..common.files import write_atomically
from ..common.plotting import draw_grid, picture
from ..loading import find_folder
from ..model_card import CARD_FILE, known_origin, table, users_card, write_card
from .recipe import Recipe


def last_values(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The last value of each key in the records of a log."""
    return {key: value for record in records for key, value in record.items()}


def plot_losses(records: Sequence[Mapping[str, Any]], path: str | os.PathLike) -> None:
    """Plot the training loss (line) and the evaluation loss (markers) over the steps, and the learning rate below."""
    losses, evaluations, rates = (
        [(record["step"], record[key]) for record in records if key in record]
        for key in ("loss", "eval_loss", "learning_rate")
    )
    with picture(path, (6.4, 5.0), "train") as figure:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        top.plot(*zip(*losses), "-", color="0.45", linewidth=1.2, label="training")
        if evaluations:
            top.plot(*zip(*evaluations), "-o", color="black", linewidth=0.8, markersize=4, label="evaluation")
        top.set_ylabel("loss (nats per token)")
        top.legend(frameon=False)
        bottom.plot(*zip(*rates), "-", color="black", linewidth=1.2)
        bottom.set(ylabel="learning rate", xlabel="step")
        bottom.set_ylim(bottom=0)
        for axis in (top, bottom):
            draw_grid(axis)


def write_training_card(folder: Path, recipe: Recipe, records: Sequence[Mapping[str, Any]]) -> None:
    """Write the README.md of a trained model, unless there is one that a user has written or edited."""
    if users_card(folder) is not None:
        return
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    training, source, pretrained = recipe.training, recipe.data.source, recipe.model.get("pretrained") or ""
    rows = [
        ("started from", Path(pretrained).name if pretrained else "random weights"),
        ("data", Path(source).name if Path(source).exists() else source),
        ("steps", f"{training.steps:,}"),
        ("optimiser", f"{training.optimizer}, highest learning rate of AdamW {training.learning_rate:g}"),
        ("seed", recipe.seed),
    ]
    last = last_values(records)
    for key, title in (("loss", "last training loss"), ("eval_loss", "last evaluation loss")):
        rows += [(f"{title}, nats per token", f"{last[key]:.4f}")] if key in last else []
    origin, sections = known_origin(find_folder(pretrained), recipe.name), [("Training", table(("", ""), rows))]
    card = write_card(recipe.name, config, parameters=parameters, dtype="float32", **origin, sections=sections)
    write_atomically(folder / CARD_FILE, card)
