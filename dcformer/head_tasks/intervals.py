"""Intervals over training seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence


# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom.
_T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_Z = 1.960


def seed_interval(values: Sequence[float]) -> tuple[float, float]:
    """
    Mean and half the width of its 95 % interval by Student's t, `nan` for a single value.

    Args:
        values: One per training seed.

    Raises:
        ValueError: if there are none.
    """
    count = len(values)
    if count == 0:
        raise ValueError("There are no values to average; give one per training seed.")
    mean = math.fsum(values) / count
    if count == 1:
        return mean, math.nan
    freedom = count - 1
    # Beyond the table, the first terms of the quantile's expansion in 1 / freedom; its error is below 0.003.
    quantile = _T_QUANTILES[freedom - 1] if freedom <= len(_T_QUANTILES) else _Z + (_Z**3 + _Z) / (4 * freedom)
    variance = math.fsum((value - mean) ** 2 for value in values) / freedom
    return mean, quantile * math.sqrt(variance / count)
