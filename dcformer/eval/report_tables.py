"""What stands in the tables of results: the paper's tables, with differences and verdicts below every model's line.

Accuracies are in percent with one decimal as in the paper. report_formats.py writes the tables.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from . import report_formats
from .bootstrap import SIGNIFICANCE, Difference, accuracy_stderr
from .control import ControlCheck
from .published import AVERAGE
from .suites import AUTHORS_TASKS
from .table4_tasks import TABLE4_COLUMNS


if TYPE_CHECKING:
    from rich.console import Console

AUTHORS_ALL = "head_tasks_authors_all"
AUTHORS_METRICS = (
    "acc",
    "acc_first_token",
    "token_perplexity",
    "answer_perplexity",
    "first_token_perplexity",
)
AUTHORS_HEADINGS = {task: f"K={task[-1]}" for task in AUTHORS_TASKS} | {AUTHORS_ALL: "all K"}
_PERPLEXITY_METRICS = ("token_perplexity", "bits_per_byte")
_KINDS = ("table4", "authors", "perplexity", "other")
_TITLES = {
    "table4": "Accuracy in percent, {}-shot",
    "authors": "Head tasks, the authors' texts, accuracy in percent",
    "perplexity": "Perplexity",
    "other": "Other results",
}
_SMALLEST_P = 0.001
_ABSENT = "-"

Key = tuple[str, str, int, str]  # model, task, shots, metric


@dataclass(frozen=True)
class Cell:
    """
    One number of a table.

    Attributes:
        value, stderr: Accuracies as fractions; `stderr` is `None` where it is unknown.
        delta: To the baseline, if the two could be compared.
        paper: The paper's number, in the same unit.
        within: Whether `value` is within 2 standard errors of it.
        control: For a Pythia model, how it was held against what was published of that model.
        corrected: P-value of `delta`, corrected for the number of differences in the table, if that was asked for.
    """

    model: str
    task: str
    num_fewshot: int
    metric: str
    value: float
    stderr: float | None
    num_samples: int
    num_documents: int
    delta: Difference | None = None
    paper: float | None = None
    within: bool | None = None
    control: ControlCheck | None = None
    corrected: float | None = None

    @property
    def p_value(self) -> float | None:
        """Of the difference, corrected if that was asked for; `None` without one."""
        return self.corrected if self.corrected is not None else self.delta and finite(self.delta.p_value)

    @property
    def is_undecided(self) -> bool:
        """Whether the interval of a difference contains zero or ends there, or its p-value is above 5 %."""
        if self.delta is None:
            return False
        return not self.delta.excludes_zero or self.p_value is None or self.p_value > SIGNIFICANCE

    @property
    def is_summary(self) -> bool:
        """Whether other numbers of its table are gathered in it."""
        return self.task in (AVERAGE, AUTHORS_ALL)

    @property
    def is_partial(self) -> bool:
        return self.num_samples < self.num_documents

    @property
    def partial(self) -> str:
        """The mark of a partial result, else nothing."""
        return f"PARTIAL: {self.num_samples} of {self.num_documents} documents" if self.is_partial else ""

    @property
    def verdict(self) -> str:
        if self.within is None:
            return ""
        return "within 2 stderr" if self.within else "outside 2 stderr"

    def is_within(self, published_value: float) -> bool | None:
        """
        Whether the value is within 2 standard errors of a published one; `None` if its error is unknown.

        For an accuracy the error is at least what the published accuracy would have on as many documents: a few
        documents that are all right, or all wrong, have none themselves.
        """
        if self.stderr is None:
            return None
        stderr = self.stderr
        if self.metric == "acc" and self.task in TABLE4_COLUMNS:
            stderr = max(stderr, accuracy_stderr(published_value, self.num_samples))
        return abs(self.value - published_value) <= 2 * stderr


@dataclass(frozen=True)
class SectionRow:
    """
    A line of a table: lines of text of its label and of every cell; `kind` is value, baseline, documents or paper.
    """

    kind: str
    label: list[str]
    cells: list[list[str]]


@dataclass(frozen=True)
class Section:
    title: str
    columns: list[str]
    rows: list[SectionRow]


@dataclass
class Report:
    """
    Attributes:
        cells: By model, task, shots and metric; `"average"` and `"head_tasks_authors_all"` are tasks here.
        models: In the order of the rows: the baseline, then the paper's order, then by name.
        names: Model -> what the tables call it.
        policies: Model -> what happened to ids outside its embedding.
        rows: Model -> row of the paper.
        correction: How p-values were corrected for their number: `"none"` or `"holm"`.
        warnings, partial, control, notes: Sentences; all but the last stand above the tables.
    """

    cells: dict[Key, Cell]
    models: list[str]
    names: dict[str, str]
    policies: dict[str, str]
    rows: dict[str, str]
    baseline: str | None
    correction: str = "none"
    warnings: list[str] = field(default_factory=list)
    partial: list[str] = field(default_factory=list)
    control: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def sections(self) -> list[Section]:
        """Table 4 of the paper for every number of shots, Table 5, perplexities, and whatever else is there."""
        return list(self._sections())

    def to_markdown(self) -> str:
        """All tables in the markdown of GitHub, with warnings above and notes below."""
        return report_formats.to_markdown(self)

    def to_html(self) -> str:
        """All tables as a whole page that needs no other file."""
        return report_formats.to_html(self)

    def to_csv(self) -> str:
        """One line per number at full precision, with models as they were given; a partial result says so."""
        return report_formats.to_csv(self)

    def to_json(self) -> str:
        """An object of the sentences, and of the numbers as in CSV; what is not there is null."""
        return report_formats.to_json(self)

    def print(self, console: Console | None = None) -> None:
        """
        Print the tables; those wider than the console are split by columns.

        Args:
            console (*optional*): Where to print; by default on stdout.

        Raises:
            ImportError: without rich.
        """
        report_formats.print_report(self, console)

    def _sections(self) -> Iterator[Section]:
        """One table of each kind that there is for every number of shots."""
        present: dict[tuple[int, str], dict[tuple[str, str], None]] = defaultdict(dict)  # ordered sets
        for _, task, shots, metric in self.cells:
            present[shots, table_kind(task, metric)][task, metric] = None
        for shots, kind in sorted(present, key=lambda place: (_KINDS.index(place[1]), place[0])):
            title, pairs = table_title(kind, shots), present[shots, kind]
            if kind == "table4":
                columns = [(task, task, "acc") for task in (*TABLE4_COLUMNS, AVERAGE) if (task, "acc") in pairs]
                yield self._section(title, shots, columns)
            elif kind == "authors":
                tasks, present_metrics = ({pair[place] for pair in pairs} for place in (0, 1))
                columns = [(heading, task, "") for task, heading in AUTHORS_HEADINGS.items() if task in tasks]
                metrics = [metric for metric in AUTHORS_METRICS if metric in present_metrics]
                yield self._section(title, shots, columns, metrics)
            else:
                columns = [(f"{task} {metric}", task, metric) for task, metric in pairs]
                yield self._section(title, shots, columns)

    def _section(
        self, title: str, shots: int, columns: list[tuple[str, str, str]], metrics: Sequence[str] = ("",)
    ) -> Section:
        """A table of (heading, task, metric) columns; with `metrics`, these are rows instead of the columns' own."""
        rows = []
        for model in self.models:
            for row_metric in metrics:
                cells = [self.cells.get((model, task, shots, row_metric or metric)) for _, task, metric in columns]
                if not any(cells):
                    continue
                label = [self.names[model], row_metric, f"oov_policy: {self.policies[model]}"]
                rows.append(
                    SectionRow("value", [line for line in label if line], [_value_lines(cell) for cell in cells])
                )
                if self.baseline is not None and any(cell and cell.delta for cell in cells):
                    label = [f"Δ to {self.names[self.baseline]}", "[95 % interval]"]
                    rows.append(SectionRow("baseline", label, [_delta_lines(cell) for cell in cells]))
                    has_counts = any(cell and cell.delta and cell.delta.only_here is not None for cell in cells)
                    label = ["right only here : only there", "of documents"] if has_counts else []
                    label.append("p-value" + (" by Holm's rule" if self.correction == "holm" else ""))
                    rows.append(SectionRow("documents", label, [_documents_lines(cell) for cell in cells]))
                if any(cell and cell.paper is not None for cell in cells):
                    label = ["Δ to the paper's", self.rows[model]]
                    if any(cell and cell.control for cell in cells):
                        label.append("control: tolerance in points")
                    rows.append(SectionRow("paper", label, [_paper_lines(cell) for cell in cells]))
        return Section(title, [heading for heading, _, _ in columns], rows)


def table_title(kind: str, shots: int) -> str:
    """Of one table in a report, by what it is of and by the number of examples."""
    with_shots = f", {shots}-shot" if shots and kind != "table4" else ""
    return _TITLES[kind].format(shots) + with_shots


def finite(value: float | None) -> float | None:
    """`None` for what is not a number or infinite."""
    return None if value is None or not math.isfinite(value) else value


def table_kind(task: str, metric: str) -> str:
    """The table that a number belongs to."""
    if metric == "acc" and task in (*TABLE4_COLUMNS, AVERAGE):
        return "table4"
    if metric in AUTHORS_METRICS and task in AUTHORS_HEADINGS:
        return "authors"
    return "perplexity" if metric in _PERPLEXITY_METRICS and task.endswith("_ppl") else "other"


def _number(value: float, metric: str, sign: str = "") -> str:
    """Accuracies in percent with one decimal; of other numbers four figures, and never less than two decimals."""
    value = 100 * value if metric.startswith("acc") else value
    decimals = 1 if metric.startswith("acc") else 3 if abs(value) < 10 else 2
    if abs(value) >= 1000:
        return f"{value:{sign}.4g}"
    return f"{round(value, decimals) + 0.0:{sign}.{decimals}f}"  # no -0.0


def _value_lines(cell: Cell | None) -> list[str]:
    if cell is None:
        return [_ABSENT]
    stderr = "" if cell.stderr is None else f"±{_number(cell.stderr, cell.metric)}"
    return [_number(cell.value, cell.metric) + stderr, *(["PARTIAL"] if cell.is_partial else [])]


def _delta_lines(cell: Cell | None) -> list[str]:
    if cell is None or cell.delta is None:
        return [_ABSENT]
    value, low, high = (
        _number(end, cell.metric, sign)
        for end, sign in ((cell.delta.value, "+"), (cell.delta.low, ""), (cell.delta.high, ""))
    )
    interval = [] if math.isnan(cell.delta.low) else [f"[{low}, {high}]"]
    undecided = ["undecided"] if cell.is_undecided else []
    return [value, *interval, *undecided, *(["PARTIAL"] if cell.is_partial else [])]


def _documents_lines(cell: Cell | None) -> list[str]:
    """How many documents only one of the two has right, of how many, and the p-value."""
    if cell is None or cell.delta is None:
        return [_ABSENT]
    lines = []
    if cell.delta.only_here is not None:
        lines = [f"{cell.delta.only_here:,} : {cell.delta.only_there:,}", f"of {cell.delta.documents:,}"]
    if cell.p_value is not None:
        lines.append(f"p<{_SMALLEST_P}" if cell.p_value < _SMALLEST_P else f"p={cell.p_value:.3f}")
    return [*lines, *(["PARTIAL"] if cell.is_partial else [])] or [_ABSENT]


def _paper_lines(cell: Cell | None) -> list[str]:
    if cell is None or cell.paper is None:
        return [_ABSENT]
    difference = _number(cell.value - cell.paper, cell.metric, "+")
    verdict = [cell.verdict.split(" ", 1)[0], "2 stderr"] if cell.verdict else []
    if cell.control:
        verdict = ["within" if cell.control.agrees else "outside", f"±{100 * cell.control.tolerance:.2f}"]
    return [difference, *verdict, *(["PARTIAL"] if cell.is_partial else [])]
