"""
The time of each Triton kernel on a GPU, and of those that compose with other tiles: `python -m benchmarks.gpu_kernels`.

Every setting is checked before it is timed, except decoding, which `dcformer bench decode` checks: output and gradients
of a shorter text in bfloat16 against plain PyTorch in float32. A kernel's time is the median between two events, with
the launches queued behind a sleep of the device, so that the host is ahead of it, and the L2 cache overwritten before.
Without a GPU `--quick` runs tiny shapes in Triton's interpreter, where times mean nothing.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcformer.bench.attention import Shape
from dcformer.bench.candidates import relative_error
from dcformer.bench.operands import Operands, prompt_operands, step_operands
from dcformer.dcmha import Visibility
from dcformer.kernels.call import Call
from dcformer.kernels.triton import attention_backward as backward
from dcformer.kernels.triton import attention_decode as decode
from dcformer.kernels.triton import attention_forward as forward
from dcformer.kernels.triton import backend as ops
from dcformer.kernels.triton import composing
from dcformer.kernels.triton import layout as plan
from dcformer.training import visible_pairs
from dcformer.types_dcformer import AttentionInputs


class Setting(NamedTuple):
    """As in `plan.TILES`, and `plan.COMPOSE_M`."""

    scores: int = 2048
    keys: int = 64
    warps: int = 4
    stages: int = 4
    rows: int = 64


SHAPES = [
    Shape(32, 128, 2048),
    Shape(32, 128, 2048, 256),
    Shape(16, 64, 2048),
    Shape(32, 128, 2048, 256, batch=4),
    Shape(40, 128, 2048),
    Shape(32, 128, 8192),
]
SETTINGS = [
    Setting(),
    Setting(stages=3),
    Setting(stages=6),
    Setting(rows=32),
    Setting(rows=128),
    Setting(4096, 128, 8),
    Setting(1024, 32, 2, 3),
    Setting(1024, 32, 2, 3, 32),
    Setting(512, 16, 1, 3),
]
TOLERANCE = 6e-2  # of gradients in bfloat16
WORKSPACES = ops.FORWARD_BYTES, ops.BACKWARD_BYTES


def calls(of: Operands, window: int | None) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The forward pass and the backward pass alone, without autograd."""
    mask = Visibility(of.query.shape[2], of.key.shape[2], sliding_window=window)
    call = Call.of(AttentionInputs(*of, of.query.shape[3] ** -0.5, mask)).with_channels_last()
    upstream = torch.randn_like(of.query)
    _, log_sums = forward.composed_forward(call, WORKSPACES[0])
    return (
        lambda: forward.composed_forward(call, WORKSPACES[0]),
        lambda: backward.composed_backward(upstream, call, log_sums, WORKSPACES[1]),
    )


def largest_error(shape: Shape, device: torch.device) -> float:
    """Of output and gradients, relative to those of PyTorch in float32."""
    of = prompt_operands(*shape[:2], 320 if device.type == "cuda" else 40, device, number_type(device)).leaves()
    exact = of.leaves(dtype=torch.float32)
    upstream = torch.randn_like(of.query)
    results: list[list[Tensor]] = []
    for operands, name in ((of, "triton"), (exact, "plain")):
        output = operands.composed(implementation=name, sliding_window=shape.window)
        results.append([output, *torch.autograd.grad(output, operands.tensors, upstream.to(output.dtype))])
    return float(torch.tensor([relative_error(*pair) for pair in zip(*results)]).max())  # NaN if one is


def number_type(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter's products know no bfloat16


def kernel_times(call: Callable[[], Any], device: torch.device, repeats: int = 5) -> dict[str, list[float]]:
    """Microseconds of each launch of each kernel of a call, and of what PyTorch runs between them."""
    kind = type(composing._weights_kernel)  # compiled or interpreted
    run = kind.run
    marks: list[tuple[str, Any]] = []

    def mark(name: str) -> None:
        if device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        marks.append((name, event if device.type == "cuda" else time.perf_counter()))

    def marked(self: Any, *arguments: Any, **options: Any) -> Any:
        mark(self.fn.__name__)
        result = run(self, *arguments, **options)
        mark("(torch)")
        return result

    call()
    samples: list[dict[str, list[float]]] = []
    kind.run = marked
    try:
        for _ in range(repeats if device.type == "cuda" else 1):
            marks.clear()
            if device.type == "cuda":
                torch.empty(2**28, dtype=torch.int8, device=device).zero_()
                torch.cuda._sleep(20_000_000)
            mark("(torch)")
            call()
            mark("(end)")
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            sample: dict[str, list[float]] = {}
            for (name, begin), (_, end) in itertools.pairwise(marks):
                spent = 1e3 * begin.elapsed_time(end) if device.type == "cuda" else 1e6 * (end - begin)
                sample.setdefault(name, []).append(spent)
            samples.append(sample)
    finally:
        kind.run = run
    launches = {name: zip(*(sample[name] for sample in samples)) for name in samples[0]}
    return {name: [round(statistics.median(spent), 1) for spent in times] for name, times in launches.items()}


@contextmanager
def applied(setting: Setting) -> Iterator[None]:
    """Kernels that compose take these tiles."""
    before = plan.TILES["hopper"], plan.COMPOSE_M, plan.is_hopper
    plan.TILES["hopper"], plan.COMPOSE_M, plan.is_hopper = setting[:4], setting.rows, lambda _: True
    try:
        yield
    finally:
        plan.TILES["hopper"], plan.COMPOSE_M, plan.is_hopper = before


def measure(device: torch.device, shapes: list[Shape], settings: list[Setting], seconds: float) -> Iterator[dict]:
    """A row for each kernel, the usual setting of all shapes first."""
    end = time.monotonic() + seconds
    cases = [(shape, None) for shape in shapes]
    cases += [(shape, setting) for setting in settings for shape in shapes[:3]]
    for shape, setting in cases:
        about = {"shape": shape._asdict(), "setting": setting and setting._asdict()}
        if time.monotonic() > end:
            yield {**about, "note": "not measured: the time is over"}
            continue
        with applied(setting or Setting(*plan.TILES["hopper"], plan.COMPOSE_M)):
            try:
                if not (error := largest_error(shape, device)) < TOLERANCE:
                    raise ValueError(f"wrong values, off by {error}")
                of = prompt_operands(*shape[:3], device, number_type(device), shape.batch)
                passes = zip(("forward", "backward"), calls(of, shape.window))
                measured = [(name, kernel_times(call, device)) for name, call in passes]
            except Exception as problem:  # what a setting asks for may not fit the device
                yield {**about, "note": f"failed: {' '.join(str(problem).split())[:200]}"}
                continue
        scores = shape.batch * shape.heads * visible_pairs(shape.length, shape.window)
        for name, times in measured:
            for kernel, spent in times.items():
                row = {"pass": name, "kernel": kernel, "microseconds": spent, "error": error}
                yield {**about, **row, "picoseconds a score": round(1e6 * sum(spent) / scores, 2)}
    for shape in shapes[:2]:
        of = step_operands(*shape[:2], min(shape.length, 1040), device, number_type(device))
        mask = Visibility(1, of.key.shape[2], sliding_window=shape.window)
        call = Call.of(AttentionInputs(*of, shape.channels**-0.5, mask))
        for kernel, spent in kernel_times(lambda call=call: decode.composed_decode(call), device).items():
            yield {"shape": shape._asdict(), "setting": None, "pass": "decode", "kernel": kernel, "microseconds": spent}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny shapes; on a CPU with TRITON_INTERPRET=1")
    parser.add_argument("--seconds", type=float, default=240, help="after which nothing more is started")
    parser.add_argument("--json", type=Path, help="where to write all rows")
    chosen = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("there is no CUDA device; --quick with TRITON_INTERPRET=1 shows that everything runs")
    shapes, settings = ([Shape(2, 16, 24, 8)], [Setting(256, 16)]) if chosen.quick else (SHAPES, SETTINGS)
    rows = []
    for row in measure(device, shapes, settings, chosen.seconds):
        rows.append(row)
        print(*(f"{key} {value}" for key, value in row.items() if value is not None), sep=", ", flush=True)
        if chosen.json is not None:  # after each row: what is cut off has been written
            name = torch.cuda.get_device_name() if device.type == "cuda" else "interpreter"
            chosen.json.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": rows}, indent=0))
    if any(row.get("note", "").startswith("failed") for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
