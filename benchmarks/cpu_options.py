"""How much the CPU table measures, at which numbers of threads, and the machine's rates in the same turns."""

import dataclasses
from collections.abc import Callable

import torch

from dcformer.bench import roofline

from . import common


CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Options:
    """
    How much to measure.

    Args:
        is_quick (`bool`): Only what has a target.
        threads (`tuple[int, ...]`): Numbers of threads.
        repeats (`int`): Turns, at most.
        seconds (`float`): After which no further turn of a comparison begins.
    """

    is_quick: bool
    threads: tuple[int, ...]
    repeats: int
    seconds: float

    def interleave(self, calls: dict[tuple, Callable | common.Case]) -> dict[tuple, common.Timing]:
        """Time all calls at every number of threads, in turns; the keys of the result end in that number."""
        cases = {}
        for threads in self.threads:
            for name, call in calls.items():
                case = call if isinstance(call, common.Case) else common.Case(call)
                cases[(*name, threads)] = case._replace(threads=threads)
        return common.interleave(cases, self.repeats, CPU, self.seconds)


def probes(dtype: torch.dtype) -> dict[tuple, Callable]:
    """What to time for `rates`."""
    return {("rate", name, type_name(dtype)): call for name, call in roofline.rate_probes(CPU, dtype).items()}


def rates(timings: dict[tuple, common.Timing], dtype: torch.dtype, threads: int) -> roofline.Rates:
    """The machine's rates, from timings that hold those of `probes`."""
    wanted = ("rate", type_name(dtype), threads)
    seconds = {key[1]: timing.minimum for key, timing in timings.items() if (key[0], *key[2:]) == wanted}
    return roofline.measured_rates(seconds, CPU)


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
