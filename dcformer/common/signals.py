"""Signals that end a command as Ctrl-C does: what it has is kept, and it can say so."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any


# What schedulers and closing terminals send; Windows has no SIGHUP.
_ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class Terminated(KeyboardInterrupt):
    """As Ctrl-C, by another signal, of this number."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def signals_as_interruptions() -> Iterator[Callable[[], None]]:
    """
    Raise `Terminated` in the main thread on SIGTERM and SIGHUP, unless they are ignored, as by nohup.

    The first one counts: closing a terminal sends two, and the second must not stop what the first one ends. Processes
    of torchrun keep the default, since one that waits for the others in a reduction would not hear of the signal.

    Yields:
        What makes the process deaf to these signals and to Ctrl-C until the block ends.
    """
    before: dict[int, Any] = {}

    def replace(numbers: Iterable[int], handler: signal.Handlers | Callable) -> None:
        for number in numbers:
            before.setdefault(number, signal.getsignal(number))
            signal.signal(number, handler)

    def interrupt(number: int, frame: FrameType | None) -> None:
        replace(chosen, _do_nothing)
        raise Terminated(number)

    def ignore_all() -> None:
        if in_main_thread and signal.getsignal(signal.SIGINT) is not None:
            replace((*chosen, signal.SIGINT), _do_nothing)

    in_main_thread = threading.current_thread() is threading.main_thread()
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
    # Handlers that are no functions of Python (None) could not be put back.
    chosen = [number for number in _ENDING if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    if not (in_main_thread and is_alone):
        chosen = []
    try:
        replace(chosen, interrupt)
        yield ignore_all
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    # Unlike SIG_IGN, of which Python complains if such a signal is on its way.
    pass


@contextlib.contextmanager
def without_ctrl_c() -> Iterator[None]:
    """
    Processes that are started in the block never hear of Ctrl-C, which a terminal sends to all of them at once.

    Their parent does, after the block, and ends them.
    """
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # its start, which the first process of all would bring, lets Ctrl-C in again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
