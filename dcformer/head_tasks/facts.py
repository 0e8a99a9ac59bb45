"""
The facts that a line of the head tasks states, and the split that follows from them.

The set of a line's facts decides whether it belongs to `train`, `validation` or `test`, so all questions about the same
facts, in any order and wording, belong to one split. `authors_facts.bin` holds the digests of the facts of the authors'
888 texts, which are in no training document; `scripts/write_authors_facts.py` writes it.
"""

import hashlib
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from .vocabulary import VOCABULARY, singular


Fact = tuple[str, ...]  # (person, thing), or (thing,) in lists

SPLITS = ("train", "validation", "test")
AUTHORS_FACTS = Path(__file__).with_name("authors_facts.bin")
_DIGEST_BYTES = 8
# Lists of days, seasons or years are so few that a split may lack them by chance. With this salt, every split has lists
# of every unit: about a tenth each in `validation` and `test`, and some in `train` after the authors' are taken out.
_SALT = b"9315"
_END_OF_SENTENCE = re.compile(r"(?<!D)\. |(?<=D\.C)\. ")  # "Washington, D.C" has a stop inside
_COMMA = re.compile(r", (?!D\.C)")
_SENTENCES = tuple(
    re.compile(template.format(person=f"(?P<person>{'|'.join(VOCABULARY['people'])})", thing="(?P<thing>.+)"))
    for template in (
        "{person} (?:has|likes|is|arrived (?:on|in|at)) {thing}",
        "(?:The )?{thing} (?:is|are) {person}'s",
        "{thing} attracts {person}",
        "(?:On|In|At) {thing} arrived {person}",
        "{thing} {person}",
    )
)
_ADJECTIVES = {adjective.capitalize(): adjective for pair in VOCABULARY["opposites"] for adjective in pair}


def parse_line(line: str) -> tuple[tuple[Fact, ...], str]:
    """The facts of a line, in its order, and what follows them: the question, with its answer if the line has one."""
    if match := re.fullmatch(r"< (.+)\. >\. (.+)", line):
        facts = [_parse_sentence(sentence) for sentence in _END_OF_SENTENCE.split(match[1])]
        if all(facts):
            return tuple(fact for fact in facts if fact), match[2]
    if match := re.fullmatch(r"There are (.+?)\. (Which is .+)", line):
        return tuple((singular(thing),) for thing in _COMMA.split(match[1])), match[2]
    raise ValueError(
        f"A line of the head tasks must begin like '< Ruth has a violin. ... >. ' or 'There are a duck, a duck, tea. "
        f"Which is ', got {line!r}."
    )


def _parse_sentence(sentence: str) -> Fact | None:
    match = next(filter(None, (template.fullmatch(sentence) for template in _SENTENCES)), None)
    # "Happy Ruth": the capital letter belongs to the sentence.
    return None if match is None else (match["person"], singular(_ADJECTIVES.get(match["thing"], match["thing"])))


def facts_digest(facts: Iterable[Fact]) -> bytes:
    """Hash facts to eight bytes, the same in any order; a fact that is stated twice counts twice."""
    rows = sorted("\t".join((*fact[:-1], singular(fact[-1]))) for fact in facts)
    return hashlib.blake2b("\n".join(rows).encode(), digest_size=_DIGEST_BYTES, salt=_SALT).digest()


def split_of(digest: bytes) -> str | None:
    """
    The only split that may contain the facts of a digest: eight tenths of all sets are for training, one tenth each for
    validation and test. `None` for facts of the authors' texts that would be trained on.
    """
    split = {0: "validation", 1: "test"}.get(int.from_bytes(digest, "big") % 10, "train")
    return None if split == "train" and digest in authors_facts() else split


@cache
def authors_facts() -> frozenset[bytes]:
    """Digests of the facts of all lines of the authors' 888 texts."""
    data = AUTHORS_FACTS.read_bytes()
    return frozenset(data[i : i + _DIGEST_BYTES] for i in range(0, len(data), _DIGEST_BYTES))
