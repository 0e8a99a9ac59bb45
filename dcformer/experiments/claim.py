"""
What a pair of variants, a model and its baseline, spends on equal quality: the paper's claim is of this kind.

Everything is paired by seed. What a run did not reach has no cost and enters no mean: the seeds in which it was reached
are counted, and where only one of the two reached it, the ratio of the seed has a bound alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..head_tasks.intervals import SeedComparison, compare_seeds, holm, seed_interval
from ..head_tasks.references import BLIND_CHOICE
from .curves import Axis, Curve
from .results import METRICS, summarise_variants


MANY_RIGHT = 0.9
TAKE_OFF, HALF, EQUAL_END = "blind choice", "half of blind choice", "higher final loss"
COSTS: tuple[Axis, ...] = ("flops", "seconds")

Curves = Mapping[str, Mapping[int, Curve]]  # variant -> seed -> curve


@dataclass(frozen=True)
class TakeOff:
    """
    What one variant spent until it reached a goal, by seed; `None` where it did not.

    Attributes:
        variant: Its name.
        goal: In words, such as `"loss of blind choice"`.
        spent: Axis -> seed -> steps, operations or seconds.
    """

    variant: str
    goal: str
    spent: Mapping[Axis, Mapping[int, float | None]]

    @property
    def reached(self) -> int:
        """In how many of the seeds."""
        return sum(value is not None for value in self.spent["steps"].values())


@dataclass(frozen=True)
class CostRatio:
    """
    What the baseline spends in units of what the model does, for the same loss.

    Attributes:
        model, baseline: Names of the variants.
        goal: Which loss: `TAKE_OFF`, `HALF` or `EQUAL_END`.
        axis: `"flops"` or `"seconds"`.
        levels: Seed -> the loss, nats per token.
        costs: Seed -> what the model and the baseline spent; `None` for what did not reach the loss.
        budgets: Seed -> what the model and the baseline spent in all.
        p: Of the t test of no difference on logarithms, paired by seed, after Holm's correction for all pairs with the
            same goal and axis; `None` unless both reached the loss in every seed, of which two are needed.
    """

    model: str
    baseline: str
    goal: str
    axis: Axis
    levels: Mapping[int, float]
    costs: Mapping[int, tuple[float | None, float | None]]
    budgets: Mapping[int, tuple[float, float]]
    p: float | None = None

    @property
    def model_reached(self) -> int:
        """In how many of the seeds the model reached the loss."""
        return sum(model is not None for model, _ in self.costs.values())

    @property
    def baseline_reached(self) -> int:
        """As `model_reached`."""
        return sum(baseline is not None for _, baseline in self.costs.values())

    @property
    def is_complete(self) -> bool:
        """Whether both reached the loss in every seed."""
        return all(None not in pair for pair in self.costs.values())

    @property
    def by_seed(self) -> dict[int, float]:
        """Ratios of the seeds in which both reached the loss."""
        return {seed: base / own for seed, (own, base) in self.costs.items() if own is not None and base is not None}

    def interval(self) -> tuple[float, float, float] | None:
        """
        Geometric mean of the ratio over the seeds and its 95 % interval, Student's t on logarithms; the ends are `nan`
        for one seed. `None` unless both reached the loss in every seed.
        """
        if not self.is_complete or not self.costs:
            return None
        mean, half_width = seed_interval([math.log(ratio) for ratio in self.by_seed.values()])
        return math.exp(mean), math.exp(mean - half_width), math.exp(mean + half_width)

    def bound(self) -> tuple[str, float] | None:
        """
        `"at least"` or `"at most"`, and the geometric mean of ratios with the whole budget in place of a cost beyond
        it, where one of the two alone did not reach the loss in every seed; `None` otherwise.
        """
        if (self.model_reached == len(self.costs)) == (self.baseline_reached == len(self.costs)):
            return None
        logarithms = []
        for seed, (own, base) in self.costs.items():
            own_budget, base_budget = self.budgets[seed]
            logarithms.append(math.log((base or base_budget) / (own or own_budget)))
        mean = math.exp(math.fsum(logarithms) / len(logarithms))
        return "at least" if self.baseline_reached < len(self.costs) else "at most", mean


@dataclass(frozen=True)
class Claim:
    """
    All that is compared of the pairs of a sweep.

    Attributes:
        pairs: (model, baseline) of which there are runs with the same seed.
        take_offs: Of every variant of a pair, for every goal.
        ratios: Of every pair, for every loss and axis.
        differences: Metric of [`dcformer.experiments.results.METRICS`] -> comparison of every pair, model minus
            baseline; without metrics that were not measured with two seeds.
    """

    pairs: Sequence[tuple[str, str]]
    take_offs: Sequence[TakeOff]
    ratios: Sequence[CostRatio]
    differences: Mapping[str, Sequence[SeedComparison]]


def curves_of(results: Mapping[str, Any]) -> dict[str, dict[int, Curve]]:
    """Variant -> seed -> evaluation curve, of the runs that have one."""
    curves: dict[str, dict[int, Curve]] = {}
    for run in results["runs"]:
        curve = Curve.of(run)
        if curve is not None:
            curves.setdefault(run["variant"], {})[run["seed"]] = curve
    return curves


def compare_pairs(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The pairs of a sweep that have curves with a seed in common."""
    curves = curves_of(results)
    pairs = [(model, baseline) for model, baseline in results["recipe"]["sweep"].get("pairs") or ()]
    return [pair for pair in pairs if _common_seeds(curves, *pair)]


def blind_loss(results: Mapping[str, Any]) -> float | None:
    """Nats per token of blind choice on the evaluation documents; `None` where there is no such thing."""
    references = (results.get("references") or {}).get("evaluation") or {}
    return references.get(BLIND_CHOICE, {}).get("loss")


def analyse_claim(results: Mapping[str, Any]) -> Claim | None:
    """
    Compare what the pairs of a sweep spend.

    Args:
        results: What `run_sweep` returns, or `read_results` of its file.

    Returns:
        `None` if the sweep has no pair of which both have a run with the same seed.

    Raises:
        ImportError: without scipy.
    """
    pairs, curves, blind = compare_pairs(results), curves_of(results), blind_loss(results)
    if not pairs:
        return None
    variants = list(dict.fromkeys(name for pair in pairs for name in pair))
    take_offs = [take_off for name in variants for take_off in _take_offs(name, curves[name], blind)]
    goals: list[tuple[str, Callable[[Curve, Curve], float]]] = []
    if blind is not None:
        goals += [(TAKE_OFF, lambda *_, level=blind: level), (HALF, lambda *_, level=blind: level / 2)]
    goals.append((EQUAL_END, lambda own, base: max(own.loss[-1], base.loss[-1])))
    ratios = []
    for goal, level in goals:
        for axis in COSTS:
            ratios += _with_p([_ratio(pair, curves, goal, level, axis) for pair in pairs])
    order = {pair: place for place, pair in enumerate(pairs)}
    ratios.sort(key=lambda ratio: order[ratio.model, ratio.baseline])  # stable: goals and axes stay as they are
    return Claim(pairs, take_offs, ratios, _differences(results, pairs))


def _take_offs(name: str, curves: Mapping[int, Curve], blind: float | None) -> list[TakeOff]:
    goals: list[tuple[str, Any, float]] = [(f"accuracy of {MANY_RIGHT:.0%}", "accuracy", MANY_RIGHT)]
    if blind is not None:
        goals.insert(0, ("loss of blind choice", "loss", blind))
    axes: tuple[Axis, ...] = ("steps", *COSTS)
    return [
        TakeOff(
            name,
            goal,
            {axis: {seed: curve.reaches(quantity, level, axis) for seed, curve in curves.items()} for axis in axes},
        )
        for goal, quantity, level in goals
        if any(getattr(curve, quantity) for curve in curves.values())
    ]


def _ratio(
    pair: tuple[str, str], curves: Curves, goal: str, level: Callable[[Curve, Curve], float], axis: Axis
) -> CostRatio:
    levels, costs, budgets = {}, {}, {}
    for seed in _common_seeds(curves, *pair):
        both = tuple(curves[name][seed] for name in pair)
        levels[seed] = level(*both)
        own, base = (curve.reaches("loss", levels[seed], axis) for curve in both)
        costs[seed] = own, base
        budgets[seed] = getattr(both[0], axis)[-1], getattr(both[1], axis)[-1]
    return CostRatio(*pair, goal, axis, levels, costs, budgets)


def _with_p(ratios: Sequence[CostRatio]) -> list[CostRatio]:
    """The ratios with p values, corrected for those that have one."""
    own = []
    for ratio in ratios:
        costs = ratio.costs
        if ratio.is_complete and len(costs) > 1:
            logarithms = {seed: math.log(value) for seed, value in ratio.by_seed.items()}
            nothing = dict.fromkeys(logarithms, 0.0)
            own.append(compare_seeds({"ratio": logarithms, "none": nothing}, [("ratio", "none")])[0].p)
        else:
            own.append(None)
    corrected = iter(holm([p for p in own if p is not None]))
    return [CostRatio(**{**vars(ratio), "p": None if p is None else next(corrected)}) for ratio, p in zip(ratios, own)]


def _differences(results: Mapping[str, Any], pairs: Sequence[tuple[str, str]]) -> dict[str, Sequence[SeedComparison]]:
    summaries = {item.name: item for item in summarise_variants(results)}
    found = {}
    for metric in METRICS:
        values = {name: item.values.get(metric, {}) for name, item in summaries.items()}
        known = [pair for pair in pairs if len(values[pair[0]].keys() & values[pair[1]].keys()) > 1]
        if known:
            found[metric] = compare_seeds(values, known)
    return found


def _common_seeds(curves: Curves, model: str, baseline: str) -> list[int]:
    return sorted(curves.get(model, {}).keys() & curves.get(baseline, {}).keys())


__all__ = [
    "Claim",
    "CostRatio",
    "TakeOff",
    "analyse_claim",
    "blind_loss",
    "compare_pairs",
    "curves_of",
]
