"""
Composed attention of many queries on GPUs: section 3 and appendix D of the paper in five kernels, in bounded memory.

Every head's score has to be complete before any is composed, and every weight normalised before it is composed, so no
pass over the keys can do all. Instead a chunk of queries at a time has its scores in a workspace of 16 bits:

1. scores: a matrix product of queries and keys, only where a query sees a key;
2. pre-composition, and each head's sum of exponentials by block of keys;
3. the sums of all blocks, as one logarithm a query and head;
4. weights: pre-composition again, the exponential, and post-composition, in place of the scores;
5. output: a matrix product of weights and values.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .call import LOG2_E, Call
from .plan import COMPOSING, JOINING, Chunk, Mask, Sizes, Stage, plan_chunks
from .products import launch_output, launch_products
from .tiles import (
    blocks_in_sight,
    columns_in_sight,
    compose,
    heads_of_program,
    is_seen_by_product,
    key_factors,
    load_sums,
    maps_over_heads,
    mask_bias,
    query_factors,
    static_map,
    store_zeros,
    tile_of_program,
    tile_places,
)


# Scores of float32 inputs stay in float32; those of 16-bit inputs have their range of exponents from the composition's
# small numbers, so what counts is the mantissa: float16 errs an eighth as much as bfloat16.
SCORE_TYPES = {torch.float32: torch.float32, torch.float16: torch.float16, torch.bfloat16: torch.float16}


def composed_forward(call: Call, workspace_bytes: int) -> tuple[Tensor, Tensor]:
    """
    Composed attention (batch, heads, query, value channels) within so many bytes beside inputs and outputs, and the
    logarithms to base 2 of the softmax's sums (batch, heads, query); for a query that sees no key zeros and infinity.
    """
    query, value = call.query, call.value
    batch, heads, queries, _ = query.shape
    output = query.new_empty(batch, queries, heads, value.shape[3]).transpose(1, 2)
    log_sums = query.new_empty(batch, heads, queries, dtype=torch.float32)
    sizes, mask = Sizes.of(call), Mask.of(call)
    pre, post = Stage.both(call)
    # Scores, and the largest score and the sum of each block of keys.
    bytes_per_column = heads * query.element_size() + -(-8 * heads // sizes.KEYS)
    for chunk in plan_chunks(call, sizes, bytes_per_column, workspace_bytes):
        scores = query.new_empty(chunk.shape(heads), dtype=SCORE_TYPES[query.dtype])
        weights = scores.view(query.dtype)
        launch_products(mask, chunk, sizes, query, call.key, scores, call.scaling * LOG2_E)
        _launch_log_sums(mask, chunk, sizes, pre, scores, log_sums)
        _weights_kernel[chunk.grid(sizes)](
            mask, chunk, pre, post, scores, weights, log_sums, sizes.constants, **COMPOSING
        )
        launch_output(mask, chunk, sizes, weights, value, output)
    return output, log_sums


def _launch_log_sums(mask: Mask, chunk: Chunk, sizes: Sizes, pre: Stage, scores: Tensor, log_sums: Tensor) -> None:
    shape = (chunk.number, chunk.columns // sizes.KEYS, chunk.rows, scores.shape[1])
    largest, sums = (scores.new_empty(shape, dtype=torch.float32) for _ in range(2))
    _block_sums_kernel[chunk.grid(sizes)](mask, chunk, pre, scores, largest, sums, sizes.constants, **COMPOSING)
    block = 512
    grid = (-(-sizes.ROWS * scores.shape[1] // block), chunk.rows // sizes.ROWS, chunk.number)
    _join_sums_kernel[grid](mask, chunk, largest, sums, log_sums, sizes.constants, block, **JOINING)


@triton.jit
def _block_sums_kernel(mask, chunk, pre, scores, largest, sums, sizes):
    batch_row, b, group, h, is_head = heads_of_program(chunk, sizes)
    first_row, column, base, is_seen = tile_of_program(mask, b, chunk, sizes)
    if is_seen:
        s = base + column
        key = key_factors(pre.key, b, h, is_head, s, s < mask.keys)
        static = static_map(pre, group, sizes.HEADS, sizes.HEADS_PADDED)
        partial = (batch_row * tl.num_programs(0) + tl.program_id(0)) * chunk.rows
        for start in tl.range(0, sizes.ROWS, sizes.QUERIES, num_stages=2):
            row = first_row + start + tl.arange(0, sizes.QUERIES)
            t = chunk.start + row
            places = tile_places(chunk, batch_row, h, row, column, sizes)
            a = tl.load(scores + places, mask=is_head[None, :, None], other=0).to(tl.float32)  # [QUERIES, HEADS, KEYS]
            query = query_factors(pre.query, b, h, is_head, t, t < mask.queries)
            maps = maps_over_heads(a, query, key, pre, False)
            x = compose(a, maps, query, key, static, pre, False) + mask_bias(mask, b, t, s)
            highest = tl.maximum(tl.max(x, 2), -1e30)  # [QUERIES, HEADS]
            total = tl.sum(tl.exp2(x - highest[:, :, None]), 2)
            at = (partial + row)[:, None] * (sizes.GROUPS * sizes.HEADS) + h[None, :]
            tl.store(largest + at, highest, mask=is_head[None, :])
            tl.store(sums + at, total, mask=is_head[None, :])


@triton.jit
def _join_sums_kernel(mask, chunk, largest, sums, log_sums, sizes, BLOCK: tl.constexpr):
    """The logarithm of all blocks' sums: program (part of a block of rows, block of rows, row of the batch)."""
    HEADS: tl.constexpr = sizes.GROUPS * sizes.HEADS
    batch_row = tl.program_id(2).to(tl.int64)
    b = batch_row + chunk.batch
    first_row = tl.program_id(1) * sizes.ROWS
    first, last, _base = columns_in_sight(mask, b, chunk.start, first_row, sizes.ROWS, sizes.PRODUCT_ROWS)
    begin, end = blocks_in_sight(first, last, sizes.KEYS)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = element < sizes.ROWS * HEADS
    highest = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for block in range(begin, end):
        at = ((batch_row * (chunk.columns // sizes.KEYS) + block) * chunk.rows + first_row) * HEADS + element
        of_block = tl.load(largest + at, mask=inside, other=-1e30)
        new = tl.maximum(highest, of_block)
        total = total * tl.exp2(highest - new) + tl.load(sums + at, mask=inside, other=0.0) * tl.exp2(of_block - new)
        highest = new
    # Infinity leaves a query that sees no key with weights of zero.
    log_sum = tl.where(total > 0.0, highest + tl.log2(total), float("inf"))
    t = chunk.start + first_row + element // HEADS
    place = (b * HEADS + element % HEADS) * mask.queries + t
    tl.store(log_sums + place, log_sum, mask=inside & (t < mask.queries))


@triton.jit
def _weights_kernel(mask, chunk, pre, post, scores, weights, log_sums, sizes):
    """Composed weights, in the place of the scores."""
    batch_row, b, group, h, is_head = heads_of_program(chunk, sizes)
    first_row, column, base, is_seen = tile_of_program(mask, b, chunk, sizes)
    if is_seen:
        s = base + column
        pre_key = key_factors(pre.key, b, h, is_head, s, s < mask.keys)
        post_key = key_factors(post.key, b, h, is_head, s, s < mask.keys)
        pre_static = static_map(pre, group, sizes.HEADS, sizes.HEADS_PADDED)
        post_static = static_map(post, group, sizes.HEADS, sizes.HEADS_PADDED)
        for start in tl.range(0, sizes.ROWS, sizes.QUERIES, num_stages=2):
            row = first_row + start + tl.arange(0, sizes.QUERIES)
            t = chunk.start + row
            is_query = t < mask.queries
            places = tile_places(chunk, batch_row, h, row, column, sizes)
            a = tl.load(scores + places, mask=is_head[None, :, None], other=0).to(tl.float32)  # [QUERIES, HEADS, KEYS]
            pre_query = query_factors(pre.query, b, h, is_head, t, is_query)
            maps = maps_over_heads(a, pre_query, pre_key, pre, False)
            x = compose(a, maps, pre_query, pre_key, pre_static, pre, False) + mask_bias(mask, b, t, s)
            e = tl.exp2(x - load_sums(log_sums, mask, b, h, is_head, t, sizes))
            post_query = query_factors(post.query, b, h, is_head, t, is_query)
            maps = maps_over_heads(e, post_query, post_key, post, False)
            y = compose(e, maps, post_query, post_key, post_static, post, False)
            tl.store(weights + places, y.to(weights.dtype.element_ty), mask=is_head[None, :, None])
    elif is_seen_by_product(mask, b, chunk, first_row, tl.program_id(0) * sizes.KEYS, sizes):
        store_zeros(weights, chunk, batch_row, h, is_head, first_row, column, sizes)
