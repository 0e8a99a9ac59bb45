"""
What a line of the head tasks says, whatever its wording, order and question; and the split that follows from it.

The facts of a line are pairs of a person and a thing, or for lists the things alone. As a set they decide whether the
line belongs to `train`, `validation` or `test`, so that everything that can be asked about the same facts, in any order
and wording, belongs to one split. `authors_facts.bin` holds the digests of the facts of the authors' 888 texts, which
are in no training document; `scripts/write_authors_facts.py` writes it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from .vocabulary import VOCABULARY, singular


# A person and a thing, or of a list a thing alone.
Fact = tuple[str, ...]

SPLITS = ("train", "validation", "test")
_DIGEST_BYTES = 8
# Lists of days, seasons or years are so few that chance would leave a split without them: of the numbers from 0 on, the
# second with which every split has lists of every unit, near to a tenth in `validation` and in `test`, and in `train`
# also after the authors' are taken out.
_SALT = b"9315"
AUTHORS_FACTS = Path(__file__).with_name("authors_facts.bin")

# "Washington, D.C" has a stop inside.
_END_OF_SENTENCE = re.compile(r"(?<!D)\. |(?<=D\.C)\. ")
_COMMA = re.compile(r", (?!D\.C)")
_PEOPLE = "|".join(VOCABULARY["people"])
_SENTENCES = tuple(
    re.compile(form.format(person=f"(?P<person>{_PEOPLE})", thing="(?P<thing>.+)"))
    for form in (
        "{person} (?:has|likes|is|arrived (?:on|in|at)) {thing}",
        "(?:The )?{thing} (?:is|are) {person}'s",
        "{thing} attracts {person}",
        "(?:On|In|At) {thing} arrived {person}",
        "{thing} {person}",
    )
)


def parse_line(line: str) -> tuple[tuple[Fact, ...], str]:
    """
    The facts of a line, in its order, and what follows them: the question with its answer, if the line has one.

    Args:
        line: As `< Ruth has a violin. Carol has tea. Mark has jeans. >. Who has tea? Carol`, or as `There are a duck,
            a duck, tea. Which is different? The tea`. Things are returned in their singular and without article.

    Raises:
        ValueError: if it is neither.
    """
    told = re.fullmatch(r"< (?P<told>.+)\. >\. (?P<question>.+)", line)
    listed = re.fullmatch(r"There are (?P<told>.+?)\. (?P<question>Which is .+)", line)
    if told:
        facts = [_parse_sentence(sentence) for sentence in _END_OF_SENTENCE.split(told["told"])]
        if all(facts):
            return tuple(fact for fact in facts if fact), told["question"]
    if listed:
        return tuple((singular(thing),) for thing in _COMMA.split(listed["told"])), listed["question"]
    raise ValueError(
        f"{line!r} is no line of the head tasks; it must begin like '< Ruth has a violin. ... >. ' or 'There are a "
        "duck, a duck, tea. Which is '."
    )


def _parse_sentence(sentence: str) -> Fact | None:
    for form in _SENTENCES:
        if match := form.fullmatch(sentence):
            thing = match["thing"]
            # "Happy Ruth": the capital letter belongs to the sentence.
            return match["person"], singular(_ADJECTIVES.get(thing, thing))
    return None


_ADJECTIVES = {adjective.capitalize(): adjective for pair in VOCABULARY["opposites"] for adjective in pair}


def facts_digest(facts: Iterable[Fact]) -> bytes:
    """
    Eight bytes that stand for what a line says: the same for every order of the same facts.

    Args:
        facts: Pairs of a person and a thing, or of a list its things, each as a tuple of one; what stands twice counts
            twice.
    """
    said = sorted("\t".join((*fact[:-1], singular(fact[-1]))) for fact in facts)
    return hashlib.blake2b("\n".join(said).encode(), digest_size=_DIGEST_BYTES, salt=_SALT).digest()


def split_of(digest: bytes) -> str | None:
    """
    The only split that may say some facts, `None` if the authors' texts say them and it would be `train`.

    Eight tenths of all sets of facts are for training, one each for validation and test.

    Args:
        digest: Of the facts, by [`facts_digest`].
    """
    split = {0: "validation", 1: "test"}.get(int.from_bytes(digest, "big") % 10, "train")
    return None if split == "train" and digest in authors_facts() else split


@cache
def authors_facts() -> frozenset[bytes]:
    """Digests of the facts of all lines of the authors' 888 texts."""
    data = AUTHORS_FACTS.read_bytes()
    return frozenset(data[i : i + _DIGEST_BYTES] for i in range(0, len(data), _DIGEST_BYTES))
