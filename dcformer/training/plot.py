"""The losses of a run as a picture that needs no colour: lines for training, markers for evaluation."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ..common.plotting import check_plot_path, draw_grid, picture


def plot_losses(log_history: Sequence[Mapping], path: str | os.PathLike) -> None:
    """
    Plot the training loss and the evaluation loss over the steps, and the learning rate below them.

    Args:
        log_history: Records of `Trainer`, such as `{"step": 10, "loss": 3.1, "learning_rate": 3e-4}` and
            `{"step": 100, "eval_loss": 2.9}`.
        path: File that ends in `.png`, `.svg` or `.pdf`.

    Raises:
        ValueError: for another ending.
        ImportError: without matplotlib.
    """
    path = check_plot_path(path)
    losses, evaluations, rates = (
        [(record["step"], record[key]) for record in log_history if key in record]
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
        bottom.set_ylabel("learning rate")
        bottom.set_xlabel("step")
        bottom.set_ylim(bottom=0)
        for axis in (top, bottom):
            draw_grid(axis)
