"""The processes of `accelerate launch` or `torchrun`, of which the first decides and writes."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch


def processes_in_all() -> int:
    """Processes on all machines, this one among them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def processes_here() -> int:
    """Processes on this machine, this one among them."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", processes_in_all()))


class Processes:
    """
    All processes, or this one alone.

    Args:
        device: What [`dcformer.eval.devices.choose_device`] has chosen.
    """

    def __init__(self, device: str):
        self.count, self.rank = processes_in_all(), 0
        if self.count > 1:
            from accelerate import PartialState

            # Waits as long as the harness does: one process may need hours more than another. Without being told,
            # accelerate takes processes on CPUs for strangers.
            state = PartialState(cpu=device == "cpu", timeout=timedelta(weeks=52))
            self.rank, self.count = state.process_index, state.num_processes

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def check_limit(self, limit: int | None) -> None:
        """
        Raises:
            ValueError: if some process would have no document.
        """
        if limit is not None and limit < self.count:
            raise ValueError(
                f"limit={limit} leaves some of the {self.count} processes without a document; raise it, or start fewer."
            )

    def decided_by_first(self, decide: Callable[[], Any]) -> Any:
        """What the first process finds, in all of them; an error too, or the others would wait for ever."""
        if self.count == 1:
            return decide()
        outcome: list = [None, None]
        if self.is_first:
            try:
                outcome[0] = decide()
            except Exception as error:
                outcome[1] = error
        torch.distributed.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]
