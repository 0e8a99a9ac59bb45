"""What the runs of a sweep say: means over seeds, differences to the first variant, and the order of the variants."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..common.optional import import_optional
from ..head_tasks.intervals import seed_interval


@dataclass(frozen=True)
class Metric:
    """A number of a run; `scale` brings it into the unit in which it is shown."""

    name: str
    short: str
    unit: str
    is_better_when_lower: bool
    scale: float
    digits: int

    @property
    def title(self) -> str:
        return f"{self.name} ({self.unit})"


METRICS = {
    "evaluation_loss": Metric("evaluation loss", "loss", "nats per token", True, 1, 4),
    "held_out": Metric("accuracy, held-out tasks", "held-out", "%", False, 100, 2),
    "authors": Metric("accuracy, authors' texts", "authors'", "%", False, 100, 2),
}


@dataclass(frozen=True)
class VariantSummary:
    """
    The runs of one variant.

    Attributes:
        name: Name of the variant.
        parameters: Number of parameters of its model.
        values: Metric of [`METRICS`] -> seed -> value, loss in nats per token and accuracies as fractions; metrics and
            seeds that were not measured are left out.
    """

    name: str
    parameters: int
    values: Mapping[str, Mapping[int, float]]

    def interval(self, metric: str) -> tuple[float, float | None] | None:
        """Mean and half width of the 95 % interval over seeds, which needs two; `None` without a value."""
        return mean_interval(list(self.values.get(metric, {}).values()))

    def difference(self, other: VariantSummary, metric: str) -> tuple[float, float | None] | None:
        """As `interval`, of the differences to another variant with the same seed, whose documents are the same too."""
        own, others = self.values.get(metric, {}), other.values.get(metric, {})
        return mean_interval([own[seed] - others[seed] for seed in own if seed in others])


@dataclass(frozen=True)
class Agreement:
    """
    How far two orders of the variants agree.

    Attributes:
        pairs: Pairs of variants that the published numbers tell apart.
        agreeing: Those of them in the same order here.
        apart, apart_agreeing: The same, of pairs whose 95 % interval of the difference over seeds leaves out 0.
        tau: Kendall's rank correlation (tau-b), from -1 to 1; `None` if all variants are equal.
    """

    pairs: int
    agreeing: int
    apart: int
    apart_agreeing: int
    tau: float | None


def read_results(path: str | os.PathLike) -> dict[str, Any]:
    """
    The `results.json` of a sweep.

    Raises:
        FileNotFoundError: if it is not there.
        ValueError: if the file is something else, or holds no run.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}; give the results.json that a sweep wrote.")
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
        summaries = summarise_variants(results)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(path)!r} holds no results of a sweep; give the results.json of one.") from error
    if not summaries:
        raise ValueError(f"{str(path)!r} holds no finished run yet; run the sweep first.")
    return results


def summarise_variants(results: Mapping[str, Any]) -> list[VariantSummary]:
    """The variants of which there is a run, in the order of the recipe."""
    runs: dict[str, list[Mapping]] = {}
    for run in results["runs"]:
        runs.setdefault(run["variant"], []).append(run)
    return [
        VariantSummary(name, runs[name][0]["parameters"], _values(runs[name]))
        for name in results["recipe"]["sweep"]["variants"]
        if name in runs
    ]


def mean_interval(values: list[float]) -> tuple[float, float | None] | None:
    """Mean and half width of the 95 % interval (Student's t); the width is `None` for one value, all for none."""
    if not values:
        return None
    return (values[0], None) if len(values) == 1 else seed_interval(values)


def agreement(summaries: list[VariantSummary], metric: str, published: Mapping[str, float]) -> Agreement | None:
    """
    Compare the order of the variants with that of published perplexities.

    Args:
        summaries: What `summarise_variants` returns.
        metric (`str`): One of [`METRICS`], by whose mean the variants are ordered.
        published (`Mapping[str, float]`): Variant -> perplexity, lower is better.

    Returns:
        `None` if fewer than two variants have both numbers.
    """
    both = [item for item in summaries if item.name in published and item.interval(metric) is not None]
    if len(both) < 2:
        return None
    pairs = agreeing = apart = apart_agreeing = 0
    for first, second in combinations(both, 2):
        here = _goodness(second, metric) - _goodness(first, metric)
        there = published[first.name] - published[second.name]
        if there == 0:
            continue
        agrees = here * there > 0
        pairs, agreeing = pairs + 1, agreeing + agrees
        mean, half = second.difference(first, metric) or (0.0, None)
        if half is not None and abs(mean) > half:
            apart, apart_agreeing = apart + 1, apart_agreeing + agrees
    stats = import_optional("scipy.stats", 'Rank correlations need scipy: pip install "dcformer[train]".')
    ranks = [_goodness(item, metric) for item in both], [-published[item.name] for item in both]
    tau = float(stats.kendalltau(*ranks).statistic)
    return Agreement(pairs, agreeing, apart, apart_agreeing, None if math.isnan(tau) else tau)


def print_report(results: Mapping[str, Any], console: Console) -> None:
    """Print a row per variant, how the order compares with the published one, and the runs that failed."""
    summaries = summarise_variants(results)
    metrics = measured(summaries)
    published = results["recipe"]["sweep"].get("published") or {}
    console.print(_table(results, summaries, metrics, published))
    for metric in metrics:
        found = agreement(summaries, metric, published)
        if found is not None:
            tau = "undefined" if found.tau is None else f"{found.tau:.2f}"
            console.print(
                f"Order by {METRICS[metric].name}: {found.agreeing} of {found.pairs} pairs as published "
                f"(Kendall's tau {tau}); of pairs that are apart by 95 %, {found.apart_agreeing} of {found.apart}",
                soft_wrap=True,
            )
    for failure in results.get("failures", ()):
        console.print(f"FAILED {failure['variant']}, seed {failure['seed']}: {failure['error']}", soft_wrap=True)


def measured(summaries: list[VariantSummary]) -> list[str]:
    """The metrics that a run has."""
    return [metric for metric in METRICS if any(item.values.get(metric) for item in summaries)]


def _values(runs: list[Mapping]) -> dict[str, dict[int, float]]:
    values: dict[str, dict[int, float]] = {}
    for run in runs:
        evaluation = run["evaluation"] or {}
        numbers = {"evaluation_loss": run["training"]["evaluation_loss"]}
        numbers |= {name: (evaluation.get(name) or {}).get("accuracy") for name in ("held_out", "authors")}
        for name, value in numbers.items():
            if value is not None:
                values.setdefault(name, {})[run["seed"]] = value
    return values


def _table(
    results: Mapping[str, Any], summaries: list[VariantSummary], metrics: list[str], published: Mapping[str, float]
) -> Table:
    first = summaries[0]
    compared = "held_out" if "held_out" in metrics else next(iter(metrics), None)
    columns = ["variant", "seeds", "parameters"]
    for metric in metrics:
        columns.append(METRICS[metric].title)
        if metric == "evaluation_loss":
            columns.append("perplexity")
    if compared is not None:
        columns.append(f"difference of {METRICS[compared].name} to {first.name}")
    ranks = []
    if published:
        ranks = [_ranks(summaries, name) for name in metrics] + [_published_ranks(summaries, published)]
        columns.append(f"rank by {' / '.join(METRICS[name].short for name in metrics)} / published")

    title = f"{results['recipe']['name']}: mean ± half a 95 % interval over the seeds"
    rows = []
    for item in summaries:
        seeds = max((len(values) for values in item.values.values()), default=0)
        cells = [item.name, str(seeds), f"{item.parameters:,}"]
        for metric in metrics:
            cells.append(_text(item.interval(metric), METRICS[metric]))
            if metric == "evaluation_loss":
                interval = item.interval(metric)
                cells.append("-" if interval is None else f"{math.exp(interval[0]):.3f}")
        if compared is not None:
            difference = None if item is first else item.difference(first, compared)
            cells.append(_text(difference, METRICS[compared], sign="+"))
        if ranks:
            cells.append(" / ".join(str(of.get(item.name, "-")) for of in ranks))
        rows.append(cells)
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        # Headings may break, numbers must not.
        least = max(len(cells[number]) for cells in rows)
        table.add_column(column, justify="left" if number == 0 else "right", min_width=least)
    for cells in rows:
        table.add_row(*cells)
    return table


def _text(interval: tuple[float, float | None] | None, metric: Metric, sign: str = "") -> str:
    if interval is None:
        return "-"
    mean, half = interval
    width = "" if half is None else f" ± {metric.scale * half:.{metric.digits}f}"
    return f"{metric.scale * mean:{sign}.{metric.digits}f}{width}"


def _goodness(item: VariantSummary, metric: str) -> float:
    mean, _ = mean_interval(list(item.values[metric].values())) or (math.nan, None)
    return -mean if METRICS[metric].is_better_when_lower else mean


def _ranks(summaries: list[VariantSummary], metric: str) -> dict[str, int]:
    """1 is the best; those that are equal share a rank."""
    values = {item.name: _goodness(item, metric) for item in summaries if item.interval(metric) is not None}
    return {name: 1 + sum(other > value for other in values.values()) for name, value in values.items()}


def _published_ranks(summaries: list[VariantSummary], published: Mapping[str, float]) -> dict[str, int]:
    values = {item.name: published[item.name] for item in summaries if item.name in published}
    return {name: 1 + sum(other < value for other in values.values()) for name, value in values.items()}
