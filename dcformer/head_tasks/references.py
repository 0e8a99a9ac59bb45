"""
Rules that answer without reading the question: reference lines for every table and plot of the head tasks.

- **blind choice**: any of the three facts. It knows what kind of answer is asked for and is right once in three times;
  an adjective with two opposites costs a further guess.
- **lone name**: the fact of the person who is named once, or in a list the thing that is listed once; a blind choice
  where there is none, or not a single one.
- **odd one out**: the same, but where no name stands alone, the fact whose thing stands alone, or else whose thing is
  the only one in no group (class, capability, country) with another. The strongest such rule that we know of.

A model reads questions only if it scores above all three.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from .facts import Fact, parse_line
from .vocabulary import VOCABULARY, opposites, singular


BLIND_CHOICE, LONE_NAME, ODD_ONE_OUT = "blind_choice", "lone_name", "odd_one_out"
REFERENCES = {
    BLIND_CHOICE: "blind choice",
    LONE_NAME: "question-blind rule",
    ODD_ONE_OUT: "best question-blind rule",
}
_GROUPS_OF = {"object->superclass": "superclasses", "object->capability": "capabilities", "city->country": "countries"}


def reference_answers(question: Mapping[str, Any]) -> dict[str, float]:
    """
    Tell how probably each rule answers a question right; the mean over questions is the accuracy of the rule.

    Args:
        question: A row of [`held_out_questions`], or any mapping with `context`, `answer` and `transformation`.

    Returns:
        `blind_choice`, `lone_name` and `odd_one_out` -> probability of the right answer, 0 to 1.

    Raises:
        ValueError: if the last line of the context is no example of a head task.
    """
    answer = question["answer"].strip()
    facts, asked = parse_line(question["context"].rpartition("\n")[2] + question["answer"])
    right = [_probability(answer, fact, asked, question["transformation"]) for fact in facts]
    choices = _choices(facts).items()
    return {name: math.fsum(right[place] for place in places) / len(places) for name, places in choices}


def _choices(facts: Sequence[Fact]) -> dict[str, list[int]]:
    """Rule -> the places of the facts that it chooses from; in lists, things take the place of names."""
    things, every = [fact[-1] for fact in facts], list(range(len(facts)))
    lone = _single([fact[0] for fact in facts])
    odd = lone or _single(things) or _single_by_group(things)
    return {BLIND_CHOICE: every, LONE_NAME: lone or every, ODD_ONE_OUT: odd or every}


def _single(words: Sequence[str]) -> list[int]:
    """The place of the word that occurs once, if there is exactly one such word."""
    places = [place for place, word in enumerate(words) if words.count(word) == 1]
    return places if len(places) == 1 else []


def _single_by_group(things: Sequence[str]) -> list[int]:
    """The place of the thing that shares no group with another, if there is exactly one."""
    groups = [frozenset().union(*(_groups(name).get(thing, ()) for name in _GROUPS_OF.values())) for thing in things]
    places = [
        place
        for place, own in enumerate(groups)
        if not any(own & other for at, other in enumerate(groups) if at != place)
    ]
    return places if len(places) == 1 else []


def _probability(answer: str, fact: Fact, question: str, transformation: str) -> float:
    """Probability of the answer if this fact is chosen; several targets are equally probable."""
    if question.startswith("Who "):
        targets = frozenset({fact[0]})
    elif transformation == "copy":
        targets = frozenset({fact[-1]})
    else:
        targets = _targets(transformation, fact[-1])
    return 1 / len(targets) if answer in targets else 0.0


@cache
def _targets(transformation: str, thing: str) -> frozenset[str]:
    if transformation == "adjective->opposite":
        return frozenset(opposites().get(thing, ()))
    if transformation.startswith("ordinal->"):
        step = 1 if transformation == "ordinal->next" else -1
        rows = [ordinal["values"] for ordinal in VOCABULARY["ordinals"].values()]
        places = [(row, row.index(thing) + step) for row in rows if thing in row]
        # Before the first of a row there is nothing, and no question asks for it.
        return frozenset(row[place] for row, place in places if 0 <= place < len(row))
    return _groups(_GROUPS_OF[transformation])[thing]


@cache
def _groups(name: str) -> dict[str, frozenset[str]]:
    """Thing -> the groups of one sort that it belongs to."""
    found: dict[str, set[str]] = {}
    for group, members in VOCABULARY[name].items():
        for thing in members:
            found.setdefault(singular(thing), set()).add(group)
    return {thing: frozenset(groups) for thing, groups in found.items()}
