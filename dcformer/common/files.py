"""Files that are written whole, folders that one process uses at a time, and manifests of sizes and SHA-256 sums."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from filelock import FileLock, Timeout


Manifest: TypeAlias = dict[str, dict[str, Any]]  # path relative to a folder -> {"size": bytes, "sha256": digits}


class LockHeldError(ValueError):
    """Another process holds the lock."""


@contextlib.contextmanager
def file_lock(path: str | os.PathLike) -> Iterator[None]:
    """Hold the lock of a file, made with its folder, until the block or process ends; else LockHeldError."""
    path = Path(path)
    path.parent.resolve().mkdir(parents=True, exist_ok=True)  # also of a link to nothing yet
    try:
        lock = FileLock(path).acquire(blocking=False)
    except Timeout as error:
        raise LockHeldError(f"Another process holds the lock {str(path)!r}; wait for it to end.") from error
    with lock:
        yield


def is_stream(path: Path) -> bool:
    """True if a path is there but no file, as a device or a pipe, or is an open file of a process, as /dev/stdout."""
    if path.is_symlink() and path.exists():
        return path.parent.resolve().match("/proc/*/fd") or is_stream(path.parent / path.readlink())
    return path.exists() and not path.is_file()


def write_atomically(path: Path, content: str | bytes) -> None:
    """
    Write or replace a file in one step, text as UTF-8; if that fails, the old file stays and no other is left.

    A link stays, and the file that it names is written; what [`is_stream`] recognises is appended to.
    """
    content = content.encode() if isinstance(content, str) else content
    if is_stream(path):
        with path.open("ab") as file:
            file.write(content)
        return
    path = path.resolve()
    unfinished = path.with_name(f"{path.name}.partial")  # left behind if the process is killed; the next replaces it
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def set_usual_mode(*paths: str | os.PathLike) -> None:
    """Give files the mode that `open` gives new ones: safetensors writes them for their owner alone."""
    os.umask(mask := os.umask(0o077))
    for path in paths:
        os.chmod(path, 0o666 & ~mask)


def file_digest(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_manifest(folder: Path, paths: Iterable[Path] | None = None) -> Manifest:
    """
    Sizes and SHA-256 of files below a folder, of all or of `paths`, sorted by name.

    The files are flushed to the disk first, so that a manifest that survives a power cut describes files that did.
    """
    manifest: Manifest = {}
    for path in sorted(folder.rglob("*") if paths is None else paths):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
            manifest[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": file_digest(path)}
    return manifest


def find_damage(folder: Path, manifest: Mapping[str, Any]) -> str | None:
    """Describe in a sentence the first file that differs from the manifest; None if none does."""
    for name, expected in manifest.items():
        check_relative(name)
        path = folder / name
        if not path.is_file():
            return f"{str(path)!r} is missing."
        if (size := path.stat().st_size) != expected["size"]:
            return f"{str(path)!r} has {size:,} bytes instead of {expected['size']:,}."
        if file_digest(path) != expected["sha256"]:
            return f"{str(path)!r} was changed: its SHA-256 is not the one that was recorded."
    return None


def check_relative(name: Any) -> str:
    """A path that was read from a file, if it stays inside the folder that it is relative to; else ValueError."""
    parts = PurePosixPath(name).parts if isinstance(name, str) else ()
    if not parts or parts[0] == "/" or ".." in parts or "\\" in name or ":" in name:
        raise ValueError(f"A path that is read from a file must stay inside its folder, got {name!r}.")
    return name


def seal(values: dict[str, Any]) -> str:
    """JSON text with a hash of itself, by which `read_sealed` detects damage."""
    return json.dumps({**values, "sha256": json_digest(values)}, indent=1, ensure_ascii=False) + "\n"


def read_sealed(path: Path) -> dict[str, Any]:
    """The values of a file of `seal`; ValueError, a sentence, if it is damaged."""
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is damaged: it is not JSON ({error}).") from error
    if not isinstance(values, dict) or values.pop("sha256", None) != json_digest(values):
        raise ValueError(f"{str(path)!r} is damaged, or was written by an earlier version of dcformer.")
    return values


def json_digest(values: Any) -> str:
    """The SHA-256 of values as JSON on one line."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
