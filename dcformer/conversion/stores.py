"""Files of a checkpoint, on this machine or in a bucket (`gs://`, `s3://`), behind one small interface."""

from __future__ import annotations

import bisect
import os
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from .buckets import Bucket, first_sentence, import_tensorstore


__all__ = ["REMOTE_SCHEMES", "Store", "first_sentence", "import_tensorstore", "is_remote"]

REMOTE_SCHEMES = ("gs", "s3")


def is_remote(location: str | os.PathLike) -> bool:
    return urlparse(str(location)).scheme in REMOTE_SCHEMES


class Store:
    """
    The files below a folder.

    Args:
        location (`str` or `Path`): A local folder, or `gs://bucket/path`, `s3://bucket/path`; the path may be empty.
            Credentials come from the usual places; `AWS_ENDPOINT_URL` and `AWS_REGION` are respected for s3.

    Raises:
        ValueError: for another scheme.
        FileNotFoundError: if a local folder does not exist.
    """

    def __init__(self, location: str | os.PathLike):
        self._base: dict[str, Any]
        self.is_local = not is_remote(location)
        if not self.is_local:
            bucket = Bucket(str(location))
            self._bucket: Bucket | None = bucket
            self.location, self._base = bucket.location, bucket.spec
            return
        if "://" in str(location):
            raise ValueError(f"{location!r}: the scheme must be gs:// or s3://, or the path a local one.")
        self._bucket, self.location = None, str(Path(location).absolute())
        if not Path(self.location).exists():
            raise FileNotFoundError(f"There is no folder {str(location)!r}; check the path.")
        if not Path(self.location).is_dir():
            raise ValueError(f"{str(location)!r} is a file; give the folder of a checkpoint.")
        # Mapped files spare tensorstore a copy of every chunk as it is stored.
        self._base = {
            "driver": "file",
            "path": self.location + "/",
            "file_io_mode": {"mode": "memmap"},
        }

    def below(self, folder: str) -> Store:
        """The store of a folder inside this one."""
        store = object.__new__(Store)
        store.is_local, store._bucket = self.is_local, self._bucket
        store.location = f"{self.location}/{folder}"
        store._base = {**self._base, "path": f"{self._base['path']}{folder}/"}
        if not self.is_local:
            store._listed = self.names(folder)
        return store

    @property
    def parts(self) -> list[str]:
        """The folders of the location, without the bucket."""
        return self._base["path"].strip("/").split("/")

    @property
    def name(self) -> str:
        """The last part of the location."""
        return self.parts[-1]

    def spec(self, path: str = "") -> dict[str, Any]:
        """The tensorstore key-value store of a folder inside this one."""
        return {**self._base, "path": self._base["path"] + path}

    def describe(self, path: str) -> str:
        return f"{self.location}/{path}"

    def names(self, folder: str = "") -> list[str]:
        """Every file below a folder, with its path relative to that folder, sorted."""
        prefix = f"{folder}/" if folder else ""
        if not self.is_local:
            first = bisect.bisect_left(self._listed, prefix)
            behind = bisect.bisect_left(self._listed, prefix + chr(0x10FFFF)) if prefix else len(self._listed)
            return [name[len(prefix) :] for name in self._listed[first:behind]]
        root = Path(self.location, folder)
        return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())

    def children(self) -> list[str]:
        """Names of the files and folders right here, sorted."""
        if self.is_local:
            return sorted(entry.name for entry in os.scandir(self.location))
        return sorted({name.split("/", 1)[0] for name in self._listed})

    def has(self, path: str) -> bool:
        if self.is_local:
            return Path(self.location, path).is_file()
        place = bisect.bisect_left(self._listed, path)
        return place < len(self._listed) and self._listed[place] == path

    def is_folder(self, path: str) -> bool:
        return Path(self.location, path).is_dir() if self.is_local else bool(self.names(path))

    def result(self, future: Any) -> Any:
        """
        The result of a request of tensorstore's to this store.

        Raises:
            ConnectionError, PermissionError, FileNotFoundError: if a bucket does not give it.
            ValueError: as tensorstore, for what was read.
        """
        return future.result() if self._bucket is None else self._bucket.result(future)

    def read(self, path: str) -> bytes:
        """
        Raises:
            FileNotFoundError: if there is no such file.
            ConnectionError, PermissionError: if a bucket does not give it.
        """
        if self.is_local:
            file = Path(self.location, path)
            if not file.is_file():
                raise FileNotFoundError(f"There is no file {self.describe(path)!r}.")
            return file.read_bytes()
        result = self.result(self._kvstore.read(path))
        if result.state != "value":
            raise FileNotFoundError(f"There is no file {self.describe(path)!r}.")
        return bytes(result.value)

    def fingerprint(self, folder: str = "") -> list:
        """What tells that the files below a folder are still the same: names, and sizes and times of local ones."""
        names = self.names(folder)
        if not self.is_local:
            return names
        stats = [(name, Path(self.location, folder, name).stat()) for name in names]
        return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]

    @cached_property
    def _listed(self) -> list[str]:
        """The files of a bucket, sorted."""
        return [] if self._bucket is None else self._bucket.names()

    @cached_property
    def _kvstore(self):
        return import_tensorstore().KvStore.open(self._base).result()
