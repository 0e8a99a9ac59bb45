"""Work on shares in threads, each with one thread of torch's own.

Composed attention is hundreds of short operations. Splitting each over the cores scales badly, since they wait for each
other after every one; whole blocks of queries in a thread each scale as well as the memory lets them. Operations
release Python's lock, so its threads do run at once.
"""

import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


_tasks: queue.SimpleQueue = queue.SimpleQueue()
_workers: list[threading.Thread] = []
_growth = threading.Lock()


def available_threads() -> int:
    """How many shares can be worked on at once: as many as torch may use here, or one where a mode watches."""
    # A mode that watches operations (counts them, tracks memory) watches those of its own thread.
    return 1 if is_in_torch_dispatch_mode() else torch.get_num_threads()


def deal(items: Sequence, costs: Sequence[int], hands: int) -> list[list]:
    """Deal items into that many hands of about equal cost, the same way every time; none of them empty."""
    dealt: list[list] = [[] for _ in range(hands)]
    sums = [0] * hands
    for index in sorted(range(len(items)), key=lambda index: -costs[index]):
        hand = sums.index(min(sums))
        dealt[hand].append(items[index])
        sums[hand] += costs[index]
    return [hand for hand in dealt if hand]


def run_shares(work: Callable, shares: Sequence) -> list:
    """
    `work(share)` of every share, at once if there is more than one; it must not ask for gradients.

    Returns:
        The results in the order of the shares. The first error is raised when all are done.
    """
    if len(shares) == 1:
        return [work(shares[0])]
    _grow(len(shares))
    futures: list[Future] = [Future() for _ in shares]
    inference = torch.is_inference_mode_enabled()
    for future, share in zip(futures, shares):
        _tasks.put((future, inference, work, share))
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error
    return [future.result() for future in futures]


def _grow(count: int) -> None:
    """Have that many workers. They wait as daemons, so that none keeps a process from ending."""
    with _growth:
        if len(_workers) >= count:
            return
        threads = torch.get_num_threads()
        for _ in range(count - len(_workers)):
            started = threading.Event()
            worker = threading.Thread(target=_serve, args=(started,), name="dcmha", daemon=True)
            worker.start()
            started.wait()
            _workers.append(worker)
        # A thread takes the latest number that was set anywhere when it first asks; the workers' is not for others.
        torch.set_num_threads(threads)


def _serve(started: threading.Event) -> None:
    torch.get_num_threads()  # else the first operation would take the number of the process
    torch.set_num_threads(1)
    started.set()
    while True:
        future, inference, work, share = _tasks.get()
        try:
            # Both modes belong to a thread.
            with torch.inference_mode(inference), torch.no_grad():
                future.set_result(work(share))
        except BaseException as error:  # raised again where the result is asked for
            future.set_exception(error)
        del future, work, share  # or the last call's tensors would live until the next one


def _forget_workers() -> None:
    """A forked process has none of the threads."""
    global _tasks, _growth
    _tasks, _growth = queue.SimpleQueue(), threading.Lock()
    _workers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_workers)
