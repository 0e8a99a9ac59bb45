"""
Documents of head tasks, generated from a seed.

A document is a few examples of one kind, so that the earlier ones are shots for the later ones, as in the authors' 888
texts.

**Splits.** The set of the facts of a line decides whether it belongs to `train`, `validation` or `test` (facts.py).
Neither their order, nor the wording, nor what is asked about them has a part in it: three facts that are told in one
split are told in no other. A list that names one thing twice and another once has other facts than the reverse, of
which the odd one is the other thing. The facts of the authors' 888 texts are in no line of `train`, in any order. No
document tells the same facts twice, but where a kind has fewer sets of facts than the document has lines: lists of
dates, the fewest, have 27 in `test`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from .facts import SPLITS
from .kinds import TASK_KINDS, Example, TaskKind


_MOST_REPETITIONS = 200


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
        Rows of `text`; `task`, `subject`, `pattern` and `transformation` of its examples; `answers`, the [start, end)
        of every answer in `text`, the space before it included.

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
        examples: list[Example] = []
        said: set[bytes] = set()
        for _ in range(rng.randint(*lines)):
            examples.append(_draw(kind, rng, wording, split, said))
            said.add(examples[-1].digest)
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
            "subject": kind.subject,
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


def _draw(kind: TaskKind, rng: random.Random, wording: int, split: str, said: set[bytes]) -> Example:
    """An example of a split, of facts that its document has not told yet unless there are hardly any others."""
    repetitions = 0
    while True:
        example = kind.make(rng, wording)
        if example.split == split:
            if example.digest not in said or repetitions == _MOST_REPETITIONS:
                return example
            repetitions += 1
