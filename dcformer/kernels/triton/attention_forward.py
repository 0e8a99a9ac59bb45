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
from torch import Tensor

from ..call import LOG2_E, Call, cdiv, new_output
from .composing import _join_over_keys_kernel, _matrices_kernel, _weights_kernel
from .layout import JOINING, PART, Chunk, Mask, Sizes, Stage, Work, plan_chunks
from .products import launch_output, launch_products


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
    output = new_output(*call)
    log_sums = query.new_empty(batch, heads, queries, dtype=torch.float32)
    sizes, mask, stages = Sizes.of(call, is_forward=True), Mask.of(call), Stage.both(call)
    # Scores, and the largest score and the sum of each part of the keys.
    bytes_per_column = heads * query.element_size() + cdiv(8 * heads, PART.value)
    for chunk in plan_chunks(call, sizes, bytes_per_column, workspace_bytes):
        work = Work(mask, chunk, sizes)
        scores = query.new_empty(chunk.shape(heads), dtype=SCORE_TYPES[query.dtype])
        weights = scores.view(query.dtype)
        launch_products(work, query, call.key, scores, call.scaling * LOG2_E)
        matrices = query_matrices(work, *stages, scores)
        largest, sums = partial_sums(chunk, scores), partial_sums(chunk, scores)
        inputs = (*stages, scores, matrices)
        work.launch_composing(_weights_kernel, *inputs, None, largest, sums, None, None, None, None)
        join_over_keys(work, largest, sums, log_sums)
        compose_weights(work, stages, scores, matrices, log_sums, None, None, None, weights, None)
        launch_output(work, weights, value, output)
        del scores, weights, inputs, matrices, largest, sums  # whose memory is that of the next chunk
    return output, log_sums


def compose_weights(
    work: Work, stages: tuple[Stage, Stage], scores: Tensor, matrices: Tensor, log_sums: Tensor, *others: Tensor | None
) -> None:
    """
    The others are sums, gradients, weights, composed weights and totals, as for the kernel, which may be launched once
    for each of its results.
    """
    sums, gradients, weights, composed, totals = others
    if work.sizes.IS_SPLIT:
        weights = scores if weights is None else weights
        inputs = (*stages, scores, matrices, log_sums, None, None)
        work.launch_composing(_weights_kernel, *inputs, None, weights, None, None)
        inputs = (*stages, weights, matrices, None, None)
        if gradients is not None:
            work.launch_composing(_weights_kernel, *inputs, sums, gradients, None, None, totals)
        work.launch_composing(_weights_kernel, *inputs, None, None, None, composed, None)
    else:
        inputs = (*stages, scores, matrices, log_sums, None)
        work.launch_composing(_weights_kernel, *inputs, sums, gradients, weights, composed, totals)


def query_matrices(work: Work, pre: Stage, post: Stage, scores: Tensor) -> Tensor:
    """
    (batch, row, group, 2, heads in, heads out), before and after the softmax: all that a query and the static map do to
    a tile of scores, I + gate + w1 w2^T + static, as one matrix.
    """
    _, chunk, sizes = work
    matrices = scores.new_empty(chunk.number, chunk.rows, sizes.GROUPS, 2, sizes.HEADS_PADDED, sizes.HEADS_PADDED)
    work.launch(_matrices_kernel, (chunk.rows, 2, chunk.number * sizes.GROUPS), JOINING, pre, post, matrices)
    return matrices


def partial_sums(chunk: Chunk, scores: Tensor) -> Tensor:
    """Memory for a sum by part of the keys: (batch, part, row, heads)."""
    shape = (chunk.number, chunk.columns // PART.value, chunk.rows, scores.shape[1])
    return scores.new_empty(shape, dtype=torch.float32)


def join_over_keys(work: Work, largest: Tensor | None, sums: Tensor, joined: Tensor) -> None:
    """
    Into (batch, heads, query) the sums of (batch, part of keys, row, heads) over the parts that were computed, or with
    the largest score of each part the logarithm of the softmax's sum.
    """
    block, rows = 64, work.sizes.COMPOSE_M
    grid = (cdiv(rows * sums.shape[3], block), work.chunk.rows // rows, work.chunk.number)
    work.launch(_join_over_keys_kernel, grid, JOINING, largest, sums, joined, block, 16)
