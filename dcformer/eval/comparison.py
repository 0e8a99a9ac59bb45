"""Compares results with a baseline and with the paper: a frame with a row for every number, at full precision.

Accuracies are fractions here, and percent in the tables of the report.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ..head_tasks import REFERENCES, reference_answers
from . import published, stats
from .control import control_of, control_of_average
from .perplexity import PAPER_WINDOW
from .published import AVERAGE
from .records import Record, in_paper_order, model_folder, read_records, read_samples
from .suites import AUTHORS_TASKS, HEAD_TASKS, PERPLEXITY_TASKS, TABLE4_COLUMNS
from .task_data import import_extra
from .texts import TEXT


if TYPE_CHECKING:
    import pandas

AUTHORS_ALL = "head_tasks_authors_all"
SUMMARIES = (AVERAGE, AUTHORS_ALL)
# Column of the frame -> field of `stats.Difference`.
_DELTA_FIELDS = {"delta": "value", "low": "low", "high": "high", "wins": "wins", "losses": "losses", "p": "p_value"}
# Settings that must be equal for two results to be compared, besides the documents.
_COMPARED_SETTINGS = ("dtype", "oov_policy", "task_version")


class Results:
    """
    The records of a folder, and their samples, every file of which is read once.

    Attributes:
        records: By model, task and shots.
        baseline: The model that the others are compared with.
        rows: Model -> row of the paper.
        models: In the order of the tables: the baseline, then the paper's order, then by name.
        names: Model -> its name in the tables.
        bootstrap: `seed` and `resamples` of differences.
    """

    def __init__(
        self, output: str | os.PathLike, baseline: str | None, paper_rows: Mapping[str, str], bootstrap: dict[str, int]
    ):
        self.bootstrap = bootstrap
        self.records = {(r.model, r.task, r.num_fewshot): r for r in read_records(output)}
        models = sorted({model for model, _, _ in self.records})
        by_folder = {model_folder(model): model for model in models}
        for name in (*([baseline] if baseline else []), *paper_rows):
            if model_folder(name) not in by_folder:
                raise ValueError(f"There are no results of {name!r}; there are of {', '.join(models)}.")
        self.baseline = by_folder[model_folder(baseline)] if baseline else None
        chosen = {by_folder[model_folder(name)]: row for name, row in paper_rows.items()}
        rows = {model: published.paper_row(model, chosen) for model in models}
        self.rows = {model: row for model, row in rows.items() if row}
        order = {row: index for index, row in enumerate(published.PAPER_ROWS)}
        self.models = sorted(models, key=lambda m: (m != self.baseline, order.get(rows[m] or "", len(order)), m))
        self.names = short_names(self.models)

        @cache
        def samples_of(*key: Any) -> list[dict]:
            record = self.records[key]
            kept = ("doc_id", "doc_hash", "metrics", "fields", *(["requests"] if record.task in HEAD_TASKS else []))
            return [{name: s[name] for name in kept if name in s} for s in read_samples(output, record)]

        self._samples_of = samples_of

    def samples(self, *records: Record) -> list[dict]:
        """All samples of records."""
        return [s for r in records for s in self._samples_of(r.model, r.task, r.num_fewshot)]

    def groups(self) -> Iterator[tuple[str, int, list[Record]]]:
        """Model, shots and the records of these, in the order of the tables."""
        for model in self.models:
            ordered = in_paper_order(record for record in self.records.values() if record.model == model)
            for shots, group in itertools.groupby(ordered, key=lambda record: record.num_fewshot):
                yield model, shots, list(group)

    def counterpart(self, record: Record) -> tuple[Record | None, str]:
        """The baseline's record for the same task if the two are comparable; else the reason why they are not."""
        if self.baseline is None or self.baseline == record.model:
            return None, ""
        other = self.records.get((self.baseline, record.task, record.num_fewshot))
        if other is None:
            return None, "the latter has no result"
        of_windows = ("max_length", "stride") if record.settings.stride or record.task in PERPLEXITY_TASKS else ()
        for name in (*_COMPARED_SETTINGS, *of_windows):
            first, second = (getattr(r.settings, name) for r in (record, other))
            # A model with an embedding row for every id needs no policy.
            if first != second and not (name == "oov_policy" and None in (first, second)):
                return None, f"{name} is {first} for the former and {second} for the latter"
        first, second = (sorted(sample["doc_hash"] for sample in self.samples(r)) for r in (record, other))
        if first != second:
            documents = "different documents (other data or limit, or a tokenizer that packs otherwise)"
            return None, f"they were scored on {documents}"
        return other, ""


def is_of_other_tokens(record: Record, other: Record, metric: str) -> bool:
    """True if a metric is per token and the tokens of two records are of different tokenizers."""
    return "token" in metric and bool(record.settings.stride) and record.settings.tokenizer != other.settings.tokenizer


def short_names(models: Sequence[str]) -> dict[str, str]:
    """Model -> its name in the tables: paths without the leading folders that are not needed to distinguish them."""
    names = {}
    for model in models:
        parts = [part for part in model.split("/") if part]
        is_path = model.startswith(("/", ".", "~")) or len(parts) > 2
        candidates = ["/".join(parts[-count:]) for count in range(1, len(parts) + 1)] if is_path else []
        others = [f"/{other.rstrip('/')}" for other in models if other != model]
        names[model] = next((c for c in candidates if not any(o.endswith(f"/{c}") for o in others)), model)
    return names


def compare(results: Results, correction: str) -> pandas.DataFrame:
    """All numbers, with the columns of [`Report.frame`]."""
    rows: list[dict[str, Any]] = []
    for _, _, records in results.groups():
        rows += [_number(results, r.task, {r.task: [r]}, metric) for r in records for metric in r.metrics]
        columns = [record for record in records if record.task in TABLE4_COLUMNS]
        if not why_no_average(columns):
            rows.append(_number(results, AVERAGE, {record.task: [record] for record in columns}, "acc"))
        authors = [record for record in records if record.task in AUTHORS_TASKS]
        texts = {frozenset(sample["fields"]["document"] for sample in results.samples(record)) for record in authors}
        if len(authors) == len(AUTHORS_TASKS) and len(texts) == 1:
            # As in Table 5, over all answers with 2 to 7 shots; texts are resampled with all six answers.
            metrics = [name for name in authors[0].metrics if all(name in record.metrics for record in authors)]
            rows += [_number(results, AUTHORS_ALL, {AUTHORS_ALL: authors}, metric) for metric in metrics]
    frame = import_extra("pandas").DataFrame(rows)
    frame = frame.astype({"delta": float, **dict.fromkeys(("wins", "losses"), "Int64")})
    if correction == "holm":
        families = [table_kinds(frame), frame.shots, frame.task.isin(SUMMARIES)]
        p_values = frame.p.astype(float).dropna().groupby(families)
        frame["p_corrected"] = p_values.transform(lambda family: stats.holm(family.tolist()))
    is_decided = frame.pop("excludes_zero") & (frame.p_corrected.fillna(frame.p).astype(float) <= stats.SIGNIFICANCE)
    frame["undecided"] = (frame.delta.notna() & ~is_decided).map({True: "undecided", False: ""})
    return frame


def why_no_average(columns: Sequence[Record]) -> list[str]:
    """The reasons why a model's records of Table 4 have no average."""
    missing = set(TABLE4_COLUMNS) - {record.task for record in columns}
    mixed = [name for name in ("dtype", "oov_policy") if len({getattr(r.settings, name) for r in columns}) > 1]
    return [f"{task} missing" for task in TABLE4_COLUMNS if task in missing] + [f"other {name}" for name in mixed]


def _number(results: Results, task: str, pools: Mapping[str, Sequence[Record]], metric: str) -> dict[str, Any]:
    """A row of the frame: the unweighted mean of a metric over pools of records, each a task or tasks together."""
    records = list(itertools.chain(*pools.values()))
    record, paper, held, verdict = records[0], None, None, ""
    row, delta = results.rows.get(record.model), _difference(results, pools, metric)
    values, stderrs = zip(*(_measured(results, pool, metric) for pool in pools.values()))
    value, stderr = sum(values) / len(values), None if None in stderrs else math.hypot(*stderrs) / len(stderrs)
    n_samples, n_documents = (sum(getattr(r, name) for r in records) for name in ("num_samples", "num_documents"))
    if task == AUTHORS_ALL:
        paper = published.paper_authors_texts(row).get(metric)
    elif metric == "acc":
        paper = published.paper_accuracies(row, record.num_fewshot).get(task)
        held = control_of_average(row, records) if task == AVERAGE else control_of(row, record)
    elif metric == "token_perplexity" and record.settings.max_length == PAPER_WINDOW:
        paper = published.paper_perplexities(row).get(task)
    if paper is not None and stderr is not None:
        # A few documents that are all right, or all wrong, have a standard error of 0.
        is_column = metric == "acc" and task in TABLE4_COLUMNS
        least = stats.accuracy_stderr(paper, n_samples) if is_column else 0.0
        verdict = "within 2 stderr" if abs(value - paper) <= 2 * max(stderr, least) else "outside 2 stderr"
    return {
        "model": record.model,
        "task": task,
        "shots": record.num_fewshot,
        "metric": metric,
        "value": value,
        "stderr": stderr,
        "n": n_samples,
        **{name: delta and getattr(delta, field) for name, field in _DELTA_FIELDS.items()},
        "p_corrected": math.nan,
        "undecided": "",
        "excludes_zero": delta is not None and delta.excludes_zero,
        "paper": paper,
        "verdict": verdict,
        "published": held and held.published,
        "tolerance": held and held.tolerance,
        "control": "" if held is None else f"{'within' if held.agrees(value) else 'outside'} tolerance",
        "partial": f"PARTIAL: {n_samples} of {n_documents} documents" if n_samples < n_documents else "",
    }


def _measured(results: Results, pool: Sequence[Record], metric: str) -> tuple[float, float | None]:
    """A metric and its standard error, as recorded of one task, or of the samples of several together."""
    if len(pool) == 1:
        return pool[0].metrics[metric]["value"], pool[0].metrics[metric]["stderr"]
    value, stderr = stats.metric_and_stderr(results.samples(*pool), metric)
    return value, stderr if math.isfinite(stderr) else None


def _difference(results: Results, pools: Mapping[str, Sequence[Record]], metric: str) -> stats.Difference | None:
    """The difference to the baseline of the mean over pools of records; `None` if a record cannot be compared."""
    pairs = {}
    for name, records in pools.items():
        others = [other for record in records if (other := results.counterpart(record)[0]) and metric in other.metrics]
        if len(others) < len(records) or any(is_of_other_tokens(*pair, metric) for pair in zip(records, others)):
            return None
        pairs[name] = results.samples(*records), results.samples(*others)
        if not all(metric in sample["metrics"] for samples in pairs[name] for sample in samples):
            return None  # lm-eval makes it of all documents together, as an F-score
    return stats.paired_difference(pairs, metric, **results.bootstrap)


def table_kinds(frame: pandas.DataFrame) -> pandas.Series:
    """The kind of table of every number."""
    kinds = dict.fromkeys((*HEAD_TASKS, AUTHORS_ALL), "head") | dict.fromkeys(PERPLEXITY_TASKS, "perplexity")
    is_table4 = (frame.metric == "acc") & frame.task.isin((*TABLE4_COLUMNS, AVERAGE))
    kind = frame.task.map(kinds).fillna("other").mask(is_table4, "table4")
    return kind.mask(frame.task.str.startswith(TEXT), "text")


def break_down(results: Results) -> dict[str, pandas.DataFrame]:
    """Title -> accuracies of head tasks in percent by kinds of questions, beside rules that never read the question."""
    pandas, tables = import_extra("pandas"), {}
    for title, tasks in (("generated texts", ("head_tasks",)), ("the authors' texts", AUTHORS_TASKS)):
        answers = [
            (results.names[record.model], sample, sample["metrics"]["acc"])
            for record in results.records.values()
            if record.task in tasks
            for sample in results.samples(record)
        ]
        if not answers:
            continue
        of_first = [sample for name, sample, _ in answers if name == answers[0][0]]
        for sample in of_first:
            asked = sample["requests"][0]
            question = {"context": asked["context"], "answer": asked["continuation"], **sample["fields"]}
            answers += [(REFERENCES[rule], sample, chance) for rule, chance in reference_answers(question).items()]
        frame = pandas.DataFrame([{"all": "", **s["fields"], "by": name, "acc": acc} for name, s, acc in answers])
        kinds = ("all", "shots", "subject", "pattern", "transformation")
        groups = pandas.concat(
            {kind: frame.groupby([kind, "by"]).acc.agg(["mean", "size"]).unstack() for kind in kinds}
        )
        table = groups["mean"][frame.by.unique()].rename_axis(columns=None)
        table = table.map(lambda mean: "-" if math.isnan(mean) else f"{100 * mean:.1f}").reset_index(drop=True)
        table.insert(0, "questions", [f"{kind} {value}".strip() for kind, value in groups.index])
        table.insert(1, "answers", [f"{count:.0f}" for count in groups["size"].max(axis=1)])
        tables[f"Head tasks by questions, {title}, accuracy in percent"] = table
    return tables
