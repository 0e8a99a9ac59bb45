"""The report: the paper's tables from results on disk, on a terminal, in Markdown and in JSON."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import stats
from .comparison import AUTHORS_ALL, Results, break_down, compare, short_names, table_kinds
from .control import control_banners
from .legend import legend, partial_banner
from .suites import AUTHORS_TASKS
from .task_data import import_extra
from .texts import TEXT


if TYPE_CHECKING:
    import pandas
    from rich.console import Console

HEAD_TASK_HEADINGS = {
    "head_tasks": "generated",
    **{task: f"K={task[-1]}" for task in AUTHORS_TASKS},
    AUTHORS_ALL: "all K",
}
_TITLES = {
    "table4": "Accuracy in percent, {}-shot",
    "head": "Head tasks, {}",
    "perplexity": "Perplexity",
    "text": "Loss on texts: nats per token, its exponential, and bits per byte",
    "other": "Other results, {}-shot; acc in percent",
}


class Report:
    """
    Attributes:
        results: What is compared: its `models` in the order of the tables with their `names` there, and its `baseline`.
        frame: One row per number, `model, task, shots, metric, value, stderr, n`, the difference to the baseline
            (`delta, low, high, wins, losses, p, p_corrected, undecided`), the `paper`'s number with `verdict`,
            the `published` one of a Pythia model with `tolerance` and `control`, and `partial`. `"average"` and
            `"head_tasks_authors_all"` are tasks here.
        correction: How p-values were corrected for their number: `"none"` or `"holm"`.
        banners: Sentences above the tables: the control of Pythia models, and partial results.
        notes: Sentences below the tables.
        breakdown: Title -> accuracies of head tasks in percent by shots, subject, pattern and transformation, beside
            those of rules that never read the question.
    """

    def __init__(self, results: Results, correction: str):
        self.results, self.correction = results, correction
        self.frame = compare(results, correction)
        self.banners = [*control_banners(results, self.frame), *partial_banner(results)]
        self.notes = [*legend(results, self.frame)]
        self.breakdown = break_down(results)

    def tables(self) -> dict[str, pandas.DataFrame]:
        """Title -> a frame of text: Table 4 of the paper for every number of shots, Table 5, and all other results."""
        tables = {}
        for (kind, shots), part in self.frame.groupby([table_kinds(self.frame), self.frame.shots], sort=False):
            if kind == "head":
                for metric, of_metric in part.groupby("metric", sort=False):
                    title = _TITLES[kind].format(_words(metric))
                    tables[title] = self._table(of_metric, of_metric.task.map(HEAD_TASK_HEADINGS))
            else:
                names = part.task if kind == "table4" else part.task + " " + part.metric
                if kind == "text":
                    paths = part.task.str.removeprefix(TEXT)
                    names = paths.map(short_names(paths.unique())) + " " + part.metric.map(_words)
                tables[_TITLES[kind].format(shots)] = self._table(part, names)
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
            "banners": self.banners,
            "notes": self.notes,
            "baseline": self.results.baseline,
            "correction": self.correction,
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

    def _table(self, part: pandas.DataFrame, headings: pandas.Series) -> pandas.DataFrame:
        """A row of values for every model, and rows of its comparisons below."""
        results, rows = self.results, []
        for model in results.models:
            numbers = {heading: row for heading, row in zip(headings, part.itertuples()) if row.model == model}
            labels = {
                results.names[model]: _value,
                f"Δ to {results.names.get(results.baseline or '')} [95 %]": _delta,
                "wins : losses, p" + (" (Holm)" if self.correction == "holm" else ""): _documents,
                f"paper's {results.rows.get(model)}, Δ": _paper,
            }
            for label, write in labels.items():
                cells = {heading: write(numbers[heading]) if heading in numbers else "" for heading in headings}
                if any(cells.values()):
                    rows.append({"model": label, **{heading: cell or "-" for heading, cell in cells.items()}})
        return import_extra("pandas").DataFrame(rows)


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
    return Report(Results(output, baseline, paper_rows or {}, {"seed": seed, "resamples": resamples}), correction)


def _words(metric: str) -> str:
    words = metric.replace("_", " ")
    return "accuracy in percent" if words == "acc" else words.replace("acc ", "accuracy in percent, ")


def _number(value: float, metric: str, sign: str = "") -> str:
    """Accuracies in percent with one decimal; other numbers with four significant figures, or two or three decimals."""
    value, decimals = (100 * value, 1) if metric.startswith("acc") else (value, 3 if abs(value) < 10 else 2)
    if abs(value) >= 1000:
        return f"{value:{sign}.4g}"
    return f"{value:{sign}z.{decimals}f}"  # no -0.0


def _value(row: Any) -> str:
    stderr = "" if _is_missing(row.stderr) else f"±{_number(row.stderr, row.metric)}"
    return _number(row.value, row.metric) + stderr + (" PARTIAL" if row.partial else "")


def _delta(row: Any) -> str:
    if _is_missing(row.delta):
        return ""
    value, low, high = (_number(number, row.metric, "+") for number in (row.delta, row.low, row.high))
    if _is_missing(row.low):
        return f"{value} (no interval)"
    return f"{value} [{low}, {high}]{' ?' if row.undecided else ''}"


def _documents(row: Any) -> str:
    if _is_missing(row.delta):
        return ""
    p_value = row.p if _is_missing(row.p_corrected) else row.p_corrected
    p = "" if _is_missing(p_value) else "p<0.001" if p_value < 0.001 else f"p={p_value:.3f}"
    return p if _is_missing(row.wins) else f"{row.wins:,} : {row.losses:,}, {p}"


def _paper(row: Any) -> str:
    """The paper's number and the difference to it, ticked if within the control's tolerance, else two stderr."""
    if _is_missing(row.paper):
        return ""
    judged = row.control or row.verdict
    tick = "" if not judged else " ✓" if judged.startswith("within") else " ✗"
    return f"{_number(row.paper, row.metric)}, {_number(row.value - row.paper, row.metric, '+')}{tick}"


def _is_missing(value: Any) -> bool:
    return bool(import_extra("pandas").isna(value))


def _escaped(text: Any) -> str:
    """The text with backslashes before all that Markdown would interpret; underscores inside words are plain text."""
    text = re.sub(r"([\\`*<>|~&\[\]])", r"\\\1", " ".join(str(text).split()))
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", text)
