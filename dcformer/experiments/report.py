"""What the runs of a sweep say: means over seeds, differences to the first variant, and the order of the variants."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from rich.console import Console
from rich.table import Table

from ..common.optional import import_optional
from ..head_tasks.intervals import SeedComparison, compare_seeds
from ..head_tasks.labels import REFERENCES, variant_label
from .claim_report import comparison_text, print_claim
from .results import METRICS, Metric, VariantSummary, mean_interval, measured, reference_values, summarise_variants


@dataclass(frozen=True)
class Agreement:
    """
    How far two orders of the variants agree.

    Attributes:
        pairs: Pairs of variants that the published numbers tell apart.
        agreeing: Those of them in the same order here.
        apart, apart_agreeing: The same, of pairs that are apart by a t test paired by seed, at 5 % after Holm's
            correction for all pairs; of pairs with fewer than two seeds in common nothing is known.
        tau: Kendall's rank correlation (tau-b), from -1 to 1; `None` if all variants are equal.
    """

    pairs: int
    agreeing: int
    apart: int
    apart_agreeing: int
    tau: float | None


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
    values = {item.name: item.values[metric] for item in both}
    tested = [
        (first.name, second.name)
        for first, second in combinations(both, 2)
        if published[first.name] != published[second.name] and len(values[first.name].keys() & values[second.name]) > 1
    ]
    found = compare_seeds(values, tested) if tested else []
    are_apart = {(item.first, item.second) for item in found if item.is_apart}
    pairs = agreeing = apart = apart_agreeing = 0
    for first, second in combinations(both, 2):
        here = _goodness(second, metric) - _goodness(first, metric)
        there = published[first.name] - published[second.name]
        if there == 0:
            continue
        agrees = here * there > 0
        pairs, agreeing = pairs + 1, agreeing + agrees
        if (first.name, second.name) in are_apart:
            apart, apart_agreeing = apart + 1, apart_agreeing + agrees
    stats = import_optional("scipy.stats", 'Rank correlations need scipy: pip install "dcformer[train]".')
    ranks = [_goodness(item, metric) for item in both], [-published[item.name] for item in both]
    tau = float(stats.kendalltau(*ranks).statistic)
    return Agreement(pairs, agreeing, apart, apart_agreeing, None if math.isnan(tau) else tau)


def differences(summaries: list[VariantSummary], metric: str) -> dict[str, SeedComparison]:
    """
    Every variant compared with the first by a t test paired by seed, p values corrected (Holm) for all of these.

    Returns:
        By name, without variants that have fewer than two seeds in common with the first.

    Raises:
        ImportError: without scipy.
    """
    values = {item.name: item.values.get(metric, {}) for item in summaries}
    first = summaries[0].name
    pairs = [(name, first) for name in values if name != first and len(values[name].keys() & values[first].keys()) > 1]
    return {item.first: item for item in compare_seeds(values, pairs)} if pairs else {}


def sorted_by_gain(summaries: list[VariantSummary], metric: str) -> list[VariantSummary]:
    """The first variant, with which the others are compared, then these, the best of a metric first."""
    others = [item for item in summaries[1:] if item.interval(metric) is not None]
    missing = [item for item in summaries[1:] if item.interval(metric) is None]
    return [summaries[0], *sorted(others, key=lambda item: -_goodness(item, metric)), *missing]


@dataclass(frozen=True)
class BestRate:
    """
    Of variants that are one model, trained with several learning rates, the one with the lowest evaluation loss.

    Attributes:
        variant: Its name.
        training: What its recipe changes in `training`.
        at_end: Those of its rates that are the lowest or highest of several tried, so that a better one may lie beyond.
    """

    variant: str
    training: Mapping[str, Any]
    at_end: Sequence[str]


def best_rates(results: Mapping[str, Any]) -> list[BestRate]:
    """For every model of a sweep that was trained with several learning rates, in the recipe's order."""
    variants = results["recipe"]["sweep"]["variants"]
    models: dict[str, list[tuple[float, str, dict[str, float]]]] = {}
    for item in summarise_variants(results):
        interval, change = item.interval("evaluation_loss"), variants[item.name] or {}
        rates = {key: rate for key, rate in (change.get("training") or {}).items() if key.endswith("learning_rate")}
        if interval is not None and rates:
            model = json.dumps(change.get("model"), sort_keys=True)
            models.setdefault(model, []).append((interval[0], item.name, rates))
    found = []
    for tried in models.values():
        _, name, best = min(tried, key=lambda trial: trial[0])
        values = {key: {rates[key] for _, _, rates in tried if key in rates} for key in best}
        if any(len(several) > 1 for several in values.values()):
            ends = [key for key, rate in best.items() if len(values[key]) > 1 and rate in _ends(values[key])]
            found.append(BestRate(name, variants[name]["training"], ends))
    return found


def _ends(values: set[float]) -> tuple[float, float]:
    return min(values), max(values)


def compares_with_first(results: Mapping[str, Any]) -> bool:
    """Whether the first variant is what the others are compared with: not where pairs are, or learning rates."""
    return not results["recipe"]["sweep"].get("pairs") and not best_rates(results)


def print_report(results: Mapping[str, Any], console: Console) -> None:
    """
    Print a row per variant, differences to the first one, the best learning rates where several were tried, how the
    order compares with the published one, what pairs say, and the runs that failed.
    """
    summaries = summarise_variants(results)
    metrics = measured(summaries)
    published = results["recipe"]["sweep"].get("published") or {}
    console.print(_table(results, summaries, metrics, published))
    if compares_with_first(results):
        _print_differences(summaries, metrics, console)
    # The rates of pairs are chosen before, and compared by what pairs spend.
    for item in () if results["recipe"]["sweep"].get("pairs") else best_rates(results):
        settings = ", ".join(f"{key} {value:g}" for key, value in item.training.items() if key.endswith("rate"))
        ends = " and ".join(item.at_end)
        hint = f"; {ends} at an end of the range, so try rates beyond it" if ends else ""
        console.print(f"Lowest evaluation loss: {variant_label(item.variant)} ({settings}{hint})", soft_wrap=True)
    for metric in metrics:
        found = agreement(summaries, metric, published)
        if found is not None:
            tau = "undefined" if found.tau is None else f"{found.tau:.2f}"
            console.print(
                f"Order by {METRICS[metric].name}: {found.agreeing} of {found.pairs} pairs as published "
                f"(Kendall's tau {tau}); of pairs that are apart by corrected t tests, {found.apart_agreeing} of "
                f"{found.apart}",
                soft_wrap=True,
            )
    print_claim(results, console)
    for failure in results.get("failures", ()):
        console.print(f"FAILED {failure['variant']}, seed {failure['seed']}: {failure['error']}", soft_wrap=True)


def _print_differences(summaries: list[VariantSummary], metrics: list[str], console: Console) -> None:
    found = {metric: differences(summaries, metric) for metric in metrics}
    found = {metric: comparisons for metric, comparisons in found.items() if comparisons}
    if not found:
        return
    first = summaries[0]
    title = f"Differences to {first.label} ± half a 95 % interval (p after Holm's correction), best first"
    table = Table(title=title, title_justify="left")
    table.add_column("variant")
    for metric in found:
        table.add_column(METRICS[metric].title, justify="right")
    for item in sorted_by_gain(summaries, next(iter(found)))[1:]:
        cells = [
            comparison_text(comparisons[item.name], METRICS[metric].scale, METRICS[metric].digits)
            if item.name in comparisons
            else "-"
            for metric, comparisons in found.items()
        ]
        table.add_row(item.label, *cells)
    console.print(table)


def _table(
    results: Mapping[str, Any], summaries: list[VariantSummary], metrics: list[str], published: Mapping[str, float]
) -> Table:
    columns = ["variant", "seeds", "parameters"]
    # Of answers and line feeds together it is no figure that people know; their accuracy says more.
    shows_perplexity = "evaluation_accuracy" not in metrics
    for metric in metrics:
        columns.append(METRICS[metric].title)
        if metric == "evaluation_loss" and shows_perplexity:
            columns.append("perplexity")
    ranks = []
    if published:
        ranks = [_ranks(summaries, name) for name in metrics] + [_published_ranks(summaries, published)]
        columns.append(f"rank by {' / '.join(METRICS[name].short for name in metrics)} / published")

    title = f"{results['recipe']['name']}: mean ± half a 95 % interval over the seeds"
    rows = []
    for item in summaries:
        seeds = max((len(values) for values in item.values.values()), default=0)
        cells = [item.label, str(seeds), f"{item.parameters:,}"]
        for metric in metrics:
            cells.append(_text(item.interval(metric), METRICS[metric]))
            if metric == "evaluation_loss" and shows_perplexity:
                interval = item.interval(metric)
                cells.append("-" if interval is None else f"{math.exp(interval[0]):.3f}")
        if ranks:
            cells.append(" / ".join(str(of.get(item.name, "-")) for of in ranks))
        rows.append(cells)
    rows += _reference_rows(results, metrics, len(columns))
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        # Headings may break, numbers must not.
        least = max(len(cells[number]) for cells in rows)
        table.add_column(column, justify="left" if number == 0 else "right", min_width=least)
    for number, cells in enumerate(rows):
        table.add_row(*cells, end_section=number == len(summaries) - 1)
    return table


def _reference_rows(results: Mapping[str, Any], metrics: list[str], columns: int) -> list[list[str]]:
    """What is reached without reading the question, by rule."""
    known = {metric: reference_values(results, metric) for metric in metrics}
    rows = []
    for rule, label in REFERENCES.items():
        if not any(rule in values for values in known.values()):
            continue
        cells = [label, "", ""]
        for metric, values in known.items():
            value = values.get(rule)
            cells.append("-" if value is None else _text((value, None), METRICS[metric]))
        rows.append(cells + [""] * (columns - len(cells)))
    return rows


def _text(interval: tuple[float, float | None] | None, metric: Metric) -> str:
    if interval is None:
        return "-"
    mean, half = interval
    width = "" if half is None else f" ± {metric.scale * half:.{metric.digits}f}"
    return f"{metric.scale * mean:.{metric.digits}f}{width}"


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


__all__ = [
    "Agreement",
    "BestRate",
    "agreement",
    "best_rates",
    "compares_with_first",
    "differences",
    "print_report",
    "sorted_by_gain",
]
