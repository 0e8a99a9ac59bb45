"""The matrix products of attention over a workspace of scores, only where a query sees a key."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import cdiv, next_power_of_2
from .blocks import blocks_in_sight, columns_in_sight, first_key_of_block, offsets_of, rows_in_sight
from .layout import Sizes, States, Work


# Blocks of keys that a program multiplies its queries with, which it reads once, while the next keys are on their way;
# one where there would be fewer programs than this.
_BLOCKS, _PROGRAMS = 4, 1024
_WIDTH = 64  # keys of one step, so few that two programs fit into the shared memory of a multiprocessor


def launch_products(
    work: Work, query: Tensor, key: Tensor, products: Tensor, factor: float, norms: Tensor | None = None
) -> None:
    """
    products = factor * query . key of a chunk, (batch, heads, row, column): scores, or gradients of weights, scaled by
    the norms of both (2,).
    """
    # Products of float32 run outside of the tensor cores, in registers, which larger steps overflow.
    step = min(32 if query.dtype == torch.float32 else 64, max(16, next_power_of_2(query.shape[3])))
    chunk, sizes = work.chunk, work.sizes
    columns = chunk.columns // sizes.BLOCK_N
    tiles = columns * (chunk.rows // sizes.BLOCK_M) * chunk.number * query.shape[1]
    blocks = _BLOCKS if tiles >= _BLOCKS * _PROGRAMS else 1
    arguments = (States.of(query), States.of(key, query.shape[1]), products, factor, norms, blocks, _WIDTH, step)
    _launch(work, _products_kernel, cdiv(columns, blocks), query, *arguments)


def launch_output(work: Work, weights: Tensor, value: Tensor, output: Tensor) -> None:
    """output = weights . value for the queries of a chunk."""
    arguments = (weights, States.of(value, weights.shape[1]), States.of(output), *_tile(value))
    _launch(work, _output_kernel, cdiv(value.shape[3], _tile(value)[0]), output, *arguments)


def launch_key_products(work: Work, weights: Tensor, query: Tensor, gradients: Tensor) -> None:
    """
    gradients += weights^T . query over the queries of a chunk and the heads that a key/value head serves: gradients of
    values, with the output's gradient as the query, or of keys, with gradients of scores as the weights. The first
    chunk of a row of the batch sets them.
    """
    mask, chunk, sizes = work
    block, step = _tile(query)
    key_heads, channels = gradients.shape[1], query.shape[3]
    grid = (cdiv(channels, block), cdiv(mask.keys, sizes.BLOCK_N), chunk.number * key_heads)
    arguments = (weights, States.of(query), States.of(gradients, query.shape[1]), block, step, chunk.start == 0)
    work.launch(_key_products_kernel, grid, _options(sizes, query), *arguments)


def _launch(work: Work, kernel: Any, blocks: int, states: Tensor, *arguments: Any) -> None:
    """For blocks of columns or channels, blocks of rows, heads of each row of the batch."""
    grid = (blocks, work.chunk.rows // work.sizes.BLOCK_M, work.chunk.number * states.shape[1])
    work.launch(kernel, grid, _options(work.sizes, states), *arguments)


def _tile(states: Tensor) -> tuple[int, int]:
    """
    Of a sum over keys or queries: channels of a tile, all of them up to 128, or 64 for sums of float32 products, and
    keys or queries of one step, of which several are on their way to shared memory at once.
    """
    most, step = (64, 32) if states.dtype == torch.float32 else (128, 64)
    return min(most, max(16, next_power_of_2(states.shape[3]))), step


def _options(sizes: Sizes, states: Tensor) -> dict[str, Any]:
    """Products of float32 use registers rather than tensor cores: their tiles need those of twice as many warps."""
    is_float32 = states.dtype == torch.float32
    warps = 8 if is_float32 or sizes.BLOCK_M > 64 else 4
    return {"num_warps": warps, "num_stages": 3 - is_float32 - (states.shape[3] > 128)}


@triton.jit
def load_scale(norms):
    """
    What gradients of 16-bit inputs are multiplied by to be in float16: a power of 2, from the largest norms of output
    gradients and of values, which bound gradients of weights. Bounded by 2^5 they leave room for both compositions,
    which may make 2,000 times as much of them, as they can of 64 heads that agree, before float16 ends.
    """
    exponent = tl.floor(tl.log2(32.0 / (tl.load(norms) * tl.load(norms + 1))))
    bounded = tl.minimum(tl.maximum(exponent, -100.0), 100.0)
    return tl.exp2(tl.where(exponent == exponent, bounded, exponent))  # NaN in any gradient is NaN in all


@triton.jit
def _rows_of_program(mask, chunk, sizes):
    """
    Row of the batch, head, block of the workspace, rows and their queries; the first and the last column that any of
    them sees, and the key of column 0.
    """
    b = (tl.program_id(2) // sizes.ALL_HEADS).to(tl.int64) + chunk.batch
    first_row = tl.program_id(1) * sizes.BLOCK_M
    first, last, base = columns_in_sight(mask, b, chunk.start, first_row, sizes.BLOCK_M, sizes)
    row = first_row + tl.arange(0, sizes.BLOCK_M)
    block = tl.program_id(2).to(tl.int64) * chunk.rows * chunk.columns
    return b, (tl.program_id(2) % sizes.ALL_HEADS).to(tl.int64), block, row, chunk.start + row, first, last, base


@triton.jit
def _products_kernel(
    mask, chunk, sizes, query, key, products, factor, norms, blocks, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Program (some blocks of columns, whose keys are loaded ahead; block of rows; head of a row of the batch)."""
    b, h, block, row, t, first, last, base = _rows_of_program(mask, chunk, sizes)
    begin, end = blocks_in_sight(first, last, sizes.BLOCK_N)
    begin = tl.maximum(begin, tl.program_id(0) * blocks) * sizes.BLOCK_N
    end = tl.minimum(end, tl.program_id(0) * blocks + blocks) * sizes.BLOCK_N
    if norms is not None:
        factor *= load_scale(norms)
    queries = query.pointer + offsets_of(query, b, h, t.to(tl.int64))[:, None]
    parts = ()
    for start in tl.static_range(0, query.CHANNELS, BLOCK_K):
        d = start + tl.arange(0, BLOCK_K)
        inside = (t < mask.queries)[:, None] & (d < query.CHANNELS)[None, :]
        parts = parts + (tl.load(queries + d[None, :], mask=inside, other=0.0),)
    for start in range(begin, end, WIDTH):
        column = start + tl.arange(0, WIDTH)
        s = base + column
        keys = key.pointer + offsets_of(key, b, h, s.to(tl.int64))[None, :]
        total = tl.zeros([sizes.BLOCK_M, WIDTH], tl.float32)
        for i in tl.static_range(len(parts)):
            d = i * BLOCK_K + tl.arange(0, BLOCK_K)
            is_there = (s < mask.keys)[None, :] & (d < query.CHANNELS)[:, None]
            k = tl.load(keys + d[:, None], mask=is_there, other=0.0)
            total = tl.dot(parts[i], k, total, input_precision="ieee")
        offsets = row[:, None] * chunk.columns + column[None, :]
        tl.store(products + block + offsets, (total * factor).to(products.dtype.element_ty))


@triton.jit
def _output_kernel(mask, chunk, sizes, weights, value, output, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr):
    b, h, block, row, t, first, last, base = _rows_of_program(mask, chunk, sizes)
    begin, end = blocks_in_sight(first, last, BLOCK_K)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    weights += block
    total = tl.zeros([sizes.BLOCK_M, BLOCK_D], tl.float32)
    for step in range(begin, end):
        column = step * BLOCK_K + tl.arange(0, BLOCK_K)
        s = base + column
        w = tl.load(weights + (row[:, None] * chunk.columns + column[None, :]))  # [BLOCK_M, BLOCK_K]
        values = value.pointer + (offsets_of(value, b, h, s.to(tl.int64))[:, None] + d[None, :])
        v = tl.load(values, mask=(s < mask.keys)[:, None] & (d < value.CHANNELS)[None, :], other=0.0)
        total = tl.dot(w, v, total, input_precision="ieee")
    offsets = offsets_of(output, b, h, t.to(tl.int64))[:, None] + d[None, :]
    inside = (t < mask.queries)[:, None] & (d < value.CHANNELS)[None, :]
    tl.store(output.pointer + offsets, total.to(output.pointer.dtype.element_ty), mask=inside)


@triton.jit
def _key_products_kernel(
    mask, chunk, sizes, weights, query, gradients, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, IS_FIRST: tl.constexpr
):
    KV_GROUPS: tl.constexpr = gradients.KV_GROUPS
    batch_row = (tl.program_id(2) // (sizes.ALL_HEADS // KV_GROUPS)).to(tl.int64)
    b = batch_row + chunk.batch
    first_head = (tl.program_id(2) % (sizes.ALL_HEADS // KV_GROUPS)).to(tl.int64) * KV_GROUPS
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    s = tl.program_id(1) * sizes.BLOCK_N + tl.arange(0, sizes.BLOCK_N)
    begin, end = rows_in_sight(mask, b, chunk, s, BLOCK_K)
    total = tl.zeros([sizes.BLOCK_N, BLOCK_D], tl.float32)
    for h in range(first_head, first_head + KV_GROUPS):
        of_head = weights + (batch_row * sizes.ALL_HEADS + h) * chunk.rows * chunk.columns
        for start in range(begin, end, BLOCK_K):
            row = start + tl.arange(0, BLOCK_K)
            t = chunk.start + row
            stop = mask.queries
            if mask.first_keys is not None:
                # A document that comes back has others in between, which may see none of the block of keys.
                block_row = start // sizes.BLOCK_M * sizes.BLOCK_M
                first, last, base = columns_in_sight(mask, b, chunk.start, block_row, sizes.BLOCK_M, sizes)
                first_block, last_block = blocks_in_sight(first, last, sizes.BLOCK_N)
                block = tl.program_id(1) - base // sizes.BLOCK_N
                stop = tl.where((block >= first_block) & (block < last_block), stop, 0)
            inside = t < stop
            column = s - first_key_of_block(mask, chunk.start, start, sizes)
            w = tl.load(of_head + (row[:, None] * chunk.columns + column[None, :]), mask=inside[:, None], other=0.0)
            queries = query.pointer + (offsets_of(query, b, h, t.to(tl.int64))[:, None] + d[None, :])
            q = tl.load(queries, mask=inside[:, None] & (d < query.CHANNELS)[None, :], other=0.0)
            total = tl.dot(tl.trans(w), q, total, input_precision="ieee")
    offsets = offsets_of(gradients, b, first_head, s.to(tl.int64))[:, None] + d[None, :]
    inside = (s < mask.keys)[:, None] & (d < query.CHANNELS)[None, :]
    if not IS_FIRST:
        total += tl.load(gradients.pointer + offsets, mask=inside, other=0.0)
    tl.store(gradients.pointer + offsets, total.to(gradients.pointer.dtype.element_ty), mask=inside)
