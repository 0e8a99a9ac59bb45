"""Compositions of the forward pass: the softmax's sums over composed scores, then composed weights."""

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    visible_bias,
    zero_maps,
)


def launch_log_sums(
    problem: Problem, chunk: Chunk, config: TileConfig, scores: Tensor, maps: Tensor, log_sums: Tensor
) -> None:
    """Pre-compose the scores block by block for the softmax's sums, and keep the maps over the heads."""
    number, heads, rows, columns = scores.shape
    blocks = columns // config.block_keys
    partial = scores.new_empty(2, number, blocks, heads, rows, dtype=torch.float32)  # largest, sum
    _log_sums_kernel[problem.tile_grid(config, scores)](
        scores,
        maps,
        *partial,
        scores.stride(1),
        PRE_STATIC=problem.pre.static,
        **problem.pre.arguments(chunk.batch, "PRE"),
        **problem.range_arguments(chunk),
        **problem.mask_arguments(chunk),
        **problem.tile_constants(config, scores),
    )
    block = 64
    _join_sums_kernel[(-(-rows // block), heads, number)](
        *partial,
        log_sums[chunk.batch],
        *log_sums.stride()[:2],
        chunk.start,
        problem.queries,
        blocks,
        rows,
        HEADS=heads,
        BLOCK_ROWS=block,
        num_warps=1,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=LENGTHS + STRIDES)
def _log_sums_kernel(
    SCORES,
    MAPS,
    LARGEST,
    SUMS,
    head_stride,
    PRE_QUERY,
    PRE_KEY,
    PRE_STATIC,
    pre_query_batch_stride,
    pre_query_stride,
    pre_key_batch_stride,
    pre_key_stride,
    query_start,
    queries,
    keys,
    columns,
    query_offset,
    window,
    FIRST_KEYS,
    LAST_KEYS,
    sequence_stride,
    PADDING,
    SEQUENCES,
    VISIBLE,
    padding_stride,
    visible_batch_stride,
    visible_stride,
    IS_CAUSAL: tl.constexpr,
    PRE_QUERY_RANK: tl.constexpr,
    PRE_QUERY_GATE: tl.constexpr,
    PRE_KEY_RANK: tl.constexpr,
    PRE_KEY_GATE: tl.constexpr,
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
    partial = ((b * tl.num_programs(0) + tl.program_id(0)) * GROUPS + group) * HEADS * ROWS + row
    if sees_any(first, last, block_key, BLOCK_KEYS):
        if PADDING is not None:
            PADDING += b * padding_stride
        if SEQUENCES is not None:
            SEQUENCES += b * sequence_stride
        if VISIBLE is not None:
            VISIBLE += b * visible_batch_stride
        bias = visible_bias(t, s, first, last, queries, keys, PADDING, SEQUENCES, VISIBLE, visible_stride)
        places = row[:, None] * columns + column[None, :]
        # Past the ends are zeros. Lengths are multiples of 16, which lets tiles load them by vectors.
        query_factors = PRE_QUERY + b * pre_query_batch_stride
        key_factors = PRE_KEY + b * pre_key_batch_stride
        query_length = pre_query_stride // (GROUPS * HEADS * 16) * 16
        key_length = pre_key_stride // (GROUPS * HEADS * 16) * 16
        query_factors += group * HEADS * query_length
        key_factors += group * HEADS * key_length
        group_scores = SCORES + (b * GROUPS + group) * HEADS * head_stride
        query_maps = zero_maps(PRE_QUERY_RANK, BLOCK_QUERIES, BLOCK_KEYS)
        key_maps = zero_maps(PRE_KEY_RANK, BLOCK_QUERIES, BLOCK_KEYS)
        if PRE_QUERY_RANK + PRE_KEY_RANK > 0:
            head_scores = group_scores
            for h in range(HEADS):
                a = tl.load(head_scores + places).to(tl.float32)  # [BLOCK_QUERIES, BLOCK_KEYS]
                query_maps = add_to_query_maps(
                    query_maps, a, query_factors, pre_query_stride, h * query_length + t, 0, PRE_QUERY_RANK
                )
                key_maps = add_to_key_maps(
                    key_maps, a, key_factors, pre_key_stride, h * key_length + s, 0, PRE_KEY_RANK
                )
                head_scores += head_stride
            map_stride = ROWS * columns
            MAPS += (b * GROUPS + group) * (PRE_QUERY_RANK + PRE_KEY_RANK) * map_stride
            store_maps(MAPS, places, map_stride, query_maps, 0, PRE_QUERY_RANK)
            store_maps(MAPS, places, map_stride, key_maps, PRE_QUERY_RANK, PRE_KEY_RANK)
        head_scores = group_scores
        for h in range(HEADS):
            a = tl.load(head_scores + places).to(tl.float32)
            query_at = h * query_length + t
            key_at = h * key_length + s
            x = gated(
                a,
                query_factors,
                pre_query_stride,
                query_at,
                key_factors,
                pre_key_stride,
                key_at,
                PRE_QUERY_RANK,
                PRE_QUERY_GATE,
                PRE_KEY_RANK,
                PRE_KEY_GATE,
            )
            x += bias
            x = spread_maps(
                x,
                query_maps,
                key_maps,
                query_factors,
                pre_query_stride,
                query_at,
                key_factors,
                pre_key_stride,
                key_at,
                PRE_QUERY_RANK,
                PRE_QUERY_RANK,
                PRE_KEY_RANK,
                PRE_KEY_RANK,
            )
            if PRE_STATIC is not None:
                column_of_static = PRE_STATIC + group * HEADS * HEADS + h
                x = static_term(x, group_scores, places, head_stride, column_of_static, HEADS, BLOCK_KEYS)
            largest = tl.maximum(tl.max(x, 1), -1e30)  # [BLOCK_QUERIES]
            tl.store(LARGEST + partial + h * ROWS, largest)
            tl.store(SUMS + partial + h * ROWS, tl.sum(tl.exp2(x - largest[:, None]), 1))
            head_scores += head_stride
    else:
        for h in range(HEADS):
            tl.store(LARGEST + partial + h * ROWS, tl.full([BLOCK_QUERIES], -1e30, tl.float32))
            tl.store(SUMS + partial + h * ROWS, tl.zeros([BLOCK_QUERIES], tl.float32))


@triton.jit(do_not_specialize=["query_start", "queries", "blocks"])
def _join_sums_kernel(
    LARGEST,
    SUMS,
    LOG_SUMS,
    batch_stride,
    head_stride,
    query_start,
    queries,
    blocks,
    rows,
    HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    places = (b * blocks * HEADS + h) * rows + row
    largest = tl.full([BLOCK_ROWS], -1e30, tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    for _ in range(blocks):
        of_block = tl.load(LARGEST + places, mask=row < rows, other=-1e30)
        new = tl.maximum(largest, of_block)
        sums = tl.load(SUMS + places, mask=row < rows, other=0.0)
        total = total * tl.exp2(largest - new) + sums * tl.exp2(of_block - new)
        largest = new
        places += HEADS * rows
    # Infinity leaves a query that sees no key with weights of zero.
    log_sum = tl.where(total > 0.0, largest + tl.log2(total), float("inf"))
    t = query_start + row
    inside = (row < rows) & (t < queries)
    tl.store(LOG_SUMS + b * batch_stride + h.to(tl.int64) * head_stride + t, log_sum, mask=inside)


def launch_weights(
    problem: Problem,
    chunk: Chunk,
    config: TileConfig,
    scores: Tensor,
    weights: Tensor | None,
    maps: Tensor,
    log_sums: Tensor,
) -> None:
    """Replace scores by composed weights; `weights` takes those not yet composed, None for in the scores' place."""
    _weights_kernel[problem.tile_grid(config, scores)](
        scores,
        weights,
        maps,
        log_sums[chunk.batch],
        *log_sums.stride()[:2],
        scores.stride(1),
        PRE_STATIC=problem.pre.static,
        POST_STATIC=problem.post.static,
        **problem.pre.arguments(chunk.batch, "PRE"),
        **problem.post.arguments(chunk.batch, "POST"),
        **problem.range_arguments(chunk),
        **problem.mask_arguments(chunk),
        COMPOSES_AFTER=not problem.post.is_empty,
        **problem.tile_constants(config, scores),
    )


@triton.jit(do_not_specialize=LENGTHS + STRIDES)
def _weights_kernel(
    SCORES,
    WEIGHTS,
    MAPS,
    LOG_SUMS,
    sum_batch_stride,
    sum_head_stride,
    head_stride,
    PRE_QUERY,
    PRE_KEY,
    PRE_STATIC,
    pre_query_batch_stride,
    pre_query_stride,
    pre_key_batch_stride,
    pre_key_stride,
    POST_QUERY,
    POST_KEY,
    POST_STATIC,
    post_query_batch_stride,
    post_query_stride,
    post_key_batch_stride,
    post_key_stride,
    query_start,
    queries,
    keys,
    columns,
    query_offset,
    window,
    FIRST_KEYS,
    LAST_KEYS,
    sequence_stride,
    PADDING,
    SEQUENCES,
    VISIBLE,
    padding_stride,
    visible_batch_stride,
    visible_stride,
    IS_CAUSAL: tl.constexpr,
    PRE_QUERY_RANK: tl.constexpr,
    PRE_QUERY_GATE: tl.constexpr,
    PRE_KEY_RANK: tl.constexpr,
    PRE_KEY_GATE: tl.constexpr,
    POST_QUERY_RANK: tl.constexpr,
    POST_QUERY_GATE: tl.constexpr,
    POST_KEY_RANK: tl.constexpr,
    POST_KEY_GATE: tl.constexpr,
    COMPOSES_AFTER: tl.constexpr,
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
    places = row[:, None] * columns + column[None, :]
    group_scores = SCORES + (b * GROUPS + group) * HEADS * head_stride
    # One pointer where one is enough: a second would take registers that spill.
    group_weights = group_scores
    if WEIGHTS is not None:
        group_weights = WEIGHTS + (b * GROUPS + group) * HEADS * head_stride
    if sees_any(first, last, block_key, BLOCK_KEYS):
        if PADDING is not None:
            PADDING += b * padding_stride
        if SEQUENCES is not None:
            SEQUENCES += b * sequence_stride
        if VISIBLE is not None:
            VISIBLE += b * visible_batch_stride
        bias = visible_bias(t, s, first, last, queries, keys, PADDING, SEQUENCES, VISIBLE, visible_stride)
        # Past the ends are zeros. Lengths are multiples of 16, which lets tiles load them by vectors.
        pre_query_length = pre_query_stride // (GROUPS * HEADS * 16) * 16
        pre_key_length = pre_key_stride // (GROUPS * HEADS * 16) * 16
        post_query_length = post_query_stride // (GROUPS * HEADS * 16) * 16
        post_key_length = post_key_stride // (GROUPS * HEADS * 16) * 16
        pre_query = PRE_QUERY + b * pre_query_batch_stride + group * HEADS * pre_query_length
        pre_key = PRE_KEY + b * pre_key_batch_stride + group * HEADS * pre_key_length
        post_query = POST_QUERY + b * post_query_batch_stride + group * HEADS * post_query_length
        post_key = POST_KEY + b * post_key_batch_stride + group * HEADS * post_key_length
        log_sums = LOG_SUMS + b * sum_batch_stride + group * HEADS * sum_head_stride

        map_stride = ROWS * columns
        MAPS += (b * GROUPS + group) * (PRE_QUERY_RANK + PRE_KEY_RANK) * map_stride
        query_maps = load_maps(MAPS, places, map_stride, 0, PRE_QUERY_RANK)
        key_maps = load_maps(MAPS, places, map_stride, PRE_QUERY_RANK, PRE_KEY_RANK)
        post_query_maps = zero_maps(POST_QUERY_RANK, BLOCK_QUERIES, BLOCK_KEYS)
        post_key_maps = zero_maps(POST_KEY_RANK, BLOCK_QUERIES, BLOCK_KEYS)
        scores = group_scores
        weights = group_weights
        for h in range(HEADS):
            a = tl.load(scores + places).to(tl.float32)  # [BLOCK_QUERIES, BLOCK_KEYS]
            query_at = h * pre_query_length + t
            key_at = h * pre_key_length + s
            x = gated(
                a,
                pre_query,
                pre_query_stride,
                query_at,
                pre_key,
                pre_key_stride,
                key_at,
                PRE_QUERY_RANK,
                PRE_QUERY_GATE,
                PRE_KEY_RANK,
                PRE_KEY_GATE,
            )
            x += bias
            x = spread_maps(
                x,
                query_maps,
                key_maps,
                pre_query,
                pre_query_stride,
                query_at,
                pre_key,
                pre_key_stride,
                key_at,
                PRE_QUERY_RANK,
                PRE_QUERY_RANK,
                PRE_KEY_RANK,
                PRE_KEY_RANK,
            )
            if PRE_STATIC is not None:
                static = PRE_STATIC + group * HEADS * HEADS + h
                x = static_term(x, group_scores, places, head_stride, static, HEADS, BLOCK_KEYS)
            e = tl.exp2(x - tl.load(log_sums + h * sum_head_stride + tl.minimum(t, queries - 1))[:, None])
            if WEIGHTS is None:
                tl.store(scores + places, e.to(SCORES.dtype.element_ty))
            else:
                tl.store(weights + places, e.to(SCORES.dtype.element_ty))
            post_query_maps = add_to_query_maps(
                post_query_maps, e, post_query, post_query_stride, h * post_query_length + t, 0, POST_QUERY_RANK
            )
            post_key_maps = add_to_key_maps(
                post_key_maps, e, post_key, post_key_stride, h * post_key_length + s, 0, POST_KEY_RANK
            )
            scores += head_stride
            weights += head_stride
        if COMPOSES_AFTER:
            # What this program has just stored, other threads of it read.
            tl.debug_barrier()
            scores = group_scores
            weights = group_weights
            for h in range(HEADS):
                if WEIGHTS is None:
                    e = tl.load(scores + places).to(tl.float32)
                else:
                    e = tl.load(weights + places).to(tl.float32)
                query_at = h * post_query_length + t
                key_at = h * post_key_length + s
                y = gated(
                    e,
                    post_query,
                    post_query_stride,
                    query_at,
                    post_key,
                    post_key_stride,
                    key_at,
                    POST_QUERY_RANK,
                    POST_QUERY_GATE,
                    POST_KEY_RANK,
                    POST_KEY_GATE,
                )
                y = spread_maps(
                    y,
                    post_query_maps,
                    post_key_maps,
                    post_query,
                    post_query_stride,
                    query_at,
                    post_key,
                    post_key_stride,
                    key_at,
                    POST_QUERY_RANK,
                    POST_QUERY_RANK,
                    POST_KEY_RANK,
                    POST_KEY_RANK,
                )
                if POST_STATIC is not None:
                    static = POST_STATIC + group * HEADS * HEADS + h
                    y = static_term(y, group_weights, places, head_stride, static, HEADS, BLOCK_KEYS)
                tl.store(scores + places, y.to(SCORES.dtype.element_ty))
                scores += head_stride
                weights += head_stride
    else:
        # The product with the values goes over whole blocks of rows, of which this is a part.
        block_row = tl.program_id(1) * BLOCK_QUERIES // BLOCK_ROWS
        block_t = query_start + block_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        block_first, block_last = key_ranges(
            block_t, queries, keys, query_offset, window, FIRST_KEYS, LAST_KEYS, IS_CAUSAL
        )
        if sees_any(block_first, block_last, block_key, BLOCK_KEYS):
            for _ in range(HEADS):
                tl.store(group_scores + places, tl.zeros([BLOCK_QUERIES, BLOCK_KEYS], SCORES.dtype.element_ty))
                group_scores += head_stride
