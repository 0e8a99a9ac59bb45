"""The two matrix products of attention over a workspace of scores, only where a query sees a key."""

import triton
import triton.language as tl
from torch import Tensor

from .config import ForwardConfig
from .plan import Chunk, Problem
from .tiles import LENGTHS, STRIDES, first_key_of_block, key_ranges, sees_any


def launch_products(
    problem: Problem, chunk: Chunk, config: ForwardConfig, query: Tensor, key: Tensor, products: Tensor, factor: float
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
        BLOCK_CHANNELS=channel_block(channels),
        BLOCK_ROWS=config.block_rows,
        BLOCK_KEYS=config.block_keys,
        PRECISION="ieee",
        num_warps=config.product_warps,
        num_stages=config.product_stages,
        enable_fp_fusion=True,
    )


def channel_block(channels: int) -> int:
    """Channels of one step of a matrix product: what divides them, so that heads of 80 or 96 channels waste nothing."""
    return next((size for size in (64, 32) if channels % size == 0), 16)


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
    problem: Problem, chunk: Chunk, config: ForwardConfig, weights: Tensor, value: Tensor, output: Tensor
) -> None:
    """output = weights . value for the queries of a chunk."""
    number, heads, rows, _ = weights.shape
    channels = value.shape[3]
    block = min(128, max(16, triton.next_power_of_2(channels)))
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
