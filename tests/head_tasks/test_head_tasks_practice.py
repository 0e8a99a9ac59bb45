"""Practice documents: what recurs, what is asked, and that every question has one right answer."""

import itertools
import re

import pytest

from dcformer.head_tasks import iterate_practice
from dcformer.head_tasks.facts import facts_digest, parse_line, split_of
from dcformer.head_tasks.tokenizer import count_tokens
from dcformer.head_tasks.vocabulary import VOCABULARY, opposites, singular


def practice(form, count=60, **options):
    return list(iterate_practice(count, 0, {form: 1}, **options))


def names_of(thing):
    """All that a question may call a thing: itself, its groups, its opposites; a date only by the next one."""
    for ordinal in VOCABULARY["ordinals"].values():
        if thing in ordinal["values"][:-1]:
            return {ordinal["values"][ordinal["values"].index(thing) + 1]}
    groups = itertools.chain(*(VOCABULARY[name].items() for name in ("superclasses", "capabilities", "countries")))
    named = {name for name, members in groups if thing in map(singular, members)}
    return {thing, *opposites().get(thing, []), *named}


def solve(facts, question, answer):
    """The answers that the facts allow, by the words of the question."""
    called = [(person, names_of(thing)) for person, thing in facts]
    negated = " not " in question
    if question.startswith("Who"):
        asked = question.removesuffix("?")
        return {person for person, names in called if negated != any(asked.endswith(f" {name}") for name in names)}
    named = question.split(" ", 1)[0]
    return {answer for person, names in called if (person == named) != negated and answer in names}


@pytest.mark.parametrize(("facts", "split"), [(1, "train"), (2, "train"), (3, "train"), (3, "validation")])
def test_every_question_has_one_answer_which_follows_it_and_three_facts_belong_to_their_split(facts, split):
    for document in practice("questions", facts=facts, split=split):
        lines = document["text"].splitlines()
        stated, first = parse_line(lines[0])
        assert len(stated) == facts and len(lines) == len(document["answers"]) == 2 * facts
        assert facts < 3 or split_of(facts_digest(stated)) == split
        for line, (start, end) in zip([first, *lines[1:]], document["answers"]):
            answer = document["text"][start:end].strip()
            assert solve(stated, line.removesuffix(answer).strip(), answer) == {answer}, document["text"]


def test_every_repeated_word_is_an_answer():
    for document in practice("recurring_words", words=8, longest=30):
        words = document["text"].split(" ")
        ((start, end),) = document["answers"]
        different = list(dict.fromkeys(words))
        assert set(words) <= set(VOCABULARY["people"][:8]) and 3 <= len(different) <= 8
        assert document["text"][start:end].split() == words[len(different) :]
        assert words == (different * 4)[:29]  # with the token that begins every text


def test_repeated_facts_are_answered_by_their_person_or_thing():
    for document in practice("recurring_facts", longest=400):
        lines = document["text"].splitlines()
        facts = [parse_line(f"< {line} >. ?")[0][0] for line in lines]
        different = list(dict.fromkeys(facts))
        assert 2 <= len(different) <= 6 and facts[: len(different)] == different
        assert len({person for person, _ in different}) == len({thing for _, thing in different}) == len(different)
        assert len(document["answers"]) == len(lines) - len(different) == 3 * len(different)
        ends = list(itertools.accumulate(len(line) + 1 for line in lines))
        for index, (start, stop) in enumerate(document["answers"], start=len(different)):
            answer = document["text"][start:stop]
            assert ends[index - 1] <= start and re.fullmatch(r"('s)?\.\n", document["text"][stop : ends[index]])
            person, thing = facts[index]
            assert answer == f" {person}" or singular(thing).endswith(singular(answer.strip()))


@pytest.mark.parametrize("form", ["examples", "questions", "recurring_facts"])
def test_documents_end_with_a_whole_line_within_their_length(form):
    for document in practice(form, longest=70):
        assert count_tokens(document["text"]) + 1 <= 70 or document["text"].strip().count("\n") == 0
        rest = document["text"][document["answers"][-1][1] :]
        assert rest == "\n" or (form == "recurring_facts" and re.fullmatch(r"('s)?\.\n", rest))


def test_a_mixture_has_its_shares():
    documents = list(iterate_practice(600, 3, {"recurring_words": 1, "questions": 3}))
    recurring = sum("\n" not in document["text"] for document in documents)
    assert recurring / 600 == pytest.approx(0.25, abs=0.06)  # 3.4 standard deviations
    assert documents == list(iterate_practice(600, 3, {"recurring_words": 1, "questions": 3}))
    assert documents[:9] != list(iterate_practice(9, 4, {"recurring_words": 1, "questions": 3}))
