"""What kernels share: which keys a tile sees, and equation 7 on a tile.

A tile of scores is [QUERIES, HEADS, KEYS], with all heads of a group, so that what they exchange stays in registers.
Programs that compose walk along the queries of a block and keep the factors of their keys. All exponents are to base
2, with log2(e) in the factor of the scores. Letters: b row of the batch, h head, t query, s key.

The factors of a tile are two tuples, of [QUERIES, HEADS, 1] for the queries' side and [1, HEADS, KEYS] for the keys':
w1 of each rank, w2 of each rank, the gate. With w1 and w2 exchanged, the same functions compute the transpose, as
gradients need it.
"""

import triton
import triton.language as tl

from .plan import PART


@triton.jit
def first_key_of_block(mask, t):
    """The key of column 0 for a block of queries from t on: the first that t sees, rounded down for aligned loads."""
    if mask.window is None:
        return 0
    else:
        return tl.maximum(t + mask.query_offset - mask.window + 1, 0) // 16 * 16


@triton.jit
def key_ranges(mask, b, t):
    """First and last key that each query may see by causality, window and document; none for queries past the end."""
    position = t + mask.query_offset
    first = t * 0
    last = first + mask.keys - 1
    if mask.CAUSAL:
        last = tl.minimum(last, position)
    if mask.window is not None:
        first = tl.maximum(first, position - mask.window + 1)
        if not mask.CAUSAL:
            last = tl.minimum(last, position + mask.window - 1)
    inside = t < mask.queries
    if mask.sequences is not None:
        place = b * mask.sequence_stride + t
        first = tl.maximum(first, tl.load(mask.first_keys + place, mask=inside, other=0))
        last = tl.minimum(last, tl.load(mask.last_keys + place, mask=inside, other=0))
    return tl.where(inside, first, mask.keys), tl.where(inside, last, -1)


@triton.jit
def columns_in_sight(mask, b, start, row, BLOCK: tl.constexpr, PRODUCT_ROWS: tl.constexpr):
    """
    Of a block of rows from `row` on, the first and the last column that any of them may see, none if the last is the
    smaller, and the key of column 0; `start` is the query of row 0.
    """
    first, last = key_ranges(mask, b, start + row + tl.arange(0, BLOCK))
    base = first_key_of_block(mask, start + row // PRODUCT_ROWS * PRODUCT_ROWS)
    return tl.maximum(tl.min(first) - base, 0), tl.max(last) - base, base


@triton.jit
def blocks_in_sight(first, last, KEYS: tl.constexpr):
    """From which block of KEYS columns to before which there are columns from the first to the last."""
    return first // KEYS, tl.maximum(last + KEYS, 0) // KEYS


@triton.jit
def rows_in_sight(mask, b, chunk, s, BLOCK: tl.constexpr):
    """The rows of a chunk, from a multiple of BLOCK to before the second, that may see any of the keys s."""
    begin = chunk.start
    end = tl.minimum(chunk.start + chunk.rows, mask.queries)
    if mask.CAUSAL:
        begin = tl.maximum(begin, tl.min(s) - mask.query_offset)
    if mask.window is not None:
        end = tl.minimum(end, tl.minimum(tl.max(s), mask.keys - 1) - mask.query_offset + mask.window)
        if not mask.CAUSAL:
            begin = tl.maximum(begin, tl.min(s) - mask.query_offset - mask.window + 1)
    if mask.sequences is not None:
        # Queries and keys are the same tokens, so whom a token sees are those who see it.
        place = b * mask.sequence_stride + s
        begin = tl.maximum(begin, tl.min(tl.load(mask.first_keys + place, mask=s < mask.keys, other=mask.keys)))
        end = tl.minimum(end, tl.max(tl.load(mask.last_keys + place, mask=s < mask.keys, other=-1)) + 1)
    return (begin - chunk.start) // BLOCK * BLOCK, end - chunk.start


@triton.jit
def real_keys(mask, b, s):
    """Which of the keys exist and are no padding, and the number of the document of each."""
    real = s < mask.keys
    documents = s
    if mask.sequences is not None:
        documents = tl.load(mask.sequences + b * mask.sequence_stride + s, mask=real, other=-2)
    if mask.padding is not None:
        real = real & (tl.load(mask.padding + b * mask.padding_stride + s, mask=real, other=0) != 0)
    return real, documents


@triton.jit
def hide(x, mask, b, t, s, real, documents):
    """Composed scores [KEYS, HEADS] of query t, with -inf for keys that it does not see and a float mask added."""
    first, last = key_ranges(mask, b, t)
    visible = real & (s >= first) & (s <= last)
    if mask.sequences is not None:
        visible = visible & (documents == tl.load(mask.sequences + b * mask.sequence_stride + t))
    if mask.dense is not None:
        places = b * mask.dense_batch_stride + tl.cast(t, tl.int64) * mask.dense_stride + s
        dense = tl.load(mask.dense + places, mask=s < mask.keys, other=0)
        if mask.dense.dtype.element_ty == tl.float32:
            x += dense[:, None]
        else:
            visible = visible & (dense != 0)
    return tl.where(visible[:, None], x, -float("inf"))


@triton.jit
def places_of(states, b, h, position):
    """Where the channels of positions begin, in elements."""
    return (b * states.batch + h * states.head + position * states.position) * states.UNIT


@triton.jit
def load_factors(side, block, h, position, inside):
    """The factors of a side, in float32, for positions that broadcast with the heads [1, HEADS, 1]."""
    factors = ()
    if side.pointer is not None:
        heads = (h // side.SERVED * tl.cast(side.head, tl.int64))[None, :, None]
        places = (block * side.batch + position.to(tl.int64) * side.position + heads) * side.UNIT
        if side.UNIT == 8:
            eight = tl.load(
                side.pointer + (places[:, :, :, None] + tl.arange(0, 8)), mask=inside[:, :, :, None], other=0
            )
            eight = eight.to(tl.float32)
            # The bits of a factor's number are axes, of which a split takes the last.
            bits = tl.reshape(eight, [eight.shape[0], eight.shape[1], eight.shape[2], 2, 2, 2])
            even, odd = tl.split(bits)
            f04, f26 = tl.split(even)
            f15, f37 = tl.split(odd)
            f0, f4 = tl.split(f04)
            f1, f5 = tl.split(f15)
            f2, f6 = tl.split(f26)
            f3, f7 = tl.split(f37)
            factors = (f0, f1, f2, f3, f4, f5, f6, f7)
        else:
            places += (h % side.SERVED * side.served)[None, :, None]
            for i in tl.static_range(2 * side.RANK + side.GATE):
                factor = tl.load(side.pointer + (places + i * side.factor), mask=inside, other=0)
                factors = factors + (factor.to(tl.float32),)
    return factors


@triton.jit
def query_factors(side, b, h, is_head, t, is_query):
    """Of [QUERIES, HEADS, 1]."""
    return load_factors(side, b, h, t[:, None, None], is_query[:, None, None] & is_head[None, :, None])


@triton.jit
def key_factors(side, block, h, is_head, s, is_key):
    """Of [1, HEADS, KEYS]; `block` is the row of the batch or, of each key [1, 1, KEYS], the block of a paged cache."""
    return load_factors(side, block, h, s[None, None, :], is_key[None, None, :] & is_head[None, :, None])


@triton.jit
def static_map(stage, group, HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr):
    """A tuple with [1, HEADS, HEADS], heads in by heads out, or with nothing."""
    static = ()
    if stage.HAS_STATIC:
        h = tl.arange(0, HEADS_PADDED)
        places = (group * HEADS + h[:, None]) * HEADS + h[None, :]
        inside = (h < HEADS)[:, None] & (h < HEADS)[None, :]
        static = (tl.load(stage.static + places, mask=inside, other=0).to(tl.float32)[None, :, :],)
    return static


@triton.jit
def compose(a, query, key, static, stage):
    """Equation 7 for a tile [QUERIES, HEADS, KEYS]: every term reads the tile as it came."""
    x = a
    for r in tl.static_range(stage.query.RANK):
        x += tl.sum(a * query[r], 1, keep_dims=True) * query[stage.query.RANK + r]
    for r in tl.static_range(stage.key.RANK):
        x += tl.sum(a * key[r], 1, keep_dims=True) * key[stage.key.RANK + r]
    if stage.query.GATE:
        x += a * query[2 * stage.query.RANK]
    if stage.key.GATE:
        x += a * key[2 * stage.key.RANK]
    if stage.HAS_STATIC:
        mixing = tl.broadcast_to(tl.permute(static[0], [0, 2, 1]), [a.shape[0], a.shape[1], a.shape[1]])
        x += tl.dot(mixing, a, input_precision="ieee")
    return x


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
    first_row = tl.program_id(1) * sizes.ROWS
    first, last, base = columns_in_sight(mask, b, chunk.start, first_row, sizes.ROWS, sizes.PRODUCT_ROWS)
    begin, end = blocks_in_sight(first, last, sizes.KEYS)
    column = tl.program_id(0) * sizes.KEYS + tl.arange(0, sizes.KEYS)
    end_row = tl.minimum(first_row + sizes.ROWS, mask.queries - chunk.start)
    return first_row, end_row, column, base, (tl.program_id(0) >= begin) & (tl.program_id(0) < end)


@triton.jit
def tile_places(chunk, batch_row, h, column, sizes):
    """Where [HEADS, KEYS] of row 0 are in the workspace, from which those of a row are row * chunk.columns further."""
    heads = (batch_row * (sizes.GROUPS * sizes.HEADS) + h) * (tl.cast(chunk.rows, tl.int64) * chunk.columns)
    return heads[:, None] + column[None, :]


@triton.jit
def part_places(chunk, batch_row, h, row, sizes):
    """Where the program's parts of the keys, [KEYS // PART], of a row's heads are in (batch, part, row, heads)."""
    part = tl.program_id(0) * (sizes.KEYS // PART) + tl.arange(0, sizes.KEYS // PART)
    rows = (batch_row * (chunk.columns // PART) + part) * chunk.rows + row
    return rows[:, None] * (sizes.GROUPS * sizes.HEADS) + h[None, :]


@triton.jit
def load_heads(pointers, is_head, sizes):
    """Of all heads of a group, the first dimension, with zeros for heads that only pad it."""
    if sizes.HEADS == sizes.HEADS_PADDED:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=is_head[:, None], other=0.0)


@triton.jit
def store_heads(pointers, tile, is_head, sizes):
    """Of a tile [KEYS, HEADS]."""
    tile = tl.trans(tile).to(pointers.dtype.element_ty)
    if sizes.HEADS == sizes.HEADS_PADDED:
        tl.store(pointers, tile)
    else:
        tl.store(pointers, tile, mask=is_head[:, None])


@triton.jit
def is_seen_by_product(mask, b, chunk, first_row, sizes):
    """
    Whether the program's tile, which none of its queries sees, is in a block of keys that another query of the block of
    rows sees, which the matrix products therefore read.
    """
    first_column = tl.program_id(0) * sizes.KEYS
    block_row = first_row // sizes.PRODUCT_ROWS * sizes.PRODUCT_ROWS
    first, last, _base = columns_in_sight(mask, b, chunk.start, block_row, sizes.PRODUCT_ROWS, sizes.PRODUCT_ROWS)
    begin, end = blocks_in_sight(first, last, sizes.PRODUCT_KEYS)
    return (first_column >= begin * sizes.PRODUCT_KEYS) & (first_column < end * sizes.PRODUCT_KEYS)


@triton.jit
def store_zeros(pointers, chunk, first_row, is_head, sizes):
    for row in range(first_row, first_row + sizes.ROWS):
        zeros = tl.zeros([sizes.KEYS, sizes.HEADS_PADDED], pointers.dtype.element_ty)
        store_heads(pointers + row * chunk.columns, zeros, is_head, sizes)


@triton.jit
def load_query_vector(vector, mask, b, h, is_head, t, sizes):
    """[HEADS] of (batch, heads, query)."""
    return tl.load(vector + ((b * (sizes.GROUPS * sizes.HEADS) + h) * mask.queries + t), mask=is_head, other=0.0)


@triton.jit
def load_matrix(matrices, chunk, batch_row, group, row, STAGE: tl.constexpr, sizes):
    """The query's own matrix of a stage, heads in by heads out."""
    SIZE: tl.constexpr = sizes.HEADS_PADDED * sizes.HEADS_PADDED
    h = tl.arange(0, sizes.HEADS_PADDED)
    index = ((batch_row * chunk.rows + row) * sizes.GROUPS + group) * 2 + STAGE
    return tl.load(matrices + index * SIZE + (h[:, None] * sizes.HEADS_PADDED + h[None, :]))


@triton.jit
def factors_of_keys(side, b, h, is_head, s, is_key, DTYPE: tl.constexpr):
    """A tuple of [KEYS, HEADS]: w1 of each rank, w2 of each rank, the gate."""
    factors = ()
    if side.pointer is not None:
        places = b * side.batch + s.to(tl.int64)[:, None] * side.position + h[None, :] * tl.cast(side.head, tl.int64)
        for i in tl.static_range(2 * side.RANK + side.GATE):
            inside = is_key[:, None] & is_head[None, :]
            factors = factors + (tl.load(side.pointer + (places + i * side.factor), mask=inside, other=0.0).to(DTYPE),)
    return factors


@triton.jit
def factor_of_query(side, b, h, is_head, t, i: tl.constexpr):
    """[HEADS] in float32."""
    places = b * side.batch + tl.cast(t, tl.int64) * side.position + h * tl.cast(side.head, tl.int64) + i * side.factor
    return tl.load(side.pointer + places, mask=is_head, other=0.0).to(tl.float32)


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
    The sum of each row of [KEYS, HEADS] in each of its columns. A product with ones leaves it in 8 columns, of which
    each thread takes its own: nothing is exchanged between threads.
    """
    KEYS: tl.constexpr = product.shape[0]
    HEADS: tl.constexpr = product.shape[1]
    total = tl.dot(product, tl.full([HEADS, 8], 1.0, product.dtype))
    total, _same = tl.split(tl.reshape(total, [KEYS, 4, 2]))
    total = tl.broadcast_to(total[:, None, :, None], [KEYS, HEADS // 8, 4, 2])
    return tl.reshape(total, [KEYS, HEADS])


@triton.jit
def compose_heads(a, a32, matrix, key, eye, stage, TRANSPOSED: tl.constexpr):
    """
    Equation 7 for one query's tile a [KEYS, HEADS], which is given in float32 too: the composed tile in float32, and
    its sums over the heads with the keys' w1 (w2 in the transpose) of each rank, in every column of [KEYS, HEADS].
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
