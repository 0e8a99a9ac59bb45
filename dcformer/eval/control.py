"""The control: results of Pythia models against the published ones, which shows whether the protocol is right.

The published numbers come from the same documents and weights, so without examples the right protocol agrees up to a
few documents that are decided by rounding. With five examples the published runs sampled other examples, so a result
may differ by two standard errors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .published import AVERAGE, eleuther_accuracies, paper_accuracies
from .records import Record
from .stats import accuracy_stderr
from .suites import TABLE4_COLUMNS
from .task_data import source_of


if TYPE_CHECKING:
    import pandas

    from .comparison import Results

HALF_A_DIGIT = 0.0005  # the paper's accuracies are rounded to 0.1 points
FEW_POINTS = 0.003
FEW_DOCUMENTS = 3
FEW_STDERRS = 2
_ROUNDING_ERROR = 1e-9  # of accuracies in float64
_PYTHIA_ROWS = ("Pythia-2.8B", "Pythia-6.9B", "Pythia-12B")


@dataclass(frozen=True)
class Control:
    """The published accuracy (fraction) of a Pythia model, and by how much a result may differ from it."""

    published: float
    tolerance: float

    def agrees(self, value: float) -> bool:
        return abs(value - self.published) <= self.tolerance + _ROUNDING_ERROR


def control_of(row: str | None, record: Record) -> Control | None:
    """
    The published accuracy of a column of Table 4: EleutherAI's, which is exact, else the paper's, which is rounded.

    `None` if nothing is published of the model's task, or others or not all of its documents were scored.
    """
    task, shots, count = record.task, record.num_fewshot, record.num_documents
    exact, rounded = eleuther_accuracies(row, shots), paper_accuracies(row, shots)
    if row not in _PYTHIA_ROWS or task not in rounded or record.is_partial or "stands_in_for" in record.documents:
        return None
    published, tolerance = exact.get(task, rounded[task]), 0.0 if task in exact else HALF_A_DIGIT
    if shots:
        return Control(published, tolerance + FEW_STDERRS * accuracy_stderr(published, count))
    return Control(published, tolerance + max(FEW_POINTS, FEW_DOCUMENTS / count))


def control_of_average(row: str | None, columns: Sequence[Record]) -> Control | None:
    """[`control_of`] of the unweighted mean of all columns; `None` if one of them has none."""
    held = [(control.published, r.num_documents) for r in columns if (control := control_of(row, r))]
    if len(held) < len(columns):
        return None
    tolerance, shots = FEW_POINTS, columns[0].num_fewshot
    if shots:
        tolerance = FEW_STDERRS * math.hypot(*itertools.starmap(accuracy_stderr, held)) / len(held)
    return Control(paper_accuracies(row, shots)[AVERAGE], tolerance + HALF_A_DIGIT)


def control_banners(results: Results, frame: pandas.DataFrame) -> Iterator[str]:
    """Compare the results of Pythia models with the published ones, in a sentence for every number of shots."""
    held = frame[frame.published.notna()]
    for (model, shots), rows in held.groupby(["model", "shots"], sort=False):
        name, missed = f"{results.names[model]}, {shots}-shot", rows[rows.control == "outside tolerance"]
        if len(missed):
            cell = "{task} {value:.2%} instead of {published:.2%} ± {tolerance:.2%}"
            cells = "; ".join(cell.format(**row) for row in missed.to_dict("records"))
            yield (
                f"CONTROL FAILED: {name}, misses {len(missed)} of {len(rows)} accuracies published for "
                f"{results.rows[model]}: {cells}. Trust no other number in these tables until this is explained."
            )
            continue
        columns = [results.records[model, task, shots] for task in rows.task if task != AVERAGE]
        others = [
            r.task
            for r in columns
            if r.documents.get("as_known") is False or source_of(r.task).count != r.num_documents
        ]
        doubts = {
            "of other documents": others,
            "missing or limited": [task for task in (*TABLE4_COLUMNS, AVERAGE) if task not in set(rows.task)],
        }
        parts = [f"{', '.join(tasks)} {doubt}" for doubt, tasks in doubts.items() if tasks]
        if shots:
            parts.append("results with examples do not distinguish neighbouring checkpoints")
        state, rest = ("INCOMPLETE", f" ({'; '.join(parts)})") if parts else ("PASSED", "")
        yield f"CONTROL {state}: {name}, agrees with {len(rows)} published accuracies{rest}."
    if held.empty and (frame.paper.notna() & frame.task.isin(TABLE4_COLUMNS)).any():
        yield "Not controlled: no Pythia model of the paper is here; run one, such as EleutherAI/pythia-2.8b."
