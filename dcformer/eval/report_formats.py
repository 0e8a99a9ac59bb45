"""The tables of a report as markdown, HTML and CSV by pandas, as JSON, and in the terminal by rich."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..common.optional import import_optional


if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from .report_tables import Cell, Report, Section

_LONGEST_LABEL, _LONGEST_HEADING = 36, 13
_GAP = 2  # between columns of a rich table


def to_markdown(report: Report) -> str:
    """All tables of a report in the markdown of GitHub, with warnings above and notes below."""
    import_optional("tabulate", "Markdown tables need tabulate: pip install 'dcformer[eval]'.")
    banners = [
        "> " + "<br>".join(f"**{_markdown(line)}**" for line in text.splitlines()) + "\n"
        for text in (*report.warnings, *report.partial)
    ]
    banners += [f"> {_markdown(text)}\n" for text in report.control]
    tables = [_markdown_table(section) for section in report.sections()]
    notes = "".join(f"- {_markdown(note)}\n" for note in report.notes)
    return "\n".join([*banners, *tables, notes])


def to_html(report: Report) -> str:
    """All tables of a report as a whole page that needs no other file."""
    lines = [line for text in (*report.warnings, *report.partial) for line in text.splitlines()]
    banners = "".join(f"<p><strong>{html.escape(line)}</strong></p>\n" for line in lines)
    banners += "".join(f"<p>{html.escape(text)}</p>\n" for text in report.control)
    tables = "".join(_html_table(section) for section in report.sections())
    notes = "".join(f"<li>{html.escape(note)}</li>\n" for note in report.notes)
    head = '<meta charset="utf-8">\n<title>DCFormer evaluation</title>'
    body = f"{banners}{tables}<ul>\n{notes}</ul>"
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


def to_csv(report: Report) -> str:
    """One line per number at full precision; accuracies are fractions here."""
    frame = _pandas().DataFrame(map(_csv_row, report.cells.values()))
    counts = dict.fromkeys(("only_here", "only_there"), "Int64")  # whole numbers, of which some may be missing
    return frame.astype(counts).to_csv(index=False, lineterminator="\n")


def to_json(report: Report) -> str:
    """An object of sentences and of the numbers of CSV; accuracies are fractions here."""
    numbers = [
        {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in _csv_row(cell).items()
        }
        for cell in report.cells.values()
    ]
    sentences = {name: getattr(report, name) for name in ("warnings", "partial", "control", "notes")}
    options = {"baseline": report.baseline, "correction": report.correction}
    return json.dumps({**sentences, **options, "numbers": numbers}, indent=2, ensure_ascii=False) + "\n"


def print_report(report: Report, console: Console | None = None) -> None:
    """
    Print warnings, tables and notes; tables wider than the console are split by columns.

    Args:
        report: What to print.
        console (*optional*): Where to print; by default on stdout.

    Raises:
        ImportError: without rich.
    """
    import_optional("rich.console", "Printing tables needs rich: pip install 'dcformer[eval]'.")
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    console = console or Console()
    for texts, style in ((report.warnings, "bold red"), (report.partial, "bold reverse")):
        for text in texts:
            console.print(Panel(Text(text), style=style))
    for text in report.control:
        console.print(Text(text, "bold"))
    for section in report.sections():
        for table in _rich_tables(section, console.width):
            console.print(table)
    for note in report.notes:
        console.print(Text(f"- {note}"))


def _pandas() -> ModuleType:
    return import_optional("pandas", "Tables of results need pandas: pip install 'dcformer[eval]'.")


def _csv_row(cell: Cell) -> dict[str, Any]:
    delta, control = cell.delta, cell.control
    return {
        "model": cell.model,
        "task": cell.task,
        "shots": cell.num_fewshot,
        "metric": cell.metric,
        "value": cell.value,
        "stderr": cell.stderr,
        "n": cell.num_samples,
        "delta": None if delta is None else delta.value,
        "low": None if delta is None else delta.low,
        "high": None if delta is None else delta.high,
        "only_here": None if delta is None else delta.only_here,
        "only_there": None if delta is None else delta.only_there,
        "p": None if delta is None else delta.p_value,
        "p_corrected": cell.corrected,
        "undecided": "undecided" if cell.is_undecided else "",
        "paper": cell.paper,
        "verdict": cell.verdict,
        "published": None if control is None else control.published.value,
        "tolerance": None if control is None else control.tolerance,
        "control": "" if control is None else "within tolerance" if control.agrees else "outside tolerance",
        "partial": cell.partial,
    }


def _markdown(text: str) -> str:
    """With everything escaped that markdown would take for its own; underscores inside words are none."""
    text = re.sub(r"([\\`*<>|~&\[\]])", r"\\\1", " ".join(text.split()))
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", text)


def _markdown_table(section: Section) -> str:
    rows = [[_markdown(" ".join(row.label)), *(" ".join(cell) for cell in row.cells)] for row in section.rows]
    frame = _pandas().DataFrame(rows, columns=["model", *section.columns])
    alignment = ("left", *["right"] * len(section.columns))
    table = frame.to_markdown(index=False, disable_numparse=True, colalign=alignment)
    return f"### {_markdown(section.title)}\n\n{table}\n"


def _html_table(section: Section) -> str:
    pandas = _pandas()
    rows = [[_html_lines(lines) for lines in (row.label, *row.cells)] for row in section.rows]
    frame = pandas.DataFrame(rows, columns=[html.escape(name) for name in ("model", *section.columns)])
    with pandas.option_context("display.max_colwidth", None):
        table = frame.to_html(index=False, escape=False)
    return f"<h2>{html.escape(section.title)}</h2>\n{table}\n"


def _html_lines(lines: list[str]) -> str:
    return "<br>".join("<mark>PARTIAL</mark>" if line == "PARTIAL" else html.escape(line) for line in lines)


def _rich_tables(section: Section, width: int) -> Iterator[Table]:
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
