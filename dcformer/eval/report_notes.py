"""The sentences around the tables of a report: warnings and marks above them, notes below."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from . import published
from .records import Record
from .report_tables import AUTHORS_ALL, Cell, Report
from .suites import PERPLEXITY_TASKS
from .windows import PAPER_WINDOW


Records = Mapping[tuple[str, str, int], Record]  # by model, task and shots

_FEW_DOCUMENTS = 20


def control_warnings(report: Report) -> list[str]:
    """One for every Pythia model that misses the accuracies published for it."""
    warnings = []
    for model in report.models:
        misses = []
        for cell in report.cells.values():
            scores = published.eleuther_accuracies(report.rows.get(model), cell.num_fewshot)
            score = scores.get(cell.task) if (cell.model, cell.metric) == (model, "acc") else None
            if score and cell.is_within(score.value) is False:
                mark = f", {cell.partial}" if cell.is_partial else ""
                ours = f"{100 * cell.value:.1f} instead of {100 * score.value:.1f}"
                misses.append(f"{cell.task} {cell.num_fewshot}-shot {ours}{mark}")
        if misses:
            warnings.append(
                f"CONTROL FAILED: {report.names[model]} misses EleutherAI's published accuracies by more than "
                "2 stderr; no other number in these tables can be trusted until this is explained: "
                f"{'; '.join(misses)}."
            )
    return warnings


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
