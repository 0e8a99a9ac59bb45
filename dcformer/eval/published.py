"""The paper's Tables 4 and 5, EleutherAI's scores of Pythia, and the control that compares results with them.

The paper's rows of Pythia repeat EleutherAI's scores where there are any, which shows that the protocol is the same.
`published/paper.json` holds the paper's tables, `published/pythia.json` EleutherAI's accuracies and their files.
Accuracies are fractions everywhere outside these files.

The published numbers come from the same documents and weights, so without examples the right protocol agrees up to a
few documents that are decided by rounding. With five examples the published runs sampled other examples, so a result
may differ by two standard errors.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .stats import accuracy_stderr


AVERAGE = "average"
NO_ROW = "none"
PAPER_ROWS = ("Pythia-2.8B", "DCPythia-2.8B", "DCFormer++2.8B", "Pythia-6.9B", "DCPythia-6.9B", "Pythia-12B")
HALF_A_DIGIT = 0.0005  # the paper's accuracies are rounded to 0.1 points
FEW_POINTS = 0.003
FEW_DOCUMENTS = 3
FEW_STDERRS = 2
_ROUNDING_ERROR = 1e-9  # of accuracies in float64

# Names of models in lower case: a Hub repository without its owner, or a folder.
_ROW_OF_NAME = {row.lower(): row for row in PAPER_ROWS} | dict.fromkeys(
    ("dcformer-2.8b", "dcformer++-2.8b", "dcformer_pp_2b8"), "DCFormer++2.8B"
)
_PYTHIA_ROWS = ("Pythia-2.8B", "Pythia-6.9B", "Pythia-12B")


@dataclass(frozen=True)
class Control:
    """The published accuracy (fraction) of a Pythia model, and by how much a result may differ from it."""

    published: float
    tolerance: float

    def agrees(self, value: float) -> bool:
        return abs(value - self.published) <= self.tolerance + _ROUNDING_ERROR


def paper_row(model: str, paper_rows: Mapping[str, str] | None = None) -> str | None:
    """
    The paper's row of a model, by the last part of its name: both `"EleutherAI/pythia-2.8b"` and `"models/pythia-2.8b"`
    are Pythia-2.8B. Deduplicated and other models have no row.

    Args:
        model: Name on the Hub or folder.
        paper_rows (*optional*): Model -> row of the paper, for other names; `"none"` for a model without a row whatever
            its name.

    Raises:
        ValueError: if `paper_rows` names a row that the paper does not have.
    """
    chosen = {name.rstrip("/"): row for name, row in (paper_rows or {}).items()}
    for row in chosen.values():
        if row not in (*PAPER_ROWS, NO_ROW):
            raise ValueError(f"The row must be one of {', '.join(PAPER_ROWS)}, or {NO_ROW}, got {row!r}.")
    model = model.rstrip("/")
    if model in chosen:
        return None if chosen[model] == NO_ROW else chosen[model]
    return _ROW_OF_NAME.get(model.replace("\\", "/").rsplit("/", 1)[-1].lower())


def paper_accuracies(row: str | None, num_fewshot: int) -> dict[str, float]:
    """Table 4's accuracies (fractions) of a row by task, and `"average"`; empty if the paper has none."""
    cells = _numbers("paper")["table4"].get(str(num_fewshot), {}).get(row, {})
    return {task: percent / 100 for task, percent in cells.items()}


def paper_perplexities(row: str | None) -> dict[str, float]:
    """Table 4's perplexities per token, by task: `"pile_ppl"`, `"flan_ppl"`; empty if there is no such row."""
    return {f"{name}_ppl": value for name, value in _numbers("paper")["perplexity"].get(row, {}).items()}


def paper_authors_texts(row: str | None) -> dict[str, float]:
    """
    Table 5 of a row by metric, over 2 to 7 shots together. The paper does not say whether an answer counts by its first
    token or as a whole, so both accuracies have the same number, and so have all perplexities.
    """
    cells = _numbers("paper")["table5"].get(row)
    if cells is None:
        return {}
    accuracies = dict.fromkeys(("acc", "acc_first_token"), cells["accuracy"] / 100)
    perplexities = ("token_perplexity", "answer_perplexity", "first_token_perplexity")
    return accuracies | dict.fromkeys(perplexities, cells["perplexity"])


def eleuther_accuracies(row: str | None, num_fewshot: int) -> dict[str, float]:
    """EleutherAI's accuracies by task of the Pythia model in a row of the paper; empty if there are none."""
    scores = _numbers("pythia")["scores"].get((row or "").lower(), {}).get(str(num_fewshot), {"tasks": {}})
    return {task: cell["acc"] for task, cell in scores["tasks"].items()}


def control(row: str | None, task: str, num_fewshot: int, num_samples: int, num_documents: int) -> Control | None:
    """
    The published accuracy of a column of Table 4: EleutherAI's, which is exact, else the paper's, which is rounded.

    `None` if nothing is published of the model's task, or not all of its documents were scored.
    """
    exact, rounded = eleuther_accuracies(row, num_fewshot), paper_accuracies(row, num_fewshot)
    if row not in _PYTHIA_ROWS or task not in rounded or task == AVERAGE or num_samples < num_documents:
        return None
    published, tolerance = exact.get(task, rounded[task]), 0.0 if task in exact else HALF_A_DIGIT
    if num_fewshot:
        tolerance += FEW_STDERRS * accuracy_stderr(published, num_documents)
    else:
        tolerance += max(FEW_POINTS, FEW_DOCUMENTS / num_documents)
    return Control(published, tolerance)


def control_of_average(row: str | None, num_fewshot: int, counts: Mapping[str, int]) -> Control | None:
    """[`control`] of the unweighted mean of all columns, which were scored on all of their `counts` documents."""
    average = paper_accuracies(row, num_fewshot).get(AVERAGE)
    columns = {task: control(row, task, num_fewshot, count, count) for task, count in counts.items()}
    if average is None or len(counts) < len(paper_accuracies(row, num_fewshot)) - 1 or None in columns.values():
        return None
    tolerance = FEW_POINTS
    if num_fewshot:
        stderrs = [accuracy_stderr(column.published, counts[task]) for task, column in columns.items() if column]
        tolerance = FEW_STDERRS * math.hypot(*stderrs) / len(stderrs)
    return Control(average, tolerance + HALF_A_DIGIT)


@cache
def _numbers(name: str) -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "published" / f"{name}.json").read_text(encoding="utf-8"))
