"""Plain files of texts: required by name, and read in part, by a seed."""

from __future__ import annotations

import contextlib
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import IO


DEFAULT_SEED = 1234
_ZSTANDARD = b"\x28\xb5\x2f\xfd"  # with which every file of it begins


def existing_file(file: Path, content: str) -> Path:
    """
    A file that must be there.

    Args:
        file: Its path, which is returned.
        content: What the error tells to put there.

    Raises:
        FileNotFoundError: if there is no such file.
    """
    if not file.is_file():
        raise FileNotFoundError(f"There is no file {str(file)!r}; put {content} there.")
    return file


def jsonl_fields(
    files: list[Path], fields: tuple[str, ...], subset: int | None = None, seed: int = DEFAULT_SEED
) -> Iterator[tuple[str, ...]]:
    """
    The fields of `subset` lines drawn by `seed`, in their order; all lines if `subset` is `None`.

    A file may be compressed by zstandard. The files may be larger than memory, so they are read twice: to count lines
    and to take some.

    Raises:
        ValueError: if there is no line, or one of those drawn is no object with the fields.
    """
    count = sum(1 for _ in _lines(files))
    chosen = set(drawn_places(count, subset, seed))
    if not chosen:
        raise ValueError(f"{str(files[0])!r} is empty; it must hold one JSON object per line.")
    for index, (file, number, line) in enumerate(_lines(files)):
        if index in chosen:
            try:
                row = json.loads(line)
                values = tuple(row[field] for field in fields)
            except (ValueError, KeyError, TypeError) as error:
                names = " and ".join(f'"{field}"' for field in fields)
                raise ValueError(f"Line {number} of {str(file)!r} is not a JSON object with {names}.") from error
            yield values


def drawn_places(count: int, subset: int | None, seed: int) -> list[int]:
    """
    Places of `subset` of so many things, drawn by `seed` and in ascending order; all if `subset` is `None` or more.

    Raises:
        ValueError: if `subset` is not positive.
    """
    if subset is None or subset >= count:
        return list(range(count))
    if subset < 1:
        raise ValueError(f"subset must be at least 1, got {subset}; leave it out for all documents.")
    return sorted(random.Random(seed).sample(range(count), subset))


def spread_places(count: int, limit: int | None) -> list[int]:
    """Places of `limit` of so many things, spread evenly over them and in ascending order; all if `limit` is `None`."""
    chosen = count if limit is None else min(limit, count)
    return [place * count // chosen for place in range(chosen)]


def spread_order(count: int) -> list[int]:
    """All places of so many things in an order of which every beginning is spread evenly over them."""
    n_bits = max(count - 1, 0).bit_length()
    # Counting with the bits of each number reversed halves the widest gap again and again.
    places = (int(f"{number:0{n_bits}b}"[::-1], 2) for number in range(1 << n_bits))
    return [place for place in places if place < count]


@contextlib.contextmanager
def _open_text(file: Path) -> Iterator[IO[str]]:
    """A file of text, compressed by zstandard or not: a copy in a cache may have no suffix to tell."""
    with open(file, "rb") as beginning:
        is_compressed = beginning.read(len(_ZSTANDARD)) == _ZSTANDARD
    if not is_compressed:
        with open(file, encoding="utf-8") as lines:
            yield lines
        return
    import pyarrow

    with pyarrow.input_stream(str(file), compression="zstd") as content:
        yield io.TextIOWrapper(content, encoding="utf-8")


def _lines(files: list[Path]) -> Iterator[tuple[Path, int, str]]:
    for file in files:
        with _open_text(file) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield file, number, line
