"""The folder that a conversion writes: built beside its place, taken over after an interruption, renamed at the end."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from .stores import is_remote


# A folder that holds one of these is one that a conversion writes, so --force may replace it.
_OWN_FILES = ("conversion_report.json", "config.json")


class Destination:
    """
    Args:
        path: The folder to create.
        source: Where the conversion reads from; neither may lie inside the other.
        force (`bool`): Replace a converted model that is there.

    Raises:
        FileExistsError: if something is there already and `force` is not given, or it is no converted model.
        ValueError: if it is remote, or source and destination overlap.
    """

    def __init__(self, path: str | os.PathLike, source: str | os.PathLike, force: bool = False):
        if is_remote(path):
            raise ValueError(f"The destination must be a local folder, got {str(path)!r}; copy it to a bucket later.")
        self.path = Path(path).absolute()
        self.partial = self.path.with_name(f".{self.path.name}.partial")
        self._replaced = self.path.with_name(f".{self.path.name}.replaced")
        self._check_overlap(path, source)
        parent = next(folder for folder in self.path.parents if folder.exists())
        if not parent.is_dir():
            raise ValueError(f"{str(path)!r} cannot be created: {str(parent)!r} is a file.")
        if self.path.is_dir() and not any(self.path.iterdir()):
            return
        if self.path.exists():
            if not force:
                raise FileExistsError(f"{str(path)!r} exists already; choose another destination or pass --force.")
            if not any((self.path / name).is_file() for name in _OWN_FILES):
                raise FileExistsError(
                    f"{str(path)!r} is not a converted model (it holds none of {', '.join(_OWN_FILES)}), so --force "
                    "does not replace it; remove it yourself or choose another destination."
                )

    def _check_overlap(self, path, source) -> None:
        if is_remote(source):
            return
        ours, theirs = self.path.resolve(), Path(source).resolve()
        if ours == theirs or theirs in ours.parents:
            raise ValueError(f"The destination {str(path)!r} lies inside the source {str(source)!r}; choose another.")
        if ours in theirs.parents:
            raise ValueError(f"The source {str(source)!r} lies inside the destination {str(path)!r}; choose another.")

    @contextlib.contextmanager
    def open(self, fingerprint: dict, keep: Callable[[BaseException], bool] = lambda error: False) -> Iterator[Path]:
        """
        The partial folder, locked; renamed to the final path if the block ends well.

        Args:
            fingerprint: What is converted and how. What an earlier run left is taken over only if it is the same.
            keep: Whether to leave the partial folder there for a later run when the block fails with an error.

        Raises:
            ValueError: if another process is writing it.
        """
        self.partial.mkdir(parents=True, exist_ok=True)
        with (self.partial / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ValueError(f"Another conversion is writing {str(self.path)!r}; wait for it to end.") from error
            try:
                self._prepare(json.dumps(fingerprint, sort_keys=True))
                yield self.partial
                self._finish()
            except BaseException as error:
                if self.partial.exists() and not keep(error):
                    shutil.rmtree(self.partial)
                raise

    def _prepare(self, fingerprint: str) -> None:
        note = self.partial / ".fingerprint"
        if not note.is_file() or note.read_text(encoding="utf-8") != fingerprint:
            for entry in self.partial.iterdir():
                if entry.name != ".lock":
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            note.write_text(fingerprint, encoding="utf-8")

    def _finish(self) -> None:
        for name in (".fingerprint", ".lock", ".progress"):
            entry = self.partial / name
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)
        if self.path.exists():
            shutil.rmtree(self._replaced, ignore_errors=True)
            self.path.rename(self._replaced)
        self.partial.rename(self.path)
        shutil.rmtree(self._replaced, ignore_errors=True)
