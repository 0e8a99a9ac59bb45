"""
Functions that kernels share: which keys a block of queries sees, loading and storing, composing the heads of a tile.

Names: b is a row of the batch, offs_h are heads, offs_m queries, offs_n keys and offs_d channels. A row and a column
are those of the workspace (`workspace.Chunk`): row 0 is query `chunk.start`, and where column 0 is depends on the row.

Letters: a is what is composed, x and y are a composed before and after the softmax, e are weights (exponentials), d is
the gradient of what a composition gives. A tile has the scores of one query, [COMPOSE_N, HEADS]. All that the query and
the static map do to it is a product with one matrix, I + gate + w1 w2^T + static. What the keys do is elementwise
except for the sums over the heads. With w1 and w2 exchanged and the matrix transposed the same function composes
gradients.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .tuning import PART


class Group(NamedTuple):
    """The group of heads that a program composes, in one row of the batch."""

    batch_row: Any  # the row of the batch as it is numbered in the workspace
    b: Any
    index: Any  # of the group
    offs_h: Any  # [HEADS_PADDED]
    is_head: Any  # [HEADS_PADDED]: False where the group has no more heads


class Tile(NamedTuple):
    """The scores that a program composes: those of some keys, of one query after another."""

    group: Group
    first_row: Any
    end_row: Any
    column: Any  # [COMPOSE_N]
    offs_n: Any  # [COMPOSE_N]: the keys of these columns
    is_key: Any  # [COMPOSE_N]: False for padding, and past the last key
    document: Any  # [COMPOSE_N]: the first token of each key's document, if tokens are packed
    offsets: Any  # [HEADS_PADDED, COMPOSE_N]: where the scores of row 0 are in the workspace
    is_seen: Any  # whether any of the queries may see any of the keys
    eye: Any  # [HEADS_PADDED, HEADS_PADDED]: the identity, made before the loop, out of which Triton 3.9 moves nothing


@triton.jit
def first_key(mask, start, row, sizes):
    """The key of column 0 of a row: the first that its block of rows sees, rounded down to the first of a block."""
    if mask.window is None:
        return 0
    else:
        t = start + row // sizes.BLOCK_M * sizes.BLOCK_M
        return tl.maximum(t + mask.query_offset - mask.window + 1, 0) // sizes.BLOCK_N * sizes.BLOCK_N


@triton.jit
def band(mask, position, keys):
    """First and last of so many keys that queries at positions may see by causality and window."""
    first = position * 0
    last = first + keys - 1
    if mask.CAUSAL:
        last = tl.minimum(last, position)
    if mask.window is not None:
        first = tl.maximum(first, position - mask.window + 1)
        if not mask.CAUSAL:
            last = tl.minimum(last, position + mask.window - 1)
    return first, last


@triton.jit
def key_range(mask, b, offs_m):
    """First and last key seen by band and document: with `mask_scores` the rule of visibility_dcformer.py."""
    first, last = band(mask, offs_m + mask.query_offset, mask.keys)
    is_query = offs_m < mask.queries
    if mask.first_keys is not None:
        offsets = b * mask.document_stride_b + offs_m
        first = tl.maximum(first, tl.load(mask.first_keys + offsets, mask=is_query, other=0))
        last = tl.minimum(last, tl.load(mask.last_keys + offsets, mask=is_query, other=0))
    return tl.where(is_query, first, mask.keys), tl.where(is_query, last, -1)


@triton.jit
def visible_blocks(mask, b, start, row, ROWS: tl.constexpr, BLOCK: tl.constexpr, sizes):
    """The first block of columns that any of ROWS rows may see, that after the last, and the key of column 0."""
    first, last = key_range(mask, b, start + row + tl.arange(0, ROWS))
    base = first_key(mask, start, row, sizes)
    return tl.maximum(tl.min(first) - base, 0) // BLOCK, tl.maximum(tl.max(last) - base + BLOCK, 0) // BLOCK, base


@triton.jit
def visible_rows(mask, b, chunk, offs_n, BLOCK: tl.constexpr):
    """The rows of a chunk, from a multiple of BLOCK to before the second, that may see any of these keys, or none."""
    begin = chunk.start
    end = tl.minimum(chunk.start + chunk.rows, mask.queries)
    if mask.CAUSAL:
        begin = tl.maximum(begin, tl.min(offs_n) - mask.query_offset)
    if mask.window is not None:
        end = tl.minimum(end, tl.minimum(tl.max(offs_n), mask.keys - 1) - mask.query_offset + mask.window)
        if not mask.CAUSAL:
            begin = tl.maximum(begin, tl.min(offs_n) - mask.query_offset - mask.window + 1)
    if mask.first_keys is not None:
        # Queries and keys are the same tokens, so whom a token sees are those who see it.
        offsets = b * mask.document_stride_b + offs_n
        is_key = offs_n < mask.keys
        begin = tl.maximum(begin, tl.min(tl.load(mask.first_keys + offsets, mask=is_key, other=mask.keys)))
        end = tl.minimum(end, tl.max(tl.load(mask.last_keys + offsets, mask=is_key, other=-1)) + 1)
    # Rounded down, a beginning past the end may come before it.
    return (begin - chunk.start) // BLOCK * BLOCK, tl.where(begin < end, end - chunk.start, 0)


@triton.jit
def mask_scores(x, mask, t, tile):
    """Add a float mask to scores [COMPOSE_N, HEADS] of query t, and set those of keys that it does not see to -inf."""
    b, offs_n = tile.group.b, tile.offs_n
    first, last = key_range(mask, b, t)
    is_visible = tile.is_key & (offs_n >= first) & (offs_n <= last)
    if mask.first_keys is not None:
        is_visible = is_visible & (tile.document == tl.load(mask.first_keys + b * mask.document_stride_b + t))
    if mask.dense is not None:
        offsets = b * (mask.dense_stride_b >> 1) + tl.cast(t, tl.int64) * (mask.dense_stride_m >> 1) + offs_n
        dense = tl.load(mask.dense + offsets, mask=offs_n < mask.keys, other=0)
        if mask.dense.dtype.element_ty == tl.float32:
            x += dense[:, None]
        else:
            is_visible = is_visible & (dense != 0)
    return tl.where(is_visible[:, None], x, -float("inf"))


@triton.jit
def state_offsets(states, b, offs_h, offs_t):
    """The offsets of the first channels of positions, in elements, for heads of queries."""
    head = offs_h // states.KV_GROUPS * (states.stride_h >> 1)  # see `workspace.unspecialized`
    return (b * (states.stride_b >> 1) + head + offs_t * states.stride_t) * states.UNIT


@triton.jit
def state_tile(states, b, h, offs_t, offs_d, length):
    """Pointers to channels of positions before `length` [positions, channels], and where there are any."""
    offsets = state_offsets(states, b, h, offs_t.to(tl.int64))[:, None] + offs_d[None, :]
    return states.pointer + offsets, (offs_t < length)[:, None] & (offs_d < states.CHANNELS)[None, :]


@triton.jit
def load_factors(side, b, offs_h, offs_t, is_inside, DTYPE: tl.constexpr):
    """A tuple of w1 of each rank, w2 of each rank, the gate, of the shape that b, offs_h and offs_t broadcast to."""
    factors = ()
    if side.pointer is not None:
        stride_h = tl.cast(side.stride_h >> side.IS_CACHED, tl.int64)
        offsets = b * (side.stride_b >> side.IS_CACHED) + offs_h // side.KV_GROUPS * stride_h
        offsets += tl.cast(offs_t, tl.int64) * side.stride_t
        if side.UNIT == 8:
            # One load for eight: decoding on 10.0 has 8 % fewer instructions, on 8.0 one spill less. The bits of a
            # factor's number are axes, of which a split takes the last.
            eight = side.pointer + (tl.expand_dims(offsets, -1) * 8 + tl.arange(0, 8))
            eight = tl.load(eight, mask=tl.expand_dims(is_inside, -1), other=0).to(DTYPE)
            even, odd = tl.split(tl.reshape(eight, is_inside.shape + (2, 2, 2)))
            f04, f26 = tl.split(even)
            f15, f37 = tl.split(odd)
            f0, f4 = tl.split(f04)
            f1, f5 = tl.split(f15)
            f2, f6 = tl.split(f26)
            f3, f7 = tl.split(f37)
            factors = (f0, f1, f2, f3, f4, f5, f6, f7)
        else:
            offsets += offs_h % side.KV_GROUPS * side.stride_member
            for i in tl.static_range(side.NUMBER):
                factor = tl.load(side.pointer + (offsets + i * side.stride_factor), mask=is_inside, other=0)
                factors = factors + (factor.to(DTYPE),)
    return factors


@triton.jit
def program_group(chunk, sizes):
    """The group of heads of a program, which the third axis of the grid counts for each row of the batch."""
    batch_row = (tl.program_id(2) // sizes.GROUPS).to(tl.int64)
    group = tl.program_id(2) % sizes.GROUPS
    member = tl.arange(0, sizes.HEADS_PADDED)
    return Group(batch_row, batch_row + chunk.batch, group, group * sizes.HEADS + member, member < sizes.HEADS)


@triton.jit
def program_tile(mask, chunk, sizes, DTYPE: tl.constexpr):
    """The tile of a program in the grid `Work.compose_grid`."""
    group, pid_n, first_row = program_group(chunk, sizes), tl.program_id(0), tl.program_id(1) * sizes.COMPOSE_M
    begin, end, base = visible_blocks(mask, group.b, chunk.start, first_row, sizes.COMPOSE_M, sizes.COMPOSE_N, sizes)
    end_row = tl.minimum(first_row + sizes.COMPOSE_M, mask.queries - chunk.start)
    column = pid_n * sizes.COMPOSE_N + tl.arange(0, sizes.COMPOSE_N)
    offs_n = base + column
    document = offs_n
    is_key = offs_n < mask.keys
    if mask.first_keys is not None:
        document = tl.load(mask.first_keys + group.b * mask.document_stride_b + offs_n, mask=is_key, other=-2)
    if mask.padding is not None:
        padding = mask.padding + group.b * (mask.padding_stride_b >> 1)
        is_key = is_key & (tl.load(padding + offs_n, mask=is_key, other=0) != 0)
    offsets = head_offsets(chunk, group, sizes)[:, None] + column[None, :]
    is_seen = (pid_n >= begin) & (pid_n < end)
    eye = identity(sizes.HEADS_PADDED, DTYPE)
    return Tile(group, first_row, end_row, column, offs_n, is_key, document, offsets, is_seen, eye)


@triton.jit
def head_offsets(chunk, group, sizes):
    """The offsets of the scores of each head of a group in the workspace."""
    return (group.batch_row * sizes.ALL_HEADS + group.offs_h) * (tl.cast(chunk.rows, tl.int64) * chunk.columns)


@triton.jit
def load_key_factors(stage, tile, DTYPE: tl.constexpr):
    """The factors of the keys of a tile, [COMPOSE_N, HEADS] each."""
    group = tile.group
    is_inside = tile.is_key[:, None] & group.is_head[None, :]
    return load_factors(stage.key, group.b, group.offs_h[None, :], tile.offs_n[:, None], is_inside, DTYPE)


@triton.jit
def load_tile(pointer, chunk, tile, row):
    """A tile [COMPOSE_N, HEADS] of a row, with zeros for heads that only pad the group."""
    return tl.trans(
        tl.load(pointer + (tile.offsets + row * chunk.columns), mask=tile.group.is_head[:, None], other=0.0)
    )


@triton.jit
def store_tile(pointer, x, chunk, tile, row):
    """Store a tile [COMPOSE_N, HEADS] of a row."""
    pointers = pointer + (tile.offsets + row * chunk.columns)
    tl.store(pointers, tl.trans(x).to(pointer.dtype.element_ty), mask=tile.group.is_head[:, None])


@triton.jit
def store_zeros(pointer, mask, chunk, sizes, tile):
    """Store zeros in a tile that none of its queries sees, where other queries have matrix products read it."""
    first_column = tl.program_id(0) * sizes.COMPOSE_N
    block_row = tile.first_row // sizes.BLOCK_M * sizes.BLOCK_M
    begin, end, _ = visible_blocks(mask, tile.group.b, chunk.start, block_row, sizes.BLOCK_M, sizes.BLOCK_N, sizes)
    if (first_column >= begin * sizes.BLOCK_N) & (first_column < end * sizes.BLOCK_N):
        zeros = tl.zeros([sizes.COMPOSE_N, sizes.HEADS_PADDED], pointer.dtype.element_ty)
        for row in range(tile.first_row, tile.first_row + sizes.COMPOSE_M):
            store_tile(pointer, zeros, chunk, tile, row)


@triton.jit
def load_row(pointer, mask, group, t, sizes):
    """[HEADS] of (batch, heads, query); infinity for heads that only pad the group, whose weights it makes zero."""
    offsets = (group.b * sizes.ALL_HEADS + group.offs_h) * mask.queries + t
    return tl.load(pointer + offsets, mask=group.is_head, other=float("inf"))


@triton.jit
def matrix_pointers(matrices, chunk, group, row, index, sizes, NUMBER: tl.constexpr = 2):
    """Pointers to a query's matrix [heads in, heads out], the index-th of NUMBER."""
    h = tl.arange(0, sizes.HEADS_PADDED)
    index += ((group.batch_row * chunk.rows + row) * sizes.GROUPS + group.index) * NUMBER
    return matrices + index * (sizes.HEADS_PADDED * sizes.HEADS_PADDED) + h[:, None] * sizes.HEADS_PADDED + h[None, :]


@triton.jit
def identity(SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """The identity matrix [SIZE, SIZE]."""
    return (tl.arange(0, SIZE)[:, None] == tl.arange(0, SIZE)[None, :]).to(DTYPE)


@triton.jit
def to_accumulator(a, eye):
    """A tile in float32: its product with the identity, cheaper than to change how threads hold what they loaded."""
    return a if a.dtype == tl.float32 else tl.dot(a, eye)


@triton.jit
def sum_over_heads(x):
    """Sums of [COMPOSE_N, HEADS] over the heads, repeated for every head."""
    HEADS: tl.constexpr = x.shape[1]
    # A product with ones leaves it in 8 columns, of which each thread takes one: nothing is exchanged between threads.
    total = tl.dot(x, tl.full([HEADS, 8], 1.0, x.dtype))
    total, _same = tl.split(tl.reshape(total, [x.shape[0], 4, 2]))
    total = tl.broadcast_to(total[:, None, :, None], [x.shape[0], HEADS // 8, 4, 2])
    return tl.reshape(total, x.shape)


@triton.jit
def compose_heads(a, a32, matrix, key_factors, eye, stage, TRANSPOSED: tl.constexpr):
    """Equation 7 for a query's tile [COMPOSE_N, HEADS], and of each rank sums with the keys' w1 (w2 if TRANSPOSED)."""
    x = a32
    if stage.query.RANK + stage.query.GATE + stage.HAS_STATIC > 0:
        x = tl.dot(a, tl.trans(matrix) if TRANSPOSED else matrix, input_precision="ieee")
    RANK: tl.constexpr = stage.key.RANK
    sums = ()
    if RANK + stage.key.GATE > 0:
        a = a32.to(a.dtype)
        of_key = a * key_factors[2 * RANK] if stage.key.GATE else tl.zeros(a.shape, a.dtype)
        for r in tl.static_range(RANK):
            product = a * key_factors[TRANSPOSED * RANK + r]  # w1, or transposed w2
            total = tl.sum(product, 1, keep_dims=True) if a.dtype == tl.float32 else sum_over_heads(product)
            of_key += total.to(a.dtype) * key_factors[(1 - TRANSPOSED) * RANK + r]
            sums = sums + (total,)
        x = x + of_key if a.dtype == tl.float32 else tl.dot(of_key, eye, x)
    return x, sums


@triton.jit
def composed_scores(a, mask, chunk, sizes, tile, row, matrices, stage, factors):
    """Scores a [COMPOSE_N, HEADS] of a row composed before the softmax, and masked."""
    matrix = tl.load(matrix_pointers(matrices, chunk, tile.group, row, 0, sizes))
    x, _sums = compose_heads(a, to_accumulator(a, tile.eye), matrix, factors, tile.eye, stage, False)
    return mask_scores(x, mask, chunk.start + row, tile)


@triton.jit
def softmax_weights(a, mask, chunk, sizes, tile, row, matrices, log_sums, stage, factors):
    """Weights of scores a [COMPOSE_N, HEADS] of a row, from the logarithms to base 2 of the softmax's sums."""
    log_sum = load_row(log_sums, mask, tile.group, chunk.start + row, sizes)  # on its way while scores are composed
    x = composed_scores(a, mask, chunk, sizes, tile, row, matrices, stage, factors)
    return tl.exp2(x - log_sum[None, :])


@triton.jit
def in_parts(x, sizes):
    """A tile [COMPOSE_N, HEADS] by parts of the keys, [COMPOSE_N // PART, PART, HEADS]."""
    return tl.reshape(x, [sizes.COMPOSE_N // PART, PART, sizes.HEADS_PADDED])


@triton.jit
def store_parts(pointer, x, chunk, tile, row, sizes):
    """Store numbers [COMPOSE_N // PART, HEADS] of a row in (batch, part, row, head)."""
    part = tl.program_id(0) * (sizes.COMPOSE_N // PART) + tl.arange(0, sizes.COMPOSE_N // PART)
    rows = (tile.group.batch_row * (chunk.columns // PART) + part) * chunk.rows + row
    offsets = rows[:, None] * sizes.ALL_HEADS + tile.group.offs_h[None, :]
    tl.store(pointer + offsets, x, mask=tile.group.is_head[None, :])


@triton.jit
def load_gradient_scale(norms):
    """The power of 2 that brings gradients of 16-bit inputs to float16, from norms that bound gradients of weights."""
    # 2^5 leaves room for both compositions, which may make 2,000 times as much of them, as of 64 heads that agree.
    exponent = tl.floor(tl.log2(32.0 / (tl.load(norms) * tl.load(norms + 1))))
    bounded = tl.minimum(tl.maximum(exponent, -100.0), 100.0)
    return tl.exp2(tl.where(exponent == exponent, bounded, exponent))  # NaN in any gradient is NaN in all
