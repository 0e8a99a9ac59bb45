"""Processes for tests that need others: each is forked from one that has imported what they need and done nothing else.

A new interpreter needs seconds for that import, a fork none. The process of the tests itself cannot be forked: the
threads of torch and tensorstore would be missing in the copy, and torch refuses to differentiate there.
"""

import multiprocessing
import os
import socket
from multiprocessing.process import BaseProcess


def start(function, *arguments, method="forkserver", **options) -> BaseProcess:
    """A process that calls a function of an importable module; `kill` ends it at once, `join` waits for its end."""
    context = multiprocessing.get_context(method)
    libraries = ["matplotlib.pyplot", "omegaconf", "pytest", "scipy.stats"]
    context.set_forkserver_preload(["dcformer.cli", "dcformer.conversion", "dcformer.training.trainer", *libraries])
    process = context.Process(target=function, args=arguments, kwargs=options, daemon=True)
    process.start()
    return process


def call_as_torchrun(rank, port, function, *arguments):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="")
    function(rank, *arguments)


def run_two(function, *arguments, seconds, **options) -> list[int | None]:
    """Exit codes of two processes of torchrun that call function(rank, ...), killed after this many seconds each."""
    with socket.socket() as unused:
        unused.bind(("localhost", 0))
        port = unused.getsockname()[1]
    processes = [start(call_as_torchrun, rank, port, function, *arguments, **options) for rank in range(2)]
    for process in processes:
        process.join(seconds)
        process.kill()
    return [process.exitcode for process in processes]
