"""Differences to the baseline by task, as a picture that needs no colour.

Every model has another marker: filled, with its interval, for measured differences, and hollow for those between the
paper's rows. The interval of an undecided difference is dotted.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from typing import TYPE_CHECKING

from ..common.plotting import draw_rows, picture
from .comparison import SUMMARIES
from .evaluation_report import HEAD_TASK_HEADINGS
from .published import AVERAGE
from .suites import TABLE4_COLUMNS


if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .evaluation_report import Report

# Marker and fill of models; shapes repeat in another grey.
_STYLES = [(marker, grey) for grey in ("black", "0.45", "0.7") for marker in "osD^vPX"]
_INCHES_PER_ROW = 0.16  # of one model


def plot_deltas(report: Report, path: str | os.PathLike) -> None:
    """
    Plot the differences in accuracy to the baseline, in percentage points with 95 % intervals, of all models.

    There is a panel for every number of shots and one for head tasks; PARTIAL below a task marks partial results.

    Args:
        report: A report with a baseline.
        path: Path of the picture, which ends in `.png`, `.svg` or `.pdf`.

    Raises:
        ValueError: for another ending, or if the report has no differences.
        ImportError: without matplotlib.
    """
    accuracies = report.frame[report.frame.metric == "acc"].astype({"paper": float})
    of_baseline = accuracies[accuracies.model == report.results.baseline].set_index(["task", "shots"]).paper
    frame = accuracies[accuracies.delta.notna()].join(of_baseline, ["task", "shots"], rsuffix="_of_baseline")
    panels = []
    for title, order in (("{}-shot", (*TABLE4_COLUMNS, AVERAGE)), ("head tasks", tuple(HEAD_TASK_HEADINGS))):
        for shots, part in frame[frame.task.isin(order)].groupby("shots"):
            panels.append((title.format(shots), part, [task for task in order if task in set(part.task)]))
    if not panels:
        raise ValueError(
            "There is nothing to plot: no accuracy of the paper's tables or the head tasks was compared with a "
            "baseline (--baseline), and other tasks and texts are not plotted."
        )
    models = [model for model in report.results.models if model != report.results.baseline]
    height = max(3, len(models)) * _INCHES_PER_ROW * max(len(tasks) for *_, tasks in panels)
    figsize = (2.2 + 4.2 * len(panels), 2.2 + 0.2 * len(models) + height)
    with picture(path, figsize, "eval") as figure:
        for axis, (title, part, tasks) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
            _draw(axis, part, models, tasks)
            axis.set_title(title)
        _add_legend(figure, report, models, len(panels))


def _draw(axis: Axes, part: pandas.DataFrame, models: list[str], tasks: list[str]) -> None:
    partial = set(part.task[part.partial != ""])
    names = {task: HEAD_TASK_HEADINGS.get(task, task) for task in tasks}
    draw_rows(axis, [names[task] + ("\nPARTIAL" if task in partial else "") for task in tasks])
    for row in part.itertuples():
        number = models.index(row.model)
        height = tasks.index(row.task) + (number + 0.5) / len(models) * 0.8 - 0.4
        marker, grey = _STYLES[number % len(_STYLES)]
        in_paper = row.paper - row.paper_of_baseline
        if not math.isnan(in_paper):
            axis.plot(100 * in_paper, height, marker, color="black", markerfacecolor="none", markersize=9, zorder=4)
        line = ":" if row.undecided else "-"
        axis.plot((100 * row.low, 100 * row.high), (height, height), line, color="black", linewidth=1.2, zorder=2)
        axis.plot(100 * row.delta, height, marker, color="black", markerfacecolor=grey, markersize=5, zorder=3)
    axis.axvline(0, color="black", linewidth=0.8, zorder=1)
    axis.set_xlabel("percentage points")
    if tasks[-1] in SUMMARIES:
        axis.axhline(len(tasks) - 1.5, color="black", linewidth=0.8)


def _add_legend(figure: Figure, report: Report, models: list[str], panels: int) -> None:
    from matplotlib.lines import Line2D

    line, results = functools.partial(Line2D, [], [], color="black"), report.results
    handles = []
    for model, (marker, grey) in zip(models, itertools.cycle(_STYLES)):
        handles.append(line(label=results.names[model], marker=marker, markersize=5, markerfacecolor=grey))
    if results.baseline in results.rows and any(model in results.rows for model in models):
        name = "difference in the paper (hollow)"
        handles.append(line(label=name, marker="o", markersize=9, markerfacecolor="none", linestyle="none"))
    handles.append(line(label="undecided: the interval contains 0, or p is above 0.05", linestyle=":", linewidth=1.2))
    title = f"Accuracy: difference to {results.names[results.baseline or '']}\n(95 % intervals of a paired bootstrap)"
    failed = any(text.startswith("CONTROL FAILED") for text in report.banners)
    figure.suptitle(f"{title}\nCONTROL FAILED: see the report" if failed else title)
    figure.legend(handles=handles, loc="outside lower center", ncols=1 if panels == 1 else 2, frameon=False)
