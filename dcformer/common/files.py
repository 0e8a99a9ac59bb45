"""Files that are written whole, folders that one process uses at a time, and SHA-256 sums."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout


class LockHeldError(ValueError):
    """Another process holds the lock."""


@contextlib.contextmanager
def file_lock(path: str | os.PathLike) -> Iterator[None]:
    """Hold the lock of a file, made with its folder, until the block or process ends; else LockHeldError."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(path).acquire(blocking=False)
    except Timeout as error:
        raise LockHeldError(f"Another process holds the lock {str(path)!r}; wait for it to end.") from error
    with lock:
        yield


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write or replace a file in one step, text as UTF-8; if that fails, what was there stays and nothing else."""
    unfinished = path.with_name(f"{path.name}.partial")  # what a killed process leaves there is replaced later
    try:
        with unfinished.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def file_digest(path: Path, advance: Callable[[int], object] = lambda nbytes: None) -> str:
    """The SHA-256 of a file in hexadecimal digits; `advance` is told of the bytes of every part that is read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()
