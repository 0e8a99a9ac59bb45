"""Second and third composition of the backward pass: through the softmax, then to the scores, a tile at a time.

Letters as in `backward_maps`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .backward_maps import transposed_static
from .config import TileConfig
from .plan import Chunk, Problem
from .tiles import (
    LENGTHS,
    STRIDES,
    add_to_key_maps,
    add_to_query_maps,
    gated,
    key_ranges,
    load_maps,
    place_of_program,
    sees_any,
    spread_maps,
    static_term,
    store_maps,
    zero_maps,
)


@triton.jit
def _store_column_sums(SUMS, x, column, BY_PRODUCT: tl.constexpr):
    """Store sums over the queries of a tile; as a product with ones, they cost a seventh of the instructions."""
    if BY_PRODUCT:
        ones = tl.full([16, x.shape[0]], 1.0, tl.float32)
        sums = tl.dot(ones, x, input_precision="tf32")  # [16, BLOCK_KEYS]
        lane = tl.arange(0, 16)[:, None]
        tl.store(SUMS + (column[None, :] + 0 * lane), sums, mask=(lane == 0) & (column >= 0)[None, :])
    else:
        tl.store(SUMS + column, tl.sum(x, 0))


@triton.jit
def _store_factor_sums(
    a,
    d,
    input_query_maps,
    input_key_maps,
    gradient_query_maps,
    gradient_key_maps,
    QUERY_SUMS,
    query_sum_stride,
    KEY_SUMS,
    key_sum_stride,
    row,
    column,
    QUERY_RANK: tl.constexpr,
    QUERY_GATE: tl.constexpr,
    KEY_RANK: tl.constexpr,
    KEY_GATE: tl.constexpr,
    BY_PRODUCT: tl.constexpr,
):
    """What a tile adds to the gradients of one head's factors, in the order of the channels."""
    for r in tl.static_range(QUERY_RANK):
        tl.store(QUERY_SUMS + (r * query_sum_stride + row), tl.sum(a * gradient_query_maps[r], 1))
        tl.store(QUERY_SUMS + ((QUERY_RANK + r) * query_sum_stride + row), tl.sum(d * input_query_maps[r], 1))
    for r in tl.static_range(KEY_RANK):
        _store_column_sums(KEY_SUMS + r * key_sum_stride, a * gradient_key_maps[r], column, BY_PRODUCT)
        _store_column_sums(KEY_SUMS + (KEY_RANK + r) * key_sum_stride, d * input_key_maps[r], column, BY_PRODUCT)
    if QUERY_GATE:
        tl.store(QUERY_SUMS + (2 * QUERY_RANK * query_sum_stride + row), tl.sum(a * d, 1))
    if KEY_GATE:
        _store_column_sums(KEY_SUMS + 2 * KEY_RANK * key_sum_stride, a * d, column, BY_PRODUCT)


def launch_softmax_gradients(
    problem: Problem,
    chunk: Chunk,
    config: TileConfig,
    gradients: Tensor,
    weights: Tensor,
    composed: Tensor,
    exponent_gradients: Tensor,
    gradient_maps: Tensor,
    weight_maps: Tensor,
    exponent_maps: Tensor,
    deltas: Tensor,
    query_sums: Tensor,
    key_sums: Tensor,
    factor: float,
) -> None:
    """
    Through post-composition and softmax: composed weights, `factor` times the gradients of composed scores and their
    maps over the heads, and the gradients of post-composition's factors by block.

    Args:
        composed, exponent_gradients (`Tensor`): In the place of weights and gradients, except with a static map.
        deltas (`Tensor`): (batch, heads, query) of the whole batch.
        query_sums (`Tensor`): (batch, block of keys, channels, heads, row), filled in where a query may see a key.
        key_sums (`Tensor`): (batch, block of queries, channels, heads, column), likewise.
    """
    _softmax_gradients_kernel[problem.tile_grid(config, weights)](
        gradients,
        weights,
        composed,
        exponent_gradients,
        gradient_maps,
        weight_maps,
        exponent_maps,
        deltas[chunk.batch],
        query_sums,
        key_sums,
        *deltas.stride()[:2],
        weights.stride(1),
        factor,
        POST_STATIC=problem.post.static,
        POST_STATIC_TRANSPOSED=transposed_static(problem.post.static),
        **problem.pre.arguments(chunk.batch, "PRE"),
        **problem.post.arguments(chunk.batch, "POST"),
        **problem.range_arguments(chunk),
        BY_PRODUCT=gradients.dtype != torch.float32,
        **problem.tile_constants(config, weights),
    )


@triton.jit(do_not_specialize=LENGTHS + STRIDES)
def _softmax_gradients_kernel(
    GRADIENTS,
    WEIGHTS,
    COMPOSED,
    EXPONENT_GRADIENTS,
    GRADIENT_MAPS,
    WEIGHT_MAPS,
    EXPONENT_MAPS,
    DELTAS,
    QUERY_SUMS,
    KEY_SUMS,
    delta_batch_stride,
    delta_head_stride,
    head_stride,
    factor,
    PRE_QUERY,
    PRE_KEY,
    pre_query_batch_stride,
    pre_query_stride,
    pre_key_batch_stride,
    pre_key_stride,
    POST_QUERY,
    POST_KEY,
    post_query_batch_stride,
    post_query_stride,
    post_key_batch_stride,
    post_key_stride,
    POST_STATIC,
    POST_STATIC_TRANSPOSED,
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
    PRE_QUERY_RANK: tl.constexpr,
    PRE_QUERY_GATE: tl.constexpr,
    PRE_KEY_RANK: tl.constexpr,
    PRE_KEY_GATE: tl.constexpr,
    POST_QUERY_RANK: tl.constexpr,
    POST_QUERY_GATE: tl.constexpr,
    POST_KEY_RANK: tl.constexpr,
    POST_KEY_GATE: tl.constexpr,
    BY_PRODUCT: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    b = (tl.program_id(2) // GROUPS).to(tl.int64)
    group = tl.program_id(2) % GROUPS
    row, column, block_key = place_of_program(query_start, query_offset, window, BLOCK_ROWS, BLOCK_QUERIES, BLOCK_KEYS)
    t = query_start + row
    s = block_key + tl.arange(0, BLOCK_KEYS)
    if FIRST_KEYS is not None:
        FIRST_KEYS += b * sequence_stride
        LAST_KEYS += b * sequence_stride
    first, last = key_ranges(t, queries, keys, query_offset, window, FIRST_KEYS, LAST_KEYS, IS_CAUSAL)
    first_head = (b * GROUPS + group) * HEADS
    places = row[:, None] * columns + column[None, :]
    map_stride = ROWS * columns
    COMPOSED += first_head * head_stride
    EXPONENT_GRADIENTS += first_head * head_stride
    if sees_any(first, last, block_key, BLOCK_KEYS):
        # Past the end there are no factors; what is computed there counts for nothing. Those of keys are padded, since
        # only neighbours in multiples of 16 are loaded together.
        safe_t = tl.minimum(t, queries - 1)
        pre_query_length = pre_query_stride // (GROUPS * HEADS)
        pre_key_length = pre_key_stride // (GROUPS * HEADS * 16) * 16
        PRE_QUERY += b * pre_query_batch_stride + group * HEADS * pre_query_length
        PRE_KEY += b * pre_key_batch_stride + group * HEADS * pre_key_length
        post_query_length = post_query_stride // (GROUPS * HEADS)
        post_key_length = post_key_stride // (GROUPS * HEADS * 16) * 16
        POST_QUERY += b * post_query_batch_stride + group * HEADS * post_query_length
        POST_KEY += b * post_key_batch_stride + group * HEADS * post_key_length
        query_channels = 2 * POST_QUERY_RANK + POST_QUERY_GATE
        key_channels = 2 * POST_KEY_RANK + POST_KEY_GATE
        QUERY_SUMS += ((b * tl.num_programs(0) + tl.program_id(0)) * query_channels * GROUPS + group) * HEADS * ROWS
        KEY_SUMS += ((b * tl.num_programs(1) + tl.program_id(1)) * key_channels * GROUPS + group) * HEADS * columns
        GRADIENTS += first_head * head_stride
        WEIGHTS += first_head * head_stride
        group_gradients = GRADIENTS
        group_weights = WEIGHTS
        DELTAS += b * delta_batch_stride + group * HEADS * delta_head_stride
        GRADIENT_MAPS += (b * GROUPS + group) * (POST_QUERY_RANK + POST_KEY_RANK) * map_stride
        WEIGHT_MAPS += (b * GROUPS + group) * (POST_QUERY_RANK + POST_KEY_RANK) * map_stride
        EXPONENT_MAPS += (b * GROUPS + group) * (PRE_QUERY_RANK + PRE_KEY_RANK) * map_stride
        gradient_query_maps = load_maps(GRADIENT_MAPS, places, map_stride, 0, POST_QUERY_RANK)
        gradient_key_maps = load_maps(GRADIENT_MAPS, places, map_stride, POST_QUERY_RANK, POST_KEY_RANK)
        weight_query_maps = load_maps(WEIGHT_MAPS, places, map_stride, 0, POST_QUERY_RANK)
        weight_key_maps = load_maps(WEIGHT_MAPS, places, map_stride, POST_QUERY_RANK, POST_KEY_RANK)
        exponent_query_maps = zero_maps(PRE_QUERY_RANK, BLOCK_QUERIES, BLOCK_KEYS)
        exponent_key_maps = zero_maps(PRE_KEY_RANK, BLOCK_QUERIES, BLOCK_KEYS)
        for h in range(HEADS):
            pre_t = h * pre_query_length + safe_t
            pre_s = h * pre_key_length + s
            post_t = h * post_query_length + safe_t
            post_s = h * post_key_length + s
            e = tl.load(WEIGHTS + places).to(tl.float32)  # [BLOCK_QUERIES, BLOCK_KEYS]
            d = tl.load(GRADIENTS + places).to(tl.float32)
            y = gated(
                e,
                POST_QUERY,
                post_query_stride,
                post_t,
                POST_KEY,
                post_key_stride,
                post_s,
                POST_QUERY_RANK,
                POST_QUERY_GATE,
                POST_KEY_RANK,
                POST_KEY_GATE,
            )
            y = spread_maps(
                y,
                weight_query_maps,
                weight_key_maps,
                POST_QUERY,
                post_query_stride,
                post_t,
                POST_KEY,
                post_key_stride,
                post_s,
                POST_QUERY_RANK,
                POST_QUERY_RANK,
                POST_KEY_RANK,
                POST_KEY_RANK,
            )
            if POST_STATIC is not None:
                static = POST_STATIC + group * HEADS * HEADS + h
                y = static_term(y, group_weights, places, head_stride, static, HEADS, BLOCK_KEYS)
            tl.store(COMPOSED + places, y.to(COMPOSED.dtype.element_ty))
            p = gated(
                d,
                POST_QUERY,
                post_query_stride,
                post_t,
                POST_KEY,
                post_key_stride,
                post_s,
                POST_QUERY_RANK,
                POST_QUERY_GATE,
                POST_KEY_RANK,
                POST_KEY_GATE,
            )
            p = spread_maps(
                p,
                gradient_query_maps,
                gradient_key_maps,
                POST_QUERY,
                post_query_stride,
                post_t,
                POST_KEY,
                post_key_stride,
                post_s,
                0,
                POST_QUERY_RANK,
                0,
                POST_KEY_RANK,
            )
            if POST_STATIC_TRANSPOSED is not None:
                static = POST_STATIC_TRANSPOSED + group * HEADS * HEADS + h
                p = static_term(p, group_gradients, places, head_stride, static, HEADS, BLOCK_KEYS)
            p = e * (p - tl.load(DELTAS + h * delta_head_stride + safe_t)[:, None])
            tl.store(EXPONENT_GRADIENTS + places, (p * factor).to(GRADIENTS.dtype.element_ty))
            exponent_query_maps = add_to_query_maps(
                exponent_query_maps, p, PRE_QUERY, pre_query_stride, pre_t, PRE_QUERY_RANK, PRE_QUERY_RANK
            )
            exponent_key_maps = add_to_key_maps(
                exponent_key_maps, p, PRE_KEY, pre_key_stride, pre_s, PRE_KEY_RANK, PRE_KEY_RANK
            )
            _store_factor_sums(
                e,
                d,
                weight_query_maps,
                weight_key_maps,
                gradient_query_maps,
                gradient_key_maps,
                QUERY_SUMS + h * ROWS,
                GROUPS * HEADS * ROWS,
                KEY_SUMS + h * columns,
                GROUPS * HEADS * columns,
                row,
                column,
                POST_QUERY_RANK,
                POST_QUERY_GATE,
                POST_KEY_RANK,
                POST_KEY_GATE,
                BY_PRODUCT,
            )
            GRADIENTS += head_stride
            WEIGHTS += head_stride
            COMPOSED += head_stride
            EXPONENT_GRADIENTS += head_stride
        store_maps(EXPONENT_MAPS, places, map_stride, exponent_query_maps, 0, PRE_QUERY_RANK)
        store_maps(EXPONENT_MAPS, places, map_stride, exponent_key_maps, PRE_QUERY_RANK, PRE_KEY_RANK)
    else:
        # The matrix products go over whole blocks of rows, of which this is a part.
        block_row = tl.program_id(1) * BLOCK_QUERIES // BLOCK_ROWS
        block_t = query_start + block_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        block_first, block_last = key_ranges(
            block_t, queries, keys, query_offset, window, FIRST_KEYS, LAST_KEYS, IS_CAUSAL
        )
        if sees_any(block_first, block_last, block_key, BLOCK_KEYS):
            for _ in range(HEADS):
                zero = tl.zeros([BLOCK_QUERIES, BLOCK_KEYS], tl.float32)
                tl.store(COMPOSED + places, zero.to(COMPOSED.dtype.element_ty))
                tl.store(EXPONENT_GRADIENTS + places, zero.to(GRADIENTS.dtype.element_ty))
                COMPOSED += head_stride
                EXPONENT_GRADIENTS += head_stride


def launch_score_gradients(
    problem: Problem,
    chunk: Chunk,
    config: TileConfig,
    scores: Tensor,
    exponent_gradients: Tensor,
    score_gradients: Tensor,
    score_maps: Tensor,
    exponent_maps: Tensor,
    query_sums: Tensor,
    key_sums: Tensor,
    factor: float,
) -> None:
    """
    Through pre-composition: `factor` times the gradients of scores from those of composed scores, and the gradients of
    pre-composition's factors by block. Arguments as of `launch_softmax_gradients`.
    """
    _score_gradients_kernel[problem.tile_grid(config, scores)](
        scores,
        exponent_gradients,
        score_gradients,
        score_maps,
        exponent_maps,
        query_sums,
        key_sums,
        scores.stride(1),
        factor,
        PRE_STATIC_TRANSPOSED=transposed_static(problem.pre.static),
        **problem.pre.arguments(chunk.batch, "PRE"),
        **problem.range_arguments(chunk),
        BY_PRODUCT=exponent_gradients.dtype != torch.float32,
        **problem.tile_constants(config, scores),
    )


@triton.jit(do_not_specialize=LENGTHS + STRIDES)
def _score_gradients_kernel(
    SCORES,
    EXPONENT_GRADIENTS,
    SCORE_GRADIENTS,
    SCORE_MAPS,
    EXPONENT_MAPS,
    QUERY_SUMS,
    KEY_SUMS,
    head_stride,
    factor,
    PRE_QUERY,
    PRE_KEY,
    pre_query_batch_stride,
    pre_query_stride,
    pre_key_batch_stride,
    pre_key_stride,
    PRE_STATIC_TRANSPOSED,
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
    PRE_QUERY_RANK: tl.constexpr,
    PRE_QUERY_GATE: tl.constexpr,
    PRE_KEY_RANK: tl.constexpr,
    PRE_KEY_GATE: tl.constexpr,
    BY_PRODUCT: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    b = (tl.program_id(2) // GROUPS).to(tl.int64)
    group = tl.program_id(2) % GROUPS
    row, column, block_key = place_of_program(query_start, query_offset, window, BLOCK_ROWS, BLOCK_QUERIES, BLOCK_KEYS)
    t = query_start + row
    s = block_key + tl.arange(0, BLOCK_KEYS)
    if FIRST_KEYS is not None:
        FIRST_KEYS += b * sequence_stride
        LAST_KEYS += b * sequence_stride
    first, last = key_ranges(t, queries, keys, query_offset, window, FIRST_KEYS, LAST_KEYS, IS_CAUSAL)
    first_head = (b * GROUPS + group) * HEADS
    places = row[:, None] * columns + column[None, :]
    map_stride = ROWS * columns
    SCORE_GRADIENTS += first_head * head_stride
    if sees_any(first, last, block_key, BLOCK_KEYS):
        # Past the end there are no factors; what is computed there counts for nothing. Those of keys are padded, since
        # only neighbours in multiples of 16 are loaded together.
        safe_t = tl.minimum(t, queries - 1)
        pre_query_length = pre_query_stride // (GROUPS * HEADS)
        pre_key_length = pre_key_stride // (GROUPS * HEADS * 16) * 16
        PRE_QUERY += b * pre_query_batch_stride + group * HEADS * pre_query_length
        PRE_KEY += b * pre_key_batch_stride + group * HEADS * pre_key_length
        query_channels = 2 * PRE_QUERY_RANK + PRE_QUERY_GATE
        key_channels = 2 * PRE_KEY_RANK + PRE_KEY_GATE
        QUERY_SUMS += ((b * tl.num_programs(0) + tl.program_id(0)) * query_channels * GROUPS + group) * HEADS * ROWS
        KEY_SUMS += ((b * tl.num_programs(1) + tl.program_id(1)) * key_channels * GROUPS + group) * HEADS * columns
        SCORES += first_head * head_stride
        EXPONENT_GRADIENTS += first_head * head_stride
        group_gradients = EXPONENT_GRADIENTS
        SCORE_MAPS += (b * GROUPS + group) * (PRE_QUERY_RANK + PRE_KEY_RANK) * map_stride
        EXPONENT_MAPS += (b * GROUPS + group) * (PRE_QUERY_RANK + PRE_KEY_RANK) * map_stride
        score_query_maps = load_maps(SCORE_MAPS, places, map_stride, 0, PRE_QUERY_RANK)
        score_key_maps = load_maps(SCORE_MAPS, places, map_stride, PRE_QUERY_RANK, PRE_KEY_RANK)
        exponent_query_maps = load_maps(EXPONENT_MAPS, places, map_stride, 0, PRE_QUERY_RANK)
        exponent_key_maps = load_maps(EXPONENT_MAPS, places, map_stride, PRE_QUERY_RANK, PRE_KEY_RANK)
        for h in range(HEADS):
            pre_t = h * pre_query_length + safe_t
            pre_s = h * pre_key_length + s
            a = tl.load(SCORES + places).to(tl.float32)  # [BLOCK_QUERIES, BLOCK_KEYS]
            d = tl.load(EXPONENT_GRADIENTS + places).to(tl.float32)
            x = gated(
                d,
                PRE_QUERY,
                pre_query_stride,
                pre_t,
                PRE_KEY,
                pre_key_stride,
                pre_s,
                PRE_QUERY_RANK,
                PRE_QUERY_GATE,
                PRE_KEY_RANK,
                PRE_KEY_GATE,
            )
            x = spread_maps(
                x,
                exponent_query_maps,
                exponent_key_maps,
                PRE_QUERY,
                pre_query_stride,
                pre_t,
                PRE_KEY,
                pre_key_stride,
                pre_s,
                0,
                PRE_QUERY_RANK,
                0,
                PRE_KEY_RANK,
            )
            if PRE_STATIC_TRANSPOSED is not None:
                static = PRE_STATIC_TRANSPOSED + group * HEADS * HEADS + h
                x = static_term(x, group_gradients, places, head_stride, static, HEADS, BLOCK_KEYS)
            tl.store(SCORE_GRADIENTS + places, (x * factor).to(SCORE_GRADIENTS.dtype.element_ty))
            _store_factor_sums(
                a,
                d,
                score_query_maps,
                score_key_maps,
                exponent_query_maps,
                exponent_key_maps,
                QUERY_SUMS + h * ROWS,
                GROUPS * HEADS * ROWS,
                KEY_SUMS + h * columns,
                GROUPS * HEADS * columns,
                row,
                column,
                PRE_QUERY_RANK,
                PRE_QUERY_GATE,
                PRE_KEY_RANK,
                PRE_KEY_GATE,
                BY_PRODUCT,
            )
            SCORES += head_stride
            EXPONENT_GRADIENTS += head_stride
            SCORE_GRADIENTS += head_stride
    else:
        # The matrix products go over whole blocks of rows, of which this is a part.
        block_row = tl.program_id(1) * BLOCK_QUERIES // BLOCK_ROWS
        block_t = query_start + block_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        block_first, block_last = key_ranges(
            block_t, queries, keys, query_offset, window, FIRST_KEYS, LAST_KEYS, IS_CAUSAL
        )
        if sees_any(block_first, block_last, block_key, BLOCK_KEYS):
            for _ in range(HEADS):
                zero = tl.zeros([BLOCK_QUERIES, BLOCK_KEYS], SCORE_GRADIENTS.dtype.element_ty)
                tl.store(SCORE_GRADIENTS + places, zero)
                SCORE_GRADIENTS += head_stride
