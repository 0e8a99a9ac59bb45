"""
The kinds of head tasks of section 4.3 and appendix F: their facts, wordings and questions.

An example is one line: three facts and a question about them, such as

    < Ruth has a violin. Carol has a beetle. Ronald has blueberries. >. Ruth has a kind of musical instrument

To find the answer, the last word or words, attention has to find one of the three facts (the pattern: here the one of
the same person), and has to transform what it finds on the way (here object->superclass).

The authors' 74 kinds have their numbers; `task74` is an example of Table 11 that their texts lack. A pattern is named
for what leads from the question to the fact: `same-person`; `the-other-person`, whom the question does not name;
`same-class`, `the-other-city` and so on where it names content and asks for the fact that has it or lacks it;
`different-object` and so on where it only asks which one differs.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product

from .facts import Fact, facts_digest
from .vocabulary import VOCABULARY, opposites, singular


@dataclass(frozen=True)
class Example:
    """One line."""

    question: str  # up to the answer, without the space between them
    answer: str
    facts: tuple[Fact, ...]  # in the order of the line

    @property
    def line(self) -> str:
        return f"{self.question} {self.answer}"

    @cached_property
    def digest(self) -> bytes:
        return facts_digest(self.facts)


# Draws an example from the random state and the number of a wording.
Make = Callable[[random.Random, int], Example]


@dataclass(frozen=True)
class TaskKind:
    name: str  # `task0` to `task73` as the authors number them; `task74`
    pattern: str  # what attention has to look for
    transformation: str  # what it makes of what it finds: `copy` or `source->target`
    make: Make

    @property
    def subject(self) -> str:
        """`persons` or `lists`: what the facts are about."""
        return "lists" if int(self.name.removeprefix("task")) >= _FIRST_LIST else "persons"


@dataclass(frozen=True)
class Content:
    """The thing of a fact: "a violin", "Paris", "happy", "May"."""

    thing: str  # as the fact has it, with its article
    target: str  # what it is transformed to; for `copy`, the thing as the question has it
    unit: str = ""  # of ordinals: "year", "month" ...


# Draws three contents with different targets; if told that two agree, the first two have the same target.
Draw = Callable[[random.Random, bool], list[Content]]


@dataclass(frozen=True)
class Family:
    """Facts about people and the questions about them: eight kinds, four patterns in two wordings of the facts."""

    transformation: str  # from the content of a fact to what the question calls it
    target_name: str  # what the patterns call the latter
    draw: Draw
    statements: tuple[str, str]  # the two wordings of a fact, see `_state`
    verbs: tuple[tuple[str, str], ...]  # (affirmative, negative) in the question
    phrase: str  # what follows the verb, with `{target}` at its end, and `{unit}` for ordinals

    def kinds(self) -> Iterator[tuple[str, str, Make]]:
        """Yield (pattern, transformation, make) of the eight kinds, in the authors' order."""
        for by_person, negated, statement in product((True, False), (True, False), self.statements):
            pattern = f"{'the-other' if negated else 'same'}-{'person' if by_person else self.target_name}"
            make = partial(self._make, by_person, negated, statement)
            yield pattern, self.transformation if by_person else "copy", make

    def _make(self, by_person: bool, negated: bool, statement: str, rng: random.Random, wording: int) -> Example:
        # The last of the three is the one asked for; those that stand together against it come first.
        facts = self._draw_facts(rng, negated and by_person, negated and not by_person)
        question, answer = self._ask(by_person, negated, facts[0 if negated else 2], facts[2], wording)
        rng.shuffle(facts)
        return Example(f"{_told(facts, statement)} {question}", answer, _said(facts))

    def make_questions(self, rng: random.Random, facts: int = 3) -> list[Example]:
        """
        Ask for each of 1 to 3 different facts by its person and by its content, in a drawn order.

        The line of the first example tells the facts, those of the others ask only.
        """
        told = self._draw_facts(rng)[:facts]
        asked = [
            self._ask(by_person, False, fact, fact, rng.randrange(len(self.verbs)))
            for fact, by_person in product(told, (True, False))
        ]
        rng.shuffle(asked)
        rng.shuffle(told)
        facts_told = _told(told, rng.choice(self.statements))
        return [
            Example(question if place else f"{facts_told} {question}", answer, _said(told))
            for place, (question, answer) in enumerate(asked)
        ]

    def make_statements(self, rng: random.Random, facts: int) -> dict[Fact, tuple[str, str]]:
        """Draw 1 to 6 facts of different persons and contents; return fact -> its two wordings."""
        told: dict[str, tuple[str, Content]] = {}  # by what a question calls the content
        while len(told) < facts:
            for person, content in self._draw_facts(rng):
                if content.target not in told and all(person != other for other, _ in told.values()):
                    told[content.target] = (person, content)
        kept = list(told.values())[:facts]
        first, second = self.statements
        return {fact: (_state(first, *said), _state(second, *said)) for fact, said in zip(_said(kept), kept)}

    def _draw_facts(
        self, rng: random.Random, same_person: bool = False, same_content: bool = False
    ) -> list[tuple[str, Content]]:
        """Draw three facts; the first two may have the same person, or contents of the same target."""
        people = rng.sample(VOCABULARY["people"], 3)
        contents = self.draw(rng, same_content)
        if same_person:
            people[1] = people[0]
        return list(zip(people, contents))

    def _ask(
        self, by_person: bool, negated: bool, named: tuple[str, Content], asked: tuple[str, Content], wording: int
    ) -> tuple[str, str]:
        """Name the person or the content of one fact in a question; the answer is from the fact asked for."""
        verb = self.verbs[wording % len(self.verbs)][negated]
        target = (asked if by_person else named)[1].target
        phrase = self.phrase.format(target=target, unit=asked[1].unit)
        if by_person:
            return f"{named[0]} {verb} {phrase}".removesuffix(f" {target}"), target
        return f"Who {verb} {phrase}?", asked[0]


def _state(template: str, person: str, content: Content) -> str:
    """Word a fact, as "Ruth has a violin." or "The violin is Ruth's."."""
    noun = singular(content.thing)
    on = VOCABULARY["ordinals"][content.unit]["preposition"] if content.unit else ""
    return template.format(
        person=person,
        thing=content.thing,
        capital_thing=content.thing.capitalize(),
        the_noun=noun if noun in VOCABULARY["without_article"] else f"The {noun}",
        be="are" if noun in VOCABULARY["plural_nouns"] else "is",
        on=on,
        capital_on=on.capitalize(),
    )


def _told(facts: list[tuple[str, Content]], statement: str) -> str:
    return f"< {' '.join(_state(statement, person, content) for person, content in facts)} >."


def _said(facts: list[tuple[str, Content]]) -> tuple[Fact, ...]:
    return tuple((person, content.thing) for person, content in facts)


def _make_list(draw: Draw, named: str | None, lead: str, copies: bool, rng: random.Random, wording: int) -> Example:
    """
    Ask about a list of three: "There are a duck, a duck, tea. Which is different? A kind of drink".

    `named` is what the question calls those that it does not ask for: the `"thing"` that is listed twice, the `"class"`
    of two things, or nothing. `lead` stands before the answer, which is the thing itself if `copies`.
    """
    first, second, asked = draw(rng, named == "class")
    listed = [first, second if named == "class" else first, asked]
    rng.shuffle(listed)
    which = {None: "different", "thing": f"not {singular(first.thing)}", "class": f"not {first.target}"}[named]
    things = tuple(content.thing for content in listed)
    question = f"There are {', '.join(things)}. Which is {which}? {lead.format(unit=asked.unit)}".rstrip()
    return Example(question, singular(asked.thing) if copies else asked.target, tuple((thing,) for thing in things))


def _members(groups: dict[str, list[str]], rng: random.Random, two_agree: bool) -> list[Content]:
    """Draw things with the group they belong to: a class, a capability or a country."""
    while True:
        names = rng.sample(sorted(groups), 3)
        if two_agree:
            names[1] = names[0]
        things = [rng.choice(groups[name]) for name in names]
        # A thing of two groups in question, or the same thing twice, would make two answers right.
        owned = [sum(thing in groups[name] for name in set(names)) for thing in things]
        if len(set(things)) == 3 and owned == [1, 1, 1]:
            return [Content(thing, name) for thing, name in zip(things, names)]


def _copies(groups: dict[str, list[str]], rng: random.Random, two_agree: bool) -> list[Content]:
    """Draw things that questions name as they are."""
    drawn = rng.sample(sorted({thing for members in groups.values() for thing in members}), 3)
    if two_agree:
        drawn[1] = drawn[0]
    return [Content(thing, singular(thing)) for thing in drawn]


def _adjectives(rng: random.Random, two_agree: bool) -> list[Content]:
    known = opposites()
    while True:
        drawn = rng.sample(sorted(known), 3)
        targets = [rng.choice(known[adjective]) for adjective in drawn]
        # Neither opposites nor synonyms (which have an opposite in common) beside each other.
        related = [{adjective, *known[adjective]} for adjective in drawn]
        if not (related[0] & related[1] or related[0] & related[2] or related[1] & related[2]):
            break
    if two_agree:
        drawn[1], targets[1] = drawn[0], targets[0]
    return [Content(adjective, target) for adjective, target in zip(drawn, targets)]


def _ordinals(step: int, rng: random.Random, two_agree: bool) -> list[Content]:
    """Draw dates or times of one sort, with the next or the one before as target."""
    unit = rng.choice(sorted(VOCABULARY["ordinals"]))
    values = VOCABULARY["ordinals"][unit]["values"]
    # The last of a row is a target only, as nothing comes after it; before the first comes nothing either.
    places = rng.sample(range(len(values) - 1), 3)
    while places[2] + step < 0:
        rng.shuffle(places)
    if two_agree:
        places[1] = places[0]
    return [Content(values[place], values[max(place + step, 0)], unit) for place in places]


_OWN = (("has", "does not have"), ("possesses", "does not possess"), ("owns", "does not own"))
_WISH = (
    ("wants to go to", "does not want to go to"),
    ("wants to visit", "does not want to visit"),
    ("longs for", "does not long for"),
    ("yearns for", "does not yearn for"),
)
_ARRIVE = (("arrived", "did not arrive"), ("appeared", "did not appear"), ("showed up", "did not show up"))

_OWNED = ("{person} has {thing}.", "{the_noun} {be} {person}'s.")
_LIKED = ("{person} likes {thing}.", "{thing} attracts {person}.")
_OBJECTS, _TOOLS, _CITIES = (VOCABULARY[name] for name in ("superclasses", "capabilities", "countries"))
FAMILIES = (
    Family("object->superclass", "class", partial(_members, _OBJECTS), _OWNED, _OWN, "a kind of {target}"),
    Family("copy", "object", partial(_copies, _OBJECTS), _OWNED, _OWN, "{target}"),
    Family("city->country", "country", partial(_members, _CITIES), _LIKED, _WISH, "the city in {target}"),
    Family("copy", "city", partial(_copies, _CITIES), _LIKED, _WISH, "{target}"),
    Family("object->capability", "capability", partial(_members, _TOOLS), _OWNED, _OWN, "the thing that can {target}"),
    Family(
        "adjective->opposite",
        "opposite",
        _adjectives,
        ("{person} is {thing}.", "{capital_thing} {person}."),
        (("is", "is not"),),
        "the opposite of {target}",
    ),
    Family(
        "ordinal->next",
        "ordinal",
        partial(_ordinals, 1),
        ("{person} arrived {on} {thing}.", "{capital_on} {thing} arrived {person}."),
        _ARRIVE,
        "the {unit} just before {target}",
    ),
)


_FIRST_LIST = 8 * len(FAMILIES)


def _list_kinds() -> Iterator[tuple[str, str, Make]]:
    for content_name, transformation, draw, lead in (
        ("object", "copy", partial(_copies, _OBJECTS), "The"),
        ("object", "object->superclass", partial(_members, _OBJECTS), "A kind of"),
        ("city", "copy", partial(_copies, _CITIES), ""),
        ("city", "city->country", partial(_members, _CITIES), "The city in"),
        ("object", "copy", partial(_copies, _TOOLS), "The"),
        ("object", "object->capability", partial(_members, _TOOLS), "The thing that can"),
        ("adjective", "adjective->opposite", _adjectives, "The opposite of"),
        ("ordinal", "ordinal->next", partial(_ordinals, 1), "The {unit} just before"),
        ("ordinal", "ordinal->previous", partial(_ordinals, -1), "The {unit} just after"),
    ):
        for pattern, named in ((f"the-other-{content_name}", "thing"), (f"different-{content_name}", None)):
            yield pattern, transformation, partial(_make_list, draw, named, lead, transformation == "copy")
    yield "the-other-class", "copy", partial(_make_list, partial(_members, _OBJECTS), "class", "The", True)


TASK_KINDS = {
    f"task{number}": TaskKind(f"task{number}", *kind)
    for number, kind in enumerate([kind for family in FAMILIES for kind in family.kinds()] + list(_list_kinds()))
}
