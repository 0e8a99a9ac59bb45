"""The tasks: documents, prompts word for word, where examples come from, and what happens with other data.

`data/eval_prompts_table4.json` holds what the first document of every column must render to: hashes and the ends of the
texts, since the licences of the data forbid more. `python tests/eval/test_eval_tasks.py` rewrites it.
"""

import functools
import hashlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model


pytest.importorskip("lm_eval", reason="the tasks are lm-eval's")

import datasets
import lm_eval
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.tasks.race import preprocess_race
from test_eval_model import by_hand

from dcformer.eval import (
    SUITES,
    TABLE4_COLUMNS,
    DCFormerLM,
    evaluator,
    find_tasks,
    list_tasks,
    perplexity,
    race_prompts,
    source_of,
    suites,
    task_data,
    task_manager,
    tasks_folder,
)
from dcformer.eval import head_task_answers as tasks_of_heads
from dcformer.eval.suites import OTHER_PROMPTS, TASKS
from dcformer.head_tasks import build_tokenizer, held_out_questions


EXPECTED = Path(__file__).parent / "data" / "eval_prompts_table4.json"
SEED = 1234
STOCK = {
    "piqa": "piqa/piqa.yaml",
    "winogrande": "winogrande/default.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "logiqa": "logiqa/logiqa.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
}
# Fields that determine a prompt.
PROMPT_FIELDS = ("doc_to_text", "doc_to_choice", "doc_to_target", "process_docs", "output_type")


def load_group(folder):
    metadata = {"data_dir": str(folder), "pretrained": "one of the model's arguments"}
    return task_manager(metadata).load(["dcformer_table4"])


@pytest.fixture(scope="module")
def group(fixtures):
    return load_group(fixtures / "benchdata")


@pytest.fixture(scope="module")
def tasks(group):
    return {name.removeprefix("dcformer_"): task for name, task in group["tasks"].items()}


def task_of(name, splits):
    """A task by its definition, but on other documents."""
    config = load_yaml(tasks_folder() / f"dcformer_{name}.yaml") | {"custom_dataset": lambda **_: splits}
    config.pop("dataset_kwargs", None)
    task = ConfigurableTask(config=config)
    task.set_fewshot_seed(SEED)
    return task


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
        ends = [{"sha256": digest(text), "first": text[:120], "last": text[-120:]} for text in contexts]
        result[f"{shots}_shot"] = ends
    result["continuations"] = digest(json.dumps([continuation for _, continuation in requests(task, document, 0)]))
    target = task.doc_to_target(document)
    if isinstance(target, str) and target.isdecimal():
        target = int(target)
    # Of the two contexts of winogrande, the right one is what doc_to_text gives.
    result["right"] = task.doc_to_text(document) if task.multiple_input else target
    return result


@pytest.mark.parametrize("column", TABLE4_COLUMNS)
def test_every_column_scores_all_published_documents_and_renders_the_first_as_stored(tasks, column):
    task = tasks[column]
    assert len(task.eval_docs) == source_of(column).count
    assert rendered(task) == json.loads(EXPECTED.read_text(encoding="utf-8"))[column]
    origin = task.dataset["origin"]
    assert origin["as_known"] is (None if column == "sciq" else True), origin  # of SciQ only validation is at hand
    assert ("stands_in_for" in origin) == (column == "sciq")


@pytest.mark.parametrize("column", STOCK)
def test_seven_columns_have_lm_evals_templates_and_functions(column):
    stock = load_yaml(Path(lm_eval.tasks.__file__).parent / STOCK[column])
    ours = load_yaml(tasks_folder() / f"dcformer_{column}.yaml")

    def comparable(value):
        return value.__code__.co_code if callable(value) else value

    ours["process_docs"] = ours["dataset_kwargs"].get("process")
    for name in PROMPT_FIELDS:
        assert comparable(ours.get(name)) == comparable(stock.get(name)), name


def test_the_mean_counts_every_column_once(group):
    config = group["groups"]["dcformer_table4"].aggregate_metric_list[0]
    assert (config.metric, config.aggregation, config.weight_by_size) == ("acc", "mean", False)
    assert group["group_map"] == {"dcformer_table4": [f"dcformer_{column}" for column in TABLE4_COLUMNS]}


@pytest.mark.parametrize("column", ["arc_easy", "hellaswag", "lambada_openai", "race_middle", "winogrande"])
def test_a_document_is_never_one_of_its_examples(tasks, column):
    # Five of six are sampled, so a document that was not excluded would nearly always be among them.
    documents = tasks[column].dataset["scored"].select(range(6))
    task = task_of(column, {"scored": documents, "examples": documents})
    for document in documents:
        right = task.doc_to_text(document)
        asked = task.doc_to_choice(document)[right] if task.multiple_input else right
        context = requests(task, document, 5)[right if task.multiple_input else 0][0]
        assert context.endswith(asked) and asked not in context.removesuffix(asked)


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
    assert race_prompts.race_context(document) == (
        "Article: Tom has a cat.\nIt is black.\n\n _  .black\nQuestion: Who has a cat?\nAnswer: Tom.\n"
        "Question: Tom's cat _  .\nAnswer: sleeps\nThe story is about   _  ."
    )
    assert race_prompts.race_choices(document)[race_prompts.race_answer(document)] == "a cat"


def test_other_prompts_have_the_words_of_lm_eval(tasks):
    for document in tasks["race_high"].eval_docs.select(range(50)):
        theirs = {**document, "problems": repr(document["problems"])}
        assert race_prompts.race_context_lm_eval_0_4_13(document) == preprocess_race.doc_to_text(theirs)
        assert race_prompts.race_choices(document) == preprocess_race.doc_to_choice(theirs)
        assert race_prompts.race_answer(document) == preprocess_race.doc_to_target(theirs)
    for name, start in (("sciq", ""), ("sciq_lm_eval_0_4_13", "\n")):
        task, asked = task_of(name, tasks["sciq"].dataset), f"{start}Question: What melts?\nAnswer:"
        assert all(task.doc_to_text({"support": text, "question": "What melts?"}) == asked for text in ("", " \n"))
        assert task.doc_to_text({"support": " Ice. ", "question": "What?"}) == "Ice. \nQuestion: What?\nAnswer:"
    documents = datasets.Dataset.from_list([{"text": f"The cat number {i} has a hat"} for i in range(6)])
    names = ("lambada_openai", "lambada_openai_lm_eval_0_4_13")
    both = [task_of(name, {"scored": documents, "examples": documents}) for name in names]
    (one, word), (two, same) = (requests(task, documents[0], 1)[0] for task in both)
    assert word == same == " hat" and "has a hat\n\nThe" in one and two == one.replace("a hat\n", "a  hat\n")


def write_rows(folder, column, split, rows):
    (folder / column).mkdir(exist_ok=True)
    datasets.Dataset.from_list(rows).to_parquet(folder / column / f"{split}.parquet")


def test_examples_come_from_train_and_files_may_be_of_several_layouts(tmp_path):
    write_rows(tmp_path, "race_high", "train", [ROWS["race_high"]])
    write_rows(tmp_path, "race_high", "test", [{"article": name, **QUESTION} for name in "XYX"])
    documents = task_data.load_documents("race_high", tmp_path)
    assert [row["article"] for row in documents["examples"]] == ["T"]
    assert [(row["article"], len(row["problems"])) for row in documents["scored"]] == [("X", 2), ("Y", 1)]
    (tmp_path / "logiqa").mkdir()
    (tmp_path / "logiqa" / "test.txt").write_text(f"{LOGIQA}\n\n{LOGIQA}\n")
    (first, _) = task_data.load_documents("logiqa", tmp_path)["scored"]
    options = ["Tom", "Ann", "Bob", "Eve"]
    assert first == {"label": "b", "context": "Tom runs. He sits.", "question": "Who?", "options": options}


LOGIQA = "b\nTom runs.He sits.\nWho?\nA.Tom\nB.Ann\nC.Bob\nD.Eve"
QUESTION = {"question": "Who?", "options": list("abcd"), "answer": "A"}
ROWS = {
    "piqa": {"goal": "Sit", "sol1": "a", "sol2": "b", "label": 0},
    "arc_easy": {"question": "Who?", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "A"},
    "race_high": {"article": "T", "problems": repr([QUESTION])},
}


PILE, PIQA = '{"text": "a"}', json.dumps(ROWS["piqa"])
NULLS = {
    "piqa/validation": {"sol1": None},
    "arc_easy/test": {"choices": {"text": ["a", None], "label": ["A", "B"]}},
    "race_high/test": {"problems": repr([{**QUESTION, "question": None}])},
}


def second_has_null(name):
    column = name.split("/")[0]
    row = ROWS[column] | {"note": None}  # which no prompt reads
    words = f"'{next(iter(NULLS[name]))}' is null or missing in document 2 of {column} in "
    return f"{name}.jsonl", f"{json.dumps(row)}\n{json.dumps(row | NULLS[name])}", words


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("pile/a.jsonl", f'{PILE}\n\n{{"text": null}}', r"Line 3 of .*a\.jsonl' has no 'text' that is a text"),
        ("pile/a.jsonl", f'{PILE}\n{{"body": "a"}}', "Line 2 .* has no 'text' that is a text; its keys are body"),
        ("pile/a.jsonl", f"{PILE}\n[{PILE}]", "Line 2 .* must be an object of JSON, got .*'text': 'a'"),
        ("pile/a.jsonl", '{"text": "\\uD800"}', "Line 1 .* is no JSON in UTF-8: .*surrogates"),
        ("pile/a.jsonl", b'{"text": "\xff"}', "Line 1 .* is no JSON in UTF-8: .*0xff"),
        ("pile/a.jsonl.ZST", b"junk", r"a\.jsonl\.ZST' cannot be read after line 0: "),
        ("pile/a.jsonl", '{"text": ""}\n', "no text in the 1 documents of pile"),
        ("pile/a.tsv", "a\tb", r"no file \*\.jsonl or \*\.jsonl\.zst in .*pile'"),
        ("flan/a.jsonl", '{"inputs": "a", "targets": " "}', "nothing to score in 1 examples of flan"),
        ("wikitext2/wikitext2_test.txt", b"\xff\xfea\0", r"wikitext2_test\.txt' is no text in UTF-8: .*0xff"),
        ("wikitext2/wikitext2_test.txt", "", "no text in the 1 documents of wikitext2"),
        ("synthetic/other.jsonl", "{}", r"no file synthetic_dataset\.jsonl in .*synthetic'"),
        ("piqa/validation.jsonl", f"{PIQA}\n{PIQA[:-1]}", "Line 2 .* is no JSON in UTF-8"),
        ("piqa/validation.jsonl", f"{PIQA}\n{PIQA.replace('0', '[0]')}", r"validation\.jsonl' cannot be read: "),
        ("piqa/validation.jsonl", '{"goal": "a"}', r"with 'sol1' in .*validation\.jsonl'; its fields are \['goal'\]"),
        ("piqa/validation.jsonl", "", "no documents with 'goal'"),
        ("piqa/validation.parquet", b"junk", r"validation\.parquet' cannot be read: "),
        ("piqa/x.tsv", "", r"no file \*\.parquet or .*\*\.zst in .*piqa'"),
        ("piqa/test.jsonl", PIQA, r"no validation split of baber/piqa: validation.parquet or .*\.jsonl in .*piqa'"),
        ("race_high/test.jsonl", '{"article": "a"}', "with 'question' in"),
        ("logiqa/test.txt", f"{LOGIQA}\n\nb\nonly two lines", "Block 2"),
        *map(second_has_null, NULLS),
    ],
)
def test_files_that_hold_no_documents_are_refused_with_the_place(name, content, words, tmp_path):
    file = tmp_path / name
    file.parent.mkdir()
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    column, settings = file.parent.name, {"data_dir": str(tmp_path), "max_length": 2048, "tokenizer": build_tokenizer()}
    loaders = {name: getattr(perplexity, f"load_{name}") for name in ("pile", "flan", "wikitext2")}
    loaders["synthetic"] = functools.partial(tasks_of_heads.load_authors_texts, 2)
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        loaders.get(column, functools.partial(task_data.load_documents, column))(**settings)


def test_files_may_begin_with_a_mark_and_have_endings_in_upper_case(tmp_path):
    article, example = " \n = A = \n \n text \n", '{"inputs": "a", "targets": "b"}'
    names = {"pile/corpus.JSONL": PILE, "flan/A.Jsonl": example, "wikitext2/WikiText2_test.TXT": article}
    names |= {"piqa/VALIDATION.JSONL": f"{PIQA}\r\n\r\n\ufeff{PIQA}", "logiqa/Test.TXT": LOGIQA}
    for name, content in names.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("\ufeff" + content, encoding="utf-8")
        assert task_data.data_fingerprint(tmp_path, name.split("/")[0]).startswith("sha256:")
    settings = {"data_dir": str(tmp_path), "max_length": 2048, "tokenizer": build_tokenizer()}
    assert perplexity.load_pile(**settings)["test"]["text"][:] == ["a<|endoftext|>"]
    assert perplexity.load_flan(**settings)["test"]["context"][:] == ["a"]
    assert perplexity.load_wikitext2(**settings)["test"]["text"][:] == [f"{article}<|endoftext|>"]
    assert task_data.load_documents("piqa", tmp_path)["scored"]["goal"][:] == ["Sit", "Sit"]
    assert task_data.load_documents("logiqa", tmp_path)["scored"]["label"][:] == ["b"]


def test_other_documents_than_the_published_ones_are_refused_or_marked(tmp_path, monkeypatch):
    row = ROWS["piqa"]
    write_rows(tmp_path, "piqa", "validation", [row])
    origin = task_data.load_documents("piqa", tmp_path)["origin"]
    assert origin["as_known"] is False
    assert task_data.load_documents("piqa", tmp_path, data_hash=origin["hash"])
    with pytest.raises(ValueError, match=origin["hash"]):
        task_data.load_documents("piqa", tmp_path, data_hash="sha256:" + 64 * "0")
    published = {"validation": datasets.Dataset.from_list([row])}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: published)
    with pytest.raises(ValueError, match=source_of("piqa").hash):
        task_data.load_documents("piqa")
    assert task_data.load_documents("piqa", data_hash="any")
    write_rows(tmp_path, "piqa", "validation", [{**row, "label": -1}])
    with pytest.raises(ValueError, match="'-1'"):
        task_data.load_documents("piqa", tmp_path)


def test_a_hash_is_of_the_documents_and_not_of_their_order_unless_that_matters():
    one, other = [("a", 1), ("b", {"y": 2, "x": 1})], [("b", {"x": 1, "y": 2}), ("a", 1)]
    assert task_data.documents_hash(one) == task_data.documents_hash(other)
    assert task_data.documents_hash(one, is_ordered=True) != task_data.documents_hash(other, is_ordered=True)
    lines = '["a",1]\n["b",{"x":1,"y":2}]\n'
    assert task_data.documents_hash(one) == "sha256:" + hashlib.sha256(lines.encode()).hexdigest()


def test_indices_are_spread_over_all():
    assert task_data.spread_indices(10, 4) == [0, 2, 5, 7] and task_data.spread_indices(3, 9) == [0, 1, 2]
    assert task_data.spread_order(6) == [0, 4, 2, 1, 5, 3]


def test_names_of_tasks_and_suites(monkeypatch):
    monkeypatch.setattr(suites, "_of_lm_eval", dict)  # whose index takes many seconds
    assert find_tasks("table4,perplexity") == (*TABLE4_COLUMNS, "pile_ppl", "flan_ppl")
    assert find_tasks(tasks=["dcformer_piqa", "table4"])[:2] == ("piqa", "lambada_openai")
    assert find_tasks("head_tasks") == SUITES["head_tasks"] and find_tasks(tasks="head_tasks") == ("head_tasks",)
    for names in ({"suite": "tabel4"}, {"tasks": "piqa,boolk"}, {"tasks": ""}):
        with pytest.raises(ValueError, match="choose from"):
            find_tasks(**names)
    assert [task.name for task in list_tasks()][: len(TASKS)] == list(TASKS)  # others, which somebody adds, follow
    files = {file.stem.removeprefix("dcformer_") for file in tasks_folder().glob("dcformer_*.yaml")}
    assert files >= {*TASKS, "table4", "head_tasks_authors"} and set(OTHER_PROMPTS) <= files


def test_the_authors_texts_have_5328_answers_whose_tokens_are_those_of_the_whole_text(data_dir, tokenizer):
    texts = [text for _, text in tasks_of_heads.authors_texts(data_dir)]
    answers = [answer for text in texts for _, answer in tasks_of_heads.bracketed_answers(text).values()]
    lengths = [len(ids) for ids in tokenizer(answers)["input_ids"]]
    assert len(lengths) == 5328 and sum(length > 1 for length in lengths) == 622 and max(lengths) == 5
    for shots, limit in ((7, 37), (2, None)):  # one of 24 texts, and all
        rows = tasks_of_heads.load_authors_texts(shots, data_dir, limit, tokenizer=tokenizer)["test"]
        assert rows["n_tokens"][:] == lengths[shots - 2 :: 6 * (888 // (limit or 888))]
        assert all(rows["has_first_token"]) and {*rows["n_unscored"]} == {888 - len(rows)}
    first = rows[0]
    asked = "\n< Ruth has a sweater. Steven has a taxi. Ruth has a handgun. >. Ruth does not have a kind of"
    assert first["context"].endswith(asked)
    assert first["continuations"] == [" vehicle"] and (first["task"], first["document"]) == ("task0", 0)
    for text in texts[::7]:
        whole = tokenizer(text.replace(" [", "").replace(" ]", ""))["input_ids"]
        for context, answer in tasks_of_heads.bracketed_answers(text).values():
            joined = tokenizer(context)["input_ids"] + tokenizer(answer)["input_ids"]
            assert joined == whole[: len(joined)]


def test_head_tasks_score_what_plain_forward_passes_do():
    """Numbers computed here from logits of whole texts, for accuracy, perplexities and their breakdown."""
    tokenizer = build_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=512)
    scorer = DCFormerLM(model, tokenizer=tokenizer, max_length=512, on_progress=lambda *_: None)
    loaded = task_manager({"tokenizer": tokenizer, "windows": 4}).load(["dcformer_head_tasks"])
    output = lm_eval.evaluate(scorer, loaded, bootstrap_iters=0)
    samples = [evaluator._as_sample(sample) for sample in output["samples"]["dcformer_head_tasks"]]
    questions = held_out_questions(documents=4)
    assert [sample["requests"][0]["continuation"] for sample in samples] == [row["answer"] for row in questions]
    expected = [by_hand((tokenizer, model), row["context"], row["answer"], most=512) for row in questions]
    loss, right = torch.tensor([(-value, is_greedy) for value, is_greedy in expected]).double().T
    tokens = torch.tensor([len(tokenizer(row["answer"])["input_ids"]) - 1 for row in questions])  # one begins a text
    results = output["results"]["dcformer_head_tasks"]
    assert results["acc,none"] == right.mean() and len(samples) == 32
    assert results["answer_perplexity,none"] == pytest.approx(float(loss.mean().exp()), rel=1e-5)
    assert results["token_perplexity,none"] == pytest.approx(float((loss.sum() / tokens.sum()).exp()), rel=1e-5)
    assert [sample["fields"]["shots"] for sample in samples] == [row["shots"] for row in questions]
    # A text is computed once for its eight answers.
    whole = [row["context"] + row["answer"] for row in questions if row["shots"] == 7]
    assert scorer.computed_tokens == sum(len(ids) - 1 for ids in tokenizer(whole)["input_ids"])


if __name__ == "__main__":
    loaded = load_group(os.environ["DCFORMER_FIXTURES"] + "/benchdata")["tasks"]
    stored = {name.removeprefix("dcformer_"): rendered(task) for name, task in loaded.items()}
    EXPECTED.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    sys.stdout.write(f"{EXPECTED}\n")
