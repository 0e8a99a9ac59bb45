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

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .call import LOG2_E, Call
from .plan import JOINING, PART, Chunk, Mask, Sizes, Stage, plan_chunks
from .products import launch_output, launch_products
from .tiles import (
    blocks_in_sight,
    columns_in_sight,
    compose_heads,
    factor_of_query,
    factors_of_keys,
    heads_of_program,
    hide,
    identity,
    in_registers,
    is_seen_by_product,
    load_heads,
    load_matrix,
    load_query_vector,
    part_places,
    real_keys,
    store_heads,
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
    # Scores, and the largest score and the sum of each part of the keys.
    bytes_per_column = heads * query.element_size() + -(-8 * heads // PART.value)
    for chunk in plan_chunks(call, sizes, bytes_per_column, workspace_bytes):
        scores = query.new_empty(chunk.shape(heads), dtype=SCORE_TYPES[query.dtype])
        weights = scores.view(query.dtype)
        launch_products(mask, chunk, sizes, query, call.key, scores, call.scaling * LOG2_E)
        matrices = query_matrices(mask, chunk, sizes, pre, post, scores)
        arguments = (mask, chunk, pre, post, scores, matrices)
        largest, sums = partial_sums(chunk, scores), partial_sums(chunk, scores)
        launch_weights(sizes, *arguments, None, largest, sums, None, None, None)
        join_over_keys(mask, chunk, sizes, largest, sums, log_sums)
        launch_weights(sizes, *arguments, log_sums, None, None, None, None, weights)
        launch_output(mask, chunk, sizes, weights, value, output)
    return output, log_sums


def query_matrices(mask: Mask, chunk: Chunk, sizes: Sizes, pre: Stage, post: Stage, scores: Tensor) -> Tensor:
    """
    (batch, row, group, 2, heads in, heads out), before and after the softmax: all that a query and the static map do to
    a tile of scores, I + gate + w1 w2^T + static, as one matrix.
    """
    size = sizes.HEADS_PADDED
    matrices = scores.new_empty(chunk.number, chunk.rows, sizes.GROUPS, 2, size, size)
    _matrices_kernel[(chunk.rows, 2, chunk.number * sizes.GROUPS)](
        mask, chunk, pre, post, matrices, sizes.constants, **JOINING
    )
    return matrices


def partial_sums(chunk: Chunk, scores: Tensor) -> Tensor:
    """Memory for a sum by part of the keys: (batch, part, row, heads)."""
    shape = (chunk.number, chunk.columns // PART.value, chunk.rows, scores.shape[1])
    return scores.new_empty(shape, dtype=torch.float32)


def launch_weights(sizes: Sizes, mask: Mask, chunk: Chunk, *arguments: Any) -> None:
    _weights_kernel[chunk.grid(sizes)](mask, chunk, *arguments, sizes.constants, **sizes.composing)


def join_over_keys(
    mask: Mask, chunk: Chunk, sizes: Sizes, largest: Tensor | None, sums: Tensor, joined: Tensor
) -> None:
    """
    Into (batch, heads, query) the sums of (batch, part of keys, row, heads) over the parts that were computed, or with
    the largest score of each part the logarithm of the softmax's sum.
    """
    block = 64
    grid = (-(-sizes.ROWS * sums.shape[3] // block), chunk.rows // sizes.ROWS, chunk.number)
    _join_over_keys_kernel[grid](mask, chunk, largest, sums, joined, sizes.constants, block, 16, **JOINING)


@triton.jit
def _matrices_kernel(mask, chunk, pre, post, matrices, sizes):
    """Program (row, before or after the softmax, group in a row of the batch)."""
    batch_row, b, group, h, is_head = heads_of_program(chunk, sizes)
    row = tl.program_id(0)
    if chunk.start + row < mask.queries:
        index = ((batch_row * chunk.rows + row) * sizes.GROUPS + group) * 2 + tl.program_id(1)
        member = tl.arange(0, sizes.HEADS_PADDED)
        places = member[:, None] * sizes.HEADS_PADDED + member[None, :]
        places += index * (sizes.HEADS_PADDED * sizes.HEADS_PADDED)
        if tl.program_id(1) == 0:
            matrix = _matrix(pre, b, group, h, is_head, chunk.start + row, sizes)
        else:
            matrix = _matrix(post, b, group, h, is_head, chunk.start + row, sizes)
        tl.store(matrices + places, matrix.to(matrices.dtype.element_ty))


@triton.jit
def _matrix(stage, b, group, h, is_head, t, sizes):
    RANK: tl.constexpr = stage.query.RANK
    matrix = identity(sizes.HEADS_PADDED, tl.float32)
    if stage.query.GATE:
        matrix += matrix * factor_of_query(stage.query, b, h, is_head, t, 2 * RANK)[None, :]
    for r in tl.static_range(RANK):
        w1 = factor_of_query(stage.query, b, h, is_head, t, r)
        matrix += w1[:, None] * factor_of_query(stage.query, b, h, is_head, t, RANK + r)[None, :]
    if stage.HAS_STATIC:
        places = h[:, None] * sizes.HEADS + (h - group * sizes.HEADS)[None, :]
        matrix += tl.load(stage.static + places, mask=is_head[:, None] & is_head[None, :], other=0).to(tl.float32)
    return matrix


@triton.jit
def _join_over_keys_kernel(mask, chunk, largest, sums, joined, sizes, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Program (part of a block of rows, block of rows, row of the batch)."""
    HEADS: tl.constexpr = sizes.GROUPS * sizes.HEADS
    batch_row = tl.program_id(2).to(tl.int64)
    b = batch_row + chunk.batch
    first_row = tl.program_id(1) * sizes.ROWS
    first, last, _base = columns_in_sight(mask, b, chunk.start, first_row, sizes.ROWS, sizes.PRODUCT_ROWS)
    begin, end = blocks_in_sight(first, last, sizes.KEYS)
    begin, end = begin * (sizes.KEYS // PART), end * (sizes.KEYS // PART)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t = chunk.start + first_row + element // HEADS
    inside = (element < sizes.ROWS * HEADS) & (t < mask.queries)
    highest = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, end, STEP):
        part = start + tl.arange(0, STEP)
        at = ((batch_row * (chunk.columns // PART) + part) * chunk.rows + first_row)[:, None] * HEADS
        is_there = (part < end)[:, None] & inside[None, :]
        of_parts = tl.load(sums + (at + element[None, :]), mask=is_there, other=0.0)  # [STEP, BLOCK]
        if largest is not None:
            of_largest = tl.load(largest + (at + element[None, :]), mask=is_there, other=-1e30)
            new = tl.maximum(highest, tl.max(of_largest, 0))
            of_parts *= tl.exp2(of_largest - new[None, :])
            total *= tl.exp2(highest - new)
            highest = new
        total += tl.sum(of_parts, 0)
    if largest is not None:
        # Infinity leaves a query that sees no key with weights of zero.
        total = tl.where(total > 0.0, highest + tl.log2(total), float("inf"))
    tl.store(joined + ((b * HEADS + element % HEADS) * mask.queries + t), total, mask=inside)


@triton.jit
def _weights_kernel(
    mask, chunk, pre, post, scores, matrices, log_sums, largest, sums, gradients, weights, composed, sizes
):
    """
    From scores by part of the keys the largest composed one and the sum of exponentials; or, if the logarithms of the
    sums are there, composed weights, which may take the place of the scores; or, if their gradients are there too, the
    weights before and after they are composed and the sums of the former times their gradients.
    """
    batch_row, b, group, h, is_head = heads_of_program(chunk, sizes)
    first_row, end_row, column, base, is_seen = tile_of_program(mask, b, chunk, sizes)
    places = tile_places(chunk, batch_row, h, column, sizes)
    if is_seen:
        s = base + column
        real, documents = real_keys(mask, b, s)
        eye = identity(sizes.HEADS_PADDED, scores.dtype.element_ty)
        pre_key = factors_of_keys(pre.key, b, h, is_head, s, real, scores.dtype.element_ty)
        post_key = ()
        if log_sums is not None:
            post_key = factors_of_keys(post.key, b, h, is_head, s, real, scores.dtype.element_ty)
        for row in range(first_row, end_row):
            at = places + row * chunk.columns
            if log_sums is not None:
                log_sum = load_query_vector(log_sums, mask, b, h, is_head, chunk.start + row, sizes)
            a = tl.trans(load_heads(scores + at, is_head, sizes))  # [KEYS, HEADS]
            if gradients is not None:
                d = tl.trans(load_heads(gradients + at, is_head, sizes))
            matrix = load_matrix(matrices, chunk, batch_row, group, row, 0, sizes)
            x, _maps = compose_heads(a, in_registers(a, eye), matrix, pre_key, eye, pre, False)
            x = hide(x, mask, b, chunk.start + row, s, real, documents)
            if log_sums is None:
                x = tl.reshape(x, [sizes.KEYS // PART, PART, sizes.HEADS_PADDED])
                highest = tl.maximum(tl.max(x, 1), -1e30)  # [KEYS // PART, HEADS]
                part = part_places(chunk, batch_row, h, row, sizes)
                tl.store(largest + part, highest, mask=is_head[None, :])
                tl.store(sums + part, tl.sum(tl.exp2(x - highest[:, None, :]), 1), mask=is_head[None, :])
            else:
                e = tl.exp2(x - log_sum[None, :])
                matrix = load_matrix(matrices, chunk, batch_row, group, row, 1, sizes)
                y, _maps = compose_heads(e.to(a.dtype), e, matrix, post_key, eye, post, False)
                store_heads(composed + at, y, is_head, sizes)
                if gradients is not None:
                    store_heads(weights + at, e, is_head, sizes)
                    p, _maps = compose_heads(d, in_registers(d, eye), matrix, post_key, eye, post, True)
                    product = tl.reshape(e * p, [sizes.KEYS // PART, PART, sizes.HEADS_PADDED])
                    part = part_places(chunk, batch_row, h, row, sizes)
                    tl.store(sums + part, tl.sum(product, 1), mask=is_head[None, :])
    elif log_sums is not None and gradients is None and is_seen_by_product(mask, b, chunk, first_row, sizes):
        # [`launch_output`] reads it; the products over queries look for themselves.
        store_zeros(composed + places, chunk, first_row, is_head, sizes)
