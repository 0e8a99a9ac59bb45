"""The tasks of Table 4: documents, prompts word for word, where examples come from, and what is said of bad data.

`data/eval_prompts_table4.json` holds what the first document of every task must render to: hashes and the ends of each
text, since the licences of the data forbid more. `python tests/test_eval_tasks.py` writes it anew.
"""

import hashlib
import itertools
import json
import os
import sys
from pathlib import Path

import pytest


pytest.importorskip("datasets", reason="evaluation data are read with datasets")

import datasets
import huggingface_hub

from dcformer.eval import TaskSummary, data, list_tasks, sources, suites, tasks_folder
from dcformer.eval.origin import documents_hash, origin_of
from dcformer.eval.table4_tasks import (
    DOCUMENT_COUNTS,
    OTHER_PROMPTS,
    TABLE4_COLUMNS,
    group_by_article,
    load_documents,
    parse_logiqa,
    race_answer,
    race_choices,
    race_context,
    race_context_lm_eval_0_4_13,
    sciq_context,
    sciq_context_lm_eval_0_4_13,
)


EXPECTED = Path(__file__).parent / "data" / "eval_prompts_table4.json"
SEED = 1234
STOCK = {
    "lambada_openai": "lambada/lambada_openai.yaml",
    "piqa": "piqa/piqa.yaml",
    "winogrande": "winogrande/default.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "sciq": "sciq/sciq.yaml",
    "logiqa": "logiqa/logiqa.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
}
# Of these lm-eval draws the same examples for all documents; of the others in STOCK, for the first.
SAME_EXAMPLES = ("piqa", "winogrande", "boolq", "hellaswag")


def task_manager(folder):
    from lm_eval.tasks import TaskManager

    metadata = {"data_dir": str(folder), "pretrained": "one of the model's arguments"}
    return TaskManager(include_path=str(tasks_folder()), include_defaults=False, metadata=metadata)


def load_group(folder):
    return task_manager(folder).load(["dcformer_table4"])


@pytest.fixture(scope="module")
def group(fixtures):
    """The whole group, loaded once for all tests."""
    pytest.importorskip("lm_eval", reason="the tasks are lm-eval's")
    if not (fixtures / "benchdata").is_dir():
        pytest.skip(f"no evaluation data in {fixtures}/benchdata")
    return load_group(fixtures / "benchdata")


@pytest.fixture(scope="module")
def tasks(group):
    return {name.removeprefix("dcformer_"): task for name, task in group["tasks"].items()}


def task_of(config_file, splits):
    """A task by its definition, but on documents of ours."""
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    config = {key: value for key, value in load_yaml(config_file).items() if key not in ("tag", "dataset_kwargs")}
    return ConfigurableTask(config={**config, "custom_dataset": lambda **_: splits})


def requests(task, document, shots):
    """Pairs of context and continuation, as the model gets them."""
    built = task.construct_requests(document, task.fewshot_context(document, shots), metadata=(task.task_name, 0, 1))
    return [request.args for request in (built if isinstance(built, list) else [built])]


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


def rendered(task):
    document = task.eval_docs[0]
    result = {}
    for shots in (0, 5):
        task.set_fewshot_seed(SEED)
        contexts = list(dict.fromkeys(context for context, _ in requests(task, document, shots)))
        result[f"{shots}_shot"] = [
            {"sha256": digest(text), "first": text[:120], "last": text[-120:]} for text in contexts
        ]
    result["continuations"] = digest(json.dumps([continuation for _, continuation in requests(task, document, 0)]))
    target = task.doc_to_target(document)
    # Of the two contexts of winogrande, the right one is what doc_to_text gives.
    result["right"] = task.doc_to_text(document) if task.multiple_input else target
    return result


def test_the_group_has_the_eleven_columns_in_the_order_of_the_paper(group):
    assert group["group_map"] == {"dcformer_table4": [f"dcformer_{column}" for column in TABLE4_COLUMNS]}
    assert TABLE4_COLUMNS[0] == "lambada_openai" and TABLE4_COLUMNS[-2:] == ("race_middle", "race_high")


@pytest.mark.parametrize("column", TABLE4_COLUMNS)
def test_every_task_scores_all_documents_by_accuracy(tasks, column):
    task = tasks[column]
    assert len(task.eval_docs) == DOCUMENT_COUNTS[column]
    assert set(task.aggregation()) == {"acc", "perplexity"} if column == "lambada_openai" else {"acc"}
    assert task.config.metadata["version"] == (2.0 if column == "sciq" else 1.0)
    origin = origin_of(task.eval_docs)
    assert origin["as_known"] is (None if column == "sciq" else True), origin  # of SciQ only validation is at hand
    assert origin_of(task.fewshot_docs())["hash"].startswith("sha256:")


@pytest.mark.parametrize("column", TABLE4_COLUMNS)
def test_the_first_document_renders_as_stored(tasks, column):
    assert rendered(tasks[column]) == json.loads(EXPECTED.read_text(encoding="utf-8"))[column]


@pytest.mark.parametrize("column", STOCK)
def test_prompts_equal_those_of_lm_eval(tasks, column):
    import lm_eval.tasks

    scored = tasks[column].dataset["scored"].select(range(50))
    examples = tasks[column].dataset["examples"].select(range(100, 200))
    name = f"{column}_lm_eval_0_4_13"
    ours = task_of(
        tasks_folder() / f"dcformer_{name if name in OTHER_PROMPTS else column}.yaml",
        {"scored": scored, "examples": examples},
    )
    # LAMBADA has no train split, there or here.
    splits = {"train": examples, "validation": scored, "test": examples if column == "lambada_openai" else scored}
    stock = task_of(Path(lm_eval.tasks.__file__).parent / STOCK[column], splits)
    if column == "lambada_openai":
        stock.task_docs = scored
    for task in (ours, stock):
        task.set_fewshot_seed(SEED)
    for number in range(50):
        # Stock hellaswag writes its prompt into the document.
        document, stock_document = (
            ours.eval_docs[number],
            (stock.eval_docs if column == "hellaswag" else scored)[number],
        )
        assert requests(ours, document, 0) == requests(stock, stock_document, 0)
        if stock.multiple_input:
            assert ours.doc_to_text(document) == stock.doc_to_text(stock_document)
        else:
            assert ours.doc_to_target(document) == (
                int(stock.doc_to_target(stock_document))
                if column == "hellaswag"
                else stock.doc_to_target(stock_document)
            )
        if number == 0 or column in SAME_EXAMPLES:
            assert requests(ours, document, 5) == requests(stock, stock_document, 5)


@pytest.mark.parametrize("column", TABLE4_COLUMNS)
def test_a_document_is_never_among_its_own_examples(tasks, column):
    # Five of six are drawn, so a document that is not taken out would nearly always be there.
    documents = tasks[column].dataset["scored"].select(range(6))
    task = task_of(tasks_folder() / f"dcformer_{column}.yaml", {"scored": documents, "examples": documents})
    task.set_fewshot_seed(SEED)
    for document in documents:
        right = task.doc_to_text(document)
        asked = task.doc_to_choice(document)[right] if task.multiple_input else right
        context = requests(task, document, 5)[right if task.multiple_input else 0][0]
        assert context.endswith(asked)
        assert asked not in context.removesuffix(asked)


def test_the_mean_counts_every_column_once(group):
    import lm_eval
    from lm_eval.api.model import LM

    class Shortest(LM):
        """Finds a shorter continuation more probable, and nothing most probable."""

        def loglikelihood(self, requests):
            return [(-float(len(request.args[1])), False) for request in requests]

        loglikelihood_rolling = generate_until = None

    results = lm_eval.simple_evaluate(
        Shortest(),
        tasks=list(group["groups"].values()),
        task_manager=task_manager("unused"),
        num_fewshot=5,
        limit=0.004,  # of every task, so that their sizes differ
        bootstrap_iters=0,
        log_samples=False,
    )["results"]
    accuracies = [results[f"dcformer_{column}"]["acc,none"] for column in TABLE4_COLUMNS]
    weighted = sum(a * count for a, count in zip(accuracies, DOCUMENT_COUNTS.values())) / sum(DOCUMENT_COUNTS.values())
    assert abs(weighted - sum(accuracies) / 11) > 0.01
    assert results["dcformer_table4"]["acc,none"] == pytest.approx(sum(accuracies) / 11)
    assert not any("acc_norm" in name for result in results.values() for name in result)


def test_race_is_asked_as_before_version_three():
    document = {
        "article": "Tom has a cat.\nIt is black.",
        "problems": [
            {"question": "The cat is   _  .", "options": ["white", "black", "red", "blue"], "answer": "B"},
            {"question": "Who has a cat?", "options": ["Tom.", "Ann.", "Bob.", "Eve."], "answer": "A"},
            {"question": "Tom's cat _  .", "options": ["runs", "sits", "eats", "sleeps"], "answer": "D"},
            {"question": "The story is about   _  .", "options": ["a dog", "a cat", "a hat", "a mat"], "answer": "B"},
        ],
    }
    assert race_context(document) == (
        "Article: Tom has a cat.\n"
        "It is black.\n"
        "\n"
        " _  .black\n"
        "Question: Who has a cat?\n"
        "Answer: Tom.\n"
        "Question: Tom's cat _  .\n"
        "Answer: sleeps\n"
        "The story is about   _  ."
    )
    assert race_choices(document) == ["a dog", "a cat", "a hat", "a mat"]
    assert race_answer(document) == 1


def test_race_differs_from_lm_eval_only_in_solved_blanks(tasks):
    from lm_eval.tasks.race import preprocess_race as stock

    differing = 0
    for document in tasks["race_high"].eval_docs.select(range(50)):
        stock_document = {**document, "problems": repr(document["problems"])}
        expected = stock.doc_to_text(stock_document)
        for problem in document["problems"][:-1]:
            if problem["question"].endswith("  _  ."):
                answer = problem["options"]["ABCD".index(problem["answer"])]
                expected = expected.replace(f"\n{problem['question'][:-5]}{answer}\n", f"\n _  .{answer}\n")
                differing += 1
        assert race_context(document) == expected
        assert race_choices(document) == stock.doc_to_choice(stock_document)
        assert race_answer(document) == stock.doc_to_target(stock_document)
    assert differing > 10


def test_race_has_the_words_of_lm_eval_by_name(tasks):
    from lm_eval.tasks.race import preprocess_race as stock

    for document in tasks["race_high"].eval_docs.select(range(50)):
        assert race_context_lm_eval_0_4_13(document) == stock.doc_to_text(
            {**document, "problems": repr(document["problems"])}
        )


def test_a_science_question_without_a_text_is_asked_as_in_2023():
    with_text = {"support": " Ice melts.\n", "question": "What melts?"}
    assert sciq_context(with_text) == "Ice melts.\n\nQuestion: What melts?\nAnswer:"
    assert sciq_context(with_text) == sciq_context_lm_eval_0_4_13(with_text)
    for support in ("", " \n"):
        document = {"support": support, "question": "What melts?"}
        assert sciq_context(document) == "Question: What melts?\nAnswer:"
        assert sciq_context_lm_eval_0_4_13(document) == "\nQuestion: What melts?\nAnswer:"


def test_examples_of_lambada_have_one_space_as_in_2023_or_two_by_name():
    documents = datasets.Dataset.from_list([{"text": f"The cat number {i} has a hat"} for i in range(6)])
    found = {}
    for name in ("dcformer_lambada_openai", "dcformer_lambada_openai_lm_eval_0_4_13"):
        task = task_of(tasks_folder() / f"{name}.yaml", {"scored": documents, "examples": documents})
        task.set_fewshot_seed(SEED)
        ((context, continuation),) = requests(task, documents[0], 1)
        assert continuation == " hat"
        found[name] = context
    one, two = found.values()
    assert "has a hat\n\nThe" in one and two == one.replace("a hat\n", "a  hat\n")


def test_tasks_of_other_prompts_take_examples_and_are_no_columns_of_the_table():
    for task, column in OTHER_PROMPTS.items():
        assert suites.shots_of(task, (0, 5)) == (0, 5) and not suites.depends_on_tokenizer(task)
        assert data.data_folders(task) == (column,) and task not in suites.SUITES["all"]
        assert (tasks_folder() / f"dcformer_{task}.yaml").is_file()
    assert suites.find_tasks("lm_eval_0_4_13") == tuple(OTHER_PROMPTS)


def test_race_rows_of_one_question_are_grouped_by_article():
    def row(article, number):
        return {"article": article, "question": f"{article}{number}", "options": list("wxyz"), "answer": "C"}

    articles = group_by_article([row("second", 1), row("first", 1), row("second", 2)])
    assert [article["article"] for article in articles] == ["second", "first"]
    assert [problem["question"] for problem in articles[0]["problems"]] == ["second1", "second2"]


LOGIQA_TEXT = "\nb\nAll cats sleep.Tom is a cat.\nWhat follows?\nA.Tom runs.\nB.Tom sleeps. \nC.No cat.\nD.1.5 cats\n"


def test_the_authors_logiqa_text_is_read():
    first, second = parse_logiqa(LOGIQA_TEXT + LOGIQA_TEXT.replace("\nb\n", "\nd \n"))
    assert first == {
        "label": "b",
        "context": "All cats sleep. Tom is a cat.",
        "question": "What follows?",
        "options": ["Tom runs.", "Tom sleeps.", "No cat.", "1. 5 cats"],
    }
    assert second["label"] == "d"


@pytest.mark.parametrize(
    "damage", [("\nb\n", "\ne\n"), ("C.No cat.\n", ""), ("D.", "D.\n")], ids=["letter", "line", "more"]
)
def test_a_damaged_logiqa_block_is_named(damage):
    with pytest.raises(ValueError, match=r"Block 2 of 'test\.txt' is not a LogiQA question"):
        parse_logiqa(LOGIQA_TEXT + LOGIQA_TEXT.replace(*damage), "test.txt")


def piqa_rows(count, label=0):
    return [{"goal": f"goal {i}", "sol1": "this", "sol2": "that", "label": label} for i in range(count)]


def write_split(folder, column, split, rows, suffix="jsonl"):
    file = folder / column / f"{split}.{suffix}"
    file.parent.mkdir(exist_ok=True)
    if suffix == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_examples_come_from_train_if_there_is_one(tmp_path, suffix):
    write_split(tmp_path, "piqa", "validation", piqa_rows(3), suffix)
    assert len(load_documents("piqa", tmp_path)["examples"]) == 3
    write_split(tmp_path, "piqa", "train", piqa_rows(5), suffix)
    splits = load_documents("piqa", data_dir=str(tmp_path), pretrained="a model", version=1.0)
    assert {split: len(rows) for split, rows in splits.items()} == {"scored": 3, "examples": 5}


def test_race_files_hold_questions_or_articles(tmp_path):
    problems = [{"question": f"q{i}", "options": list("wxyz"), "answer": "A"} for i in range(2)]
    write_split(tmp_path, "race_middle", "test", [{"article": "text", **problem} for problem in problems])
    write_split(tmp_path, "race_high", "test", [{"article": "text", "problems": repr(problems)}])
    middle, high = (list(load_documents(column, tmp_path)["scored"]) for column in ("race_middle", "race_high"))
    assert middle == high == [{"article": "text", "problems": problems}]


def test_a_logiqa_folder_may_hold_the_authors_text(tmp_path):
    (tmp_path / "logiqa").mkdir()
    (tmp_path / "logiqa" / "test.txt").write_text(LOGIQA_TEXT, encoding="utf-8")
    assert load_documents("logiqa", tmp_path)["scored"][0]["label"] == "b"


def test_sciq_without_test_split_scores_validation_and_says_so(tmp_path, caplog):
    names = ("support", "question", "distractor1", "distractor2", "distractor3", "correct_answer")
    write_split(tmp_path, "sciq", "validation", [dict.fromkeys(names, "x")])
    assert len(load_documents("sciq", tmp_path)["scored"]) == 1
    assert "its validation split is scored in its place" in caplog.text


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"There is no folder '.*nowhere'; give a --data-dir"):
        load_documents("piqa", tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"There is no folder '.*piqa'; make one with the files of baber/piqa"):
        load_documents("piqa", tmp_path)
    (tmp_path / "piqa").mkdir()
    with pytest.raises(
        FileNotFoundError, match=r"no file '.*validation\.parquet' \(or \.jsonl\); put the validation split of"
    ):
        load_documents("piqa", tmp_path)
    with pytest.raises(ValueError, match="There is no column 'race' in Table 4; choose from lambada_openai"):
        load_documents("race", tmp_path)


def test_wrong_columns_are_named(tmp_path):
    write_split(tmp_path, "piqa", "validation", [{"goal": "g", "sol1": "a", "label": 0}])
    with pytest.raises(
        ValueError, match=r"validation\.jsonl' has no column 'sol2'; it must have goal, sol1, sol2, label"
    ):
        load_documents("piqa", tmp_path)
    write_split(tmp_path, "race_high", "test", [{"article": "text"}])
    with pytest.raises(ValueError, match="has no column 'question'"):
        load_documents("race_high", tmp_path)
    write_split(tmp_path, "race_high", "test", [{"article": "text", "problems": "[{'question': 'q'}]"}])
    with pytest.raises(ValueError, match="The problems of article 1 in"):
        load_documents("race_high", tmp_path)


def test_a_split_without_answers_is_refused(tmp_path):
    write_split(tmp_path, "piqa", "validation", piqa_rows(2, label=-1))
    with pytest.raises(ValueError, match="has -1 as label, which must be one of 0, 1; use the validation split"):
        load_documents("piqa", tmp_path)


@pytest.mark.parametrize("text", ["not JSON\n", "[1, 2]\n"], ids=["no_json", "no_object"])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_damaged_files_are_named(tmp_path, suffix, text):
    write_split(tmp_path, "piqa", "validation", piqa_rows(1), suffix).write_text(text)
    with pytest.raises(ValueError, match=rf"validation\.{suffix}' cannot be read as {suffix}: write it again"):
        load_documents("piqa", tmp_path)


def test_an_empty_file_is_named(tmp_path):
    write_split(tmp_path, "piqa", "validation", [])
    with pytest.raises(ValueError, match="holds no documents"):
        load_documents("piqa", tmp_path)


@pytest.mark.parametrize("column", ["piqa", "race_middle", "logiqa"])
def test_without_network_the_folder_is_suggested(monkeypatch, tmp_path, column):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for name in ("HF_DATASETS_CACHE", "DOWNLOADED_DATASETS_PATH"):
        monkeypatch.setattr(datasets.config, name, tmp_path)
    with pytest.raises(
        FileNotFoundError, match=rf"{column} .* cannot be downloaded.*; check the network, or give a --data-dir"
    ):
        load_documents(column)


def test_a_fetched_file_must_be_the_one_that_was_asked_for(tmp_path):
    (tmp_path / "Test.txt").write_text(LOGIQA_TEXT, encoding="utf-8")

    def fetched(sha256):
        files = {"test": ("Test.txt", sha256)}
        source = sources.Source("somebody/LogiQA", revision="v1", address=str(tmp_path), files=files)
        return data.fetch_file(source, "test")

    file, revision = fetched(digest(LOGIQA_TEXT))
    assert file.read_text(encoding="utf-8") == LOGIQA_TEXT and revision == "v1"
    with pytest.raises(ValueError, match=r"has the sha256 .* instead of 0000; download it yourself"):
        fetched("0000")


REVISION = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture
def published(monkeypatch, tmp_path):
    """Lets the Hub have some data sets alone; an error is raised in place of one, `None` cannot be reached."""

    def publish(by_path):
        def load_dataset(path, name, revision):
            found = by_path.get(path) or ConnectionError("no route")
            if isinstance(found, Exception):
                raise found
            return datasets.DatasetDict({split: cached(path, split, rows) for split, rows in found.items()})

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    def cached(path, split, rows):
        """As `datasets` has rows in its cache: in a folder named by the git revision."""
        folder = tmp_path / f"{next(numbers)}" / path.replace("/", "___") / "default" / "0.0.0" / REVISION
        datasets.Dataset.from_list(rows).save_to_disk(folder)
        (file,) = folder.glob("*.arrow")
        return datasets.Dataset.from_file(str(file))

    numbers = itertools.count()
    return publish


def hash_of_piqa(rows):
    return documents_hash([row["goal"], row["sol1"], row["sol2"], str(row["label"])] for row in rows)


def test_published_splits_are_chosen_like_local_ones(monkeypatch, published):
    rows = {"train": piqa_rows(4), "validation": piqa_rows(3), "test": piqa_rows(2)}
    published({"baber/piqa": rows})
    monkeypatch.setitem(sources.DOCUMENT_HASHES, "piqa", hash_of_piqa(piqa_rows(3)))
    documents = load_documents("piqa")
    assert {split: len(rows) for split, rows in documents.items()} == {"scored": 3, "examples": 4}
    assert origin_of(documents["scored"]) == {
        "source": "baber/piqa",
        "hash": hash_of_piqa(piqa_rows(3)),
        "as_known": True,
        "revision": REVISION,
    }
    assert origin_of(documents["examples"])["hash"] == hash_of_piqa(piqa_rows(4))


def test_another_source_is_taken_only_with_the_same_documents(monkeypatch, published, caplog):
    right, wrong = piqa_rows(3), piqa_rows(3, label=1)
    monkeypatch.setitem(sources.DOCUMENT_HASHES, "piqa", hash_of_piqa(right))
    no_script = RuntimeError("Dataset scripts are no longer supported, but found piqa.py")
    other_sizes = datasets.exceptions.DatasetGenerationError("3 rows instead of 4")
    for first in (None, {"validation": wrong}, no_script, other_sizes):
        # The order of questions decides nothing.
        published({"baber/piqa": first, "ybisk/piqa": {"validation": right[::-1]}})
        origin = origin_of(load_documents("piqa")["scored"])
        assert origin["source"] == "ybisk/piqa (plain_text)" and origin["as_known"]
        assert origin["revision"] == REVISION
        assert "piqa: ybisk/piqa (plain_text) is read in place of baber/piqa" in caplog.text
    published({"ybisk/piqa": {"validation": wrong}})
    with pytest.raises(ValueError, match=f"No source of piqa .* have the hash {hash_of_piqa(wrong)}, not sha256:"):
        load_documents("piqa")
    published({"baber/piqa": no_script})
    with pytest.raises(ValueError, match=r"baber/piqa: it cannot be read \(Dataset scripts are no longer supported"):
        load_documents("piqa")
    published({"ybisk/piqa": {"validation": wrong}})
    assert origin_of(load_documents("piqa", data_hash="any")["scored"])["as_known"] is False


def test_where_no_hash_is_known_only_the_first_source_is_taken(monkeypatch, published):
    monkeypatch.delitem(sources.DOCUMENT_HASHES, "piqa")
    published({"ybisk/piqa": {"validation": piqa_rows(3)}})
    with pytest.raises(ValueError, match="no hash is known that could tell whether they are the right ones"):
        load_documents("piqa")
    assert len(load_documents("piqa", data_hash=hash_of_piqa(piqa_rows(3)))["scored"]) == 3
    published({"baber/piqa": {"validation": piqa_rows(3)}})
    assert origin_of(load_documents("piqa")["scored"])["as_known"] is None


def test_a_folder_must_have_the_hash_that_was_asked_for(tmp_path):
    write_split(tmp_path, "piqa", "validation", piqa_rows(3))
    found = origin_of(load_documents("piqa", tmp_path, data_hash=hash_of_piqa(piqa_rows(3)))["scored"])
    assert found["source"] == "files of --data-dir" and found["as_known"] is False
    with pytest.raises(ValueError, match=f"have the hash {found['hash']} instead of sha256:00; check the files"):
        load_documents("piqa", tmp_path, data_hash="sha256:00")


def test_datasets_is_asked_for_by_name(monkeypatch, tmp_path):
    write_split(tmp_path, "piqa", "validation", piqa_rows(1))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'dcformer\[eval\]'"):
        load_documents("piqa", tmp_path)


def test_the_fingerprint_follows_names_and_contents(tmp_path):
    write_split(tmp_path, "piqa", "validation", piqa_rows(1))
    first = data.data_fingerprint(tmp_path, "piqa")
    assert first.startswith("sha256:") and data.data_fingerprint(str(tmp_path), "piqa") == first
    write_split(tmp_path, "piqa", "validation", piqa_rows(2))
    second = data.data_fingerprint(tmp_path, "piqa")
    (tmp_path / "piqa" / "validation.jsonl").rename(tmp_path / "piqa" / "train.jsonl")
    assert len({first, second, data.data_fingerprint(tmp_path, "piqa")}) == 3
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        data.data_fingerprint(tmp_path, "boolq")


def test_the_fingerprint_of_published_data_names_them(monkeypatch, tmp_path):
    constants = huggingface_hub.constants
    data._newest_revision.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "ENDPOINT", tmp_path.as_uri())
    assert data.data_fingerprint(None, "logiqa") == f"lgw863/LogiQA-dataset@{sources.LOGIQA_REVISION}"
    assert data.data_fingerprint(None, "arc_easy") == "allenai/ai2_arc (ARC-Easy)@unknown"

    (tmp_path / "api/datasets/allenai").mkdir(parents=True)
    (tmp_path / "api/datasets/allenai/sciq").write_text('{"sha": "f0e1"}')
    assert data.data_fingerprint(None, "sciq") == "allenai/sciq@f0e1"

    cached = tmp_path / "cache/datasets--baber--piqa"
    for name, text in (("refs/main", "a2b3"), ("snapshots/a2b3/README.md", "")):
        (cached / name).parent.mkdir(parents=True)
        (cached / name).write_text(text)
    assert data.data_fingerprint(None, "piqa") == "baber/piqa@a2b3"

    with pytest.raises(ValueError, match="The data of 'trivia' have no known source; give a --data-dir"):
        data.data_fingerprint(None, "trivia")
    data._newest_revision.cache_clear()


def test_the_list_of_tasks_holds_every_task_once_with_its_suite_and_source():
    summaries = list_tasks()
    assert [summary.name for summary in summaries] == [*suites.TASKS, suites.HEAD_TASKS]
    by_name = {summary.name: summary for summary in summaries}
    assert by_name["piqa"] == TaskSummary(
        "piqa", "table4", "which of two ways reaches an everyday goal", (0, 5), "baber/piqa"
    )
    assert by_name["head_tasks_authors_k3"].paper_shots == (3,)
    assert by_name["pile_ppl"].source == "mit-han-lab/pile-val-backup"
    assert by_name["wikitext2_ppl"].paper_shots == ()
    for summary in summaries[:-1]:
        assert summary.name in suites.find_tasks(summary.suite) and summary.asks
    assert (tasks_folder() / "dcformer_piqa.yaml").is_file()


def test_every_public_name_of_the_package_is_there():
    import dcformer.eval

    for name in dcformer.eval.__all__:
        assert getattr(dcformer.eval, name).__name__ == name
    with pytest.raises(ImportError, match="nothing"):
        from dcformer.eval import nothing  # noqa: F401


if __name__ == "__main__":
    folder = Path(os.environ.get("DCFORMER_FIXTURES", Path(__file__).resolve().parents[3] / "shared")) / "benchdata"
    expected = {name.removeprefix("dcformer_"): rendered(task) for name, task in load_group(folder)["tasks"].items()}
    EXPECTED.write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")
