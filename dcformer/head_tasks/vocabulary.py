"""The words of the head tasks: people, things and their groups, opposites, rows of dates."""

import json
from functools import cache
from pathlib import Path
from typing import Any


VOCABULARY: dict[str, Any] = json.loads(Path(__file__).with_name("vocabulary.json").read_text(encoding="utf-8"))


@cache
def singular(thing: str) -> str:
    """The noun as it is in questions, without an article."""
    noun = thing.removeprefix("a ").removeprefix("an ")
    return VOCABULARY["singular_of"].get(noun, noun)


@cache
def opposites() -> dict[str, list[str]]:
    """Adjective -> its opposites, of which a few have two."""
    by_adjective: dict[str, list[str]] = {}
    for pair in VOCABULARY["opposites"]:
        for adjective, opposite in (pair, pair[::-1]):
            by_adjective.setdefault(adjective, []).append(opposite)
    return by_adjective
