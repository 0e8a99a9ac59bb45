"""Accuracy of models on the head tasks, per pattern and per transformation, as bars that need no colour."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..common.plotting import check_plot_path, draw_rows, picture
from .intervals import seed_interval
from .suite import AUTHORS, HELD_OUT


if TYPE_CHECKING:
    from .comparison import HeadTasksComparison

_FILLS = (("0.8", ""), ("0.3", ""), ("white", "///"), ("0.6", "xx"), ("white", "..."))
_GROUPINGS = ("by_pattern", "by_transformation")
_TITLES = {HELD_OUT: "held-out tasks", AUTHORS: "authors' texts"}
_INCHES_PER_BAR = 0.11


def plot_comparison(comparison: HeadTasksComparison, path: str | os.PathLike) -> None:
    """
    Write bars of accuracy in percent: a column of panels per set of documents, patterns above transformations.

    A model whose other training seeds are known has a line besides: the 95 % interval of their mean.

    Args:
        comparison: What to draw.
        path: File that ends in `.png`, `.svg` or `.pdf`.

    Raises:
        ValueError: for another ending.
        ImportError: without matplotlib.
    """
    path = check_plot_path(path)
    models, sets = comparison.models, comparison.sets
    groups = [list(models[0].summaries[sets[0]][grouping]) for grouping in _GROUPINGS]
    heights = [len(names) * max(3, len(models) + 1) * _INCHES_PER_BAR for names in groups]
    with picture(path, (2.2 + 4.2 * len(sets), 2.2 + sum(heights)), "eval") as figure:
        panels = figure.subplots(len(groups), len(sets), squeeze=False, height_ratios=heights, sharey="row")
        for grouping, names, row in zip(_GROUPINGS, groups, panels):
            for documents, axis in zip(sets, row):
                _draw(axis, comparison, documents, grouping, names)
        for documents, axis in zip(sets, panels[0]):
            axis.set_title(_TITLES[documents])
        for axis in panels[-1]:
            axis.set_xlabel("accuracy of whole answers, %")
        _add_legend(figure, comparison)


def _draw(axis, comparison: HeadTasksComparison, documents: str, grouping: str, names: list[str]) -> None:
    draw_rows(axis, names)
    models = comparison.models
    thickness = 0.8 / len(models)
    for place, name in enumerate(names):
        for number, model in enumerate(models):
            summary = model.summaries[documents][grouping].get(name)
            height = place + (number + 0.5) * thickness - 0.4
            if summary is not None:
                fill, hatch = _FILLS[number % len(_FILLS)]
                axis.barh(
                    height,
                    100 * summary["accuracy"],
                    thickness,
                    color=fill,
                    hatch=hatch,
                    edgecolor="black",
                    linewidth=0.6,
                    zorder=2,
                )
            values = list(model.over_seeds(documents, "accuracy", grouping, name).values())
            if len(values) > 1:
                mean, half_width = (100 * value for value in seed_interval(values))
                # White below black, so that it is seen on bars of every fill.
                for colour, width in (("white", 3.0), ("black", 1.2)):
                    axis.errorbar(
                        mean,
                        height,
                        xerr=half_width,
                        color=colour,
                        elinewidth=width,
                        capsize=2,
                        capthick=width,
                        zorder=3,
                    )
    axis.set_xlim(0, 100)


def _add_legend(figure, comparison: HeadTasksComparison) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Patch | Line2D] = []
    for number, model in enumerate(comparison.models):
        fill, hatch = _FILLS[number % len(_FILLS)]
        handles.append(Patch(facecolor=fill, hatch=hatch, edgecolor="black", linewidth=0.6, label=model.label))
    seeds = [len(values) for model in comparison.models if len(values := model.over_seeds(HELD_OUT, "accuracy")) > 1]
    if seeds:
        label = f"mean of {min(seeds)} training seeds, 95 % interval"
        handles.append(Line2D([], [], color="black", linewidth=1.2, marker="|", label=label))
    figure.suptitle("Head tasks")
    figure.legend(handles=handles, loc="outside lower center", ncols=min(3, len(handles)), frameon=False)
