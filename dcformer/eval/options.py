"""The values that an evaluation is asked with, checked before anything is read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .origin import ANY_HASH
from .records import model_folder


DTYPES = ("bfloat16", "float16", "float32")
# numpy's generators take no other seeds.
_LARGEST_SEED = 2**32 - 1


def check_options(
    *, limit: int | None, batch_size: int | str, dtype: str, seed: int, max_length: int | None = None
) -> None:
    """
    Raises:
        ValueError: for a number that is none, or out of its range, or another dtype.
    """
    if limit is not None and not _is_whole(limit, 1):
        raise ValueError(f"limit must be at least 1, got {limit!r}; give a whole number, or leave it out for all.")
    if max_length is not None and not _is_whole(max_length, 1):
        raise ValueError(f"max_length must be a whole number of at least 1, got {max_length!r}.")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    is_number = batch_size.isdecimal() and int(batch_size) > 0 if isinstance(batch_size, str) else _is_whole(batch_size)
    if batch_size != "auto" and not is_number:
        raise ValueError(f'batch_size must be "auto" or a number of at least 1, got {batch_size!r}.')
    if not _is_whole(seed, 0) or seed > _LARGEST_SEED:
        raise ValueError(f"seed must be a whole number from 0 to {_LARGEST_SEED}, got {seed!r}.")


def check_hashes(hashes: Mapping[str, str], tasks: Iterable[str]) -> dict[str, str]:
    """
    The hashes that the documents of tasks must have.

    Raises:
        ValueError: for a task that is not run, or a value that is no hash.
    """
    known = tuple(tasks)
    for task, value in hashes.items():
        if task not in known:
            raise ValueError(f"A hash is given for {task!r}, which is not run; choose from {', '.join(known)}.")
        if value != ANY_HASH and not re.fullmatch(r"sha256:[0-9a-f]{64}", value):
            raise ValueError(
                f"The hash of {task} must be sha256: and 64 digits from 0 to f as in a record, or {ANY_HASH}, got "
                f"{value!r}."
            )
    return dict(hashes)


def numbers_of_shots(num_fewshot: int | Iterable[int]) -> tuple[int, ...]:
    """
    The numbers of examples before a question, as a tuple.

    Raises:
        ValueError: if there are none, or one is no number of at least 0.
    """
    shots = tuple(num_fewshot) if isinstance(num_fewshot, tuple | list | set | range) else (num_fewshot,)
    if not shots or not all(_is_whole(number, 0) for number in shots):
        raise ValueError(f"num_fewshot must be numbers of at least 0, such as 0,5; got {num_fewshot!r}.")
    return shots


def names_of_models(models: str | Sequence[str], baseline: str | None) -> list[str]:
    """
    The models to run, the baseline first, each once.

    Raises:
        ValueError: if there is none, or two would have one folder of results.
    """
    names = [models] if isinstance(models, str) else list(models)
    names = [baseline, *names] if baseline else names
    if not names:
        raise ValueError("No model is named; give a folder or a Hub id.")
    by_folder: dict[str, str] = {}
    for name in names:
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"A model must be a folder or a Hub id, got {name!r}.")
        other = by_folder.setdefault(model_folder(name), name)
        if other.rstrip("/") != name.rstrip("/"):
            raise ValueError(
                f"{other!r} and {name!r} would have one folder of results, {model_folder(name)!r}; give each an output "
                "of its own."
            )
    return list(by_folder.values())


def _is_whole(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
