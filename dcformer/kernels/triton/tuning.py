"""Tiles, warps and stages of the attention kernels; `benchmarks/gpu_kernels.py` times others."""

import functools
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ..call import Call, cdiv, next_power_of_2


# Queries that a program composes one after another.
COMPOSE_M = 64
# Keys whose scores a program adds up: those of one warp, so that no sum waits for another warp.
PART = tl.constexpr(16)
# Scores that a program composes at once (one query, all heads of a group), the fewest keys, warps, and stages. Hopper
# multiplies by four warps together, which leaves each more registers; elsewhere four would exchange much through shared
# memory. Factors in float32 take twice the registers.
TILES = {"hopper": (2048, 64, 4, 4), "others": (1024, 32, 2, 3), "float32": (1024, 16, 4, 3)}
# Registers of a thread for the factors of its keys; kernels that need more compute one result at a time.
FACTOR_REGISTERS = 128
# Tiles of matrix products are large for more queries and keys in sight than these.
LARGE = 256
# Options of the kernels that reduce what blocks contribute, and of the gradients of the queries' factors. All name the
# fusion of products and sums, whose default Triton 3.10 changes.
REDUCING = {"num_warps": 4, "enable_fp_fusion": True}
QUERY_FACTORS = {"num_warps": 2, "num_stages": 4, "enable_fp_fusion": True}
# Keys of one step of the product of queries and keys: so few that two programs fit a multiprocessor's shared memory.
SCORES_WIDTH = 64
# Blocks of keys that a program multiplies its queries with, if that leaves at least so many programs.
SCORES_BLOCKS, SCORES_PROGRAMS = 4, 1024
# A constant of the kernels, always the same object for a value: Triton compares and hashes constants at every launch,
# of which the host's time is two thirds of what it was.
constant = functools.lru_cache(maxsize=None, typed=True)(tl.constexpr)


class Sizes(NamedTuple):
    """Sizes of heads and tiles, constants of the kernels."""

    HEADS: int  # of a group
    ALL_HEADS: int
    HEADS_PADDED: int  # a power of 2, at least the 16 that a matrix product takes
    GROUPS: int
    BLOCK_M: int  # queries and keys of a tile of the matrix products
    BLOCK_N: int
    COMPOSE_M: int  # queries and keys of a program that composes, which divide the former
    COMPOSE_N: int
    WARPS: int  # of a program that composes
    STAGES: int
    IS_SPLIT: bool  # a launch for each result, where one would spill registers: for 40 heads 91 times a row forward

    @classmethod
    def of(cls, call: Call, is_forward: bool) -> "Sizes":
        """Choose the sizes for a call's forward or backward pass."""
        (batch, all_heads, queries, channels), dtype = call.query.shape, call.query.dtype
        heads = all_heads // call.groups
        padded = max(next_power_of_2(heads), 16)
        # Large tiles read queries and keys less often. They need the registers of 16-bit products and the memory of few
        # channels, and waste much at the edges of a narrow band.
        window = call.sliding_window or call.key.shape[2]
        is_large = min(window, queries) > LARGE and max(channels, call.value.shape[3]) <= 128
        rows = 128 if is_large and dtype != torch.float32 else 64
        scores, keys, warps, stages = TILES[
            "float32" if dtype == torch.float32 else "hopper" if is_hopper(call.query) else "others"
        ]
        keys = min(rows, max(keys, scores // padded))
        # Too few programs are made more by half as many queries each: forward, 10 % faster where it was measured.
        seen = min(window + COMPOSE_M, call.key.shape[2])
        programs = cdiv(queries, COMPOSE_M) * cdiv(seen, keys) * batch * call.groups
        composed = COMPOSE_M if programs >= (2048 if is_forward else 512) else COMPOSE_M // 2
        assert rows % composed == 0 and rows % keys == 0
        stages = stages if padded < 64 else 2  # which fit the shared memory
        # Forward the factors of both compositions, backward those of one and their gradients in float32.
        size = call.query.element_size()
        factors = keys * padded // (32 * warps) * (2 * call.rank() + 1)
        is_split = factors * (2 * size if is_forward else size + 4) // 4 > FACTOR_REGISTERS
        return cls(heads, all_heads, padded, call.groups, rows, rows, composed, keys, warps, stages, is_split)

    def product_options(self, states: Tensor) -> dict[str, Any]:
        """Warps and stages of a matrix product; float32 uses registers, not tensor cores, and needs more warps."""
        is_float32 = states.dtype == torch.float32
        warps = 8 if is_float32 or self.BLOCK_M > 64 else 4
        stages = 3 - is_float32 - (states.shape[3] > 128)
        return {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}


@functools.cache
def constants(sizes: Sizes) -> Sizes:
    """Sizes with constants as members, as kernels take them."""
    return Sizes(*map(constant, sizes))


def product_tile(states: Tensor) -> tuple[int, int]:
    """BLOCK_D, channels of a tile of sums over keys or queries, and BLOCK_K, keys or queries of one step."""
    most, step = (64, 32) if states.dtype == torch.float32 else (128, 64)
    return min(most, max(16, next_power_of_2(states.shape[3]))), step


def is_hopper(tensor: Tensor) -> bool:
    """Tell whether a tensor is on a GPU of compute capability 9, or on none."""
    return not tensor.is_cuda or torch.cuda.get_device_capability(tensor.device)[0] == 9
