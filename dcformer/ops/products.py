"""The matrix products of attention over a workspace of scores, only where a query sees a key."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .config import TileConfig
from .plan import Chunk, Problem
from .tiles import LENGTHS, STRIDES, first_key_of_block, key_ranges, query_range, sees_any


def launch_products(
    problem: Problem, chunk: Chunk, config: TileConfig, query: Tensor, key: Tensor, products: Tensor, factor: float
) -> None:
    """products = factor * query . key of a chunk, (batch, heads, row, column): scores, or gradients of weights."""
    number, heads, rows, columns = products.shape
    channels = query.shape[3]
    query, key = query[chunk.batch], key[chunk.batch]
    grid = (columns // config.block_keys, rows // config.block_rows, number * heads)
    _products_kernel[grid](
        query,
        key,
        products,
        *query.stride()[:3],
        *key.stride()[:3],
        products.stride(1),
        factor,
        **problem.range_arguments(chunk),
        HEADS=heads,
        SERVED=heads // key.shape[1],
        CHANNELS=channels,
        BLOCK_CHANNELS=channel_block(channels, query.dtype),
        BLOCK_ROWS=config.block_rows,
        BLOCK_KEYS=config.block_keys,
        PRECISION="ieee",
        num_warps=config.product_warps,
        num_stages=config.product_stages,
        enable_fp_fusion=True,
    )


def channel_block(channels: int, dtype: torch.dtype) -> int:
    """Channels of one step of a matrix product: what divides them, so that heads of 80 or 96 channels waste nothing."""
    # Products of float32 run outside of the tensor cores, in registers, which larger steps overflow.
    sizes = (32,) if dtype == torch.float32 else (64, 32)
    return next((size for size in sizes if channels % size == 0), 16)


def output_block(channels: int, dtype: torch.dtype) -> int:
    """Channels of a tile of sums over keys or queries: all of them up to 128, or 64 for sums of float32 products."""
    return min(64 if dtype == torch.float32 else 128, max(16, triton.next_power_of_2(channels)))


@triton.jit(do_not_specialize=LENGTHS + STRIDES)
def _products_kernel(
    QUERY,
    KEY,
    PRODUCTS,
    query_batch_stride,
    query_head_stride,
    query_stride,
    key_batch_stride,
    key_head_stride,
    key_stride,
    head_stride,
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
    HEADS: tl.constexpr,
    SERVED: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    b = (tl.program_id(2) // HEADS).to(tl.int64)
    h = tl.program_id(2) % HEADS
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(0) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    t = query_start + row
    block_key = first_key_of_block(tl.program_id(1), query_start, query_offset, window, BLOCK_ROWS)
    block_key += tl.program_id(0) * BLOCK_KEYS
    s = block_key + tl.arange(0, BLOCK_KEYS)
    if FIRST_KEYS is not None:
        FIRST_KEYS += b * sequence_stride
        LAST_KEYS += b * sequence_stride
    first, last = key_ranges(t, queries, keys, query_offset, window, FIRST_KEYS, LAST_KEYS, IS_CAUSAL)
    if sees_any(first, last, block_key, BLOCK_KEYS):
        QUERY += b * query_batch_stride + h.to(tl.int64) * query_head_stride
        KEY += b * key_batch_stride + (h // SERVED).to(tl.int64) * key_head_stride
        query_rows = QUERY + t.to(tl.int64)[:, None] * query_stride  # [BLOCK_ROWS, 1]
        key_rows = KEY + s.to(tl.int64)[None, :] * key_stride  # [1, BLOCK_KEYS]
        products = tl.zeros([BLOCK_ROWS, BLOCK_KEYS], tl.float32)
        for start in tl.static_range(0, CHANNELS, BLOCK_CHANNELS):
            d = start + tl.arange(0, BLOCK_CHANNELS)
            inside = d < CHANNELS
            q = tl.load(query_rows + d[None, :], mask=(t < queries)[:, None] & inside[None, :], other=0.0)
            k = tl.load(key_rows + d[:, None], mask=(s < keys)[None, :] & inside[:, None], other=0.0)
            products = tl.dot(q, k, products, input_precision=PRECISION)
        PRODUCTS += tl.program_id(2).to(tl.int64) * head_stride
        places = row[:, None] * columns + column[None, :]
        tl.store(PRODUCTS + places, (products * factor).to(PRODUCTS.dtype.element_ty))


def launch_output(
    problem: Problem, chunk: Chunk, config: TileConfig, weights: Tensor, value: Tensor, output: Tensor
) -> None:
    """output = weights . value for the queries of a chunk."""
    number, heads, rows, _ = weights.shape
    channels = value.shape[3]
    block = output_block(channels, value.dtype)
    value, output = value[chunk.batch], output[chunk.batch]
    _output_kernel[(-(-channels // block), rows // config.block_rows, number * heads)](
        weights,
        value,
        output,
        *value.stride()[:3],
        *output.stride()[:3],
        weights.stride(1),
        **problem.range_arguments(chunk),
        HEADS=heads,
        SERVED=heads // value.shape[1],
        CHANNELS=channels,
        BLOCK_CHANNELS=block,
        BLOCK_ROWS=config.block_rows,
        BLOCK_KEYS=config.block_keys,
        PRECISION="ieee",
        num_warps=config.product_warps,
        num_stages=config.product_stages,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=LENGTHS + STRIDES)
def _output_kernel(
    WEIGHTS,
    VALUE,
    OUTPUT,
    value_batch_stride,
    value_head_stride,
    value_stride,
    output_batch_stride,
    output_head_stride,
    output_stride,
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
    HEADS: tl.constexpr,
    SERVED: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    b = (tl.program_id(2) // HEADS).to(tl.int64)
    h = tl.program_id(2) % HEADS
    d = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    t = query_start + row
    base = first_key_of_block(tl.program_id(1), query_start, query_offset, window, BLOCK_ROWS)
    if FIRST_KEYS is not None:
        FIRST_KEYS += b * sequence_stride
        LAST_KEYS += b * sequence_stride
    first, last = key_ranges(t, queries, keys, query_offset, window, FIRST_KEYS, LAST_KEYS, IS_CAUSAL)
    WEIGHTS += tl.program_id(2).to(tl.int64) * head_stride
    VALUE += b * value_batch_stride + (h // SERVED).to(tl.int64) * value_head_stride
    output = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], tl.float32)
    begin = (tl.min(first) - base) // BLOCK_KEYS * BLOCK_KEYS
    end = tl.max(last) - base + 1
    for start in range(begin, end, BLOCK_KEYS):
        column = start + tl.arange(0, BLOCK_KEYS)
        s = base + column
        weights = tl.load(WEIGHTS + row[:, None] * columns + column[None, :])  # [BLOCK_ROWS, BLOCK_KEYS]
        places = s.to(tl.int64)[:, None] * value_stride + d[None, :]
        value = tl.load(VALUE + places, mask=(s < keys)[:, None] & (d < CHANNELS)[None, :], other=0.0)
        output = tl.dot(weights.to(VALUE.dtype.element_ty), value, output, input_precision=PRECISION)
    OUTPUT += b * output_batch_stride + h.to(tl.int64) * output_head_stride
    places = t.to(tl.int64)[:, None] * output_stride + d[None, :]
    tl.store(OUTPUT + places, output.to(OUTPUT.dtype.element_ty), mask=(t < queries)[:, None] & (d < CHANNELS)[None, :])


def launch_key_products(
    problem: Problem, chunk: Chunk, config: TileConfig, weights: Tensor, query: Tensor, gradients: Tensor
) -> None:
    """
    gradients += weights^T . query over the queries of a chunk and the heads that a key/value head serves.

    Args:
        weights (`Tensor`): (batch, heads, row, column): of the output's gradient, or of the queries.
        query (`Tensor`): (batch, heads, query, channels).
        gradients (`Tensor`): (batch, key/value heads, key, channels), float32.
    """
    number, heads, rows, _ = weights.shape
    channels = query.shape[3]
    block = output_block(channels, query.dtype)
    query, gradients = query[chunk.batch], gradients[chunk.batch]
    grid = (-(-channels // block), -(-problem.keys // config.block_keys), number * problem.key_value_heads)
    _key_products_kernel[grid](
        weights,
        query,
        gradients,
        *query.stride()[:3],
        *gradients.stride()[:3],
        weights.stride(1),
        **problem.range_arguments(chunk),
        HEADS=heads,
        SERVED=heads // problem.key_value_heads,
        CHANNELS=channels,
        ROWS=rows,
        BLOCK_CHANNELS=block,
        BLOCK_ROWS=config.block_rows,
        BLOCK_KEYS=config.block_keys,
        PRECISION="ieee",
        num_warps=config.product_warps,
        num_stages=config.product_stages,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=LENGTHS + STRIDES)
def _key_products_kernel(
    WEIGHTS,
    QUERY,
    GRADIENTS,
    query_batch_stride,
    query_head_stride,
    query_stride,
    gradient_batch_stride,
    gradient_head_stride,
    gradient_stride,
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
    HEADS: tl.constexpr,
    SERVED: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    KEY_VALUE_HEADS: tl.constexpr = HEADS // SERVED
    b = (tl.program_id(2) // KEY_VALUE_HEADS).to(tl.int64)
    head = (tl.program_id(2) % KEY_VALUE_HEADS).to(tl.int64)
    d = tl.program_id(0) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    s = tl.program_id(1) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    if FIRST_KEYS is not None:
        FIRST_KEYS += b * sequence_stride
        LAST_KEYS += b * sequence_stride
    begin, end = query_range(
        s, query_start, queries, keys, ROWS, query_offset, window, FIRST_KEYS, LAST_KEYS, IS_CAUSAL, BLOCK_ROWS
    )
    WEIGHTS += (b * HEADS + head * SERVED) * head_stride
    QUERY += b * query_batch_stride + head * SERVED * query_head_stride
    gradients = tl.zeros([BLOCK_KEYS, BLOCK_CHANNELS], tl.float32)
    for _ in range(SERVED):
        for start in range(begin, end, BLOCK_ROWS):
            row = start + tl.arange(0, BLOCK_ROWS)
            t = query_start + row
            first, last = key_ranges(t, queries, keys, query_offset, window, FIRST_KEYS, LAST_KEYS, IS_CAUSAL)
            base = first_key_of_block(start // BLOCK_ROWS, query_start, query_offset, window, BLOCK_ROWS)
            column = s - base
            inside = (row < ROWS)[:, None] & ((column >= 0) & (column < columns))[None, :]
            places = WEIGHTS + (row[:, None] * columns + column[None, :])
            weights = tl.load(places, mask=inside, other=0.0)  # [BLOCK_ROWS, BLOCK_KEYS]
            # A block of keys may lie across two tiles of columns; one that no query sees was never written. Loading
            # with this mask would be slower: it has no multiples of 16.
            seen = (s[None, :] >= first[:, None]) & (s[None, :] <= last[:, None])
            weights = tl.where(seen, weights, 0.0).to(QUERY.dtype.element_ty)
            places = QUERY + (t.to(tl.int64)[:, None] * query_stride + d[None, :])
            query = tl.load(places, mask=(t < queries)[:, None] & (d < CHANNELS)[None, :], other=0.0)
            gradients = tl.dot(tl.trans(weights), query, gradients, input_precision=PRECISION)
        WEIGHTS += head_stride
        QUERY += query_head_stride
    if begin < end:
        GRADIENTS += b * gradient_batch_stride + head * gradient_head_stride
        places = GRADIENTS + (s.to(tl.int64)[:, None] * gradient_stride + d[None, :])
        inside = (s < keys)[:, None] & (d < CHANNELS)[None, :]
        tl.store(places, tl.load(places, mask=inside, other=0.0) + gradients, mask=inside)
