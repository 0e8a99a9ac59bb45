"""Differences to the baseline, task by task, as a picture that needs no colour.

A model is a marker of its own shape: filled with its interval where it was measured, hollow where the paper has the
number (the difference of the paper's two rows). The interval of an undecided difference is dotted.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..common.plotting import check_plot_path, draw_rows, picture
from .published import AVERAGE, paper_accuracies, paper_authors_texts
from .report_tables import AUTHORS_ALL, AUTHORS_HEADINGS
from .table4_tasks import TABLE4_COLUMNS


if TYPE_CHECKING:
    from .report import Report

_MARKERS = "osD^vPX"
_GREYS = ("black", "0.45", "0.7")
_UNDECIDED = ":"  # the line of an interval
_INCHES_PER_ROW = 0.16  # for a line of one model


def plot_deltas(report: Report, path: str | os.PathLike) -> None:
    """
    Write the differences in accuracy to the baseline, in percentage points with 95 % intervals, of all models.

    A panel for every number of shots, and one for the authors' texts of head tasks; partial results are marked at the
    task's name.

    Args:
        report (`Report`): With a baseline.
        path: File that ends in `.png`, `.svg` or `.pdf`.

    Raises:
        ValueError: for another ending, or if the report has no difference to show.
        ImportError: without matplotlib.
    """
    path = check_plot_path(path)
    panels = _panels(report)
    if not panels:
        raise ValueError(
            "There is nothing to plot: no accuracy was compared with a baseline; choose one by --baseline."
        )
    models = [model for model in report.models if model != report.baseline]
    row_height = max(3, len(models)) * _INCHES_PER_ROW
    rows = max(len(tasks) for _, _, tasks in panels)
    figsize = (2.2 + 4.2 * len(panels), 2.2 + 0.2 * len(models) + row_height * rows)
    with picture(path, figsize, "eval") as figure:
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axis, (title, shots, tasks) in zip(axes, panels):
            _draw(axis, report, models, shots, tasks)
            axis.set_title(title)
        _add_legend(figure, report, models, len(panels))


def _panels(report: Report) -> list[tuple[str, int, list[str]]]:
    """(title, shots, tasks from top to bottom) of what has a difference."""
    present = {
        (task, shots) for (_, task, shots, metric), cell in report.cells.items() if metric == "acc" and cell.delta
    }
    all_shots = sorted({shots for _, shots in present})
    panels = [
        (title.format(shots), shots, [task for task in order if (task, shots) in present])
        for title, order in (("{}-shot", (*TABLE4_COLUMNS, AVERAGE)), ("head tasks, K-shot", tuple(AUTHORS_HEADINGS)))
        for shots in all_shots
    ]
    return [panel for panel in panels if panel[2]]


def _draw(axis, report: Report, models: list[str], shots: int, tasks: list[str]) -> None:
    draw_rows(axis, [_task_label(report, shots, task) for task in tasks])
    for place, task in enumerate(tasks):
        for number, model in enumerate(models):
            height = place + (number + 0.5) / len(models) * 0.8 - 0.4
            marker, grey = _style(number)
            published = _published_difference(report, model, shots, task)
            if published is not None:
                axis.plot(
                    100 * published, height, marker, color="black", markerfacecolor="none", markersize=9, zorder=4
                )
            cell = report.cells.get((model, task, shots, "acc"))
            if cell and cell.delta:
                ends = (100 * cell.delta.low, 100 * cell.delta.high)
                # matplotlib leaves out ends that are not there, for a single document.
                style = _UNDECIDED if cell.is_undecided else "-"
                axis.plot(ends, (height, height), style, color="black", linewidth=1.2, zorder=2)
                value = 100 * cell.delta.value
                axis.plot(value, height, marker, color="black", markerfacecolor=grey, markersize=5, zorder=3)
    axis.axvline(0, color="black", linewidth=0.8, zorder=1)
    axis.set_xlabel("percentage points")
    if tasks[-1] in (AVERAGE, AUTHORS_ALL):
        axis.axhline(len(tasks) - 1.5, color="black", linewidth=0.8)


def _task_label(report: Report, shots: int, task: str) -> str:
    cells = [cell for (_, name, at, metric), cell in report.cells.items() if (name, at, metric) == (task, shots, "acc")]
    partial = next((cell for cell in cells if cell.is_partial), None)
    name = AUTHORS_HEADINGS.get(task, task)
    return name if partial is None else f"{name}\nPARTIAL {partial.num_samples}/{partial.num_documents}"


def _published_difference(report: Report, model: str, shots: int, task: str) -> float | None:
    """The paper's model minus its baseline; `None` unless both are there."""
    values = []
    for each in (model, report.baseline):
        row = report.rows.get(each)
        value = paper_authors_texts(row).get("acc") if task == AUTHORS_ALL else paper_accuracies(row, shots).get(task)
        if value is None:
            return None
        values.append(value)
    return values[0] - values[1]


def _style(number: int) -> tuple[str, str]:
    """Marker and fill of the model of a number; a shape comes again in another grey."""
    return _MARKERS[number % len(_MARKERS)], _GREYS[number // len(_MARKERS) % len(_GREYS)]


def _add_legend(figure, report: Report, models: list[str], panels: int) -> None:
    from matplotlib.lines import Line2D

    handles = []
    for number, model in enumerate(models):
        marker, grey = _style(number)
        handles.append(
            Line2D([], [], color="black", marker=marker, markersize=5, markerfacecolor=grey, label=report.names[model])
        )
    if report.baseline in report.rows and any(model in report.rows for model in models):
        hollow = Line2D([], [], color="black", linestyle="none", marker="o", markersize=9, markerfacecolor="none")
        hollow.set_label("difference in the paper\n(hollow, of the same shape)")
        handles.append(hollow)
    if any(cell.is_undecided for cell in report.cells.values()):
        p_value = "p-value by Holm's rule" if report.correction == "holm" else "p-value"
        label = f"undecided: the interval contains 0\nor ends there, or its {p_value} is above 0.05"
        handles.append(Line2D([], [], color="black", linestyle=_UNDECIDED, linewidth=1.2, label=label))
    title = f"Accuracy: difference to\n{report.names[report.baseline]}\n(95 % intervals of a paired bootstrap)"
    figure.suptitle(f"{title}\nCONTROL FAILED: see the report's warning" if report.warnings else title)
    figure.legend(handles=handles, loc="outside lower center", ncols=1 if panels == 1 else 2, frameon=False)
