"""
What can be reached on the head tasks without reading the question: reference lines for every table and plot.

- **blind choice**: one of the three facts, each as probable as the others. It knows what kind of answer is asked for
  and is right once in three times; an adjective with two opposites costs a further guess.
- **lone name**: the fact of the person who is named once, or of a list the thing that is listed once; blind choice
  where there is none, or not a single one. It never reads the question.
- **odd one out**: the same, but where no name stands alone, the fact whose thing stands alone, or else whose thing is
  the only one in no group (class, capability, country) with another. The strongest such rule that we know of.

A model has to be above all three before its score says that it reads questions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from .facts import Fact, parse_line
from .kinds import TASK_KINDS
from .scoring import summarise
from .tokenizer import count_tokens
from .vocabulary import VOCABULARY, opposites, singular


BLIND_CHOICE, LONE_NAME, ODD_ONE_OUT = "blind_choice", "lone_name", "odd_one_out"
_GROUPS_OF = {"object->superclass": "superclasses", "object->capability": "capabilities", "city->country": "countries"}


def reference_summaries(documents: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """
    Expected scores of all rules.

    Args:
        documents: Rows as [`dcformer.head_tasks.generate_documents`] or [`dcformer.head_tasks.suite.authors_documents`]
            returns them.

    Returns:
        `blind_choice`, `lone_name` and `odd_one_out`, each as [`dcformer.head_tasks.scoring.summarise`] returns it.
        Perplexities are `None` but for blind choice, as the other two are certain where they are wrong; those per token
        count the tokens of [`dcformer.head_tasks.build_tokenizer`].

    Raises:
        ValueError: if a line is no example of a head task.
    """
    scores = reference_scores(documents)
    return {name: summarise(documents, scores[name]) for name in scores}


def reference_scores(documents: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """
    For every rule, a score per answer in the form of [`dcformer.head_tasks.scoring.score_documents`].

    `correct` is the probability that the rule gives the answer, and `log_likelihood` its logarithm for blind choice,
    `None` for the other two.
    """
    scores: dict[str, list[dict[str, Any]]] = {name: [] for name in _RULES}
    for index, document in enumerate(documents):
        shots = document.get("shots") or range(len(document["answers"]))
        for before, (start, end) in zip(shots, document["answers"]):
            text = document["text"]
            answer = text[start:end].strip()
            facts, question = parse_line(text[text.rfind("\n", 0, start) + 1 : end])
            probabilities = [
                _probability(answer, fact, question, TASK_KINDS[document["task"]].transformation) for fact in facts
            ]
            for name, rule in _RULES.items():
                chosen = rule(facts)
                right = math.fsum(probabilities[place] for place in chosen) / len(chosen)
                scores[name].append(
                    {
                        "document": index,
                        "shots": before,
                        "log_likelihood": math.log(right) if name == BLIND_CHOICE else None,
                        "tokens": count_tokens(answer),
                        "correct": right,
                    }
                )
    return scores


def _all(facts: Sequence[Fact]) -> list[int]:
    return list(range(len(facts)))


def _lone_name(facts: Sequence[Fact]) -> list[int]:
    """A list has no names but its things."""
    return _single([fact[0] for fact in facts]) or _all(facts)


def _odd_one_out(facts: Sequence[Fact]) -> list[int]:
    things = [fact[-1] for fact in facts]
    return _single([fact[0] for fact in facts]) or _single(things) or _single_by_group(things) or _all(facts)


_RULES: dict[str, Callable[[Sequence[Fact]], list[int]]] = {
    BLIND_CHOICE: _all,
    LONE_NAME: _lone_name,
    ODD_ONE_OUT: _odd_one_out,
}


def _single(words: Sequence[str]) -> list[int]:
    """The place of the only word that occurs once, if there is only one."""
    places = [place for place, word in enumerate(words) if words.count(word) == 1]
    return places if len(places) == 1 else []


def _single_by_group(things: Sequence[str]) -> list[int]:
    """The place of the only thing that has no group in common with another."""
    groups = [frozenset().union(*(_groups(name).get(thing, ()) for name in _GROUPS_OF.values())) for thing in things]
    places = [
        place
        for place, own in enumerate(groups)
        if not any(own & other for at, other in enumerate(groups) if at != place)
    ]
    return places if len(places) == 1 else []


def _probability(answer: str, fact: Fact, question: str, transformation: str) -> float:
    """Of the answer, if the fact is the one that is asked for; several targets are equally probable."""
    if question.startswith("Who "):
        targets = {fact[0]}
    elif transformation == "copy":
        targets = {fact[-1]}
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
