"""
Composed attention of many queries on GPUs: section 3 and appendix D of the paper in bounded memory.

Every head's score has to be complete before any is composed, and every weight normalised before it is composed, so no
pass over the keys can do all. Instead a chunk of queries at a time has its scores in a workspace, of 16 bits for
16-bit inputs:

1. `scores_fwd_kernel`: a matrix product of queries and keys, only where a query sees a key; `matrices_fwd_kernel`: what
   queries and static maps do to scores, as a matrix for each query;
2. `softmax_sums_fwd_kernel`: pre-composition, and each head's sum of exponentials by part of the keys;
3. `reduce_parts_kernel`: the sums of all parts, as one logarithm a query and head;
4. `weights_fwd_kernel`: pre-composition again, the exponential, and post-composition, in place of the scores; where
   these need too many registers, `Sizes.IS_SPLIT`, `compose_fwd_kernel` does the last;
5. `output_fwd_kernel`: a matrix product of weights and values.

Exponents are to base 2, with log2(e) in the scale of the scores.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import LOG2_E, Call, cdiv, new_output, next_power_of_2
from . import blocks
from .tuning import PART, REDUCING, SCORES_BLOCKS, SCORES_PROGRAMS, SCORES_WIDTH, Sizes, product_tile
from .workspace import Mask, Stage, States, Work, plan_chunks


# Scores of float32 inputs stay in float32, and those of bfloat16 are in float16 too, which has three more bits of
# mantissa; scores beyond 65,504 would leave its range.
SCORE_TYPES = {torch.float32: torch.float32, torch.float16: torch.float16, torch.bfloat16: torch.float16}


def composed_forward(call: Call, workspace_bytes: int) -> tuple[Tensor, Tensor]:
    """
    Output (batch, heads, query, value channels) and logarithms to base 2 of the softmax's sums (batch, heads, query),
    within so many bytes beside; for a query that sees no key zeros and infinity.
    """
    query, value = call.query, call.value
    output = new_output(*call)
    log_sums = query.new_empty(query.shape[:3], dtype=torch.float32)
    sizes, mask, (pre, post) = Sizes.of(call, is_forward=True), Mask.of(call), Stage.both(call)
    # Scores, and the largest score and the sum of each part of the keys.
    bytes_per_column = query.shape[1] * query.element_size() + cdiv(8 * query.shape[1], PART.value)
    for chunk in plan_chunks(call, sizes, bytes_per_column, workspace_bytes):
        work = Work(mask, chunk, sizes)
        scores = work.new_scores(query, SCORE_TYPES[query.dtype])
        launch_scores(work, query, call.key, scores, call.scaling * LOG2_E)
        matrices = launch_matrices(work, pre, post, scores)
        largest, sums = work.new_parts(scores), work.new_parts(scores)
        inputs = {"pre": pre, "scores": scores, "matrices": matrices, **work.compose_options()}
        softmax_sums_fwd_kernel[work.compose_grid()](*work.arguments(), **inputs, largest=largest, sums=sums)
        launch_reduce_parts(work, largest, sums, log_sums)
        composed = scores.view(query.dtype)  # the same memory, in the type of the values that these are multiplied with
        launch_weights(work, pre, post, scores, matrices, log_sums, scores if sizes.IS_SPLIT else composed)
        if sizes.IS_SPLIT:
            launch_compose(work, post, scores, matrices, composed)
        launch_output(work, composed, value, output)
        del scores, composed, matrices, largest, sums, inputs  # whose memory is that of the next chunk
    return output, log_sums


def launch_scores(work: Work, q: Any, k: Any, scores: Tensor, scale: float, norms: Tensor | None = None) -> None:
    """Compute scale * q k^T: scores or, of output gradients and values, gradients of weights in a range by `norms`."""
    # Products of float32 run outside of the tensor cores, in registers, which larger steps overflow.
    step = min(32 if q.dtype == torch.float32 else 64, max(16, next_power_of_2(q.shape[3])))
    chunk, sizes = work.chunk, work.sizes
    columns = chunk.columns // sizes.BLOCK_N
    tiles = columns * (chunk.rows // sizes.BLOCK_M) * chunk.number * q.shape[1]
    key_blocks = SCORES_BLOCKS if tiles >= SCORES_BLOCKS * SCORES_PROGRAMS else 1
    # Grid: some blocks of keys, a block of queries, a head of a row of the batch.
    grid = cdiv(columns, key_blocks), chunk.rows // sizes.BLOCK_M, chunk.number * q.shape[1]
    options = {"key_blocks": key_blocks, "WIDTH": SCORES_WIDTH, "BLOCK_K": step, **sizes.product_options(q)}
    q, k = States.of(q), States.of(k, q.shape[1])
    scores_fwd_kernel[grid](*work.arguments(), q=q, k=k, scores=scores, scale=scale, norms=norms, **options)


def launch_matrices(work: Work, pre: Stage, post: Stage, scores: Tensor) -> Tensor:
    """Compute I + gate + w1 w2^T + static of queries: (batch, row, group, before and after the softmax, in, out)."""
    _, chunk, sizes = work
    matrices = scores.new_empty(chunk.number, chunk.rows, sizes.GROUPS, 2, sizes.HEADS_PADDED, sizes.HEADS_PADDED)
    # Grid: a query, before or after the softmax, a group of heads in a row of the batch.
    grid = chunk.rows, 2, chunk.number * sizes.GROUPS
    matrices_fwd_kernel[grid](*work.arguments(), pre=pre, post=post, matrices=matrices, **REDUCING)
    return matrices


def launch_reduce_parts(work: Work, largest: Tensor | None, sums: Tensor, results: Tensor) -> None:
    """Compute (batch, heads, query): sums over the parts of the keys, or with `largest` logarithms of softmax sums."""
    block, rows = 64, work.sizes.COMPOSE_M
    # Grid: a block of numbers of a block of rows, a block of rows, a row of the batch.
    grid = cdiv(rows * sums.shape[3], block), work.chunk.rows // rows, work.chunk.number
    options = {"BLOCK": block, "STEP": 16, **REDUCING}
    reduce_parts_kernel[grid](*work.arguments(), largest=largest, sums=sums, results=results, **options)


def launch_weights(
    work: Work, pre: Stage, post: Stage, scores: Tensor, matrices: Tensor, log_sums: Tensor, weights: Tensor
) -> None:
    """Compute weights from scores, composed where that is not another launch."""
    inputs = {"pre": pre, "post": post, "scores": scores, "matrices": matrices, "log_sums": log_sums}
    options = {"COMPOSE": not work.sizes.IS_SPLIT, **work.compose_options()}
    weights_fwd_kernel[work.compose_grid()](*work.arguments(), **inputs, weights=weights, **options)


def launch_compose(work: Work, post: Stage, weights: Tensor, matrices: Tensor, composed: Tensor) -> None:
    """Mix attention weights across heads after the softmax, where `launch_weights` has not."""
    inputs = {"post": post, "weights": weights, "matrices": matrices, **work.compose_options()}
    compose_fwd_kernel[work.compose_grid()](*work.arguments(), **inputs, composed=composed)


def launch_output(work: Work, weights: Tensor, v: Any, output: Any) -> None:
    """Compute weights . v for the queries of a chunk; or as gradients of queries those of scores by keys."""
    block, step = product_tile(v)
    # Grid: a block of channels, a block of queries, a head of a row of the batch.
    grid = cdiv(v.shape[3], block), work.chunk.rows // work.sizes.BLOCK_M, work.chunk.number * weights.shape[1]
    options = {"BLOCK_D": block, "BLOCK_K": step, **work.sizes.product_options(output)}
    v, o = States.of(v, weights.shape[1]), States.of(output)
    output_fwd_kernel[grid](*work.arguments(), weights=weights, v=v, o=o, **options)


@triton.jit
def _program_rows(mask, chunk, sizes, BLOCK: tl.constexpr):
    """Compute b, h, rows, the offset of a head's scores, first and last visible block (plus 1), and column 0's key."""
    pid_m, pid_bh = tl.program_id(1), tl.program_id(2)
    b, h = (pid_bh // sizes.ALL_HEADS).to(tl.int64) + chunk.batch, (pid_bh % sizes.ALL_HEADS).to(tl.int64)
    first_row = pid_m * sizes.BLOCK_M
    begin, end, base = blocks.visible_blocks(mask, b, chunk.start, first_row, sizes.BLOCK_M, BLOCK, sizes)
    offset = pid_bh.to(tl.int64) * chunk.rows * chunk.columns
    return b, h, first_row + tl.arange(0, sizes.BLOCK_M), offset, begin, end, base


@triton.jit
def scores_fwd_kernel(
    mask, chunk, sizes, q, k, scores, scale, norms, key_blocks, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Scores of a block of queries, read once, with some blocks of keys, read while others are multiplied."""
    b, h, row, offset, begin, end, base = _program_rows(mask, chunk, sizes, sizes.BLOCK_N)
    first = tl.program_id(0) * key_blocks
    begin = tl.maximum(begin, first) * sizes.BLOCK_N
    end = tl.minimum(end, first + key_blocks) * sizes.BLOCK_N
    if norms is not None:
        scale *= blocks.load_gradient_scale(norms)
    q_parts = ()
    for start in tl.static_range(0, q.CHANNELS, BLOCK_K):
        offs_d = start + tl.arange(0, BLOCK_K)
        q_pointers, is_query = blocks.state_tile(q, b, h, chunk.start + row, offs_d, mask.queries)
        q_parts = q_parts + (tl.load(q_pointers, mask=is_query, other=0.0),)
    for start in range(begin, end, WIDTH):
        column = start + tl.arange(0, WIDTH)
        total = tl.zeros([sizes.BLOCK_M, WIDTH], tl.float32)
        for i in tl.static_range(len(q_parts)):
            offs_d = i * BLOCK_K + tl.arange(0, BLOCK_K)
            k_pointers, is_key = blocks.state_tile(k, b, h, base + column, offs_d, mask.keys)
            k_part = tl.load(k_pointers, mask=is_key, other=0.0)
            total = tl.dot(q_parts[i], tl.trans(k_part), total, input_precision="ieee")
        offsets = row[:, None] * chunk.columns + column[None, :]
        tl.store(scores + offset + offsets, (total * scale).to(scores.dtype.element_ty))


@triton.jit
def matrices_fwd_kernel(mask, chunk, sizes, pre, post, matrices):
    """The matrix of one query before or after the softmax."""
    group, row, pid_stage = blocks.program_group(chunk, sizes), tl.program_id(0), tl.program_id(1)
    if chunk.start + row < mask.queries:
        if pid_stage == 0:
            matrix = _query_matrix(pre, group, chunk.start + row, sizes)
        else:
            matrix = _query_matrix(post, group, chunk.start + row, sizes)
        pointers = blocks.matrix_pointers(matrices, chunk, group, row, pid_stage, sizes)
        tl.store(pointers, matrix.to(matrices.dtype.element_ty))


@triton.jit
def _query_matrix(stage, group, t, sizes):
    """The matrix [heads in, heads out] of query t."""
    RANK: tl.constexpr = stage.query.RANK
    matrix = blocks.identity(sizes.HEADS_PADDED, tl.float32)
    factors = blocks.load_factors(stage.query, group.b, group.offs_h, t, group.is_head, tl.float32)
    if stage.query.GATE:
        matrix += matrix * factors[2 * RANK][None, :]
    for r in tl.static_range(RANK):
        matrix += factors[r][:, None] * factors[RANK + r][None, :]
    if stage.HAS_STATIC:
        offsets = group.offs_h[:, None] * sizes.HEADS + (group.offs_h - group.index * sizes.HEADS)[None, :]
        is_inside = group.is_head[:, None] & group.is_head[None, :]
        matrix += tl.load(stage.static + offsets, mask=is_inside, other=0).to(tl.float32)
    return matrix


@triton.jit
def softmax_sums_fwd_kernel(mask, chunk, sizes, pre, scores, matrices, largest, sums):
    """The largest composed score and the sum of exponentials, by part of the keys."""
    tile = blocks.program_tile(mask, chunk, sizes, scores.dtype.element_ty)
    if tile.is_seen:
        factors = blocks.load_key_factors(pre, tile, scores.dtype.element_ty)
        for row in range(tile.first_row, tile.end_row):
            a = blocks.load_tile(scores, chunk, tile, row)
            x = blocks.composed_scores(a, mask, chunk, sizes, tile, row, matrices, pre, factors)
            x = blocks.in_parts(x, sizes)
            highest = tl.maximum(tl.max(x, 1), -1e30)  # [COMPOSE_N // PART, HEADS]
            blocks.store_parts(largest, highest, chunk, tile, row, sizes)
            blocks.store_parts(sums, tl.sum(tl.exp2(x - highest[:, None, :]), 1), chunk, tile, row, sizes)


@triton.jit
def reduce_parts_kernel(mask, chunk, sizes, largest, sums, results, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Sums over parts of keys; with the largest scores logarithms of softmax sums, infinity if none is seen."""
    batch_row, first_row = tl.program_id(2).to(tl.int64), tl.program_id(1) * sizes.COMPOSE_M
    b = batch_row + chunk.batch
    begin, end, _ = blocks.visible_blocks(mask, b, chunk.start, first_row, sizes.COMPOSE_M, sizes.COMPOSE_N, sizes)
    begin, end = begin * (sizes.COMPOSE_N // PART), end * (sizes.COMPOSE_N // PART)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # rows x heads
    t = chunk.start + first_row + number // sizes.ALL_HEADS
    is_inside = (number < sizes.COMPOSE_M * sizes.ALL_HEADS) & (t < mask.queries)
    highest = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, end, STEP):
        part = start + tl.arange(0, STEP)
        offsets = ((batch_row * (chunk.columns // PART) + part) * chunk.rows + first_row)[:, None] * sizes.ALL_HEADS
        offsets += number[None, :]
        is_computed = (part < end)[:, None] & is_inside[None, :]
        part_sums = tl.load(sums + offsets, mask=is_computed, other=0.0)  # [STEP, BLOCK]
        if largest is not None:
            part_largest = tl.load(largest + offsets, mask=is_computed, other=-1e30)
            new = tl.maximum(highest, tl.max(part_largest, 0))
            part_sums *= tl.exp2(part_largest - new[None, :])
            total *= tl.exp2(highest - new)
            highest = new
        total += tl.sum(part_sums, 0)
    if largest is not None:
        total = tl.where(total > 0.0, highest + tl.log2(total), float("inf"))
    offsets = (b * sizes.ALL_HEADS + number % sizes.ALL_HEADS) * mask.queries + t
    tl.store(results + offsets, total, mask=is_inside)


@triton.jit
def weights_fwd_kernel(mask, chunk, sizes, pre, post, scores, matrices, log_sums, weights, COMPOSE: tl.constexpr):
    """Weights from scores, which they may take the place of, composed if COMPOSE."""
    DTYPE: tl.constexpr = scores.dtype.element_ty
    tile = blocks.program_tile(mask, chunk, sizes, DTYPE)
    if tile.is_seen:
        pre_factors = blocks.load_key_factors(pre, tile, DTYPE)
        post_factors = blocks.load_key_factors(post, tile, DTYPE)
        for row in range(tile.first_row, tile.end_row):
            a = blocks.load_tile(scores, chunk, tile, row)
            w = blocks.softmax_weights(a, mask, chunk, sizes, tile, row, matrices, log_sums, pre, pre_factors)
            if COMPOSE:
                matrix = tl.load(blocks.matrix_pointers(matrices, chunk, tile.group, row, 1, sizes))
                w, _sums = blocks.compose_heads(w.to(DTYPE), w, matrix, post_factors, tile.eye, post, False)
            blocks.store_tile(weights, w, chunk, tile, row)
    elif COMPOSE:
        blocks.store_zeros(weights, mask, chunk, sizes, tile)


@triton.jit
def compose_fwd_kernel(mask, chunk, sizes, post, weights, matrices, composed):
    """Weights composed after the softmax."""
    tile = blocks.program_tile(mask, chunk, sizes, weights.dtype.element_ty)
    if tile.is_seen:
        factors = blocks.load_key_factors(post, tile, weights.dtype.element_ty)
        for row in range(tile.first_row, tile.end_row):
            a = blocks.load_tile(weights, chunk, tile, row)
            matrix = tl.load(blocks.matrix_pointers(matrices, chunk, tile.group, row, 1, sizes))
            a32 = blocks.to_accumulator(a, tile.eye)
            y, _sums = blocks.compose_heads(a, a32, matrix, factors, tile.eye, post, False)
            blocks.store_tile(composed, y, chunk, tile, row)
    else:
        blocks.store_zeros(composed, mask, chunk, sizes, tile)


@triton.jit
def output_fwd_kernel(mask, chunk, sizes, weights, v, o, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr):
    """Sums of some channels of the values by the weights of a block of queries."""
    b, h, row, offset, begin, end, base = _program_rows(mask, chunk, sizes, BLOCK_K)
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    weights += offset
    total = tl.zeros([sizes.BLOCK_M, BLOCK_D], tl.float32)
    for step in range(begin, end):
        column = step * BLOCK_K + tl.arange(0, BLOCK_K)
        w = tl.load(weights + (row[:, None] * chunk.columns + column[None, :]))  # [BLOCK_M, BLOCK_K]
        pointers, is_key = blocks.state_tile(v, b, h, base + column, offs_d, mask.keys)
        total = tl.dot(w, tl.load(pointers, mask=is_key, other=0.0), total, input_precision="ieee")
    pointers, is_query = blocks.state_tile(o, b, h, chunk.start + row, offs_d, mask.queries)
    tl.store(pointers, total.to(o.pointer.dtype.element_ty), mask=is_query)
