"""The variants of a sweep as a picture that needs no colour: a panel per metric, a line per variant.

A filled marker is the mean over seeds, its line the 95 % interval; hollow markers are the seeds. The upright line goes
through the first variant, with which the others are compared.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..common.plotting import check_plot_path, draw_rows, picture
from .report import METRICS, VariantSummary, measured, summarise_variants


def plot_sweep(results: Mapping[str, Any], path: str | os.PathLike) -> None:
    """
    Write the evaluation loss and the accuracies of every variant, as far as they were measured.

    Args:
        results (`Mapping`): What `run_sweep` returns, or `read_results` of its file.
        path: File that ends in `.png`, `.svg` or `.pdf`.

    Raises:
        ValueError: for another ending, or if no run has a number to show.
        ImportError: without matplotlib.
    """
    path = check_plot_path(path)
    summaries = summarise_variants(results)
    metrics = measured(summaries)
    if not metrics:
        raise ValueError("There is nothing to plot: no run was evaluated; set data.evaluation or sweep.evaluation.")
    with picture(path, (1.6 + 3.6 * len(metrics), 1.6 + 0.32 * len(summaries)), "train") as figure:
        panels = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
        for axis, metric in zip(panels, metrics):
            _draw(axis, summaries, metric)
        seeds = sorted({run["seed"] for run in results["runs"]})
        words = f"{len(seeds)} seeds" if len(seeds) > 1 else "1 seed"
        figure.suptitle(f"{results['recipe']['name']}: means with 95 % intervals, {words}")


def _draw(axis, summaries: list[VariantSummary], metric: str) -> None:
    draw_rows(axis, [item.name for item in summaries])
    scale = METRICS[metric].scale
    first = summaries[0].interval(metric)
    if first is not None:
        axis.axvline(scale * first[0], color="black", linewidth=0.8, zorder=1)
    for place, item in enumerate(summaries):
        interval = item.interval(metric)
        if interval is None:
            continue
        mean, half = interval
        values = [scale * value for value in item.values[metric].values()]
        axis.plot(values, [place] * len(values), "o", color="0.45", markerfacecolor="none", markersize=4, zorder=3)
        if half is not None:
            ends = (scale * (mean - half), scale * (mean + half))
            axis.plot(ends, (place, place), "-", color="black", linewidth=1.2, zorder=2)
        axis.plot(scale * mean, place, "D", color="black", markersize=5, zorder=4)
    axis.set_xlabel(METRICS[metric].title)


__all__ = ["plot_sweep"]
