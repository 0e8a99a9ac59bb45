"""
The kinds of head tasks of section 4.3 and appendix F: what their facts say, how they are worded and asked about.

An example is one line: three facts and a question about them, such as

    < Ruth has a violin. Carol has a beetle. Ronald has blueberries. >. Ruth has a kind of musical instrument

To find the answer, the last word or words, attention has to find one of the three facts (the pattern: here the one of
the same person), and what it finds has to be transformed on the way (here object->superclass).

The authors' 74 kinds come under their numbers; `task74` is an example of Table 11 that their texts lack. Patterns are
named for what leads from the question to the fact: `same-person`; `the-other-person`, of whom the question does not
speak; `same-class`, `the-other-city` and so on where it names content and asks for the fact that has it or has it not;
`different-object` and so on where it only asks which one differs.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


VOCABULARY: dict[str, Any] = json.loads(Path(__file__).with_name("vocabulary.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Example:
    """
    One line.

    Attributes:
        question: The line up to its answer, without the space between them.
        answer: The last word or words.
        content: What the line says, without its wording.
    """

    question: str
    answer: str
    content: tuple

    @property
    def line(self) -> str:
        return f"{self.question} {self.answer}"

    @property
    def split(self) -> str:
        """Eight tenths of all that can be said are for training, one each for validation and test."""
        bucket = hashlib.blake2b(repr(self.content).encode()).digest()[0] % 10
        return {0: "validation", 1: "test"}.get(bucket, "train")


@dataclass(frozen=True)
class TaskKind:
    """
    A kind of task.

    Attributes:
        name: `task0` to `task73` as the authors number them; `task74`.
        pattern: What attention has to look for.
        transformation: What becomes of what it finds: `copy` or `source->target`.
        make: Draws an example; takes the random state and the number of a wording.
    """

    name: str
    pattern: str
    transformation: str
    make: Callable[[random.Random, int], Example]


@dataclass(frozen=True)
class Content:
    """
    What a fact says of a person or lists: "a violin", "Paris", "happy", "May".

    Attributes:
        thing: As it stands in the fact, with its article.
        target: What the thing is transformed to; for `copy`, the thing as the question has it.
        unit: For ordinals "year", "month" ...
    """

    thing: str
    target: str
    unit: str = ""


# Draws three contents with different targets; if told that two agree, the first two have the same target.
Draw = Callable[[random.Random, bool], list[Content]]


@dataclass(frozen=True)
class Family:
    """
    Facts about people and the questions about them: eight kinds, four patterns in two wordings of the facts.

    Attributes:
        transformation: From the content of a fact to what the question calls it.
        target_name: What the patterns call the latter.
        draw: Draws the contents.
        statements: The two wordings of a fact.
        verbs: (affirmative, negative) in the question.
        phrase: What follows the verb, with `{target}` at its end, and `{unit}` for ordinals.
    """

    transformation: str
    target_name: str
    draw: Draw
    statements: tuple[Callable[[str, Content], str], Callable[[str, Content], str]]
    verbs: tuple[tuple[str, str], ...]
    phrase: str

    def kinds(self) -> Iterator[tuple[str, str, Callable]]:
        """(pattern, transformation, make) of the eight kinds, in the authors' order."""
        for by_person in (True, False):
            for negated in (True, False):
                shared = "person" if by_person else self.target_name
                for statement in self.statements:
                    yield (
                        f"{'the-other' if negated else 'same'}-{shared}",
                        self.transformation if by_person else "copy",
                        self._maker(statement, by_person, negated),
                    )

    def _maker(self, statement: Callable, by_person: bool, negated: bool) -> Callable[[random.Random, int], Example]:
        def make(rng: random.Random, wording: int) -> Example:
            # The last of the three is the one asked for; those that stand together against it come first.
            people = rng.sample(VOCABULARY["people"], 3)
            contents = self.draw(rng, negated and not by_person)
            if negated and by_person:
                people[1] = people[0]
            verb = self.verbs[wording % len(self.verbs)][negated]
            known = 0 if negated else 2
            phrase = self.phrase.format(target=contents[2 if by_person else known].target, unit=contents[2].unit)
            if by_person:
                answer = contents[2].target
                question = f"{people[known]} {verb} {phrase}".removesuffix(f" {answer}")
            else:
                answer = people[2]
                question = f"Who {verb} {phrase}?"
            facts = list(zip(people, contents))
            rng.shuffle(facts)
            told = " ".join(statement(person, content) for person, content in facts)
            content = tuple((person, content.thing) for person, content in facts)
            return Example(f"< {told} >. {question}", answer, (content, by_person, negated, phrase))

        return make


def _list_maker(draw: Draw, named: str | None, lead: str, copies: bool = False) -> Callable:
    """
    Questions about a list of three: "There are a duck, a duck, tea. Which is different? A kind of drink".

    Args:
        draw: Draws the contents; the first is listed twice unless it has another of its kind in `named="class"`.
        named (`"thing"`, `"class"` or None): What the question calls those that are not asked for.
        lead: What stands before the answer.
        copies: The answer is the thing itself.
    """

    def make(rng: random.Random, wording: int) -> Example:
        first, second, asked = draw(rng, named == "class")
        listed = [first, second if named == "class" else first, asked]
        rng.shuffle(listed)
        which = {None: "different", "thing": f"not {_singular(first.thing)}", "class": f"not {first.target}"}[named]
        things = tuple(content.thing for content in listed)
        question = f"There are {', '.join(things)}. Which is {which}? {lead.format(unit=asked.unit)}".rstrip()
        return Example(question, _singular(asked.thing) if copies else asked.target, (things, lead, named == "class"))

    return make


def _noun(thing: str) -> str:
    return thing.removeprefix("a ").removeprefix("an ")


def _singular(thing: str) -> str:
    """The noun as questions have it."""
    return VOCABULARY["singular_of"].get(_noun(thing), _noun(thing))


def _members(groups: dict[str, list[str]]) -> Draw:
    """Draw things with the group they belong to: a class, a capability, a country."""

    def draw(rng: random.Random, two_agree: bool) -> list[Content]:
        while True:
            names = rng.sample(sorted(groups), 3)
            if two_agree:
                names[1] = names[0]
            things = [rng.choice(groups[name]) for name in names]
            # A thing of two groups in question, or the same thing twice, would make two answers right.
            owned = [sum(thing in groups[name] for name in set(names)) for thing in things]
            if len(set(things)) == 3 and owned == [1, 1, 1]:
                return [Content(thing, name) for thing, name in zip(things, names)]

    return draw


def _copies(groups: dict[str, list[str]]) -> Draw:
    """Draw things that are asked for as they are."""
    things = sorted({thing for members in groups.values() for thing in members})

    def draw(rng: random.Random, two_agree: bool) -> list[Content]:
        drawn = rng.sample(things, 3)
        if two_agree:
            drawn[1] = drawn[0]
        return [Content(thing, _singular(thing)) for thing in drawn]

    return draw


@cache
def _opposites() -> dict[str, list[str]]:
    opposites: dict[str, list[str]] = {}
    for one, other in VOCABULARY["opposites"]:
        opposites.setdefault(one, []).append(other)
        opposites.setdefault(other, []).append(one)
    return opposites


def _adjectives(rng: random.Random, two_agree: bool) -> list[Content]:
    opposites = _opposites()
    while True:
        drawn = rng.sample(sorted(opposites), 3)
        targets = [rng.choice(opposites[adjective]) for adjective in drawn]
        # Neither opposites nor synonyms (which have an opposite in common) beside each other.
        related = [{adjective, *opposites[adjective]} for adjective in drawn]
        if not (related[0] & related[1] or related[0] & related[2] or related[1] & related[2]):
            break
    if two_agree:
        drawn[1], targets[1] = drawn[0], targets[0]
    return [Content(adjective, target) for adjective, target in zip(drawn, targets)]


def _ordinals(step: int) -> Draw:
    """Draw dates or times of one sort, with the next or the one before as target."""

    def draw(rng: random.Random, two_agree: bool) -> list[Content]:
        unit = rng.choice(sorted(VOCABULARY["ordinals"]))
        values = VOCABULARY["ordinals"][unit]["values"]
        # The last of a row is a target only, as nothing comes after it; before the first comes nothing either.
        places = rng.sample(range(len(values) - 1), 3)
        while places[2] + step < 0:
            rng.shuffle(places)
        if two_agree:
            places[1] = places[0]
        return [Content(values[place], values[max(place + step, 0)], unit) for place in places]

    return draw


def _owns(person: str, content: Content) -> str:
    return f"{person} has {content.thing}."


def _is_owned(person: str, content: Content) -> str:
    noun = _singular(content.thing)
    article = "" if noun in VOCABULARY["without_article"] else "The "
    return f"{article}{noun} {'are' if noun in VOCABULARY['plural_nouns'] else 'is'} {person}'s."


def _likes(person: str, content: Content) -> str:
    return f"{person} likes {content.thing}."


def _attracts(person: str, content: Content) -> str:
    return f"{content.thing} attracts {person}."


def _is(person: str, content: Content) -> str:
    return f"{person} is {content.thing}."


def _adjective_first(person: str, content: Content) -> str:
    return f"{content.thing.capitalize()} {person}."


def _arrived(person: str, content: Content) -> str:
    return f"{person} arrived {VOCABULARY['ordinals'][content.unit]['preposition']} {content.thing}."


def _date_first(person: str, content: Content) -> str:
    return f"{VOCABULARY['ordinals'][content.unit]['preposition'].capitalize()} {content.thing} arrived {person}."


_OWN = (("has", "does not have"), ("possesses", "does not possess"), ("owns", "does not own"))
_WISH = (
    ("wants to go to", "does not want to go to"),
    ("wants to visit", "does not want to visit"),
    ("longs for", "does not long for"),
    ("yearns for", "does not yearn for"),
)
_ARRIVE = (("arrived", "did not arrive"), ("appeared", "did not appear"), ("showed up", "did not show up"))

_OBJECTS, _TOOLS, _CITIES = (VOCABULARY[name] for name in ("superclasses", "capabilities", "countries"))
_FAMILIES = (
    Family("object->superclass", "class", _members(_OBJECTS), (_owns, _is_owned), _OWN, "a kind of {target}"),
    Family("copy", "object", _copies(_OBJECTS), (_owns, _is_owned), _OWN, "{target}"),
    Family("city->country", "country", _members(_CITIES), (_likes, _attracts), _WISH, "the city in {target}"),
    Family("copy", "city", _copies(_CITIES), (_likes, _attracts), _WISH, "{target}"),
    Family(
        "object->capability", "capability", _members(_TOOLS), (_owns, _is_owned), _OWN, "the thing that can {target}"
    ),
    Family(
        "adjective->opposite",
        "opposite",
        _adjectives,
        (_is, _adjective_first),
        (("is", "is not"),),
        "the opposite of {target}",
    ),
    Family(
        "ordinal->next", "ordinal", _ordinals(1), (_arrived, _date_first), _ARRIVE, "the {unit} just before {target}"
    ),
)


def _list_kinds() -> Iterator[tuple[str, str, Callable]]:
    both = ("thing", None)
    for content_name, groups, lead, transformation, target_lead in (
        ("object", _OBJECTS, "The", "object->superclass", "A kind of"),
        ("city", _CITIES, "", "city->country", "The city in"),
        ("object", _TOOLS, "The", "object->capability", "The thing that can"),
    ):
        patterns = [(f"the-other-{content_name}", "thing"), (f"different-{content_name}", None)]
        for pattern, named in patterns:
            yield pattern, "copy", _list_maker(_copies(groups), named, lead, copies=True)
        for pattern, named in patterns:
            yield pattern, transformation, _list_maker(_members(groups), named, target_lead)
    for content_name, draw, transformation, lead in (
        ("adjective", _adjectives, "adjective->opposite", "The opposite of"),
        ("ordinal", _ordinals(1), "ordinal->next", "The {unit} just before"),
        ("ordinal", _ordinals(-1), "ordinal->previous", "The {unit} just after"),
    ):
        for pattern, named in zip((f"the-other-{content_name}", f"different-{content_name}"), both):
            yield pattern, transformation, _list_maker(draw, named, lead)
    yield "the-other-class", "copy", _list_maker(_members(_OBJECTS), "class", "The", copies=True)


TASK_KINDS = {
    f"task{number}": TaskKind(f"task{number}", *kind)
    for number, kind in enumerate([kind for family in _FAMILIES for kind in family.kinds()] + list(_list_kinds()))
}
