"""
Documents of head tasks, generated from a seed.

A document is a few examples of one kind, so that the earlier ones are shots for the later ones, as in the authors' 888
texts.

**Splits.** What a line says, whatever its wording, is hashed, and the hash decides whether it belongs to `train`,
`validation` or `test`; so what is said in one split is not said in another in other words. No line of the authors' 888
texts is generated for `train`: `authors_lines.bin` holds their digests.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from .kinds import TASK_KINDS, Example, TaskKind


SPLITS = ("train", "validation", "test")
_DIGEST_BYTES = 8


def generate_documents(
    count: int, seed: int, split: str = "train", lines: tuple[int, int] = (1, 8), kinds: tuple[str, ...] | None = None
) -> list[dict[str, Any]]:
    """
    Generate documents; the first n of a larger count are those of count n.

    Args:
        count: How many.
        seed: Another seed, other documents.
        split (`"train"`, `"validation"`, `"test"`): What the lines may say, see the module's docstring.
        lines (defaults to (1, 8)): Least and most examples in a document, of one kind and with one verb.
        kinds (*optional*): Names such as `("task0", "task74")`; all kinds if not given. They take turns in a drawn
            order, so that all are equally frequent.

    Returns:
        Rows of `text`; `task`, `pattern` and `transformation` of its examples; `answers`, the [start, end) of every
        answer in `text`, the space before it included.

    Raises:
        ValueError: if an argument is none of these.
    """
    return list(iterate_documents(count, seed, split, lines, kinds))


def iterate_documents(
    count: int, seed: int, split: str = "train", lines: tuple[int, int] = (1, 8), kinds: tuple[str, ...] | None = None
) -> Iterator[dict[str, Any]]:
    """As [`generate_documents`], one at a time."""
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count!r}.")
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}; got {split!r}.")
    if not 1 <= lines[0] <= lines[1]:
        raise ValueError(f"lines must be (least, most) with 1 <= least <= most, got {lines!r}.")
    chosen = _kinds_named(kinds)
    rng = random.Random(f"{split} {seed}")
    waiting: list[TaskKind] = []
    for _ in range(count):
        if not waiting:
            waiting = rng.sample(chosen, len(chosen))
        kind = waiting.pop()
        wording = rng.randrange(60)  # a multiple of 3, 4 and 5, so that every number of verbs is drawn evenly
        examples = [_draw(kind, rng, wording, split) for _ in range(rng.randint(*lines))]
        # The authors' texts begin with a line feed; a prompt that a person types does not.
        text, answers = rng.choice(("", "\n")), []
        for example in examples:
            start = len(text) + len(example.question)
            text += example.line
            answers.append([start, len(text)])
            text += "\n"
        yield {
            "text": text,
            "task": kind.name,
            "pattern": kind.pattern,
            "transformation": kind.transformation,
            "answers": answers,
        }


def _kinds_named(names: tuple[str, ...] | None) -> list[TaskKind]:
    if names is None:
        return list(TASK_KINDS.values())
    unknown = [name for name in names if name not in TASK_KINDS]
    if unknown or not names:
        raise ValueError(f"kinds must be names from task0 to task{len(TASK_KINDS) - 1}, got {unknown or names!r}.")
    return [TASK_KINDS[name] for name in names]


def _draw(kind: TaskKind, rng: random.Random, wording: int, split: str) -> Example:
    while True:
        example = kind.make(rng, wording)
        if example.split == split and not (split == "train" and line_digest(example.line) in authors_lines()):
            return example


def line_digest(line: str) -> bytes:
    """Eight bytes that stand for a line."""
    return hashlib.blake2b(line.strip().encode(), digest_size=_DIGEST_BYTES).digest()


@cache
def authors_lines() -> frozenset[bytes]:
    """Digests of all lines of the authors' 888 texts, without the brackets around answers."""
    data = Path(__file__).with_name("authors_lines.bin").read_bytes()
    return frozenset(data[i : i + _DIGEST_BYTES] for i in range(0, len(data), _DIGEST_BYTES))
