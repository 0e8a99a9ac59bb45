"""What every benchmark is given: the device, how much to measure, and where its rows go."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from . import roofline
from .report import Report, Row
from .timing import Budget, Call, Timer, Timing


_COMPOSITION_RANK = 2


@dataclasses.dataclass
class Context:
    """
    One run of a benchmark.

    Args:
        device (`torch.device`): Where everything runs.
        dtype (`torch.dtype`): Of operands and parameters.
        is_quick (`bool`): Tiny sizes, which show that everything runs but not how fast it is.
        compiles (`bool`): Whether what needs torch.compile takes part.
        report (`Report`): Takes the rows.
        timer (`Timer`): Of the device.
        budget (`Budget`): Seconds of this command.
    """

    device: torch.device
    dtype: torch.dtype
    is_quick: bool
    compiles: bool
    report: Report
    timer: Timer
    budget: Budget
    _rates: roofline.Rates | None = None

    def timed(self, group: str, name: str, prepare: Callable[[], Call], note: str = "") -> Row:
        """Prepare a call and time it, unless the time is up."""
        return self.measured(group, name, lambda: self.timer(prepare()), note)

    def measured(self, group: str, name: str, measure: Callable[[], Timing], note: str = "") -> Row:
        """A row of what takes its own time, unless the time is up."""
        if self.budget.is_over:
            return self.report.add(Row(group, name, note=self.no_time_left))
        return self.report.timed(group, name, measure, note)

    @property
    def no_time_left(self) -> str:
        return f"not measured: the {self.budget.seconds:g} seconds were over"

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def rates(self) -> roofline.Rates:
        """What the machine does per second, measured the first time that it is asked for."""
        if self._rates is None:
            timer = Timer(self.device, seconds=0.1)
            probes = roofline.rate_probes(self.device, self.dtype)
            seconds = {name: timer(call).minimum for name, call in probes.items()}
            self._rates = roofline.measured_rates(seconds, self.device)
            # Timers overwrite the cache before every call, so that its own rate is not among them.
            names = ("flops", "memory_bytes", "read_bytes")
            self.report.rates = {f"{name} per second": getattr(self._rates, name) for name in names}
        return self._rates

    def work(self, batch: int, heads: int, channels: int, length: int, window: int | None) -> roofline.Work:
        """Operations and bytes of one forward pass of the operator."""
        return roofline.forward_work(
            batch=batch,
            heads=heads,
            length=length,
            head_dim=channels,
            rank=_COMPOSITION_RANK,
            itemsize=self.dtype.itemsize,
            sliding_window=window,
        )
