"""Processes for tests that need others: each is forked from one that has imported what they need and done nothing else.

A new interpreter needs seconds for that import, a fork none. The process of the tests itself is forked once, before
the first test: later the threads of torch and tensorstore would be missing in the copy, and torch refuses to
differentiate there.
"""

import contextlib
import os
import signal
import socket
from multiprocessing import connection, get_context

from torch.distributed import TCPStore


requests: socket.socket | None = None


def fork_idle_copy() -> None:
    """Fork the copy of this process from which the others are forked; it ends with this one."""
    global requests
    requests, received = socket.socketpair()
    if os.fork():
        received.close()
        return
    try:
        requests.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while descriptors := socket.recv_fds(received, 1, 3)[1]:
            if os.fork() == 0:
                received.close()
                os.dup2(descriptors[1], 1)
                os.dup2(descriptors[2], 2)
                call(connection.Connection(descriptors[0]))
                break
            for descriptor in descriptors:
                os.close(descriptor)
    finally:
        os._exit(0)  # what pytest has registered for the end of the process is not for its copies


def call(tests: connection.Connection) -> None:
    """Run the process that is asked for to its end, or kill it at the next message or the end of the tests."""
    function, arguments = tests.recv()
    process = get_context("fork").Process(target=function, args=arguments)
    process.start()
    connection.wait([tests, process.sentinel])
    process.kill()
    process.join()
    tests.send(process.exitcode)


class Process:
    """
    A process that calls a function of an importable module; `kill` ends it at once, `join` waits for its end.

    It writes where this one does now, which pytest captures.
    """

    exitcode: int | None = None

    def __init__(self, function, *arguments):
        self.connection, other = get_context("fork").Pipe()
        socket.send_fds(requests, [b" "], [other.fileno(), 1, 2])
        other.close()
        self.connection.send((function, arguments))

    def join(self, seconds: float | None = None) -> None:
        if self.exitcode is None and self.connection.poll(seconds):
            self.exitcode = self.connection.recv()

    def kill(self) -> None:
        if self.exitcode is None:
            with contextlib.suppress(BrokenPipeError):  # it has ended meanwhile
                self.connection.send(None)
            self.join()


def call_as_torchrun(rank, port, function, *arguments):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="")
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    function(rank, *arguments)


def run_two(function, *arguments, seconds) -> list[int | None]:
    """Exit codes of two processes of torchrun that call function(rank, ...), killed after this many seconds each."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # as torchrun does: a free port stays free
    processes = [Process(call_as_torchrun, rank, store.port, function, *arguments) for rank in range(2)]
    for process in processes:
        process.join(seconds)
        process.kill()
    return [process.exitcode for process in processes]
