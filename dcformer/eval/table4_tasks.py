"""The eleven columns of Table 4: their documents, and the prompt of each as the harness of 2023 asked for it.

The published scores of Pythia, which the paper repeats and the control compares with, were made with the harness of
early 2023 (lm-eval 0.3), so the columns ask word for word as it did. Four of them are asked otherwise by lm-eval
0.4.13, and there is a task for each of these forms too, see `OTHER_PROMPTS`. `tasks/*.yaml` names these functions;
`tasks/CHANGELOG.md` lists all differences and tells where documents and examples come from. A prompt function takes a
document, which is one row of the data.
"""

from __future__ import annotations

import ast
import logging
import os
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from . import data
from .origin import check_required, documents_hash, origin, read_published, remember
from .sources import Source


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from datasets import Dataset


logger = logging.getLogger(__name__)

# In the order of the paper, with the number of documents that are scored.
DOCUMENT_COUNTS = {
    "lambada_openai": 5153,
    "piqa": 1838,
    "winogrande": 1267,
    "arc_easy": 2376,
    "arc_challenge": 1172,
    "sciq": 1000,
    "logiqa": 651,
    "boolq": 3270,
    "hellaswag": 10042,
    "race_middle": 362,
    "race_high": 1045,
}
TABLE4_COLUMNS = tuple(DOCUMENT_COUNTS)
# Tasks that ask a column as lm-eval 0.4.13 does, where that is not as in 2023.
OTHER_PROMPTS = {
    f"{column}_lm_eval_0_4_13": column for column in ("lambada_openai", "sciq", "race_middle", "race_high")
}


@dataclass(frozen=True)
class _Layout:
    """The split that is scored, the columns that its rows must have, and one whose values are known."""

    split: str
    fields: tuple[str, ...]
    answer: str | None = None
    answers: tuple[int | str, ...] = ()


_ARC = _Layout("test", ("question", "choices", "answerKey"))
_RACE = _Layout("test", ("article", "problems"))
_LAYOUTS = {
    "lambada_openai": _Layout("test", ("text",)),
    "piqa": _Layout("validation", ("goal", "sol1", "sol2", "label"), "label", (0, 1)),
    "winogrande": _Layout("validation", ("sentence", "option1", "option2", "answer"), "answer", ("1", "2")),
    "arc_easy": _ARC,
    "arc_challenge": _ARC,
    "sciq": _Layout("test", ("support", "question", "distractor1", "distractor2", "distractor3", "correct_answer")),
    "logiqa": _Layout("test", ("context", "question", "options", "label")),
    "boolq": _Layout("validation", ("passage", "question", "label"), "label", (0, 1)),
    "hellaswag": _Layout(
        "validation",
        ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
        "label",
        ("0", "1", "2", "3", 0, 1, 2, 3),
    ),
    "race_middle": _RACE,
    "race_high": _RACE,
}
_RACE_QUESTION = ("article", "question", "options", "answer")
_LETTERS = "ABCD"
_RACE_BLANK = " _  ."


def tasks_folder() -> Path:
    """The folder of the task definitions, for lm-eval's `--include_path`."""
    return Path(__file__).with_name("tasks")


def scored_split(column: str) -> str:
    """The split of a column that is scored."""
    return _LAYOUTS[column].split


def load_documents(
    column: str, data_dir: str | os.PathLike | None = None, data_hash: str | None = None, **_
) -> dict[str, Dataset]:
    """
    The documents of a column, as lm-eval's `custom_dataset` wants them.

    Args:
        column (`str`): One of `TABLE4_COLUMNS`.
        data_dir (*optional*): Folder with `<column>/<split>.parquet` or `.jsonl`, for LogiQA also the authors' `.txt`;
            `None` to fetch the data.
        data_hash (`str`, *optional*): The hash that the scored documents must have, or `"any"`; by default, of data
            that are fetched, the hash that is known.

    Returns:
        `{"scored": Dataset, "examples": Dataset}`: the documents to score, and those from which few-shot examples are
        drawn: the train split, else the validation split, else the scored documents themselves. Both remember their
        origin, see [`dcformer.eval.origin.origin_of`].

    Raises:
        FileNotFoundError: if a file or folder is missing, or the data cannot be fetched.
        ValueError: if the column is unknown, or the data are not what the task reads or was told to read.
    """
    if column not in _LAYOUTS:
        raise ValueError(f"There is no column {column!r} in Table 4; choose from {', '.join(TABLE4_COLUMNS)}.")
    scored = _LAYOUTS[column].split
    if data_dir is None:
        documents, found = read_published(
            column, partial(_published, column), lambda read: _hash_of(column, read["scored"]), data_hash
        )
    else:
        splits = _local_splits(column, data_dir)
        if column == "sciq" and scored not in splits and "validation" in splits:
            logger.warning("sciq: there is no test split in %s; its validation split is scored in its place.", data_dir)
            scored = "validation"
        if scored not in splits:
            data.require_file(data_dir, column, scored, _suffixes(column))
        documents = _scored_and_examples(column, scored, splits)
        found = origin(None, _hash_of(column, documents["scored"]), column)
        check_required(column, found["hash"], data_hash)
        if scored != _LAYOUTS[column].split:
            found["stands_in_for"] = _LAYOUTS[column].split
    is_apart = documents["examples"] is not documents["scored"]
    examples = {**found, "hash": _hash_of(column, documents["examples"]), "as_known": None} if is_apart else found
    remember(documents["examples"], examples)
    remember(documents["scored"], found)
    return documents


def _scored_and_examples(column: str, scored: str, splits: dict[str, Path] | dict[str, Dataset]) -> dict[str, Dataset]:
    examples = next((split for split in ("train", "validation") if split in splits), scored)
    documents = {split: _documents(column, splits[split]) for split in {scored, examples}}
    return {"scored": documents[scored], "examples": documents[examples]}


def _hash_of(column: str, documents: Dataset) -> str:
    """Of the values that the prompt is made of; an answer is a number in one copy and a string in another."""
    layout = _LAYOUTS[column]
    columns = (
        [str(value).strip() for value in documents[name][:]] if name in (layout.answer, "label") else documents[name][:]
        for name in layout.fields
    )
    return documents_hash(zip(*columns))


def _published(column: str, source: Source) -> tuple[dict[str, Dataset], str | None]:
    splits: dict[str, Path] | dict[str, Dataset]
    if source.files:
        fetched = {split: data.fetch_file(source, split) for split in source.files}
        splits = {split: file for split, (file, _) in fetched.items()}
        _, revision = next(iter(fetched.values()))
    else:
        splits, revision = data.hub_splits(source)
    scored = _LAYOUTS[column].split
    if scored not in splits:
        raise ValueError(f"{str(source)!r} has no {scored} split.")
    return _scored_and_examples(column, scored, splits), revision


def _local_splits(column: str, data_dir: str | os.PathLike) -> dict[str, Path]:
    names = ("train", "validation", "test")
    files = {split: data.find_file(data_dir, column, split, _suffixes(column)) for split in names}
    return {split: file for split, file in files.items() if file is not None}


def _suffixes(column: str) -> tuple[str, ...]:
    return (".parquet", ".jsonl", ".txt") if column == "logiqa" else (".parquet", ".jsonl")


def _documents(column: str, place: Path | Dataset) -> Dataset:
    """The rows of a file or of a split of the Hub, brought into the form that the prompt functions read."""
    where = place if isinstance(place, Path) else str(data.SOURCES[column])
    if column == "logiqa" and isinstance(place, Path) and place.suffix not in (".parquet", ".jsonl"):
        return data.import_datasets().Dataset.from_list(parse_logiqa(place.read_text(encoding="utf-8"), place))
    rows = data.read_rows(place) if isinstance(place, Path) else place
    if column not in ("race_middle", "race_high"):
        return _with_answers(column, data.require_columns(rows, _LAYOUTS[column].fields, where), where)
    if "problems" in rows.column_names:
        articles = _read_problems(data.require_columns(rows, _LAYOUTS[column].fields, where), where)
    else:
        articles = group_by_article(data.require_columns(rows, _RACE_QUESTION, where))
    return data.import_datasets().Dataset.from_list(articles)


def _with_answers(column: str, rows: Dataset, where: str | os.PathLike) -> Dataset:
    """The rows themselves, unless they lack their answers, as published test splits do."""
    layout = _LAYOUTS[column]
    if layout.answer and (unknown := set(rows[layout.answer]) - set(layout.answers)):
        raise ValueError(
            f"{str(where)!r} has {min(unknown, key=repr)!r} as {layout.answer}, which must be one of "
            f"{', '.join(dict.fromkeys(map(str, layout.answers)))}; use the {layout.split} split, whose answers are "
            "published."
        )
    return rows


def parse_logiqa(text: str, where: str | os.PathLike = "LogiQA") -> list[dict]:
    """
    Documents of the authors' plain text: blocks of the answer's letter, the passage, the question and four choices,
    one line each, with an empty line between blocks. A space is put after every full stop, as the harness does.

    Raises:
        ValueError: if a block has another form.
    """
    documents = []
    for number, block in enumerate(text.strip().split("\n\n"), start=1):
        letter, *lines = block.split("\n")
        if len(lines) != 6 or letter.strip() not in ("a", "b", "c", "d"):
            raise ValueError(
                f"Block {number} of {str(where)!r} is not a LogiQA question (a letter from a to d, passage, question, "
                "four choices, a line each); use the authors' file."
            )
        passage, question, *choices = lines
        documents.append(
            {
                "label": letter.strip(),
                "context": _spaced(passage),
                "question": _spaced(question),
                "options": [_spaced(choice[len("A.") :]) for choice in choices],
            }
        )
    return documents


def _spaced(text: str) -> str:
    return ". ".join(text.split(".")).strip()


def group_by_article(rows: Iterable[dict]) -> list[dict]:
    """Articles with all their questions, in the order of their first question, from rows of one question each."""
    problems: dict[str, list[dict]] = {}
    for row in rows:
        problem = {"question": row["question"], "options": row["options"], "answer": row["answer"]}
        problems.setdefault(row["article"], []).append(problem)
    return [{"article": article, "problems": questions} for article, questions in problems.items()]


def _read_problems(rows: Dataset, where: str | os.PathLike) -> list[dict]:
    """Articles whose questions are a list, or a list written out as Python does."""
    articles = []
    for number, row in enumerate(rows, start=1):
        try:
            problems = ast.literal_eval(row["problems"]) if isinstance(row["problems"], str) else row["problems"]
            fields = [{name: problem[name] for name in ("question", "options", "answer")} for problem in problems]
        except (ValueError, SyntaxError, TypeError, KeyError) as error:
            raise ValueError(
                f"The problems of article {number} in {str(where)!r} are not a list of question, options and answer; "
                "write the file again."
            ) from error
        articles.append({"article": row["article"], "problems": fields})
    return articles


# Prompts. lm-eval puts a space between a context and a choice, and an empty line after every example.


def lambada_context(document: dict) -> str:
    return document["text"].rpartition(" ")[0]


def lambada_last_word(document: dict) -> str:
    """With its space, since lm-eval adds none to what it scores."""
    return " " + document["text"].rpartition(" ")[2]


def piqa_context(document: dict) -> str:
    return _question(document["goal"])


def piqa_choices(document: dict) -> list[str]:
    return [document["sol1"], document["sol2"]]


def winogrande_contexts(document: dict) -> list[str]:
    """The sentence up to its blank, with either name in it: here it is the context that differs, not the target."""
    beginning = document["sentence"].partition("_")[0]
    return [beginning + document[option] for option in ("option1", "option2")]


def winogrande_right_context(document: dict) -> int:
    return ("1", "2").index(document["answer"])


def winogrande_ending(document: dict) -> str:
    return document["sentence"].partition("_")[2].strip()


def arc_context(document: dict) -> str:
    return _question(document["question"])


def arc_choices(document: dict) -> list[str]:
    return document["choices"]["text"]


def arc_answer(document: dict) -> int:
    """Choices are labelled by letters in most documents and by numbers in some, answers likewise."""
    return document["choices"]["label"].index(str(document["answerKey"]))


def sciq_context(document: dict) -> str:
    """The text, if there is one, and the question; without a text the question is the first line."""
    return sciq_context_lm_eval_0_4_13(document).strip()


def sciq_context_lm_eval_0_4_13(document: dict) -> str:
    """A question without a text has an empty line before it."""
    return document["support"].lstrip() + "\n" + _question(document["question"])


def sciq_choices(document: dict) -> list[str]:
    return [document[name] for name in ("distractor1", "distractor2", "distractor3", "correct_answer")]


def logiqa_context(document: dict) -> str:
    choices = "".join(f"{letter}. {choice}\n" for letter, choice in zip(_LETTERS, document["options"]))
    return f"Passage: {document['context']}\nQuestion: {document['question']}\nChoices:\n{choices}Answer:"


def logiqa_choices(document: dict) -> list[str]:
    return document["options"]


def logiqa_answer(document: dict) -> int:
    return _LETTERS.lower().index(document["label"].strip())


def boolq_context(document: dict) -> str:
    return document["passage"] + "\n" + _question(document["question"] + "?")


def hellaswag_context(document: dict) -> str:
    return _without_wikihow_marks(f"{document['activity_label']}: {document['ctx_a']} {document['ctx_b'].capitalize()}")


def hellaswag_choices(document: dict) -> list[str]:
    return [_without_wikihow_marks(ending) for ending in document["endings"]]


def hellaswag_answer(document: dict) -> int:
    return int(document["label"])


def race_context(document: dict) -> str:
    """
    The article, all questions but the last with their answers, and the last question alone.

    A question that ends in a blank was meant to be completed by its answer, but the harness kept the blank and dropped
    the question, until version 3.0 of its task, which is younger than the paper.
    """
    return _race_context(document, lambda question: _RACE_BLANK)


def race_context_lm_eval_0_4_13(document: dict) -> str:
    """As [`race_context`], but a solved question that ends in a blank has its answer in place of the blank."""
    return _race_context(document, lambda question: question.removesuffix(_RACE_BLANK))


def _race_context(document: dict, beginning: Callable[[str], str]) -> str:
    *solved, asked = document["problems"]
    text = f"Article: {document['article']}\n\n"
    for problem in solved:
        answer = problem["options"][_LETTERS.index(problem["answer"])]
        if problem["question"].endswith(" " + _RACE_BLANK):
            text += f"{beginning(problem['question'])}{answer}\n"
        else:
            text += f"Question: {problem['question']}\nAnswer: {answer}\n"
    return text + asked["question"]


def race_choices(document: dict) -> list[str]:
    return document["problems"][-1]["options"]


def race_answer(document: dict) -> int:
    return _LETTERS.index(document["problems"][-1]["answer"])


def _question(text: str) -> str:
    return f"Question: {text}\nAnswer:"


def _without_wikihow_marks(text: str) -> str:
    """Headings of WikiHow become sentences; other text in brackets goes, and with it a doubled space."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")
