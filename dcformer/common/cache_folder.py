"""Where what was found out about a machine is kept, for other processes and for later."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """
    The user's cache folder for this package, which need not exist: `$DCFORMER_CACHE`, or else `dcformer` in
    `$XDG_CACHE_HOME`, or else in `~/.cache`.
    """
    if own := os.environ.get("DCFORMER_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dcformer"


__all__ = ["cache_folder"]
