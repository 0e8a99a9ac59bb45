"""The folder that a conversion writes: built beside its place, resumed after an interruption, renamed at the end.

All that is not finished lies in one hidden folder, `.NAME.partial`, beside the place of the result:

    lock           held by the process that writes
    fingerprint    which conversion this is
    notes/         what is finished
    model/         the folder that will be renamed
    replaced/      with --force, the old folder between the two renames
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..common.files import file_lock, find_damage, make_manifest, read_sealed, seal, write_atomically
from .plan import UnfitWeightsError, listed
from .report import REPORT_FILE, read_report
from .stores import is_remote


class Destination:
    """
    Args:
        path: The folder to create. Links are followed: the folder lands where they point, and they stay.
        source: Where the conversion reads from.
        force (defaults to `False`): Replace a converted model that is there.

    Raises:
        FileExistsError: if something is there and `force` is not given, or it is not a converted model, or it holds
            files that no conversion wrote.
        ValueError: if it is remote, or the source lies inside it.
    """

    def __init__(self, path: str | os.PathLike, source: str | os.PathLike, force: bool = False):
        if is_remote(path):
            raise ValueError(f"The destination must be a local folder, got {str(path)!r}; copy it to a bucket later.")
        self.path = Path(path).absolute()
        self._place, self._force = self.path.resolve(), force
        if not is_remote(source) and self._place in (Path(source).resolve(), *Path(source).resolve().parents):
            raise ValueError(f"The source {str(source)!r} lies inside the destination {str(path)!r}; choose another.")
        self._partial = self._place.with_name(f".{self._place.name}.partial")
        self.notes, self._model = self._partial / "notes", self._partial / "model"
        self._replaced, self._fingerprint = self._partial / "replaced", self._partial / "fingerprint"
        if not self._replaced.is_dir():
            self._check_place()

    def _is_free(self) -> bool:
        return not self._place.exists() or (self._place.is_dir() and not any(self._place.iterdir()))

    def _check_place(self) -> None:
        """Raise FileExistsError for anything that must not be replaced."""
        if self._is_free():
            return
        shown = repr(str(self.path))
        if not self._force:
            raise FileExistsError(f"{shown} exists already; choose another destination or pass --force.")
        if (report := read_report(self._place)) is None:
            raise FileExistsError(f"{shown} holds no {REPORT_FILE}: --force replaces converted models only.")
        ours = {REPORT_FILE, *report["files"]}
        files = {path.relative_to(self._place).as_posix() for path in self._place.rglob("*") if not path.is_dir()}
        if foreign := sorted(files - ours):
            raise FileExistsError(f"{shown} holds files that no conversion wrote: {listed(foreign)}; move them away.")

    @contextlib.contextmanager
    def open(self, fingerprint: dict) -> Iterator[Path]:
        """
        The folder to write into, locked; renamed to the final path if the block ends well. If it does not, the next
        conversion with the same fingerprint finds there what is finished, unless the weights cannot be converted.

        Args:
            fingerprint: Which conversion this is, as JSON.

        Raises:
            LockHeldError: if another process is writing it.
            FileExistsError: as the constructor, if something has come to be at the destination.
        """
        text = json.dumps(fingerprint, sort_keys=True)
        with file_lock(self._partial / "lock"):
            if self._replaced.exists():  # a process ended during the renames
                if self._is_free():
                    self._replaced.rename(self._place)
                self._check_place()
            is_known = self._fingerprint.is_file() and self._fingerprint.read_bytes() == text.encode()
            if not (is_known and self._model.is_dir() and self.notes.is_dir()):
                self._fingerprint.unlink(missing_ok=True)
                for folder in (self.notes, self._model):
                    shutil.rmtree(folder, ignore_errors=True)
                    folder.mkdir()
                write_atomically(self._fingerprint, text)
            try:
                yield self._model
            except BaseException as error:
                if isinstance(error, UnfitWeightsError) or not any(self.notes.iterdir()):
                    shutil.rmtree(self._partial)
                raise
            self._check_place()
            if not self._is_free():  # the report has brought all files to the disk: the old model may go
                shutil.rmtree(self._replaced, ignore_errors=True)
                self._place.rename(self._replaced)
            self._model.rename(self._place)
            shutil.rmtree(self._partial)


def write_note(note: Path, folder: Path, paths: Iterable[Path], records: list[dict[str, Any]]) -> None:
    """Note that files below a folder are finished, with what is to be remembered of them."""
    write_atomically(note, seal({"files": make_manifest(folder, paths), "records": records}))


def read_note(note: Path, folder: Path) -> list[dict[str, Any]] | None:
    """What a note remembers of files; None if it is not there or damaged, or they are not as they were then."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        content = read_sealed(note)
        return content["records"] if find_damage(folder, content["files"]) is None else None
    return None
