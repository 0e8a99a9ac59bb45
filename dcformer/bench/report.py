"""What a benchmark found, row by row: on the terminal as tables, in a JSON file, and as a picture."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..common.plotting import check_plot_path, draw_rows, picture
from .machine import device_name, environment
from .tables import show_table
from .timing import Timing


_RESULTS = Path("benchmarks", "results")
_LONGEST_MESSAGE = 200
_TITLE_WIDTH = 70


@dataclasses.dataclass
class Row:
    """
    One thing that was measured, or why it was not.

    Args:
        group (`str`): What it is compared with: rows of one group stand in one table.
        name (`str`): Of the row in its group.
        seconds (`float`, *optional*): Median of one call; None where nothing was measured.
        minimum (`float`, *optional*): The least.
        samples (`int`): How many calls were timed.
        figures (`dict`): Further figures by names that say their units.
        note (`str`): Why there is no time, or what to know about it.
        has_failed (`bool`): Whether it computed something wrong or broke off, for which the command ends with 1.
    """

    group: str
    name: str
    seconds: float | None = None
    minimum: float | None = None
    samples: int = 0
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    note: str = ""
    has_failed: bool = False


class Report:
    """
    All rows of one command.

    Args:
        command (`str`): Its name, such as "attention".
        device (`torch.device`): Where it ran.
        settings (`dict`): What it was asked for.
    """

    def __init__(self, command: str, device: torch.device, settings: dict[str, Any]):
        self.command = command
        self.device = device
        self.settings = settings
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self.rates: dict[str, float] = {}

    @property
    def has_failed(self) -> bool:
        return any(row.has_failed for row in self.rows)

    def add(self, row: Row) -> Row:
        self.rows.append(row)
        return row

    def note(self, sentence: str) -> None:
        """Something to know about the whole run, said once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def timed(self, group: str, name: str, measure: Callable[[], Timing], note: str = "") -> Row:
        """Measure a row; out of memory or an error is a row as well, and nothing else stops for it."""
        try:
            timing = measure()
        except torch.OutOfMemoryError:
            row = Row(group, name, note="not measured: it does not fit into the device's memory")
        except Exception as error:  # of whatever is compared, which may be anyone's
            row = Row(group, name, note=f"failed: {one_line(error)}", has_failed=True)
        else:
            row = Row(group, name, timing.median, timing.minimum, timing.samples, note=note)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return self.add(row)

    def groups(self) -> Iterator[tuple[str, list[Row]]]:
        """The rows by group, in the order in which groups and rows were added."""
        by_group: dict[str, list[Row]] = {}
        for row in self.rows:
            by_group.setdefault(row.group, []).append(row)
        yield from by_group.items()

    def to_json(self) -> dict[str, Any]:
        return {
            "command": self.command,
            "environment": {"dcformer": __version__, **environment(self.device), **_versions(self.device)},
            "settings": self.settings,
            "rates": self.rates,
            "notes": self.notes,
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }

    def show(self) -> None:
        """Print the tables and the notes."""
        for group, rows in self.groups():
            figures = list(dict.fromkeys(name for row in rows for name in row.figures))
            has_times = any(row.seconds is not None for row in rows)
            columns = ["", *(["median ms", "min ms"] if has_times else []), *figures, "note"]
            shown = []
            for row in rows:
                times = [_milliseconds(row.seconds), _milliseconds(row.minimum)] if has_times else []
                shown.append([row.name, *times, *(_figure(row.figures.get(name)) for name in figures), row.note])
            print(f"\n{group[:1].upper()}{group[1:]}")
            show_table(columns, shown)
        for sentence in self.notes:
            print(sentence)

    def write(self, path: Path) -> None:
        """Write the JSON file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_without_nan(self.to_json()), indent=2, default=str) + "\n", encoding="utf-8")

    def plot(self, path: Path) -> str | None:
        """
        Draw the median of every row, group beside group.

        Returns:
            `str`: why there is no picture, or None.
        """
        path = check_plot_path(path)
        groups = [(name, [row for row in rows if row.seconds is not None]) for name, rows in self.groups()]
        groups = [(name, rows) for name, rows in groups if rows]
        if not groups:
            return "There is no picture, since nothing was timed."
        try:
            importlib.import_module("matplotlib")
        except ImportError:
            return "There is no picture, since matplotlib is not installed."
        height = sum(0.25 * len(rows) + 0.7 for _, rows in groups)
        with picture(path, (9.0, height), "train") as figure:
            ratios = [len(rows) + 2 for _, rows in groups]
            axes: list[Any] = list(figure.subplots(len(groups), squeeze=False, height_ratios=ratios)[:, 0])
            for axis, (name, rows) in zip(axes, groups):
                milliseconds = [1000 * (row.seconds or 0.0) for row in rows]
                axis.barh(range(len(rows)), milliseconds, color="0.35", height=0.6)
                draw_rows(axis, [row.name for row in rows])
                axis.set_title("\n".join(textwrap.wrap(name, _TITLE_WIDTH)), loc="left", fontsize=9)
            axes[-1].set_xlabel("milliseconds (median)")
        return None


def default_path(command: str, device: torch.device, is_quick: bool) -> Path:
    """`benchmarks/results/COMMAND-DEVICE.json` in a clone of the repository, elsewhere the same name right here."""
    name = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    folder = _RESULTS if _RESULTS.is_dir() else Path()
    return folder / f"gpu-{command}-{name}{'-quick' if is_quick else ''}.json"


def one_line(error: BaseException) -> str:
    """The first line of an error, with what kind it is."""
    text = " ".join(str(error).split("\n", 1)[0].split())
    return f"{type(error).__name__}: {text}"[:_LONGEST_MESSAGE]


def _versions(device: torch.device) -> dict[str, str | None]:
    """What else a GPU's figures depend on."""
    try:
        triton: str | None = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    found: dict[str, str | None] = {"triton": triton}
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        found |= {"cuda": torch.version.cuda, "capability": ".".join(map(str, capability))}
    return found


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.3f}"


def _figure(value: float | None) -> str:
    if value is None or math.isnan(value):
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _without_nan(value: Any) -> Any:
    """The same with None for numbers that JSON has no words for."""
    if isinstance(value, dict):
        return {name: _without_nan(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
