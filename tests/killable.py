"""Processes for tests that need others: each is forked from one that has imported `dcformer` and done nothing else.

A new interpreter needs seconds for that import, a fork none. The process of the tests itself cannot be forked: the
threads of torch and tensorstore would be missing in the copy, and torch refuses to differentiate there.
"""

import multiprocessing
import socket
from multiprocessing.process import BaseProcess


def start(function, *arguments, **options) -> BaseProcess:
    """A process that calls a function of an importable module; `kill` ends it at once, `join` waits for its end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dcformer.conversion", "dcformer.training.trainer"])
    process = context.Process(target=function, args=arguments, kwargs=options, daemon=True)
    process.start()
    return process


def run_two(function, *arguments, seconds) -> list[int | None]:
    """Exit codes of two processes that call function(rank, free port, ...), killed after this many seconds each."""
    with socket.socket() as unused:
        unused.bind(("localhost", 0))
        port = unused.getsockname()[1]
    processes = [start(function, rank, port, *arguments) for rank in range(2)]
    for process in processes:
        process.join(seconds)
        process.kill()
    return [process.exitcode for process in processes]
