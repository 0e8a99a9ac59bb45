"""The paper's Tables 4 and 5, and EleutherAI's scores of Pythia, which the paper's rows of Pythia repeat where it can.

`published/paper.json` holds the paper's tables, `published/pythia.json` EleutherAI's accuracies and their files.
Accuracies are fractions everywhere outside these files.
"""

import json
from collections.abc import Mapping
from pathlib import Path


AVERAGE = "average"
NO_ROW = "none"
PAPER_ROWS = ("Pythia-2.8B", "DCPythia-2.8B", "DCFormer++2.8B", "Pythia-6.9B", "DCPythia-6.9B", "Pythia-12B")

_FOLDER = Path(__file__).parent / "published"
_PAPER, _PYTHIA = (json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8")) for name in ("paper", "pythia"))
# Names of models in lower case: a Hub repository without its owner, or a folder.
_ROW_OF_NAME = {row.lower(): row for row in PAPER_ROWS} | dict.fromkeys(
    ("dcformer-2.8b", "dcformer++-2.8b", "dcformer_pp_2b8"), "DCFormer++2.8B"
)


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
    cells = _PAPER["table4"].get(str(num_fewshot), {}).get(row, {})
    return {task: percent / 100 for task, percent in cells.items()}


def paper_perplexities(row: str | None) -> dict[str, float]:
    """Table 4's perplexities per token, by task: `"pile_ppl"`, `"flan_ppl"`; empty if there is no such row."""
    return {f"{name}_ppl": value for name, value in _PAPER["perplexity"].get(row, {}).items()}


def paper_authors_texts(row: str | None) -> dict[str, float]:
    """
    Table 5 of a row by metric, over 2 to 7 shots together. The paper does not say whether an answer counts by its first
    token or as a whole, so both accuracies have the same number, and so have all perplexities.
    """
    cells = _PAPER["table5"].get(row)
    if cells is None:
        return {}
    accuracies = dict.fromkeys(("acc", "acc_first_token"), cells["accuracy"] / 100)
    perplexities = ("token_perplexity", "answer_perplexity", "first_token_perplexity")
    return accuracies | dict.fromkeys(perplexities, cells["perplexity"])


def eleuther_accuracies(row: str | None, num_fewshot: int) -> dict[str, float]:
    """EleutherAI's accuracies by task of the Pythia model in a row of the paper; empty if there are none."""
    scores = _PYTHIA["scores"].get((row or "").lower(), {}).get(str(num_fewshot), {"tasks": {}})
    return {task: cell["acc"] for task, cell in scores["tasks"].items()}
