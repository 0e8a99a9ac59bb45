"""Which keys a tile of queries sees, and what kernels load. Letters: b row of the batch, h head, t query, s key."""

import triton
import triton.language as tl


@triton.jit
def first_key_of_block(mask, start, row, sizes):
    """
    The key of column 0 for the block of BLOCK_M rows that a row is in: the first that the block sees, rounded down so
    that blocks of columns are blocks of keys too. `start` is the query of row 0.
    """
    if mask.window is None:
        return 0
    else:
        t = start + row // sizes.BLOCK_M * sizes.BLOCK_M
        return tl.maximum(t + mask.query_offset - mask.window + 1, 0) // sizes.BLOCK_N * sizes.BLOCK_N


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
    if mask.first_keys is not None:
        offset = b * mask.sequence_stride + t
        first = tl.maximum(first, tl.load(mask.first_keys + offset, mask=inside, other=0))
        last = tl.minimum(last, tl.load(mask.last_keys + offset, mask=inside, other=0))
    return tl.where(inside, first, mask.keys), tl.where(inside, last, -1)


@triton.jit
def columns_in_sight(mask, b, start, row, ROWS: tl.constexpr, sizes):
    """
    Of a block of rows from `row` on, the first and the last column that any of them may see, none if the last is the
    smaller, and the key of column 0; `start` is the query of row 0.
    """
    first, last = key_ranges(mask, b, start + row + tl.arange(0, ROWS))
    base = first_key_of_block(mask, start, row, sizes)
    return tl.maximum(tl.min(first) - base, 0), tl.max(last) - base, base


@triton.jit
def blocks_in_sight(first, last, BLOCK: tl.constexpr):
    """From which block of columns to before which there are columns from the first to the last."""
    return first // BLOCK, tl.maximum(last + BLOCK, 0) // BLOCK


@triton.jit
def rows_in_sight(mask, b, chunk, s, BLOCK: tl.constexpr):
    """The rows of a chunk, from a multiple of BLOCK to before the second, that may see any of the keys s, or none."""
    begin = chunk.start
    end = tl.minimum(chunk.start + chunk.rows, mask.queries)
    if mask.CAUSAL:
        begin = tl.maximum(begin, tl.min(s) - mask.query_offset)
    if mask.window is not None:
        end = tl.minimum(end, tl.minimum(tl.max(s), mask.keys - 1) - mask.query_offset + mask.window)
        if not mask.CAUSAL:
            begin = tl.maximum(begin, tl.min(s) - mask.query_offset - mask.window + 1)
    if mask.first_keys is not None:
        # Queries and keys are the same tokens, so whom a token sees are those who see it.
        offset = b * mask.sequence_stride + s
        begin = tl.maximum(begin, tl.min(tl.load(mask.first_keys + offset, mask=s < mask.keys, other=mask.keys)))
        end = tl.minimum(end, tl.max(tl.load(mask.last_keys + offset, mask=s < mask.keys, other=-1)) + 1)
    # Rounded down, a beginning past the end may come before it.
    return (begin - chunk.start) // BLOCK * BLOCK, tl.where(begin < end, end - chunk.start, 0)


@triton.jit
def offsets_of(states, b, h, position):
    """Where the channels of positions begin, in elements, for heads of queries."""
    head = h // states.KV_GROUPS * (states.head >> 1)
    return (b * (states.batch >> 1) + head + position * states.position) * states.UNIT


@triton.jit
def load_factors(side, b, h, position, inside, DTYPE: tl.constexpr):
    """A tuple: w1 of each rank, w2 of each rank, the gate, of the shape that rows, heads and positions broadcast to."""
    factors = ()
    if side.pointer is not None:
        head_stride = tl.cast(side.head >> side.IS_CACHED, tl.int64)
        offsets = b * (side.batch >> side.IS_CACHED) + h // side.KV_GROUPS * head_stride
        offsets += tl.cast(position, tl.int64) * side.position
        if side.UNIT == 8:
            eight = side.pointer + (tl.expand_dims(offsets, -1) * 8 + tl.arange(0, 8))
            eight = tl.load(eight, mask=tl.expand_dims(inside, -1), other=0).to(DTYPE)
            # The bits of a factor's number are axes, of which a split takes the last.
            even, odd = tl.split(tl.reshape(eight, inside.shape + (2, 2, 2)))
            f04, f26 = tl.split(even)
            f15, f37 = tl.split(odd)
            f0, f4 = tl.split(f04)
            f1, f5 = tl.split(f15)
            f2, f6 = tl.split(f26)
            f3, f7 = tl.split(f37)
            factors = (f0, f1, f2, f3, f4, f5, f6, f7)
        else:
            offsets += h % side.KV_GROUPS * side.in_group
            for i in tl.static_range(side.NUMBER):
                factor = tl.load(side.pointer + (offsets + i * side.factor), mask=inside, other=0)
                factors = factors + (factor.to(DTYPE),)
    return factors
