"""How results are laid out: the paper's tables in the terminal, as markdown and as HTML, and as CSV in long form.

Accuracies are in percent with one decimal as in the paper, except in CSV, which keeps fractions and full precision.
"""

from __future__ import annotations

import csv
import html
import io
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .bootstrap import Difference
from .published import AVERAGE
from .suites import AUTHORS_TASKS
from .table4_tasks import TABLE4_COLUMNS


AUTHORS_ALL = "head_tasks_authors_all"
AUTHORS_METRICS = (
    "acc",
    "acc_first_token",
    "token_perplexity",
    "answer_perplexity",
    "first_token_perplexity",
)
AUTHORS_HEADINGS = {task: f"K={task[-1]}" for task in AUTHORS_TASKS} | {AUTHORS_ALL: "all K"}
CSV_COLUMNS = (
    "model",
    "task",
    "shots",
    "metric",
    "value",
    "stderr",
    "n",
    "delta",
    "low",
    "high",
    "paper",
    "verdict",
    "partial",
)

_PERPLEXITY_METRICS = ("token_perplexity", "bits_per_byte")
_KINDS = ("table4", "authors", "perplexity", "other")
_KIND_TITLES = {"perplexity": "Perplexity", "other": "Other results"}
_ABSENT = "-"
_LONGEST_LABEL, _LONGEST_HEADING = 36, 13
_GAP = 2  # between columns of a rich table

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


@dataclass(frozen=True)
class Row:
    """A line of a table: lines of text of its label and of every cell; `kind` is value, baseline or paper."""

    kind: str
    label: list[str]
    cells: list[list[str]]


@dataclass(frozen=True)
class Section:
    title: str
    columns: list[str]
    rows: list[Row]


@dataclass
class Report:
    """
    Attributes:
        cells: By model, task, shots and metric; `"average"` and `"head_tasks_authors_all"` are tasks here.
        models: In the order of the rows: the baseline, then the paper's order, then by name.
        names: Model -> what the tables call it.
        policies: Model -> what happened to ids outside its embedding.
        rows: Model -> row of the paper.
        warnings, partial, notes: Sentences; the first two stand above all tables.
    """

    cells: dict[Key, Cell]
    models: list[str]
    names: dict[str, str]
    policies: dict[str, str]
    rows: dict[str, str]
    baseline: str | None
    warnings: list[str] = field(default_factory=list)
    partial: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def sections(self) -> list[Section]:
        """Table 4 of the paper for every number of shots, Table 5, perplexities, and whatever else is there."""
        return list(self._sections())

    def to_markdown(self) -> str:
        banners = [f"> **{_markdown(text)}**\n" for text in (*self.warnings, *self.partial)]
        tables = [_markdown_table(section) for section in self.sections()]
        notes = "".join(f"- {_markdown(note)}\n" for note in self.notes)
        return "\n".join([*banners, *tables, notes])

    def to_html(self) -> str:
        """A whole page that needs no other file."""
        banners = "".join(
            f'<p class="{kind}">{html.escape(text)}</p>\n'
            for kind, texts in (("warning", self.warnings), ("partial", self.partial))
            for text in texts
        )
        tables = "".join(_html_table(section) for section in self.sections())
        notes = "".join(f"<li>{html.escape(note)}</li>\n" for note in self.notes)
        return f"{_HTML_HEAD}{banners}{tables}<ul>\n{notes}</ul>\n</body>\n</html>\n"

    def to_csv(self) -> str:
        """One line per number, with models as they were given; the line of a partial result says so."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(CSV_COLUMNS)
        for cell in self.cells.values():
            ends = (cell.delta.value, cell.delta.low, cell.delta.high) if cell.delta else (None,) * 3
            delta = (None if end is None or math.isnan(end) else end for end in ends)
            numbers = (cell.value, cell.stderr, cell.num_samples, *delta, cell.paper)
            name = (cell.model, cell.task, cell.num_fewshot, cell.metric)
            writer.writerow((*name, *numbers, cell.verdict, cell.partial))
        return text.getvalue()

    def print(self, console=None) -> None:
        """
        Print the tables to a rich console (default: a new one on stdout); tables wider than it are split by columns.

        Raises:
            ImportError: without rich.
        """
        try:
            from rich.console import Console
            from rich.panel import Panel
            from rich.text import Text
        except ImportError as error:
            raise ImportError("Printing tables needs rich: pip install 'dcformer[eval]'") from error
        console = console or Console()
        for texts, style in ((self.warnings, "bold red"), (self.partial, "bold reverse")):
            for text in texts:
                console.print(Panel(Text(text), style=style))
        for section in self.sections():
            for table in _rich_tables(section, console.width):
                console.print(table)
        for note in self.notes:
            console.print(Text(f"- {note}"))

    def _sections(self) -> Iterator[Section]:
        """One table of each kind that there is for every number of shots."""
        present: dict[tuple[int, str], dict[tuple[str, str], None]] = defaultdict(dict)  # ordered sets
        for _, task, shots, metric in self.cells:
            present[shots, _kind(task, metric)][task, metric] = None
        for shots, kind in sorted(present, key=lambda place: (_KINDS.index(place[1]), place[0])):
            with_shots = f", {shots}-shot" if shots else ""
            pairs = present[shots, kind]
            if kind == "table4":
                columns = [(task, task, "acc") for task in (*TABLE4_COLUMNS, AVERAGE) if (task, "acc") in pairs]
                yield self._section(f"Accuracy in percent, {shots}-shot", shots, columns)
            elif kind == "authors":
                tasks, metrics = ({pair[place] for pair in pairs} for place in (0, 1))
                columns = [(heading, task, "") for task, heading in AUTHORS_HEADINGS.items() if task in tasks]
                metrics = [metric for metric in AUTHORS_METRICS if metric in metrics]
                yield self._section(
                    f"Head tasks, the authors' texts, accuracy in percent{with_shots}", shots, columns, metrics
                )
            else:
                columns = [(f"{task} {metric}", task, metric) for task, metric in pairs]
                yield self._section(_KIND_TITLES[kind] + with_shots, shots, columns)

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
                rows.append(Row("value", [line for line in label if line], [_value_lines(cell) for cell in cells]))
                if any(cell and cell.delta for cell in cells):
                    label = [f"Δ to {self.names[self.baseline]}", "[95 % interval]"]
                    rows.append(Row("baseline", label, [_delta_lines(cell) for cell in cells]))
                if any(cell and cell.paper is not None for cell in cells):
                    label = ["Δ to the paper's", self.rows[model]]
                    rows.append(Row("paper", label, [_paper_lines(cell) for cell in cells]))
        return Section(title, [heading for heading, _, _ in columns], rows)


def _kind(task: str, metric: str) -> str:
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
    return [value, *interval, *(["PARTIAL"] if cell.is_partial else [])]


def _paper_lines(cell: Cell | None) -> list[str]:
    if cell is None or cell.paper is None:
        return [_ABSENT]
    difference = _number(cell.value - cell.paper, cell.metric, "+")
    verdict = [cell.verdict.split(" ", 1)[0], "2 stderr"] if cell.verdict else []
    return [difference, *verdict, *(["PARTIAL"] if cell.is_partial else [])]


def _markdown(text: str) -> str:
    """With everything escaped that markdown would take for its own; underscores inside words are none."""
    text = re.sub(r"([\\`*<>|~&\[\]])", r"\\\1", " ".join(text.split()))
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", text)


def _markdown_table(section: Section) -> str:
    lines = [["model", *section.columns], ["---", *["---:"] * len(section.columns)]]
    for row in section.rows:
        lines.append([_markdown(" ".join(row.label)), *(" ".join(cell) for cell in row.cells)])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"### {_markdown(section.title)}\n\n{table}\n"


_HTML_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>DCFormer evaluation</title>
<style>
body { font: 14px/1.4 sans-serif; margin: 2em; }
table { border-collapse: collapse; margin: 1em 0 2em; }
caption { font-weight: bold; text-align: left; padding-bottom: 0.4em; }
th, td { padding: 0.25em 0.6em; text-align: right; vertical-align: top; white-space: nowrap; }
th[scope=row] { text-align: left; font-weight: normal; }
tr.value { border-top: 1px solid #999; }
tr.value th { font-weight: bold; }
tr.baseline, tr.paper { font-size: 85%; }
.warning, .partial { border: 2px solid #000; padding: 0.6em; font-weight: bold; }
.warning { border-color: #b00; color: #b00; }
mark { font-weight: bold; }
</style>
</head>
<body>
"""


def _html_lines(lines: Sequence[str]) -> str:
    return "<br>".join("<mark>PARTIAL</mark>" if line == "PARTIAL" else html.escape(line) for line in lines)


def _html_table(section: Section) -> str:
    head = "".join(f'<th scope="col">{html.escape(column)}</th>' for column in ("model", *section.columns))
    body = "".join(
        f'<tr class="{row.kind}"><th scope="row">{"<br>".join(map(html.escape, row.label))}</th>'
        + "".join(f"<td>{_html_lines(cell)}</td>" for cell in row.cells)
        + "</tr>\n"
        for row in section.rows
    )
    return f"<table>\n<caption>{html.escape(section.title)}</caption>\n<tr>{head}</tr>\n{body}</table>\n"


def _rich_tables(section: Section, width: int) -> Iterator:
    """One table, or several with about as many columns each where one is wider than `width` (in characters)."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    headings = [_heading_lines(column) for column in section.columns]
    label_width = min(_LONGEST_LABEL, max(len(line) for row in section.rows for line in row.label))
    column_width = _GAP + max(
        len(line)
        for place, heading in enumerate(headings)
        for lines in (heading, *(row.cells[place] for row in section.rows))
        for line in lines
    )
    at_most = max(1, (width - label_width - _GAP) // column_width)
    pieces = math.ceil(len(headings) / at_most)
    in_each = math.ceil(len(headings) / pieces)
    for start in range(0, len(headings), in_each):
        places = range(start, min(start + in_each, len(headings)))
        title = section.title + (", continued" if start else "")
        table = Table(title=Text(title, "bold"), title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
        table.add_column("model", overflow="fold", width=label_width)
        for place in places:
            table.add_column(Text("\n".join(headings[place])), justify="right", no_wrap=True)
        for number, row in enumerate(section.rows):
            cells = [Text("\n".join(row.cells[place])) for place in places]
            for cell in cells:
                cell.highlight_words(["PARTIAL"], "bold reverse")
            is_last = number + 1 == len(section.rows) or section.rows[number + 1].kind == "value"
            table.add_row(Text("\n".join(row.label)), *cells, end_section=is_last)
        yield table


def _heading_lines(heading: str) -> list[str]:
    """A heading in lines of at most 13 characters, where its words allow it."""
    lines = [""]
    for word in re.findall(r"[^_ ]+[_ ]?", heading):
        if len(lines[-1]) + len(word.rstrip()) > _LONGEST_HEADING and lines[-1]:
            lines.append("")
        lines[-1] += word
    return [line.rstrip() for line in lines]
