"""The frame in which commands run and print: errors of one line, signals, other libraries silent."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

import typer

from ..common.processes import count_processes, is_first_process, leaving_process_group
from ..common.quiet import quiet_libraries
from ..common.terminal import make_console, progress_bar, stderr_console


if TYPE_CHECKING:
    from rich.status import Status


@contextlib.contextmanager
def running_command(debug: bool, interrupted: str = "Interrupted.") -> Iterator[None]:
    """
    Turn exceptions into one line on stderr and exit status 1, or 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP.

    `debug` lets exceptions through; `interrupted` is printed after a signal, by the first of several processes.
    """
    for name in ("bitsandbytes", "torchao", "torch.utils._pytree"):  # log at import, which concerns no user
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with _signals_as_interruptions(), leaving_process_group():
            yield
    except KeyboardInterrupt as error:
        if is_first_process():
            print(interrupted, file=sys.stderr)
        number = next((number for number in error.args if isinstance(number, int)), signal.SIGINT)
        raise typer.Exit(128 + number) from None
    except BrokenPipeError:  # the reader of stdout ended, as `head` does; Python would print an error when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        if debug:
            raise
        if is_first_process() or not isinstance(error, ValueError | OSError):
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


@contextlib.contextmanager
def running_quietly(debug: bool, interrupted: str = "Interrupted.") -> Iterator[None]:
    """Run the body of a command without messages of libraries in its output."""
    with running_command(debug, interrupted), quiet_libraries():
        yield


@contextlib.contextmanager
def byte_progress(task: str) -> Iterator[Callable[[int], Callable[[int], None]]]:
    """A progress bar of bytes on stderr, for conversions."""
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    with progress_bar(task, DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as (update, _):

        def start(total: int) -> Callable[[int], None]:
            update(total=total)
            return lambda nbytes: update(advance=nbytes)

        yield start


def status(task: str) -> Status:
    """A spinner on stderr, if that is a terminal."""
    return stderr_console().status(task, spinner="line")


def print_line(text: str) -> None:
    make_console().print(text, soft_wrap=True)


def print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    from rich.table import Column, Table

    table = Table(*(Column(name, overflow="fold") for name in columns), title=title, title_justify="left")
    for row in rows:
        table.add_row(*map(str, row))
    make_console().print(table)
