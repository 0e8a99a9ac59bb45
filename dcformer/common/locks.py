"""Locks that keep processes out of each other's folders; a lock ends with its process, however that ends."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO


try:
    import fcntl
except ImportError:  # on Windows, where processes are not kept apart
    fcntl = None  # type: ignore[assignment]

_ATTEMPTS = 100


class LockHeldError(ValueError):
    """Another process holds the lock."""


@contextlib.contextmanager
def file_lock(path: Path, removes: bool = False) -> Iterator[OSError | None]:
    """
    Hold the lock of a file, which is created if need be, together with its folder, until the block ends.

    A lock is of the file that has the name: one that another process has removed while this one waited to open it does
    not count, and the file is made again. So the holder may remove the file, or its whole folder, inside the block.

    Args:
        path (`Path`): The file; its content is of no account.
        removes (`bool`, defaults to `False`): Remove the file at the end of the block, and those folders that were made
            for it and are empty by then. Otherwise both stay.

    Yields:
        `None` if the lock is held, or else the error by which the file system says that it has no locks; whether the
        block does its work without one is for the caller to decide.

    Raises:
        LockHeldError: if another process holds the lock; it names the file.
        OSError: if the file or its folder cannot be created.
    """
    made = [folder for folder in path.parents if not folder.exists()]
    try:
        file, unsupported = _acquire(path)
        with file:
            try:
                yield unsupported
            finally:
                if removes:
                    # Before it is released: whoever locks this file afterwards finds that it has lost its name.
                    path.unlink(missing_ok=True)
    finally:
        if removes:
            for folder in made:  # the innermost first
                with contextlib.suppress(OSError):  # it holds something
                    folder.rmdir()


def _acquire(path: Path) -> tuple[IO, OSError | None]:
    """The open file of a lock, and the error of a file system without locks."""
    for _ in range(_ATTEMPTS):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a")
        except FileNotFoundError:
            if _is_blocked(path.parent):
                raise
            continue  # the process that held the lock has just removed the folder
        unsupported = _lock(file, path)
        try:
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file, unsupported
        except FileNotFoundError:
            pass  # removed by the process that held the lock
        file.close()
    raise OSError(errno.EAGAIN, "the lock is removed and made again all the time", str(path))


def _lock(file: IO, path: Path) -> OSError | None:
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise LockHeldError(f"Another process holds the lock {str(path)!r}; wait for it to end.") from error
    except OSError as error:
        return error
    return None


def _is_blocked(folder: Path) -> bool:
    """Whether a folder cannot be made, since a link to nothing has its name or that of a folder above it."""
    return any(each.is_symlink() and not each.exists() for each in (folder, *folder.parents))


__all__ = ["LockHeldError", "file_lock"]
