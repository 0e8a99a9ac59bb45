"""The registry's rows, the timer, the report and the command line of all benchmarks.

On a CPU calls that are compared are timed in turns, so that a slow spell of the machine meets all of them. On a GPU
Triton's `do_bench` times them, between two events after its L2 cache was overwritten; rows show CUDA graphs, free of
Python.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import platform
import re
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from dcformer import __version__
from dcformer.loading import choose_device


Call = Callable[..., Any]
_LEAST_SAMPLES = 3
# Shorter calls are repeated within a sample on a CPU: microseconds drown in other processes.
_SECONDS_PER_SAMPLE = 0.05
AS_CALLED = "as called ms"


class Benchmark(NamedTuple):
    """A row of the registry: what is measured, beside what, and what it has to agree with before it is timed."""

    name: str
    what: str
    baseline: str
    check: str
    shapes: Callable[["Run"], Iterable[Any]]  # in order of importance; few and tiny ones in a quick run
    measure: Callable[["Run", Any], None]  # adds the rows of a shape to the run


class Timing(NamedTuple):
    """Seconds of a call, and the number of samples."""

    minimum: float
    median: float
    samples: int


class Case(NamedTuple):
    """A call to time; on a CPU `prepare` is called before every call, outside its time, and makes its argument."""

    call: Call
    prepare: Call | None = None
    parts: int = 1  # the time is divided by these, such as decoding steps
    figures: Mapping[str, float] = {}  # beside the time
    rates: Mapping[str, float] = {}  # what a part is work of, such as tokens, by the name of the rate per second


@dataclasses.dataclass
class Row:
    """One row of a report, or why its figures are missing."""

    group: str  # rows of one group are one table
    name: str
    timing: Timing | None = None
    figures: dict[str, float] = dataclasses.field(default_factory=dict)  # by names that say their units
    note: str = ""
    has_failed: bool = False  # it computed wrong values or raised; the command then ends with status 1

    def __str__(self) -> str:
        times = {"ms": 1000 * self.timing.median, "at least": 1000 * self.timing.minimum} if self.timing else {}
        figures = [f"{name} {_figure(value)}" for name, value in (times | self.figures).items()]
        return f"{self.name}: {', '.join([*figures, *filter(None, [self.note])])}"


class Entry(NamedTuple):
    """A row to measure."""

    name: str
    make: Callable[[], Case | dict[str, float] | str]  # checks it first; figures, or why there are none, are final
    is_ours: bool = True  # others' failures are noted, and do not fail the run


class Timer:
    """Times calls on one device for about `seconds` in all; on a CPU in 3 turns at least and `most` turns at most."""

    def __init__(self, device: torch.device, seconds: float = 0.3, most: int = 200, end: float = math.inf):
        self.device, self.seconds, self.most, self.end = device, seconds, most, end

    def __call__(self, cases: Mapping[Any, Case | Call]) -> dict[Any, Timing]:
        """Time several calls, each after a warm-up that compiles and allocates; on a CPU those that begin by `end`."""
        named = {name: case if isinstance(case, Case) else Case(case) for name, case in cases.items()}
        times = self._on_a_gpu(named) if self.device.type == "cuda" else self._in_turns(named)
        parts = {name: [seconds / named[name].parts for seconds in samples] for name, samples in times.items()}
        return {name: Timing(min(times), statistics.median(times), len(times)) for name, times in parts.items()}

    def _on_a_gpu(self, cases: dict[Any, Case]) -> dict[Any, list[float]]:
        from triton.testing import do_bench

        options = {"rep": 1000 * self.seconds / len(cases), "return_mode": "all"}
        return {name: [ms / 1000 for ms in do_bench(case.call, **options)] for name, case in cases.items()}

    def _in_turns(self, cases: dict[Any, Case]) -> dict[Any, list[float]]:
        samples: dict[Any, list[float]] = {}
        repeats, turn = {}, 1e-7
        for name, case in cases.items():
            if time.perf_counter() < self.end:
                _sample(case)
                samples[name] = [max(_sample(case), 1e-7)]
                wanted = 0.0 if case.prepare else min(_SECONDS_PER_SAMPLE, self.seconds / _LEAST_SAMPLES)
                repeats[name] = max(1, int(wanted / samples[name][0]))
                turn += repeats[name] * samples[name][0]
        turns = range(min(max(int(self.seconds / turn), _LEAST_SAMPLES), self.most))
        for index, name in itertools.product(turns, samples):
            if time.perf_counter() < self.end:
                samples[name] = samples[name] * (index > 0) + [_sample(cases[name], repeats[name])]
        return samples


def _sample(case: Case, repeats: int = 1) -> float:
    """Seconds of a call on a CPU."""
    arguments = () if case.prepare is None else (case.prepare(),)
    return timeit.timeit(lambda: case.call(*arguments), timer=time.perf_counter, number=repeats) / repeats


class NotRecordable(RuntimeError):
    """A call that cannot be a CUDA graph; says why."""


def in_cuda_graph(call: Call) -> Call:
    """Record a call as a CUDA graph on the current stream, where its leaves must have been used first, for autograd."""
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
    versions = {"dcformer": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    place = {"device": str(device), "hardware": device_name(device)}
    numbers = {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
    return versions | place | numbers | ({"cuda": torch.version.cuda} if device.type == "cuda" else {})


@dataclasses.dataclass
class Run:
    """One run of a command: device, sizes, timers, and the report; nothing new is started after `seconds`."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    is_quick: bool = False
    seconds: float = math.inf
    json: Path | None = None
    args: argparse.Namespace = dataclasses.field(default_factory=argparse.Namespace)
    threads: list[int] = dataclasses.field(default_factory=lambda: [torch.get_num_threads()])  # of turns on a CPU
    rows: list[Row] = dataclasses.field(default_factory=list)
    problems: dict[Hashable, str | None] = dataclasses.field(default_factory=dict)  # of candidates, by what was checked

    def __post_init__(self) -> None:
        self.compiles = self.device.type == "cuda"  # whether what needs torch.compile takes part
        self.end = time.perf_counter() + self.seconds
        self.timer = Timer(self.device, seconds=0.02 if self.is_quick else 0.3, end=self.end)
        self.turns = Timer(self.device, *((0.1, 3) if self.is_quick else (6.0, 10)), end=self.end)

    def compare(
        self, group: str, entries: Iterable[Entry], ratios: Mapping[str, str] = {}, in_turns: bool = False
    ) -> None:
        """Measure rows one after another, or in turns on a CPU; `ratios` titles multiples of the times of rows."""
        if not (in_turns and self.device.type == "cpu"):
            for entry in entries:
                self._attempt(row := Row(group, entry.name), entry, self._timed)
                self._add([row], ratios)
            return
        rows = {entry: Row(group, entry.name) for entry in entries}
        made = {row.name: self._attempt(row, entry, lambda _, case: case) for entry, row in rows.items()}
        cases, before = {name: case for name, case in made.items() if case is not None}, torch.get_num_threads()
        for number in self.threads:
            torch.set_num_threads(number)
            timings = self.turns(cases)
            torch.set_num_threads(before)
            late, timed = cases.keys() - timings.keys(), []
            for name, row in ((row.name, row) for row in rows.values()):
                changes = {"timing": timings.get(name), "figures": dict(row.figures)}
                changes["note"] = self._late() if name in late else row.note
                timed.append(dataclasses.replace(row, group=f"{group}, {number} threads", **changes))
            self._add(timed, ratios)

    def _late(self) -> str:
        return f"not measured: the {self.seconds:g} seconds were over"

    def _attempt(self, row: Row, entry: Entry, use: Callable[[Row, Case], Any]) -> Any:
        """Make and use what an entry measures; why there are no figures, and what is raised, is noted in its row."""
        try:
            made = self._late() if time.perf_counter() >= self.end else entry.make()
            if isinstance(made, Case):
                row.figures |= made.figures
                return use(row, made)
            if isinstance(made, dict):
                row.figures |= made
            else:
                row.note, row.has_failed = made, entry.is_ours and not made.startswith("not measured")
        except NotRecordable as error:
            row.note = str(error)
        except torch.OutOfMemoryError:
            row.note = "not measured: it does not fit into the device's memory"
        except Exception as error:  # whatever the code that is compared may raise
            row.note, row.has_failed = f"failed: {one_line(error)}", entry.is_ours
        finally:
            torch.cuda.empty_cache()
        return None

    def _timed(self, row: Row, case: Case) -> None:
        """Time a case as it is called, and on a GPU as a graph."""
        row.timing = self.timer({"": case}).get("")
        if row.timing is None:
            row.note = self._late()
            return
        if self.device.type == "cuda":
            row.figures[AS_CALLED], row.timing = 1000 * row.timing.median, None
            row.timing = self.timer({"": case._replace(call=in_cuda_graph(case.call))})[""]
        row.figures |= {name: amount / self._seconds(row) for name, amount in case.rates.items()}

    def _add(self, rows: list[Row], ratios: Mapping[str, str]) -> None:
        """Print rows of a group, and write them with those before."""
        if not self.rows or self.rows[-1].group != rows[0].group:
            print(rows[0].group)
        self.rows += rows
        timed = [row for row in self.rows if row.group == rows[0].group and row.timing]
        for base in (row for row in timed if row.name in ratios):
            for row in timed:
                row.figures[ratios[base.name]] = self._seconds(row) / self._seconds(base)
        print(*(f"  {row}" for row in rows), sep="\n", flush=True)
        if self.json is not None:
            self.write(self.json)

    def _seconds(self, row: Row) -> float:
        """The time of a call: the median of the samples, or on a CPU, which has other work too, the shortest."""
        return row.timing.minimum if self.device.type == "cpu" else row.timing.median

    def write(self, path: Path) -> None:
        """Write all rows, and the figures once more by group and name."""
        figures: dict[str, dict] = {}
        for row in self.rows:
            figures.setdefault(row.group, {})[row.name] = row.figures
        settings = {"dtype": self.dtype, "quick": self.is_quick, "seconds": self.seconds}
        content = {"command": " ".join(sys.argv), "environment": environment(self.device), "settings": settings}
        content |= {"arguments": vars(self.args), "figures": figures}
        content["rows"] = [{**vars(row), "timing": row.timing and row.timing._asdict()} for row in self.rows]
        path.parent.resolve().mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")


def run_command(
    description: str | None, registry: Sequence[Benchmark], arguments: list[str] | None = None, **settings: Any
) -> int:
    """
    Measure the rows of a registry that are asked for; the exit status is 1 if something was wrong or raised.

    `settings` are defaults of `device` and `seconds`, and `options` for the parser.
    """
    device, seconds = settings.get("device"), settings.get("seconds", 300.0)
    lines = [f"  {row.name}: {row.what}; beside {row.baseline}; checked against {row.check}" for row in registry]
    description = "\n".join([description or "", "rows of the registry:", *lines])
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    names, place = list(dict.fromkeys(row.name for row in registry)), device or "the first GPU, else the CPU"
    parser.add_argument("--only", action="append", choices=names, help="measure this alone; may be repeated")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that everything runs")
    parser.add_argument(
        "--seconds", type=float, default=seconds, help=f"start nothing new after these (default: {seconds:g})"
    )
    parser.add_argument("--device", default=device, help=f"default: {place}")
    parser.add_argument("--threads", type=int, nargs="+", help="numbers of threads on a CPU (default: torch's)")
    parser.add_argument("--json", type=Path, help="file for all rows, written after each")
    for name, details in settings.get("options", {}).items():
        parser.add_argument(name, **details)
    args = parser.parse_args(arguments)
    if args.json is not None and args.json.is_dir():
        parser.error(f"{str(args.json)!r} is a folder; give a file for the figures")
    chosen = choose_device(args.device)
    dtype = torch.bfloat16 if chosen.type == "cuda" else torch.float32
    run = Run(chosen, dtype, args.quick, args.seconds, args.json, args, args.threads or [torch.get_num_threads()])
    print(f"{device_name(chosen)}, torch {torch.__version__}", flush=True)
    # All on one stream: what autograd keeps of the default one could not be recorded as a CUDA graph.
    with torch.cuda.stream(torch.cuda.Stream(chosen) if chosen.type == "cuda" else None):
        for benchmark in registry:
            for shape in benchmark.shapes(run) if benchmark.name in (args.only or names) else ():
                benchmark.measure(run, shape)
    failed = [f"{row.group}: {row.name}" for row in run.rows if row.has_failed]
    if failed:
        print(f"{len(failed)} of {len(run.rows)} rows failed, the first is {failed[0]!r}.")
    return int(bool(failed))


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, relative to that of the expected values."""
    expected = expected.detach().double()
    return float((result.detach().double() - expected).norm() / expected.norm().clamp(min=1e-30))


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
