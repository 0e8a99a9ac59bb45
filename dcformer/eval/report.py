"""From results on disk to the paper's tables: differences to a baseline and to the paper, and the control of Pythia.

The tables themselves are laid out in report_tables.py.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from . import published
from .bootstrap import (
    RESAMPLES,
    Difference,
    accuracy_stderr,
    as_pair,
    have_same_documents,
    holm,
    mean_stderr,
    metric_and_stderr,
    paired_difference,
    paired_mean_difference,
)
from .control import check_average, check_column
from .plan import OBSERVED
from .published import AVERAGE
from .records import Record, model_folder, read_records, read_samples, record_path, samples_path
from .report_control import control_statements, control_warnings
from .report_notes import incomparable_notes, legend, partial_banners, window_of
from .report_tables import AUTHORS_ALL, AUTHORS_METRICS, Cell, Key, Report, finite, table_kind
from .short_names import short_names
from .suites import AUTHORS_TASKS, PERPLEXITY_TASKS
from .table4_tasks import TABLE4_COLUMNS
from .windows import PAPER_WINDOW


# What must be the same for two results to be compared, besides the documents.
_COMPARED_SETTINGS = ("dtype", "oov_policy", "task_version")

CORRECTIONS = ("none", "holm")


def build_report(
    output: str | os.PathLike,
    *,
    baseline: str | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
    paper_rows: Mapping[str, str] | None = None,
    correction: str = "none",
) -> Report:
    """
    Read a folder of results and compare them.

    Args:
        output: Folder that `dcformer eval` wrote.
        baseline (`str`, *optional*): Model that the others are compared with; no differences if `None`.
        seed (`int`, defaults to 0): Seed of the bootstrap.
        resamples (`int`, defaults to 10,000): Number of its resamples.
        paper_rows (`Mapping[str, str]`, *optional*): Model -> row of the paper, see `published.paper_row`.
        correction (`str`, defaults to `"none"`): `"holm"` corrects the p-values of each table for their number, by
            Holm's rule; a summary (the average, all K) is corrected with those of the other models alone.

    Raises:
        FileNotFoundError: if the folder is not there or holds no results.
        ValueError: if a file is damaged, the baseline or a model of `paper_rows` has no results, a row is not the
            paper's, `resamples` is not positive, or there is no such correction.
        ImportError: without SciPy, if there is a baseline.
    """
    if correction not in CORRECTIONS:
        raise ValueError(f"There is no correction {correction!r}; choose from {', '.join(CORRECTIONS)}.")
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    records = {}
    for record in read_records(output):
        key = (record.model, record.task, record.num_fewshot)
        if key in records:
            raise ValueError(
                f"{str(output)!r} holds two results of {record.model!r}, task {record.task!r}, "
                f"{record.num_fewshot}-shot; remove one."
            )
        records[key] = record
    return _Builder(output, records, baseline, paper_rows or {}, correction, seed, resamples).build()


class _Builder:
    """Fills a report step by step, reading every file of samples once."""

    def __init__(
        self,
        output: str | os.PathLike,
        records: dict[tuple[str, str, int], Record],
        baseline: str | None,
        paper_rows: Mapping[str, str],
        correction: str,
        seed: int,
        resamples: int,
    ):
        models = {model for model, _, _ in records}
        by_folder = {model_folder(model): model for model in models}
        for name in ([baseline] if baseline else []) + list(paper_rows):
            if model_folder(name) not in by_folder:
                raise ValueError(f"There are no results of {name!r}; there are of {', '.join(sorted(models))}.")
        self.output, self.records, self.correction = output, records, correction
        self.baseline = by_folder[model_folder(baseline)] if baseline else None
        chosen = {by_folder[model_folder(name)]: row for name, row in paper_rows.items()}
        rows = {model: published.paper_row(model, chosen) for model in models}
        self.rows = {model: row for model, row in rows.items() if row}
        order: dict[str | None, int] = {row: place for place, row in enumerate(published.PAPER_ROWS)}
        self.models = sorted(models, key=lambda m: (m != self.baseline, order.get(rows[m], len(order)), m))
        self.names = short_names(self.models)
        self.bootstrap = {"seed": seed, "resamples": resamples}
        self.samples: dict[tuple[str, str, int], list[dict] | None] = {}
        self.cells: dict[Key, Cell] = {}
        self.incomparable: dict[tuple[str, str], list[str]] = defaultdict(list)  # (model, reason) -> tasks
        self.notes: list[str] = []

    def build(self) -> Report:
        order = {task: place for place, task in enumerate((*TABLE4_COLUMNS, *AUTHORS_TASKS))}
        for model in self.models:
            mine = [record for record in self.records.values() if record.model == model]
            mine.sort(key=lambda record: (record.num_fewshot, order.get(record.task, len(order)), record.task))
            for shots in dict.fromkeys(record.num_fewshot for record in mine):
                for record in mine:
                    if record.num_fewshot == shots:
                        self._add_record(record)
                self._add_average(model, shots)
                self._add_authors_all(model, shots)
        if self.correction == "holm":
            self._correct_p_values()
        report = Report(
            cells=self.cells,
            models=self.models,
            names=self.names,
            policies={model: self._policy(model) for model in self.models},
            rows=self.rows,
            baseline=self.baseline,
            correction=self.correction,
        )
        report.warnings = control_warnings(report)
        report.control = control_statements(report)
        report.partial = partial_banners(report, self.records)
        report.notes = [
            *legend(report, self.records, self.bootstrap),
            *self.notes,
            *incomparable_notes(report, self.incomparable),
        ]
        return report

    def _add_record(self, record: Record) -> None:
        other = self._comparable(record)
        for metric, measured in record.metrics.items():
            stderr = measured.get("stderr")
            if stderr is None and metric.startswith("acc"):
                stderr = accuracy_stderr(measured["value"], record.num_samples)
            cell = Cell(
                record.model,
                record.task,
                record.num_fewshot,
                metric,
                measured["value"],
                finite(stderr),
                record.num_samples,
                record.num_documents,
                self._delta(record, other, metric) if other else None,
            )
            self._add(cell)

    def _add_average(self, model: str, shots: int) -> None:
        """Unweighted mean of the eleven accuracies; the baseline must be there, and comparable, on all of them."""
        cells = {task: self.cells.get((model, task, shots, "acc")) for task in TABLE4_COLUMNS}
        there = [cell for cell in cells.values() if cell]
        name = f"{self.names[model]}, {shots}-shot"
        if not there:
            return
        missing = [task for task, cell in cells.items() if not cell]
        if missing:
            self.notes.append(f"No average for {name}: {', '.join(missing)} missing.")
            return
        records = [self.records[model, task, shots] for task in TABLE4_COLUMNS]
        mixed = [name for name in ("dtype", "oov_policy") if len({str(r.settings.get(name)) for r in records}) > 1]
        if mixed:
            self.notes.append(f"No average for {name}: its tasks were run with different {' and '.join(mixed)}.")
            return
        stderrs = [cell.stderr for cell in there]
        delta = None
        if all(cell.delta for cell in there):
            pairs = {
                record.task: (self._samples(record), self._samples(self.records[self.baseline, record.task, shots]))
                for record in records
            }
            delta = paired_mean_difference(pairs, "acc", **self.bootstrap)
        self._add(
            Cell(
                model,
                AVERAGE,
                shots,
                "acc",
                sum(cell.value for cell in there) / len(there),
                None if None in stderrs else mean_stderr(stderrs),
                sum(cell.num_samples for cell in there),
                sum(cell.num_documents for cell in there),
                delta,
            )
        )

    def _add_authors_all(self, model: str, shots: int) -> None:
        """Table 5's mixture of 2 to 7 shots, over all answers; texts are resampled whole, with their six answers."""
        records = [self.records.get((model, task, shots)) for task in AUTHORS_TASKS]
        if None in records:
            return
        reason = self._reason_against_pooling(records)
        if reason:
            self.notes.append(f"No result of the authors' texts over all K for {self.names[model]}: {reason}.")
            return
        texts = self._texts(records)
        for metric in texts[0]["metrics"]:
            cells = [self.cells[model, task, shots, metric] for task in AUTHORS_TASKS]
            value, stderr = metric_and_stderr(texts, metric, task=AUTHORS_ALL)
            delta = None
            if all(cell.delta for cell in cells):
                others = self._texts([self.records[self.baseline, task, shots] for task in AUTHORS_TASKS])
                delta = paired_difference(texts, others, metric, task=AUTHORS_ALL, **self.bootstrap)
            counts = sum(cell.num_samples for cell in cells), sum(cell.num_documents for cell in cells)
            self._add(Cell(model, AUTHORS_ALL, shots, metric, value, finite(stderr), *counts, delta))

    def _reason_against_pooling(self, records: Sequence[Record]) -> str:
        for record in records:
            if not self._samples(record):
                return f"the file {_samples_name(record)!r} with samples is missing or empty; run its task again"
        texts = [{sample["doc_id"] for sample in self._samples(record)} for record in records]
        return "" if all(ids == texts[0] for ids in texts) else "its tasks were not run on the same texts"

    def _texts(self, records: Sequence[Record]) -> list[dict]:
        """One sample for each of the authors' texts: the metrics that all have, as sums over its answers."""
        by_text = [{sample["doc_id"]: sample for sample in self._samples(record)} for record in records]
        shared = [
            metric
            for metric in AUTHORS_METRICS
            if all(metric in record.metrics for record in records)
            and all(metric in sample["metrics"] for samples in by_text for sample in samples.values())
        ]
        texts = []
        for doc_id in by_text[0]:
            answers = [samples[doc_id] for samples in by_text]
            metrics = {
                metric: tuple(map(sum, zip(*(as_pair(answer["metrics"][metric]) for answer in answers))))
                for metric in shared
            }
            doc_hash = " ".join(answer["doc_hash"] for answer in answers)
            texts.append({"doc_id": doc_id, "doc_hash": doc_hash, "metrics": metrics})
        return texts

    def _documents(self, cell: Cell) -> dict[str, Any]:
        """What the record says of the documents; nothing in records of earlier versions."""
        observed = self.records[cell.model, cell.task, cell.num_fewshot].settings.get(OBSERVED) or {}
        return observed.get("documents") or {}

    def _add(self, cell: Cell) -> None:
        """With the paper's number, the verdict on it, and the control of a Pythia model."""
        row, control = self.rows.get(cell.model), None
        numbers: Mapping[str, float | None] = {}
        if cell.task == AUTHORS_ALL:
            numbers = {cell.task: published.paper_authors_texts(row).get(cell.metric)}
        elif cell.metric == "acc":
            numbers = published.paper_accuracies(row, cell.num_fewshot)
            if cell.task == AVERAGE:
                columns = [self.cells[cell.model, task, cell.num_fewshot, "acc"].control for task in TABLE4_COLUMNS]
                control = check_average(row, cell.num_fewshot, cell.value, columns)
            elif "stands_in_for" not in (documents := self._documents(cell)):
                counts = cell.num_samples, cell.num_documents
                is_other = documents.get("as_known") is False
                control = check_column(row, cell.task, cell.num_fewshot, cell.value, *counts, is_other)
        elif cell.metric == "token_perplexity" and window_of(cell, self.records) == PAPER_WINDOW:
            numbers = published.paper_perplexities(row)
        paper = numbers.get(cell.task)
        within = None if paper is None else cell.is_within(paper)
        key = (cell.model, cell.task, cell.num_fewshot, cell.metric)
        self.cells[key] = replace(cell, paper=paper, within=within, control=control)

    def _correct_p_values(self) -> None:
        """Of each table, and of the summaries in it, for their number."""
        families: dict[tuple[str, int, bool], list[Key]] = defaultdict(list)
        for key, cell in self.cells.items():
            if cell.p_value is not None:
                families[table_kind(cell.task, cell.metric), cell.num_fewshot, cell.is_summary].append(key)
        for keys in families.values():
            for key, p_value in zip(keys, holm([self.cells[key].delta.p_value for key in keys])):
                self.cells[key] = replace(self.cells[key], corrected=p_value)

    def _comparable(self, record: Record) -> Record | None:
        """The baseline's record for the same task, if the two may be compared; else the reason becomes a note."""
        reference = self.baseline or self.models[0]
        other = self.records.get((reference, record.task, record.num_fewshot))
        if record.model == reference or (other is None and not self.baseline):
            return None
        reason = self._reason_against(record, other)
        if reason:
            self.incomparable[record.model, reason].append(f"{record.task} ({record.num_fewshot}-shot)")
            return None
        return other if self.baseline else None

    def _reason_against(self, record: Record, other: Record | None) -> str:
        if other is None:
            return "the latter has no result"
        for name, (first, second) in _settings_that_differ(record, other).items():
            return f"{name} is {first} for the former and {second} for the latter"
        for each in (record, other):
            if self.baseline and self._samples(each) is None:
                return f"the file {_samples_name(each)!r} with samples is missing; run the task again"
        if self.baseline and not have_same_documents(self._samples(record), self._samples(other)):
            return "they were scored on different documents (other data, or a tokenizer that packs text otherwise)"
        return ""

    def _delta(self, record: Record, other: Record, metric: str) -> Difference | None:
        for each in (record, other):
            if any(metric not in sample["metrics"] for sample in self._samples(each)):
                reason = f"there is no {metric} in {_samples_name(each)!r}"
                self.incomparable[record.model, reason].append(f"{record.task} ({record.num_fewshot}-shot)")
                return None
        return paired_difference(
            self._samples(record), self._samples(other), metric, task=record.task, **self.bootstrap
        )

    def _samples(self, record: Record) -> list[dict] | None:
        """Samples without their requests, which may be large; `None` if the file is missing."""
        key = (record.model, record.task, record.num_fewshot)
        if key not in self.samples:
            there = samples_path(record_path(self.output, *key)).is_file()
            self.samples[key] = _without_requests(record, read_samples(self.output, record)) if there else None
        return self.samples[key]

    def _policy(self, model: str) -> str:
        policies = {str(r.settings.get("oov_policy") or "none") for r in self.records.values() if r.model == model}
        return " and ".join(sorted(policies))


def _without_requests(record: Record, samples: list[dict]) -> list[dict]:
    names = ("doc_id", "doc_hash", "metrics")
    whole = all(isinstance(sample, dict) and all(name in sample for name in names) for sample in samples)
    if not whole or len(samples) != record.num_samples:
        raise ValueError(
            f"{_samples_name(record)!r} is damaged, or not of its record, which has {record.num_samples} samples: "
            "remove both, and run the task again."
        )
    return [{name: sample[name] for name in names} for sample in samples]


def _settings_that_differ(record: Record, other: Record) -> dict[str, tuple[str, ...]]:
    """Name -> the two values, of what forbids comparing two results."""
    pairs = {name: (record.settings.get(name), other.settings.get(name)) for name in _COMPARED_SETTINGS}
    if None in pairs["oov_policy"]:
        del pairs["oov_policy"]  # a model whose embedding has every id needs none
    if record.task in PERPLEXITY_TASKS:
        pairs["max_length"] = record.settings.get("max_length"), other.settings.get("max_length")
    differing: dict[str, tuple[str, ...]] = {name: (str(a), str(b)) for name, (a, b) in pairs.items() if a != b}
    if record.num_samples != other.num_samples:
        differing["limit"] = tuple(
            f"{'none' if r.limit is None else r.limit} ({r.num_samples} documents)" for r in (record, other)
        )
    return differing


def _samples_name(record: Record) -> str:
    """Path of a record's samples inside the folder of results."""
    return samples_path(record_path("", record.model, record.task, record.num_fewshot)).as_posix()
