"""One timer and one report for all benchmarks.

On a CPU calls are timed in turns, so that a slow spell of the machine meets all that is compared. On a GPU Triton's
`do_bench` times them, between two events after its L2 cache was overwritten. Rows show CUDA graphs, free of Python.
"""

import dataclasses
import functools
import json
import math
import os
import platform
import re
import statistics
import time
import timeit
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from rich.table import Column, Table

from .. import __version__
from ..common.terminal import make_console
from . import roofline


Call = Callable[..., Any]
_LEAST_SAMPLES = 3
# Shorter calls are repeated within a sample on a CPU: microseconds drown in other processes.
_SECONDS_PER_SAMPLE = 0.05
_TABLE_WIDTH = 180
AS_CALLED = "as called ms"


class Timing(NamedTuple):
    """Seconds of a call, and the number of samples."""

    minimum: float
    median: float
    samples: int


class Case(NamedTuple):
    """A call to time."""

    call: Call  # takes what `prepare` returns; nothing without it
    prepare: Call | None = None  # on a CPU, called before every call, outside its time
    threads: int | None = None  # of torch, on a CPU
    parts: int = 1  # the time is divided by these, such as decoding steps


class Timer:
    """Times calls on one device for about `seconds` in all; on a CPU in 3 turns at least and `most` turns at most."""

    def __init__(self, device: torch.device, seconds: float = 0.3, most: int = 200):
        self.device, self.seconds, self.most = device, seconds, most

    def time(self, case: Case | Call) -> Timing:
        return self({"": case})[""]

    def __call__(self, cases: Mapping[Any, Case | Call]) -> dict[Any, Timing]:
        """Time several calls, each after a warm-up that compiles and allocates."""
        named = {name: case if isinstance(case, Case) else Case(case) for name, case in cases.items()}
        times = self._on_a_gpu(named) if self.device.type == "cuda" else self._in_turns(named)
        parts = {name: [seconds / named[name].parts for seconds in samples] for name, samples in times.items()}
        return {name: Timing(min(times), statistics.median(times), len(times)) for name, times in parts.items()}

    def _on_a_gpu(self, cases: dict[Any, Case]) -> dict[Any, list[float]]:
        from triton.testing import do_bench

        options = {"rep": 1000 * self.seconds / len(cases), "return_mode": "all"}
        return {name: [ms / 1000 for ms in do_bench(case.call, **options)] for name, case in cases.items()}

    def _in_turns(self, cases: dict[Any, Case]) -> dict[Any, list[float]]:
        threads = torch.get_num_threads()
        try:
            repeats, turn = {}, 0.0
            for name, case in cases.items():
                _sample(case)
                estimate = max(_sample(case), 1e-7)
                wanted = 0.0 if case.prepare else min(_SECONDS_PER_SAMPLE, self.seconds / _LEAST_SAMPLES)
                repeats[name] = max(1, int(wanted / estimate))
                turn += repeats[name] * estimate
            samples: dict[Any, list[float]] = {name: [] for name in cases}
            for _ in range(min(max(int(self.seconds / turn), _LEAST_SAMPLES), self.most)):
                for name, case in cases.items():
                    samples[name].append(_sample(case, repeats[name]))
            return samples
        finally:
            torch.set_num_threads(threads)


def _sample(case: Case, repeats: int = 1) -> float:
    """Seconds of a call on a CPU."""
    if case.threads is not None and case.threads != torch.get_num_threads():
        torch.set_num_threads(case.threads)
    arguments = () if case.prepare is None else (case.prepare(),)
    return timeit.timeit(lambda: case.call(*arguments), number=repeats) / repeats


class NotRecordable(RuntimeError):
    """A call that cannot be a CUDA graph; says why."""


def in_cuda_graph(call: Call) -> Call:
    """
    Record a call as a CUDA graph, which launches all its kernels at once, on the current stream.

    That must not be the default stream, but the one on which the call's leaves were first used: autograd returns to it.
    Raises NotRecordable, for example where the call waits for the device.
    """
    for _ in range(3):  # compiles and allocates
        call()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            call()
    except RuntimeError as error:
        # Random numbers after a recording that broke off need a generator that does not take part in it.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
        # Ending such a recording may raise over what broke it.
        raise NotRecordable(f"no CUDA graph: {one_line(error.__context__ or error)}") from error
    return graph.replay


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor with its instruction sets."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu_info = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*: (.+)", cpu_info.read_text(encoding="utf-8")) if cpu_info.exists() else None
    name = match[1] if match else platform.processor() or platform.machine()
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def environment(device: torch.device) -> dict[str, str | int | None]:
    """Versions, threads and hardware that figures depend on."""
    return {
        "dcformer": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": str(device),
        "hardware": device_name(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        **({"cuda": torch.version.cuda} if device.type == "cuda" else {}),
    }


@dataclasses.dataclass
class Row:
    """One figure of a report, or why it is missing."""

    group: str  # rows of one group are one table
    name: str
    timing: Timing | None = None
    figures: dict[str, float] = dataclasses.field(default_factory=dict)  # by names that say their units
    note: str = ""
    has_failed: bool = False  # it computed wrong values or raised; the command then ends with status 1


@dataclasses.dataclass
class Run:
    """One run of a benchmark: device, sizes, timer, and the report; nothing new is started after `seconds`."""

    command: str
    device: torch.device
    dtype: torch.dtype = torch.float32
    is_quick: bool = False
    seconds: float | None = None
    rows: list[Row] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    problems: dict[Hashable, str | None] = dataclasses.field(default_factory=dict)  # of candidates, by what was checked

    def __post_init__(self) -> None:
        self.compiles = self.device.type == "cuda"  # whether what needs torch.compile takes part
        self.timer = Timer(self.device, seconds=0.02 if self.is_quick else 0.3)
        self._end = math.inf if self.seconds is None else time.perf_counter() + self.seconds
        if self.device.type == "cuda":
            self.notes.append(f"Times are those of CUDA graphs; {AS_CALLED!r} is the median of the call without one.")

    @functools.cached_property
    def rates(self) -> roofline.Rates:
        """The machine's rates, measured when first asked for."""
        timings = self.timer(roofline.rate_probes(self.device, self.dtype))
        return roofline.measured_rates({name: timing.minimum for name, timing in timings.items()}, self.device)

    def measured(self, group: str, name: str, make: Callable[[], Case | str]) -> Row:
        """Add a row of the case that `make` returns, or of why there is none; what is raised is noted in the row."""
        row = Row(group, name)
        self.rows.append(row)
        if time.perf_counter() >= self._end:
            row.note = f"not measured: the {self.seconds:g} seconds were over"
            return row
        try:
            case = make()
            if isinstance(case, str):
                row.note, row.has_failed = case, not case.startswith("not measured")
            else:
                row.timing = self.timer.time(case)
                if self.device.type == "cuda":
                    row.figures[AS_CALLED], row.timing = 1000 * row.timing.median, None
                    row.timing = self.timer.time(case._replace(call=in_cuda_graph(case.call)))
        except NotRecordable as error:
            row.note = str(error)
        except torch.OutOfMemoryError:
            row.note = "not measured: it does not fit into the device's memory"
        except Exception as error:  # whatever the code that is compared may raise
            row.note, row.has_failed = f"failed: {one_line(error)}", True
        finally:
            torch.cuda.empty_cache()
        return row

    def rows_of(self, group: str) -> list[Row]:
        return [row for row in self.rows if row.group == group]

    def show(self) -> None:
        """Print a table of each group, and the notes."""
        for group in dict.fromkeys(row.group for row in self.rows):
            rows = self.rows_of(group)
            figures = list(dict.fromkeys(name for row in rows for name in row.figures))
            cells = []
            for row in rows:
                times = [1000 * row.timing.median, 1000 * row.timing.minimum] if row.timing else [None, None]
                values = [*times, *(row.figures.get(name) for name in figures)]
                cells.append([row.name, *map(_figure, values), row.note])
            show_table([group, "median ms", "min ms", *figures, "note"], cells)
        for sentence in self.notes:
            print(sentence)

    def write(self, path: Path) -> None:
        content = {
            "command": self.command,
            "environment": environment(self.device),
            "settings": {"dtype": self.dtype, "quick": self.is_quick, "seconds": self.seconds},
            "rates": self.rates._asdict() if "rates" in vars(self) else {},
            "notes": self.notes,
            "rows": [{**vars(row), "timing": row.timing and row.timing._asdict()} for row in self.rows],
        }
        write_json(path, content)


def add_ratios(rows: Sequence[Row], base: str, title: str) -> None:
    """Add to every row its time as a multiple of that of the row `base`."""
    seconds = next((row.timing.median for row in rows if row.name == base and row.timing is not None), None)
    for row in rows:
        if row.timing is not None and seconds is not None:
            row.figures[title] = row.timing.median / seconds


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: the first column holds names, the others figures; empty columns are left out."""
    kept = [index for index in range(1, len(columns)) if any(row[index] for row in rows)]
    table = Table(columns[0], *(Column(columns[index], justify="right") for index in kept))
    for row in rows:
        table.add_row(row[0], *(row[index] for index in kept))
    make_console(_TABLE_WIDTH).print(table)


def write_json(path: Path, content: Any) -> None:
    path.parent.resolve().mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
