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

import math
from collections.abc import Mapping, Sequence, Set
from functools import cache
from itertools import pairwise
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
    every = list(range(len(facts)))
    lone = _alone([{fact[0]} for fact in facts])
    groups = [set().union(*(_targets(kind).get(fact[-1], ()) for kind in _GROUPS_OF)) for fact in facts]
    odd = lone or _alone([{fact[-1]} for fact in facts]) or _alone(groups)
    return {BLIND_CHOICE: every, LONE_NAME: lone or every, ODD_ONE_OUT: odd or every}


def _alone(sets: Sequence[Set[str]]) -> list[int]:
    """The place of the set that shares nothing with another, if there is exactly one."""
    places = [place for place, own in enumerate(sets) if sum(not own.isdisjoint(each) for each in sets) <= 1]
    return places if len(places) == 1 else []


def _probability(answer: str, fact: Fact, question: str, transformation: str) -> float:
    """Probability of the answer if this fact is chosen; several targets are equally probable."""
    if question.startswith("Who "):
        targets = {fact[0]}
    elif transformation == "copy":
        targets = {fact[-1]}
    else:
        targets = _targets(transformation)[fact[-1]]
    return 1 / len(targets) if answer in targets else 0.0


@cache
def _targets(transformation: str) -> dict[str, set[str]]:
    """Thing -> all that a transformation makes of it, which is nothing where a row of dates ends."""
    rows = [ordinal["values"] for ordinal in VOCABULARY["ordinals"].values()]
    found: dict[str, set[str]] = {value: set() for row in rows for value in row}
    pairs = [pair for row in rows for pair in pairwise(row)]
    if transformation == "adjective->opposite":
        pairs = [(one, other) for one, others in opposites().items() for other in others]
    elif transformation == "ordinal->previous":
        pairs = [(value, before) for before, value in pairs]
    elif transformation in _GROUPS_OF:
        groups = VOCABULARY[_GROUPS_OF[transformation]]
        pairs = [(singular(thing), group) for group, things in groups.items() for thing in things]
    for thing, target in pairs:
        found.setdefault(thing, set()).add(target)
    return found
