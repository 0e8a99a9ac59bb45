"""What the CPU benchmarks find: times, and rows that compare two of them with a target and a bound. Rendered as tables.

    python -m benchmarks.results benchmarks/results/cpu.json

prints the results that `python -m benchmarks.cpu --json` has written, as Markdown.
"""

import argparse
import dataclasses
import json
import math
from pathlib import Path

from . import common


@dataclasses.dataclass(frozen=True)
class Time:
    """
    The time of one of the things compared.

    Args:
        section (`str`): What was measured, such as "forward".
        case (`str`): Shape and type.
        name (`str`): Who computed it.
        threads (`int`): Threads of torch.
        timing (`common.Timing`): Seconds.
    """

    section: str
    case: str
    name: str
    threads: int
    timing: common.Timing


@dataclasses.dataclass(frozen=True)
class Row:
    """
    One figure beside its target.

    Args:
        section, case (`str`): As in [`Time`].
        measure (`str`): What the figure is, such as "time / sdpa".
        threads (`int`): Threads of torch; 0 where they play no part.
        ratio (`float`): The figure, of the least times.
        median (`float`): The same of the medians.
        processor (`float`): The same of the least processor times.
        target (`float`, *optional*): What is wanted, at most or, where more is better, at least.
        more_is_better (`bool`): Whether the figure is a speed, not a time.
        bounds (`dict`): Form of the composition -> the figure if the composition took its least time in that form, and
            all else what it takes in the other side of the comparison.
    """

    section: str
    case: str
    measure: str
    threads: int
    ratio: float
    median: float
    processor: float
    target: float | None = None
    more_is_better: bool = False
    bounds: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def is_met(self) -> bool | None:
        """Whether the figure reaches the target, None without one."""
        if self.target is None:
            return None
        return self.ratio >= self.target if self.more_is_better else self.ratio <= self.target


@dataclasses.dataclass
class Findings:
    """Times, rows and what else a section says of the machine, such as rates in Gflop/s and GB/s."""

    times: list[Time] = dataclasses.field(default_factory=list)
    rows: list[Row] = dataclasses.field(default_factory=list)
    rates: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)

    def add(self, other: "Findings") -> None:
        self.times += other.times
        self.rows += other.rows
        self.rates.update(other.rates)


def time_ratio(ours: common.Timing, other: common.Timing, factor: float = 1.0) -> dict[str, float]:
    """`ours` as a multiple of `other`, by minima, medians and processor time, as fields of a [`Row`]."""
    return {
        "ratio": factor * ours.minimum / other.minimum,
        "median": factor * ours.median / other.median,
        "processor": factor * ours.processor_minimum / other.processor_minimum,
    }


ROW_COLUMNS = ["what", "threads", "figure", "target", "met", "bound", "median", "processor time"]
TIME_COLUMNS = ["case", "name", "threads", "min ms", "median ms", "processor ms"]


def row_cells(row: Row) -> list[str]:
    target = "" if row.target is None else f"{'>=' if row.more_is_better else '<='} {row.target:.3g}"
    met = {None: "", True: "yes", False: "no"}[row.is_met]
    bounds = ", ".join(f"{value:.2f} {name}" for name, value in row.bounds.items())
    what = f"{row.section}: {row.case}: {row.measure}"
    threads = str(row.threads) if row.threads else ""
    return [what, threads, _figure(row.ratio), target, met, bounds, _figure(row.median), _figure(row.processor)]


def time_cells(time: Time) -> list[str]:
    values = (time.timing.minimum, time.timing.median, time.timing.processor_minimum)
    return [time.case, time.name, str(time.threads), *(f"{1000 * value:.2f}" for value in values)]


def _figure(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}"


def to_markdown(content: dict) -> str:
    """What `python -m benchmarks.cpu --json` wrote, as Markdown: rows with targets first, then all rows and times."""
    rows = [Row(**row) for row in content["rows"]]
    times = [Time(**{**time, "timing": common.Timing(**time["timing"])}) for time in content["times"]]
    parts = [", ".join(f"{name} {value}" for name, value in content["environment"].items()) + "."]
    if content["rates"]:
        parts.append("\n".join(f"- {_rates_line(name, rates)}" for name, rates in content["rates"].items()))
    for title, chosen in (
        ("Targets", [row for row in rows if row.target is not None]),
        ("Other comparisons", [row for row in rows if row.target is None]),
    ):
        if chosen:
            parts += [f"### {title}", markdown_table(ROW_COLUMNS, [row_cells(row) for row in chosen])]
    for section in dict.fromkeys(time.section for time in times):
        chosen = [time_cells(time) for time in times if time.section == section]
        parts += [f"### Times: {section}", markdown_table(TIME_COLUMNS, chosen)]
    return "\n\n".join(parts) + "\n"


def markdown_table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _rates_line(name: str, rates: dict[str, float]) -> str:
    return (
        f"{name}: matrix products {rates['flops'] / 1e9:.0f} Gflop/s, copies {rates['memory_bytes'] / 1e9:.1f} GB/s in "
        f"memory and {rates['cache_bytes'] / 1e9:.1f} in cache, reading {rates['read_bytes'] / 1e9:.1f} GB/s"
    )


def show(findings: Findings) -> None:
    """Print the machine's rates and all rows, those with targets in a table of their own at the end."""
    for name, rates in findings.rates.items():
        print(_rates_line(name, rates))
    for has_target in (False, True):
        rows = [row_cells(row) for row in findings.rows if (row.target is not None) == has_target]
        if rows:
            common.show_table(["targets" if has_target else "other comparisons", *ROW_COLUMNS[1:]], rows)


def to_json(findings: Findings) -> dict:
    return {
        "rates": findings.rates,
        "rows": [dataclasses.asdict(row) for row in findings.rows],
        "times": [{**dataclasses.asdict(time), "timing": time.timing._asdict()} for time in findings.times],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="JSON file written by benchmarks.cpu")
    args = parser.parse_args()
    print(to_markdown(json.loads(args.file.read_text(encoding="utf-8"))), end="")


if __name__ == "__main__":
    main()
