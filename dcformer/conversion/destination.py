"""The folder that a conversion writes: built beside its place, resumed after an interruption, renamed at the end.

Everything that is not finished lies in one hidden folder, `.NAME.partial`, beside the place of the result:

    lock           held by the process that writes
    fingerprint    what is converted and how
    progress/      notes of what is finished
    model/         the folder that will be renamed
    replaced/      with --force, the old folder between the two renames

A process may end at any moment. What it leaves is put in order by the next one with the same destination: an old folder
that lost its place goes back to it, and what is finished of the new one is reused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from .buckets import BucketAccessError
from .ownership import foreign_files, is_converted
from .plan import listed
from .stores import is_remote


class _Busy(ValueError):
    """Another process holds the lock."""


class Destination:
    """
    Args:
        path: The folder to create. Links are followed: the folder lands where they point, and they stay.
        source: Where the conversion reads from; neither may lie inside the other.
        force (`bool`): Replace a converted model that is there.

    Raises:
        FileExistsError: if something is there already and `force` is not given; or if it is no converted model, or
            holds files that no conversion wrote.
        PermissionError: if nothing can be created there.
        ValueError: if it is remote, a mount point or a dangling link, or source and destination overlap.
    """

    def __init__(self, path: str | os.PathLike, source: str | os.PathLike, force: bool = False):
        if is_remote(path):
            raise ValueError(f"The destination must be a local folder, got {str(path)!r}; copy it to a bucket later.")
        if not str(path):
            raise ValueError("The destination must be the name of a folder to create, got ''.")
        self.path, self._given = Path(path).absolute(), str(path)
        self._force = force
        self._place = _resolved(self.path)
        if ".." in self.path.parts:
            self.path = self._place
        if os.path.ismount(self._place):
            raise ValueError(
                f"{str(path)!r} is a mount point, which cannot be replaced; choose a folder inside it, such as "
                f"{str(self._place / 'model')!r}."
            )
        self.partial = self._place.with_name(f".{self._place.name}.partial")
        self.progress = self.partial / "progress"
        self._model, self._replaced = self.partial / "model", self.partial / "replaced"
        self.check_apart_from(source)
        self._check_parent()
        if self.partial.is_dir():
            with contextlib.suppress(_Busy), self._locked():
                self._recover()
                self._remove_partial(only_if_empty=True)
        self._check_place()

    def check_apart_from(self, source: str | os.PathLike) -> None:
        """
        Check that neither of the two folders lies inside the other.

        Args:
            source: A folder to read from, such as the one to which a name on the Hub was downloaded.

        Raises:
            ValueError: if they overlap.
        """
        if is_remote(source):
            return
        ours, theirs = self._place, Path(source).resolve()
        if ours == theirs or theirs in ours.parents:
            raise ValueError(f"The destination {self._given!r} lies inside the source {str(source)!r}; choose another.")
        if ours in theirs.parents:
            raise ValueError(f"The source {str(source)!r} lies inside the destination {self._given!r}; choose another.")

    def _check_parent(self) -> None:
        for link in (self.path, *self.path.parents):
            target = _resolved(link)
            if link.is_symlink() and not target.exists() and (link != self.path or not target.parent.is_dir()):
                raise ValueError(
                    f"{str(self.path)!r} cannot be created: {str(link)!r} is a link to {str(target)!r}, which does not "
                    "exist; create that folder or remove the link."
                )
        parent = next(folder for folder in self._place.parents if folder.exists())
        if not parent.is_dir():
            raise ValueError(f"{str(self.path)!r} cannot be created: {str(parent)!r} is a file.")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError(
                f"{str(self.path)!r} cannot be created: {str(parent)!r} is not writable; choose another destination."
            )

    def _check_place(self) -> None:
        """Raise FileExistsError for what must not be replaced."""
        if self._is_free():
            return
        shown = repr(str(self.path))
        if not self._force:
            raise FileExistsError(f"{shown} exists already; choose another destination or pass --force.")
        if not is_converted(self._place):
            raise FileExistsError(
                f"{shown} is not a converted model (it holds no conversion_report.json of a conversion), so --force "
                "does not replace it; remove it yourself or choose another destination."
            )
        if foreign := foreign_files(self._place):
            raise FileExistsError(
                f"{shown} holds files that no conversion wrote: {listed(foreign)}; --force would delete them, so move "
                "them away or choose another destination."
            )

    def _is_free(self) -> bool:
        return not self._place.exists() or (self._place.is_dir() and not any(self._place.iterdir()))

    @contextlib.contextmanager
    def open(self, fingerprint: dict, has_progress: Callable[[], bool]) -> Iterator[Path]:
        """
        The folder to write into, locked; renamed to the final path if the block ends well.

        Args:
            fingerprint: What is converted and how. What an earlier run left is reused only if it is the same.
            has_progress: Whether there is something finished, which is kept for a later run after an interruption, on
                a full disk or if the source can no longer be reached. Any other failure leaves nothing behind.

        Raises:
            FileExistsError: if something has come to be at the destination.
            ValueError: if another process is writing it.
        """
        missing = [folder for folder in self.partial.parents if not folder.exists()]
        try:
            with self._locked():
                # Another process may have ended since the destination was looked at.
                self._recover()
                try:
                    self._check_place()
                except FileExistsError:
                    self._remove_partial(only_if_empty=True)
                    raise
                yield from self._build(json.dumps(fingerprint, sort_keys=True).encode(), has_progress)
        finally:
            for folder in missing:  # the innermost first; one that is not empty stays
                with contextlib.suppress(OSError):
                    folder.rmdir()

    def _build(self, fingerprint: bytes, has_progress: Callable[[], bool]) -> Iterator[Path]:
        is_whole = False
        try:
            self._prepare(fingerprint)
            yield self._model
            is_whole = True
            self._put_in_place()
        except BaseException as error:
            self._recover()
            if not is_whole and not (_is_worth_resuming(error) and has_progress()):
                self._remove_partial()
            elif is_whole and isinstance(error, OSError):
                raise OSError(
                    f"The conversion is complete but could not be moved to {str(self.path)!r} ({error}); it is kept, "
                    "run the same command again when this is mended."
                ) from error
            raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Create the partial folder if need be and hold its lock."""
        path = self.partial / "lock"
        while True:
            try:
                self.partial.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                reason = f"{str(self.path)!r} cannot be created ({error}); choose another destination."
                raise with_number(OSError(reason), error.errno) from error
            try:
                lock = path.open("w")
            except FileNotFoundError:
                continue  # the process that held it has just ended, and removed the folder
            with lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise _Busy(f"Another conversion is writing {str(self.path)!r}; wait for it to end.") from error
                except OSError as error:
                    raise OSError(
                        f"{str(path)!r} cannot be locked ({error.strerror}): the file system has no locks; choose a "
                        "destination on another disk."
                    ) from error
                if _is_file_at(lock, path):
                    yield
                    return

    def _recover(self) -> None:
        """Put in order what a process left that ended between the two renames of `_put_in_place`, or after them."""
        if self._replaced.exists() and self._is_free():
            self._replaced.rename(self._place)
        if not self._model.exists():
            self._empty_partial()

    def _prepare(self, fingerprint: bytes) -> None:
        note = self.partial / "fingerprint"
        if not note.is_file() or note.read_bytes() != fingerprint:
            self._empty_partial()
            note.write_bytes(fingerprint)
        self._model.mkdir(exist_ok=True)
        self.progress.mkdir(exist_ok=True)

    def _put_in_place(self) -> None:
        self._check_place()
        if not self._is_free():
            # The old model goes only when the new one would survive a power cut.
            _flush(self._model)
            if self._replaced.exists():
                remove(self._replaced)
            self._place.rename(self._replaced)
        self._model.rename(self._place)
        with contextlib.suppress(OSError):  # the result is in place; the next run tries again
            self._remove_partial()

    def _empty_partial(self) -> None:
        # First, so that nobody resumes from what an end in between leaves.
        (self.partial / "fingerprint").unlink(missing_ok=True)
        for entry in self.partial.iterdir():
            if entry.name != "lock":
                remove(entry)

    def _remove_partial(self, only_if_empty: bool = False) -> None:
        if only_if_empty and len(list(self.partial.iterdir())) > 1:
            return
        self._empty_partial()
        (self.partial / "lock").unlink()
        with contextlib.suppress(OSError):  # another process has created its lock there
            self.partial.rmdir()


def remove(path: Path) -> None:
    """Delete a file, a link or a whole folder."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def with_number(error: OSError, number: int | None) -> OSError:
    """The error with its `errno`, which is not in its words."""
    error.errno = number
    return error


def _is_file_at(file: IO, path: Path) -> bool:
    """Whether an open file is still the one that its path names."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _resolved(path: Path) -> Path:
    # A loop of links raises one of these errors or is left as it is, by the version of Python.
    with contextlib.suppress(OSError, RuntimeError):
        resolved = path.resolve()
        if not resolved.is_symlink():
            return resolved
    raise ValueError(f"{str(path)!r} is a link that leads to itself; remove it.")


def _is_worth_resuming(error: BaseException) -> bool:
    """A wrong input stays wrong; an interruption, a full disk or a server that fails does not."""
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    is_far = isinstance(error, ConnectionError | TimeoutError | BucketAccessError)
    return is_full or is_far or not isinstance(error, Exception)


def _flush(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
