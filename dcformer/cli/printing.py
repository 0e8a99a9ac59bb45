"""Tables, lines and the progress bar of the commands on checkpoints."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..common.terminal import make_console, progress_bar


if TYPE_CHECKING:
    from rich.console import Console


def checkpoint_console() -> Console:
    return make_console(pipe_width=160)


@contextlib.contextmanager
def byte_progress(task: str) -> Iterator[Callable[[int], Callable[[int], None]]]:
    """A progress bar on stderr, as conversions take it."""
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    with progress_bar(DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as (bar, _):
        yield lambda total: functools.partial(bar.advance, bar.add_task(task, total=total))


@contextlib.contextmanager
def status(task: str) -> Iterator[None]:
    """A sign of life on stderr, where that is a terminal."""
    from rich.console import Console

    with Console(stderr=True).status(task):
        yield


def print_location(format: str, location: str, step: int | None, skipped_steps: dict[str, str]) -> None:
    """Print which checkpoint was read."""
    console = checkpoint_console()
    console.print(f"{format}, {location}" + ("" if step is None else f", step {step}"), soft_wrap=True)
    for number, reason in skipped_steps.items():
        console.print(f"Step {number} was skipped: {reason}", soft_wrap=True)


def print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    checkpoint_console().print(table)


def print_origins(title: str, origins: Iterable[Any]) -> None:
    """Print the values of a configuration and where each was found."""
    rows = [(o.field, short(o.value), "default" if o.is_default else "", o.origin) for o in origins]
    print_table(title, ("field", "value", "", "from"), rows)


def short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def shape_text(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def speed(nbytes: int, seconds: float) -> str:
    return f"{nbytes / 1e9:.3g} GB in {seconds:.1f} s ({nbytes / 1e6 / max(seconds, 1e-9):.1f} MB/s)"
