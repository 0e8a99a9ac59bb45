"""The frame in which commands run and print: models registered, errors in one line, other libraries silent."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator

from ..common.quiet import quiet_libraries
from ..common.terminal import make_console, one_line_errors, progress_bar


@contextlib.contextmanager
def running_command(
    debug: bool, interrupted: str = "Interrupted.", is_first: bool = True, loads_models: bool = True
) -> Iterator[None]:
    """Run the body of a command as `one_line_errors` does, with the models registered if it loads any."""
    with one_line_errors(debug, interrupted, is_first):
        for name in ("bitsandbytes", "torchao", "torch.utils._pytree"):  # log at import, which concerns no user
            logging.getLogger(name).setLevel(logging.ERROR)
        if loads_models:
            from .. import public  # noqa: F401
        yield


@contextlib.contextmanager
def running_quietly(debug: bool, interrupted: str = "Interrupted.") -> Iterator[None]:
    """Run the body of a command without messages of libraries in its output."""
    with running_command(debug, interrupted), quiet_libraries():
        yield


@contextlib.contextmanager
def byte_progress(task: str) -> Iterator[Callable[[int], Callable[[int], None]]]:
    """A progress bar of bytes on stderr, for conversions."""
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    with progress_bar(DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as (bar, _):
        yield lambda total: functools.partial(bar.advance, bar.add_task(task, total=total))


@contextlib.contextmanager
def status(task: str) -> Iterator[None]:
    """A spinner on stderr, if that is a terminal."""
    from rich.console import Console

    with Console(stderr=True).status(task, spinner="line"):
        yield


def print_line(text: str) -> None:
    make_console().print(text, soft_wrap=True)


def print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    from rich.table import Column, Table

    table = Table(*(Column(name, overflow="fold") for name in columns), title=title, title_justify="left")
    for row in rows:
        table.add_row(*map(str, row))
    make_console().print(table)
