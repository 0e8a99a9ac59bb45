"""Arithmetic that would otherwise be written in several places."""

from __future__ import annotations

import math


_LARGEST_EXPONENT = 709  # beyond it a float64 overflows


def exponential(value: float) -> float:
    """As `math.exp`, but infinite where that is too large for a float, as perplexities of bad models are."""
    return math.exp(value) if value < _LARGEST_EXPONENT else math.inf
