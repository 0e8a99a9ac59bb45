"""Kernels that compose: equation 7 of all heads of a group, with the heads as the contraction of matrix products.

Programs walk along the queries of a block and keep the factors of their keys. A tile holds the scores of one query,
[COMPOSE_N, HEADS]. All that the query and the static map do to it is a product with one matrix, I + gate + w1 w2^T +
static. What the keys do is elementwise except for the sums over the heads. With w1 and w2 exchanged and the matrix
transposed the same function computes the transposed composition, as gradients need it. Exponents are to base 2, with
log2(e) in the factor of the scores.
"""

import triton
import triton.language as tl

from .blocks import blocks_in_sight, columns_in_sight, first_key_of_block, key_ranges, load_factors, rows_in_sight
from .layout import PART
from .products import load_scale


@triton.jit
def real_keys(mask, b, s):
    """Which of the keys exist and are no padding, and the number of the document of each."""
    real = s < mask.keys
    documents = s
    if mask.first_keys is not None:
        documents = tl.load(mask.first_keys + b * mask.sequence_stride + s, mask=real, other=-2)
    if mask.padding is not None:
        real = real & (tl.load(mask.padding + b * (mask.padding_stride >> 1) + s, mask=real, other=0) != 0)
    return real, documents


@triton.jit
def hide(x, mask, b, t, s, real, documents):
    """Composed scores [COMPOSE_N, HEADS] of query t, with -inf for keys that it does not see and a float mask added."""
    first, last = key_ranges(mask, b, t)
    visible = real & (s >= first) & (s <= last)
    if mask.first_keys is not None:
        visible = visible & (documents == tl.load(mask.first_keys + b * mask.sequence_stride + t))
    if mask.dense is not None:
        offsets = b * (mask.dense_batch_stride >> 1) + tl.cast(t, tl.int64) * (mask.dense_stride >> 1) + s
        dense = tl.load(mask.dense + offsets, mask=s < mask.keys, other=0)
        if mask.dense.dtype.element_ty == tl.float32:
            x += dense[:, None]
        else:
            visible = visible & (dense != 0)
    return tl.where(visible[:, None], x, -float("inf"))


@triton.jit
def heads_of_program(chunk, sizes):
    """Of the program's group: row of the workspace, row of the batch, the group, its heads, and which of them exist."""
    row = (tl.program_id(2) // sizes.GROUPS).to(tl.int64)
    group = tl.program_id(2) % sizes.GROUPS
    member = tl.arange(0, sizes.HEADS_PADDED)
    return row, row + chunk.batch, group, group * sizes.HEADS + member, member < sizes.HEADS


@triton.jit
def tile_of_program(mask, b, chunk, sizes):
    """First row and that after the last, columns, key of column 0, and whether any of the queries may see any key."""
    first_row = tl.program_id(1) * sizes.COMPOSE_M
    first, last, base = columns_in_sight(mask, b, chunk.start, first_row, sizes.COMPOSE_M, sizes)
    begin, end = blocks_in_sight(first, last, sizes.COMPOSE_N)
    column = tl.program_id(0) * sizes.COMPOSE_N + tl.arange(0, sizes.COMPOSE_N)
    end_row = tl.minimum(first_row + sizes.COMPOSE_M, mask.queries - chunk.start)
    return first_row, end_row, column, base, (tl.program_id(0) >= begin) & (tl.program_id(0) < end)


@triton.jit
def tile_offsets(chunk, batch_row, h, column, sizes):
    """Offsets of [HEADS, COMPOSE_N] of row 0 in the workspace; those of another row are row * chunk.columns further."""
    heads = (batch_row * sizes.ALL_HEADS + h) * (tl.cast(chunk.rows, tl.int64) * chunk.columns)
    return heads[:, None] + column[None, :]


@triton.jit
def part_offsets(chunk, batch_row, h, row, sizes):
    """Where the program's parts of the keys, [COMPOSE_N // PART], of a row's heads are in (batch, part, row, heads)."""
    part = tl.program_id(0) * (sizes.COMPOSE_N // PART) + tl.arange(0, sizes.COMPOSE_N // PART)
    rows = (batch_row * (chunk.columns // PART) + part) * chunk.rows + row
    return rows[:, None] * sizes.ALL_HEADS + h[None, :]


@triton.jit
def load_heads(pointers, is_head):
    """Of all heads of a group, the first dimension, with zeros for heads that only pad it."""
    return tl.load(pointers, mask=is_head[:, None], other=0.0)


@triton.jit
def store_heads(pointers, tile, is_head):
    """Of a tile [COMPOSE_N, HEADS]."""
    tl.store(pointers, tl.trans(tile).to(pointers.dtype.element_ty), mask=is_head[:, None])


@triton.jit
def store_zeros(pointers, mask, b, chunk, first_row, is_head, sizes):
    """
    If the program's tile, which none of its queries sees, is in a block of keys that another query of the block of rows
    sees, which the matrix products therefore read.
    """
    first_column = tl.program_id(0) * sizes.COMPOSE_N
    block_row = first_row // sizes.BLOCK_M * sizes.BLOCK_M
    first, last, _base = columns_in_sight(mask, b, chunk.start, block_row, sizes.BLOCK_M, sizes)
    begin, end = blocks_in_sight(first, last, sizes.BLOCK_N)
    if (first_column >= begin * sizes.BLOCK_N) & (first_column < end * sizes.BLOCK_N):
        for row in range(first_row, first_row + sizes.COMPOSE_M):
            zeros = tl.zeros([sizes.COMPOSE_N, sizes.HEADS_PADDED], pointers.dtype.element_ty)
            store_heads(pointers + row * chunk.columns, zeros, is_head)


@triton.jit
def load_query_vector(vector, mask, b, h, is_head, t, sizes):
    """[HEADS] of (batch, heads, query); infinity for heads that only pad, which leaves them weights of zero."""
    offsets = (b * sizes.ALL_HEADS + h) * mask.queries + t
    return tl.load(vector + offsets, mask=is_head, other=float("inf"))


@triton.jit
def matrix_at(matrices, chunk, batch_row, group, row, index, sizes, NUMBER: tl.constexpr = 2):
    """Pointers to a query's matrix, heads in by heads out, which is one of so many."""
    h = tl.arange(0, sizes.HEADS_PADDED)
    index += ((batch_row * chunk.rows + row) * sizes.GROUPS + group) * NUMBER
    matrices += index * (sizes.HEADS_PADDED * sizes.HEADS_PADDED)
    return matrices + (h[:, None] * sizes.HEADS_PADDED + h[None, :])


@triton.jit
def identity(SIZE: tl.constexpr, DTYPE: tl.constexpr):
    h = tl.arange(0, SIZE)
    return (h[:, None] == h[None, :]).to(DTYPE)


@triton.jit
def in_registers(a, eye):
    """
    A tile in float32, as a matrix product leaves it. The product with the identity is exact, and cheaper than to change
    how threads hold what they have loaded.
    """
    if a.dtype == tl.float32:
        return a
    else:
        return tl.dot(a, eye)


@triton.jit
def sum_over_heads(product):
    """
    The sum of each row of [BLOCK_N, HEADS] in each of its columns. A product with ones leaves it in 8 columns, of which
    each thread takes one: nothing is exchanged between threads.
    """
    BLOCK_N: tl.constexpr = product.shape[0]
    HEADS: tl.constexpr = product.shape[1]
    total = tl.dot(product, tl.full([HEADS, 8], 1.0, product.dtype))
    total, _same = tl.split(tl.reshape(total, [BLOCK_N, 4, 2]))
    total = tl.broadcast_to(total[:, None, :, None], [BLOCK_N, HEADS // 8, 4, 2])
    return tl.reshape(total, [BLOCK_N, HEADS])


@triton.jit
def compose_heads(a, a32, matrix, key, eye, stage, TRANSPOSED: tl.constexpr):
    """
    Equation 7 for one query's tile a [COMPOSE_N, HEADS], which is given in float32 too. Returns the composed tile in
    float32 and, of each rank, the sums over the heads with the keys' w1 (w2 in the transpose), in every column.
    """
    x = a32
    if stage.query.RANK + stage.query.GATE + stage.HAS_STATIC > 0:
        x = tl.dot(a, tl.trans(matrix) if TRANSPOSED else matrix, input_precision="ieee")
    RANK: tl.constexpr = stage.key.RANK
    maps = ()
    if RANK + stage.key.GATE > 0:
        a = a32.to(a.dtype)
        of_key = a * key[2 * RANK] if stage.key.GATE else tl.zeros(a.shape, a.dtype)
        for r in tl.static_range(RANK):
            product = a * key[TRANSPOSED * RANK + r]
            total = tl.sum(product, 1, keep_dims=True) if a.dtype == tl.float32 else sum_over_heads(product)
            of_key += total.to(a.dtype) * key[(1 - TRANSPOSED) * RANK + r]
            maps = maps + (total,)
        x = x + of_key if a.dtype == tl.float32 else tl.dot(of_key, eye, x)
    return x, maps


@triton.jit
def _matrices_kernel(mask, chunk, sizes, pre, post, matrices):
    """Program (row, before or after the softmax, group in a row of the batch)."""
    batch_row, b, group, h, is_head = heads_of_program(chunk, sizes)
    row = tl.program_id(0)
    if chunk.start + row < mask.queries:
        index = ((batch_row * chunk.rows + row) * sizes.GROUPS + group) * 2 + tl.program_id(1)
        member = tl.arange(0, sizes.HEADS_PADDED)
        offsets = member[:, None] * sizes.HEADS_PADDED + member[None, :]
        offsets += index * (sizes.HEADS_PADDED * sizes.HEADS_PADDED)
        if tl.program_id(1) == 0:
            matrix = _matrix(pre, b, group, h, is_head, chunk.start + row, sizes)
        else:
            matrix = _matrix(post, b, group, h, is_head, chunk.start + row, sizes)
        tl.store(matrices + offsets, matrix.to(matrices.dtype.element_ty))


@triton.jit
def _matrix(stage, b, group, h, is_head, t, sizes):
    RANK: tl.constexpr = stage.query.RANK
    matrix = identity(sizes.HEADS_PADDED, tl.float32)
    factors = load_factors(stage.query, b, h, t, is_head, tl.float32)
    if stage.query.GATE:
        matrix += matrix * factors[2 * RANK][None, :]
    for r in tl.static_range(RANK):
        matrix += factors[r][:, None] * factors[RANK + r][None, :]
    if stage.HAS_STATIC:
        offsets = h[:, None] * sizes.HEADS + (h - group * sizes.HEADS)[None, :]
        matrix += tl.load(stage.static + offsets, mask=is_head[:, None] & is_head[None, :], other=0).to(tl.float32)
    return matrix


@triton.jit
def _weights_kernel(
    mask, chunk, sizes, pre, post, scores, matrices, log_sums, largest, sums, gradients, weights, composed, totals
):
    """
    From scores by part of the keys the largest composed one and the sum of exponentials; or, with the logarithms of the
    sums, weights before and after they are composed, of which either may take the place of the scores. With gradients
    of the latter also sums of the former times theirs, and if wanted their totals. With neither `largest` nor
    `log_sums` the scores are weights already.
    """
    batch_row, b, group, h, is_head = heads_of_program(chunk, sizes)
    first_row, end_row, column, base, is_seen = tile_of_program(mask, b, chunk, sizes)
    offsets = tile_offsets(chunk, batch_row, h, column, sizes)
    if is_seen:
        s = base + column
        real, documents = real_keys(mask, b, s)
        inside = real[:, None] & is_head[None, :]
        eye = identity(sizes.HEADS_PADDED, scores.dtype.element_ty)
        pre_key = load_factors(pre.key, b, h[None, :], s[:, None], inside, scores.dtype.element_ty)
        post_key = load_factors(post.key, b, h[None, :], s[:, None], inside, scores.dtype.element_ty)
        for row in range(first_row, end_row):
            at = offsets + row * chunk.columns
            a = tl.trans(load_heads(scores + at, is_head))  # [COMPOSE_N, HEADS]
            if gradients is not None:
                d = tl.trans(load_heads(gradients + at, is_head))
            e = in_registers(a, eye)
            if log_sums is not None:  # on its way while scores are composed
                log_sum = load_query_vector(log_sums, mask, b, h, is_head, chunk.start + row, sizes)
            if largest is not None or log_sums is not None:
                matrix = tl.load(matrix_at(matrices, chunk, batch_row, group, row, 0, sizes))
                e, _maps = compose_heads(a, e, matrix, pre_key, eye, pre, False)
                e = hide(e, mask, b, chunk.start + row, s, real, documents)
            if largest is not None:
                e = tl.reshape(e, [sizes.COMPOSE_N // PART, PART, sizes.HEADS_PADDED])
                highest = tl.maximum(tl.max(e, 1), -1e30)  # [COMPOSE_N // PART, HEADS]
                part = part_offsets(chunk, batch_row, h, row, sizes)
                tl.store(largest + part, highest, mask=is_head[None, :])
                tl.store(sums + part, tl.sum(tl.exp2(e - highest[:, None, :]), 1), mask=is_head[None, :])
            if log_sums is not None:
                e = tl.exp2(e - log_sum[None, :])
                a = e.to(a.dtype)
            if weights is not None:
                store_heads(weights + at, e, is_head)
            if composed is not None or gradients is not None:
                matrix = tl.load(matrix_at(matrices, chunk, batch_row, group, row, 1, sizes))
            if gradients is not None:
                p, _maps = compose_heads(d, in_registers(d, eye), matrix, post_key, eye, post, True)
                product = tl.reshape(e * p, [sizes.COMPOSE_N // PART, PART, sizes.HEADS_PADDED])
                part = part_offsets(chunk, batch_row, h, row, sizes)
                tl.store(sums + part, tl.sum(product, 1), mask=is_head[None, :])
                if totals is not None:
                    total = tl.sum(tl.reshape(e, product.shape), 1)
                    tl.store(totals + part, total, mask=is_head[None, :])
            if composed is not None:
                y, _maps = compose_heads(a, e, matrix, post_key, eye, post, False)
                store_heads(composed + at, y, is_head)
    elif composed is not None:
        store_zeros(composed + offsets, mask, b, chunk, first_row, is_head, sizes)


@triton.jit
def _compositions_kernel(
    mask,
    chunk,
    sizes,
    stage,
    inputs,
    gradients,
    outputs,
    deltas,
    norms,
    matrices,
    key_sums,
    factor,
    W1: tl.constexpr,
    W2: tl.constexpr,
):
    """
    See `_stage_gradients`; `key_sums` are what a tile adds to the gradients of the keys' factors, (batch, block of
    queries, column, factors, heads): if W1 those of w1 and the gate, and if W2 those of w2.
    """
    batch_row, b, group, h, is_head = heads_of_program(chunk, sizes)
    first_row, end_row, column, base, is_seen = tile_of_program(mask, b, chunk, sizes)
    offsets = tile_offsets(chunk, batch_row, h, column, sizes)
    if is_seen:
        s = base + column
        real, _documents = real_keys(mask, b, s)
        eye = identity(sizes.HEADS_PADDED, inputs.dtype.element_ty)
        inside = real[:, None] & is_head[None, :]
        key = load_factors(stage.key, b, h[None, :], s[:, None], inside, inputs.dtype.element_ty)
        inverse = 1.0
        if norms is not None:
            inverse = 1.0 / load_scale(norms)
            if deltas is None:
                factor *= inverse
        w1_sums = zero_sums(stage.key.RANK * W1, sizes)
        w2_sums = zero_sums(stage.key.RANK * W2, sizes)
        gate_sums = zero_sums(stage.key.GATE * W1, sizes)
        for row in range(first_row, end_row):
            at = offsets + row * chunk.columns
            a = tl.trans(load_heads(inputs + at, is_head))  # [COMPOSE_N, HEADS]
            d = tl.trans(load_heads(gradients + at, is_head))
            matrix = tl.load(matrix_at(matrices, chunk, batch_row, group, row, deltas is not None, sizes))
            if deltas is not None:
                delta = load_query_vector(deltas, mask, b, h, is_head, chunk.start + row, sizes)
            d32 = in_registers(d, eye)
            p, d_maps = compose_heads(d, d32, matrix, key, eye, stage, True)
            a32 = in_registers(a, eye)
            if outputs is not None:
                if deltas is not None:
                    p = a32 * (p - delta[None, :])
                else:
                    p *= factor
                store_heads(outputs + at, p, is_head)
            if W1:
                w1_sums = add_products(w1_sums, d_maps, a32)
            if W2:
                _y, a_maps = compose_heads(a, a32, matrix, key, eye, stage, False)
                w2_sums = add_products(w2_sums, a_maps, d32)
            if W1:
                gate_sums = add_products(gate_sums, (a32,) if stage.key.GATE else (), d32)
        if key_sums is not None:
            block = batch_row * tl.num_programs(1) + tl.program_id(1)
            at = (block * chunk.columns + column)[:, None] * (stage.key.NUMBER * sizes.ALL_HEADS) + h[None, :]
            store_sums(key_sums + at, w1_sums, inverse, is_head, sizes)
            store_sums(key_sums + (at + stage.key.RANK * sizes.ALL_HEADS), w2_sums, inverse, is_head, sizes)
            store_sums(key_sums + (at + 2 * stage.key.RANK * sizes.ALL_HEADS), gate_sums, inverse, is_head, sizes)
    elif (deltas is None) & (outputs is not None):
        store_zeros(outputs + offsets, mask, b, chunk, first_row, is_head, sizes)


@triton.jit
def zero_sums(NUMBER: tl.constexpr, sizes):
    sums = ()
    for _ in tl.static_range(NUMBER):
        sums = sums + (tl.zeros([sizes.COMPOSE_N, sizes.HEADS_PADDED], tl.float32),)
    return sums


@triton.jit
def add_products(sums, maps, tile):
    added = ()
    for i in tl.static_range(len(sums)):
        added = added + (sums[i] + maps[i] * tile,)
    return added


@triton.jit
def store_sums(pointers, sums, factor, is_head, sizes):
    for i in tl.static_range(len(sums)):
        tl.store(pointers + i * sizes.ALL_HEADS, sums[i] * factor, mask=is_head[None, :])


@triton.jit
def _matrix_gradients_kernel(mask, chunk, sizes, stage, inputs, gradients, norms, of_query, of_matrices, factor):
    """
    Of one query: the gradient of its matrix, heads in by heads out, and from it those of its factors, (batch, heads,
    query, factors). Program (row, 0, group in a row of the batch).
    """
    RANK: tl.constexpr = stage.query.RANK
    batch_row, b, group, h, is_head = heads_of_program(chunk, sizes)
    row = tl.program_id(0)
    t = chunk.start + row
    if t < mask.queries:
        first, last = key_ranges(mask, b, t)
        base = first_key_of_block(mask, chunk.start, row, sizes)
        begin, end = blocks_in_sight(tl.maximum(first - base, 0), last - base, sizes.COMPOSE_N)
        offsets = tile_offsets(chunk, batch_row, h, tl.arange(0, sizes.COMPOSE_N), sizes) + row * chunk.columns
        total = tl.zeros([sizes.HEADS_PADDED, sizes.HEADS_PADDED], tl.float32)
        for block in range(begin, end):
            tile = offsets + block * sizes.COMPOSE_N
            a = load_heads(inputs + tile, is_head)  # [HEADS, COMPOSE_N]
            d = load_heads(gradients + tile, is_head)
            total = tl.dot(a, tl.trans(d), total, input_precision="ieee")
        if norms is not None:
            factor /= load_scale(norms)
        total *= factor
        if of_query is not None:
            at = of_query + ((b * sizes.ALL_HEADS + h) * mask.queries + t) * stage.query.NUMBER
            kind = of_query.dtype.element_ty
            factors = load_factors(stage.query, b, h, t, is_head, tl.float32)
            for r in tl.static_range(RANK):
                tl.store(at + r, tl.sum(total * factors[RANK + r][None, :], 1).to(kind), mask=is_head)
                tl.store(at + (RANK + r), tl.sum(total * factors[r][:, None], 0).to(kind), mask=is_head)
            if stage.query.GATE:
                gate = tl.sum(total * identity(sizes.HEADS_PADDED, tl.float32), 0)
                tl.store(at + 2 * RANK, gate.to(kind), mask=is_head)
        if of_matrices is not None:
            tl.store(matrix_at(of_matrices, chunk, batch_row, group, row, 0, sizes, 1), total)


@triton.jit
def _join_over_keys_kernel(mask, chunk, sizes, largest, sums, joined, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Program (part of a block of rows, block of rows, row of the batch)."""
    batch_row = tl.program_id(2).to(tl.int64)
    b = batch_row + chunk.batch
    first_row = tl.program_id(1) * sizes.COMPOSE_M
    first, last, _base = columns_in_sight(mask, b, chunk.start, first_row, sizes.COMPOSE_M, sizes)
    begin, end = blocks_in_sight(first, last, sizes.COMPOSE_N)
    begin, end = begin * (sizes.COMPOSE_N // PART), end * (sizes.COMPOSE_N // PART)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t = chunk.start + first_row + element // sizes.ALL_HEADS
    inside = (element < sizes.COMPOSE_M * sizes.ALL_HEADS) & (t < mask.queries)
    highest = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, end, STEP):
        part = start + tl.arange(0, STEP)
        at = ((batch_row * (chunk.columns // PART) + part) * chunk.rows + first_row)[:, None] * sizes.ALL_HEADS
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
    tl.store(joined + ((b * sizes.ALL_HEADS + element % sizes.ALL_HEADS) * mask.queries + t), total, mask=inside)


@triton.jit
def _join_over_queries_kernel(
    mask, chunk, sizes, partial, stage, sums, factor, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, IS_FIRST: tl.constexpr
):
    """
    (batch, heads, key, factors) sums += factor * (batch, block of queries, column, factors, heads) over those that were
    computed; the first chunk of a row of the batch sets them. Program (block of keys, of values, row of the batch).
    """
    NUMBER: tl.constexpr = stage.key.NUMBER
    batch_row = tl.program_id(2).to(tl.int64)
    b = batch_row + chunk.batch
    value = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    s = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin, end = rows_in_sight(mask, b, chunk, s, sizes.COMPOSE_M)
    is_value = (value < NUMBER * sizes.ALL_HEADS)[None, :]
    total = tl.zeros([BLOCK_N, BLOCK], tl.float32)
    for start in range(begin, end, sizes.COMPOSE_M):
        first, last, base = columns_in_sight(mask, b, chunk.start, start, sizes.COMPOSE_M, sizes)
        first_tile, last_tile = blocks_in_sight(first, last, sizes.COMPOSE_N)
        column = s - base
        is_there = (column // sizes.COMPOSE_N >= first_tile) & (column // sizes.COMPOSE_N < last_tile)
        at = (batch_row * (chunk.rows // sizes.COMPOSE_M) + start // sizes.COMPOSE_M) * chunk.columns + column
        offsets = at[:, None] * (NUMBER * sizes.ALL_HEADS) + value[None, :]
        total += tl.load(partial + offsets, mask=is_value & is_there[:, None], other=0.0)
    offsets = (b * sizes.ALL_HEADS + value % sizes.ALL_HEADS)[None, :] * mask.keys + s[:, None]
    offsets = offsets * NUMBER + (value // sizes.ALL_HEADS)[None, :]
    inside = is_value & (s < mask.keys)[:, None]
    total *= factor
    if not IS_FIRST:
        total += tl.load(sums + offsets, mask=inside, other=0.0)
    tl.store(sums + offsets, total.to(sums.dtype.element_ty), mask=inside)
