"""First composition of the backward pass: weights and the maps of everything over the heads, a tile at a time.

Letters beside those of `tiles`: a input of a composition, d gradient of its output. With w1, w2 and a gate of either
side, the gradient of a is d (1 + gates) + w1 . (sum over heads of w2 d): equation 7 with w1 and w2 exchanged, and maps
over the heads of d instead of a. The gradient of w1 is a times a map of d, of w2 it is d times a map of a, and of a
gate it is a d, each summed over the keys for a query's factors and over the queries for a key's.
"""

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
    place_of_program,
    sees_any,
    spread_maps,
    static_term,
    store_maps,
    visible_bias,
    zero_maps,
)


def transposed_static(static: Tensor | None) -> Tensor | None:
    return None if static is None else static.mT.contiguous()


def launch_weights_and_maps(
    problem: Problem,
    chunk: Chunk,
    config: TileConfig,
    scores: Tensor,
    gradients: Tensor,
    weights: Tensor,
    score_maps: Tensor,
    gradient_maps: Tensor,
    weight_maps: Tensor,
    log_sums: Tensor,
    partial_sums: Tensor,
) -> None:
    """
    From scores and the gradients of composed weights: the weights, the maps of all three over the heads, and what each
    block of keys adds to the sums over the keys of a weight times its gradient, and of the weights.

    Args:
        score_maps, gradient_maps, weight_maps (`Tensor`): (batch, groups, map, row, column), filled in.
        partial_sums (`Tensor`): (batch, block of keys, 2, heads, row), filled in where a query may see a key.
    """
    _weights_and_maps_kernel[problem.tile_grid(config, scores)](
        scores,
        gradients,
        weights,
        score_maps,
        gradient_maps,
        weight_maps,
        log_sums[chunk.batch],
        partial_sums,
        *log_sums.stride()[:2],
        scores.stride(1),
        PRE_STATIC=problem.pre.static,
        POST_STATIC_TRANSPOSED=transposed_static(problem.post.static),
        **problem.pre.arguments(chunk.batch, "PRE"),
        **problem.post.arguments(chunk.batch, "POST"),
        **problem.range_arguments(chunk),
        **problem.mask_arguments(chunk),
        **problem.tile_constants(config, scores),
    )


@triton.jit(do_not_specialize=LENGTHS + STRIDES)
def _weights_and_maps_kernel(
    SCORES,
    GRADIENTS,
    WEIGHTS,
    SCORE_MAPS,
    GRADIENT_MAPS,
    WEIGHT_MAPS,
    LOG_SUMS,
    PARTIAL_SUMS,
    sum_batch_stride,
    sum_head_stride,
    head_stride,
    PRE_QUERY,
    PRE_KEY,
    pre_query_batch_stride,
    pre_query_stride,
    pre_key_batch_stride,
    pre_key_stride,
    PRE_STATIC,
    POST_QUERY,
    POST_KEY,
    post_query_batch_stride,
    post_query_stride,
    post_key_batch_stride,
    post_key_stride,
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
    if sees_any(first, last, block_key, BLOCK_KEYS):
        if PADDING is not None:
            PADDING += b * padding_stride
        if SEQUENCES is not None:
            SEQUENCES += b * sequence_stride
        if VISIBLE is not None:
            VISIBLE += b * visible_batch_stride
        bias = visible_bias(t, s, first, last, queries, keys, PADDING, SEQUENCES, VISIBLE, visible_stride)
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
        SCORES += first_head * head_stride
        GRADIENTS += first_head * head_stride
        WEIGHTS += first_head * head_stride
        LOG_SUMS += b * sum_batch_stride + group * HEADS * sum_head_stride
        PARTIAL_SUMS += ((b * tl.num_programs(0) + tl.program_id(0)) * 2 * GROUPS + group) * HEADS * ROWS
        SCORE_MAPS += (b * GROUPS + group) * (PRE_QUERY_RANK + PRE_KEY_RANK) * map_stride
        GRADIENT_MAPS += (b * GROUPS + group) * (POST_QUERY_RANK + POST_KEY_RANK) * map_stride
        WEIGHT_MAPS += (b * GROUPS + group) * (POST_QUERY_RANK + POST_KEY_RANK) * map_stride
        score_query_maps = zero_maps(PRE_QUERY_RANK, BLOCK_QUERIES, BLOCK_KEYS)
        score_key_maps = zero_maps(PRE_KEY_RANK, BLOCK_QUERIES, BLOCK_KEYS)
        gradient_query_maps = zero_maps(POST_QUERY_RANK, BLOCK_QUERIES, BLOCK_KEYS)
        gradient_key_maps = zero_maps(POST_KEY_RANK, BLOCK_QUERIES, BLOCK_KEYS)
        if PRE_QUERY_RANK + PRE_KEY_RANK + POST_QUERY_RANK + POST_KEY_RANK > 0:
            scores = SCORES
            gradients = GRADIENTS
            for h in range(HEADS):
                pre_t = h * pre_query_length + safe_t
                pre_s = h * pre_key_length + s
                post_t = h * post_query_length + safe_t
                post_s = h * post_key_length + s
                a = tl.load(scores + places).to(tl.float32)  # [BLOCK_QUERIES, BLOCK_KEYS]
                score_query_maps = add_to_query_maps(
                    score_query_maps, a, PRE_QUERY, pre_query_stride, pre_t, 0, PRE_QUERY_RANK
                )
                score_key_maps = add_to_key_maps(score_key_maps, a, PRE_KEY, pre_key_stride, pre_s, 0, PRE_KEY_RANK)
                d = tl.load(gradients + places).to(tl.float32)
                gradient_query_maps = add_to_query_maps(
                    gradient_query_maps, d, POST_QUERY, post_query_stride, post_t, POST_QUERY_RANK, POST_QUERY_RANK
                )
                gradient_key_maps = add_to_key_maps(
                    gradient_key_maps, d, POST_KEY, post_key_stride, post_s, POST_KEY_RANK, POST_KEY_RANK
                )
                scores += head_stride
                gradients += head_stride
        store_maps(SCORE_MAPS, places, map_stride, score_query_maps, 0, PRE_QUERY_RANK)
        store_maps(SCORE_MAPS, places, map_stride, score_key_maps, PRE_QUERY_RANK, PRE_KEY_RANK)
        store_maps(GRADIENT_MAPS, places, map_stride, gradient_query_maps, 0, POST_QUERY_RANK)
        store_maps(GRADIENT_MAPS, places, map_stride, gradient_key_maps, POST_QUERY_RANK, POST_KEY_RANK)
        weight_query_maps = zero_maps(POST_QUERY_RANK, BLOCK_QUERIES, BLOCK_KEYS)
        weight_key_maps = zero_maps(POST_KEY_RANK, BLOCK_QUERIES, BLOCK_KEYS)
        scores = SCORES
        gradients = GRADIENTS
        weights = WEIGHTS
        for h in range(HEADS):
            pre_t = h * pre_query_length + safe_t
            pre_s = h * pre_key_length + s
            post_t = h * post_query_length + safe_t
            post_s = h * post_key_length + s
            a = tl.load(scores + places).to(tl.float32)
            x = gated(
                a,
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
            x += bias
            x = spread_maps(
                x,
                score_query_maps,
                score_key_maps,
                PRE_QUERY,
                pre_query_stride,
                pre_t,
                PRE_KEY,
                pre_key_stride,
                pre_s,
                PRE_QUERY_RANK,
                PRE_QUERY_RANK,
                PRE_KEY_RANK,
                PRE_KEY_RANK,
            )
            if PRE_STATIC is not None:
                static = PRE_STATIC + group * HEADS * HEADS + h
                x = static_term(x, SCORES, places, head_stride, static, HEADS, BLOCK_KEYS)
            e = tl.exp2(x - tl.load(LOG_SUMS + h * sum_head_stride + safe_t)[:, None])
            tl.store(weights + places, e.to(WEIGHTS.dtype.element_ty))
            d = tl.load(gradients + places).to(tl.float32)
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
                p = static_term(p, GRADIENTS, places, head_stride, static, HEADS, BLOCK_KEYS)
            tl.store(PARTIAL_SUMS + (h * ROWS + row), tl.sum(e * p, 1))
            tl.store(PARTIAL_SUMS + ((GROUPS * HEADS + h) * ROWS + row), tl.sum(e, 1))
            weight_query_maps = add_to_query_maps(
                weight_query_maps, e, POST_QUERY, post_query_stride, post_t, 0, POST_QUERY_RANK
            )
            weight_key_maps = add_to_key_maps(weight_key_maps, e, POST_KEY, post_key_stride, post_s, 0, POST_KEY_RANK)
            scores += head_stride
            gradients += head_stride
            weights += head_stride
        store_maps(WEIGHT_MAPS, places, map_stride, weight_query_maps, 0, POST_QUERY_RANK)
        store_maps(WEIGHT_MAPS, places, map_stride, weight_key_maps, POST_QUERY_RANK, POST_KEY_RANK)
