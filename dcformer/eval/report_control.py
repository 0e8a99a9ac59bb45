"""What a report says of the control of Pythia models: one warning for each that fails, one sentence for each other."""

from __future__ import annotations

import math
from collections.abc import Iterator

from . import published
from .control import FEW_DOCUMENTS, FEW_POINTS, ControlCheck, column_tolerance
from .published import AVERAGE
from .report_tables import Cell, Report
from .table4_tasks import DOCUMENT_COUNTS, TABLE4_COLUMNS


_CELLS = (*TABLE4_COLUMNS, AVERAGE)
_FEWEST_ALIKE = 3  # columns that must all be another model's before it is named
_RACE = "ask the last question of every article, in the prompt of the harness before version 3.0 of its task"
_RUN_ALL = "Run all eleven columns without examples on all documents before a number is quoted."
_PROTOCOL = "check weights, prompt and data of this task"
_AVERAGE = "look for what all columns have in common, such as the weights or the dtype"


def control_warnings(report: Report) -> list[str]:
    """One for every Pythia model that misses what was published of it: a line for the model, and one for each cell."""
    warnings = []
    for model in report.models:
        cells = [cell for shots in _shots(report, model) for cell in _checked(report, model, shots)]
        misses = [cell for cell in cells if not cell.control.agrees]
        if misses:
            row = report.rows[model]
            lines = [
                f"CONTROL FAILED: {report.names[model]} misses {len(misses)} of {len(cells)} accuracies published for "
                f"{row} (step 143,000, trained without deduplication). No other number in these tables can be trusted "
                "until this is explained."
            ]
            others = _whose(row, [cell for cell in cells if cell.num_fewshot == 0])
            if others:
                lines.append(f"All columns agree of which anything is published for {others}: check what was run.")
            warnings.append("\n".join([*lines, *(_sentence(cell, row, bool(others)) for cell in misses)]))
    return warnings


def control_statements(report: Report) -> list[str]:
    """What the control of every other Pythia model and number of examples has shown, and what it has not."""
    statements = []
    for model in report.models:
        by_shots = {shots: _checked(report, model, shots) for shots in _shots(report, model)}
        if not all(cell.control.agrees for cells in by_shots.values() for cell in cells):
            continue
        doubts = {shots: list(_doubts(cells)) for shots, cells in by_shots.items()}
        for shots, cells in by_shots.items():
            if shots and doubts.get(0, [""]):
                doubts[shots].append(
                    "results with examples tell other sizes apart, but neither neighbouring checkpoints nor, in most "
                    "columns, acc_norm, and the control without examples has not passed"
                )
            statements.append(_statement(report.names[model], report.rows[model], cells, doubts[shots]))
    pythias = [model for model in report.models if published.control_accuracies(report.rows.get(model), 0)]
    for model in pythias:
        if not _shots(report, model):
            statements.append(
                f"CONTROL INCOMPLETE: of {report.names[model]} there is no result that an accuracy is published for. "
                f"{_RUN_ALL}"
            )
    if not pythias:
        tables = [cell for cell in report.cells.values() if cell.task in _CELLS and cell.paper is not None]
        if tables:
            statements.append(
                "Not controlled: these results hold no Pythia model of the paper; run one, such as "
                "EleutherAI/pythia-2.8b, on the same tasks."
            )
    return statements


def _shots(report: Report, model: str) -> list[int]:
    return sorted({cell.num_fewshot for cell in report.cells.values() if cell.model == model and cell.control})


def _checked(report: Report, model: str, shots: int) -> list[Cell]:
    """In the order of the table."""
    cells = [report.cells.get((model, task, shots, "acc")) for task in _CELLS]
    return [cell for cell in cells if cell and cell.control]


def _sentence(cell: Cell, row: str, is_of_others: bool) -> str:
    check = cell.control
    of = "" if check.is_whole else f" of {check.num_documents:,}"
    return (
        f"{cell.task}, {cell.num_fewshot}-shot: {100 * cell.value:.2f} instead of the {_published(check)}, tolerance "
        f"{100 * check.tolerance:.2f} points, {cell.num_samples:,}{of} documents: {_advice(cell, row, is_of_others)}."
    )


def _published(check: ControlCheck) -> str:
    decimals = 1 if check.published.rounding else 2
    return f"{100 * check.published.value:.{decimals}f} that {check.published.publisher} published"


def _advice(cell: Cell, row: str, is_of_others: bool) -> str:
    check = cell.control
    if not check.is_whole and not check.is_limited:
        return f"run it on the {check.num_documents:,} documents that the published accuracy is of"
    if check.has_other_documents:
        return "its documents do not have the hash that is known; run it on the published ones"
    if cell.task == AVERAGE:
        return _AVERAGE
    normalised = published.eleuther_length_normalised(row, cell.num_fewshot).get(cell.task)
    few = max(FEW_POINTS, FEW_DOCUMENTS / check.num_samples)
    if normalised is not None and abs(cell.value - normalised) < few and not is_of_others:
        return f"it agrees with the published acc_norm ({100 * normalised:.2f}); score by acc, which no length divides"
    limited = "run it without --limit, and " if check.is_limited else ""
    if abs(cell.value - check.published.value) <= 2 * check.tolerance and not cell.num_fewshot:
        return f"{limited}run it with --dtype float32 to see whether rounding decides; if not, {_PROTOCOL}"
    if cell.task.startswith("race"):
        return f"{limited}{_RACE}"
    return limited + _PROTOCOL


def _whose(row: str, cells: list[Cell]) -> str:
    """Whose published zero-shot accuracies these are, or nothing; the nearest if several agree."""
    distances = {}
    for name, accuracies in published.other_zero_shot_accuracies(row).items():
        shared = [cell for cell in cells if cell.task in accuracies and cell.task in DOCUMENT_COUNTS]
        if len(shared) < _FEWEST_ALIKE or any(cell.control.is_limited for cell in shared):
            continue
        deviations = [abs(cell.value - accuracies[cell.task]) for cell in shared]
        tolerances = [column_tolerance(cell.control.published, 0, cell.num_samples) for cell in shared]
        if all(deviation <= tolerance for deviation, tolerance in zip(deviations, tolerances)):
            distances[name] = sum(deviations) / len(deviations)
    return min(distances, key=distances.__getitem__, default="")


def _statement(name: str, row: str, cells: list[Cell], doubts: list[str]) -> str:
    shots, several = cells[0].num_fewshot, "" if len(cells) == 1 else "s"
    if doubts:
        return (
            f"CONTROL INCOMPLETE: {name}, {shots}-shot, misses nothing that it was held against, which is "
            f"{len(cells)} result{several}, but {'; and '.join(doubts)}. {_RUN_ALL}"
        )
    tolerance = (
        "two standard errors, as other examples were drawn"
        if shots
        else f"{100 * FEW_POINTS:.1f} points or {FEW_DOCUMENTS} documents"
    )
    return (
        f"CONTROL PASSED: {name}, {shots}-shot, agrees with all {len(cells)} accuracies published for {row} to "
        f"{tolerance}."
    )


def _width(cell: Cell) -> str:
    """The tolerance of a limited result."""
    points = 100 * cell.control.tolerance
    return f"±{points:.1f} points" if math.isfinite(points) else "anything passes"


def _doubts(cells: list[Cell]) -> Iterator[str]:
    """What keeps a control without a miss from having passed."""
    columns = [cell for cell in cells if cell.task != AVERAGE]
    limited = [cell for cell in columns if cell.control.is_limited]
    if limited:
        which = ", ".join(
            f"{cell.task} ({cell.num_samples:,} of {cell.num_documents:,} documents, {_width(cell)})"
            for cell in limited
        )
        yield f"a limited run cannot be controlled as strictly: {which}"
    others = [cell for cell in columns if not cell.control.is_limited and not cell.control.is_whole]
    if others:
        which = ", ".join(
            f"{cell.task} ({cell.num_samples:,} instead of {cell.control.num_documents:,})" for cell in others
        )
        yield f"these are not the documents that the published accuracies are of: {which}"
    unknown = [cell.task for cell in columns if cell.control.has_other_documents]
    if unknown:
        yield f"by their hash the documents of {', '.join(unknown)} are other ones"
    there = {cell.task for cell in columns}
    missing = [task for task in TABLE4_COLUMNS if task not in there]
    if missing:
        yield f"nothing is known of {', '.join(missing)}"
    elif len(columns) == len(cells):
        yield "there is no average"
