"""
The kinds of head tasks of section 4.3 and appendix F: their facts, wordings and questions.

An example is one line: three facts and a question about them, such as

    < Ruth has a violin. Carol has a beetle. Ronald has blueberries. >. Ruth has a kind of musical instrument

The answer is the last word or words. For it, attention has to look for one of the three facts (the pattern: here the
fact of the same person) and to transform its content (here object->superclass). Patterns are named for how the question
leads to the fact: `same-person`, and `the-other-person`, which the question does not name; `same-class`,
`the-other-city` and so on, if it names content and asks for the fact that has it or lacks it; `different-object` and so
on, if it only asks which one differs.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations, product

from .facts import Fact, facts_digest
from .vocabulary import VOCABULARY, opposites, singular


@dataclass(frozen=True)
class Example:
    """An example of a head task: a line of a document."""

    question: str  # all before the answer, without the space between them
    answer: str
    facts: tuple[Fact, ...]  # in the order of the line

    @property
    def line(self) -> str:
        """The question followed by its answer."""
        return f"{self.question} {self.answer}"

    @cached_property
    def digest(self) -> bytes:
        """A hash of the facts, the same in any order."""
        return facts_digest(self.facts)


@dataclass(frozen=True)
class TaskKind:
    """A kind of head task."""

    pattern: str  # what attention has to look for
    transformation: str  # what it makes of that: `copy` or `source->target`
    make: Callable[[random.Random, int], Example]  # with the number of a wording
    subject: str = "persons"  # what the facts are about: `persons` or `lists`


@dataclass(frozen=True)
class Content:
    """The subject of a fact: "a violin", "Paris", "happy", "May"; and the person, if it is not a list."""

    thing: str  # as it is in the fact, with its article
    target: str  # what it is transformed to; for `copy`, the thing as it is in the question
    unit: str = ""  # of ordinals: "year", "month" ...
    person: str = ""

    @property
    def fact(self) -> Fact:
        return (self.person, self.thing) if self.person else (self.thing,)

    def state(self, template: str) -> str:
        """The fact as a sentence, such as "Ruth has a violin." or "The violin is Ruth's."."""
        noun, on = singular(self.thing), VOCABULARY["ordinals"][self.unit]["preposition"] if self.unit else ""
        return template.format(
            person=self.person,
            thing=self.thing,
            capital_thing=self.thing.capitalize(),
            the_noun=noun if noun in VOCABULARY["without_article"] else f"The {noun}",
            be="are" if noun in VOCABULARY["plural_nouns"] else "is",
            on=on,
            capital_on=on.capitalize(),
        )


# Samples three contents with different targets; if two have to agree, the first two have the same target.
Sample = Callable[[random.Random, bool], list[Content]]


@dataclass(frozen=True)
class Family:
    """Facts about people and the questions about them: eight kinds, four patterns in two wordings of the facts."""

    transformation: str  # from the thing of a fact to its target in the question
    target_name: str  # what targets are called in the names of patterns
    sample: Sample
    statements: tuple[str, str]  # the two wordings of a fact, templates for `Content.state`
    verbs: tuple[tuple[str, str], ...]  # (affirmative, negative) in the question
    phrase: str  # what follows the verb, with `{target}` at its end, and `{unit}` for ordinals

    def kinds(self) -> Iterator[TaskKind]:
        """Yield the eight kinds, in the authors' order."""
        for by_person, negated, statement in product((True, False), (True, False), self.statements):
            pattern = f"{'the-other' if negated else 'same'}-{'person' if by_person else self.target_name}"
            make = partial(self._make, by_person, negated, statement)
            yield TaskKind(pattern, self.transformation if by_person else "copy", make)

    def _make(self, by_person: bool, negated: bool, statement: str, rng: random.Random, wording: int) -> Example:
        # The last of the three is the one asked for; the question excludes the first two if it is negated.
        facts = self._sample_facts(rng, negated and by_person, negated and not by_person)
        question, answer = self._ask(by_person, negated, facts[0 if negated else 2], facts[2], wording)
        rng.shuffle(facts)
        return Example(f"{_state_all(facts, statement)} {question}", answer, tuple(content.fact for content in facts))

    def make_questions(self, rng: random.Random, facts: int = 3) -> list[Example]:
        """Ask for 1 to 3 different facts, each by its person and by its content, after a line that states them."""
        contents = self._sample_facts(rng)[:facts]
        asked = [
            self._ask(by_person, False, content, content, rng.randrange(len(self.verbs)))
            for content, by_person in product(contents, (True, False))
        ]
        rng.shuffle(asked)
        rng.shuffle(contents)
        leads = [f"{_state_all(contents, rng.choice(self.statements))} ", *[""] * len(asked)]
        stated = tuple(content.fact for content in contents)
        return [Example(lead + question, answer, stated) for lead, (question, answer) in zip(leads, asked)]

    def make_statements(self, rng: random.Random, facts: int) -> dict[Fact, list[str]]:
        """Sample 1 to 6 facts of different persons and targets; return fact -> its two wordings."""
        kept: list[Content] = []
        while len(kept) < facts:
            for content in self._sample_facts(rng):
                if all(content.target != other.target and content.person != other.person for other in kept):
                    kept.append(content)
        return {content.fact: [content.state(wording) for wording in self.statements] for content in kept[:facts]}

    def _sample_facts(self, rng: random.Random, same_person: bool = False, same_target: bool = False) -> list[Content]:
        """Sample three facts, the first two with the same person or the same target if that is asked for."""
        people = _sample_names(VOCABULARY["people"], rng, same_person)
        return [replace(content, person=person) for content, person in zip(self.sample(rng, same_target), people)]

    def _ask(self, by_person: bool, negated: bool, named: Content, asked: Content, wording: int) -> tuple[str, str]:
        """A question that names the person or the target of one fact, and its answer from the fact asked for."""
        verb = self.verbs[wording % len(self.verbs)][negated]
        target = (asked if by_person else named).target
        phrase = self.phrase.format(target=target, unit=asked.unit)
        if by_person:
            return f"{named.person} {verb} {phrase}".removesuffix(f" {target}"), target
        return f"Who {verb} {phrase}?", asked.person


def _state_all(facts: list[Content], statement: str) -> str:
    return f"< {' '.join(content.state(statement) for content in facts)} >."


def _make_list(sample: Sample, named: str | None, lead: str, copies: bool, rng: random.Random, wording: int) -> Example:
    """
    Ask about a list of three: "There are a duck, a duck, tea. Which is different? A kind of drink". `named` is how the
    question names those that it does not ask for: by the `"thing"` that is listed twice, by the `"class"` of two, or
    not at all. `lead` stands before the answer, which is the thing itself if `copies`.
    """
    first, second, asked = sample(rng, named == "class")
    listed = [first, second if named == "class" else first, asked]
    rng.shuffle(listed)
    which = {None: "different", "thing": f"not {singular(first.thing)}", "class": f"not {first.target}"}[named]
    things = ", ".join(content.thing for content in listed)
    question = f"There are {things}. Which is {which}? {lead.format(unit=asked.unit)}".rstrip()
    answer = singular(asked.thing) if copies else asked.target
    return Example(question, answer, tuple(content.fact for content in listed))


def _sample_names(names: list[str], rng: random.Random, two_agree: bool) -> list[str]:
    """Sample three names; the first two are the same if two have to agree."""
    first, second, third = rng.sample(names, 3)
    return [first, first if two_agree else second, third]


def _members(groups: dict[str, list[str]], rng: random.Random, two_agree: bool) -> list[Content]:
    """Sample things with the group they belong to: a class, a capability or a country."""
    while True:
        names = _sample_names(sorted(groups), rng, two_agree)
        things = [rng.choice(groups[name]) for name in names]
        # A thing of two groups in question, or the same thing twice, would make two answers right.
        if len(set(things)) == 3 and all(sum(thing in groups[name] for name in set(names)) == 1 for thing in things):
            return [Content(thing, name) for thing, name in zip(things, names)]


def _copies(groups: dict[str, list[str]], rng: random.Random, two_agree: bool) -> list[Content]:
    """Sample things that questions name as they are."""
    things = sorted({thing for members in groups.values() for thing in members})
    return [Content(thing, singular(thing)) for thing in _sample_names(things, rng, two_agree)]


def _adjectives(rng: random.Random, two_agree: bool) -> list[Content]:
    known = opposites()
    while True:
        adjectives = rng.sample(sorted(known), 3)
        contents = [Content(adjective, rng.choice(known[adjective])) for adjective in adjectives]
        # Neither opposites nor synonyms, which have an opposite in common.
        related = [{adjective, *known[adjective]} for adjective in adjectives]
        if all(one.isdisjoint(other) for one, other in combinations(related, 2)):
            return [contents[0], contents[0], contents[2]] if two_agree else contents


def _ordinals(step: int, rng: random.Random, two_agree: bool) -> list[Content]:
    """Sample dates or times of one unit, with the next or the one before as target."""
    unit = rng.choice(sorted(VOCABULARY["ordinals"]))
    values = VOCABULARY["ordinals"][unit]["values"]
    # Nothing comes after the last of a row, which is only a target, nor before the first.
    indices = rng.sample(range(len(values) - 1), 3)
    while indices[2] + step < 0:
        rng.shuffle(indices)
    if two_agree:
        indices[1] = indices[0]
    return [Content(values[index], values[max(index + step, 0)], unit) for index in indices]


_HAVE = (("has", "does not have"), ("possesses", "does not possess"), ("owns", "does not own"))
_WISH = (
    *(("wants to go to", "does not want to go to"), ("wants to visit", "does not want to visit")),
    *(("longs for", "does not long for"), ("yearns for", "does not yearn for")),
)
_ARRIVE = (("arrived", "did not arrive"), ("appeared", "did not appear"), ("showed up", "did not show up"))

_OWNED = ("{person} has {thing}.", "{the_noun} {be} {person}'s.")
_LIKED = ("{person} likes {thing}.", "{thing} attracts {person}.")
_FELT = ("{person} is {thing}.", "{capital_thing} {person}.")
_DATED = ("{person} arrived {on} {thing}.", "{capital_on} {thing} arrived {person}.")
_OBJECTS, _TOOLS, _CITIES = (VOCABULARY[name] for name in ("superclasses", "capabilities", "countries"))
FAMILIES = (
    Family("object->superclass", "class", partial(_members, _OBJECTS), _OWNED, _HAVE, "a kind of {target}"),
    Family("copy", "object", partial(_copies, _OBJECTS), _OWNED, _HAVE, "{target}"),
    Family("city->country", "country", partial(_members, _CITIES), _LIKED, _WISH, "the city in {target}"),
    Family("copy", "city", partial(_copies, _CITIES), _LIKED, _WISH, "{target}"),
    Family("object->capability", "capability", partial(_members, _TOOLS), _OWNED, _HAVE, "the thing that can {target}"),
    Family("adjective->opposite", "opposite", _adjectives, _FELT, (("is", "is not"),), "the opposite of {target}"),
    Family("ordinal->next", "ordinal", partial(_ordinals, 1), _DATED, _ARRIVE, "the {unit} just before {target}"),
)


def _list_kinds() -> Iterator[TaskKind]:
    """Yield the kinds about lists, in the authors' order."""
    for content_name, transformation, sample, lead in (
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
            make = partial(_make_list, sample, named, lead, transformation == "copy")
            yield TaskKind(pattern, transformation, make, "lists")
    make = partial(_make_list, partial(_members, _OBJECTS), "class", "The", True)
    yield TaskKind("the-other-class", "copy", make, "lists")


_KINDS = [*(kind for family in FAMILIES for kind in family.kinds()), *_list_kinds()]
# Name -> kind: `task0` to `task73` as the authors number them, and `task74`, of Table 11, which their texts lack.
TASK_KINDS = {f"task{number}": kind for number, kind in enumerate(_KINDS)}
