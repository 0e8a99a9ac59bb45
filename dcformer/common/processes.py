"""Several processes of `torchrun` or `accelerate launch`, of which the first one decides and writes for all."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar


Result = TypeVar("Result")


def is_first_process() -> bool:
    """True if this is the only process, or the first of those that `torchrun` or `accelerate launch` started."""
    return os.environ.get("RANK", "0") == "0"


def count_processes() -> int:
    """Count the processes that `torchrun` or `accelerate launch` started; 1 without them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def in_first_process(work: Callable[[], Result]) -> Result:
    """
    Call `work` in the first process, and return its result or raise its error in all, so that none waits for ever.

    With several processes, accelerate's state must have been made; result and error are pickled.
    """
    if count_processes() == 1:
        return work()
    from accelerate.utils import broadcast_object_list

    outcome: list = [None, None]
    if is_first_process():
        try:
            outcome[0] = work()
        except Exception as error:
            outcome[1] = error
    broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


@contextlib.contextmanager
def leaving_process_group() -> Iterator[None]:
    """Close the connections between processes at the end of the block, since torch warns if they stay open."""
    try:
        yield
    finally:
        torch: Any = sys.modules.get("torch")  # which some commands do not import
        if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
