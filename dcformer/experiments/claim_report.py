"""What the pairs of a sweep say: tables, a sentence for every kind of cost, and a file with a line per seed."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..common.files import write_atomically
from ..head_tasks.intervals import SeedComparison
from ..head_tasks.labels import variant_label
from .claim import COSTS, EQUAL_END, Claim, CostRatio, TakeOff, analyse_claim
from .curves import Axis
from .results import METRICS


_AXES: dict[Axis, str] = {"steps": "steps", "flops": "FLOPs", "seconds": "seconds"}
_LEVEL = 0.05
_LEAST_P = 0.001


def print_claim(results: Mapping[str, Any], console: Console) -> None:
    """Print when each variant took off, what equal quality costs, the differences at the end, and what this says."""
    claim = analyse_claim(results)
    if claim is None:
        return
    console.print(_take_off_table(claim.take_offs))
    console.print(_ratio_table(claim))
    if claim.differences:
        console.print(_difference_table(claim))
    for sentence in sentences(claim):
        console.print(sentence, soft_wrap=True)


def sentences(claim: Claim) -> list[str]:
    """For every kind of cost, what the intervals of the ratio at the higher of the two final losses say."""
    found = []
    for axis in COSTS:
        ratios = [ratio for ratio in claim.ratios if (ratio.goal, ratio.axis) == (EQUAL_END, axis)]
        parts = "; ".join(_verdict(ratio, len(ratios)) for ratio in ratios)
        name = _AXES[axis]
        found.append(f"{name[0].upper()}{name[1:]} for the same final loss: {parts}.")
    return found


def _verdict(ratio: CostRatio, pairs: int) -> str:
    model, baseline = variant_label(ratio.model), variant_label(ratio.baseline)
    # Both are at the higher of their final losses at the end.
    mean, low, high = ratio.interval() or (math.nan,) * 3
    if ratio.p is None:
        return f"{baseline} needs {mean:.2f} times those of {model} with one seed, which decides nothing"
    numbers = f"{baseline} needs {mean:.2f} times those of {model} (95 % interval {low:.2f} to {high:.2f}"
    if low <= 1 <= high:
        return f"{numbers}, which contains 1): no advantage at this scale"
    if ratio.p > _LEVEL:
        return (
            f"{numbers}, but {_p_text(ratio.p)} after the correction for {pairs} pairs): no advantage at this scale is "
            "established"
        )
    return f"{numbers}): {'an advantage' if mean > 1 else 'a disadvantage'} of {model}"


def _take_off_table(take_offs: Sequence[TakeOff]) -> Table:
    table = Table(title="Spent until it is reached for good: mean over the seeds", title_justify="left")
    for column in ("variant", "goal"):
        table.add_column(column)
    for column in ("seeds", *_AXES.values(), "steps of each seed"):
        table.add_column(column, justify="right")
    for item in take_offs:
        steps = item.spent["steps"].values()
        cells = [_mean(list(item.spent[axis].values())) for axis in _AXES]
        each = ", ".join("not reached" if value is None else _short(value) for value in steps)
        table.add_row(variant_label(item.variant), item.goal, f"{item.reached} of {len(steps)}", *cells, each)
    return table


def _mean(values: Sequence[float | None]) -> str:
    """Only where every seed has a value: a mean over those that reached it would be of the luckier ones."""
    known = [value for value in values if value is not None]
    if not known:
        return "not reached"
    return _short(math.fsum(known) / len(known)) if len(known) == len(values) else "-"


def _short(value: float) -> str:
    return f"{value:.2e}" if value >= 1e6 else f"{value:,.0f}"


def _ratio_table(claim: Claim) -> Table:
    title = "Cost of the baseline / cost of the model, for the same loss (95 % interval; corrected p)"
    table = Table(title=title, title_justify="left")
    for column in ("model", "baseline", "loss"):
        table.add_column(column)
    for column in ("reached by", *(_AXES[axis] for axis in COSTS)):
        table.add_column(column, justify="right")
    rows: dict[tuple[str, str, str], list[CostRatio]] = {}
    for ratio in claim.ratios:
        rows.setdefault((ratio.model, ratio.baseline, ratio.goal), []).append(ratio)
    for (model, baseline, goal), ratios in rows.items():
        first = ratios[0]
        reached = f"{first.model_reached} and {first.baseline_reached} of {len(first.costs)}"
        table.add_row(variant_label(model), variant_label(baseline), goal, reached, *map(_ratio_text, ratios))
    return table


def _ratio_text(ratio: CostRatio) -> str:
    interval = ratio.interval()
    if interval is not None:
        mean, low, high = interval
        return f"{mean:.2f}" if ratio.p is None else f"{mean:.2f} ({low:.2f} to {high:.2f}; {_p_text(ratio.p)})"
    bound = ratio.bound()
    return "not reached by both" if bound is None else f"{bound[0]} {bound[1]:.2f}"


def _p_text(p: float) -> str:
    return f"p {p:.3f}" if p >= _LEAST_P else f"p < {_LEAST_P}"


def _difference_table(claim: Claim) -> Table:
    table = Table(
        title="At the end: model minus baseline, ± half a 95 % interval (p after Holm's correction)",
        title_justify="left",
    )
    for column in ("model", "baseline"):
        table.add_column(column)
    for metric in claim.differences:
        table.add_column(METRICS[metric].title, justify="right")
    for model, baseline in claim.pairs:
        cells = []
        for metric, comparisons in claim.differences.items():
            own = [item for item in comparisons if (item.first, item.second) == (model, baseline)]
            cells.append(comparison_text(own[0], METRICS[metric].scale, METRICS[metric].digits) if own else "-")
        table.add_row(variant_label(model), variant_label(baseline), *cells)
    return table


def comparison_text(item: SeedComparison, scale: float, digits: int) -> str:
    """A difference, half its 95 % interval, and the corrected p."""
    difference, half_width = scale * item.difference, scale * item.half_width
    return f"{difference:+.{digits}f} ± {half_width:.{digits}f} ({_p_text(item.corrected_p)})"


def write_costs(results: Mapping[str, Any], path: str | Path) -> None:
    """
    Write the costs of equal losses as CSV: a line for every pair, loss, axis and seed.

    Columns: `model`, `baseline`, `goal`, `axis`, `seed`, `loss` (nats per token), `model_cost`, `baseline_cost` and
    `ratio` (baseline / model), the last three empty where the loss was not reached.
    """
    claim = analyse_claim(results)
    columns = ("model", "baseline", "goal", "axis", "seed", "loss", "model_cost", "baseline_cost", "ratio")
    rows = (
        (ratio.model, ratio.baseline, ratio.goal, ratio.axis, seed, ratio.levels[seed], *costs, ratio.by_seed.get(seed))
        for ratio in (() if claim is None else claim.ratios)
        for seed, costs in ratio.costs.items()
    )
    _write_csv(path, columns, rows)


def write_take_offs(results: Mapping[str, Any], path: str | Path) -> None:
    """
    Write what every variant of a pair spent until it took off, as CSV: a line for every variant, goal, axis and seed.

    Columns: `variant`, `goal`, `axis`, `seed` and `spent` (steps, operations or seconds), empty where it did not.
    """
    claim = analyse_claim(results)
    rows = (
        (item.variant, item.goal, axis, seed, value)
        for item in (() if claim is None else claim.take_offs)
        for axis, spent in item.spent.items()
        for seed, value in spent.items()
    )
    _write_csv(path, ("variant", "goal", "axis", "seed", "spent"), rows)


def _write_csv(path: str | Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row] for row in rows)
    write_atomically(Path(path), text.getvalue())


__all__ = ["comparison_text", "print_claim", "sentences", "write_costs", "write_take_offs"]
