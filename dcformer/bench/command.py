"""One run of the benchmarks: which part, on which device, and what becomes of its rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from .. import public  # noqa: F401  # registers the models, and all forms of the operator
from . import attention, decode, model, train, tune
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
    if options.what == "tune":
        tune.run(context, options.heads, options.channels, options.output)
    else:
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
    from ..gpu.explanation import explain_lines

    lines: list[str] = explain_lines(
        heads=options.heads,
        key_value_heads=options.key_value_heads or options.heads,
        channels=options.channels,
        queries=options.queries,
        keys=options.keys or options.queries,
        window=options.window,
        dtype=dtype,
        device=device,
        needs_gradient=options.gradient,
    )
    return lines
