"""
Gradients of composed attention on GPUs, over a bounded workspace and without atomic additions.

Only the inputs and the logarithms of the softmax's sums are kept from the forward pass. A chunk of queries at a time:

1. scores, and gradients of composed weights, by matrix products;
2. weights before they are composed, and by block of keys the softmax's delta, the sum over the keys of a weight times
   its gradient, for which all heads are needed (it is not the sum of output times gradient);
3. composed weights, and gradients of composed scores;
4. gradients of scores;
5. gradients of queries, keys and values by matrix products.

Steps 3 and 4 give the gradients of the keys' factors too. Those of the queries' factors and of the static map follow
from the gradient of a query's matrix, which is one more product: of the inputs of its composition with the gradients of
the outputs, over the keys. Each part of a gradient has one program, which adds up what blocks contribute, so two runs
give the same bits.

Letters: a input of a composition, d gradient of its output. The gradient of a is the transposed composition of d. The
gradient of a key's w1 is a times the map of d, of w2 it is d times the map of a, and of the gate it is a d, each summed
over the queries. For 16-bit inputs d is in float16, times a power of 2 that keeps it in that type's range.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..call import LOG2_E, Call, cdiv
from .attention_forward import SCORE_TYPES, compose_weights, join_over_keys, partial_sums, query_matrices
from .composing import _compositions_kernel, _join_over_queries_kernel, _matrix_gradients_kernel
from .layout import JOINING, PART, Mask, Sizes, Stage, Work, plan_chunks
from .products import launch_key_products, launch_output, launch_products


# What the product over the keys is launched with.
MATRIX_GRADIENTS = {"num_warps": 2, "num_stages": 4}


def composed_backward(
    output_gradient: Tensor, call: Call, log_sums: Tensor, workspace_bytes: int
) -> tuple[Tensor | None, ...]:
    """
    Gradients of the first nine tensors of a call, in their types and shapes, within so many bytes beside inputs and
    gradients; `log_sums` are those of [`composed_forward`]. What is not seen or sees nothing has gradients of zero.
    """
    query, key, value = call.query, call.key, call.value
    sizes, mask, (pre, post) = Sizes.of(call, is_forward=False), Mask.of(call), Stage.both(call)
    chunks = list(plan_chunks(call, sizes, _bytes_per_column(sizes, query, pre, post), workspace_bytes))
    # What one chunk does not complete is summed in float32, whatever the type of the tensors.
    results = call.new_gradients("static" if chunks[-1].start == 0 else ("static", "key", "value"))
    norms = _largest_norms(output_gradient, value)
    deltas, of_totals = torch.empty_like(log_sums), torch.empty_like(log_sums)
    for chunk in chunks:
        work = Work(mask, chunk, sizes)
        scores = query.new_empty(chunk.shape(query.shape[1]), dtype=SCORE_TYPES[query.dtype])
        gradients, weights = torch.empty_like(scores), torch.empty_like(scores)
        composed, of_scores = query.new_empty(scores.shape), gradients.view(query.dtype)
        launch_products(work, query, key, scores, call.scaling * LOG2_E)
        launch_products(work, output_gradient, value, gradients, 1.0, norms)
        matrices, sums = query_matrices(work, pre, post, scores), partial_sums(chunk, scores)
        totals = partial_sums(chunk, scores) if scores.dtype == torch.float32 else None
        inputs = ((pre, post), scores, matrices, log_sums)
        compose_weights(work, *inputs, sums, gradients, weights, composed, totals)
        join_over_keys(work, None, sums, deltas)
        if totals is not None:
            # Logarithms of large scores are rounded so far that weights do not add up to 1. Divided by what they add up
            # to, the gradients of a query's scores add up to 0; a query that sees no key has 0 here.
            join_over_keys(work, None, totals, of_totals)
            deltas /= of_totals.clamp(min=0.5)
        _stage_gradients(work, post, 1.0, (weights, gradients, gradients, deltas, norms, matrices), *results[6:])
        _stage_gradients(work, pre, call.scaling, (scores, gradients, of_scores, None, norms, matrices), *results[3:6])
        launch_key_products(work, composed, output_gradient, results[2])
        launch_output(work, of_scores, key, results[0])
        launch_key_products(work, of_scores, query, results[1])
        # Their memory is that of the next chunk.
        del scores, gradients, weights, composed, of_scores, matrices, sums, inputs, totals
    return tuple(None if result is None else result.to(tensor.dtype) for result, tensor in zip(results, call))


def _bytes_per_column(sizes: Sizes, query: Tensor, *stages: Stage) -> int:
    """Of the workspace, for each query of a row of the batch."""
    heads, number = query.shape[1], max(stage.key.NUMBER.value for stage in stages)
    # Deltas, in float32 with totals, and sums for the keys' factors; and four of what the scores are.
    sums = cdiv(2 * query.element_size() * heads, PART.value) + cdiv(4 * heads * number, sizes.COMPOSE_M)
    return 4 * heads * query.element_size() + sums


def _largest_norms(*tensors: Tensor) -> Tensor | None:
    """Of the vectors of two 16-bit tensors (batch, heads, length, channels), (2,) in float32."""
    if tensors[0].dtype == torch.float32:
        return None
    largest = tensors[0].new_empty(2, dtype=torch.float32)
    for tensor, result in zip(tensors, largest.unbind()):
        torch.amax(torch.linalg.vector_norm(tensor, dim=3, dtype=torch.float32), (0, 1, 2), out=result)
    return largest


def _stage_gradients(
    work: Work, stage: Stage, factor: float, tensors: Sequence[Any], of_query: Any, of_key: Any, of_static: Any
) -> None:
    """
    Of the composition before the softmax or, if there are deltas, after it: the gradients of its factors and static
    map, and of its inputs, times a factor, or after the softmax, with the deltas, of the softmax's inputs. The tensors
    are its inputs, the gradients of its outputs, memory for those of its inputs, deltas, norms and query matrices.
    """
    mask, chunk, sizes = work
    inputs, gradients, _, deltas, norms, matrices = tensors
    heads, rows = inputs.shape[1], min(chunk.rows, mask.queries - chunk.start)
    of_factors = 1 / LOG2_E if deltas is None else 1.0  # which scores hold
    if of_query is not None or of_static is not None:
        maps = None if of_static is None else matrices.new_empty(matrices[:, :, :, 0].shape, dtype=torch.float32)
        arguments = (stage, inputs, gradients, norms, of_query, maps, of_factors)
        grid = (chunk.rows, 1, chunk.number * sizes.GROUPS)
        work.launch(_matrix_gradients_kernel, grid, MATRIX_GRADIENTS, *arguments)
        if of_static is not None:
            of_static += maps[:, :rows, :, : sizes.HEADS, : sizes.HEADS].sum((0, 1))
    partial = None
    if of_key is not None:
        number = stage.key.NUMBER.value
        shape = (chunk.number, chunk.rows // sizes.COMPOSE_M, chunk.columns, number, heads)
        partial = inputs.new_empty(shape, dtype=torch.float32)
    outputs, *others = tensors[2:]
    launches = [(outputs, partial, True, True)]
    if sizes.IS_SPLIT and of_key is not None:
        launches = [(None, partial, True, False), (None, partial, False, True), (outputs, None, False, False)]
    for results, sums, *are_summed in launches:
        arguments = (stage, inputs, gradients, results, *others, sums, factor, *are_summed)
        # Unasked, NVIDIA's assembler gives some forms of this kernel 32 registers.
        work.launch_composing(_compositions_kernel, *arguments, maxnreg=255)
    if of_key is not None:
        keys, values = 16, 64
        grid = (cdiv(mask.keys, keys), cdiv(number * heads, values), chunk.number)
        arguments = (partial, stage, of_key, of_factors, values, keys, chunk.start == 0)
        work.launch(_join_over_queries_kernel, grid, JOINING, *arguments)
