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
the outputs, over the keys. Programs that each own a part of a gradient add up what blocks contribute, so two runs give
the same bits.

Letters: a input of a composition, d gradient of its output. The gradient of a is the transposed composition of d. The
gradient of a key's w1 is a times the map of d, of w2 it is d times the map of a, and of the gate it is a d, each summed
over the queries. For 16-bit inputs d is in float16, times a power of 2 that keeps it in that type's range.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .call import LOG2_E, Call
from .forward import SCORE_TYPES, join_over_keys, launch_weights, partial_sums, query_matrices
from .plan import JOINING, PART, Chunk, Mask, Sizes, Stage, plan_chunks
from .products import launch_key_products, launch_output, launch_products
from .tiles import (
    blocks_in_sight,
    columns_in_sight,
    compose_heads,
    factor_of_query,
    factors_of_keys,
    first_key_of_block,
    heads_of_program,
    identity,
    in_registers,
    is_seen_by_product,
    key_ranges,
    load_heads,
    load_matrix,
    load_query_vector,
    real_keys,
    rows_in_sight,
    store_heads,
    store_zeros,
    tile_of_program,
    tile_places,
)


# What the product over the keys is launched with.
_MATRIX_GRADIENTS: dict[str, Any] = {"num_warps": 2, "num_stages": 4, "enable_fp_fusion": True}
# Bound of the scaled gradients of weights, far enough from float16's largest number for what compositions make of them.
_LARGEST_GRADIENT = 2.0**10


def composed_backward(
    output_gradient: Tensor, call: Call, log_sums: Tensor, workspace_bytes: int
) -> tuple[Tensor | None, ...]:
    """
    Gradients of the first nine tensors of a call, in their types and shapes, within so many bytes beside inputs and
    gradients; `log_sums` are those of [`composed_forward`]. What is not seen or sees nothing has gradients of zero.
    """
    query, key, value = call.query, call.key, call.value
    sizes, mask = Sizes.of(call), Mask.of(call)
    stages = Stage.both(call)
    chunks = list(plan_chunks(call, sizes, _bytes_per_column(sizes, query, stages), workspace_bytes))
    # What one chunk does not complete is summed in float32, whatever the type of the tensors.
    sum_type = torch.float32 if chunks[-1].start > 0 else None
    query_gradient, pre_query, post_query = (_new(tensor) for tensor in (query, call.pre_query, call.post_query))
    key_gradient, value_gradient, pre_key, post_key = (
        _new(tensor, sum_type) for tensor in (key, value, call.pre_key, call.post_key)
    )
    statics = [
        None if static is None else torch.zeros_like(static, dtype=torch.float32)
        for static in (call.pre_static, call.post_static)
    ]
    scale = _scale(output_gradient, value)
    deltas = torch.empty_like(log_sums)
    for chunk in chunks:
        scores = query.new_empty(chunk.shape(query.shape[1]), dtype=SCORE_TYPES[query.dtype])
        gradients, weights = torch.empty_like(scores), torch.empty_like(scores)
        composed = query.new_empty(scores.shape)
        final_gradients = gradients.view(query.dtype)
        launch_products(mask, chunk, sizes, query, key, scores, call.scaling * LOG2_E)
        launch_products(mask, chunk, sizes, output_gradient, value, gradients, 1.0, scale)
        matrices = query_matrices(mask, chunk, sizes, *stages, scores)
        sums = partial_sums(chunk, scores)
        launch_weights(
            *(sizes, mask, chunk, *stages, scores, matrices, log_sums, None, sums, gradients, weights, composed)
        )
        join_over_keys(mask, chunk, sizes, None, sums, deltas)
        after = (weights, gradients, gradients, deltas, 1.0, post_query, post_key, statics[1])
        before = (scores, gradients, final_gradients, None, call.scaling, pre_query, pre_key, statics[0])
        _stage_gradients(mask, chunk, sizes, stages[1], 1, matrices, scale, *after)
        _stage_gradients(mask, chunk, sizes, stages[0], 0, matrices, scale, *before)
        launch_key_products(mask, chunk, sizes, composed, output_gradient, value_gradient)
        launch_output(mask, chunk, sizes, final_gradients, key, query_gradient)
        launch_key_products(mask, chunk, sizes, final_gradients, query, key_gradient)
    gradients = (query_gradient, key_gradient, value_gradient, pre_query, pre_key, statics[0], post_query, post_key)
    return tuple(
        None if gradient is None else gradient.to(tensor.dtype)
        for gradient, tensor in zip((*gradients, statics[1]), call[:9])
    )


def _new(tensor: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    return None if tensor is None else tensor.new_empty(tensor.shape, dtype=dtype)


def _bytes_per_column(sizes: Sizes, query: Tensor, stages: tuple[Stage, Stage]) -> int:
    """Of the workspace, for each query of a row of the batch."""
    heads = sizes.GROUPS * sizes.HEADS
    sums = -(-4 * heads // PART.value) + -(-4 * heads * max(stage.key.number for stage in stages) // sizes.ROWS)
    return 4 * heads * query.element_size() + sums


def _scale(output_gradient: Tensor, value: Tensor) -> Tensor | None:
    """What gradients of 16-bit inputs are multiplied by: a power of 2, from a bound for those of composed weights."""
    if value.dtype == torch.float32:
        return None
    norms = [torch.linalg.vector_norm(tensor, dim=3, dtype=torch.float32).amax() for tensor in (output_gradient, value)]
    return (_LARGEST_GRADIENT / (norms[0] * norms[1])).log2().floor().clamp(-100, 100).exp2()


def _stage_gradients(
    mask: Mask,
    chunk: Chunk,
    sizes: Sizes,
    stage: Stage,
    index: int,
    matrices: Tensor,
    scale: Tensor | None,
    inputs: Tensor,
    gradients: Tensor,
    outputs: Tensor,
    deltas: Tensor | None,
    factor: float,
    of_query: Tensor | None,
    of_key: Tensor | None,
    of_static: Tensor | None,
) -> None:
    """
    Of one composition, from its inputs and the gradients of its outputs: gradients of the factors and the static map;
    after the softmax (index 1, with deltas) its outputs and, in place, gradients of scores that were composed before;
    before the softmax the gradients of its inputs, times a factor, as outputs.
    """
    # Scores hold a factor of log2(e).
    of_factors = 1.0 if index == 1 else 1 / LOG2_E
    heads = inputs.shape[1]
    if of_query is not None or of_static is not None:
        grid = (chunk.rows, 1, chunk.number * sizes.GROUPS)
        size = sizes.HEADS_PADDED
        maps = None if of_static is None else _sums(inputs, chunk.number, chunk.rows, sizes.GROUPS, size, size)
        _matrix_gradients_kernel[grid](
            *(mask, chunk, stage, inputs, gradients, scale, of_query, maps, of_factors, sizes.constants),
            **_MATRIX_GRADIENTS,
        )
        if of_static is not None and maps is not None:
            rows = min(chunk.rows, mask.queries - chunk.start)
            of_static += maps[:, :rows, :, : sizes.HEADS, : sizes.HEADS].sum((0, 1))
    shape = (chunk.number, chunk.rows // sizes.ROWS, chunk.columns, stage.key.number, heads)
    partial = None if of_key is None else _sums(inputs, *shape)
    # Unasked, NVIDIA's assembler gives some forms of this kernel 32 registers.
    options = {"maxnreg": 255, **sizes.composing}
    _compositions_kernel[chunk.grid(sizes)](
        *(mask, chunk, stage, index, inputs, gradients, outputs, matrices, deltas, scale, partial, factor),
        sizes.constants,
        **options,
    )
    if of_key is not None:
        keys, values = 16, 64
        _join_over_queries_kernel[(-(-mask.keys // keys), -(-shape[3] * heads // values), chunk.number)](
            *(mask, chunk, partial, of_key, of_factors, stage.key.number, sizes.constants, values, keys),
            *(chunk.start == 0,),
            **JOINING,
        )


def _sums(tensor: Tensor, *shape: int) -> Tensor:
    return tensor.new_empty(shape, dtype=torch.float32)


@triton.jit
def _compositions_kernel(
    mask,
    chunk,
    stage,
    STAGE: tl.constexpr,
    inputs,
    gradients,
    outputs,
    matrices,
    deltas,
    scale,
    key_sums,
    factor,
    sizes,
):
    """
    See `_stage_gradients`; `key_sums` are what a tile adds to the gradients of the keys' factors, (batch, block of
    queries, column, factors, heads).
    """
    HEADS: tl.constexpr = sizes.GROUPS * sizes.HEADS
    NUMBER: tl.constexpr = 2 * stage.key.RANK + stage.key.GATE
    batch_row, b, group, h, is_head = heads_of_program(chunk, sizes)
    first_row, end_row, column, base, is_seen = tile_of_program(mask, b, chunk, sizes)
    places = tile_places(chunk, batch_row, h, column, sizes)
    if is_seen:
        s = base + column
        real, _documents = real_keys(mask, b, s)
        eye = identity(sizes.HEADS_PADDED, inputs.dtype.element_ty)
        key = factors_of_keys(stage.key, b, h, is_head, s, real, inputs.dtype.element_ty)
        inverse = 1.0
        if scale is not None:
            inverse = 1.0 / tl.load(scale)
            if deltas is None:
                factor *= inverse
        w1_sums = zero_sums(stage.key.RANK, sizes)
        w2_sums = zero_sums(stage.key.RANK, sizes)
        gate_sums = zero_sums(stage.key.GATE, sizes)
        for row in range(first_row, end_row):
            at = places + row * chunk.columns
            a = tl.trans(load_heads(inputs + at, is_head, sizes))  # [KEYS, HEADS]
            d = tl.trans(load_heads(gradients + at, is_head, sizes))
            matrix = load_matrix(matrices, chunk, batch_row, group, row, STAGE, sizes)
            if deltas is not None:
                delta = load_query_vector(deltas, mask, b, h, is_head, chunk.start + row, sizes)
            a32 = in_registers(a, eye)
            d32 = in_registers(d, eye)
            p, d_maps = compose_heads(d, d32, matrix, key, eye, stage, True)
            if deltas is not None:
                p = a32 * (p - delta[None, :])
            else:
                p *= factor
            store_heads(outputs + at, p, is_head, sizes)
            w1_sums = add_products(w1_sums, d_maps, a32)
            _y, a_maps = compose_heads(a, a32, matrix, key, eye, stage, False)
            w2_sums = add_products(w2_sums, a_maps, d32)
            gate_sums = add_products(gate_sums, (a32,) if stage.key.GATE else (), d32)
        if key_sums is not None:
            sums = w1_sums + w2_sums + gate_sums
            block = batch_row * tl.num_programs(1) + tl.program_id(1)
            at = (block * chunk.columns + column)[:, None] * (NUMBER * HEADS) + h[None, :]
            for i in tl.static_range(NUMBER):
                tl.store(key_sums + (at + i * HEADS), sums[i] * inverse, mask=is_head[None, :])
    elif deltas is None and is_seen_by_product(mask, b, chunk, first_row, sizes):
        store_zeros(outputs + places, chunk, first_row, is_head, sizes)


@triton.jit
def zero_sums(NUMBER: tl.constexpr, sizes):
    sums = ()
    for _ in tl.static_range(NUMBER):
        sums = sums + (tl.zeros([sizes.KEYS, sizes.HEADS_PADDED], tl.float32),)
    return sums


@triton.jit
def add_products(sums, maps, tile):
    added = ()
    for i in tl.static_range(len(sums)):
        added = added + (sums[i] + maps[i] * tile,)
    return added


@triton.jit
def _matrix_gradients_kernel(mask, chunk, stage, inputs, gradients, scale, of_query, of_matrices, factor, sizes):
    """
    Of one query: the gradient of its matrix, heads in by heads out, and from it those of its factors, (batch, heads,
    query, factors). Program (row, 0, group in a row of the batch).
    """
    RANK: tl.constexpr = stage.query.RANK
    NUMBER: tl.constexpr = 2 * stage.query.RANK + stage.query.GATE
    batch_row, b, group, h, is_head = heads_of_program(chunk, sizes)
    row = tl.program_id(0)
    t = chunk.start + row
    if t < mask.queries:
        first, last = key_ranges(mask, b, t)
        base = first_key_of_block(mask, chunk.start + row // sizes.PRODUCT_ROWS * sizes.PRODUCT_ROWS)
        begin, end = blocks_in_sight(tl.maximum(first - base, 0), last - base, sizes.KEYS)
        places = tile_places(chunk, batch_row, h, tl.arange(0, sizes.KEYS), sizes) + row * chunk.columns
        total = tl.zeros([sizes.HEADS_PADDED, sizes.HEADS_PADDED], tl.float32)
        for block in range(begin, end):
            a = load_heads(inputs + (places + block * sizes.KEYS), is_head, sizes)  # [HEADS, KEYS]
            d = load_heads(gradients + (places + block * sizes.KEYS), is_head, sizes)
            total = tl.dot(a, tl.trans(d), total, input_precision="ieee")
        if scale is not None:
            factor /= tl.load(scale)
        total *= factor
        if of_query is not None:
            at = of_query + ((b * (sizes.GROUPS * sizes.HEADS) + h) * mask.queries + t) * NUMBER
            kind = of_query.dtype.element_ty
            for r in tl.static_range(RANK):
                w1 = factor_of_query(stage.query, b, h, is_head, t, r)
                w2 = factor_of_query(stage.query, b, h, is_head, t, RANK + r)
                tl.store(at + r, tl.sum(total * w2[None, :], 1).to(kind), mask=is_head)
                tl.store(at + (RANK + r), tl.sum(total * w1[:, None], 0).to(kind), mask=is_head)
            if stage.query.GATE:
                gate = tl.sum(total * identity(sizes.HEADS_PADDED, tl.float32), 0)
                tl.store(at + 2 * RANK, gate.to(kind), mask=is_head)
        if of_matrices is not None:
            member = tl.arange(0, sizes.HEADS_PADDED)
            at = ((batch_row * chunk.rows + row) * sizes.GROUPS + group) * (sizes.HEADS_PADDED * sizes.HEADS_PADDED)
            tl.store(of_matrices + (at + member[:, None] * sizes.HEADS_PADDED + member[None, :]), total)


@triton.jit
def _join_over_queries_kernel(
    mask,
    chunk,
    partial,
    sums,
    factor,
    NUMBER: tl.constexpr,
    sizes,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    IS_FIRST: tl.constexpr,
):
    """
    (batch, heads, key, factors) sums += factor * (batch, block of queries, column, factors, heads) over those that were
    computed; the first chunk of a row of the batch sets them. Program (block of keys, of values, row of the batch).
    """
    HEADS: tl.constexpr = sizes.GROUPS * sizes.HEADS
    batch_row = tl.program_id(2).to(tl.int64)
    b = batch_row + chunk.batch
    value = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    s = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    begin, end = rows_in_sight(mask, b, chunk, s, sizes.ROWS)
    is_value = (value < NUMBER * HEADS)[None, :]
    total = tl.zeros([KEYS, BLOCK], tl.float32)
    for start in range(begin, end, sizes.ROWS):
        first, last, base = columns_in_sight(mask, b, chunk.start, start, sizes.ROWS, sizes.PRODUCT_ROWS)
        # A block of keys may lie across tiles of columns, each of which was computed if any query sees it.
        column = s - base
        tile = column // sizes.KEYS
        first_tile, last_tile = blocks_in_sight(first, last, sizes.KEYS)
        is_there = (
            (column >= 0) & (column < chunk.columns) & (tile >= first_tile) & (tile < last_tile) & (s < mask.keys)
        )
        at = (batch_row * (chunk.rows // sizes.ROWS) + start // sizes.ROWS) * chunk.columns + column
        places = at[:, None] * (NUMBER * HEADS) + value[None, :]
        total += tl.load(partial + places, mask=is_value & is_there[:, None], other=0.0)
    places = ((b * HEADS + value % HEADS)[None, :] * mask.keys + s[:, None]) * NUMBER + (value // HEADS)[None, :]
    inside = is_value & (s < mask.keys)[:, None]
    total *= factor
    if not IS_FIRST:
        total += tl.load(sums + places, mask=inside, other=0.0)
    tl.store(sums + places, total.to(sums.dtype.element_ty), mask=inside)
