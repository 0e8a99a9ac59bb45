"""What can be reached without reading the question, in the quantities of a sweep's results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..head_tasks import generate_documents, suite
from ..head_tasks.references import BLIND_CHOICE, LONE_NAME, ODD_ONE_OUT, reference_scores
from ..head_tasks.tokenizer import count_tokens
from ..training.data import EVALUATION_SEED
from ..training.data_recipe import HEAD_TASKS, DataRecipe
from ..training.recipe import Recipe


# Of the lines in plots: dashes, dots, and both.
REFERENCE_STYLES = {BLIND_CHOICE: (0, (6, 2)), LONE_NAME: (0, (1, 2)), ODD_ONE_OUT: (0, (4, 2, 1, 2))}


def evaluation_references(recipe: Recipe) -> dict[str, dict[str, float]] | None:
    """
    Scores of the rules of [`dcformer.head_tasks.references`] on the documents of a recipe's evaluation.

    The evaluation loss is a mean over the tokens of the answers and the line feeds behind them. Blind choice has to
    find the whole answer, and with the last word of it the line feed is certain, so its loss is the nats of all answers
    over the number of all these tokens.

    Args:
        recipe (`Recipe`): What was trained.

    Returns:
        Rule -> `accuracy`, and `loss` in nats per token for blind choice; the other rules are certain where they are
        wrong. `None` if the loss is on anything but answers to head tasks in the words of their own tokenizer.
    """
    data = recipe.data.evaluation
    if data is None or data.loss_on != "answers" or not data.source == recipe.tokenizer == HEAD_TASKS:
        return None
    documents = _documents(data)
    scores = reference_scores(documents)
    references = _accuracies(scores)
    tokens = sum(
        count_tokens(document["text"][start : end + 1]) for document in documents for start, end in document["answers"]
    )
    nats = -math.fsum(score["log_likelihood"] for score in scores[BLIND_CHOICE])
    references[BLIND_CHOICE]["loss"] = round(nats / tokens, 5)
    return references


def suite_references(sets: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, dict[str, float]]]:
    """The same, accuracies alone, of each set of documents that a sweep scores; an empty one is left out."""
    return {name: _accuracies(reference_scores(documents)) for name, documents in sets.items() if documents}


def scored_sets(documents: int, with_authors: bool, data_dir: str | None) -> dict[str, list[dict[str, Any]]]:
    """The documents that the models of a sweep are scored on."""
    if documents == 0:
        return {}
    sets = {suite.HELD_OUT: suite.held_out_documents(documents)}
    if with_authors:
        sets[suite.AUTHORS] = suite.authors_documents(data_dir)
    return sets


def _documents(data: DataRecipe) -> list[dict[str, Any]]:
    lines = {} if data.lines is None else {"lines": (data.lines[0], data.lines[1])}
    return generate_documents(data.documents or 0, EVALUATION_SEED, split=data.split, **lines)


def _accuracies(scores: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    return {
        name: {"accuracy": round(sum(score["correct"] for score in rows) / len(rows), 5)}
        for name, rows in scores.items()
    }


__all__ = ["evaluation_references", "scored_sets", "suite_references"]
