"""The words of the head tasks: people, things with their groups, opposites and rows of dates."""

import json
from functools import cache
from pathlib import Path
from typing import Any


VOCABULARY: dict[str, Any] = json.loads(Path(__file__).with_name("vocabulary.json").read_text(encoding="utf-8"))


@cache
def singular(thing: str) -> str:
    """The noun as questions have it, without an article."""
    noun = thing.removeprefix("a ").removeprefix("an ")
    return VOCABULARY["singular_of"].get(noun, noun)


@cache
def opposites() -> dict[str, list[str]]:
    """Adjective -> its opposites, of which a few have two."""
    found: dict[str, list[str]] = {}
    for one, other in VOCABULARY["opposites"]:
        found.setdefault(one, []).append(other)
        found.setdefault(other, []).append(one)
    return found
