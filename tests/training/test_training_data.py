"""Where training documents come from, which of their tokens are scored, and what is said when they cannot be read."""

import gzip
import json
import os

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from dcformer.head_tasks import build_tokenizer, generate_documents
from dcformer.training import data as training_data
from dcformer.training.data import DataRecipe, build_datasets


datasets = pytest.importorskip("datasets")

TEXTS = [f"w{number} w{number + 1} w{number + 2} w{number % 7}" for number in range(0, 60, 3)]
WORDS = {word: number for number, word in enumerate(["<end>", "<pad>", *(f"w{number}" for number in range(70))])}


@pytest.fixture(autouse=True)
def quiet_empty_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def word_tokenizer(begins: bool = False, ends: bool = True) -> PreTrainedTokenizerFast:
    """A token per word; optionally one that begins every text by itself, or one that may end texts."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
    special = {"bos_token": "<end>"} if begins else {}
    if ends:
        special["eos_token"] = "<end>"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", **special)


def recipe(source, **values) -> DataRecipe:
    return DataRecipe.from_mapping({"source": str(source), "sequence_length": 8, **values})


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def rows_of(source, tokenizer=None, seed=0, **values) -> list[dict]:
    return list(build_datasets(recipe(source, **values), tokenizer or word_tokenizer(), seed)[0])


def documents_in(rows: list[dict], tokenizer=None) -> list[str]:
    """The documents of rows, in their order, if every document ends with <end>."""
    tokens = [token for row in rows for token in row["input_ids"] if token != WORDS["<pad>"]]
    text = (tokenizer or word_tokenizer()).decode(tokens)
    return [document.strip() for document in text.split("<end>") if document.strip()]


def write(layout: str, folder):
    """The texts in one of the forms that a source may have; returns the source."""
    rows = datasets.Dataset.from_dict({"text": TEXTS, "number": list(range(len(TEXTS)))})
    folder.mkdir()
    if layout == "jsonl":
        return write_jsonl(folder / "a.jsonl", TEXTS)
    if layout == "json":
        (folder / "a.json").write_text(json.dumps([{"text": text} for text in TEXTS], indent=1))
        return folder / "a.json"
    if layout == "jsonl.gz":
        with gzip.open(folder / "a.jsonl.gz", "wt") as stream:
            stream.writelines(json.dumps({"text": text}) + "\n" for text in TEXTS)
        return folder / "a.jsonl.gz"
    if layout == "txt":
        (folder / "a.txt").write_text("\n".join(TEXTS) + "\n\n")
        return folder / "a.txt"
    if layout == "parquet":
        rows.to_parquet(folder / "a.parquet")
        return folder / "a.parquet"
    if layout == "csv":
        rows.to_csv(folder / "a.csv")
        return folder / "a.csv"
    if layout == "saved":
        rows.save_to_disk(folder)
    elif layout == "saved_splits":
        datasets.DatasetDict({"train": rows, "validation": rows.select([0])}).save_to_disk(folder)
    else:
        write_jsonl(folder / "train.jsonl", TEXTS)
        write_jsonl(folder / "validation.jsonl", TEXTS[:1])
    return folder


@pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])
@pytest.mark.parametrize(
    "layout", ["jsonl", "json", "jsonl.gz", "txt", "parquet", "csv", "saved", "saved_splits", "files"]
)
def test_every_form_of_source_gives_all_documents(layout, streaming, tmp_path):
    rows = rows_of(write(layout, tmp_path / "source"), streaming=streaming)

    assert sorted(documents_in(rows)) == sorted(TEXTS)
    assert all(len(values) == 8 for row in rows for values in row.values())


@pytest.mark.parametrize("layout", ["saved_splits", "files"])
def test_other_splits_of_a_folder_are_the_evaluation_in_their_order(layout, tmp_path):
    source = write(layout, tmp_path / "source")
    train, evaluation = build_datasets(recipe(source, evaluation={"split": "validation"}), word_tokenizer())

    assert documents_in(evaluation) == TEXTS[:1]
    assert len(train) > len(evaluation)


def test_documents_are_shuffled_by_the_seed_before_packing(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    orders = [documents_in(rows_of(source, seed=seed)) for seed in (0, 0, 1)]

    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0] != TEXTS
    assert sorted(orders[0]) == sorted(orders[2]) == sorted(TEXTS)


def test_evaluation_keeps_the_order_whatever_the_seed(tmp_path):
    train, other = write_jsonl(tmp_path / "a.jsonl", TEXTS[:3]), write_jsonl(tmp_path / "b.jsonl", TEXTS[3:])
    for seed in (0, 1):
        built = recipe(train, evaluation={"source": str(other)})
        assert documents_in(build_datasets(built, word_tokenizer(), seed)[1]) == TEXTS[3:]


def test_no_more_documents_than_wanted(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    for streaming in (False, True):
        assert sorted(documents_in(rows_of(source, documents=3, streaming=streaming))) == sorted(TEXTS[:3])
        assert len(documents_in(rows_of(source, documents=100, streaming=streaming))) == len(TEXTS)


def test_a_text_column_of_another_name(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "w1 w2", "text": 5}\n{"body": "w3", "text": 6}\n')

    assert sorted(documents_in(rows_of(tmp_path / "a.jsonl", text_column="body"))) == ["w1 w2", "w3"]


def test_empty_documents_leave_no_trace(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["", "w1 w2", None, "  ", "w3"])
    for tokenizer in (word_tokenizer(), word_tokenizer(begins=True)):
        tokens = [token for row in rows_of(source, tokenizer) for token in row["input_ids"]]
        assert tokens.count(WORDS["<end>"]) == 2


def test_a_token_that_begins_texts_stands_before_documents(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["w1 w2"])
    (row,) = rows_of(source, word_tokenizer(begins=True))

    end, pad, w1, w2 = (WORDS[word] for word in ("<end>", "<pad>", "w1", "w2"))
    assert row["input_ids"] == [end, w1, w2] + [pad] * 5
    assert row["labels"] == [-100, w1, w2] + [-100] * 5
    assert row["position_ids"] == [0, 1, 2, 0, 1, 2, 3, 4]


def test_otherwise_the_end_of_text_token_stands_behind_documents_and_is_predicted(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["w1 w2"])
    (row,) = rows_of(source, word_tokenizer())

    end, w1, w2 = (WORDS[word] for word in ("<end>", "w1", "w2"))
    assert row["input_ids"][:3] == [w1, w2, end]
    assert row["labels"][:4] == [-100, w2, end, -100]


def test_without_either_token_positions_alone_divide_documents(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["w1 w2", "w3 w4 w5"])
    (row,) = rows_of(source, word_tokenizer(ends=False))

    assert WORDS["<end>"] not in row["input_ids"]
    assert row["position_ids"].count(0) == 3  # two documents and the padding


@pytest.mark.parametrize("packing", ["split", "whole", "none"])
def test_streamed_rows_are_the_same_in_every_pass(packing, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    stream = build_datasets(recipe(source, streaming=True, packing=packing), word_tokenizer(), seed=3)[0]
    rows = list(stream)

    assert list(stream) == rows
    assert list(stream.skip(2)) == rows[2:]
    assert rows_of(source, seed=3, streaming=True, packing=packing) == rows
    assert rows_of(source, seed=4, streaming=True, packing=packing) != rows


def test_processes_share_a_stream_among_them(tmp_path):
    from datasets.distributed import split_dataset_by_node

    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    stream = build_datasets(recipe(source, streaming=True), word_tokenizer())[0]
    shares = [list(split_dataset_by_node(stream, rank, 2)) for rank in range(2)]

    assert all(shares)
    assert sorted(map(str, shares[0] + shares[1])) == sorted(map(str, stream))


def test_rows_packed_once_are_found_again(tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    rows = rows_of(source)
    with monkeypatch.context() as patch:
        patch.setattr(training_data, "pack", None)
        assert rows_of(source) == rows
        for changed in ({"sequence_length": 9}, {"packing": "whole"}, {"documents": 5}):
            with pytest.raises(datasets.exceptions.DatasetGenerationError):
                rows_of(source, **changed)
        with pytest.raises(datasets.exceptions.DatasetGenerationError):
            rows_of(source, word_tokenizer(begins=True))
    write_jsonl(source, TEXTS[:4])
    os.utime(source, (1, 1))  # written at another time than before, however coarse the clock
    assert len(documents_in(rows_of(source))) == 4


def test_only_tokens_within_answers_are_scored(tmp_path):
    text = "w1 w2 w3 w4"
    spans = [[text.index(" w2"), text.index(" w3")], [text.index(" w4"), len(text)]]
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text, "answers": spans}) + "\n")
    (row,) = rows_of(tmp_path / "a.jsonl", loss_on="answers")

    assert row["labels"] == [-100, WORDS["w2"], -100, WORDS["w4"]] + [-100] * 4


@pytest.mark.parametrize(
    ("kind", "streaming"), [("words", False), ("words", True), ("pieces", False)], ids=["words", "stream", "pieces"]
)
def test_scored_tokens_of_head_tasks_are_answers_and_line_feeds_in_both_splits(kind, streaming, request):
    tokenizer = build_tokenizer() if kind == "words" else request.getfixturevalue("tokenizer")
    built = recipe(
        "head_tasks",
        documents=40,
        sequence_length=400,
        packing="none",
        loss_on="answers",
        streaming=streaming,
        evaluation={"documents": 40},
    )
    # The documents of the evaluation are the same for every seed of a run.
    for rows, split, seed in zip(build_datasets(built, tokenizer, seed=5), ("train", "validation"), (5, 0)):
        found = [tokenizer.decode([label for label in row["labels"] if label != -100]) for row in rows]
        expected = []
        for document in generate_documents(40, seed, split=split):
            answers = [document["text"][start:end].strip() + "\n" for start, end in document["answers"]]
            expected.append("".join(answers))
        assert len(found) == 40
        assert sorted(text.strip(" ").replace("\n ", "\n") for text in found) == sorted(expected)


def test_documents_of_head_tasks_have_as_many_lines_as_the_recipe_says():
    built = recipe(
        "head_tasks",
        documents=50,
        lines=[2, 3],
        sequence_length=120,
        packing="none",
        evaluation={"documents": 20, "lines": [1, 1]},
    )
    train, evaluation = build_datasets(built, build_tokenizer(), seed=0)
    line_feed = build_tokenizer().convert_tokens_to_ids("\n")

    def lines(row):
        # The line feed that some texts begin with is the token behind the first.
        return row["input_ids"].count(line_feed) - (row["input_ids"][1] == line_feed)

    assert {lines(row) for row in train} == {2, 3}
    assert {lines(row) for row in evaluation} == {1}


def test_stages_follow_one_another():
    stages = [{"documents": 6, "recurring_words": 1, "words": 8}, {"documents": 8, "questions": 1, "facts": 1}]
    recipe = {"source": "head_tasks", "stages": stages, "sequence_length": 40, "packing": "none", "loss_on": "answers"}
    rows, _ = build_datasets(DataRecipe.from_mapping(recipe), build_tokenizer())
    texts = [build_tokenizer().decode(ids, skip_special_tokens=True) for ids in rows["input_ids"]]
    assert len(texts) == 14
    assert ["<" in text for text in texts] == [False] * 6 + [True] * 8
    others, _ = build_datasets(DataRecipe.from_mapping(recipe), build_tokenizer(), seed=1)
    assert list(others["input_ids"]) != list(rows["input_ids"])


def test_the_evaluation_of_stages_is_on_examples():
    stages = [{"documents": 6, "questions": 1}]
    mapping = {"source": "head_tasks", "stages": stages, "evaluation": {"documents": 5, "lines": [1, 1]}}
    recipe = DataRecipe.from_mapping(mapping)
    assert recipe.evaluation.stages is None and recipe.evaluation.documents == 5


def test_head_tasks_are_evaluated_on_the_same_documents_of_another_split_for_every_seed():
    built = recipe("head_tasks", documents=30, sequence_length=64, evaluation={"documents": 10})
    (train, evaluation), (other_train, other_evaluation) = (
        build_datasets(built, build_tokenizer(), seed) for seed in (0, 1)
    )

    assert built.evaluation.split == "validation"
    assert list(evaluation) == list(other_evaluation)
    assert list(train) != list(other_train)
    assert list(train)[: len(evaluation)] != list(evaluation)


def test_evaluation_takes_over_the_keys_it_lacks(tmp_path):
    mapping = {"source": "a.jsonl", "sequence_length": 16, "packing": "whole", "evaluation": {"source": "b.jsonl"}}
    evaluation = DataRecipe.from_mapping(mapping).evaluation

    assert (evaluation.source, evaluation.sequence_length, evaluation.packing) == ("b.jsonl", 16, "whole")
    assert evaluation.evaluation is None


WRONG_RECIPES = {
    "no_source": ({"split": "train"}, "data.source"),
    "unknown_key": ({"source": "a", "sequence_lenght": 8}, "sequence_lenght"),
    "text_for_number": ({"source": "a", "sequence_length": "long"}, "'long'"),
    "number_for_truth": ({"source": "a", "streaming": 1}, "data.streaming"),
    "length_of_one": ({"source": "a", "sequence_length": 1}, "at least 2, got 1"),
    "no_documents": ({"source": "a", "documents": 0}, "at least 1, got 0"),
    "unknown_packing": ({"source": "a", "packing": "tight"}, "'tight'"),
    "unknown_loss": ({"source": "a", "loss_on": "questions"}, "'questions'"),
    "not_a_mapping": (["a"], "data must be a mapping"),
    "head_tasks_without_number": ({"source": "head_tasks"}, "data.documents is missing"),
    "lines_of_a_file": ({"source": "a", "lines": [1, 2]}, "data.lines is for source 'head_tasks' alone"),
    "lines_as_a_number": ({"source": "head_tasks", "documents": 9, "lines": 2}, "data.lines must be a list"),
    "stages_of_a_file": ({"source": "a", "stages": [{"documents": 1, "questions": 1}]}, "data.stages is for source"),
    "no_stage": ({"source": "head_tasks", "stages": []}, "data.stages must not be empty"),
    "stage_without_documents": ({"source": "head_tasks", "stages": [{"questions": 1}]}, "data.stages[0].documents"),
    "stage_without_form": ({"source": "head_tasks", "stages": [{"documents": 1}]}, "a positive share"),
    "lines_of_a_stage": (
        {"source": "head_tasks", "stages": [{"documents": 1, "examples": 1, "lines": [2, 1]}]},
        "data.stages[0].lines must be [least, most]",
    ),
    "stage_of_an_unknown_form": ({"source": "head_tasks", "stages": [{"documents": 1, "riddles": 1}]}, "riddles"),
    "stage_of_four_facts": (
        {"source": "head_tasks", "stages": [{"documents": 1, "questions": 1, "facts": 4}]},
        "data.stages[0].facts",
    ),
    **{
        f"{key}_of_a_stage_{value}": (
            {"source": "head_tasks", "stages": [{"documents": 1, "questions": 1} | {key: value}]},
            f"data.stages[0].{key} must be an integer, got {value!r}.",
        )
        for key, value in (("documents", 5.5), ("documents", "5"), ("words", 5.5), ("facts", 2.0), ("facts", True))
    },
    "stages_in_rows_too_short": (
        {"source": "head_tasks", "stages": [{"documents": 1, "recurring_words": 1}], "sequence_length": 4},
        "data.sequence_length must be at least 5, got 4",
    ),
    "lines_in_the_wrong_order": ({"source": "head_tasks", "documents": 9, "lines": [3, 2]}, "[3, 2]"),
    "evaluation_no_mapping": ({"source": "a", "evaluation": True}, "data.evaluation must be a mapping"),
    "evaluation_key": ({"source": "a", "evaluation": {"spilt": "test"}}, "spilt"),
    "evaluation_on_training_data": ({"source": "a", "evaluation": {"documents": 5}}, "would read the training data"),
    "evaluation_twice": (
        {"source": "a", "evaluation": {"split": "b", "evaluation": {"split": "c"}}},
        "data.evaluation.evaluation",
    ),
}


@pytest.mark.parametrize("name", WRONG_RECIPES)
def test_wrong_recipes_are_refused(name):
    mapping, words = WRONG_RECIPES[name]
    with pytest.raises(ValueError) as error:
        DataRecipe.from_mapping(mapping)
    assert words in str(error.value)


# File name, content, further keys of the recipe, and words of the message.
BROKEN_FILES = {
    "empty": ("a.jsonl", "", {}, "holds no documents"),
    "only_blank_lines": ("a.jsonl", "\n\n", {}, "holds no documents"),
    "no_rows": ("a.csv", "text\n", {}, "holds no documents"),
    "no_text": ("a.jsonl", '{"text": ""}\n{"text": null}\n', {}, "Every document of"),
    "no_answers": ("a.jsonl", '{"text": "w1 w2"}\n', {"loss_on": "answers"}, "no column 'answers'; it has text"),
    "broken_line": ("a.jsonl", '{"text": "w1"}\n{"text": "w2"\n{"text": "w3"}\n', {}, "Line 2 of"),
    "last_line_cut": ("a.jsonl", '{"text": "w1"}\n{"text": "w2"}\n{"text": "w', {}, "Line 3 of"),
    "broken_array": ("a.json", '[{"text": "w1"},\n{"text": "w2"', {}, "Line 2 of"),
    "broken_parquet": ("a.parquet", "PAR1 and nothing else", {}, "cannot be read"),
    "broken_csv": ("a.csv", "text,b\nw1,2\nw1,2,3,4\n", {}, "line 3"),
    "no_such_column": (
        "a.jsonl",
        '{"text": "w1", "b": 1}\n',
        {"text_column": "body"},
        "no column 'body'; it has text, b",
    ),
    "numbers": ("a.jsonl", '{"text": 5}\n', {}, "has 5 in its column 'text'"),
    "no_such_split": ("a.jsonl", '{"text": "w1"}\n', {"split": "test"}, "test"),
    "unknown_ending": ("a.docx", "w1", {}, "'.jsonl', '.json'"),
    "answers_are_words": ("a.jsonl", '{"text": "w1", "answers": "w1"}\n', {"loss_on": "answers"}, "'w1' as answers"),
    "no_token_scored": (
        "a.jsonl",
        '{"text": "w1 w2", "answers": [[0, 1]]}\n',
        {"loss_on": "answers"},
        "No token of",
    ),
}


@pytest.mark.parametrize("streaming", [False, True], ids=["map", "stream"])
@pytest.mark.parametrize("name", BROKEN_FILES)
def test_files_that_cannot_be_read_are_told_in_one_sentence(name, streaming, tmp_path):
    file_name, content, values, words = BROKEN_FILES[name]
    (tmp_path / file_name).write_text(content)
    with pytest.raises(ValueError) as error:
        rows_of(tmp_path / file_name, streaming=streaming, **values)
    message = str(error.value)
    assert words.replace("'", "") in message.replace("'", "")
    assert str(tmp_path / file_name) in message
    assert "\n" not in message


@pytest.mark.parametrize("source", ["missing.jsonl", "./missing", "/no/such/folder"])
def test_missing_paths_are_named(source):
    with pytest.raises(FileNotFoundError, match=source):
        rows_of(source)


def test_a_folder_saved_without_splits_has_no_others(tmp_path):
    source = write("saved", tmp_path / "source")
    with pytest.raises(ValueError, match=r"no split 'validation'; it has train"):
        rows_of(source, split="validation")


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        rows_of(tmp_path)


def test_a_hub_that_does_not_answer(monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(FileNotFoundError, match=r"'some/where' is no file or folder here.*Couldn't reach the Hub"):
        rows_of("some/where")


def test_a_full_disk_stays_a_full_disk(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise datasets.exceptions.DatasetGenerationError("failed") from OSError(28, "No space left on device")

    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    monkeypatch.setattr(datasets, "load_dataset", full)
    with pytest.raises(OSError) as error:
        rows_of(source)
    assert error.value.errno == 28


def test_answers_need_a_fast_tokenizer(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"text": "w1 w2", "answers": [[2, 5]]}\n')
    tokenizer = word_tokenizer()
    monkeypatch.setattr(type(tokenizer), "is_fast", property(lambda self: False))
    with pytest.raises(ValueError, match="needs a fast tokenizer"):
        rows_of(tmp_path / "a.jsonl", tokenizer, loss_on="answers")
