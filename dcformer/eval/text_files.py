"""Plain files of texts: required by name, and read in part, by a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path


DEFAULT_SEED = 1234


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

    The files may be larger than memory, so they are read twice: to count lines and to take some.

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


def _lines(files: list[Path]) -> Iterator[tuple[Path, int, str]]:
    for file in files:
        with open(file, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield file, number, line
