"""What the benchmarks share: interleaved timing, tables, JSON files and the line that says where a run took place."""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import transformers


try:
    from rich.console import Console
    from rich.table import Table
except ImportError:  # an optional dependency; plain text serves as well
    Console = None


DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}

# A sample shorter than this repeats the call: microseconds drown in the clock and in other processes.
_SECONDS_PER_SAMPLE = 0.05


class Timing(NamedTuple):
    """Seconds per call: the least, which other processes disturbed least, and the median of all samples."""

    minimum: float
    median: float


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", type=_device, default=torch.device("cpu"), help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--json", type=Path, help="file to write all figures to")


def seconds(call: Callable[[], object], device: torch.device, times: int = 1) -> float:
    """Mean seconds of `times` calls in a row, until the device has finished them."""
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        call()
    _synchronize(device)
    return (time.perf_counter() - start) / times


def interleave(calls: dict[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, Timing]:
    """
    Time several calls in turns, so that a slow spell of the machine meets all of them.

    Args:
        calls (`dict`): Name -> what to time; each is called twice before it counts.
        repeats (`int`): Samples of each.
        device (`torch.device`): Waited for before every reading of the clock.
    """
    times = {}
    for name, call in calls.items():
        call()
        times[name] = max(1, int(_SECONDS_PER_SAMPLE / seconds(call, device)))
    samples = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            samples[name].append(seconds(call, device, times[name]))
    return {name: summarize(values) for name, values in samples.items()}


def summarize(samples: list[float]) -> Timing:
    return Timing(min(samples), statistics.median(samples))


def environment(device: torch.device) -> dict[str, str | int]:
    """Versions, threads and hardware that the figures depend on."""
    hardware = f"{_processor()} ({torch.backends.cpu.get_cpu_capability()})"
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": str(device),
        "hardware": hardware,
        "threads": torch.get_num_threads(),
    }


def show_environment(device: torch.device) -> None:
    print(", ".join(f"{name} {value}" for name, value in environment(device).items()))


def show_table(columns: list[str], rows: list[list[str]]) -> None:
    """Print a table: the first column holds names, the others figures. Without rich, its cells divided by tabs."""
    if Console is None:
        print(*("\t".join(row) for row in (columns, *rows)), sep="\n")
        return
    table = Table()
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


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


def _processor() -> str:
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text(encoding="utf-8").splitlines() if cpu_info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
