"""SHA-256 sums of files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path


_BUFFER_BYTES = 2**20


def file_digest(path: Path, advance: Callable[[int], None] = lambda nbytes: None) -> str:
    """
    The SHA-256 of a file, in hexadecimal digits.

    Args:
        path (`Path`): The file.
        advance: Told of the number of bytes of every part that is read.

    Raises:
        OSError: if it cannot be read.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            advance(count)
    return digest.hexdigest()
