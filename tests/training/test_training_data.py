"""Sources of training documents, and which of their tokens have a loss."""

import gzip
import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pandas
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from dcformer.common import local_files
from dcformer.head_tasks import build_tokenizer, generate_documents
from dcformer.loading import fingerprint_tokenizer
from dcformer.training import DataRecipe, Recipe
from dcformer.training import data as training_data
from dcformer.training.data import RowOrder, build_datasets, fill_batches
from dcformer.training.documents import fingerprint_documents


datasets = pytest.importorskip("datasets")

TEXTS = [f"w{number} w{number + 1} w{number + 2} w{number % 7}" for number in range(0, 60, 3)]
WORDS = {word: number for number, word in enumerate(["<end>", "<pad>", "NA", *(f"w{number}" for number in range(70))])}


@pytest.fixture(autouse=True)
def quiet_empty_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def word_tokenizer(template: str = "", ends: bool = True) -> PreTrainedTokenizerFast:
    """A token per word; optionally one that puts words around every text, or one without an end of text."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if template:
        special = [(word, WORDS[word]) for word in set(template.split()) - {"$A"}]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", **({"eos_token": "<end>"} if ends else {})
    )


def test_a_fingerprint_is_of_all_that_turns_text_into_ids_and_nothing_else():
    vocabulary = {token: number for number, token in enumerate(["<end>", "a", "b", "c", "ab", "bc", "abc"])}

    def fingerprint(merges, pre_tokenizer=None, **special):
        tokenizer = Tokenizer(models.BPE(vocabulary, merges))
        if pre_tokenizer is not None:
            tokenizer.pre_tokenizer = pre_tokenizer
        return fingerprint_tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special))

    merges = [("a", "b"), ("b", "c"), ("ab", "c")]
    special = [{}, {"eos_token": "<end>"}, {"bos_token": "<end>"}, {"pad_token": "<end>"}, {"eos_token": "a"}]
    hashes = [fingerprint(merges, **tokens) for tokens in special]
    hashes += [fingerprint(merges[:2]), fingerprint([merges[1], merges[0], merges[2]])]
    hashes.append(fingerprint(merges, pre_tokenizers.WhitespaceSplit()))
    assert len(set(hashes)) == len(hashes)
    assert hashes[1] == fingerprint(merges, eos_token="<end>", model_max_length=5)
    called = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, merges)), pad_token="<end>")
    called(["ab", "a"], padding="max_length", max_length=9, truncation=True)
    assert fingerprint_tokenizer(called) == hashes[3]
    one, other, same = (fingerprint_tokenizer(PythonTokenizer(ids)) for ids in ([1, 2], [2, 1], [1, 2]))
    assert one == same != other


@pytest.mark.parametrize("template", ["", "<end> $A", "$A <pad>"])
def test_a_document_longer_than_a_tokenizer_gets_at_once_is_encoded_as_a_whole(template, monkeypatch):
    """Else a text file of 100 MB would take 17 GB."""
    encoder, texts = training_data._Encoder(word_tokenizer(template), recipe("unread")), [" ".join(TEXTS), "w1 w2"]
    texts.append("w1" + " " * 300 + "w2")  # no token begins in both of two pieces
    whole = [encoder.tokenizer(text)["input_ids"] for text in texts]
    monkeypatch.setattr(training_data, "_CHARACTERS_AT_ONCE", 50)
    monkeypatch.setattr(training_data, "_OVERLAP", 20)
    assert [list(ids) for ids, _ in encoder._encodings(texts, False)] == whole


class PythonTokenizer(SimpleNamespace):
    """A tokenizer in Python that gives every text the same ids."""

    def __init__(self, ids):
        super().__init__(ids=ids, bos_token_id=None, eos_token_id=None, pad_token_id=None, get_vocab=lambda: {"a": 1})

    def __call__(self, text):
        return {"input_ids": self.ids}


def recipe(source, **values) -> DataRecipe:
    data = {"source": str(source), "sequence_length": 8, **values}
    training = {"batch_tokens": data["sequence_length"], "max_steps": 1}
    return Recipe.from_mapping({"tokenizer": "none", "data": data, "training": training}).data


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def rows_of(source, tokenizer=None, seed=0, **values) -> list[dict]:
    return list(build_datasets(recipe(source, **values), tokenizer or word_tokenizer(), seed)[0])


def documents_in(rows: list[dict]) -> list[str]:
    """The documents of rows, in their order, if every document ends with <end>."""
    tokens = [token for row in rows for token in row["input_ids"] if token != WORDS["<pad>"]]
    return [document.strip() for document in word_tokenizer().decode(tokens).split("<end>") if document.strip()]


def write(layout, folder, texts=TEXTS):
    """The texts as one of the sources that a recipe may name, in a new folder; their notes are of several types."""
    folder.mkdir()
    other = len(texts) - 9  # notes from here on are no numbers
    notes = [*range(other), *({"a": "b"} if number % 2 else "many" for number in range(9))]
    table, file = pandas.DataFrame({"note": list(map(str, notes)), "text": texts}), folder / f"a.{layout}"
    lines = [json.dumps({"note": note, "text": text}) for text, note in zip(texts, notes)]
    if layout.startswith("saved"):
        rows = datasets.Dataset.from_pandas(table)
        rows = datasets.DatasetDict({"train": rows, "validation": rows.select([0])}) if "splits" in layout else rows
        rows.save_to_disk(folder)
    elif layout in ("files", "described"):
        names = ("train-1", "train-2", "train-3", "validation") if layout == "files" else ("a", "b", "c", "d")
        for name, part in zip(names, (lines[:5], lines[5:9], lines[9:], lines[:1])):
            (folder / f"{name}.{'JSONL' if layout == 'files' else 'jsonl'}").write_text("\n".join(part))
        if layout == "described":
            splits = "{split: train, path: '[a-c]*'}, {split: validation, path: d.jsonl}"
            (folder / "README.md").write_text(f"---\nconfigs: [{{config_name: x, data_files: [{splits}]}}]\n---\n")
    elif layout == "parquet":
        table[:other].astype({"note": int}).to_parquet(folder / "0.parquet", row_group_size=70)
        table[other:].to_parquet(folder / "1.parquet")
    elif layout in ("csv", "tsv"):
        table.to_csv(file, index=False, sep="," if layout == "csv" else "\t")
    elif layout == "txt":
        file.write_text("\n".join(texts) + "\r\n\n")
    else:
        content = f"[{', '.join(lines)}]" if layout == "json" else "\n".join(lines)
        file.write_bytes(gzip.compress(content.encode(), 1) if layout.endswith("gz") else content.encode())
    return file if file.is_file() else folder


@pytest.mark.parametrize(
    "layout", ["JSONL", "json", "jsonl.gz", "txt", "parquet", "csv", "tsv", "saved", "saved_splits", "files"]
)
def test_every_source_gives_all_its_documents_whatever_else_it_holds(layout, tmp_path, monkeypatch):
    """Names that could be patterns or addresses are of what bears them, and not of what they match."""
    monkeypatch.setattr(local_files, "_ROWS_AT_ONCE", 100)
    texts = [f"w{number % 60} w{number % 61}" for number in range(210)]  # more than two parts of a table
    write(layout, tmp_path / "run1", ["w69"] * 10)
    source = write(layout, tmp_path / "run[1]*", texts)
    if source.is_file():
        write(layout, tmp_path / "other", ["w69"] * 10).rename(source.with_name(f"a1.{layout}"))
        source = source.rename(source.with_name(f"a[1]::b.{layout}"))
    for streaming in (False, True):
        rows = rows_of(source, streaming=streaming, sample_by="line")
        assert sorted(documents_in(rows)) == sorted(texts)
        assert all(len(values) == 8 for row in rows for values in row.values())


@pytest.mark.parametrize("layout", ["saved_splits", "files", "described"])
def test_other_splits_of_a_folder_are_the_evaluation_in_their_order(layout, tmp_path):
    source = write(layout, tmp_path / "source")
    train, evaluation = build_datasets(recipe(source, evaluation={"split": "validation"}), word_tokenizer(), seed=1)
    assert documents_in(evaluation) == TEXTS[:1]
    assert sorted(documents_in(train)) == sorted(TEXTS)
    with pytest.raises(ValueError, match="test"):
        rows_of(source, split="test")


def test_documents_are_shuffled_by_the_seed_before_packing(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    orders = [documents_in(rows_of(source, seed=seed)) for seed in (0, 1)]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(TEXTS)
    assert orders[0] != orders[1] and TEXTS not in orders
    for streaming in (False, True):
        assert sorted(documents_in(rows_of(source, documents=3, streaming=streaming))) == sorted(TEXTS[:3])


def test_empty_documents_leave_no_trace(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"body": {text}}}\n' for text in ('""', '"w1 w2"', "null", '"w3"')))
    for template in ("", "w9 $A", "<end> $A <end>"):
        rows = rows_of(tmp_path / "a.jsonl", word_tokenizer(template), text_column="body")
        assert sum(row["position_ids"].count(0) - row["input_ids"][-1:].count(WORDS["<pad>"]) for row in rows) == 2


@pytest.mark.parametrize(
    ("tokenizer", "ids"),
    [
        (word_tokenizer(), "w1 w2 <end>"),
        (word_tokenizer("w9 $A"), "w9 w1 w2 <end>"),
        (word_tokenizer("<end> $A"), "<end> w1 w2 <end>"),
        (word_tokenizer("$A <end>"), "w1 w2 <end>"),
        (word_tokenizer("w9 $A <end>"), "w9 w1 w2 <end>"),
        (word_tokenizer("w9 $A", ends=False), "w9 w1 w2"),
        (word_tokenizer(ends=False), "w1 w2"),
    ],
)
def test_an_end_of_text_stands_after_every_document_once(tokenizer, ids, tmp_path):
    (row,) = rows_of(write_jsonl(tmp_path / "a.jsonl", ["w1 w2", "w1 w2"]), tokenizer, sequence_length=12)
    ids = [WORDS[word] for word in ids.split()]
    padding = 12 - 2 * len(ids)
    assert row["input_ids"] == ids * 2 + [WORDS["<pad>"]] * padding
    assert row["labels"] == [-100, *ids[1:]] * 2 + [-100] * padding
    assert row["position_ids"] == [*range(len(ids))] * 2 + [*range(padding)]


@pytest.mark.parametrize("packing", ["split", "whole", "none"])
def test_streamed_rows_are_the_same_in_every_pass(packing, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    stream = build_datasets(recipe(source, streaming=True, packing=packing), word_tokenizer(), seed=3)[0]
    rows = list(stream)
    assert list(stream) == rows
    assert list(stream.skip(2)) == rows[2:]
    assert rows_of(source, seed=4, streaming=True, packing=packing) != rows


def test_packed_rows_are_reused_for_the_same_documents_and_settings_only(tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    os.utime(source, (1, 1))
    rows = rows_of(source)
    with monkeypatch.context() as patch:
        patch.setattr(training_data, "pack", None)
        assert rows_of(source) == rows
        for changed in ({"sequence_length": 9}, {"packing": "whole"}, {"documents": 5}):
            with pytest.raises(TypeError):
                rows_of(source, **changed)
        with pytest.raises(TypeError):
            rows_of(source, word_tokenizer("<end> $A"))
    write_jsonl(source, TEXTS[:4])
    os.utime(source, (1, 1))  # replaced within a tick of the clock
    assert len(documents_in(rows_of(source))) == 4


@pytest.mark.parametrize("kind", ["words", "pieces"])
def test_scored_tokens_of_head_tasks_are_answers_and_line_feeds_in_both_splits(kind, request):
    tokenizer = build_tokenizer() if kind == "words" else request.getfixturevalue("tokenizer")
    settings = {"documents": 20, "sequence_length": 400, "packing": "none", "loss_on": "answers"}
    built = recipe("head_tasks", **settings, evaluation={"documents": 20})
    # The documents of the evaluation are the same for every seed of a run.
    for rows, split, seed in zip(build_datasets(built, tokenizer, seed=5), ("train", "validation"), (5, 0)):
        scored = [tokenizer.decode([label for label in row["labels"] if label != -100]) for row in rows]
        expected = [
            "".join(document["text"][start:end].strip() + "\n" for start, end in document["answers"])
            for document in generate_documents(20, seed, split=split)
        ]
        assert sorted(text.strip(" ").replace("\n ", "\n") for text in scored) == sorted(expected)


def test_stages_follow_one_another_and_are_evaluated_on_examples():
    words = {"documents": 6, "recurring_words": 1, "words": 8}
    questions, examples = {"documents": 8, "questions": 1, "facts": 1}, {"documents": 4, "examples": 1, "lines": [2, 2]}
    stages = [words, words, questions, examples]
    settings = {"stages": stages, "sequence_length": 150, "packing": "none", "loss_on": "answers"}
    built = recipe("head_tasks", **settings, evaluation={"documents": 5})

    def texts_of(built, seed=0):
        ids = build_datasets(built, build_tokenizer(), seed)[0]["input_ids"]
        return [build_tokenizer().decode(row, skip_special_tokens=True) for row in ids]

    texts = texts_of(built)
    assert [text.strip().count("\n") for text in texts] == [0] * 12 + [1] * 12  # of questions, of lines
    assert texts[:6] != texts[6:12] and len({word for text in texts[:12] for word in text.split()}) == 8
    assert texts != texts_of(built, seed=1) != texts_of(replace(built, split="validation", evaluation=None), seed=1)
    assert built.evaluation.stages is None and len(build_datasets(built, build_tokenizer())[1]) >= 5


def test_an_evaluation_has_the_keys_of_the_training_data_that_it_lacks():
    evaluation = recipe("a.jsonl", sequence_length=16, packing="whole", evaluation={"source": "b.jsonl"}).evaluation
    assert (evaluation.source, evaluation.sequence_length, evaluation.packing) == ("b.jsonl", 16, "whole")
    assert recipe("head_tasks", documents=1, evaluation={}).evaluation.split == "validation"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '{"text": ""}\n{"text": null}\n', "No token of"),
        ("a.jsonl", '{"text": "w1", "answers": [[0, 1]]}', "No token of"),  # within a token
        ("a.jsonl", '{"text": "w1"}', "there is no 'answers'; the columns are text"),
        ("a.jsonl", '{"text": "w1", "answers": [[0, "a"]]}', "line 1: 'answers' must be a list"),
        ("a.jsonl", '{"text": "w1"}\n\n{"text": 7}', r"a\.jsonl', line 3: 'text' must be a string, got 7\."),
        ("a.jsonl", '{"text": "w1"}\n{"body": 1}', r"a\.jsonl', line 2: there is no 'text'; the columns are body"),
        ("a.jsonl", '\n{"body": "w2"}', r"a\.jsonl', line 2: there is no 'text'"),
        ("a.json", '[{"text": "w1"}, {}]', r"a\.json', item 2: there is no 'text'"),
        ("a.jsonl", '{"text": ["w1"]}', r"line 1: 'text' must be a string, got \['w1'\]"),
        ("a.json", '[{"text": "w1"}, {"text": {"a": 1}}]', r"a\.json', item 2: 'text' must be a string"),
        ("a.jsonl", '{"text": "w1"}\n{"text": "\\ud800"}', r"a\.jsonl', line 2: .*surrogates"),
        ("a.jsonl", b'{"text": "w1"}\n{"text": "\xff"}', r"a\.jsonl', line 2: .*0xff"),
        ("a.jsonl", '{"text": "w1"}\n{"text" "w2"}', r"a\.jsonl' is not JSON in line 2, column 9"),
        ("a.jsonl", '{"text": "w1"}\n{"text": "w2"\n', r"a\.jsonl' is not JSON in line 2, column 14"),
        ("a.json", '[{"text": "w1"},\n {"text"}]', r"a\.json' is not JSON in line 2, column 9"),
        ("a.csv", "body\nw1", r"a\.csv', row 1: there is no 'text'; the columns are body"),
        ("a.csv", "text\nw1, w2\n", "more fields than the header has: text"),
        ("a.txt", b"w1 \xff", r"a\.txt', document 1: .*0xff"),
        ("a.jsonl", "", "no data|no documents"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "w1"}\n', mtime=0)[:-9], r"a\.jsonl\.gz', line 1: "),
        ("a.jsonl.gz", '{"text": "w1"}', r"a\.jsonl\.gz', line 1: Not a gzipped file"),
        ("a.parquet", {"text": [1, 2]}, r"a\.parquet', row 1: 'text' must be a string, got 1"),
        ("a.parquet", {"body": ["w1"]}, r"a\.parquet', line 1: there is no 'text'; the columns are body"),
    ],
)
def test_a_file_without_texts_to_learn_from_is_refused_with_the_line(name, content, words, tmp_path):
    file, values = tmp_path / name, {"loss_on": "answers"} if "answers" in f"{content}{words}" else {}
    if isinstance(content, dict):
        pandas.DataFrame(content).to_parquet(file)
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    for streaming in (False, True):
        with pytest.raises(ValueError, match=words):
            rows_of(file, streaming=streaming, **values)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '\ufeff{"text": "w1"}\n\n{"text": "NA"}\r\n'),
        ("a.json", ' ["w1", "NA"]'),
        ("a.txt", "\ufeffw1\r\nNA"),
        ("a.csv", '\ufefftext,n\nw1,1\nNA,\n"",NA'),
    ],
)
def test_a_file_may_begin_with_a_mark_and_hold_blank_lines_texts_alone_or_words_like_na(name, content, tmp_path):
    (tmp_path / name).write_text(content, newline="")
    for streaming in (False, True):
        rows = rows_of(tmp_path / name, sample_by="line", streaming=streaming)
        assert sorted(documents_in(rows)) == ["NA", "w1"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        *((source, "not an address or a pattern") for source in ("s3://bucket/a.jsonl", "run*.jsonl")),
        *((source, r"no file that ends in \.jsonl, .*, \.tsv") for source in ("folder.txt", "folder.txt/a.md")),
        *((source, "rename it") for source in ("a::b", "[d]")),
    ],
)
def test_what_is_no_file_folder_or_name_is_refused_in_a_sentence(source, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("folder.txt", "a::b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.md").write_text("w1")
    write_jsonl(tmp_path / "run1.jsonl", TEXTS)
    write("described", tmp_path / "[d]")
    with pytest.raises((FileNotFoundError, ValueError), match=words) as caught:
        rows_of(source)
    assert repr(source) in str(caught.value)


def test_a_saved_data_set_reads_no_file_outside_its_folder(tmp_path):
    source, other = write("saved", tmp_path / "source"), write("saved", tmp_path / "other")
    state = json.loads((source / "state.json").read_text())
    name = state["_data_files"][0]["filename"]
    for wrong in (f"../other/{name}", str(other / name)):
        (source / "state.json").write_text(json.dumps({**state, "_data_files": [{"filename": wrong}]}))
        with pytest.raises(ValueError, match="must stay inside its folder"):
            rows_of(source)


def test_every_pass_over_the_rows_is_shuffled_anew_or_in_order():
    first, second = list(RowOrder(5, 5, seed=3)), list(RowOrder(5, 12, seed=3))
    assert sorted(second[:5]) == sorted(second[5:10]) == [0, 1, 2, 3, 4]
    assert second[:5] == first != second[5:10] != list(RowOrder(5, 5, seed=4))
    assert list(RowOrder(3, 7, seed=None)) == [0, 1, 2, 0, 1, 2, 0]


def test_a_fingerprint_is_of_all_files_and_of_the_split(tmp_path):
    saved = [write("saved", tmp_path / name, texts) for name, texts in (("a", TEXTS), ("b", TEXTS), ("c", TEXTS[::-1]))]
    same, again, other = (fingerprint_documents(recipe(folder)) for folder in saved)
    assert same == again != other
    source = write("files", tmp_path / "source")
    seen = [fingerprint_documents(recipe(source, split=split)) for split in ("train", "train[:3]")]
    for file in sorted(source.glob("train*")):
        write_jsonl(file, TEXTS[:2])
        seen.append(fingerprint_documents(recipe(source)))
    assert len(set(seen)) == 5
    write_jsonl(source / "validation.JSONL", TEXTS)  # no row of training depends on it
    assert fingerprint_documents(recipe(source)) == seen[-1]


def test_an_evaluation_is_filled_up_with_rows_without_loss():
    rows = fill_batches([{"labels": [number, 7]} for number in range(3)], multiple=4)
    assert [row["labels"] for row in rows] == [[0, 7], [1, 7], [2, 7], [-100, -100]]
    assert len(fill_batches([{"labels": [0]}] * 4, multiple=4)) == 4
