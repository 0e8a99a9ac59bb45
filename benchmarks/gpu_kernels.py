"""The time of each Triton kernel on a GPU, and of those that compose with other tiles: what decides `tuning.TILES`.

Output and gradients of a shorter text in bfloat16 are checked against plain PyTorch in float32; decoding is checked by
`benchmarks.models`. A kernel's time is the median between two events, with the launches queued behind a sleep of the
device, so that the host is ahead of it, and the L2 cache overwritten before. On a CPU `--quick` with TRITON_INTERPRET=1
runs tiny shapes in Triton's interpreter, where times mean nothing.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from dcformer.kernels.call import Call
from dcformer.kernels.triton import attention_backward as backward
from dcformer.kernels.triton import attention_decode as decode
from dcformer.kernels.triton import attention_forward as forward
from dcformer.kernels.triton import triton_backend as ops
from dcformer.kernels.triton import tuning
from dcformer.training import visible_pairs
from dcformer.types_dcformer import AttentionInputs
from dcformer.visibility_dcformer import Visibility

from .attention import Operands, Shape, prompt_operands, step_operands
from .measure import Benchmark, Entry, Run, relative_error, run_command


class Setting(NamedTuple):
    """The tiles of kernels that compose, as in `tuning.TILES`, and `tuning.COMPOSE_M`."""

    scores: int = 2048
    keys: int = 64
    warps: int = 4
    stages: int = 4
    rows: int = 64

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self._asdict().items())


SHAPES = [
    *(Shape(32, 128, 2048), Shape(32, 128, 2048, 256), Shape(16, 64, 2048)),
    *(Shape(32, 128, 2048, 256, batch=4), Shape(40, 128, 2048), Shape(32, 128, 8192)),
]
SETTINGS = [
    *(Setting(), Setting(stages=3), Setting(stages=6), Setting(rows=32), Setting(rows=128), Setting(4096, 128, 8)),
    *(Setting(1024, 32, 2, 3), Setting(1024, 32, 2, 3, 32), Setting(512, 16, 1, 3)),
]
TOLERANCE = 6e-2  # of gradients in bfloat16


def calls(of: Operands, window: int | None) -> list[Callable[[], Any]]:
    """The forward pass and the backward pass alone, without autograd."""
    mask = Visibility(of.query.shape[2], of.key.shape[2], sliding_window=window)
    call = Call.of(AttentionInputs(*of, of.query.shape[3] ** -0.5, mask)).with_channels_last()
    run_forward = partial(forward.composed_forward, call, ops.FORWARD_BYTES)
    upstream, log_sums = torch.randn_like(of.query), run_forward()[1]
    return [run_forward, partial(backward.composed_backward, upstream, call, log_sums, ops.BACKWARD_BYTES)]


def largest_error(shape: Shape, device: torch.device) -> float:
    """The largest error of output and gradients, relative to those of PyTorch in float32."""
    of = prompt_operands(*shape[:2], 320 if device.type == "cuda" else 40, device, number_type(device)).leaves()
    upstream, results = torch.randn_like(of.query), []
    for operands, name in ((of, "triton"), (of.leaves(dtype=torch.float32), "plain")):
        output = operands.composed(implementation=name, sliding_window=shape.window)
        results.append([output, *torch.autograd.grad(output, operands.tensors, upstream.to(output.dtype))])
    return float(torch.tensor([relative_error(*pair) for pair in zip(*results)]).max())  # NaN if one is


def number_type(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter's products know no bfloat16


def kernel_times(call: Callable[[], Any], device: torch.device, repeats: int = 5) -> dict[str, list[float]]:
    """Microseconds of each launch of each kernel of a call, and of what PyTorch runs between them."""
    kind, is_cuda = type(forward.weights_fwd_kernel), device.type == "cuda"  # compiled or interpreted
    run = kind.run
    marks: list[tuple[str, Any]] = []

    def mark(name: str) -> None:
        marks.append((name, torch.cuda.Event(enable_timing=True) if is_cuda else time.perf_counter()))
        if is_cuda:
            marks[-1][1].record()

    def marked(self: Any, *arguments: Any, **options: Any) -> Any:
        mark(self.fn.__name__)
        result = run(self, *arguments, **options)
        mark("(torch)")
        return result

    call()
    samples: list[dict[str, list[float]]] = []
    kind.run = marked
    try:
        for _ in range(repeats if is_cuda else 1):
            marks.clear()
            if is_cuda:
                torch.empty(2**28, dtype=torch.int8, device=device).zero_()
                torch.cuda._sleep(20_000_000)
            mark("(torch)")
            call()
            mark("(end)")
            if is_cuda:
                torch.cuda.synchronize(device)
            samples.append({})
            for (name, begin), (_, end) in itertools.pairwise(marks):
                spent = 1e3 * begin.elapsed_time(end) if is_cuda else 1e6 * (end - begin)
                samples[-1].setdefault(name, []).append(spent)
    finally:
        kind.run = run
    launches = {name: zip(*(sample[name] for sample in samples)) for name in samples[0]}
    return {name: [round(statistics.median(spent), 1) for spent in times] for name, times in launches.items()}


@contextmanager
def applied(setting: Setting) -> Iterator[None]:
    """Within the block, kernels that compose take the tiles of a setting."""
    before = tuning.TILES["hopper"], tuning.COMPOSE_M, tuning.is_hopper
    tuning.TILES["hopper"], tuning.COMPOSE_M, tuning.is_hopper = setting[:4], setting.rows, lambda _: True
    try:
        yield
    finally:
        tuning.TILES["hopper"], tuning.COMPOSE_M, tuning.is_hopper = before


def compare(run: Run, case: tuple[Shape, Setting | None]) -> None:
    """Both passes, by kernel: microseconds of its launches together; with the usual tiles or others."""
    shape, setting = case
    scores = shape.batch * shape.heads * visible_pairs(shape.length, shape.window)
    errors: list[float] = []

    def make(index: int) -> dict[str, float] | str:
        with applied(setting or Setting(*tuning.TILES["hopper"], tuning.COMPOSE_M)):
            errors[:] = errors or [largest_error(shape, run.device)]
            if not errors[0] < TOLERANCE:
                return f"wrong values, off by {errors[0]}"
            of = prompt_operands(*shape[:3], run.device, number_type(run.device), shape.batch)
            times = kernel_times(calls(of, shape.window)[index], run.device)
        figures = {"error": errors[0], "picoseconds a score": 1e6 * sum(map(sum, times.values())) / scores}
        return figures | by_kernel(times)

    title = f"{shape}, {setting or 'the usual tiles'}"
    run.compare(title, [Entry(name, partial(make, index)) for index, name in enumerate(("forward", "backward"))])


def by_kernel(times: dict[str, list[float]]) -> dict[str, float]:
    return {f"{kernel} ({len(spent)} launches) us": sum(spent) for kernel, spent in times.items()}


def decode_step(run: Run, case: tuple[Shape, None]) -> None:
    shape = case[0]

    def make() -> dict[str, float]:
        of = step_operands(*shape[:2], min(shape.length, 1040), run.device, number_type(run.device))
        mask = Visibility(1, of.key.shape[2], sliding_window=shape.window)
        call = Call.of(AttentionInputs(*of, shape.channels**-0.5, mask))
        return by_kernel(kernel_times(lambda: decode.composed_decode(call), run.device))

    run.compare(f"{shape}, a decoding step", [Entry("decode", make)])


def sweep(run: Run, settings: list[Setting | None]) -> list[tuple[Shape, Setting | None]]:
    shapes = [Shape(2, 16, 24, 8)] if run.is_quick else SHAPES[: 3 if settings[0] else None]
    settings = [setting and Setting(256, 16) for setting in settings[:1]] if run.is_quick else settings
    return [(shape, setting) for setting in settings for shape in shapes]


_CHECK = "plain PyTorch in float32"
REGISTRY = (
    Benchmark("kernels", "forward, backward", "none", _CHECK, partial(sweep, settings=[None]), compare),
    Benchmark("tiles", "both with other tiles", "the usual tiles", _CHECK, partial(sweep, settings=SETTINGS), compare),
    Benchmark("decode", "a step", "none", "see benchmarks.models", lambda run: sweep(run, [None])[:2], decode_step),
)


if __name__ == "__main__":
    sys.exit(run_command(__doc__, REGISTRY))
