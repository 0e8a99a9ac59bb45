"""
The suite of head tasks: held-out generated documents and the authors' 888 texts, and one model's scores on them.

Every answer is scored given all of the text before it, the earlier examples included, in one forward pass per batch of
documents. Accuracy and perplexity are of whole answers. lm-evaluation-harness takes no part in this: it would read a
text again for each of its answers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ..eval.text_files import spread_places
from .authors_texts import SHOTS, authors_answers
from .generator import generate_documents
from .kinds import TASK_KINDS
from .scoring import score_documents, summarise


HELD_OUT_SEED = 1234
HELD_OUT_DOCUMENTS = 1000
BATCH_SIZE = 32
HELD_OUT, AUTHORS = "held_out", "authors"


def held_out_documents(documents: int = HELD_OUT_DOCUMENTS, seed: int = HELD_OUT_SEED) -> list[dict[str, Any]]:
    """Generated documents of the test split, of eight examples each and of all kinds alike."""
    return generate_documents(documents, seed, split="test", lines=(8, 8))


def authors_documents(data_dir: str | os.PathLike | None = None) -> list[dict[str, Any]]:
    """
    The authors' 888 texts without their brackets, in the rows of [`dcformer.head_tasks.generate_documents`].

    Args:
        data_dir (*optional*): Folder with `synthetic/synthetic_dataset.jsonl`; the authors' repository if not given.

    Returns:
        Rows that have, besides, `shots`: the examples before each answer, 2 to 7, as lines 1 and 2 are not scored.

    Raises:
        FileNotFoundError: if the file is not there or cannot be reached.
        ValueError: if a text has another form or a task is not one of the 74.
    """
    rows = []
    for number, (task, answers) in enumerate(
        authors_answers(None if data_dir is None else os.fspath(data_dir)), start=1
    ):
        if task not in TASK_KINDS:
            raise ValueError(f"Text {number} of the authors' texts is of {task!r}, which is no task; use task0 to 73.")
        kind = TASK_KINDS[task]
        rows.append(
            {
                "text": "".join(answers[SHOTS[-1]]) + "\n",
                "task": task,
                "subject": kind.subject,
                "pattern": kind.pattern,
                "transformation": kind.transformation,
                "answers": [[len(context), len(context) + len(answer)] for context, answer in answers.values()],
                "shots": list(answers),
            }
        )
    return rows


def evaluate_head_tasks(
    model,
    tokenizer,
    data_dir: str | os.PathLike | None = None,
    documents: int = HELD_OUT_DOCUMENTS,
    seed: int = HELD_OUT_SEED,
    with_authors: bool = True,
    batch_size: int = BATCH_SIZE,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, dict[str, Any] | None]:
    """
    Accuracy and perplexity of one model.

    Args:
        model, tokenizer: As [`dcformer.head_tasks.scoring.score_documents`] takes them.
        data_dir (*optional*): Of [`authors_documents`].
        documents (defaults to 1,000), seed (defaults to 1234): Of [`held_out_documents`].
        with_authors (defaults to `True`): Score the authors' texts too.
        batch_size (defaults to 32): Documents in a forward pass.
        on_progress (*optional*): Called with the numbers of documents done and in all.

    Returns:
        `held_out` and `authors`, each as [`dcformer.head_tasks.scoring.summarise`] returns it; `authors` is `None`
        if it was left out.

    Raises:
        FileNotFoundError, ValueError: as the functions named above.
    """
    sets = document_sets(data_dir, documents, seed, with_authors)
    scores = score_sets(model, tokenizer, sets, batch_size, on_progress)
    summaries = {name: summarise(sets[name], scores[name]) for name in sets}
    return {HELD_OUT: summaries[HELD_OUT], AUTHORS: summaries.get(AUTHORS)}


def document_sets(
    data_dir: str | os.PathLike | None = None,
    documents: int = HELD_OUT_DOCUMENTS,
    seed: int = HELD_OUT_SEED,
    with_authors: bool = True,
    most_authors: int | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """
    The documents that models are scored on.

    Args:
        data_dir, documents, seed, with_authors: As [`evaluate_head_tasks`] takes them.
        most_authors (*optional*): Take only so many of the authors' texts, spread evenly over the file.

    Returns:
        `held_out` and, unless they are left out, `authors`.

    Raises:
        FileNotFoundError, ValueError: as [`authors_documents`].
    """
    sets = {HELD_OUT: held_out_documents(documents, seed)}
    if with_authors:
        try:
            rows = authors_documents(data_dir)
        except FileNotFoundError as error:
            hint = "or leave the authors' texts out by --no-authors (with_authors=False)"
            raise FileNotFoundError(f"{str(error).rstrip('.')}, {hint}.") from error
        sets[AUTHORS] = [rows[place] for place in spread_places(len(rows), most_authors)]
    return sets


def score_sets(model, tokenizer, sets, batch_size, on_progress) -> dict[str, list[dict]]:
    """Scores of every set, with one count of documents for all of them."""
    total, done, scores = sum(map(len, sets.values())), 0, {}
    if on_progress is not None:
        on_progress(0, total)
    for name, rows in sets.items():
        counted = None if on_progress is None else lambda count, _, before=done: on_progress(before + count, total)
        scores[name] = score_documents(model, tokenizer, rows, batch_size, counted)
        done += len(rows)
    return scores
