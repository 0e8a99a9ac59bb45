"""`dcformer bench`: which part, on which device, and where its rows go."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .. import public as public  # registers the models and all implementations of the operator
from ..dcmha import ComposeSide, ComposeWeights, Visibility, explain_choice, implementations
from ..loading import choose_device
from . import attention, models
from .measure import Run, device_name


BENCHMARKS: dict[str, Callable[[Run], None]] = {
    "attention": attention.run,
    "decode": models.decode,
    "train": models.train,
    "model": models.model,
}


def run_benchmark(
    what: str, *, device: str | None = None, quick: bool = False, seconds: float = 300.0, json: Path | None = None
) -> int:
    """
    Measure, print tables and write JSON; on a GPU in bfloat16 and with torch.compile, else in float32 without it.

    Returns the exit status: 1 if something computed wrong values or raised, else 0. The JSON goes to
    `WHAT-DEVICE.json` in benchmarks/results, or here, by default.
    """
    chosen = choose_device(device)
    slug = re.sub(r"[^a-z0-9]+", "-", device_name(chosen).lower()).strip("-")
    folder = Path("benchmarks", "results") if Path("benchmarks", "results").is_dir() else Path()
    path = json or folder / f"{what}-{slug}{'-quick' if quick else ''}.json"
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder; give a file for the figures.")
    run = Run(what, chosen, default_dtype(chosen), is_quick=quick, seconds=seconds)
    print(f"{what} on {device_name(chosen)}, torch {torch.__version__}, {run.dtype}", flush=True)
    # All on one stream: what autograd keeps of the default one could not be recorded as a CUDA graph.
    with torch.cuda.stream(torch.cuda.Stream(chosen) if chosen.type == "cuda" else None):
        BENCHMARKS[what](run)
    run.show()
    run.write(path)
    print(f"All figures are in {path}.")
    failed = [f"{row.group}: {row.name}" for row in run.rows if row.has_failed]
    if failed:
        print(f"{len(failed)} of {len(run.rows)} rows failed, the first is {failed[0]!r}.")
    return 1 if failed else 0


def default_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


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
    chosen = choose_device(device)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype) if dtype else default_dtype(chosen), "device": chosen}
    keys = keys or queries
    query = torch.zeros(1, heads, queries, channels, **options)
    key = value = torch.zeros(1, key_value_heads or heads, keys, channels, **options)
    query_wise, key_wise = (
        ComposeSide(factors=torch.zeros(1, heads, length, 5, **options).requires_grad_(gradient))
        for length in (queries, keys)
    )
    weights = ComposeWeights(query_wise, key_wise)
    arguments = query, key, value, weights, weights
    mask = Visibility(queries, keys, sliding_window=window)
    tried = dict(explain_choice(*arguments, attention_mask=mask))
    answers = {}
    for name, implementation in implementations().items():
        reason = tried.get(name) or implementation.supports(*arguments, mask=mask, dropout=0.0)
        is_chosen = name in tried and tried[name] is None
        answers[name] = "is chosen" if is_chosen else reason or "can run if it is named"
    return answers
