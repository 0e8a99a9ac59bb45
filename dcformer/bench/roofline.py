"""What composed attention costs at the very least: operations and bytes from its shape, rates from the machine.

Three bounds, none of which counts the softmax:
- fused: every operation at the rate of a matrix product, or every input and output moved once, whichever is longer;
- pass by pass, in cache: the two matrix products, then each term of equation 7 sweeping scores that stay in the cache;
- pass by pass, in memory: the same with scores that do not, as when every head's scores are computed whole.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..training.throughput import visible_pairs


# Large enough for each kind of device to reach its rate, of which a GPU needs more.
_MATMUL_SIZES = {"cpu": 2**11, "cuda": 2**13}
_MEMORY_BYTES = {"cpu": 2**28, "cuda": 2**30}
_CACHE_BYTES = {"cpu": 2**21, "cuda": 2**24}


class Work(NamedTuple):
    """Totals of one forward pass."""

    matmul_flops: float
    compose_flops: float
    pass_bytes: float
    compulsory_bytes: float


class Rates(NamedTuple):
    """What the machine does per second."""

    flops: float
    memory_bytes: float
    cache_bytes: float
    read_bytes: float


def forward_work(
    *, batch: int, heads: int, length: int, head_dim: int, rank: int, itemsize: int, sliding_window: int | None
) -> Work:
    """
    Operations and bytes of scores, both compositions and values.

    Per stage and score, 2 sides x rank maps are summed over the heads (a read each) and spread over them again (a read
    and a write each), and the gates scale it (a read and a write): 4 rank + 1 passes. Scores are float32 or wider.
    """
    scores = batch * heads * visible_pairs(length, sliding_window)
    reads, read_writes = 2 * rank, 2 * rank + 1
    weights = 2 * 2 * (2 * rank + 1) * batch * heads * length
    return Work(
        matmul_flops=2 * 2 * scores * head_dim,
        compose_flops=2 * scores * (2 * (reads + read_writes - 1) + 2),
        pass_bytes=2 * scores * (reads + 2 * read_writes) * max(itemsize, 4),
        compulsory_bytes=(4 * batch * heads * length * head_dim + weights) * itemsize,
    )


def rate_probes(device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """What to time for `measured_rates`: a matrix product in `dtype`, copies in memory and cache, a reading."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def copy(size: int) -> Callable[[], object]:
        source = random(size // 4)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    size, memory = _MATMUL_SIZES[device.type], _MEMORY_BYTES[device.type]
    matrix = random(memory // 4 // size, size)
    vector = random(size)
    left, right = (random(size, size, dtype=dtype) for _ in range(2))
    return {
        "matrix product": lambda: left @ right,
        "copy in memory": copy(memory),
        "copy in cache": copy(_CACHE_BYTES[device.type]),
        "reading": lambda: matrix @ vector,
    }


def measured_rates(seconds: dict[str, float], device: torch.device) -> Rates:
    """Rates from the seconds that one call of each of `rate_probes` took. A copy moves each byte twice."""
    memory = _MEMORY_BYTES[device.type]
    return Rates(
        flops=2 * _MATMUL_SIZES[device.type] ** 3 / seconds["matrix product"],
        memory_bytes=2 * memory / seconds["copy in memory"],
        cache_bytes=2 * _CACHE_BYTES[device.type] / seconds["copy in cache"],
        read_bytes=memory / seconds["reading"],
    )


def bounds(work: Work, rates: Rates) -> dict[str, float]:
    """Seconds below which each form cannot come."""
    matmul = work.matmul_flops / rates.flops
    operations = (work.matmul_flops + work.compose_flops) / rates.flops
    return {
        "fused": max(operations, work.compulsory_bytes / rates.memory_bytes),
        "pass by pass, in cache": matmul + work.pass_bytes / rates.cache_bytes,
        "pass by pass, in memory": matmul + work.pass_bytes / rates.memory_bytes,
    }


def composition_bounds(work: Work, rates: Rates) -> dict[str, float]:
    """Seconds that compositions must add to attention without them: operations alone, or sweeps over cached scores."""
    return {"fused": work.compose_flops / rates.flops, "by passes": work.pass_bytes / rates.cache_bytes}
