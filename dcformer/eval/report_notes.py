"""The sentences around the tables of a report: marks above them, notes below."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from .bootstrap import SIGNIFICANCE, sign_test_error
from .records import Record
from .report_tables import AUTHORS_ALL, Cell, Report, table_kind, table_title
from .suites import PERPLEXITY_TASKS
from .windows import PAPER_WINDOW


Records = Mapping[tuple[str, str, int], Record]  # by model, task and shots

_FEW_DOCUMENTS = 20


def partial_banners(report: Report, records: Records) -> list[str]:
    """One sentence for each set of models that lack the same documents."""
    lacking: dict[tuple, list[str]] = defaultdict(list)
    for model in report.models:
        counts: dict[int, dict[str, None]] = defaultdict(dict)  # an ordered set of descriptions for each shots
        for record in records.values():
            if record.model == model and record.is_partial:
                counts[record.num_fewshot][
                    f"{record.num_samples} of {record.num_documents} documents of {record.task}"
                ] = None
        for shots, texts in sorted(counts.items()):
            lacking[shots, tuple(texts)].append(report.names[model])
    return [
        f"PARTIAL: {', '.join(texts)} ({shots}-shot; {', '.join(models)})" for (shots, texts), models in lacking.items()
    ]


def legend(report: Report, records: Records, bootstrap: Mapping[str, int]) -> list[str]:
    """
    What a reader has to know of the figures.

    Args:
        report: The tables.
        records: What they were made of.
        bootstrap: `seed` and `resamples` of the intervals.
    """
    notes = ["± is one standard error; oov_policy is what was done with token ids outside the embedding."]
    if any(cell.delta for cell in report.cells.values()):
        draws = f"{bootstrap['resamples']:,} resamples of the documents, seed {bootstrap['seed']}"
        notes.append(
            f"Intervals of differences to {report.names[report.baseline]} are 95 % percentiles of a paired bootstrap "
            f"({draws}); differences of perplexities are of their natural logarithms."
        )
        notes += _notes_on_differences(report)
        few = {c.task: None for c in report.cells.values() if c.delta and c.num_samples < _FEW_DOCUMENTS}
        if few:
            notes.append(f"Fewer than {_FEW_DOCUMENTS} documents give no reliable interval: {', '.join(few)}.")
    compared = {cell.model for cell in report.cells.values() if cell.paper is not None}
    for model in report.models:
        if model in compared:
            notes.append(f"{report.names[model]} is compared with the paper's row {report.rows[model]}.")
    tasks = {cell.task for cell in report.cells.values() if cell.paper is not None}
    if AUTHORS_ALL in tasks:
        notes.append(
            "The paper does not say whether its results of head tasks are by first token or whole answer, by token "
            "or by answer; all of them stand beside its two numbers."
        )
    notes += _window_notes(report, records)
    if "flan_ppl" in tasks:
        notes.append("The paper's sample of Flan is unpublished; its perplexity is of other documents.")
    return notes


def _notes_on_differences(report: Report) -> list[str]:
    """How differences are judged, and how many are found in a table where there are none."""
    name = report.names[report.baseline]
    notes = [
        f"21 : 17 of 1,838 means that of 1,838 documents 38 are right for only one of two models: 21 only for the "
        f"model of the row, 17 only for {name}. P-values of single columns of accuracy are of the exact sign test over "
        "these documents (McNemar's), all others of the bootstrap.",
        "A difference is undecided if its interval contains 0 or ends there, or if its p-value is above 0.05: the "
        "documents do not tell which of the two models is better. All others are decided.",
    ]
    tables: dict[tuple[str, int], list[Cell]] = defaultdict(list)
    for cell in report.cells.values():
        if cell.delta and not cell.is_summary:
            tables[table_kind(cell.task, cell.metric), cell.num_fewshot].append(cell)
    notes += [_note_on_chance(table_title(*table), cells, report.correction) for table, cells in tables.items()]
    if report.correction == "holm":
        notes.append(
            "P-values are corrected for the number of differences in their table by Holm's rule (the average and all K "
            "for that of the other models); intervals are not."
        )
    return notes


def _note_on_chance(title: str, cells: list[Cell], correction: str) -> str:
    found = sum(not cell.is_undecided for cell in cells)
    counted = f"{title}: {found} of {len(cells)} {'difference is' if len(cells) == 1 else 'differences are'} decided"
    if correction == "holm":
        return f"{counted}. If no model differed, there would be any in at most 5 % of such tables."
    errors = [
        sign_test_error(cell.delta.only_here + cell.delta.only_there) if cell.delta.by_sign_test else SIGNIFICANCE
        for cell in cells
    ]
    once = 1 - math.prod(1 - error for error in errors)
    is_independent = len({cell.task for cell in cells}) == len(cells)
    return (
        f"{counted}. If no model differed, chance alone would decide {sum(errors):.1f} on average, and at least one in "
        f"{'' if is_independent else 'at most '}{100 * once:.0f} % of such tables."
    )


def _window_notes(report: Report, records: Records) -> list[str]:
    """One for each length of windows that is not the paper's."""
    tasks: dict[int, dict[str, None]] = defaultdict(dict)
    for cell in report.cells.values():
        if cell.task in PERPLEXITY_TASKS and window_of(cell, records) != PAPER_WINDOW:
            tasks[window_of(cell, records)][f"{cell.task} of {report.names[cell.model]}"] = None
    return [
        f"Scored in windows of {window:,} tokens, and comparable with no other: {', '.join(names)}."
        for window, names in sorted(tasks.items())
    ]


def incomparable_notes(report: Report, reasons: Mapping[tuple[str, str], list[str]]) -> list[str]:
    """
    Which results are not compared with the baseline's, and why.

    Args:
        report: The tables.
        reasons: (model, reason) -> tasks.
    """
    reference = report.names[report.baseline or report.models[0]]
    return [
        f"{report.names[model]} and {reference} are not compared on {', '.join(tasks)}: {reason}."
        for (model, reason), tasks in reasons.items()
    ]


def window_of(cell: Cell, records: Records) -> int:
    """Tokens of a window in a task of perplexity, the paper's if the record does not say."""
    return records[cell.model, cell.task, cell.num_fewshot].settings.get("max_length") or PAPER_WINDOW
