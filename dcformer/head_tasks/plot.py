"""Accuracy of models on the head tasks, by number of examples, pattern and transformation, without need of colour."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..common.plotting import check_plot_path, draw_rows, picture
from .intervals import seed_interval
from .labels import REFERENCES, variant_label
from .references import BLIND_CHOICE, LONE_NAME, ODD_ONE_OUT
from .suite import AUTHORS, HELD_OUT


if TYPE_CHECKING:
    from .comparison import HeadTasksComparison, ModelResult

# Marks and fills; the first is the baseline's.
_MARKS = (("o", "white"), ("o", "black"), ("s", "0.6"), ("D", "white"), ("^", "0.3"))
_GROUPINGS = {"by_shots": "examples before", "by_pattern": "pattern", "by_transformation": "transformation"}
_TITLES = {HELD_OUT: "held-out tasks", AUTHORS: "authors' texts"}
# Mark of each question-blind rule, and what stands alone in the fact that it takes.
_RULE_MARKS = {LONE_NAME: "x", ODD_ONE_OUT: "+"}
_STANDS_ALONE = {LONE_NAME: "name or listed thing", ODD_ONE_OUT: "name, thing or class of things"}
_INCHES_PER_MARK, _LEAST_INCHES_PER_ROW = 0.12, 0.27


def plot_comparison(comparison: HeadTasksComparison, path: str | os.PathLike) -> None:
    """
    Write accuracies in percent: a column of panels per set of documents, a row per way to group their questions.

    A mark is the mean over training seeds, with its 95 % interval as a line, where more than one seed is known, and
    otherwise the accuracy of the model itself. Blind choice is a dashed line; crosses in each row are the
    question-blind rules. Patterns and transformations are sorted by the gain over the first model.

    Args:
        comparison: What to draw.
        path: File that ends in `.png`, `.svg` or `.pdf`.

    Raises:
        ValueError: for another ending.
        ImportError: without matplotlib.
    """
    path = check_plot_path(path)
    models, sets = comparison.models, comparison.sets
    rows = [comparison.groups(sets[0], grouping) for grouping in _GROUPINGS]
    height = max(_LEAST_INCHES_PER_ROW, (len(models) + 1) * _INCHES_PER_MARK)
    heights = [len(names) * height for names in rows]
    # Title, labels of axes and legend besides.
    with picture(path, (2.4 + 4.2 * len(sets), 3.2 + sum(heights)), "eval") as figure:
        panels = figure.subplots(len(rows), len(sets), squeeze=False, height_ratios=heights, sharey="row", sharex=True)
        for kind, names, row in zip(_GROUPINGS.values(), rows, panels):
            for documents, axis in zip(sets, row):
                draw_rows(axis, list(names))
                _draw(axis, comparison, documents, list(names.values()))
            row[0].set_ylabel(kind)
        for documents, axis in zip(sets, panels[0]):
            axis.set_title(_TITLES[documents])
        for axis in panels[-1]:
            axis.set_xlabel("accuracy of whole answers, %")
        figure.align_ylabels()
        figure.suptitle("Head tasks")
        _add_legend(figure, comparison)


def _draw(axis, comparison: HeadTasksComparison, documents: str, rows: list[tuple[str, ...]]) -> None:
    from .comparison import part_of

    models, references = comparison.models, comparison.references[documents]
    axis.axvline(100 * references[BLIND_CHOICE]["accuracy"], color="black", linestyle="--", linewidth=0.9, zorder=1)
    step = 0.6 / max(1, len(models) - 1)
    for place, keys in enumerate(rows):
        rules = {name: part_of(references[name], *keys) for name in _RULE_MARKS}
        if None in rules.values():
            continue
        for name, mark in _RULE_MARKS.items():
            axis.plot(100 * rules[name]["accuracy"], place, mark, color="0.4", markersize=6, clip_on=False, zorder=2)
        for number, model in enumerate(models):
            height = place + (number * step - 0.3 if len(models) > 1 else 0)
            _draw_mark(axis, model, documents, keys, height, number)
    axis.set_xlim(0, 100)


def _draw_mark(axis, model: ModelResult, documents: str, keys: tuple[str, ...], height: float, number: int) -> None:
    shape, fill = _MARKS[number % len(_MARKS)]
    values = list(model.over_seeds(documents, "accuracy", *keys).values())
    if len(values) > 1:
        mean, half_width = (100 * value for value in seed_interval(values))
        # An accuracy is no less than 0 and no more than 100; an interval that goes further ends there.
        ends = max(0.0, mean - half_width), min(100.0, mean + half_width)
        axis.plot(ends, (height, height), "-", color="black", linewidth=1.2, zorder=3)
    centre = 100 * model.best_known(documents, *keys)
    axis.plot(centre, height, shape, color="black", markerfacecolor=fill, markersize=5, clip_on=False, zorder=4)


def _add_legend(figure, comparison: HeadTasksComparison) -> None:
    from matplotlib.lines import Line2D

    handles = []
    for number, model in enumerate(comparison.models):
        shape, fill = _MARKS[number % len(_MARKS)]
        seeds = len(model.over_seeds(HELD_OUT, "accuracy"))
        label = variant_label(model.label)
        if seeds > 1:
            label += f", mean of {seeds} seeds, 95 % interval"
        style = {"marker": shape, "markerfacecolor": fill, "markeredgecolor": "black", "markersize": 5}
        handles.append(Line2D([], [], color="black", linestyle="-" if seeds > 1 else "", label=label, **style))
    handles.append(Line2D([], [], color="black", linestyle="--", linewidth=0.9, label=REFERENCES[BLIND_CHOICE]))
    for name, mark in _RULE_MARKS.items():
        label = f"{REFERENCES[name]} ({_STANDS_ALONE[name]} that stands alone)"
        handles.append(Line2D([], [], color="0.4", marker=mark, linestyle="", label=label))
    # One column, so that names of any length fit the width.
    figure.legend(handles=handles, loc="outside lower center", ncols=1, frameon=False)
