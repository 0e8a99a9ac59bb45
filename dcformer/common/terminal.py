"""The terminal of the commands: a console that fits pipes, progress bars, errors of one line, and signals."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

import typer

from .processes import count_processes, is_first_process


# Imported where it is used: the help of a command waits for all that is imported here.
if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn


def make_console(pipe_width: int = 200) -> Console:
    """A console on stdout; pipes, which have no width, get one, since 80 columns cut names and break tables."""
    from rich.console import Console

    # Paths and values may hold brackets, which are not markup here.
    width = None if sys.stdout.isatty() else pipe_width
    return Console(markup=False, highlight=False, emoji=False, width=width)


@contextlib.contextmanager
def progress_bar(*counters: ProgressColumn) -> Iterator[tuple[Progress, Console | None]]:
    """
    A bar with counters on stderr, shown by the first process if stderr is a terminal.

    If it is none, the first process also gets a console on stderr, for lines instead of the bar; otherwise `None`.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    is_first, console = is_first_process(), Console(stderr=True, markup=False, highlight=False, emoji=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *counters)
    with Progress(*columns, console=console, transient=True, disable=not (console.is_terminal and is_first)) as bar:
        yield bar, None if console.is_terminal or not is_first else console


@contextlib.contextmanager
def one_line_errors(debug: bool, interrupted: str = "Interrupted.", is_first: bool = True) -> Iterator[None]:
    """
    Turn exceptions into one line on stderr and exit status 1, or 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP.

    `debug` lets exceptions through; `interrupted` is printed after a signal, by the first of several processes.
    """
    try:
        with _signals_as_interruptions():
            yield
    except KeyboardInterrupt as error:
        if is_first:
            print(interrupted, file=sys.stderr)
        number = next((number for number in error.args if isinstance(number, int)), signal.SIGINT)
        raise typer.Exit(128 + number) from None
    except BrokenPipeError:  # the reader of stdout ended, as `head` does; Python would print an error when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        if debug:
            raise
        if is_first or not isinstance(error, ValueError | OSError):
            text = str(error)
            if isinstance(error, OSError) and error.filename is not None and error.strerror:  # without "[Errno 2]"
                text = f"{error.filename!r}: {error.strerror}."
            print(f"Error: {' '.join(text.split()) or type(error).__name__}", file=sys.stderr)
        raise typer.Exit(1) from None


@contextlib.contextmanager
def _signals_as_interruptions() -> Iterator[None]:
    """Raise KeyboardInterrupt with its number on SIGTERM and SIGHUP, so that results are kept as after Ctrl-C."""
    chosen = []
    # Processes of torchrun keep the default: one that waits for others in a collective would never raise.
    if threading.current_thread() is threading.main_thread() and count_processes() == 1:
        numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
        chosen = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]  # nohup ignores SIGHUP

    def interrupt(number: int, frame: FrameType | None) -> None:
        for ignored in chosen:  # a closing terminal sends two; the second must not interrupt the clean-up
            signal.signal(ignored, lambda *_: None)
        raise KeyboardInterrupt(number)

    try:
        for number in chosen:
            signal.signal(number, interrupt)
        yield
    finally:
        for number in chosen:
            signal.signal(number, signal.SIG_DFL)
