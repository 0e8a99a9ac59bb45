"""Sums of the backward pass over what blocks have added, each by the one program that owns it, always in one order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import TileConfig
from .plan import Chunk, Problem
from .tiles import LENGTHS, STRIDES, first_key_of_block, key_ranges, query_range


_JOINED_ROWS = 32  # channels and heads that one program sums
_STATIC_ROWS = 16  # queries of one program; divides a block of queries


def launch_join_queries(
    problem: Problem, chunk: Chunk, config: TileConfig, partial: Tensor, gradients: Tensor, factor: float
) -> None:
    """
    gradients = factor * sum over blocks of keys, for the queries of a chunk.

    Args:
        partial (`Tensor`): (batch, block of keys, channels, heads, row), read where a query may see a key.
        gradients (`Tensor`): (batch, heads, query, channels) of the whole batch.
    """
    number, blocks, channels, heads, rows = partial.shape
    gradients = gradients[chunk.batch]
    grid = (rows // config.compose_rows, -(-channels * heads // _JOINED_ROWS), number)
    _join_queries_kernel[grid](
        partial,
        gradients,
        *gradients.stride(),
        blocks,
        factor,
        **problem.range_arguments(chunk),
        CHANNELS=channels,
        HEADS=heads,
        ROWS=rows,
        BLOCK=_JOINED_ROWS,
        BLOCK_ROWS=config.block_rows,
        BLOCK_QUERIES=config.compose_rows,
        BLOCK_KEYS=config.block_keys,
        num_warps=4,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=LENGTHS + STRIDES + ["blocks"])
def _join_queries_kernel(
    PARTIAL,
    GRADIENTS,
    batch_stride,
    head_stride,
    query_stride,
    channel_stride,
    blocks,
    factor,
    query_start,
    queries,
    keys,
    columns,
    query_offset,
    window,
    FIRST_KEYS,
    LAST_KEYS,
    sequence_stride,
    IS_CAUSAL: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    b = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # channel * HEADS + head
    row = tl.program_id(0) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    t = query_start + row
    if FIRST_KEYS is not None:
        FIRST_KEYS += b * sequence_stride
        LAST_KEYS += b * sequence_stride
    first, last = key_ranges(t, queries, keys, query_offset, window, FIRST_KEYS, LAST_KEYS, IS_CAUSAL)
    block_row = tl.program_id(0) * BLOCK_QUERIES // BLOCK_ROWS
    base = first_key_of_block(block_row, query_start, query_offset, window, BLOCK_ROWS)
    begin = (tl.min(first) - base) // BLOCK_KEYS
    end = (tl.max(last) - base + BLOCK_KEYS) // BLOCK_KEYS
    stride = CHANNELS * HEADS * ROWS
    places = PARTIAL + (b * blocks + begin) * stride + (c[:, None] * ROWS + row[None, :])
    inside = (c < CHANNELS * HEADS)[:, None] & (t < queries)[None, :]
    total = tl.zeros([BLOCK, BLOCK_QUERIES], tl.float32)
    for _ in range(begin, end):
        total += tl.load(places, mask=inside, other=0.0)
        places += stride
    GRADIENTS += b * batch_stride
    heads = (c % HEADS).to(tl.int64) * head_stride + c // HEADS * channel_stride
    places = GRADIENTS + (heads[:, None] + t.to(tl.int64)[None, :] * query_stride)
    tl.store(places, (total * factor).to(GRADIENTS.dtype.element_ty), mask=inside)


def launch_join_keys(
    problem: Problem, chunk: Chunk, config: TileConfig, partial: Tensor, gradients: Tensor, factor: float
) -> None:
    """
    gradients += factor * sum over the blocks of queries of a chunk.

    Args:
        partial (`Tensor`): (batch, block of queries, channels, heads, column), read where a query may see a key.
        gradients (`Tensor`): (batch, heads, key, channels) of the whole batch, float32.
    """
    number, _, channels, heads, _ = partial.shape
    gradients = gradients[chunk.batch]
    block = 64
    grid = (-(-problem.keys // block), -(-channels * heads // _JOINED_ROWS), number)
    _join_keys_kernel[grid](
        partial,
        gradients,
        *gradients.stride(),
        factor,
        **problem.range_arguments(chunk),
        CHANNELS=channels,
        HEADS=heads,
        ROWS=partial.shape[1] * config.compose_rows,
        BLOCK=_JOINED_ROWS,
        KEYS=block,
        BLOCK_ROWS=config.block_rows,
        BLOCK_QUERIES=config.compose_rows,
        BLOCK_KEYS=config.block_keys,
        num_warps=4,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=LENGTHS + STRIDES)
def _join_keys_kernel(
    PARTIAL,
    GRADIENTS,
    batch_stride,
    head_stride,
    key_stride,
    channel_stride,
    factor,
    query_start,
    queries,
    keys,
    columns,
    query_offset,
    window,
    FIRST_KEYS,
    LAST_KEYS,
    sequence_stride,
    IS_CAUSAL: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    b = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # channel * HEADS + head
    s = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    if FIRST_KEYS is not None:
        FIRST_KEYS += b * sequence_stride
        LAST_KEYS += b * sequence_stride
    begin, end = query_range(
        s, query_start, queries, keys, ROWS, query_offset, window, FIRST_KEYS, LAST_KEYS, IS_CAUSAL, BLOCK_QUERIES
    )
    stride = CHANNELS * HEADS * columns
    PARTIAL += (b * (ROWS // BLOCK_QUERIES) + begin // BLOCK_QUERIES) * stride
    total = tl.zeros([BLOCK, KEYS], tl.float32)
    for start in range(begin, end, BLOCK_QUERIES):
        t = query_start + start + tl.arange(0, BLOCK_QUERIES)
        first, last = key_ranges(t, queries, keys, query_offset, window, FIRST_KEYS, LAST_KEYS, IS_CAUSAL)
        base = first_key_of_block(start // BLOCK_ROWS, query_start, query_offset, window, BLOCK_ROWS)
        column = s - base
        # A block of keys may lie across two tiles of columns, each of which was computed if any query sees it.
        tile_key = base + column // BLOCK_KEYS * BLOCK_KEYS
        is_there = (column >= 0) & (column < columns) & (s < keys)
        is_there = is_there & (tl.min(first) < tile_key + BLOCK_KEYS) & (tl.max(last) >= tile_key)
        inside = (c < CHANNELS * HEADS)[:, None] & is_there[None, :]
        total += tl.load(PARTIAL + (c[:, None] * columns + column[None, :]), mask=inside, other=0.0)
        PARTIAL += stride
    if begin < end:
        GRADIENTS += b * batch_stride
        heads = (c % HEADS).to(tl.int64) * head_stride + c // HEADS * channel_stride
        places = GRADIENTS + (heads[:, None] + s.to(tl.int64)[None, :] * key_stride)
        inside = (c < CHANNELS * HEADS)[:, None] & (s < keys)[None, :]
        tl.store(places, tl.load(places, mask=inside, other=0.0) + total * factor, mask=inside)


def launch_static_gradients(
    problem: Problem, chunk: Chunk, config: TileConfig, inputs: Tensor, gradients: Tensor
) -> Tensor:
    """
    What a chunk adds to the gradient of a static map, (groups, in, out) in float32: for heads j and h of a group, the
    sum over queries and keys of input j and gradient h.
    """
    number, _, rows, _ = inputs.shape
    heads = problem.heads // problem.groups
    partial = inputs.new_empty(number, rows // _STATIC_ROWS, problem.groups, heads, heads, dtype=torch.float32)
    _static_gradients_kernel[(rows // _STATIC_ROWS, number * problem.groups)](
        inputs,
        gradients,
        partial,
        inputs.stride(1),
        **problem.range_arguments(chunk),
        **problem.head_constants(),
        BLOCK_HEADS=max(16, triton.next_power_of_2(heads)),
        PROGRAM_ROWS=_STATIC_ROWS,
        BLOCK_ROWS=config.block_rows,
        BLOCK_KEYS=config.block_keys,
        # The 11 bits of a 16-bit number's mantissa are TF32's.
        PRECISION="ieee" if inputs.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=2,
        enable_fp_fusion=True,
    )
    return partial.sum((0, 1))


@triton.jit(do_not_specialize=LENGTHS + STRIDES)
def _static_gradients_kernel(
    INPUTS,
    GRADIENTS,
    PARTIAL,
    head_stride,
    query_start,
    queries,
    keys,
    columns,
    query_offset,
    window,
    FIRST_KEYS,
    LAST_KEYS,
    sequence_stride,
    IS_CAUSAL: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PROGRAM_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    b = (tl.program_id(1) // GROUPS).to(tl.int64)
    group = tl.program_id(1) % GROUPS
    if FIRST_KEYS is not None:
        FIRST_KEYS += b * sequence_stride
        LAST_KEYS += b * sequence_stride
    block_row = tl.program_id(0) * PROGRAM_ROWS // BLOCK_ROWS
    base = first_key_of_block(block_row, query_start, query_offset, window, BLOCK_ROWS)
    head = tl.arange(0, BLOCK_HEADS)
    head_places = ((b * GROUPS + group) * HEADS + head) * head_stride
    gradient = tl.zeros([BLOCK_HEADS, BLOCK_HEADS], tl.float32)
    for i in range(PROGRAM_ROWS):
        row = tl.program_id(0) * PROGRAM_ROWS + i + tl.arange(0, 1)
        first, last = key_ranges(
            query_start + row, queries, keys, query_offset, window, FIRST_KEYS, LAST_KEYS, IS_CAUSAL
        )
        first_key = tl.min(first)
        last_key = tl.max(last)
        for start in range((first_key - base) // BLOCK_KEYS * BLOCK_KEYS, last_key - base + 1, BLOCK_KEYS):
            column = start + tl.arange(0, BLOCK_KEYS)
            places = (tl.program_id(0) * PROGRAM_ROWS + i) * columns + column
            # Tiles that no query sees have never been written.
            seen = (base + column >= first_key) & (base + column <= last_key)
            mask = (head < HEADS)[:, None] & seen[None, :]
            a = tl.load(INPUTS + head_places[:, None] + places[None, :], mask=mask, other=0.0)
            d = tl.load(GRADIENTS + head_places[:, None] + places[None, :], mask=mask, other=0.0)
            a = a.to(tl.float32)  # [BLOCK_HEADS, BLOCK_KEYS]
            gradient = tl.dot(a, tl.trans(d.to(tl.float32)), gradient, input_precision=PRECISION)
    PARTIAL += ((b * tl.num_programs(0) + tl.program_id(0)) * GROUPS + group) * HEADS * HEADS
    inside = (head < HEADS)[:, None] & (head < HEADS)[None, :]
    tl.store(PARTIAL + head[:, None] * HEADS + head[None, :], gradient, mask=inside)
