"""`dcformer bench`: which part, on which device, and where its rows go."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .. import public as public  # registers the models and all implementations of the operator
from ..common.plotting import check_plot_path
from ..dcmha import ComposeSide, ComposeWeights, Visibility, explain_choice, implementations
from ..loading import choose_device
from . import attention, models, paper
from .measure import DTYPES, Run, device_name


def _model(run: Run) -> None:
    paper.table_2(run)
    models.passes(run, trains=False)


BENCHMARKS: dict[str, Callable[[Run], None]] = {
    "attention": attention.run,
    "decode": models.decode,
    "train": models.train,
    "model": _model,
}


def run_benchmark(
    what: str,
    *,
    device: str | None = None,
    dtype: str | None = None,
    quick: bool = False,
    seconds: float = 300.0,
    json: Path | None = None,
    plot: Path | None = None,
    compile: bool | None = None,
) -> int:
    """
    Measure, print tables, write JSON and draw.

    Args:
        what (`str`): "attention", "decode", "train" or "model".
        device, dtype (`str`, *optional*): The first GPU in bfloat16 if there is one, else the CPU in float32.
        quick (`bool`): Tiny sizes.
        seconds (`float`): No further measurement begins after these.
        json, plot (`Path`, *optional*): Files, by default `gpu-WHAT-DEVICE.json` in benchmarks/results or here.
        compile (`bool`, *optional*): Include what needs torch.compile; on GPUs by default.

    Returns:
        `int`: exit status: 1 if something computed wrong values or raised, else 0.
    """
    place = choose_device(device)
    name = dtype or ("bfloat16" if place.type == "cuda" else "float32")
    slug = re.sub(r"[^a-z0-9]+", "-", device_name(place).lower()).strip("-")
    folder = Path("benchmarks", "results") if Path("benchmarks", "results").is_dir() else Path()
    path = json or folder / f"gpu-{what}-{slug}{'-quick' if quick else ''}.json"
    picture = check_plot_path(plot or path.with_suffix(".png"))
    compiles = place.type == "cuda" if compile is None else compile
    run = Run(what, place, DTYPES[name], is_quick=quick, compiles=compiles, seconds=seconds)
    print(f"{what} on {device_name(place)}, torch {torch.__version__}, {name}", flush=True)
    BENCHMARKS[what](run)
    if not compiles:
        run.note("Nothing was compiled; --compile does that.")
    run.show()
    run.write(path)
    run.plot(picture)
    print(f"All figures are in {path}, the picture is {picture}.")
    failed = [f"{row.group}: {row.name}" for row in run.rows if row.has_failed]
    if failed:
        print(f"{len(failed)} of {len(run.rows)} rows failed, the first is {failed[0]!r}.")
    return 1 if failed else 0


def explain(
    *,
    device: str | None = None,
    dtype: str | None = None,
    heads: int = 32,
    key_value_heads: int | None = None,
    channels: int = 128,
    queries: int = 4096,
    keys: int | None = None,
    window: int | None = None,
    gradient: bool = False,
) -> dict[str, str]:
    """Name every implementation of the operator, whether it is chosen for a shape, and why not."""
    place = choose_device(device)
    options: dict[str, Any] = {
        "dtype": DTYPES[dtype or ("bfloat16" if place.type == "cuda" else "float32")],
        "device": place,
    }
    keys = keys or queries
    shapes = [(heads, queries), *[(key_value_heads or heads, keys)] * 2]
    states = [torch.zeros(1, *shape, channels, **options) for shape in shapes]
    query_side, key_side = (
        ComposeSide(factors=torch.zeros(1, heads, length, 5, **options).requires_grad_(gradient))
        for length in (queries, keys)
    )
    weights = ComposeWeights(query_side, key_side)
    arguments: list[Any] = [*states, weights, weights]
    mask = Visibility(queries, keys, sliding_window=window)
    tried = dict(explain_choice(*arguments, attention_mask=mask))
    found = {}
    for name, implementation in implementations().items():
        reason = tried.get(name) or implementation.supports(*arguments, mask=mask, dropout=0.0)
        is_chosen = name in tried and tried[name] is None
        found[name] = "is chosen" if is_chosen else reason or "can run if it is named"
    return found
