"""Differences between variants that were trained with several seeds, with intervals and p-values."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


def seed_interval(values: Sequence[float], significance: float = SIGNIFICANCE) -> tuple[float, float]:
    """Mean of one value per seed, and half the width of its interval, of 95 % by default (Student's t; NaN for one)."""
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, math.nan
    stats = import_optional("scipy.stats", "An interval over seeds", "eval")
    return mean, float(stats.t.ppf(1 - significance / 2, len(values) - 1) * stats.sem(values))


def compare_seeds(
    values: Mapping[str, Mapping[int, float]], pairs: Sequence[tuple[str, str]] | None = None
) -> list[SeedComparison]:
    """
    Compare variants by t tests paired by seed, with p-values corrected for the number of comparisons. ValueError if a
    pair has fewer than two seeds in common.

    Args:
        values: Variant -> seed -> value.
        pairs (*optional*): Which to compare, as (first, second); `None`: every variant with the first.
    """
    names, rows, stats = list(values), [], import_optional("scipy.stats", "A test over seeds", "eval")
    chosen = [(name, names[0]) for name in names[1:]] if pairs is None else list(pairs)
    for first, second in chosen:
        both = values[first].keys() & values[second].keys()
        differences = [values[first][seed] - values[second][seed] for seed in both]
        if len(differences) < 2:
            raise ValueError(f"{first!r} and {second!r} must have two seeds in common, got {len(differences)}.")
        mean, half_width = seed_interval(differences)
        _, simultaneous = seed_interval(differences, SIGNIFICANCE / len(chosen))
        if math.isclose(min(differences), max(differences), rel_tol=1e-9):
            # Shares of right answers are rounded, so equal differences may be chance; the signs can still be tested.
            p = 2.0 ** (1 - len(differences)) if mean else 1.0
        else:
            p = float(stats.ttest_1samp(differences, 0).pvalue)
        rows.append((first, second, len(differences), mean, half_width, simultaneous, p))
    return [SeedComparison(*row, corrected_p) for row, corrected_p in zip(rows, holm([row[-1] for row in rows]))]
