"""
Documents of head tasks, generated from a seed.

A document is a few examples of one kind, so that the earlier ones are shots for the later ones, as in the authors' 888
texts. It repeats a set of facts only if its kind has fewer sets than the document has lines: lists of dates, which have
the fewest, have 27 in `test`.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any

from .facts import SPLITS, split_of
from .kinds import TASK_KINDS, Example, TaskKind


_ABOUT_KIND = ("subject", "pattern", "transformation")
_MOST_REPETITIONS = 200


def iterate_documents(
    count: int,
    seed: int | str,
    split: str = "train",
    lines: Sequence[int] = (1, 8),
    kinds: Sequence[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """
    Yield documents one at a time; the first n of a larger count are those of count n.

    Args:
        count: Number of documents.
        seed: Another seed gives other documents.
        split: `"train"`, `"validation"` or `"test"`.
        lines: Least and most examples in a document, all of one kind and with one verb.
        kinds: Names such as `("task0", "task74")`, which take turns in a random order; all kinds by default.

    Yields:
        Rows of `text`; `task`, `subject`, `pattern` and `transformation` of its examples; `answers`, the [start, end)
        of every answer in `text`, with the space before it.

    Raises:
        ValueError: for an unknown split; KeyError: for an unknown kind.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}; got {split!r}.")
    chosen = list(kinds or TASK_KINDS)
    rng = random.Random(f"{split} {seed}")
    waiting: list[str] = []
    for _ in range(count):
        waiting = waiting or rng.sample(chosen, len(chosen))
        name = waiting.pop()
        kind = TASK_KINDS[name]
        wording = rng.randrange(60)  # a multiple of 3, 4 and 5, so that each of so many verbs is equally frequent
        examples: list[Example] = []
        for _ in range(rng.randint(*lines)):
            examples.append(_sample(kind, rng, wording, split, {example.digest for example in examples}))
        # The authors' texts begin with a line feed; a prompt that a person types does not.
        text, answers = join_examples(examples, rng.choice(("", "\n")))
        about = {"task": name} | {key: getattr(kind, key) for key in _ABOUT_KIND}
        yield {"text": text, **about, "answers": answers}


def generate_documents(count: int, seed: int | str, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
    """The documents of [`iterate_documents`], which has the same arguments, as a list."""
    return list(iterate_documents(count, seed, *args, **kwargs))


def held_out_questions(documents: int = 1000, seed: int = 1234) -> list[dict[str, Any]]:
    """
    Generate the questions that models are evaluated on: of so many documents of the test split with eight examples.

    Returns:
        A row for every answer, in the order of the documents: `context` (all the text before the answer), `answer`
        (with the space before it), `document` (its index), `shots` (examples before it in the document), `task`,
        `subject`, `pattern` and `transformation`.
    """
    return [
        {
            "context": document["text"][:start],
            "answer": document["text"][start:end],
            "document": index,
            "shots": shots,
            **{key: document[key] for key in ("task", *_ABOUT_KIND)},
        }
        for index, document in enumerate(iterate_documents(documents, seed, split="test", lines=(8, 8)))
        for shots, (start, end) in enumerate(document["answers"])
    ]


def join_examples(examples: list[Example], text: str = "") -> tuple[str, list[list[int]]]:
    """The text followed by one example per line, and the [start, end) of every answer in it."""
    answers = []
    for example in examples:
        start = len(text) + len(example.question)
        text += example.line
        answers.append([start, len(text)])
        text += "\n"
    return text, answers


def _sample(kind: TaskKind, rng: random.Random, wording: int, split: str, used: set[bytes]) -> Example:
    """Sample an example of a split, with facts that are not yet used unless there are hardly any others."""
    repetitions = 0
    while True:
        example = kind.make(rng, wording)
        if split_of(example.digest) == split:
            if example.digest not in used or repetitions == _MOST_REPETITIONS:
                return example
            repetitions += 1
