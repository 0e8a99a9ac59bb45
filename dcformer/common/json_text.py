"""JSON texts that others wrote, read strictly: no key twice, no endless nesting."""

from __future__ import annotations

import json
from typing import Any

from .quoting import quoted


def parse_json(text: str | bytes) -> Any:
    """
    The value of a JSON text.

    Raises:
        ValueError: with the reason, if it is not valid, holds a key twice or is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"it holds the key {quoted(twice)} twice")
    return values
