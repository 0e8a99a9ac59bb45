"""Differences between variants that were trained with several seeds, with intervals and p-values."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..common.optional import import_optional
from ..eval import holm


SIGNIFICANCE = 0.05


@dataclass(frozen=True)
class SeedComparison:
    """Two variants, compared by the seeds that both were trained with."""

    first: str
    second: str
    seeds: int  #: number of seeds that both have
    difference: float  #: mean of first minus second, paired by seed
    half_width: float  #: of the 95 % interval of this difference alone
    #: Half the width of intervals that in 95 % of experiments all contain their differences (Bonferroni); wider than
    #: the corrected p implies.
    simultaneous_half_width: float
    p: float  #: two-sided, of the paired t test, or of the sign test if the difference is the same for all seeds
    corrected_p: float  #: by Holm's method, for all comparisons made at once


def seed_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean of one value per training seed, and half the width of its 95 % interval (Student's t; `nan` for one)."""
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, math.nan
    stats = _stats()
    return mean, float(stats.t.ppf(1 - SIGNIFICANCE / 2, len(values) - 1) * stats.sem(values))


def compare_seeds(
    values: Mapping[str, Mapping[int, float]], pairs: Sequence[tuple[str, str]] | None = None
) -> list[SeedComparison]:
    """
    Compare variants by t tests paired by seed, with p-values corrected for the number of comparisons.

    Args:
        values: Variant -> seed -> value.
        pairs (*optional*): Which to compare, as (first, second); `None`: every variant with the first.

    Raises:
        ValueError: if a pair has fewer than two seeds in common.
    """
    names = list(values)
    chosen = [(name, names[0]) for name in names[1:]] if pairs is None else list(pairs)
    stats, rows = _stats(), []
    for first, second in chosen:
        both = values[first].keys() & values[second].keys()
        differences = [values[first][seed] - values[second][seed] for seed in both]
        if len(differences) < 2:
            raise ValueError(f"{first!r} and {second!r} must have two seeds in common, got {len(differences)}.")
        mean, half_width = seed_interval(differences)
        freedom, error = len(differences) - 1, float(stats.sem(differences))
        simultaneous = float(stats.t.ppf(1 - SIGNIFICANCE / 2 / len(chosen), freedom)) * error
        if math.isclose(min(differences), max(differences), rel_tol=1e-9):
            # Shares of right answers are rounded, so equal differences may be chance; the signs can still be tested.
            p = 2.0**-freedom if mean else 1.0
        else:
            p = float(2 * stats.t.sf(abs(mean) / error, freedom))
        rows.append((first, second, len(differences), mean, half_width, simultaneous, p))
    return [SeedComparison(*row, corrected_p) for row, corrected_p in zip(rows, holm([row[-1] for row in rows]))]


def _stats() -> Any:
    return import_optional("scipy.stats", "An interval over seeds", "eval")
