"""`dcformer bench tune`: searches tile sizes, warps and stages of the Triton kernels and keeps the fastest.

Operators say themselves what can be tuned, see `dcformer.ops.tuning`. Kernels of an operator are tuned one after the
other, each with what has been found for those before it. A configuration counts only if the operator computes with it
what it computes with its default ones.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..ops import tuning
from .context import Context
from .gate import relative_error
from .machine import device_name
from .report import Row, one_line


# What is tuned besides the shape that was asked for: the published models' heads and channels.
_SHAPES = ((32, 128), (32, 80))
# Another tiling sums in another order: a few units in the last place of 16 bits.
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}

Config = dict[str, int]
Example = Callable[[dict[str, Config]], Any]


def tunable_operators() -> list[ModuleType]:
    """The modules of `dcformer.ops` that say what can be tuned; those that need a missing Triton are left out."""
    found = []
    for module in pkgutil.iter_modules(ops.__path__):
        try:
            operator = importlib.import_module(f"{ops.__name__}.{module.name}")
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "triton":
                raise
            continue
        if hasattr(operator, "KERNELS") and hasattr(operator, "tuning_example"):
            found.append(operator)
    return found


def tune_operator(context: Context, operator: ModuleType, heads: int, channels: int) -> list[tuning.Entry]:
    """Rows of every configuration of every kernel of one operator at one shape; the fastest of each as entries."""
    operator_name = operator.__name__.rpartition(".")[2]
    kernels: dict[str, Sequence[Config]] = operator.KERNELS
    call: Example = operator.tuning_example(heads, channels, context.dtype, context.device)
    expected = _tensors(call({}))
    best: dict[str, Config] = {}
    entries: list[tuning.Entry] = []
    for kernel, candidates in kernels.items():
        group = f"tune: {operator_name}, {kernel}, H {heads}, D {channels}"
        timed: list[tuple[float, Config]] = []
        for config in candidates:
            chosen = {**best, kernel: config}
            row = _candidate_row(context, group, config, functools.partial(call, chosen), expected)
            if row.seconds is not None:
                timed.append((row.seconds, config))
        # Of a search that was cut short nothing is kept: the best of the first few would hide the rest.
        if timed and not context.budget.is_over:
            seconds, best[kernel] = min(timed, key=lambda pair: pair[0])
            entries.append({"heads": heads, "channels": channels, "kernel": kernel, **best[kernel], "time": seconds})
    return entries


def _candidate_row(
    context: Context, group: str, config: Config, call: Callable[[], Any], expected: list[Tensor]
) -> Row:
    """A configuration that needs more of the device than there is cannot run, which is no failure; wrong values are."""
    name = ", ".join(f"{key} {value}" for key, value in config.items())
    if context.budget.is_over:
        return context.report.add(Row(group, name, note=context.no_time_left))
    try:
        found = _tensors(call())
    except Exception as error:
        if type(error).__name__ != "OutOfResources":  # Triton's, which may not be installed
            return context.report.add(Row(group, name, note=f"failed: {one_line(error)}", has_failed=True))
        return context.report.add(Row(group, name, note=f"not measured: {one_line(error)}"))
    for tensor, right in zip(found, expected):
        if not (error_found := relative_error(tensor, right)) <= _TOLERANCES[context.dtype]:
            note = f"output is wrong: it is {error_found:.1e} from that of the default configurations"
            return context.report.add(Row(group, name, note=note, has_failed=True))
    return context.timed(group, name, lambda: call)


def _tensors(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else [tensor for tensor in output if tensor is not None]


def run(context: Context, heads: int, channels: int, output: Path | None) -> None:
    """
    Tune every operator for the published shapes and the one that was asked for, and write what was found.

    Args:
        heads, channels (`int`): The shape that comes first.
        output (`Path`, *optional*): The file; the user's own unless given.
    """
    operators = tunable_operators()
    if not operators:
        context.report.note("There is no kernel to tune: no operator says what can be tuned, or Triton is missing.")
        return
    path = output or tuning.user_file()
    tuning.load_configurations(path)  # a file that holds something else is found before the search, not after it
    shapes = [(heads, channels)]
    if not context.is_quick:
        shapes += [shape for shape in _SHAPES if shape not in shapes]
    written = 0
    for shape in shapes:
        for operator in operators:
            if context.budget.is_over:
                context.report.note(f"{operator.__name__} was not tuned for H {shape[0]}, D {shape[1]}: no time left.")
                continue
            with torch.no_grad():
                entries = tune_operator(context, operator, *shape)
            if entries:
                tuning.save_configurations(path, device_name(context.device), entries)
                written += len(entries)
    context.report.note(f"{written} configurations were written to {path}.")
