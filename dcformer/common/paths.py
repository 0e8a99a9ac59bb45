"""Telling paths from names on the Hub."""

from __future__ import annotations

import os


def is_path(name: str | os.PathLike) -> bool:
    """Whether a name can only be a path: names on the Hub have one slash at most, and begin with none of these."""
    return not isinstance(name, str) or name.startswith(("/", ".", "~")) or name.count("/") > 1
