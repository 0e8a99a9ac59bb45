"""What a comparison on the head tasks looks like: tables on a terminal, a JSON file and a plot."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from ..common.files import write_atomically
from ..eval.output import check_places, locked_folders
from .comparison import METRICS, HeadTasksComparison, ModelResult, part_of, score_difference
from .intervals import seed_interval
from .labels import REFERENCES
from .plot import plot_comparison
from .references import BLIND_CHOICE, LONE_NAME, ODD_ONE_OUT
from .suite import AUTHORS, HELD_OUT


SET_TITLES = {HELD_OUT: "held-out tasks", AUTHORS: "authors' texts"}
METRIC_HEADINGS = {"accuracy": "accuracy %", "perplexity": "perplexity"}
GROUPINGS = {"by_shots": "examples before", "by_pattern": "pattern", "by_transformation": "transformation"}
RULE_HEADINGS = {LONE_NAME: "blind\nrule", ODD_ONE_OUT: "best\nrule"}
_NARROWEST_LABEL = 14
_LONGEST_HEADING = 12


RESULTS, PLOT = "head_tasks.json", "head_tasks.png"


@contextlib.contextmanager
def reserved_output(output: str | os.PathLike) -> Iterator[None]:
    """
    The output of a comparison, found writable before anything is computed and locked against others until the end.

    Args:
        output: Folder; made if it is not there, and removed if it is empty at the end.

    Raises:
        ValueError: if it cannot be written, another evaluation is writing it, or it holds a file of that name which is
            no comparison.
    """
    folder = Path(output)
    with locked_folders(folder):
        check_places((folder / RESULTS, folder / PLOT))
        if (folder / RESULTS).is_file():
            _check_is_comparison(folder / RESULTS)
        yield


def _check_is_comparison(file: Path) -> None:
    """That a file may be replaced: it is a comparison, or one that was cut."""
    try:
        values = json.loads(file.read_bytes())
    except ValueError:
        return
    if not isinstance(values, dict) or not {"settings", "models", "differences"} <= values.keys():
        raise ValueError(
            f"{str(file)!r} is no comparison of `dcformer eval`, although named like one; move it to another folder."
        )


def write_comparison(comparison: HeadTasksComparison, output: str | os.PathLike) -> list[str]:
    """
    Write `head_tasks.json` and `head_tasks.png`.

    Args:
        comparison: What to write.
        output: Folder; made if it is not there.

    Returns:
        Lines that tell where the two are; without matplotlib, why there is no plot.
    """
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    results, plot = folder / RESULTS, folder / PLOT
    write_atomically(results, json.dumps(comparison.to_dict(), indent=2) + "\n")
    lines = [f"Results: {results}"]
    try:
        plot_comparison(comparison, plot)
    except ImportError as error:
        return [*lines, f"No plot was drawn. {error}"]
    return [*lines, f"Plot: {plot}"]


def print_comparison(
    comparison: HeadTasksComparison, console: Console, groupings: tuple[str, ...] = tuple(GROUPINGS)
) -> None:
    """
    Print accuracy and perplexity over all answers, then by number of examples, pattern and transformation.

    Args:
        comparison: What to print; its tables fit 80 columns if names of models are short.
        console: Where.
        groupings: Keys of `GROUPINGS` to print; by default all.
    """
    console.print(_overall_table(comparison))
    for line in _legend(comparison):
        console.print(line)
    for grouping in groupings:
        for name in comparison.sets:
            console.print()
            console.print(_group_table(comparison, grouping, name))


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False, padding=0
    )
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def _overall_table(comparison: HeadTasksComparison) -> Table:
    """Both metrics with their intervals over documents and over training seeds."""
    table = _table("Head tasks", "", "accuracy %", "over\nseeds", "perplexity", "over\nseeds")
    for name in comparison.sets:
        table.add_row(SET_TITLES[name], style="italic")
        for model in comparison.models:
            cells = [cell for metric in METRICS for cell in _metric_cells(model, name, metric)]
            table.add_row(f"{model.label}\n  {model.parameters:,} parameters", *cells)
        for model, baseline in comparison.compared:
            cells = [cell for metric in METRICS for cell in _difference_cells(model, baseline, name, metric)]
            table.add_row(f"{model.label}\n  difference, ratio", *cells)
        for key, summary in comparison.references[name].items():
            perplexity = "" if summary["perplexity"] is None else _number(summary["perplexity"], "perplexity")
            table.add_row(REFERENCES[key], _number(summary["accuracy"], "accuracy"), "", perplexity, "")
    return table


def _metric_cells(model: ModelResult, name: str, metric: str) -> tuple[str, str]:
    value = _number(model.summaries[name][metric], metric)
    seeds = list(model.over_seeds(name, metric).values())
    return f"{value}\n{_range(*model.interval(name, metric), metric)}", _over_seeds(seeds, metric)


def _difference_cells(model: ModelResult, baseline: ModelResult, name: str, metric: str) -> tuple[str, str]:
    """Of accuracies the difference, of perplexities the ratio; over seeds paired by seed."""
    found = score_difference(model, baseline, name, metric)
    ours, theirs = (each.over_seeds(name, metric) for each in (model, baseline))
    paired = [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
    if metric == "accuracy":
        value, ends, sign = found.value, (found.low, found.high), "+"
        seeds = [first - second for first, second in paired]
    else:
        value, *ends = (math.exp(each) for each in (found.value, found.low, found.high))
        seeds, sign = [first / second for first, second in paired], ""
    return f"{_number(value, metric, sign)}\n{_range(*ends, metric, sign)}", _over_seeds(seeds, metric, sign)


def _group_table(comparison: HeadTasksComparison, grouping: str, name: str) -> Table:
    models, kind = comparison.models, GROUPINGS[grouping]
    headings = [f"{what}\n{_broken(model.label)}" for what in METRIC_HEADINGS.values() for model in models]
    differences = [f"gain\n{_broken(model.label)}" for model, _ in comparison.compared]
    if len(differences) == 1:
        differences = ["gain"]
    references = comparison.references[name]
    chance = _number(references[BLIND_CHOICE]["accuracy"], "accuracy")
    title = f"By {kind}, {SET_TITLES[name]} (blind choice: {chance} %)"
    table = _table(title, kind, *headings, *differences, *RULE_HEADINGS.values())
    table.columns[0].min_width = _NARROWEST_LABEL
    for label, keys in comparison.groups(name, grouping).items():
        parts = [model.part(name, *keys) for model in models]
        cells = []
        for metric in METRICS:
            for model, part in zip(models, parts):
                seeds = list(model.over_seeds(name, metric, *keys).values())
                cells.append(f"{_short(part[metric], metric)}\n{_over_seeds(seeds, metric, show=_short)}".rstrip())
        for model, baseline in comparison.compared:
            gains = [model.part(name, *keys)["accuracy"] - parts[0]["accuracy"], model.seed_gain(baseline, name, *keys)]
            cells.append("\n".join(f"{100 * gain:+.1f}" for gain in gains if not math.isnan(gain)))
        for rule in RULE_HEADINGS:
            cells.append(_number(part_of(references[rule], *keys)["accuracy"], "accuracy"))
        table.add_row(_wrapped(label), *cells)
    return table


def _wrapped(label: str) -> str:
    return label if len(label) <= _NARROWEST_LABEL else label.replace("other-", "other-\n").replace("rent-", "rent-\n")


def _short(value: float, metric: str, sign: str = "") -> str:
    """As [`_number`], of perplexities only two places."""
    return f"{value:{sign}.2f}" if metric == "perplexity" else _number(value, metric, sign)


def _broken(name: str) -> str:
    """A long name in two lines."""
    return name if len(name) <= _LONGEST_HEADING else "-\n".join(name.rsplit("-", 1))


def _legend(comparison: HeadTasksComparison) -> Iterator[str]:
    counts = {SET_TITLES[name]: comparison.models[0].summaries[name] for name in comparison.sets}
    parts = [
        f"{title}: {count['answers']:,} answers in {count['documents']:,} texts" for title, count in counts.items()
    ]
    yield f"{'; '.join(parts)}."
    yield (
        "Accuracy and perplexity are of whole answers, given the examples before them. In [ ]: 95 % intervals over "
        "documents (bootstrap, paired in differences)."
    )
    yield (
        "Blind choice takes any of the three facts. The question-blind rule takes the fact whose name, in lists whose "
        "thing, stands alone; the best such rule known to us also the one whose thing or class does. None reads the "
        "question."
    )
    seeds = {seed for model in comparison.models for seed in model.seed_evaluations}
    if seeds:
        count = "1 seed" if len(seeds) == 1 else f"{len(seeds)} seeds"
        yield (
            f"Over seeds, and in second lines below: mean and 95 % t interval of models trained by one recipe from "
            f"{count}, on the documents that they were evaluated on after training. Rows are sorted by gain."
        )


def _number(value: float, metric: str, sign: str = "") -> str:
    return f"{100 * value:{sign}.1f}" if metric == "accuracy" else f"{value:{sign}.3f}"


def _range(low: float, high: float, metric: str, sign: str = "") -> str:
    if math.isnan(low):
        return ""
    return f"[{_number(low, metric, sign)}, {_number(high, metric, sign)}]"


def _over_seeds(
    values: list[float], metric: str, sign: str = "", show: Callable[[float, str, str], str] = _number
) -> str:
    if not values:
        return ""
    mean, half_width = seed_interval(values)
    text = show(mean, metric, sign)
    return text if math.isnan(half_width) else f"{text}±{show(half_width, metric, '')}"
