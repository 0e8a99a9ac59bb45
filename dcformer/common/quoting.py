"""Values as messages quote them: shortened before they are formatted, since some stand for billions of values."""

from __future__ import annotations

import reprlib
from typing import Any


_LONGEST_QUOTE = 80
_LONGEST_MESSAGE = 800
_QUOTING = reprlib.Repr()
_QUOTING.maxlevel, _QUOTING.maxlist, _QUOTING.maxtuple, _QUOTING.maxdict = 3, 8, 8, 8
_QUOTING.maxstring = _QUOTING.maxother = _QUOTING.maxlong = _LONGEST_QUOTE - 20


def quoted(value: Any) -> str:
    """A value in Python's form, at most 80 characters of it."""
    try:
        text = _QUOTING.repr(value)
    except ValueError:  # an integer of thousands of digits
        return f"an integer of {value.bit_length():,} bits" if isinstance(value, int) else type(value).__name__
    return text if len(text) <= _LONGEST_QUOTE else text[: _LONGEST_QUOTE - 3] + "..."


def shortened(text: str) -> str:
    """A message without the middle of what would fill a screen."""
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:400]} [...] {text[-200:]}"
