"""What the benchmarks share: interleaved timing, tables, JSON files and the line that says where a run took place."""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import NamedTuple

import torch

from dcformer.bench.machine import DTYPES as DTYPES
from dcformer.bench.machine import environment
from dcformer.bench.machine import processor_flags as processor_flags
from dcformer.bench.tables import show_table as show_table


# A sample shorter than this repeats the call: microseconds drown in the clock and in other processes.
_SECONDS_PER_SAMPLE = 0.05


class Sample(NamedTuple):
    """Seconds of one call: by the clock on the wall, and of processor time over all threads of this process."""

    wall: float
    processor: float


class Timing(NamedTuple):
    """
    Seconds per call: the least, which other processes disturbed least, and the median of all samples; the same of
    processor time, which other processes hardly touch but which says nothing of how well threads share the work.
    """

    minimum: float
    median: float
    processor_minimum: float = float("nan")
    processor_median: float = float("nan")


class Case(NamedTuple):
    """
    What `interleave` times.

    Args:
        call (`Callable`): Takes what `prepare` returned; nothing without `prepare`.
        prepare (`Callable`, *optional*): Called before every call, outside the time.
        threads (`int`, *optional*): Threads of torch while it runs. None: as they are.
        calls (`int`, defaults to 1): Into how many equal parts, such as decoding steps, the time is divided.
    """

    call: Callable[..., object]
    prepare: Callable[[], object] | None = None
    threads: int | None = None
    calls: int = 1


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", type=_device, default=torch.device("cpu"), help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--json", type=Path, help="file to write all figures to")


def sample(call: Callable[[], object], device: torch.device, times: int = 1) -> Sample:
    """Mean seconds of `times` calls in a row, until the device has finished them."""
    _synchronize(device)
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(times):
        call()
    _synchronize(device)
    return Sample((time.perf_counter() - wall) / times, (time.process_time() - processor) / times)


def interleave(
    cases: dict[Hashable, "Callable[[], object] | Case"],
    repeats: int,
    device: torch.device,
    seconds: float = math.inf,
) -> dict[Hashable, Timing]:
    """
    Time several calls in turns, so that a slow spell of the machine meets all of them.

    Args:
        cases (`dict`): Name -> what to time; each runs at least once, and with the threads it asks for, before it
            counts.
        repeats (`int`): Samples of each.
        device (`torch.device`): Waited for before every reading of the clocks.
        seconds (`float`, *optional*): After which no further turn begins, once there are two.
    """
    cases = {name: case if isinstance(case, Case) else Case(case) for name, case in cases.items()}
    threads = torch.get_num_threads()
    try:
        times = {name: _calls_per_sample(case, device) for name, case in cases.items()}
        samples = {name: [] for name in cases}
        end = time.perf_counter() + seconds
        for turn in range(repeats):
            if turn >= 2 and time.perf_counter() > end:
                break
            for name, case in cases.items():
                samples[name].append(_run(case, device, times[name]))
    finally:
        torch.set_num_threads(threads)
    return {name: summarize(taken, cases[name].calls) for name, taken in samples.items()}


def _calls_per_sample(case: Case, device: torch.device) -> int:
    """Warm up, and find how many calls in a row make a sample that the clocks can tell."""
    wall = _run(case, device, 1).wall
    if wall < _SECONDS_PER_SAMPLE:
        wall = _run(case, device, 1).wall
    return max(1, int(_SECONDS_PER_SAMPLE / wall))


def _run(case: Case, device: torch.device, times: int) -> Sample:
    """One sample of a case; of one that needs preparations, of one call."""
    if case.threads is not None and case.threads != torch.get_num_threads():
        torch.set_num_threads(case.threads)
    if case.prepare is None:
        return sample(case.call, device, times)
    prepared = case.prepare()
    return sample(lambda: case.call(prepared), device)


def summarize(samples: list[Sample], calls: int = 1) -> Timing:
    """The least and the median of samples of `calls` calls each, per call."""
    wall, processor = ([taken[i] / calls for taken in samples] for i in range(2))
    return Timing(min(wall), statistics.median(wall), min(processor), statistics.median(processor))


def show_environment(device: torch.device) -> None:
    print(", ".join(f"{name} {value}" for name, value in environment(device).items()))


def write_json(args: argparse.Namespace, figures: dict) -> None:
    """Write environment, arguments and figures to `args.json`; nothing if it is None."""
    if args.json is None:
        return
    content = {"environment": environment(args.device), "arguments": vars(args), "figures": figures}
    args.json.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")


def _device(name: str) -> torch.device:
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"must be cpu, cuda or cuda:N, got {name!r}")
    return torch.device(name)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
