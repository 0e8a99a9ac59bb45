"""Files that are written whole: whenever the process or the machine stops, there is the old one or the new one."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """
    Write a file in one step: it is written under another name, brought to the disk, and renamed.

    Args:
        path (`Path`): The file, which is replaced if it is there. Its folder must exist.
        content (`str` or `bytes`): All that the file will hold; text is written as UTF-8, line ends as they are.

    Raises:
        OSError: if it cannot be written. What was there stays, and nothing else is left behind.
    """
    unfinished = unfinished_path(path)
    try:
        with unfinished.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        if unfinished.is_file():
            unfinished.unlink()
        raise


def unfinished_path(path: Path) -> Path:
    """The name under which `write_atomically` writes a file; what a killed process leaves there is replaced later."""
    return path.with_name(f"{path.name}.partial")
