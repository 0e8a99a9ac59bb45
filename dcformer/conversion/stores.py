"""Files of a checkpoint, on this machine or in a bucket (`gs://`, `s3://`), behind one small interface."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import urlparse

from ..optional import import_optional


REMOTE_SCHEMES = ("gs", "s3")


def import_tensorstore():
    return import_optional("tensorstore", "Reading JAX checkpoints needs tensorstore: pip install 'dcformer[convert]'.")


def is_remote(location: str | os.PathLike) -> bool:
    return urlparse(str(location)).scheme in REMOTE_SCHEMES


class Store:
    """
    The files below a folder.

    Args:
        location (`str` or `Path`): A local folder, or `gs://bucket/path`, `s3://bucket/path`. Credentials come from the
            usual places; `AWS_ENDPOINT_URL` and `AWS_REGION` are respected for s3.

    Raises:
        ValueError: for another scheme.
        FileNotFoundError: if a local folder does not exist.
    """

    def __init__(self, location: str | os.PathLike):
        url = urlparse(str(location))
        self.is_local = url.scheme not in REMOTE_SCHEMES
        if self.is_local and "://" in str(location):
            raise ValueError(f"{location!r}: the scheme must be gs:// or s3://, or the path a local one.")
        self.location = str(Path(location).absolute()) if self.is_local else str(location).rstrip("/")
        if self.is_local:
            if not Path(self.location).exists():
                raise FileNotFoundError(f"There is no folder {str(location)!r}; check the path.")
            if not Path(self.location).is_dir():
                raise ValueError(f"{str(location)!r} is a file; give the folder of a checkpoint.")
            # Mapped files spare tensorstore a copy of every chunk as it is stored.
            self._base = {"driver": "file", "path": self.location + "/", "file_io_mode": {"mode": "memmap"}}
        elif url.scheme == "gs":
            self._base = {"driver": "gcs", "bucket": url.netloc, "path": url.path.strip("/") + "/"}
        else:
            self._base = {"driver": "s3", "bucket": url.netloc, "path": url.path.strip("/") + "/"}
            if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3", os.environ.get("AWS_ENDPOINT_URL")):
                self._base["endpoint"] = endpoint
            if region := os.environ.get("AWS_REGION", os.environ.get("AWS_DEFAULT_REGION")):
                self._base["aws_region"] = region
        self._remote_names: list[str] | None = None

    def below(self, folder: str) -> Store:
        """The store of a folder inside this one."""
        store = object.__new__(Store)
        store.is_local, store._remote_names = self.is_local, None
        store.location = f"{self.location}/{folder}"
        store._base = {**self._base, "path": f"{self._base['path']}{folder}/"}
        if self._remote_names is not None:
            prefix = folder + "/"
            store._remote_names = [name[len(prefix) :] for name in self._remote_names if name.startswith(prefix)]
        return store

    @property
    def name(self) -> str:
        """The last part of the location."""
        return self.location.rsplit("/", 1)[-1]

    def spec(self, path: str = "") -> dict:
        """The tensorstore key-value store of a folder inside this one."""
        return {**self._base, "path": self._base["path"] + path}

    def describe(self, path: str) -> str:
        return f"{self.location}/{path}"

    def names(self, folder: str = "") -> list[str]:
        """Every file below a folder, with its path relative to that folder, sorted."""
        prefix = f"{folder}/" if folder else ""
        if not self.is_local:
            return sorted(name[len(prefix) :] for name in self._listed() if name.startswith(prefix))
        root = Path(self.location, folder)
        return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())

    def children(self) -> list[str]:
        """Names of the files and folders right here, sorted."""
        if self.is_local:
            return sorted(entry.name for entry in os.scandir(self.location))
        return sorted({name.split("/", 1)[0] for name in self._listed()})

    def has(self, path: str) -> bool:
        return Path(self.location, path).is_file() if self.is_local else path in self._listed()

    def is_folder(self, path: str) -> bool:
        if self.is_local:
            return Path(self.location, path).is_dir()
        return any(name.startswith(path + "/") for name in self._listed())

    def read(self, path: str) -> bytes:
        """
        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if a bucket does not answer.
        """
        if self.is_local:
            file = Path(self.location, path)
            if not file.is_file():
                raise FileNotFoundError(f"There is no file {self.describe(path)!r}.")
            return file.read_bytes()
        result = self._remote(lambda kvstore: kvstore.read(path))
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

    def _listed(self) -> list[str]:
        if self._remote_names is None:
            names = [key.decode() for key in self._remote(lambda kvstore: kvstore.list())]
            if not names:
                raise FileNotFoundError(f"There is nothing at {self.location!r}; check the bucket and the path.")
            self._remote_names = names
        return self._remote_names

    def _remote(self, request):
        tensorstore = import_tensorstore()
        try:
            return request(tensorstore.KvStore.open(self._base).result()).result()
        except ValueError as error:
            raise ValueError(f"{self.location!r} cannot be read: {first_sentence(error)}") from error


def first_sentence(error: Exception) -> str:
    """The telling part of a tensorstore message: without status code, nested context and source positions."""
    text = str(error).split(" [")[0].split("\n")[0]
    return re.sub(r"^[A-Z_]+: ", "", text)[:300]
