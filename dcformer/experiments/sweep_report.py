"""Results of a sweep over seeds: means with 95 % intervals, differences to the first variant, and a plot."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table

from ..common.optional import import_optional
from ..common.plotting import draw_rows, picture
from .seeds import compare_seeds, seed_interval


if TYPE_CHECKING:
    import pandas


def summarise(results: Mapping[str, Any]) -> pandas.DataFrame:
    """
    Average the metrics of a sweep, the content of `results.json`, over the seeds.

    Returns:
        A row per variant that has a run, in the order of the recipe: `seeds`, `parameters`, and for every metric its
        mean and, as `<metric> ±`, half the 95 % interval of Student's t, NaN for one seed. Metrics are
        `evaluation_loss` (nats per token), `evaluation_accuracy`, and those of the tasks, such as `head_tasks acc`.
    """
    frame = _runs_frame(results)
    groups = frame.groupby("variant", sort=False)
    table = groups["parameters"].first().to_frame()
    table.insert(0, "seeds", groups.size())
    for metric in _metrics(frame):
        intervals = {name: seed_interval(values) for name, values in groups[metric]}
        table[metric] = {name: mean for name, (mean, _) in intervals.items()}
        table[f"{metric} ±"] = {name: half for name, (_, half) in intervals.items()}
    return table


def compare_variants(results: Mapping[str, Any], metric: str) -> pandas.DataFrame:
    """
    Compare variants with the first one by t tests paired by seed, where they have at least two seeds in common: a row
    per variant with `difference`, `±` (half its 95 % interval) and `p`, corrected by Holm's method.
    """
    pandas = import_optional("pandas", "A report of a sweep", "train")
    frame = _runs_frame(results).dropna(subset=metric)
    values = {name: dict(zip(rows["seed"], rows[metric])) for name, rows in frame.groupby("variant", sort=False)}
    first = next(iter(values))
    pairs = [(name, first) for name in values if name != first and len(values[name].keys() & values[first]) > 1]
    compared = compare_seeds(values, pairs) if pairs else []
    rows = {item.first: (item.difference, item.half_width, item.corrected_p) for item in compared}
    return pandas.DataFrame.from_dict(rows, orient="index", columns=["difference", "±", "p"])


def print_report(results: Mapping[str, Any], console: Console) -> None:
    """Print a row per variant, with published perplexities and ranks if there are any, differences, and failures."""
    table, metrics = summarise(results), _metrics(_runs_frame(results))
    published = results["recipe"]["sweep"].get("published") or {}
    columns: dict[str, Iterable[str]] = {"variant": table.index, "seeds": table["seeds"].map(str)}
    columns |= {"parameters": table["parameters"].map("{:,}".format)}
    columns |= {metric: map(_with_interval, table[metric], table[f"{metric} ±"]) for metric in metrics}
    if "evaluation_loss" in table:
        columns["perplexity"] = [f"{math.exp(loss):.3f}" for loss in table["evaluation_loss"]]
    if published:
        columns["published perplexity"] = [str(published.get(name, "-")) for name in table.index]
        here = table[metrics[0]].rank(method="min", ascending=_is_better_when_lower(metrics[0]))
        there = table.index.to_series().map(published).rank(method="min")
        columns["rank here / published"] = [f"{a:.0f} / {b:.0f}".replace("nan", "-") for a, b in zip(here, there)]
    title = f"{results['recipe']['name']}: mean ± half a 95 % interval over the seeds"
    headings = (Column(name, justify="left" if name == "variant" else "right") for name in columns)
    shown = Table(*headings, title=title, title_justify="left")
    for row in zip(*columns.values()):
        shown.add_row(*row)
    console.print(shown)
    for metric in metrics:
        differences = compare_variants(results, metric)
        for name, row in differences.sort_values("difference", ascending=_is_better_when_lower(metric)).iterrows():
            difference = f"{name} - {table.index[0]} = {_with_interval(row['difference'], row['±'], '+')}"
            console.print(f"{metric}: {difference} (p {row['p']:.2g}, Holm)", soft_wrap=True)
    for failure in results["failures"]:
        console.print(f"FAILED {failure['variant']}, seed {failure['seed']}: {failure['error']}", soft_wrap=True)


def plot_sweep(results: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """
    Plot a panel per metric and a line per variant: the mean with its 95 % interval, and the seeds as hollow markers.
    ValueError unless the path ends in `.png`, `.svg` or `.pdf`.
    """
    frame, table = _runs_frame(results), summarise(results)
    metrics, names = _metrics(frame), list(table.index)
    size = (0.6 + 0.085 * max(map(len, names)) + 3.2 * len(metrics), 1.6 + 0.32 * len(names))
    with picture(path, size, "train") as figure:
        panels = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
        for axis, metric in zip(panels, metrics):
            draw_rows(axis, names)
            rows = frame["variant"].map(names.index)
            axis.plot(frame[metric], rows, "o", color="0.45", markerfacecolor="none", markersize=4)
            axis.errorbar(table[metric], range(len(names)), xerr=table[f"{metric} ±"], fmt="D", color="black")
            axis.axvline(table[metric].iloc[0], color="black", linewidth=0.8, zorder=1)
            axis.set_xlabel(metric)
        figure.suptitle(f"{results['recipe']['name']}: mean and 95 % interval over seeds")


def _runs_frame(results: Mapping[str, Any]) -> pandas.DataFrame:
    """A row per run, with a column per metric."""
    pandas = import_optional("pandas", "A report of a sweep", "train")
    rows = []
    for run in results["runs"]:
        row = {key: run[key] for key in ("variant", "seed", "parameters")}
        row |= {key: run["training"][key] for key in ("evaluation_loss", "evaluation_accuracy")}
        for task, metrics in (run["evaluation"] or {}).items():
            row |= {f"{task} {name}": value for name, value in metrics.items()}
        rows.append(row)
    return pandas.DataFrame(rows).dropna(axis="columns", how="all")


def _metrics(frame: pandas.DataFrame) -> list[str]:
    return [column for column in frame if column not in ("variant", "seed", "parameters")]


def _is_better_when_lower(metric: str) -> bool:
    return "loss" in metric or "perplexity" in metric


def _with_interval(mean: float, half: float, sign: str = "") -> str:
    return f"{mean:{sign}.4f} {'(one seed)' if math.isnan(half) else f'± {half:.4f}'}"
