"""
Rules that answer without reading the question; a model reads questions only if it scores above all three.

- **blind choice**: any of the three facts, with the kind of answer that is asked for. It is right once in three times;
  an adjective with two opposites costs a further guess.
- **lone name**: the fact of the only person who is named once, or in a list the only thing that is listed once; if
  there is none, a blind choice.
- **odd one out**: the same, but if no name is alone, the fact of the only thing that is named once, or else of the only
  thing that shares no group (class, capability, country) with another. The strongest such rule that we know of.
"""

import math
from collections.abc import Mapping, Sequence, Set
from functools import cache
from itertools import pairwise
from typing import Any

from .facts import Fact, parse_line
from .vocabulary import VOCABULARY, opposites, singular


BLIND_CHOICE, LONE_NAME, ODD_ONE_OUT = "blind_choice", "lone_name", "odd_one_out"
REFERENCES = {BLIND_CHOICE: "blind choice", LONE_NAME: "question-blind rule", ODD_ONE_OUT: "best question-blind rule"}
_GROUPS_OF = {"object->superclass": "superclasses", "object->capability": "capabilities", "city->country": "countries"}


def reference_answers(question: Mapping[str, Any]) -> dict[str, float]:
    """
    The probability that `blind_choice`, `lone_name` and `odd_one_out` answer a question right; its mean over questions
    is the accuracy of the rule. ValueError if the last line of the context is no example of a head task.

    Args:
        question: A row of [`held_out_questions`], or any mapping with `context`, `answer` and `transformation`.
    """
    answer = question["answer"].strip()
    facts, asked = parse_line(question["context"].rpartition("\n")[2] + question["answer"])
    right = [_probability(answer, fact, asked, question["transformation"]) for fact in facts]
    choices = _choices(facts).items()
    return {name: math.fsum(right[index] for index in indices) / len(indices) for name, indices in choices}


def _choices(facts: Sequence[Fact]) -> dict[str, list[int]]:
    """Rule -> the indices of the facts that it chooses from; in lists, things count as names."""
    all_facts, lone = list(range(len(facts))), _alone([{fact[0]} for fact in facts])
    groups = [set().union(*(_targets(kind).get(fact[-1], ()) for kind in _GROUPS_OF)) for fact in facts]
    odd = lone or _alone([{fact[-1]} for fact in facts]) or _alone(groups)
    return {BLIND_CHOICE: all_facts, LONE_NAME: lone or all_facts, ODD_ONE_OUT: odd or all_facts}


def _alone(sets: Sequence[Set[str]]) -> list[int]:
    """The index of the set that shares nothing with another, if there is exactly one."""
    alone = [index for index, items in enumerate(sets) if sum(not items.isdisjoint(other) for other in sets) <= 1]
    return alone if len(alone) == 1 else []


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
    """Thing -> all that a transformation makes of it: nothing at the end of a row of dates."""
    rows = [ordinal["values"] for ordinal in VOCABULARY["ordinals"].values()]
    targets: dict[str, set[str]] = {value: set() for row in rows for value in row}
    pairs = [pair for row in rows for pair in pairwise(row)]
    if transformation == "adjective->opposite":
        pairs = [(one, other) for one, others in opposites().items() for other in others]
    elif transformation == "ordinal->previous":
        pairs = [(value, before) for before, value in pairs]
    elif transformation in _GROUPS_OF:
        groups = VOCABULARY[_GROUPS_OF[transformation]]
        pairs = [(singular(thing), group) for group, things in groups.items() for thing in things]
    for thing, target in pairs:
        targets.setdefault(thing, set()).add(target)
    return targets
