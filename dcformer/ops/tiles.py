"""What the kernels of the forward and the backward pass share: which keys a tile sees, and equation 7 on a tile.

Scores of a chunk of queries lie in a workspace (batch, head, row, column). A row is a query of the chunk; columns are
keys from 0 on or, where there is a window, from the first key on that the row's block of queries can see, so that
nothing outside the band exists. All exponents are to base 2, with log2(e) in the factor of the scores.

Letters: t query, s key. Tiles are [BLOCK_QUERIES, BLOCK_KEYS], and every composition is a loop over the heads of a
group, since a tile of all heads at once does not fit into the registers.
"""

import triton
import triton.language as tl


# Triton would otherwise compile a kernel anew for lengths of 1 and for multiples of 16.
LENGTHS = ["query_start", "queries", "keys", "query_offset", "window"]
STRIDES = ["padding_stride", "sequence_stride", "visible_batch_stride", "visible_stride"]


@triton.jit
def first_key_of_block(row_block, query_start, query_offset, window, BLOCK_ROWS: tl.constexpr):
    """The key of column 0 for a block of rows: the first that its first query sees, rounded down for aligned loads."""
    if window is None:
        return 0
    else:
        first = query_start + row_block * BLOCK_ROWS + query_offset - window + 1
        return tl.maximum(first, 0) // 16 * 16


@triton.jit
def place_of_program(
    query_start,
    query_offset,
    window,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Of the tile of a program with a grid of (columns, rows, ..): its rows, its columns, and its first key."""
    row = tl.program_id(1) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    column = tl.program_id(0) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    block_row = tl.program_id(1) * BLOCK_QUERIES // BLOCK_ROWS
    first_key = first_key_of_block(block_row, query_start, query_offset, window, BLOCK_ROWS)
    return row, column, first_key + tl.program_id(0) * BLOCK_KEYS


@triton.jit
def key_ranges(t, queries, keys, query_offset, window, FIRST_KEYS, LAST_KEYS, IS_CAUSAL: tl.constexpr):
    """First and last key that each query may see by causality, window and document; none for queries past the end."""
    position = t + query_offset
    first = tl.zeros_like(t)
    last = tl.zeros_like(t) + keys - 1
    if IS_CAUSAL:
        last = tl.minimum(last, position)
    if window is not None:
        first = tl.maximum(first, position - window + 1)
        if not IS_CAUSAL:
            last = tl.minimum(last, position + window - 1)
    if FIRST_KEYS is not None:
        first = tl.maximum(first, tl.load(FIRST_KEYS + t, mask=t < queries, other=0))
        last = tl.minimum(last, tl.load(LAST_KEYS + t, mask=t < queries, other=0))
    return tl.where(t < queries, first, keys), tl.where(t < queries, last, -1)


@triton.jit
def query_range(
    s,
    query_start,
    queries,
    keys,
    rows,
    query_offset,
    window,
    FIRST_KEYS,
    LAST_KEYS,
    IS_CAUSAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """The rows of a chunk, from a multiple of BLOCK_ROWS to before the second, that may see a block of keys."""
    begin = query_start
    end = tl.minimum(query_start + rows, queries)
    if IS_CAUSAL:
        begin = tl.maximum(begin, tl.min(s) - query_offset)
    if window is not None:
        end = tl.minimum(end, tl.minimum(tl.max(s), keys - 1) - query_offset + window)
        if not IS_CAUSAL:
            begin = tl.maximum(begin, tl.min(s) - query_offset - window + 1)
    if FIRST_KEYS is not None:
        # Queries and keys are the same tokens, so whom a token sees are those who see it.
        begin = tl.maximum(begin, tl.min(tl.load(FIRST_KEYS + s, mask=s < keys, other=keys)))
        end = tl.minimum(end, tl.max(tl.load(LAST_KEYS + s, mask=s < keys, other=-1)) + 1)
    return (begin - query_start) // BLOCK_ROWS * BLOCK_ROWS, end - query_start


@triton.jit
def sees_any(first, last, first_key, BLOCK_KEYS: tl.constexpr):
    """Whether any of these queries may see any key of a block, by their ranges."""
    return (tl.min(first) < first_key + BLOCK_KEYS) & (tl.max(last) >= first_key)


@triton.jit
def visible_bias(t, s, first, last, queries, keys, PADDING, SEQUENCES, VISIBLE, visible_stride):
    """What a mask adds to composed scores: -inf where a query does not see a key, mostly 0 elsewhere."""
    visible = (s[None, :] >= first[:, None]) & (s[None, :] <= last[:, None])  # [BLOCK_QUERIES, BLOCK_KEYS]
    if PADDING is not None:
        visible = visible & (tl.load(PADDING + s, mask=s < keys, other=0) != 0)[None, :]
    if SEQUENCES is not None:
        own = tl.load(SEQUENCES + t, mask=t < queries, other=-1)
        visible = visible & (own[:, None] == tl.load(SEQUENCES + s, mask=s < keys, other=-2)[None, :])
    if VISIBLE is None:
        return tl.where(visible, 0.0, -float("inf"))
    else:
        places = VISIBLE + t.to(tl.int64)[:, None] * visible_stride + s[None, :]
        inside = (t < queries)[:, None] & (s < keys)[None, :]
        dense = tl.load(places, mask=inside, other=0)
        if VISIBLE.dtype.element_ty == tl.float32:
            return tl.where(visible, dense, -float("inf"))
        else:
            return tl.where(visible & (dense != 0), 0.0, -float("inf"))


@triton.jit
def zero_maps(RANK: tl.constexpr, BLOCK_QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    maps = ()
    for _ in tl.static_range(RANK):
        maps = maps + (tl.zeros([BLOCK_QUERIES, BLOCK_KEYS], tl.float32),)
    return maps


@triton.jit
def load_maps(MAPS, places, map_stride, FIRST: tl.constexpr, RANK: tl.constexpr):
    maps = ()
    for r in tl.static_range(RANK):
        maps = maps + (tl.load(MAPS + (FIRST + r) * map_stride + places),)
    return maps


@triton.jit
def store_maps(MAPS, places, map_stride, maps, FIRST: tl.constexpr, RANK: tl.constexpr):
    for r in tl.static_range(RANK):
        tl.store(MAPS + (FIRST + r) * map_stride + places, maps[r])


@triton.jit
def add_to_query_maps(maps, a, FACTORS, channel_stride, t, FIRST: tl.constexpr, RANK: tl.constexpr):
    """
    Add one head's share to the query's maps: maps_r += factor_r[t] a. FACTORS points at the head; FIRST is the first
    channel, 0 for w1 and the rank for w2.
    """
    added = ()
    for r in tl.static_range(RANK):
        added = added + (maps[r] + a * tl.load(FACTORS + ((FIRST + r) * channel_stride + t))[:, None],)
    return added


@triton.jit
def add_to_key_maps(maps, a, FACTORS, channel_stride, s, FIRST: tl.constexpr, RANK: tl.constexpr):
    """As `add_to_query_maps`, with the keys' factors: maps_r += factor_r[s] a."""
    added = ()
    for r in tl.static_range(RANK):
        added = added + (maps[r] + a * tl.load(FACTORS + ((FIRST + r) * channel_stride + s))[None, :],)
    return added


@triton.jit
def gated(
    a,
    QUERY,
    query_stride,
    t,
    KEY,
    key_stride,
    s,
    QUERY_RANK: tl.constexpr,
    QUERY_GATE: tl.constexpr,
    KEY_RANK: tl.constexpr,
    KEY_GATE: tl.constexpr,
):
    """(1 + query gate + key gate) a; the factors were packed with the 1 in one of the gates."""
    if QUERY_GATE and KEY_GATE:
        query_gate = tl.load(QUERY + (2 * QUERY_RANK * query_stride + t))[:, None]
        return a * (query_gate + tl.load(KEY + (2 * KEY_RANK * key_stride + s))[None, :])
    elif QUERY_GATE:
        return a * tl.load(QUERY + (2 * QUERY_RANK * query_stride + t))[:, None]
    elif KEY_GATE:
        return a * tl.load(KEY + (2 * KEY_RANK * key_stride + s))[None, :]
    else:
        return a


@triton.jit
def spread_maps(
    x,
    query_maps,
    key_maps,
    QUERY,
    query_stride,
    t,
    KEY,
    key_stride,
    s,
    QUERY_FIRST: tl.constexpr,
    QUERY_RANK: tl.constexpr,
    KEY_FIRST: tl.constexpr,
    KEY_RANK: tl.constexpr,
):
    """x + sum over ranks of factor[t] map + factor[s] map, for one head: w2 in equation 7, w1 in its transpose."""
    for r in tl.static_range(QUERY_RANK):
        x += tl.load(QUERY + ((QUERY_FIRST + r) * query_stride + t))[:, None] * query_maps[r]
    for r in tl.static_range(KEY_RANK):
        x += tl.load(KEY + ((KEY_FIRST + r) * key_stride + s))[None, :] * key_maps[r]
    return x


@triton.jit
def static_term(x, A, places, head_stride, STATIC, HEADS: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """x + sum over heads j of static[j, h] a_j; STATIC points at column h, A at the group's first head."""
    for j in range(HEADS):
        x += tl.load(A + places).to(tl.float32) * tl.load(STATIC + j * HEADS)
        A += head_stride
    return x
