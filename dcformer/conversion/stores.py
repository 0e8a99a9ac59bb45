"""Files of a checkpoint in a local folder or a bucket (`gs://`, `s3://`), listed once and read by tensorstore."""

import contextlib
import os
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from ..common.optional import import_optional
from .arrays import file_stamps


# How long a bucket may take to list its files; tensorstore would wait for a silent server without end.
_LIST_SECONDS = 20.0
_RETRIES = {"max_retries": 5, "initial_delay": "500ms", "max_delay": "4s"}
# What tensorstore says of files that are there; other errors are of the connection, or of permissions.
_DAMAGED = ("DATA_LOSS", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "OUT_OF_RANGE")
_INTERNALS = re.compile(r'Error opening "\w+" driver: | \[(tensorstore_spec|source locations)=.*', re.DOTALL)


def import_tensorstore() -> Any:
    return import_optional("tensorstore", "Reading a JAX checkpoint", "convert")


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn an error of tensorstore into a sentence about what is read."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        status, _, reason = _INTERNALS.sub("", str(error)).partition(": ")
        if status == "NOT_FOUND":
            raise ValueError(f"{what} is missing; copy the checkpoint again.") from error
        if status in _DAMAGED:
            raise ValueError(f"{what} is damaged ({reason}); copy the checkpoint again.") from error
        raise ValueError(f"{what} cannot be read: {reason or status}.") from error


def is_remote(location: str | os.PathLike) -> bool:
    return str(location).startswith(("gs://", "s3://"))


def refuse_no_folder(path: str | os.PathLike) -> None:
    if not Path(path).is_dir():
        raise FileNotFoundError(f"There is no folder {str(path)!r}; check the path.")


class Store:
    """
    The files below a folder.

    Args:
        location: A local folder, or `gs://bucket/path` or `s3://bucket/path`. Credentials come from where tensorstore
            looks for them; `AWS_ENDPOINT_URL` and `AWS_REGION` are respected for s3.

    Raises:
        FileNotFoundError: if there is no such local folder.
    """

    def __init__(self, location: str | os.PathLike):
        self.is_local = not is_remote(location)
        self.location = str(Path(location).absolute()) if self.is_local else str(location).rstrip("/")
        if self.is_local:
            refuse_no_folder(location)

    @cached_property
    def names(self) -> list[str]:
        """Every file, with its path relative to the location, sorted."""
        if self.is_local:
            folders = os.walk(self.location, followlinks=True)
            paths = [os.path.join(folder, file) for folder, _, files in folders for file in files]
            return sorted(Path(path).relative_to(self.location).as_posix() for path in paths)
        store = import_tensorstore().KvStore.open(self.spec()).result(timeout=_LIST_SECONDS)
        try:
            names = [key.decode() for key in store.list().result(timeout=_LIST_SECONDS)]
        except TimeoutError as error:
            raise TimeoutError(f"{self.location} has not answered within {_LIST_SECONDS:g} seconds.") from error
        # Consoles of buckets make empty files for folders.
        return sorted(name for name in names if not name.endswith("/"))

    def spec(self, path: str = "") -> dict[str, Any]:
        """The tensorstore key-value store of a folder below this one."""
        if self.is_local:
            return {"driver": "file", "path": f"{self.location}/{path}"}
        scheme, bucket, below = re.fullmatch(r"(gs|s3)://([^/]*)/?(.*)", self.location).groups()  # type: ignore[union-attr]
        spec = {"bucket": bucket, "path": f"{below}/{path}" if below else path}
        if scheme == "gs":
            return {"driver": "gcs", **spec, "gcs_request_retries": _RETRIES}
        settings = {
            "endpoint": os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"),
            "aws_region": os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
        }
        given = {key: value for key, value in settings.items() if value}
        return {"driver": "s3", **spec, **given, "s3_request_retries": _RETRIES}

    def read(self, path: str) -> bytes | None:
        """The content of a file, None if there is none."""
        with reading(f"{self.location}/{path}"):
            found = import_tensorstore().KvStore.open(self.spec()).result().read(path).result()
        return bytes(found.value) if found.state == "value" else None

    def stamps(self, folder: str) -> list:
        """Names of the files below a folder; of local ones size and time too."""
        names = [name for name in self.names if name.startswith(folder)]
        return file_stamps(Path(self.location, name) for name in names) if self.is_local else names
