"""
Practice documents, from which models learn to read the question sooner than from the tasks alone.

A line of the tasks has one answer in about 24 tokens, which takes several skills at once: models stay at a blind choice
among the three facts for millions of answers. A mixture of these documents shortens this:

- `recurring_words`: a few words repeated in one order, "Ruth Carol Mark Ruth Carol Mark ...". All words after the first
  of four rounds are answers. It teaches to look for what followed the same word.
- `recurring_facts`: a few facts, repeated in one wording or the other, "Ruth has a violin. ... The violin is Ruth's.".
  From the second time on, the person or thing that ends a sentence is an answer. It teaches to look for one half of a
  fact by the other.
- `questions`: one, two or three facts, with two questions for each, by its person and by its content; one answer in
  about twelve tokens.
- `examples`: documents of the tasks.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

from .facts import facts_digest, split_of
from .generator import iterate_documents, join_examples
from .kinds import FAMILIES
from .tokenizer import build_tokenizer, count_tokens
from .vocabulary import VOCABULARY, singular


FORMS = ("examples", "questions", "recurring_facts", "recurring_words")

_RECURRING_WORDS = (3, 12)  # least and most in a document
_ROUNDS = 4
_RECURRING_FACTS = (2, 6)
_REPETITIONS = 3  # of a fact, on average
_LAST_WORD = re.compile(r" [^ ]+?(?=('s)?\.$)")


def iterate_practice(
    count: int,
    seed: int | str,
    mixture: Mapping[str, float],
    split: str = "train",
    lines: Sequence[int] = (1, 8),
    longest: int = 96,
    words: int | None = None,
    facts: int = 3,
) -> Iterator[dict[str, Any]]:
    """
    Generate a mixture of documents up to a length.

    Args:
        count, seed, split, lines: As of [`iterate_documents`]; `lines` applies to `examples`.
        mixture: Names of `FORMS` with their shares of the documents, in any unit.
        longest: Most tokens of a document, with the one that begins it. Lines and words beyond are left out, except the
            first line.
        words: Sample recurring words from the first so many only, which are names; from all by default.
        facts: Number of facts of `questions`, 1 to 3.

    Yields:
        Rows of `text` and `answers`, the [start, end) of every answer in `text`, with the space before it.

    Raises:
        ValueError: for an unknown form, or another number of facts.
    """
    if not set(mixture) <= set(FORMS):
        raise ValueError(f"mixture must give shares to some of {', '.join(FORMS)}, got {dict(mixture)!r}.")
    if facts not in (1, 2, 3):
        raise ValueError(f"facts must be 1, 2 or 3, got {facts!r}.")
    rng = random.Random(f"practice {split} {seed}")
    examples = iterate_documents(count, seed, split, lines)
    for _ in range(count):
        form = rng.choices(list(mixture), list(mixture.values()))[0]
        if form == "examples":
            document = next(examples)
            yield _cut(document["text"], document["answers"], longest)
        elif form == "questions":
            yield _questions(rng, split, longest, facts)
        elif form == "recurring_facts":
            yield _recurring_facts(rng, split, longest)
        else:
            yield _recurring_words(rng, longest, words)


def _questions(rng: random.Random, split: str, longest: int, facts: int) -> dict[str, Any]:
    family = rng.choice(FAMILIES)
    examples = family.make_questions(rng, facts)
    # Fewer facts than three decide no split, since a line of the tasks has three.
    while facts == 3 and split_of(examples[0].digest) != split:
        examples = family.make_questions(rng, facts)
    return _cut(*join_examples(examples), longest)


def _recurring_facts(rng: random.Random, split: str, longest: int) -> dict[str, Any]:
    family, count = rng.choice(FAMILIES), rng.randint(*_RECURRING_FACTS)
    statements = family.make_statements(rng, count)
    while count == 3 and split_of(facts_digest(statements)) != split:  # as for questions
        statements = family.make_statements(rng, count)
    text, answers, facts = "", [], list(statements.values())
    for index, wordings in enumerate(facts + rng.choices(facts, k=_REPETITIONS * count)):
        sentence = rng.choice(wordings)
        if index >= count and (word := _LAST_WORD.search(sentence)):
            answers.append([len(text) + word.start(), len(text) + word.end()])
        text += f"{sentence}\n"
    return _cut(text, answers, longest)


def _recurring_words(rng: random.Random, longest: int, count: int | None) -> dict[str, Any]:
    pool = _single_words()[:count]
    least, most = _RECURRING_WORDS
    sample = rng.sample(pool, rng.randint(min(len(pool), least), min(len(pool), longest - 2, most)))
    text = " ".join((sample * _ROUNDS)[: longest - 1])
    return {"text": text, "answers": [[len(" ".join(sample)), len(text)]]}


@cache
def _single_words() -> list[str]:
    """The names, then nouns, then all other words of one token."""
    nouns = (singular(thing) for things in VOCABULARY["superclasses"].values() for thing in things)
    words = dict.fromkeys([*VOCABULARY["people"], *sorted(nouns), *sorted(build_tokenizer().get_vocab())])
    return [word for word in words if word.isalpha() and count_tokens(word) == 1]


def _cut(text: str, answers: list[list[int]], longest: int) -> dict[str, Any]:
    """Keep the first whole lines, `longest` tokens at most but at least one line."""
    lines = text.splitlines(keepends=True)
    tokens = accumulate(map(count_tokens, lines), initial=1)
    fitting = sum(total <= longest for total in tokens) - 1
    kept = "".join(lines[: max(fitting, 2 if text.startswith("\n") else 1)])
    return {"text": kept, "answers": [span for span in answers if span[1] <= len(kept)]}
