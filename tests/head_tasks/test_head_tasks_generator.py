"""The generator of head tasks against the authors' 888 texts: templates, answers, what stays out of training."""

import itertools
import json
import random
import re
from functools import cache

import pytest

from dcformer.head_tasks import TASK_KINDS, build_tokenizer, generate_documents, iterate_practice
from dcformer.head_tasks.facts import SPLITS, authors_facts, facts_digest, parse_line
from dcformer.head_tasks.vocabulary import VOCABULARY


MOST_DRAWS = 30_000
FACT_FORMS = (
    r"(?P<person>\w+) has (?P<thing>.+)",
    r"(?:The )?(?P<thing>.+) (?:is|are) (?P<person>\w+)'s",
    r"(?P<person>\w+) likes (?P<thing>.+)",
    r"(?P<thing>.+) attracts (?P<person>\w+)",
    r"(?P<person>\w+) is (?P<thing>.+)",
    r"(?P<person>\w+) arrived (?:on|in|at) (?P<thing>.+)",
    r"(?:On|In|At) (?P<thing>.+) arrived (?P<person>\w+)",
    r"(?P<thing>\w+) (?P<person>\w+)",
)


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
    for group in ("superclasses", "capabilities"):
        for name, things in VOCABULARY[group].items():
            kinds[name] = group
            kinds |= dict.fromkeys(map(noun, things), "thing")
    kinds |= dict.fromkeys(VOCABULARY["singular_of"].values(), "thing")
    for country, cities in VOCABULARY["countries"].items():
        kinds[country] = "country"
        kinds |= dict.fromkeys(cities, "city")
    for adjective in itertools.chain(*VOCABULARY["opposites"]):
        kinds |= dict.fromkeys((adjective, adjective.capitalize()), "adjective")
    for ordinals in VOCABULARY["ordinals"].values():
        kinds |= dict.fromkeys(ordinals["values"], "ordinal")
    return kinds


@cache
def known_words() -> re.Pattern:
    longest_first = sorted(word_kinds(), key=len, reverse=True)
    article = "(?P<article>an? )?"
    return re.compile(rf"{article}(?<![\w'])(?P<words>{'|'.join(map(re.escape, longest_first))})(?!\w)")


def noun(thing: str) -> str:
    return re.sub("^an? ", "", thing)


def template(line: str) -> str:
    """
    A line with people and things masked: the same person is the same number, so who is spoken of remains.

    `is` and `are` before an owner, and articles, follow from the words and are checked apart.
    """
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


def groups_of(transformation: str, thing: str, step: int = 1) -> set[str]:
    """All that a thing may be transformed to, from the vocabulary alone."""
    if transformation == "adjective->opposite":
        pairs = VOCABULARY["opposites"]
        return {other for pair in pairs for one, other in (pair, pair[::-1]) if one == thing.lower()}
    if transformation.startswith("ordinal->"):
        rows = [ordinals["values"] for ordinals in VOCABULARY["ordinals"].values()]
        (row,) = (row for row in rows if thing in row)
        place = row.index(thing) + (1 if transformation == "ordinal->next" else -1)
        return {row[place]} if 0 <= place < len(row) else set()
    name = {"object->superclass": "superclasses", "object->capability": "capabilities", "city->country": "countries"}
    groups = VOCABULARY[name[transformation]]
    return {group for group, members in groups.items() if singular(thing) in map(singular, members)}


def singular(thing: str) -> str:
    return VOCABULARY["singular_of"].get(noun(thing), noun(thing))


# What a kind of facts is asked by, where the answer itself is a copy.
TARGETS = {
    "class": "object->superclass",
    "country": "city->country",
    "capability": "object->capability",
    "opposite": "adjective->opposite",
    "ordinal": "ordinal->next",
}


def right_answers(name: str, line: str) -> tuple[set[str], str]:
    """All answers that the vocabulary allows, found from the words of the line alone, and the line's own answer."""
    kind = TASK_KINDS[name]
    if line.startswith("<"):
        told, question = re.fullmatch(r"< (.+)\. >\. (.+)", line).groups()
        return _answers_about_people(kind, _facts(told), question)
    listed, question = re.fullmatch(r"There are (.+?)\. Which is (.+)", line).groups()
    things = re.split(r", (?!D\.C)", listed)
    which, end = re.fullmatch(r"(different|not .+?)\? (.+)", question).groups()
    if kind.pattern == "the-other-class":
        asked = [thing for thing in things if which.removeprefix("not ") not in groups_of("object->superclass", thing)]
    else:
        asked = [thing for thing in things if things.count(thing) == 1]
        assert which in ("different", *(f"not {singular(thing)}" for thing in things if thing not in asked))
    (thing,) = asked
    if kind.transformation == "copy":
        return {singular(thing)}, end.removeprefix("The ")
    lead = "A kind of|The city in|The thing that can|The opposite of|The [a-z]+ just (?:before|after)"
    return groups_of(kind.transformation, thing), re.fullmatch(rf"(?:{lead}) (.+)", end)[1]


def _facts(told: str) -> list[tuple[str, str]]:
    facts = []
    # A sentence ends before the next one; "Washington, D.C" has a stop inside.
    for sentence in re.split(r"(?<!D)\. |(?<=D\.C)\. ", told):
        match = next(found for form in FACT_FORMS if (found := re.fullmatch(form, sentence)))
        thing = match["thing"]
        facts.append(
            (match["person"], thing.lower() if sentence.startswith(thing) and thing.lower() in word_kinds() else thing)
        )
    return facts


def _answers_about_people(kind, facts: list[tuple[str, str]], question: str) -> tuple[set[str], str]:
    assert len(facts) == 3
    if not question.startswith("Who "):
        named = question.split()[0]
        is_same = kind.pattern == "same-person"
        ((_, thing),) = [fact for fact in facts if (fact[0] == named) == is_same]
        answers = {singular(thing)} if kind.transformation == "copy" else groups_of(kind.transformation, thing)
        (answer,) = {end for end in _ends(question) if end in word_kinds()} & _longest(question)
        return answers, answer
    asked, person = question.split("? ")
    by = re.sub("^(same|the-other)-", "", kind.pattern)
    is_same = kind.pattern.startswith("same-")
    (words,) = _longest(asked)

    def is_asked(thing: str) -> bool:
        return words in (groups_of(TARGETS[by], thing) if by in TARGETS else {singular(thing)})

    return {name for name, thing in facts if is_asked(thing) == is_same}, person


def _ends(text: str) -> list[str]:
    words = text.split()
    return [" ".join(words[start:]) for start in range(len(words))]


def _longest(text: str) -> set[str]:
    """The longest known words at the end of a text."""
    return {max((end for end in _ends(text) if end in word_kinds()), key=len)}


def test_the_numbers_of_the_authors(authors):
    assert list(authors) == [f"task{number}" for number in range(74)]
    assert set(TASK_KINDS) - set(authors) == {"task74"}
    assert sum(map(len, authors.values())) == 888 * 8


@pytest.mark.parametrize("decade", range(8), ids=lambda decade: f"task{10 * decade}-")
def test_every_line_of_the_authors_is_of_a_template_of_the_same_kind(authors, decade):
    for number in range(10 * decade, min(10 * decade + 10, 74)):
        name = f"task{number}"
        missing = {template(line): line for line in authors[name]}
        for _, line in zip(range(MOST_DRAWS), generated_lines(name)):
            missing.pop(template(line), None)
            if not missing:
                break
        assert not missing, (name, next(iter(missing.items())))


def test_templates_tell_people_and_wordings_apart():
    line = "< Ruth has a violin. Carol has a beetle. Ruth has jeans. >. Ruth does not have a kind of insect"
    assert template(line) == (
        "< <person 0> has <thing>. <person 1> has <thing>. <person 0> has <thing>. >. "
        "<person 0> does not have a kind of <superclasses>"
    )
    assert template(line) != template(line.replace("does not have", "does not own"))
    assert template(line) != template(line.replace("Ruth does", "Carol does"))
    assert template("The jeans are Ruth's.") == "The <thing> be <person 0>'s."


def test_the_authors_articles_and_numbers_are_those_of_the_vocabulary(authors):
    things = {
        thing for group in ("superclasses", "capabilities") for things in VOCABULARY[group].values() for thing in things
    }
    nouns = {singular(thing) for thing in things}
    for lines in authors.values():
        for line in lines:
            assert set(re.findall(r" has ((?:an? )?[\w\- ]+)\.", line)) <= things
            for thing, verb in re.findall(r"The ([\w\- ]+?) (is|are) \w+'s", line):
                assert thing in nouns and (verb == "are") == (thing in VOCABULARY["plural_nouns"])


@pytest.mark.parametrize("source", ["authors", "generated"])
def test_the_answer_is_what_the_vocabulary_says(source, authors, generated):
    """The pattern and the transformation of a kind, applied to the words of a line, give its answer."""
    if source == "authors":
        lines = [(name, line) for name in authors for line in authors[name]]
    else:
        lines = [(row["task"], line) for row in generated for line in row["text"].strip().split("\n")]
    for name, line in lines:
        allowed, answer = right_answers(name, line)
        assert answer in allowed, (name, line, allowed)
        assert len(allowed) == 1 or TASK_KINDS[name].transformation == "adjective->opposite", (name, line, allowed)


def test_a_wrong_answer_is_noticed():
    """The solver of these tests is no echo of the line."""
    assert right_answers(
        "task2", "< Ruth has a violin. Carol has a beetle. Paul has jeans. >. Ruth has a kind of insect"
    ) == (
        {"musical instrument"},
        "insect",
    )
    told = "< Rome attracts Ruth. Washington, D.C attracts Carol. Paris attracts Paul. >."
    assert right_answers("task23", f"{told} Who yearns for the city in the United States? Ruth") == ({"Carol"}, "Ruth")
    assert right_answers("task71", "There are May, May, June. Which is different? The month just before June") == (
        {"July"},
        "June",
    )


def test_spans_are_the_answers(generated):
    for row in generated:
        lines = row["text"].strip("\n").split("\n")
        assert len(lines) == len(row["answers"]) <= 8
        for (start, end), line in zip(row["answers"], lines):
            assert row["text"][start] == " " and row["text"][end] == "\n"
            assert line.endswith(row["text"][start:end])
            assert row["text"][start + 1 : end] == right_answers(row["task"], line)[1]


def facts_of(line: str) -> tuple:
    """What a line says, in no order, by the parser of these tests and not by that of the package."""
    if line.startswith("<"):
        told = re.fullmatch(r"< (.+)\. >\. .+", line)[1]
        return tuple(sorted((person, singular(thing)) for person, thing in _facts(told)))
    return tuple(sorted(map(singular, re.split(r", (?!D\.C)", re.fullmatch(r"There are (.+?)\. Which .+", line)[1]))))


def lines_of(documents: list[dict]) -> list[str]:
    return [line for row in documents for line in row["text"].strip().split("\n")]


def test_the_digests_are_those_of_the_authors_facts(authors):
    digests = {facts_digest(parse_line(line)[0]) for lines in authors.values() for line in lines}
    assert digests == authors_facts()
    # One digest for what these tests find to be the same facts.
    assert len(digests) == len({facts_of(line) for lines in authors.values() for line in lines})


def test_facts_are_read_from_a_line_as_they_were_drawn():
    for name, kind in TASK_KINDS.items():
        rng = random.Random(name)
        for wording in range(20):
            example = kind.make(rng, wording)
            facts, question = parse_line(example.line)
            assert facts_digest(facts) == facts_digest(example.facts) == example.digest
            assert facts_of(example.line) == tuple(sorted(fact if len(fact) > 1 else fact[0] for fact in facts))
            assert example.line.endswith(f". {question}")


@pytest.mark.parametrize("line", ["", "Ruth has a violin.", "< Ruth eats. >. Who eats? Ruth"])
def test_a_line_that_is_no_example_is_refused(line):
    with pytest.raises(ValueError, match="is no line of the head tasks; it must begin like"):
        parse_line(line)


@pytest.mark.parametrize("name", ["task6", "task43", "task59", "task72"])
def test_the_order_of_facts_and_the_question_have_no_part_in_the_split(name):
    example = TASK_KINDS[name].make(random.Random(0), 0)
    assert len({facts_digest(order) for order in itertools.permutations(example.facts)}) == 1
    (first, second, third) = example.facts
    assert facts_digest((first, second)) != example.digest
    if len(first) == 2:
        assert facts_digest(((first[0], second[1]), (second[0], first[1]), third)) != example.digest


def first_lines(text):
    return "\n".join(line for line in text.splitlines() if line.startswith(("<", "There")))


def training_samples():
    """(name, documents): a sample, and the first documents that packaged recipes train on."""
    yield "sample", generate_documents(800, seed=2)
    pytest.importorskip("yaml")
    from dcformer.training.recipe import load_recipe, packaged_recipes

    for name in packaged_recipes():
        recipe = load_recipe(name)
        for stage in recipe.data.stages or ():
            shares = {form: stage[form] for form in ("examples", "questions") if form in stage}
            if shares and stage.get("facts", 3) == 3:
                documents = list(iterate_practice(600, f"{recipe.seed} 0", shares, recipe.data.split))
                # Further questions about the same facts do not tell them again.
                yield name, [{"text": first_lines(document["text"])} for document in documents]
        if recipe.data.source == "head_tasks" and recipe.data.stages is None:
            # The first of a larger number of documents are those of a smaller one.
            count = min(recipe.data.documents, 500)
            yield name, generate_documents(count, recipe.seed, recipe.data.split)


def test_nothing_that_the_authors_texts_say_is_trained_on_in_any_order(authors):
    held_out = {facts_of(line) for kind in authors.values() for line in kind}
    for name, documents in training_samples():
        lines = lines_of(documents)
        assert len(lines) > 500, name
        assert not held_out & {facts_of(line) for line in lines}, name


def test_the_generator_would_say_facts_of_the_authors_if_it_were_allowed(authors, monkeypatch):
    """Kinds with few sets of facts, which an unguarded generator soon repeats."""
    kinds = ("task61", "task71", "task73")
    held_out = {facts_of(line) for name in kinds for line in authors[name]}

    def said():
        return {facts_of(line) for line in lines_of(generate_documents(300, seed=2, kinds=kinds))}

    assert not said() & held_out
    monkeypatch.setattr("dcformer.head_tasks.facts.authors_facts", frozenset)
    assert len(said() & held_out) > 50


def test_no_set_of_facts_is_in_two_splits():
    every = {split: {facts_of(line) for line in lines_of(generate_documents(300, 1, split))} for split in SPLITS}
    # Lists, of which there are few, so that they would soon meet if they could.
    kinds = tuple(name for name, kind in TASK_KINDS.items() if re.match("different|the-other-ordinal", kind.pattern))
    for split in SPLITS:
        every[split] |= {facts_of(line) for line in lines_of(generate_documents(250, 1, split, kinds=kinds))}
    assert min(map(len, every.values())) > 1_200
    for one, other in itertools.combinations(SPLITS, 2):
        assert not every[one] & every[other], (one, other)


def test_splits_of_few_lists_have_all_units_in_them():
    """The seed of the digests is chosen for this; see `_SALT`."""
    for name, least in (("task71", 31), ("task73", 27)):
        for split in SPLITS:
            lines = lines_of(generate_documents(80, 3, split, kinds=(name,)))
            assert {re.search(r"The (\w+) just", line)[1] for line in lines} == set(VOCABULARY["ordinals"])
            assert len({facts_of(line) for line in lines}) >= least


def test_a_document_tells_no_facts_twice_unless_it_must():
    for row in generate_documents(24, 3, "test", lines=(8, 8), kinds=("task71", "task73", "task65")):
        assert len({facts_of(line) for line in lines_of([row])}) == 8
    (longer,) = generate_documents(1, 3, "test", lines=(40, 40), kinds=("task73",))
    assert len(lines_of([longer])) == 40 and len({facts_of(line) for line in lines_of([longer])}) == 27


@pytest.mark.parametrize("first", [0, 10, 22, 28, 38, 44, 50])
def test_the_two_wordings_of_facts_belong_to_the_same_split(first):
    for seed in range(20):
        one, other = (
            TASK_KINDS[f"task{number}"].make(random.Random(seed), wording)
            for number, wording in ((first, 0), (first + 1, 1))
        )
        assert one.line != other.line and one.split == other.split


def test_the_same_seed_gives_the_same_documents_and_a_larger_count_goes_on():
    few, many = generate_documents(20, seed=5), generate_documents(40, seed=5)
    assert many[:20] == few
    assert generate_documents(20, seed=6) != few
    assert len({row["task"] for row in generate_documents(75, seed=5)}) == 75


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0}, "count must be at least 1, got 0"),
        ({"split": "dev"}, "split must be one of train, validation, test; got 'dev'"),
        ({"lines": (3, 2)}, r"lines must be \(least, most\)"),
        ({"kinds": ("task75",)}, "kinds must be names from task0 to task74"),
    ],
    ids=["count", "split", "lines", "kinds"],
)
def test_errors_of_the_generator(arguments, message):
    with pytest.raises(ValueError, match=message):
        generate_documents(**{"count": 1, "seed": 0, **arguments})


def test_every_word_has_its_token_and_text_survives(authors, generated):
    tokenizer = build_tokenizer()
    texts = [row["text"] for row in generated] + ["\n".join(lines[:8]) + "\n" for lines in authors.values()]
    for ids, text in zip(tokenizer(texts)["input_ids"], texts):
        assert tokenizer.unk_token_id not in ids
        assert ids[0] == tokenizer.bos_token_id == tokenizer.eos_token_id
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_the_tokenizer_is_the_same_after_saving(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "< Ruth likes Washington, D.C. >. Ruth arrived at 1 o'clock, yesterday\n"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == "<|endoftext|> " + text.replace("yesterday", "<|unknown|>")
    assert build_tokenizer().get_vocab() == tokenizer.get_vocab()
