"""Intervals over training seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    stats = import_optional(
        "scipy.stats", "Intervals over training seeds need scipy: pip install 'dcformer[eval]' or 'dcformer[train]'."
    )
    return mean, float(stats.t.ppf(_LEVEL, count - 1) * stats.sem(values))
