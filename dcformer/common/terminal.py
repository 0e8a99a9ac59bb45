"""The terminal of the commands: a console that fits pipes, and progress bars."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from .processes import is_first_process


# Imported where it is used: the help of a command waits for all that is imported here.
if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn


def make_console(pipe_width: int = 200) -> Console:
    """A console on stdout; pipes, which have no width, get one, since 80 columns cut names and break tables."""
    from rich.console import Console

    class PipedConsole(Console):
        def on_broken_pipe(self) -> None:  # rich would end the command with status 1
            raise BrokenPipeError

    # Paths and values may hold brackets, which are not markup here.
    width = None if sys.stdout.isatty() else pipe_width
    return PipedConsole(markup=False, highlight=False, emoji=False, width=width)


def stderr_console() -> Console:
    """A console on stderr, where FORCE_COLOR does not draw bars into a file."""
    from rich.console import Console

    force_terminal = None if sys.stderr.isatty() else False
    return Console(stderr=True, markup=False, highlight=False, emoji=False, force_terminal=force_terminal)


@contextlib.contextmanager
def progress_bar(task: str, *counters: ProgressColumn) -> Iterator[tuple[Callable[..., None], Callable[[str], object]]]:
    """
    A bar on stderr with counters, of steps and times if none are given, in the first process and on a terminal alone.

    The block gets `rich.progress.Progress.update` of the bar, and a function that prints a line where no bar is shown.
    """
    from rich import progress

    is_first, console = is_first_process(), stderr_console()
    counters = counters or (progress.MofNCompleteColumn(), progress.TimeElapsedColumn(), progress.TimeRemainingColumn())
    columns = (progress.TextColumn("{task.description}", markup=False), progress.BarColumn(), *counters)
    hidden = not (console.is_terminal and is_first)
    with progress.Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        says = is_first and not console.is_terminal
        say = functools.partial(console.print, soft_wrap=True) if says else lambda text: None
        yield functools.partial(bar.update, bar.add_task(task, total=None)), say
