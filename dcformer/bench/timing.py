"""How long a call takes: warm-up, then the median of many, each after the device's cache has been overwritten.

On a GPU the times are those between two events in its queue, so that they hold no Python that runs ahead of it; where
launching takes longer than computing, they hold the launches, unless the call replays a CUDA graph.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch


Call = Callable[[], Any]
_WARM_UP_SHARE = 0.2
_MOST_SAMPLES = 200
_LEAST_SAMPLES = 3
_CACHES_OVERWRITTEN = 4


class Timing(NamedTuple):
    """Seconds of one call: the median and the least of all samples, and how many there were."""

    median: float
    minimum: float
    samples: int


class Budget:
    """Seconds that a command may take; nothing new is begun when they are over."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._start = time.perf_counter()

    @property
    def spent(self) -> float:
        return time.perf_counter() - self._start

    @property
    def is_over(self) -> bool:
        return self.spent >= self.seconds


class Timer:
    """
    Times calls on one device.

    Args:
        device (`torch.device`): Where they run.
        seconds (`float`, defaults to 0.3): About how long the samples of one call may take together.
    """

    def __init__(self, device: torch.device, seconds: float = 0.3):
        self.device = device
        self.seconds = seconds
        self._overwritten: torch.Tensor | None = None
        if device.type == "cuda":
            size = torch.cuda.get_device_properties(device).L2_cache_size
            self._overwritten = torch.empty(_CACHES_OVERWRITTEN * size // 4, dtype=torch.int32, device=device)

    def __call__(self, *calls: Call, reset: Call | None = None) -> Timing:
        """
        Time one call, or several that do the same with operands of their own, in turns.

        Args:
            calls (`Callable`): Without arguments.
            reset (`Callable`, *optional*): Called before every sample, outside its time.
        """
        reset = reset or _nothing
        first = self._once(calls[0], reset)  # compiles, allocates
        for call in calls[1:]:
            self._once(call, reset)
        estimate = max(min(first, self._once(calls[0], reset)), 1e-7)
        for turn in range(min(round(_WARM_UP_SHARE * self.seconds / estimate), _MOST_SAMPLES)):
            self._once(calls[turn % len(calls)], reset)
        number = max(_LEAST_SAMPLES, min(round(self.seconds / estimate), _MOST_SAMPLES))
        samples = self._samples([calls[turn % len(calls)] for turn in range(number)], reset)
        return Timing(statistics.median(samples), min(samples), len(samples))

    def _once(self, call: Call, reset: Call) -> float:
        return self._samples([call], reset)[0]

    def _samples(self, calls: Sequence[Call], reset: Call) -> list[float]:
        """Seconds of each call."""
        if self.device.type != "cuda":
            return [_wall_seconds(call, reset) for call in calls]
        events = []
        for call in calls:
            reset()
            if self._overwritten is not None:
                self._overwritten.zero_()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            events.append((start, stop))
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(stop) / 1000 for start, stop in events]


def in_cuda_graph(call: Call, device: torch.device, warm_ups: int = 3) -> Call:
    """
    The same call as a CUDA graph, which launches all its kernels at once; its tensors must stay where they are.

    Args:
        call (`Callable`): Reads nothing back from the device.
        device (`torch.device`): A GPU; on any other device the call is returned as it is.
        warm_ups (`int`, defaults to 3): Calls before the recording, which compile and allocate.
    """
    if device.type != "cuda":
        return call
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(warm_ups):
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay() -> Any:
        graph.replay()
        return kept

    return replay


def _wall_seconds(call: Call, reset: Call) -> float:
    reset()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _nothing() -> None:
    pass
