"""The least that composed attention costs: FLOPs and bytes from its shape, rates from the machine.

Two bounds, neither of which counts the softmax: *fused* takes all FLOPs at the rate of a matrix product; *by passes*,
each term of equation 7 sweeps over scores that stay in the cache.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..training import visible_pairs


# Large enough for each kind of device to reach its rate.
_MATMUL_SIZES = {"cpu": 2**11, "cuda": 2**13}
_MEMORY_BYTES = {"cpu": 2**28, "cuda": 2**30}
_CACHE_BYTES = {"cpu": 2**21, "cuda": 2**24}


class Work(NamedTuple):
    """Totals of one forward pass: FLOPs of matrix products and of compositions, bytes that passes sweep over."""

    matmul_flops: float
    compose_flops: float
    pass_bytes: float


class Rates(NamedTuple):
    """Rates of the machine, per second."""

    flops: float
    cache_bytes: float
    read_bytes: float


def forward_work(heads: int, head_dim: int, length: int, window: int | None = None, batch: int = 1) -> Work:
    """Count scores, both compositions of rank 2, and values."""
    scores = batch * heads * visible_pairs(length, window)
    # Each composition sums over the heads by query-wise and key-wise factors of 2 ranks (a read each), spreads the sums
    # over the heads again (a read and a write each), and two gates scale it (a read and a write). Scores are float32.
    reads, read_writes = 4, 5
    return Work(
        matmul_flops=2 * 2 * scores * head_dim,
        compose_flops=2 * scores * (2 * (reads + read_writes - 1) + 2),
        pass_bytes=2 * scores * (reads + 2 * read_writes) * 4,
    )


def rate_probes(device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Calls to time for `measured_rates`: a matrix product in `dtype`, a copy in the cache, a reading."""
    size = _MATMUL_SIZES[device.type]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    matrix = torch.randn(_MEMORY_BYTES[device.type] // 4 // size, size, device=device)
    vector, in_cache = torch.randn(size, device=device), torch.randn(2, _CACHE_BYTES[device.type] // 4, device=device)
    return {
        "matrix product": lambda: left @ right,
        "copy in cache": lambda: in_cache[0].copy_(in_cache[1]),
        "reading": lambda: matrix @ vector,
    }


def measured_rates(seconds: dict[str, float], device: torch.device) -> Rates:
    """Rates from the seconds that one call of each of `rate_probes` took. A copy moves each byte twice."""
    return Rates(
        flops=2 * _MATMUL_SIZES[device.type] ** 3 / seconds["matrix product"],
        cache_bytes=2 * _CACHE_BYTES[device.type] / seconds["copy in cache"],
        read_bytes=_MEMORY_BYTES[device.type] / seconds["reading"],
    )


def composition_bounds(work: Work, rates: Rates) -> dict[str, float]:
    """Seconds that compositions add at least to attention without them."""
    return {"fused": work.compose_flops / rates.flops, "by passes": work.pass_bytes / rates.cache_bytes}
