"""One run of the benchmarks: which part, on which device, and what becomes of its rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from .. import public  # noqa: F401  # registers the models, and all forms of the operator
from ..dcmha import ComposeSide, ComposeWeights, Visibility, explain_choice, implementations
from . import attention, decode, model, train
from .context import Context
from .machine import DTYPES, chosen_device, device_name
from .options import Options
from .report import Report, default_path
from .timing import Budget, Timer


_QUICK_SECONDS_PER_ROW = 0.02
_BENCHMARKS: dict[str, Callable[[Context], None]] = {
    "attention": attention.run,
    "decode": decode.run,
    "train": train.run,
    "model": model.run,
}


def run_command(options: Options) -> int:
    """
    Do what the options say, print it, and write it to files.

    Returns:
        `int`: the exit status: 1 if something computed wrong values or broke off, else 0.

    Raises:
        ValueError: if there is no such device or number type.
    """
    device = chosen_device(options.device)
    dtype = _dtype(options.dtype, device)
    if options.explain:
        for line in _explained(options, device, dtype):
            print(line)
        return 0
    settings = {name: value for name, value in dataclasses.asdict(options).items() if value is not None}
    report = Report(str(options.what), device, settings | {"dtype": str(dtype).removeprefix("torch.")})
    compiles = device.type == "cuda" if options.compile is None else options.compile
    timer = Timer(device, **({"seconds": _QUICK_SECONDS_PER_ROW} if options.quick else {}))
    context = Context(device, dtype, options.quick, compiles, report, timer, Budget(options.seconds))
    print(f"{options.what} on {device_name(device)}, torch {torch.__version__}, {report.settings['dtype']}", flush=True)
    _BENCHMARKS[str(options.what)](context)
    report.show()
    _write(report, options)
    return 1 if report.has_failed else 0


def _write(report: Report, options: Options) -> None:
    path = options.json or default_path(report.command, report.device, options.quick)
    report.write(path)
    print(f"All figures are in {path}.")
    plot: Path = options.plot or path.with_suffix(".png")
    missing = report.plot(plot)
    print(missing or f"The picture is {plot}.")
    failed = [f"{row.group}: {row.name}" for row in report.rows if row.has_failed]
    if failed:
        print(f"{len(failed)} of {len(report.rows)} rows failed, the first is {failed[0]!r}.")


def _dtype(name: str | None, device: torch.device) -> torch.dtype:
    if name is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {name!r}.")
    return DTYPES[name]


def _explained(options: Options, device: torch.device, dtype: torch.dtype) -> list[str]:
    """What each implementation says of a shape, and which is chosen; the kernels are compared with the plain form."""
    heads, queries, keys = options.heads, options.queries, options.keys or options.queries
    shapes = [(heads, queries), *[(options.key_value_heads or heads, keys)] * 2]
    states = [torch.zeros(1, *shape, options.channels, dtype=dtype, device=device) for shape in shapes]
    sides = [
        ComposeSide(
            factors=torch.zeros(1, heads, length, 5, dtype=dtype, device=device).requires_grad_(options.gradient)
        )
        for length in (queries, keys)
    ]
    arguments = (*states, ComposeWeights(*sides), ComposeWeights(*sides))
    mask = Visibility(queries, keys, sliding_window=options.window)
    tried = dict(explain_choice(*arguments, attention_mask=mask))
    lines = []
    for name, implementation in implementations().items():
        reason = tried.get(name) or implementation.supports(*arguments, mask=mask, dropout=0.0)
        chosen = name in tried and tried[name] is None
        lines.append(f"{name}: {'is chosen' if chosen else reason or 'can run if it is named'}")
    return lines
