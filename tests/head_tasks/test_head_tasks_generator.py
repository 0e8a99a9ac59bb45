"""The generator of head tasks against the authors' 888 texts: templates, answers, what training leaves out."""

import hashlib
import itertools
import json
import random
import re
from functools import cache

import pytest

from dcformer.head_tasks import (
    FORMS,
    TASK_KINDS,
    build_tokenizer,
    generate_documents,
    held_out_questions,
    iterate_documents,
    iterate_practice,
)
from dcformer.head_tasks.facts import SPLITS, authors_facts, facts_digest, parse_line
from dcformer.head_tasks.vocabulary import VOCABULARY


@pytest.fixture(scope="module")
def authors(fixtures) -> dict[str, list[str]]:
    """Task -> its lines, without the brackets."""
    file = fixtures / "benchdata" / "synthetic" / "synthetic_dataset.jsonl"
    lines: dict[str, list[str]] = {}
    for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        text = row["texts"].replace(" [ ", " ").replace(" ]", "")
        lines.setdefault(row["task_id"], []).extend(text.strip().split("\n"))
    return lines


@pytest.fixture(scope="module")
def generated() -> list[dict]:
    return generate_documents(600, seed=11)


@cache
def word_kinds() -> dict[str, str]:
    """Word or words -> what they stand for in a template."""
    kinds = dict.fromkeys(VOCABULARY["people"], "person")
    for groups, kind in (("superclasses", "thing"), ("capabilities", "thing"), ("countries", "city")):
        for name, members in VOCABULARY[groups].items():
            kinds |= {name: groups} | dict.fromkeys((re.sub("^an? ", "", member) for member in members), kind)
    adjectives = set(itertools.chain(*VOCABULARY["opposites"]))
    kinds |= dict.fromkeys(VOCABULARY["singular_of"].values(), "thing")
    kinds |= dict.fromkeys(adjectives | set(map(str.capitalize, adjectives)), "adjective")
    for ordinals in VOCABULARY["ordinals"].values():
        kinds |= dict.fromkeys(ordinals["values"], "ordinal")
    return kinds


@cache
def known_words() -> re.Pattern:
    """By first letter, which is many times faster to match, and then the longest first."""
    words = sorted(word_kinds(), key=lambda word: (word[0], -len(word)))
    letters = itertools.groupby(words, key=lambda word: word[0])
    choices = [f"{letter}(?:{'|'.join(re.escape(word[1:]) for word in group)})" for letter, group in letters]
    return re.compile(rf"(?:an? )?(?<![\w'])(?P<words>{'|'.join(choices)})(?!\w)")


def template(line: str) -> str:
    """A line with people and things masked, and without `is`, `are` and articles, which follow from the words."""
    numbers: dict[str, int] = {}

    def mask(match: re.Match) -> str:
        kind = word_kinds()[match["words"]]
        if kind == "person":
            return f"<person {numbers.setdefault(match['words'], len(numbers))}>"
        return f"<{kind}>"

    return re.sub(r" (?:is|are) (<person \d>'s)", r" be \1", known_words().sub(mask, line))


def generated_lines(name: str):
    rng = random.Random(name)
    while True:
        yield TASK_KINDS[name].make(rng, rng.randrange(60)).line


def digest_of(line: str) -> bytes:
    """A hash of the facts of a line, the same in any order."""
    return facts_digest(parse_line(line)[0])


def test_every_line_of_the_authors_is_of_a_template_of_the_same_kind(authors):
    assert set(authors) == {f"task{number}" for number in range(74)} and sum(map(len, authors.values())) == 888 * 8
    for name in authors:
        missing = {template(line): line for line in authors[name]}
        for _, line in zip(range(30_000), generated_lines(name)):
            missing.pop(template(line), None)
            if not missing:
                break
        assert not missing, (name, next(iter(missing.items())))


def test_spans_are_the_answers(generated):
    for row in generated:
        lines = row["text"].strip("\n").split("\n")
        assert len(lines) == len(row["answers"]) <= 8
        for (start, end), line in zip(row["answers"], lines):
            assert row["text"][start] == " " and row["text"][end] == "\n"
            assert line.endswith(row["text"][start:end])


def lines_of(documents: list[dict]) -> list[str]:
    return [line for row in documents for line in row["text"].strip().split("\n")]


def test_the_digests_are_those_of_the_authors_facts(authors):
    assert {digest_of(line) for lines in authors.values() for line in lines} == authors_facts()


def test_facts_are_read_from_a_line_as_they_were_sampled_and_hashed_in_any_order():
    sampled = {}
    for name, kind in TASK_KINDS.items():
        rng = random.Random(name)
        for wording in range(20):
            example = kind.make(rng, wording)
            facts, question = parse_line(example.line)
            assert facts_digest(facts[::-1]) == facts_digest(example.facts) == example.digest
            assert example.line.endswith(f". {question}")
            sampled.setdefault(example.digest, set()).add(tuple(sorted(facts)))
    assert all(len(same) == 1 for same in sampled.values())


def test_no_facts_of_the_authors_texts_are_trained_on_in_any_order(authors):
    held_out = {digest_of(line) for kind in authors.values() for line in kind}
    few_lists = ("task61", "task71", "task73")  # so few that those of the authors would soon be repeated
    lines = lines_of(generate_documents(400, seed=2)) + lines_of(generate_documents(300, seed=2, kinds=few_lists))
    lines += [document["text"].splitlines()[0] for document in iterate_practice(300, 0, {"questions": 1})]
    assert not held_out & set(map(digest_of, lines))


def test_no_set_of_facts_is_in_two_splits():
    # Lists, so few that they would soon be repeated.
    lists = tuple(name for name, kind in TASK_KINDS.items() if re.match("different|the-other-ordinal", kind.pattern))
    by_split = []
    for split in SPLITS:
        documents = generate_documents(150, 1, split) + generate_documents(150, 1, split, kinds=lists)
        by_split.append(set(map(digest_of, lines_of(documents))))
    assert min(map(len, by_split)) > 700
    assert all(one.isdisjoint(other) for one, other in itertools.combinations(by_split, 2))


def test_a_document_repeats_facts_only_if_it_must():
    for row in generate_documents(24, 3, "test", lines=(8, 8), kinds=("task71", "task73", "task65")):
        assert len({digest_of(line) for line in lines_of([row])}) == 8
    (longer,) = generate_documents(1, 3, "test", lines=(40, 40), kinds=("task73",))
    assert len(lines_of([longer])) == 40 and len({digest_of(line) for line in lines_of([longer])}) == 27


# The results of the bundled models depend on these documents.
@pytest.mark.parametrize(
    ("make", "arguments", "digest"),
    [
        (iterate_documents, (0, "train"), "1bcc42cc1a95bb6d"),
        (iterate_documents, (7, "validation"), "fee08afa2cba6541"),
        (iterate_documents, (1234, "test"), "82dfc477a3646be5"),
        (iterate_practice, (5, dict(zip(FORMS, (1, 2, 1, 1)))), "6910f921dea9dd3e"),
    ],
    ids=["train", "validation", "test", "practice"],
)
def test_documents_of_a_seed_never_change(make, arguments, digest):
    text = json.dumps(list(make(150, *arguments)))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


def test_held_out_questions_are_the_answers_of_the_test_documents():
    questions, documents = held_out_questions(20), generate_documents(20, 1234, "test", lines=(8, 8))
    assert [question["shots"] for question in questions] == list(range(8)) * 20
    for number, document in enumerate(documents):
        for question, (start, end) in zip(questions[8 * number : 8 * number + 8], document["answers"]):
            assert question["context"] + question["answer"] == document["text"][:end]
            assert question["answer"] == document["text"][start:end] and question["document"] == number
            assert all(question[key] == document[key] for key in ("task", "subject", "pattern", "transformation"))


def test_the_same_seed_gives_the_same_documents_and_a_larger_count_continues_them():
    documents = generate_documents(75, seed=5)
    assert documents[:20] == generate_documents(20, seed=5) != generate_documents(20, seed=6)
    assert len({row["task"] for row in documents}) == 75


def test_every_word_has_its_token_and_text_survives(authors, generated):
    tokenizer = build_tokenizer()
    texts = [row["text"] for row in generated] + ["\n".join(lines[:8]) + "\n" for lines in authors.values()]
    for ids, text in zip(tokenizer(texts)["input_ids"], texts):
        assert tokenizer.unk_token_id not in ids
        assert ids[0] == tokenizer.bos_token_id == tokenizer.eos_token_id
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
