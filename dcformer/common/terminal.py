"""What the commands share: a console that fits pipes, errors of one line, and the end of several processes."""

from __future__ import annotations

import contextlib
import errno
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from .signals import Terminated, signals_as_interruptions


# Imported where it is used: the help of a command waits for all that is imported here.
if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn


def make_console(pipe_width: int) -> Console:
    """A console on stdout; a pipe, which has no width, gets one, since 80 columns cut names and break tables."""
    from rich.console import Console

    # Paths and values may hold brackets, which are no markup here.
    console = Console(markup=False, highlight=False, emoji=False)
    return console if console.is_terminal else Console(markup=False, highlight=False, emoji=False, width=pipe_width)


@contextlib.contextmanager
def progress_bar(*counters: ProgressColumn, is_first: bool = True) -> Iterator[tuple[Progress, Console | None]]:
    """
    A bar on stderr that is gone at the end.

    Args:
        counters (`ProgressColumn`): What stands behind the bar.
        is_first (`bool`, defaults to `True`): Whether this is the first of several processes; others show no bar.

    Yields:
        The bar, hidden where stderr is no terminal, and the console on which to print lines instead of it; `None`
        where the bar is shown or another process prints them.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    shows_bar = console.is_terminal and is_first
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *counters)
    with Progress(*columns, console=console, transient=True, disable=not shows_bar) as bar:
        yield bar, None if console.is_terminal or not is_first else console


@contextlib.contextmanager
def one_line_errors(debug: bool, interrupted: str = "Interrupted.", is_first: bool = True) -> Iterator[None]:
    """
    Turn exceptions into one line on stderr and exit status 1, or 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP.

    Args:
        debug (`bool`): Let exceptions through, with their traceback.
        interrupted (`str`): What is said after Ctrl-C or such a signal.
        is_first (`bool`): Whether this is the first of several processes, all of which find wrong files and options.
    """
    with signals_as_interruptions() as ignore_signals:
        try:
            yield
        except KeyboardInterrupt as error:
            ignore_signals()
            if is_first:
                typer.echo(interrupted, err=True)
            number = error.number if isinstance(error, Terminated) else signal.SIGINT
            raise typer.Exit(128 + number) from None
        except Exception as error:
            if debug:
                raise
            message = str(error) or type(error).__name__
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                message = f"The disk is full; free some space and run the same command again ({message})."
            if is_first or not isinstance(error, ValueError | OSError):
                typer.echo(f"Error: {' '.join(message.split())}", err=True)
            raise typer.Exit(1) from None


@contextlib.contextmanager
def leaving_process_group() -> Iterator[None]:
    """Close the connections between processes, of which torch would complain at the end."""
    try:
        yield
    finally:
        import torch

        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
