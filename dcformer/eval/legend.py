"""The sentences below the tables of a report: what numbers mean, and what of them compares with nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .comparison import Results, is_of_other_tokens, why_no_average
from .perplexity import PAPER_WINDOW
from .records import Record
from .suites import PERPLEXITY_TASKS, TABLE4_COLUMNS
from .task_data import LOCAL_FILES


if TYPE_CHECKING:
    import pandas


def legend(results: Results, frame: pandas.DataFrame) -> Iterator[str]:
    """Yield the sentences for a frame of [`dcformer.eval.comparison.compare`]."""
    yield f"± is one standard error{', which a single document has not' if (frame.n == 1).any() else ''}."
    for model in results.models:
        yield from _of_model(results, model)
    if frame.delta.notna().any():
        yield (
            f"Differences to {results.names[results.baseline or '']}: 95 % intervals of a paired bootstrap "
            f"({results.bootstrap['resamples']:,} resamples of the documents, of a text of its pieces, seed "
            f"{results.bootstrap['seed']}), of perplexities in logarithms. Wins are documents that only this model "
            "has right, losses those that only the other has; p of one accuracy is of the exact sign test over these, "
            "else of the bootstrap. Undecided (?): the interval contains 0 or p is above 0.05."
        )
    if (frame.delta.notna() & frame.low.isna()).any():
        yield "No interval: a single document has none, so the difference is undecided."
    if results.baseline is None:
        yield from _of_unlike_documents(results)
    for model, shots, records in results.groups():
        for record in records:
            other, reason = results.counterpart(record)
            names = f"{results.names[model]} and {results.names.get(results.baseline or '')}"
            if reason:
                yield f"{names} are not compared on {record.task} ({shots}-shot): {reason}."
            elif other and is_of_other_tokens(record, other, "token"):
                yield f"{names} are compared on {record.task} per byte alone: their tokens are of different tokenizers."
        columns = [record for record in records if record.task in TABLE4_COLUMNS]
        if columns and (reasons := why_no_average(columns)):
            yield f"No average for {results.names[model]}, {shots}-shot: {', '.join(reasons)}."


def _of_model(results: Results, model: str) -> Iterator[str]:
    name, records = results.names[model], [r for r in results.records.values() if r.model == model]
    policies = sorted({str(record.settings.oov_policy or "none needed") for record in records})
    row = f"; compared with the paper's {results.rows[model]}" if model in results.rows else ""
    clamped = " (a token id without an embedding row is read as the last row)" if "clamp" in policies else ""
    yield f"{name}: oov_policy {' and '.join(policies)}{clamped}{row}."
    unlike: dict[str, list[str]] = {}
    for record in records:
        for what in differences_from_published(record):
            unlike.setdefault(what, []).append(f"{record.task} {record.num_fewshot}-shot")
    for what, tasks in unlike.items():
        yield f"{name}: {what}: {', '.join(tasks)}."
    for what, key in (("with token ids beyond the embedding", "oov"), ("cut from the left", "truncated")):
        counts = {f"{r.task} {r.num_fewshot}-shot": r.observed.get(f"{key}_documents") for r in records}
        if parts := [f"{count:,} of {task}" for task, count in counts.items() if count]:
            yield f"{name}: documents {what}: {', '.join(parts)}."


def _of_unlike_documents(results: Results) -> Iterator[str]:
    """Yield a sentence for each task whose results are of unlike documents, which a baseline would not compare."""
    of_tasks: dict[tuple[str, int], set] = {}
    for (_, task, shots), record in results.records.items():
        scored = record.documents.get("hash") or record.settings.data, record.num_samples
        of_tasks.setdefault((task, shots), set()).add(scored)
    for (task, shots), of_results in of_tasks.items():
        if len(of_results) > 1:
            yield f"{task} ({shots}-shot): results of different documents, which do not compare."


def partial_banner(results: Results) -> Iterator[str]:
    """Yield a sentence on results of a part of the documents, if there are any."""
    partial = [record for record in results.records.values() if record.is_partial]
    if partial:
        tasks = dict.fromkeys(f"{r.num_samples} of {r.num_documents} documents of {r.task}" for r in partial)
        models = dict.fromkeys(results.names[record.model] for record in partial)
        yield f"PARTIAL: {', '.join(tasks)} ({', '.join(models)})"


def differences_from_published(record: Record) -> Iterator[str]:
    """Yield in which ways a result is not, or not known to be, one of the published documents."""
    documents, window = record.documents, record.settings.max_length
    is_known = documents.get("as_known", True)
    if is_known is False:
        yield "other documents than the published ones"
    elif is_known is None and documents.get("source") == LOCAL_FILES:
        yield "documents that are not known to be the published ones"
    if "stands_in_for" in documents:
        yield "documents of another split"
    if record.settings.stride:
        yield f"windows of {window:,} tokens that advance by {record.settings.stride:,}"
    if record.task in PERPLEXITY_TASKS and window != PAPER_WINDOW:
        yield f"windows of {window:,} tokens, which compare with no others, nor with the paper's"
