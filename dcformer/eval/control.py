"""The control of the protocol: a Pythia model must reach what was published for it.

The documents and the weights are the same, so without examples a right protocol agrees up to a few documents whose
answer hangs on rounding. With five examples the published runs drew others, and only two standard errors can be asked
for. Sampling error has no place in the former: with two standard errors there, `acc_norm` passed for `acc`, and the
weights of a step 10,000 before the end for the last ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .bootstrap import accuracy_stderr, mean_stderr
from .published import AVERAGE, ControlAccuracy, control_accuracies
from .table4_tasks import DOCUMENT_COUNTS


FEW_POINTS = 0.003
FEW_DOCUMENTS = 3
FEW_STDERRS = 2
# What documents that were left out may add: more than two, as a table has up to 22 cells.
STDERRS_OF_LIMITED = 3
_ROUNDING_ERROR = 1e-9  # of accuracies in float64


@dataclass(frozen=True)
class ControlCheck:
    """
    A result held against what was published.

    Attributes:
        published: The accuracy that it is held against.
        tolerance: By how much it may differ (a fraction); infinite for a single document.
        agrees: Whether it does not differ more.
        num_samples, num_documents: Documents that were scored, and that the published accuracy is of.
        is_limited: Whether only some of the task's documents were scored, so that the tolerance is wider.
        has_other_documents: Whether the record says that its documents do not have the hash that is known.
    """

    published: ControlAccuracy
    tolerance: float
    agrees: bool
    num_samples: int
    num_documents: int
    is_limited: bool
    has_other_documents: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it is of as many documents as the published accuracy."""
        return self.num_samples == self.num_documents


def check_column(
    row: str | None,
    task: str,
    num_fewshot: int,
    value: float,
    num_samples: int,
    num_documents: int,
    has_other_documents: bool = False,
) -> ControlCheck | None:
    """
    Hold a column of Table 4 against what was published of a Pythia model.

    Args:
        row: The paper's row of the model.
        task: Column of Table 4.
        num_fewshot: Examples before every question.
        value: Accuracy (fraction).
        num_samples: Documents that were scored.
        num_documents: Documents that the task had.
        has_other_documents: Whether they are known to be other documents than the published accuracy is of.

    Returns:
        `None` if nothing is published.
    """
    published = control_accuracies(row, num_fewshot).get(task)
    if published is None or task not in DOCUMENT_COUNTS:
        return None
    is_limited = num_samples < num_documents
    tolerance = column_tolerance(published, num_fewshot, num_documents)
    if is_limited:
        tolerance += _limited_tolerance(published, num_samples, num_documents)
    agrees = abs(value - published.value) <= tolerance + _ROUNDING_ERROR
    count = DOCUMENT_COUNTS[task]
    return ControlCheck(published, tolerance, agrees, num_samples, count, is_limited, has_other_documents)


def check_average(
    row: str | None, num_fewshot: int, value: float, columns: Sequence[ControlCheck | None]
) -> ControlCheck | None:
    """
    As [`check_column`], for the unweighted mean of all columns of Table 4, whose checks are given.

    Columns that all deviate to one side by a little less than they may are caught here.
    """
    published = control_accuracies(row, num_fewshot).get(AVERAGE)
    checks = [check for check in columns if check is not None]
    if published is None or len(checks) < len(DOCUMENT_COUNTS):
        return None
    if num_fewshot:
        errors = [_stderr(check.published.value, check.num_samples) for check in checks]
        tolerance = FEW_STDERRS * mean_stderr(errors)
    else:
        tolerance = FEW_POINTS
    limited = [
        _limited_tolerance(check.published, check.num_samples, check.num_documents) if check.is_limited else 0.0
        for check in checks
    ]
    tolerance += published.rounding + mean_stderr(limited)
    agrees = abs(value - published.value) <= tolerance + _ROUNDING_ERROR
    counts = sum(check.num_samples for check in checks), sum(check.num_documents for check in checks)
    return ControlCheck(published, tolerance, agrees, *counts, any(check.is_limited for check in checks))


def column_tolerance(published: ControlAccuracy, num_fewshot: int, num_documents: int) -> float:
    """By how much an accuracy over all documents may differ from the published one."""
    if num_fewshot:
        return FEW_STDERRS * _stderr(published.value, num_documents) + published.rounding
    return max(FEW_POINTS, FEW_DOCUMENTS / num_documents) + published.rounding


def _limited_tolerance(published: ControlAccuracy, num_samples: int, num_documents: int) -> float:
    """What a draw of some documents, without replacement, may add."""
    if num_samples < 2:
        return math.inf
    left_out = max(num_documents - num_samples, 0) / max(num_documents - 1, 1)
    return STDERRS_OF_LIMITED * _stderr(published.value, num_samples) * math.sqrt(left_out)


def _stderr(accuracy: float, count: int) -> float:
    """Of the published accuracy, so that a wrong result cannot widen what it is held against."""
    return accuracy_stderr(accuracy, max(count, 2))
