"""Intervals and tests over training seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..common.optional import import_optional


_LEVEL = 0.975  # of the upper end of a 95 % interval


def seed_interval(values: Sequence[float]) -> tuple[float, float]:
    """
    Mean and half the width of its 95 % interval by Student's t, `nan` for a single value.

    Args:
        values: One value per training seed.

    Raises:
        ValueError: if there are none.
        ImportError: without scipy.
    """
    count = len(values)
    if count == 0:
        raise ValueError("There are no values to average; give one per training seed.")
    mean = math.fsum(values) / count
    if count == 1:
        return mean, math.nan
    stats = _stats()
    return mean, float(stats.t.ppf(_LEVEL, count - 1) * stats.sem(values))


def further_seed_interval(values: Sequence[float]) -> tuple[float, float]:
    """
    Where one more training seed is expected: the 95 % prediction interval of a normal distribution.

    It is wider than the interval of the mean, which says nothing about a single run.

    Args:
        values: One value per training seed, of two seeds at least.

    Returns:
        Both ends.

    Raises:
        ValueError: for fewer than two values.
        ImportError: without scipy.
    """
    if len(values) < 2:
        raise ValueError(f"There are {len(values)} values; what a further seed gives needs those of two at least.")
    mean, half_width = seed_interval(values)
    # The mean has the variance of one seed divided by their number, a further seed that of the mean and one more.
    half_width *= math.sqrt(len(values) + 1)
    return mean - half_width, mean + half_width


def further_share_interval(shares: Sequence[float], documents: int) -> tuple[float, float]:
    """
    As [`further_seed_interval`], of shares of right answers: on their logits.

    Near 1 the shares of seeds are far from a normal distribution: those below the mean lie further away from it than
    those above can.

    Args:
        shares: One fraction per training seed, of two seeds at least.
        documents: Of how many answers each is the share; 0 and 1 count as half an answer away from there.

    Returns:
        Both ends, as fractions.

    Raises:
        ValueError: for fewer than two values.
        ImportError: without scipy.
    """
    least = 0.5 / documents
    bounded = [min(max(share, least), 1.0 - least) for share in shares]
    ends = further_seed_interval([math.log(share / (1.0 - share)) for share in bounded])
    low, high = (1.0 / (1.0 + math.exp(-end)) for end in ends)
    return low, high


@dataclass(frozen=True)
class SeedComparison:
    """
    Two variants, compared by the seeds that both were trained with.

    Attributes:
        first, second: Their names.
        seeds: How many seeds both have.
        difference: Mean of first minus second, paired by seed.
        half_width: Of the 95 % interval of this difference alone.
        simultaneous_half_width: Of intervals of which all together hold their differences in 95 % of experiments
            (Bonferroni); wider than what the corrected p decides by.
        p: Of the paired t test, two-sided: of no difference. Where all seeds differ by the same, of the test by signs.
        corrected_p: The same after Holm's correction for all comparisons made at once.
    """

    first: str
    second: str
    seeds: int
    difference: float
    half_width: float
    simultaneous_half_width: float
    p: float
    corrected_p: float

    @property
    def is_apart(self) -> bool:
        """At a level of 5 % for all comparisons together."""
        return self.corrected_p <= 2 * (1 - _LEVEL)


def compare_seeds(
    values: Mapping[str, Mapping[int, float]], pairs: Sequence[tuple[str, str]] | None = None
) -> list[SeedComparison]:
    """
    Compare variants by t tests paired by seed, with p values corrected for the number of comparisons.

    Args:
        values: Variant -> seed -> value.
        pairs (*optional*): Which to compare, as (first, second); by default every variant with the first.

    Returns:
        As many as there are pairs, in their order.

    Raises:
        ValueError: if there is no pair, or one has fewer than two seeds in common.
        ImportError: without scipy.
    """
    names = list(values)
    chosen = [(name, names[0]) for name in names[1:]] if pairs is None else list(pairs)
    if not chosen:
        raise ValueError("There is nothing to compare; give at least two variants.")
    stats, found = _stats(), []
    for first, second in chosen:
        differences = [
            values[first][seed] - values[second][seed] for seed in values[first].keys() & values[second].keys()
        ]
        if len(differences) < 2:
            raise ValueError(
                f"{first!r} and {second!r} have {len(differences)} seeds in common; a comparison needs two at least."
            )
        mean, half_width = seed_interval(differences)
        freedom, error = len(differences) - 1, float(stats.sem(differences))
        simultaneous = float(stats.t.ppf(1 - (1 - _LEVEL) / len(chosen), freedom)) * error
        if math.isclose(min(differences), max(differences), rel_tol=1e-9):
            # Shares of right answers are rounded, so equal differences may be chance: what is left is a test by signs.
            p = 2.0**-freedom if mean else 1.0
        else:
            p = float(2 * stats.t.sf(abs(mean) / error, freedom))
        found.append((len(differences), mean, half_width, simultaneous, p))
    corrected = holm([row[-1] for row in found])
    return [SeedComparison(*pair, *row, own) for pair, row, own in zip(chosen, found, corrected)]


def holm(p_values: Sequence[float]) -> list[float]:
    """
    P values corrected by Holm's step-down method, in the given order.

    Rejecting those up to 0.05 makes one error or more in at most 5 % of experiments, however the tests depend on each
    other.
    """
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda place: p_values[place])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


def _stats():
    return import_optional(
        "scipy.stats", "Intervals over training seeds need scipy: pip install 'dcformer[eval]' or 'dcformer[train]'."
    )
