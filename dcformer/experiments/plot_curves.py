"""Accuracy and loss of the pairs of a sweep against what was spent: a kind of line for a model and its baselines."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..common.plotting import check_plot_path, draw_grid, picture
from ..head_tasks.intervals import seed_interval
from ..head_tasks.labels import REFERENCES, sweep_label, variant_label
from .claim import compare_pairs, curves_of
from .curves import Axis, Curve, Quantity
from .reference_lines import REFERENCE_STYLES


# Told apart by those who see no red or no green, and in print by their lightness.
_MODEL, _BASELINES = "#0072B2", ("#D55E00", "#E69F00", "#CC79A7")
_STYLES = ("-", "--", ":", "-.")
_AXIS_TITLES: dict[Axis, str] = {"flops": "FLOPs of training", "seconds": "seconds of training"}
_QUANTITY_TITLES: dict[Quantity, str] = {"accuracy": "accuracy (%)", "loss": "evaluation loss (nats per token)"}


def plot_curves(results: Mapping[str, Any], path: str | os.PathLike) -> None:
    """
    Write loss, and accuracy where it was measured, of all pairs of a sweep against FLOPs and seconds.

    A line is the mean over the seeds at each evaluation, with its 95 % interval as a band; of losses the mean and the
    interval of logarithms, as their axis is logarithmic. Grey lines are what is reached without reading the question.

    Args:
        results (`Mapping`): What `run_sweep` returns, or `read_results` of its file.
        path: File that ends in `.png`, `.svg` or `.pdf`.

    Raises:
        ValueError: for another ending, or if no pair has curves.
        ImportError: without matplotlib or scipy.
    """
    path = check_plot_path(path)
    pairs, curves = compare_pairs(results), curves_of(results)
    styles = _styles(pairs)
    if not pairs:
        raise ValueError("There is nothing to plot: no pair of sweep.pairs has evaluation curves with the same seed.")
    has_accuracy = all(curve.accuracy for pair in pairs for name in pair for curve in curves[name].values())
    quantities: tuple[Quantity, ...] = ("accuracy", "loss") if has_accuracy else ("loss",)
    with picture(path, (10.0, 1.9 + 3.2 * len(quantities)), "train") as figure:
        panels = figure.subplots(len(quantities), len(_AXIS_TITLES), sharex="col", sharey="row", squeeze=False)
        for quantity, row in zip(quantities, panels):
            row[0].set_ylabel(_QUANTITY_TITLES[quantity])
            for axis, panel in zip(_AXIS_TITLES, row):
                for name, style in styles.items():
                    _draw_curve(panel, list(curves[name].values()), quantity, axis, style)
                _draw_references(panel, results, quantity)
                _scale(panel, axis)
                draw_grid(panel)
        for axis, panel in zip(_AXIS_TITLES, panels[-1]):
            panel.set_xlabel(_AXIS_TITLES[axis])
        if has_accuracy:
            panels[0][0].set_ylim(0, 100)
        panels[-1][0].set_yscale("log")
        seeds = {seed for pair in pairs for name in pair for seed in curves[name]}
        count = f"{len(seeds)} seeds" if len(seeds) > 1 else "1 seed"
        figure.suptitle(f"{sweep_label(results['recipe']['name'])}: means with 95 % intervals, {count}")
        _add_legend(figure, results, styles)


def _scale(panel, axis: Axis) -> None:
    """Logarithmic, with labels of 1, 2 and 5 where there are fewer than two decades, and of powers of 10 else."""
    from matplotlib.ticker import FuncFormatter, LogFormatterSciNotation, LogLocator, NullFormatter

    panel.set_xscale("log")
    low, high = panel.get_xlim()
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    in_seconds = FuncFormatter(lambda value, _: f"{value:,g}")
    in_powers = LogFormatterSciNotation(minor_thresholds=(math.inf, math.inf))
    panel.xaxis.set_major_formatter(in_seconds if axis == "seconds" else in_powers)
    panel.xaxis.set_minor_formatter(NullFormatter())


def _styles(pairs: Sequence[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """By variant, each once: a kind of line for every model, in which its baselines have other colours."""
    baselines: dict[str, list[str]] = {}
    for model, baseline in pairs:
        baselines.setdefault(model, []).append(baseline)
    styles: dict[str, dict[str, Any]] = {}
    for number, (model, others) in enumerate(baselines.items()):
        line = {"linestyle": _STYLES[number % len(_STYLES)], "linewidth": 1.6}
        styles.setdefault(model, {**line, "color": _MODEL})
        for place, baseline in enumerate(others):
            styles.setdefault(baseline, {**line, "color": _BASELINES[place % len(_BASELINES)]})
    return styles


def _draw_curve(panel, curves: Sequence[Curve], quantity: Quantity, axis: Axis, style: dict[str, Any]) -> None:
    # Runs of one variant have the same evaluations; one that was cut short has fewer.
    places = range(min(len(curve.steps) for curve in curves))
    spent = [math.fsum(getattr(curve, axis)[place] for curve in curves) / len(curves) for place in places]
    rows = [_interval([getattr(curve, quantity)[place] for curve in curves], quantity) for place in places]
    middle, low, high = zip(*rows)
    panel.plot(spent, middle, zorder=4, **style)
    if len(curves) > 1:
        panel.fill_between(spent, low, high, color=style["color"], alpha=0.12, linewidth=0, zorder=2)


def _interval(values: Sequence[float], quantity: Quantity) -> tuple[float, float, float]:
    """Mean and ends of the interval, accuracies in percent; a single value stands for all three."""
    if quantity == "loss":
        mean, half = seed_interval([math.log(value) for value in values])
        half = 0.0 if math.isnan(half) else half
        return math.exp(mean), math.exp(mean - half), math.exp(mean + half)
    mean, half = (100 * value for value in seed_interval(values))
    half = 0.0 if math.isnan(half) else half
    return mean, max(0.0, mean - half), min(100.0, mean + half)


def _references(results: Mapping[str, Any], quantity: Quantity) -> dict[str, float]:
    found = (results.get("references") or {}).get("evaluation") or {}
    scale = 100 if quantity == "accuracy" else 1
    return {name: scale * found[name][quantity] for name in REFERENCE_STYLES if quantity in found.get(name, {})}


def _draw_references(panel, results: Mapping[str, Any], quantity: Quantity) -> None:
    for name, value in _references(results, quantity).items():
        panel.axhline(value, color="0.35", linewidth=1.2, linestyle=REFERENCE_STYLES[name], zorder=3)


def _add_legend(figure, results: Mapping[str, Any], styles: Mapping[str, dict[str, Any]]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=variant_label(name), **style) for name, style in styles.items()]
    known = {**_references(results, "loss"), **_references(results, "accuracy")}
    for name, style in REFERENCE_STYLES.items():
        if name in known:
            handles.append(Line2D([], [], color="0.35", linewidth=1.2, linestyle=style, label=REFERENCES[name]))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, handlelength=3.0)


__all__ = ["plot_curves"]
