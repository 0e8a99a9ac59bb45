"""All that is wanted of DCFormer's speed on CPUs, in one run: every figure with its target, its bound and the machine.

    python -m benchmarks.cpu --quick
    python -m benchmarks.cpu --json benchmarks/results/cpu.json
    python -m benchmarks.cpu --only decode --only compiled --threads 1

What is compared runs in turns in one process, at every number of threads. Figures of two threads need a machine of at
least two cores that does nothing else.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from . import common, cpu_model, cpu_once, cpu_operator, results
from .cpu_options import CPU, Options


# What can be measured by itself, in the order of the table.
SECTIONS: dict[str, Callable[[Options], results.Findings]] = {
    "decode": cpu_model.decode,
    "compiled": cpu_model.compiled,
    "prefill": cpu_model.prefill,
    "training": cpu_model.training_step,
    "forward": cpu_operator.forward,
    "backward": cpu_operator.backward,
    "decode-operator": cpu_operator.decode_operator,
    "packed": cpu_operator.packed,
    "graphs": cpu_once.graphs,
    "command": cpu_once.command,
}
_QUICK, _FULL = (3, 10.0), (10, 40.0)  # turns, and seconds after which no further turn begins


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few minutes: only what has a target, and fewer turns")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="measure this alone; may be repeated")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads (1 and 2)")
    parser.add_argument("--repeats", type=int, help=f"turns at most ({_FULL[0]}, with --quick {_QUICK[0]})")
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"no further turn of a comparison begins after this long ({_FULL[1]:.0f}, with --quick {_QUICK[1]:.0f})",
    )
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse_arguments()
    repeats, seconds = _QUICK if args.quick else _FULL
    options = Options(args.quick, tuple(args.threads), args.repeats or repeats, args.seconds or seconds)
    common.show_environment(CPU)
    if os.getloadavg()[0] > 0.5:
        print(f"Other processes are running (load {os.getloadavg()[0]:.1f}): figures of two threads mean little.")
    torch.set_num_threads(max(options.threads))
    findings = results.Findings()
    for name in args.only or SECTIONS:
        start = time.perf_counter()
        findings.add(SECTIONS[name](options))
        write(findings, args)
        print(f"{name}: measured in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    results.show(findings)
    wanted = [row for row in findings.rows if row.target is not None]
    print(f"{sum(row.is_met for row in wanted)} of {len(wanted)} targets are reached.")


def write(findings: results.Findings, args: argparse.Namespace) -> None:
    """Write what has been found so far, so that a run that is cut short leaves it."""
    if args.json is None:
        return
    args.json.parent.mkdir(parents=True, exist_ok=True)
    content = {"environment": common.environment(CPU), "arguments": vars(args), **results.to_json(findings)}
    args.json.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
