"""Published numbers: the paper's Tables 4 and 5, and EleutherAI's scores of the Pythia models.

The paper's rows of Pythia repeat EleutherAI's scores where there are any, so those tell whether the protocol is the
same. `published/paper.json` holds the paper's tables, `published/pythia.json` accuracies and the files of EleutherAI's
repository that they come from, of the models in the paper, and of their neighbours in size, step and data for telling
whose scores a result has. Accuracies are fractions everywhere outside these files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


AVERAGE = "average"
NO_ROW = "none"
HALF_A_DIGIT = 0.0005  # the paper's accuracies are rounded to 0.1 points

PAPER_ROWS = (
    "Pythia-2.8B",
    "DCPythia-2.8B",
    "DCFormer++2.8B",
    "Pythia-6.9B",
    "DCPythia-6.9B",
    "Pythia-12B",
)

# Names of models, in lower case: of a Hub repository without its owner, or of a folder.
_ROW_OF_NAME = {
    "pythia-2.8b": "Pythia-2.8B",
    "pythia-6.9b": "Pythia-6.9B",
    "pythia-12b": "Pythia-12B",
    "dcpythia-2.8b": "DCPythia-2.8B",
    "dcpythia-6.9b": "DCPythia-6.9B",
    "dcformer-2.8b": "DCFormer++2.8B",
    "dcformer++2.8b": "DCFormer++2.8B",
    "dcformer++-2.8b": "DCFormer++2.8B",
    "dcformer_pp_2b8": "DCFormer++2.8B",
}
_PYTHIA_OF_ROW = {"Pythia-2.8B": "pythia-2.8b", "Pythia-6.9B": "pythia-6.9b", "Pythia-12B": "pythia-12b"}


@dataclass(frozen=True)
class PublishedAccuracy:
    """An accuracy (fraction), its standard error, and the address of the file that it comes from."""

    value: float
    stderr: float
    source: str


@dataclass(frozen=True)
class ControlAccuracy:
    """What a Pythia model must reach: an accuracy (fraction), who published it, and by how much it may be rounded."""

    value: float
    publisher: str
    rounding: float


def paper_row(model: str, paper_rows: Mapping[str, str] | None = None) -> str | None:
    """
    The paper's row of a model, by the last part of its name, so that both `"EleutherAI/pythia-2.8b"` and
    `"models/pythia-2.8b"` are Pythia-2.8B; deduplicated and other models have none.

    Args:
        model (`str`): Hub id or folder.
        paper_rows (`Mapping[str, str]`, *optional*): Model, as given to `dcformer eval`, -> row of the paper, for
            models whose name does not say it; `"none"` for a model that has no row although its name is one.

    Returns:
        One of `PAPER_ROWS`, or `None`.

    Raises:
        ValueError: if `paper_rows` names a row that the paper does not have.
    """
    chosen = {name.rstrip("/"): row for name, row in (paper_rows or {}).items()}
    for row in chosen.values():
        if row not in (*PAPER_ROWS, NO_ROW):
            raise ValueError(f"The paper has no row {row!r}; choose from {', '.join(PAPER_ROWS)}, or {NO_ROW}.")
    model = model.rstrip("/")
    if model in chosen:
        return None if chosen[model] == NO_ROW else chosen[model]
    return _ROW_OF_NAME.get(model.replace("\\", "/").rsplit("/", 1)[-1].lower())


def paper_accuracies(row: str | None, num_fewshot: int) -> dict[str, float]:
    """Table 4's accuracies (fractions) of a row by task, and `"average"`; empty for what the paper does not have."""
    cells = _numbers("paper")["table4"].get(str(num_fewshot), {}).get(row, {})
    return {task: percent / 100 for task, percent in cells.items()}


def paper_perplexities(row: str | None) -> dict[str, float]:
    """Table 4's perplexities per token, by task: `"pile_ppl"`, `"flan_ppl"`; empty if there is no such row."""
    return {f"{name}_ppl": value for name, value in _numbers("paper")["perplexity"].get(row, {}).items()}


def paper_authors_texts(row: str | None) -> dict[str, float]:
    """
    Table 5 of a row by our metrics: over 2 to 7 shots together. The paper does not say whether an answer counts by its
    first token or as a whole, so both of our accuracies, and all of our perplexities, have the same number.
    """
    cells = _numbers("paper")["table5"].get(row)
    if cells is None:
        return {}
    accuracies = dict.fromkeys(("acc", "acc_first_token"), cells["accuracy"] / 100)
    perplexities = ("token_perplexity", "answer_perplexity", "first_token_perplexity")
    return accuracies | dict.fromkeys(perplexities, cells["perplexity"])


def eleuther_accuracies(row: str | None, num_fewshot: int) -> dict[str, PublishedAccuracy]:
    """EleutherAI's accuracies of the Pythia model that a row of the paper is, by task; empty if there are none."""
    numbers = _numbers("pythia")
    scores = numbers["scores"].get(_PYTHIA_OF_ROW.get(row or ""), {}).get(str(num_fewshot))
    if scores is None:
        return {}
    source = f"{numbers['source']}/blob/{numbers['commit']}/{scores['path']}"
    return {task: PublishedAccuracy(cell["acc"], cell["acc_stderr"], source) for task, cell in scores["tasks"].items()}


def control_accuracies(row: str | None, num_fewshot: int) -> dict[str, ControlAccuracy]:
    """
    What is published of a Pythia model, by task of Table 4 and `"average"`: EleutherAI's accuracies, which are exact,
    and for the other columns and the average the paper's, which are rounded to 0.1 points. Empty for other rows.
    """
    if row not in _PYTHIA_OF_ROW:
        return {}
    exact = eleuther_accuracies(row, num_fewshot)
    return {
        task: ControlAccuracy(exact[task].value, "EleutherAI", 0.0)
        if task in exact
        else ControlAccuracy(value, "the paper", HALF_A_DIGIT)
        for task, value in paper_accuracies(row, num_fewshot).items()
    }


def eleuther_length_normalised(row: str | None, num_fewshot: int) -> dict[str, float]:
    """EleutherAI's `acc_norm` of a row, by task; WinoGrande and LAMBADA have none."""
    scores = _numbers("pythia")["scores"].get(_PYTHIA_OF_ROW.get(row or ""), {}).get(str(num_fewshot), {"tasks": {}})
    return {task: cell["acc_norm"] for task, cell in scores["tasks"].items() if "acc_norm" in cell}


def other_zero_shot_accuracies(row: str) -> dict[str, dict[str, float]]:
    """
    Accuracies that a Pythia model should not have without examples, by whose they are: other sizes, steps and data, and
    its own with five examples.
    """
    others = {
        f"{row} with five examples": {task: cell.value for task, cell in control_accuracies(row, 5).items()},
    }
    for other in _PYTHIA_OF_ROW:
        if other != row:
            others[other] = {task: cell.value for task, cell in control_accuracies(other, 0).items()}
    return others | neighbour_accuracies(0)


def neighbour_accuracies(num_fewshot: int) -> dict[str, dict[str, float]]:
    """EleutherAI's accuracies of Pythia models beside those in the paper, by what they are, with 0 or 5 examples."""
    neighbours = _numbers("pythia")["neighbours"]
    return {name: scores[str(num_fewshot)]["acc"] for name, scores in neighbours.items()}


@cache
def _numbers(name: str) -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "published" / f"{name}.json").read_text(encoding="utf-8"))
