"""`dcformer bench train`: tokens per second of training, beside Transformer++ with all keys and the same windows.

A call is forward and backward of a few rows, parameters and activations in one number type. The optimizer's step is
left out: at the paper's two million tokens of a batch it is next to nothing, while here it would be of the order of a
layer, alike for all. On a GPU each layer is compiled.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..configuration_dcformer import DCFormerConfig
from ..training.throughput import flops_per_token, gpu_peak_flops
from . import paper
from .context import Context
from .layers import Family, LayerTimes, Size, compare_families, families, layer_times, make_model, sizes
from .machine import device_name
from .timing import Timing


_SEED = 1


def rows_and_length(is_quick: bool) -> tuple[int, int]:
    return (1, 48) if is_quick else (2, 2048)


def measure_pass(
    context: Context, family: Family, trains: bool, rows: int, length: int, config: DCFormerConfig
) -> Timing:
    """Seconds of forward, and backward if the model trains, of random rows."""
    model = make_model(config, family.attention, context).train(trains)
    if context.compiles:
        for layer in model.model.layers:
            layer.compile()
    generator = torch.Generator().manual_seed(_SEED)
    token_ids = torch.randint(config.vocab_size, (rows, length), generator=generator).to(context.device)

    def step() -> None:
        if not trains:
            with torch.no_grad():
                model(token_ids, use_cache=False, logits_to_keep=1)
            return
        model(token_ids, labels=token_ids, use_cache=False).loss.backward()
        for parameter in model.parameters():
            parameter.grad = None

    return context.timer(step)


def compare(context: Context, size: Size, trains: bool) -> None:
    """All families of one shape."""
    rows, length = rows_and_length(context.is_quick)
    group = f"{'train' if trains else 'forward'}: {size.name} shape, {rows} rows of {length} tokens"
    precision = "fp32" if context.dtype.itemsize == 4 else "bf16"
    peak = gpu_peak_flops(device_name(context.device), precision) if context.on_gpu else None
    if context.on_gpu and peak is None:
        context.report.note("This GPU is none of those whose data sheet is known, so there is no share of its peak.")

    def figures(config: DCFormerConfig, seconds: float) -> dict[str, float]:
        flops = rows * length * flops_per_token(config, length) / (1 if trains else 3)
        found = {"TFLOP/s": flops / seconds / 1e12, "of measured matmul": flops / seconds / context.rates.flops}
        return found if peak is None else {**found, "of data sheet": flops / seconds / peak}

    def measure_family(family: Family) -> LayerTimes | None:
        # Graphs of other families would count against the limit, behind which nothing is compiled any more.
        torch._dynamo.reset()
        measure = functools.partial(measure_pass, context, family, trains, rows, length)
        more = 1 if context.is_quick else 2
        return layer_times(context, group, family, size, more, measure, figures, max_position_embeddings=length)

    published: dict[tuple[str, bool, int], Any] = dict(paper.TRAINING) if trains else {}
    compare_families(
        context,
        group,
        size,
        families(),
        measure_family,
        is_step=False,
        trains=trains,
        tokens=rows * length,
        paper=published,
    )


def run(context: Context) -> None:
    """Training of every shape of Table 6 that fits."""
    for size in sizes(context.is_quick):
        compare(context, size, trains=True)
    context.report.note("A call is forward and backward; the optimizer's step is left out.")
    if not context.compiles:
        context.report.note("Nothing was compiled; --compile does that.")
