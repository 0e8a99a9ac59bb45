"""The folder that a conversion writes: built beside its final path, resumed after an interruption, renamed at the end.

All that is not finished lies in a hidden folder, `.NAME.partial`, beside the final path:

    lock           held by the process that writes
    notes.json     which conversion this is, and which files are complete, with their hashes
    model/         the folder that will be renamed
    replaced/      with --force, the old folder between the two renames
"""

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..common.files import file_lock, find_damage, json_digest, make_manifest, read_sealed, seal, write_atomically
from .conversion_report import REPORT_FILE, read_report
from .plan import UnfitWeightsError, listed
from .stores import is_remote


class Destination:
    """
    Args:
        path: The folder to create. Links are followed: the folder is written where they point, and they stay.
        source: Where the conversion reads from.
        force (defaults to `False`): Replace a converted model at the path.

    Attributes:
        path: The same, absolute.
        folder: What is renamed to the path at the end.
        finished: By name the manifest (`files`) and `records` of what this run, or one before it, has finished.
        report: When the destination is opened, the report of an earlier run that ended after it had renamed the folder.

    Raises:
        FileExistsError: if something is at the path and `force` is not given, or it is not a converted model, or it
            holds files that no conversion wrote.
        ValueError: if the path is remote, or the source lies inside it.
    """

    def __init__(self, path: str | os.PathLike, source: str | os.PathLike, force: bool = False):
        if is_remote(path):
            raise ValueError(f"The destination must be a local folder, got {str(path)!r}; copy it to a bucket later.")
        self.path = Path(path).absolute()
        self._final, self._force = self.path.resolve(), force
        read = Path(source).resolve()  # a name on the Hub is not there, and may be that of the destination too
        if not is_remote(source) and read.exists() and self._final in (read, *read.parents):
            raise ValueError(f"The source {str(source)!r} lies inside the destination {str(path)!r}; choose another.")
        self._partial = self._final.with_name(f".{self._final.name}.partial")
        self._notes, self.folder = self._partial / "notes.json", self._partial / "model"
        self._replaced, self._fingerprint = self._partial / "replaced", ""
        self.finished: dict[str, dict[str, Any]] = {}
        self.report: dict[str, Any] | None = None
        # What a process left that ended during the renames or after them, `open` looks at.
        if not self._replaced.is_dir() and (self.folder.is_dir() or not self._notes.is_file()):
            self._check_final()

    def _is_free(self) -> bool:
        return not self._final.exists() or (self._final.is_dir() and not any(self._final.iterdir()))

    def _check_final(self) -> None:
        """Raise FileExistsError for anything that must not be replaced."""
        if self._is_free():
            return
        shown = repr(str(self.path))
        if not self._force:
            raise FileExistsError(f"{shown} exists already; choose another destination or pass --force.")
        if (report := read_report(self._final)) is None:
            raise FileExistsError(f"{shown} holds no {REPORT_FILE}: --force replaces converted models only.")
        ours = {REPORT_FILE, *report["files"]}
        files = {path.relative_to(self._final).as_posix() for path in self._final.rglob("*") if not path.is_dir()}
        if foreign := sorted(files - ours):
            raise FileExistsError(f"{shown} holds files that no conversion wrote: {listed(foreign)}; move them away.")

    @contextlib.contextmanager
    def open(self, fingerprint: dict) -> Iterator[Path]:
        """
        The folder to write into, locked; renamed to the final path if the block ends without an error. If not, the next
        conversion with the same fingerprint has what was finished, and nothing else, in the folder; if the weights
        cannot be converted, nothing is left. If an earlier run has done all but remove its notes, its report is in
        `report`, and the block has nothing to do.

        Args:
            fingerprint: Which conversion this is, as JSON.

        Raises:
            LockHeldError: if another process is writing it.
            FileExistsError: as the constructor, if something has been written to the final path since.
        """
        self._fingerprint = json_digest(fingerprint)
        with file_lock(self._partial / "lock"):
            self._read_notes()
            if self.finished and not self.folder.is_dir() and (report := self._report_of_result()) is not None:
                self.report = report
                yield self.folder
                self._remove_partial()
                return
            if self._replaced.exists() and self._is_free():  # a process ended between the renames
                self._replaced.rename(self._final)
            self._check_final()
            self.folder.mkdir(exist_ok=True)
            self._keep_finished()
            try:
                yield self.folder
            except BaseException as error:
                if isinstance(error, UnfitWeightsError) or not self.finished:
                    shutil.rmtree(self._partial)
                raise
            self._check_final()
            if not self._is_free():  # the report has brought all files to the disk: the old model may go
                shutil.rmtree(self._replaced, ignore_errors=True)
                self._final.rename(self._replaced)
            self.folder.rename(self._final)
            self._remove_partial()

    def _remove_partial(self) -> None:
        """Remove all that is beside the final path, last that by which a later run knows that it was complete."""
        for path in sorted(self._partial.iterdir(), key=lambda path: path == self._notes):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._partial.rmdir()

    def _read_notes(self) -> None:
        """Read what is finished of this conversion; without notes, or with damaged or other ones, nothing is."""
        with contextlib.suppress(ValueError, FileNotFoundError):
            notes = read_sealed(self._notes)
            self.finished = notes["finished"] if notes["fingerprint"] == self._fingerprint else {}

    def _report_of_result(self) -> dict[str, Any] | None:
        """The report at the final path, if all is there as this conversion wrote it."""
        report = read_report(self._final)
        if report is None or find_damage(self._final, report["files"]) is not None:
            return None
        is_ours = all(note["files"].items() <= report["files"].items() for note in self.finished.values())
        return report if is_ours else None

    def finish(self, name: str, paths: Iterable[Path], records: list[dict[str, Any]]) -> None:
        """Note that files in the folder are complete, with records that this and a later run have in `finished`."""
        self.finished[name] = {"files": make_manifest(self.folder, paths), "records": records}
        write_atomically(self._notes, seal({"fingerprint": self._fingerprint, "finished": self.finished}))

    def _keep_finished(self) -> None:
        """Delete all files but those that are as the notes say, and forget what is not."""
        notes = self.finished.items()
        self.finished = {name: note for name, note in notes if find_damage(self.folder, note["files"]) is None}
        kept = {self.folder / file for note in self.finished.values() for file in note["files"]}
        for path in sorted(self.folder.rglob("*"), reverse=True):  # the files of a folder before the folder
            if not path.is_dir():
                if path not in kept:
                    path.unlink()
            elif not any(path.iterdir()):
                path.rmdir()
