"""The variants of a sweep as a picture that needs no colour: a panel per metric, a line per variant.

The first variant, with which the others are compared, stands at the top, an upright line through its mean; the others
follow by their gain. Pairs and learning rates, which are not compared with the first, stay in their order. A filled
marker is the mean over seeds, its line the 95 % interval; hollow markers are the seeds. Broken lines are what is
reached without reading the question.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..common.plotting import check_plot_path, draw_rows, picture
from ..head_tasks.labels import REFERENCES, sweep_label
from .reference_lines import REFERENCE_STYLES
from .report import compares_with_first, sorted_by_gain
from .results import METRICS, VariantSummary, measured, reference_values, summarise_variants


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
    first = summaries[0] if compares_with_first(results) else None
    if first is not None:
        summaries = sorted_by_gain(summaries, metrics[0])
    longest = max(len(item.label) for item in summaries)
    # Names, panels; title, labels of axes and legend, rows.
    size = (0.6 + 0.085 * longest + 3.2 * len(metrics), 2.2 + 0.32 * len(summaries))
    with picture(path, size, "train") as figure:
        panels = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
        for axis, metric in zip(panels, metrics):
            _draw(axis, summaries, first, metric)
            for name, value in reference_values(results, metric).items():
                if name in REFERENCE_STYLES:
                    value *= METRICS[metric].scale
                    axis.axvline(value, color="0.35", linewidth=1.2, linestyle=REFERENCE_STYLES[name], zorder=1)
        seeds = sorted({run["seed"] for run in results["runs"]})
        words = f"{len(seeds)} seeds" if len(seeds) > 1 else "1 seed"
        figure.suptitle(f"{sweep_label(results['recipe']['name'])}, {words}")
        _add_legend(figure, results, summaries, first, metrics)


def _draw(axis, summaries: list[VariantSummary], first: VariantSummary | None, metric: str) -> None:
    draw_rows(axis, [item.label for item in summaries])
    scale = METRICS[metric].scale
    compared = None if first is None else first.interval(metric)
    if compared is not None:
        axis.axvline(scale * compared[0], color="black", linewidth=0.8, zorder=1)
    for place, item in enumerate(summaries):
        interval = item.interval(metric)
        if interval is None:
            continue
        mean, half = interval
        values = [scale * value for value in item.values[metric].values()]
        axis.plot(values, [place] * len(values), "o", color="0.45", markerfacecolor="none", markersize=4, zorder=3)
        if half is not None:
            # An accuracy is no less than 0 and no more than 1, a loss no less than 0; intervals end there.
            most = float("inf") if METRICS[metric].is_better_when_lower else 1.0
            ends = (scale * max(0.0, mean - half), scale * min(most, mean + half))
            axis.plot(ends, (place, place), "-", color="black", linewidth=1.2, zorder=2)
        axis.plot(scale * mean, place, "D", color="black", markersize=5, zorder=4)
    axis.set_xlabel(METRICS[metric].title.replace(" (", "\n("))


def _add_legend(
    figure,
    results: Mapping[str, Any],
    summaries: list[VariantSummary],
    first: VariantSummary | None,
    metrics: list[str],
) -> None:
    from matplotlib.lines import Line2D

    several = any(len(values) > 1 for item in summaries for values in item.values.values())
    handles = [
        Line2D(
            [], [], color="black", marker="D", markersize=5, label="mean and its 95 % interval" if several else "mean"
        ),
        Line2D([], [], color="0.45", marker="o", markerfacecolor="none", markersize=4, linestyle="", label="one seed"),
    ]
    if first is not None:
        handles.append(Line2D([], [], color="black", linewidth=0.8, label=f"mean of {first.label}"))
    known = {name for metric in metrics for name in reference_values(results, metric)}
    for name, style in REFERENCE_STYLES.items():
        if name in known:
            handles.append(Line2D([], [], color="0.35", linewidth=1.2, linestyle=style, label=REFERENCES[name]))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)


__all__ = ["plot_sweep"]
