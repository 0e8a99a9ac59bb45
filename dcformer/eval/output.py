"""The folders that an evaluation writes to: found writable before anything is computed, and locked until it ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from ..common.files import unfinished_path


_LOCK = ".lock"
_ATTEMPTS = 100
# Of file systems that know no locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def locked_folders(output: str | os.PathLike, names: Iterable[str] = (".",)) -> Iterator[None]:
    """
    Folders below the output, made and locked against other evaluations; the lock ends with the process.

    To lock a folder is to write a file in it, so this also tells whether results can be written there. Folders that
    are empty at the end, and were not there before, are removed.

    Args:
        output: Folder of the results.
        names (defaults to the output itself): Names of the folders below it.

    Raises:
        ValueError: if another process is writing in one of them, or one cannot be written.
    """
    with contextlib.ExitStack() as stack:
        for name in sorted(set(names)):  # in the same order everywhere, so that of two evaluations one continues
            stack.enter_context(_locked(Path(output) / name, output))
        yield


@contextlib.contextmanager
def _locked(folder: Path, output: str | os.PathLike) -> Iterator[None]:
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    lock = None
    try:
        lock = _acquire(folder, output)
        yield
    finally:
        if lock is not None:
            # Before it is released: who locks the file afterwards finds that it is not in the folder any more.
            (folder / _LOCK).unlink(missing_ok=True)
            lock.close()
        for each in made:
            with contextlib.suppress(OSError):  # it holds results, or another evaluation's lock
                each.rmdir()


def _acquire(folder: Path, output: str | os.PathLike) -> IO:
    problem: OSError | None = None
    for _ in range(_ATTEMPTS):  # another evaluation that ends may remove the file, and the folder, in between
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / _LOCK).open("w")
        except OSError as error:
            problem = error
            if isinstance(error, FileNotFoundError) and not _obstacle(folder):
                continue
            break
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                lock.close()
                raise ValueError(
                    f"Another evaluation is writing results to {str(folder)!r}; wait for it to end, or give another "
                    "output."
                ) from error
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), (folder / _LOCK).stat()):
                return lock
        lock.close()
    reason = _obstacle(folder) or f"{str(folder)!r}: {problem.strerror if problem else 'it changes all the time'}"
    raise ValueError(
        f"Results cannot be written to {str(output)!r} ({reason}); give another folder as the output."
    ) from problem


def _obstacle(folder: Path) -> str:
    """What is in the place of a folder, or of one above it."""
    for each in (folder, *folder.parents):
        if each.is_symlink() and not each.exists():
            return f"{str(each)!r} is a link to nothing"
        if each.exists():
            return "" if each.is_dir() else f"{str(each)!r} is a file"
    return ""


def check_places(paths: Iterable[Path]) -> None:
    """
    Check that files of results can be put in their places.

    Raises:
        ValueError: if there is something else than a file.
    """
    for path in paths:
        for each in (path, unfinished_path(path)):
            if each.is_dir():
                raise ValueError(f"{str(each)!r} is a folder, where a file of results is to be written; remove it.")
