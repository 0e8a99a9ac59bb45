"""Sizes and SHA-256 sums of the files below a folder, and what is wrong with them later."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..common.digests import file_digest


def describe_files(folder: Path, leave_out: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """
    Every file below a folder.

    Args:
        folder (`Path`): Where to look, its sub-folders included.
        leave_out (`Iterable[str]`): Names that are not listed.

    Returns:
        Path within the folder, with forward slashes -> `bytes`, its size, and `sha256`, in hexadecimal digits.
    """
    left_out = set(leave_out)
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        name: {"bytes": path.stat().st_size, "sha256": file_digest(path)}
        for name, path in files.items()
        if name not in left_out
    }


def find_damage(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """
    What is wrong with the first of a folder's files that is not as `describe_files` found it; `None` if all are.

    Names and sizes, which cost nothing, are looked at before any file is read.
    """
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is no file" if os.path.lexists(path) else f"{name} is missing"
        size = path.stat().st_size
        if size != expected["bytes"]:
            return f"{name} has {size:,} bytes and had {expected['bytes']:,}"
    for name, expected in files.items():
        try:
            digest = file_digest(folder / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror or error}"
        if digest != expected["sha256"]:
            return f"{name} has another SHA-256 than when it was written"
    return None
