"""The paper's tables from results on disk, compared with a baseline, the paper and published scores of Pythia.

The report's frame holds one number per row at full precision; the tables are made from it. Accuracies are fractions in
the frame and in JSON, and percent in the tables.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..head_tasks import REFERENCES, reference_answers
from . import published, stats
from .head_task_answers import by_text
from .perplexity import PAPER_WINDOW
from .published import AVERAGE, PAPER_ROWS
from .records import Record, model_folder, read_records, read_samples
from .suites import AUTHORS_TASKS, HEAD_TASKS, PERPLEXITY_TASKS, TABLE4_COLUMNS
from .task_data import LOCAL_FILES, import_extra, source_of


if TYPE_CHECKING:
    import pandas
    from rich.console import Console

AUTHORS_ALL = "head_tasks_authors_all"
SUMMARIES = (AVERAGE, AUTHORS_ALL)
HEAD_TASK_HEADINGS = {
    "head_tasks": "generated",
    **{task: f"K={task[-1]}" for task in AUTHORS_TASKS},
    AUTHORS_ALL: "all K",
}
_pandas = functools.partial(import_extra, "pandas")
_ORDER = {task: index for index, task in enumerate((*TABLE4_COLUMNS, *HEAD_TASK_HEADINGS))}
_TITLES = {
    "table4": "Accuracy in percent, {}-shot",
    "head": "Head tasks, {}",
    "perplexity": "Perplexity",
    "other": "Other results, {}-shot",
}
# Column of the frame -> field of `stats.Difference`.
_DELTA_FIELDS = {"delta": "value", "low": "low", "high": "high", "wins": "wins", "losses": "losses", "p": "p_value"}
# Settings that must be equal for two results to be compared, besides the documents.
_COMPARED_SETTINGS = ("dtype", "oov_policy", "task_version")


@dataclass
class Report:
    """
    Attributes:
        frame: One row per number, `model, task, shots, metric, value, stderr, n`, the difference to the baseline
            (`delta, low, high, wins, losses, p, p_corrected, undecided`), the `paper`'s number with `verdict`,
            the `published` one of a Pythia model with `tolerance` and `control`, and `partial`. `"average"` and
            `"head_tasks_authors_all"` are tasks here.
        models: In the order of the tables: the baseline, then the paper's order, then by name.
        names: Model -> its name in the tables.
        rows: Model -> row of the paper.
        baseline: The model that the others are compared with.
        correction: How p-values were corrected for their number: `"none"` or `"holm"`.
        banners: Sentences above the tables: the control of Pythia models, and partial results.
        notes: Sentences below the tables.
        breakdown: Title -> accuracies of head tasks in percent by shots, subject, pattern and transformation, beside
            those of rules that never read the question.
    """

    frame: pandas.DataFrame
    models: list[str]
    names: dict[str, str]
    rows: dict[str, str]
    baseline: str | None
    correction: str = "none"
    banners: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    breakdown: dict[str, pandas.DataFrame] = field(default_factory=dict)

    def tables(self) -> dict[str, pandas.DataFrame]:
        """Title -> a frame of text: Table 4 of the paper for every number of shots, Table 5, and all other results."""
        tables = {}
        for (kind, shots), part in self.frame.groupby([_kinds(self.frame), self.frame.shots], sort=False):
            if kind == "head":
                for metric, of_metric in part.groupby("metric", sort=False):
                    title = _TITLES[kind].format(_words(metric))
                    tables[title] = self._table(of_metric, [HEAD_TASK_HEADINGS[task] for task in of_metric.task])
            else:
                names = part.task if kind == "table4" else part.task + " " + part.metric
                tables[_TITLES[kind].format(shots)] = self._table(part, list(names))
        return {**tables, **self.breakdown}

    def to_markdown(self) -> str:
        """All tables in GitHub's Markdown."""
        import_extra("tabulate")
        tables = [
            f"### {_escaped(title)}\n\n{table.map(_escaped).to_markdown(index=False, disable_numparse=True)}\n"
            for title, table in self.tables().items()
        ]
        banners = [f"> **{_escaped(text)}**\n" for text in self.banners]
        return "\n".join([*banners, *tables, "".join(f"- {_escaped(note)}\n" for note in self.notes)])

    def to_json(self) -> str:
        """An object with the sentences, the numbers at full precision, and the breakdown of head tasks."""
        content = {
            **{name: getattr(self, name) for name in ("banners", "notes", "baseline", "correction")},
            "numbers": json.loads(self.frame.to_json(orient="records", double_precision=15)),
            "breakdown": {title: table.to_dict(orient="records") for title, table in self.breakdown.items()},
        }
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"

    def print(self, console: Console | None = None) -> None:
        """Print the tables on a console, by default stdout; those that are wider are split by columns."""
        from rich.console import Console
        from rich.text import Text

        console = console or Console()
        for text in self.banners:
            console.print(Text(text, "bold"))
        for title, table in self.tables().items():
            first = table.columns[0]
            text = table.set_index(first).rename_axis(index=None, columns=first).to_string(line_width=console.width)
            for part in text.split("\n\n"):
                console.print(Text.assemble((title, "bold"), "\n", part, "\n"), soft_wrap=True)
        for note in self.notes:
            console.print(Text(f"- {note}"))

    def _table(self, part: pandas.DataFrame, headings: list[str]) -> pandas.DataFrame:
        """A row of values for every model, and rows of its comparisons below."""
        rows = []
        for model in self.models:
            numbers = {heading: row for heading, row in zip(headings, part.itertuples()) if row.model == model}
            labels = {
                self.names[model]: _value,
                f"Δ to {self.names.get(self.baseline or '')} [95 %]": _delta,
                "wins : losses, p" + (" (Holm)" if self.correction == "holm" else ""): _documents,
                f"paper's {self.rows.get(model)}, Δ": _paper,
            }
            for label, write in labels.items():
                cells = {heading: write(numbers[heading]) if heading in numbers else "" for heading in headings}
                if any(cells.values()):
                    rows.append({"model": label, **{heading: cell or "-" for heading, cell in cells.items()}})
        return _pandas().DataFrame(rows)


def build_report(
    output: str | os.PathLike,
    *,
    baseline: str | None = None,
    seed: int = 0,
    resamples: int = stats.RESAMPLES,
    paper_rows: Mapping[str, str] | None = None,
    correction: str = "none",
) -> Report:
    """
    Read a folder of results and compare them.

    Args:
        output: Folder that `dcformer eval` wrote.
        baseline (*optional*): The model that the others are compared with; no differences if `None`.
        seed (defaults to 0): Seed of the bootstrap.
        resamples (defaults to 10,000): Number of resamples of the bootstrap.
        paper_rows (*optional*): Model -> row of the paper, see [`dcformer.eval.published.paper_row`].
        correction (defaults to `"none"`): `"holm"` corrects the p-values of a table for their number, by Holm's rule;
            summaries (the average, all K) are corrected separately, with those of the other models.

    Raises:
        FileNotFoundError: if the folder holds no results.
        ValueError: if the baseline or a model of `paper_rows` has no results, or a row is not the paper's.
    """
    if correction not in ("none", "holm"):
        raise ValueError(f"correction must be none or holm, got {correction!r}.")
    return _Builder(output, baseline, paper_rows or {}, correction, {"seed": seed, "resamples": resamples}).build()


class _Builder:
    """Fills a report, reading every file of samples once."""

    def __init__(
        self, output: Any, baseline: str | None, paper_rows: Mapping[str, str], correction: str, bootstrap: dict
    ):
        self.output, self.correction, self.bootstrap = output, correction, bootstrap
        self.records = {(r.model, r.task, r.num_fewshot): r for r in read_records(output)}
        models = sorted({model for model, _, _ in self.records})
        by_folder = {model_folder(model): model for model in models}
        for name in (*([baseline] if baseline else []), *paper_rows):
            if model_folder(name) not in by_folder:
                raise ValueError(f"There are no results of {name!r}; there are of {', '.join(models)}.")
        self.baseline = by_folder[model_folder(baseline)] if baseline else None
        chosen = {by_folder[model_folder(name)]: row for name, row in paper_rows.items()}
        rows = {model: published.paper_row(model, chosen) for model in models}
        self.paper_rows = {model: row for model, row in rows.items() if row}
        order: dict[str | None, int] = {row: index for index, row in enumerate(PAPER_ROWS)}
        self.models = sorted(models, key=lambda m: (m != self.baseline, order.get(rows[m], len(order)), m))
        self.names = short_names(self.models)
        self.samples: dict[tuple, list[dict]] = {}
        self.rows: list[dict[str, Any]] = []
        self.of_other_documents: set[tuple[str, str, int]] = set()
        self.notes: list[str] = []

    def build(self) -> Report:
        for model in self.models:
            records = self._records_of(model)
            records.sort(key=lambda r: (r.num_fewshot, _ORDER.get(r.task, len(_ORDER)), r.task))
            for shots, of_shots in itertools.groupby(records, key=lambda record: record.num_fewshot):
                for record in of_shots:
                    self._add_record(record)
                self._add_average(model, shots)
                self._add_authors_all(model, shots)
        frame = _pandas().DataFrame(self.rows)
        if self.correction == "holm":
            frame["p_corrected"] = _corrected(frame)
        p_values = frame.p_corrected.fillna(frame.p).astype(float)
        is_decided = frame.pop("excludes_zero") & (p_values <= stats.SIGNIFICANCE)
        frame["undecided"] = (frame.delta.notna() & ~is_decided).map({True: "undecided", False: ""})
        frame = frame.astype({"delta": float, **dict.fromkeys(("wins", "losses"), "Int64")})
        report = Report(frame, self.models, self.names, self.paper_rows, self.baseline, self.correction)
        report.banners = [*self._control(frame), *self._partial()]
        report.notes = [*self._legend(frame), *self.notes]
        report.breakdown = self._breakdown()
        return report

    def _records_of(self, model: str) -> list[Record]:
        return [record for record in self.records.values() if record.model == model]

    def _add(
        self,
        key: tuple[str, str, int, str],
        value: float,
        stderr: float | None,
        counts: tuple[int, int],
        delta: stats.Difference | None,
        paper: float | None,
        held: published.Control | None = None,
    ) -> None:
        """Add a number; `key` is its model, task, shots and metric, `counts` are the scored and all documents."""
        _, task, _, metric = key
        stderr = None if stderr is None or not math.isfinite(stderr) else stderr
        verdict = ""
        if paper is not None and stderr is not None:
            # A few documents that are all right, or all wrong, have a standard error of 0.
            least = stats.accuracy_stderr(paper, counts[0]) if metric == "acc" and task in TABLE4_COLUMNS else 0.0
            verdict = "within 2 stderr" if abs(value - paper) <= 2 * max(stderr, least) else "outside 2 stderr"
        self.rows.append(
            {
                **dict(zip(("model", "task", "shots", "metric"), key)),
                "value": value,
                "stderr": stderr,
                "n": counts[0],
                **{name: delta and getattr(delta, field) for name, field in _DELTA_FIELDS.items()},
                "p_corrected": None,
                "undecided": "",
                "excludes_zero": delta is not None and delta.excludes_zero,
                "paper": paper,
                "verdict": verdict,
                "published": held and held.published,
                "tolerance": held and held.tolerance,
                "control": "" if held is None else f"{'within' if held.agrees(value) else 'outside'} tolerance",
                "partial": f"PARTIAL: {counts[0]} of {counts[1]} documents" if counts[0] < counts[1] else "",
            }
        )

    def _add_record(self, record: Record) -> None:
        model, task, shots, row = record.model, record.task, record.num_fewshot, self.paper_rows.get(record.model)
        counts, other = (record.num_samples, record.num_documents), self._comparable(record)
        documents = record.observed.get("documents", {})
        for metric, measured in record.metrics.items():
            delta = paper = held = None
            if other is not None and metric in other.metrics:
                first, second = (by_text(self._samples(r)) for r in (record, other))
                delta = stats.paired_difference(first, second, metric, task=task, **self.bootstrap)
            if metric == "acc":
                paper = published.paper_accuracies(row, shots).get(task)
                if "stands_in_for" not in documents:
                    held = published.control(row, task, shots, *counts)
            elif metric == "token_perplexity" and record.settings.get("max_length", PAPER_WINDOW) == PAPER_WINDOW:
                paper = published.paper_perplexities(row).get(task)
            if documents.get("as_known") is False or (held and source_of(task).count != counts[1]):
                self.of_other_documents.add((model, task, shots))
            key = (model, task, shots, metric)
            self._add(key, measured["value"], measured["stderr"], counts, delta, paper, held)

    def _add_average(self, model: str, shots: int) -> None:
        """Add the unweighted mean of the eleven accuracies; compared if the baseline is comparable on all of them."""
        cells = {r["task"]: r for r in self.rows if (r["model"], r["shots"], r["metric"]) == (model, shots, "acc")}
        cells = {task: cells[task] for task in TABLE4_COLUMNS if task in cells}
        records = [self.records[model, task, shots] for task in cells]
        missing = [f"{task} missing" for task in TABLE4_COLUMNS if task not in cells]
        mixed = [f"other {n}" for n in ("dtype", "oov_policy") if len({str(r.settings.get(n)) for r in records}) > 1]
        if cells and (reasons := missing + mixed):
            self.notes.append(f"No average for {self.names[model]}, {shots}-shot: {', '.join(reasons)}.")
        if missing or mixed:
            return
        delta, stderrs = None, [cell["stderr"] for cell in cells.values()]
        if all(cell["delta"] is not None for cell in cells.values()):
            others = [self.records[self.baseline, task, shots] for task in cells]
            pairs = {r.task: (self._samples(r), self._samples(other)) for r, other in zip(records, others)}
            delta = stats.paired_mean_difference(pairs, "acc", **self.bootstrap)
        row, of_columns = self.paper_rows.get(model), {r.task: r.num_documents for r in records}
        is_held = all(cell["published"] is not None for cell in cells.values())
        self._add(
            (model, AVERAGE, shots, "acc"),
            sum(cell["value"] for cell in cells.values()) / len(cells),
            None if None in stderrs else stats.mean_stderr(stderrs),
            (sum(r.num_samples for r in records), sum(r.num_documents for r in records)),
            delta,
            published.paper_accuracies(row, shots).get(AVERAGE),
            published.control_of_average(row, shots, of_columns) if is_held else None,
        )

    def _add_authors_all(self, model: str, shots: int) -> None:
        """Add the mean over all answers with 2 to 7 shots, as in Table 5; texts are resampled with all six answers."""
        records = [self.records[model, task, shots] for task in AUTHORS_TASKS if (model, task, shots) in self.records]
        texts = {frozenset(sample["fields"]["document"] for sample in self._samples(record)) for record in records}
        if len(records) < len(AUTHORS_TASKS) or len(texts) > 1:
            return
        others = [self._comparable(record, notes=False) for record in records]
        counts = sum(record.num_samples for record in records), sum(record.num_documents for record in records)
        for metric in [name for name in records[0].metrics if all(name in record.metrics for record in records)]:
            value, stderr = stats.metric_and_stderr(self._pooled(records), metric)
            delta = None
            if None not in others and all(metric in other.metrics for other in others):
                pair = self._pooled(records), self._pooled(others)
                delta = stats.paired_difference(*pair, metric, task=AUTHORS_ALL, **self.bootstrap)
            paper = published.paper_authors_texts(self.paper_rows.get(model)).get(metric)
            self._add((model, AUTHORS_ALL, shots, metric), value, stderr, counts, delta, paper)

    def _pooled(self, records: Sequence[Record]) -> Sequence[Mapping]:
        return by_text([sample for record in records for sample in self._samples(record)])

    def _comparable(self, record: Record, notes: bool = True) -> Record | None:
        """The baseline's record for the same task if the two are comparable; else a note says why they are not."""
        if self.baseline in (None, record.model):
            return None
        other = self.records.get((self.baseline, record.task, record.num_fewshot))
        reason = "the latter has no result" if other is None else self._reason_against(record, other)
        if reason and notes:
            names = f"{self.names[record.model]} and {self.names[self.baseline]}"
            self.notes.append(f"{names} are not compared on {record.task} ({record.num_fewshot}-shot): {reason}.")
        return None if reason else other

    def _reason_against(self, record: Record, other: Record) -> str:
        for name in (*_COMPARED_SETTINGS, *(["max_length"] if record.task in PERPLEXITY_TASKS else [])):
            first, second = (r.settings.get(name) for r in (record, other))
            # A model with an embedding row for every id needs no policy.
            if first != second and not (name == "oov_policy" and None in (first, second)):
                return f"{name} is {first} for the former and {second} for the latter"
        if not stats.have_same_documents(self._samples(record), self._samples(other)):
            return "they were scored on different documents (other data or limit, or a tokenizer that packs otherwise)"
        return ""

    def _samples(self, record: Record) -> list[dict]:
        key = (record.model, record.task, record.num_fewshot)
        if key not in self.samples:
            kept = ("doc_id", "doc_hash", "metrics", "fields", *(["requests"] if record.task in HEAD_TASKS else []))
            samples = read_samples(self.output, record)
            self.samples[key] = [{name: sample[name] for name in kept if name in sample} for sample in samples]
        return self.samples[key]

    def _control(self, frame: pandas.DataFrame) -> Iterator[str]:
        """Compare the results of Pythia models with the published ones, in a sentence for every number of shots."""
        held = frame[frame.published.notna()]
        for (model, shots), rows in held.groupby(["model", "shots"], sort=False):
            name, missed = f"{self.names[model]}, {shots}-shot", rows[rows.control == "outside tolerance"]
            if len(missed):
                cell = "{task} {value:.2%} instead of {published:.2%} ± {tolerance:.2%}"
                cells = "; ".join(cell.format(**row) for row in missed.to_dict("records"))
                yield (
                    f"CONTROL FAILED: {name}, misses {len(missed)} of {len(rows)} accuracies published for "
                    f"{self.paper_rows[model]}: {cells}. Trust no other number in these tables until this is explained."
                )
                continue
            doubts = {
                "of other documents": [task for task in rows.task if (model, task, shots) in self.of_other_documents],
                "missing or limited": [task for task in (*TABLE4_COLUMNS, AVERAGE) if task not in set(rows.task)],
            }
            parts = [f"{', '.join(tasks)} {doubt}" for doubt, tasks in doubts.items() if tasks]
            if shots:
                parts.append("results with examples do not distinguish neighbouring checkpoints")
            state, rest = ("INCOMPLETE", f" ({'; '.join(parts)})") if parts else ("PASSED", "")
            yield f"CONTROL {state}: {name}, agrees with {len(rows)} published accuracies{rest}."
        if held.empty and (frame.paper.notna() & frame.task.isin(TABLE4_COLUMNS)).any():
            yield "Not controlled: no Pythia model of the paper is here; run one, such as EleutherAI/pythia-2.8b."

    def _partial(self) -> Iterator[str]:
        partial = [record for record in self.records.values() if record.is_partial]
        if partial:
            tasks = dict.fromkeys(f"{r.num_samples} of {r.num_documents} documents of {r.task}" for r in partial)
            models = dict.fromkeys(self.names[record.model] for record in partial)
            yield f"PARTIAL: {', '.join(tasks)} ({', '.join(models)})"

    def _legend(self, frame: pandas.DataFrame) -> Iterator[str]:
        yield f"± is one standard error{', which a single document has not' if (frame.n == 1).any() else ''}."
        for model in self.models:
            records = self._records_of(model)
            policies = sorted({str(record.settings.get("oov_policy") or "none needed") for record in records})
            row = f"; compared with the paper's {self.paper_rows[model]}" if model in self.paper_rows else ""
            clamped = " (a token id without an embedding row is read as the last row)" if "clamp" in policies else ""
            yield f"{self.names[model]}: oov_policy {' and '.join(policies)}{clamped}{row}."
            unlike: dict[str, list[str]] = {}
            for record in records:
                for what in differences_from_published(record):
                    unlike.setdefault(what, []).append(f"{record.task} {record.num_fewshot}-shot")
            for what, tasks in unlike.items():
                yield f"{self.names[model]}: {what}: {', '.join(tasks)}."
            for what, key in (("with token ids beyond the embedding", "oov"), ("cut from the left", "truncated")):
                counts = {f"{r.task} {r.num_fewshot}-shot": r.observed.get(f"{key}_documents") for r in records}
                if parts := [f"{count:,} of {task}" for task, count in counts.items() if count]:
                    yield f"{self.names[model]}: documents {what}: {', '.join(parts)}."
        if frame.delta.notna().any():
            yield (
                f"Differences to {self.names[self.baseline or '']}: 95 % intervals of a paired bootstrap "
                f"({self.bootstrap['resamples']:,} resamples of the documents, seed {self.bootstrap['seed']}), of "
                "perplexities in logarithms. Wins are documents that only this model has right, losses those that only "
                "the other has; p of one accuracy is of the exact sign test over these, else of the bootstrap. "
                "Undecided (?): the interval contains 0 or p is above 0.05."
            )
        if (frame.delta.notna() & frame.low.isna()).any():
            yield "No interval: a single document has none, so the difference is undecided."

    def _breakdown(self) -> dict[str, pandas.DataFrame]:
        """Accuracies of head tasks in percent, by kinds of questions."""
        pandas, tables = _pandas(), {}
        for title, tasks in (("generated texts", ("head_tasks",)), ("the authors' texts", AUTHORS_TASKS)):
            answers = [
                (self.names[record.model], sample, sample["metrics"]["acc"])
                for record in self.records.values()
                if record.task in tasks
                for sample in self._samples(record)
            ]
            if not answers:
                continue
            of_first = [sample for name, sample, _ in answers if name == answers[0][0]]
            answers += [(REFERENCES[rule], s, p) for s in of_first for rule, p in _chances(s).items()]
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


def differences_from_published(record: Record) -> Iterator[str]:
    """Yield in which ways a result is not, or not known to be, one of the published documents."""
    documents = record.observed.get("documents", {})
    is_known, window = documents.get("as_known", True), record.settings.get("max_length", PAPER_WINDOW)
    if is_known is False:
        yield "other documents than the published ones"
    elif is_known is None and documents.get("source") == LOCAL_FILES:
        yield "documents that are not known to be the published ones"
    if "stands_in_for" in documents:
        yield "documents of another split"
    if record.task in PERPLEXITY_TASKS and window != PAPER_WINDOW:
        yield f"windows of {window:,} tokens, which compare with no others, nor with the paper's"


def _corrected(frame: pandas.DataFrame) -> pandas.Series:
    """P-values corrected for the number of those in a table; its summaries are corrected separately."""
    families = [_kinds(frame), frame.shots, frame.task.isin(SUMMARIES)]
    return frame.p.astype(float).dropna().groupby(families).transform(lambda p: stats.holm(p.tolist()))


def _chances(sample: Mapping) -> dict[str, float]:
    """The probability of a right answer by each rule that never reads the question."""
    request = sample["requests"][0]
    return reference_answers({"context": request["context"], "answer": request["continuation"], **sample["fields"]})


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


def _kinds(frame: pandas.DataFrame) -> pandas.Series:
    """The kind of table of every number."""
    kinds = dict.fromkeys(HEAD_TASK_HEADINGS, "head") | dict.fromkeys(PERPLEXITY_TASKS, "perplexity")
    is_table4 = (frame.metric == "acc") & frame.task.isin((*TABLE4_COLUMNS, AVERAGE))
    return frame.task.map(kinds).fillna("other").mask(is_table4, "table4")


def _words(metric: str) -> str:
    words = metric.replace("_", " ")
    return "accuracy in percent" if words == "acc" else words.replace("acc ", "accuracy in percent, ")


def _number(value: float, metric: str, sign: str = "") -> str:
    """Accuracies in percent with one decimal; other numbers with four significant figures, or two or three decimals."""
    value, decimals = (100 * value, 1) if metric.startswith("acc") else (value, 3 if abs(value) < 10 else 2)
    if abs(value) >= 1000:
        return f"{value:{sign}.4g}"
    return f"{round(value, decimals) + 0.0:{sign}.{decimals}f}"  # no -0.0


def _value(row: Any) -> str:
    stderr = "" if _pandas().isna(row.stderr) else f"±{_number(row.stderr, row.metric)}"
    return _number(row.value, row.metric) + stderr + (" PARTIAL" if row.partial else "")


def _delta(row: Any) -> str:
    if math.isnan(row.delta):
        return ""
    value, low, high = (_number(number, row.metric, "+") for number in (row.delta, row.low, row.high))
    if math.isnan(row.low):
        return f"{value} (no interval)"
    return f"{value} [{low}, {high}]{' ?' if row.undecided else ''}"


def _documents(row: Any) -> str:
    if math.isnan(row.delta):
        return ""
    isna = _pandas().isna
    p_value = row.p if isna(row.p_corrected) else row.p_corrected
    p = "" if isna(p_value) else "p<0.001" if p_value < 0.001 else f"p={p_value:.3f}"
    is_counted = not isna(row.wins)
    return f"{row.wins:,} : {row.losses:,}, {p}" if is_counted else p


def _paper(row: Any) -> str:
    """The paper's number and the difference to it, ticked if within the control's tolerance, else two stderr."""
    if _pandas().isna(row.paper):
        return ""
    is_within = row.control == "within tolerance" if row.control else row.verdict == "within 2 stderr"
    tick = (" ✓" if is_within else " ✗") if row.control or row.verdict else ""
    return f"{_number(row.paper, row.metric)}, {_number(row.value - row.paper, row.metric, '+')}{tick}"


def _escaped(text: Any) -> str:
    """The text with backslashes before all that Markdown would interpret; underscores inside words are plain text."""
    text = re.sub(r"([\\`*<>|~&\[\]])", r"\\\1", " ".join(str(text).split()))
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", text)
