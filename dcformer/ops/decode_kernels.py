"""
The kernels of decoding with composed attention heads, in the order of their launches; `decode` says how they share
the work.

Keys are counted by position. `_place_of` turns a position into the place of its row in memory: in a ring by the
remainder, in a paged cache through the table of blocks. A row of the batch has keys `first` to `last` that any of its
queries may see; only these are read, and the scores of key `position` stand in column `position - first`.

Scores are kept in base 2: the factor log2(e) is folded into their scaling, which composition, being linear, lets pass.
"""

import triton
import triton.language as tl


LENGTHS = ["keys", "query_offset", "window", "ring_size", "span", "splits"]


@triton.jit
def _key_range(
    lengths,
    row,
    keys,
    query_offset,
    window,
    ring_size,
    QUERIES: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    RING: tl.constexpr,
):
    """First and last + 1 of the keys that any query of this row may see, and the position of its first query."""
    if lengths is None:
        length = keys
        offset = query_offset
    else:
        length = tl.load(lengths + row).to(tl.int32)
        offset = length - QUERIES
    first = 0
    if RING:
        first = tl.maximum(length - ring_size, 0)
    else:
        length = tl.minimum(length, keys)
    last = length
    if CAUSAL:
        last = tl.minimum(last, offset + QUERIES)
    if WINDOW:
        first = tl.maximum(first, offset - window + 1)
        if not CAUSAL:
            last = tl.minimum(last, offset + QUERIES - 1 + window)
    return first, last, offset


@triton.jit
def _part(first, last, split, splits, BLOCK_KEYS: tl.constexpr):
    """The keys of one of `splits` parts, whole blocks each but for the last."""
    blocks = tl.cdiv(tl.maximum(last - first, 0), BLOCK_KEYS)
    size = tl.cdiv(blocks, splits) * BLOCK_KEYS
    start = first + split * size
    return start, tl.minimum(start + size, last)


@triton.jit
def _place_of(position, inside, table, row, ring_size, RING: tl.constexpr, PAGE: tl.constexpr):
    """Block (or batch row) and offset in it of keys, 64 bits each, and their slots."""
    slot = position
    if RING:
        slot = position % ring_size
    if PAGE == 0:
        block = row
        offset = slot.to(tl.int64)
    else:
        block = tl.load(table + slot // PAGE, mask=inside, other=0).to(tl.int64)
        offset = (slot % PAGE).to(tl.int64)
    return block, offset, slot


@triton.jit(do_not_specialize=LENGTHS)
def scores_kernel(
    query,
    key,
    scores,
    lengths,
    table,
    scale,
    keys,
    query_offset,
    window,
    ring_size,
    span,
    splits,
    query_batch_stride,
    query_head_stride,
    query_stride,
    key_block_stride,
    key_head_stride,
    key_stride,
    table_stride,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    SERVED: tl.constexpr,
    CHANNELS: tl.constexpr,
    CHANNELS_PADDED: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    DOT: tl.constexpr,
    UNIT: tl.constexpr,
    PAGE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    RING: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """
    Scores of all queries of the heads that one key/value head serves: program (part, key/value head, batch row).

    Strides of keys count in `UNIT` elements, which tells the compiler how far loads can be joined.
    """
    row = tl.program_id(2).to(tl.int64)
    key_head = tl.program_id(1).to(tl.int64)
    first, last, _offset = _key_range(
        lengths, row, keys, query_offset, window, ring_size, QUERIES, CAUSAL, WINDOW, RING
    )
    start, stop = _part(first, last, tl.program_id(0), splits, BLOCK_KEYS)
    if table is not None:
        table += row * table_stride
    query_head_stride = tl.cast(query_head_stride, tl.int64)
    query_stride = tl.cast(query_stride, tl.int64)
    query += row * query_batch_stride + key_head * SERVED * query_head_stride
    key += key_head * key_head_stride * UNIT
    scores += (row * HEADS + key_head * SERVED) * QUERIES * span
    channel = tl.arange(0, CHANNELS_PADDED)
    is_channel = channel < CHANNELS
    for block_start in range(start, stop, BLOCK_KEYS):
        position = block_start + tl.arange(0, BLOCK_KEYS)
        inside = position < stop
        block, offset, _slot = _place_of(position, inside, table, row, ring_size, RING, PAGE)
        place = block * key_block_stride * UNIT + offset * key_stride * UNIT
        k = tl.load(
            key + place[:, None] + channel[None, :], mask=inside[:, None] & is_channel[None, :], other=0.0
        )  # [BLOCK_KEYS, CHANNELS]
        column = position - first
        if DOT:
            index = tl.arange(0, ROWS_PADDED)
            is_row = index < SERVED * QUERIES
            q = tl.load(
                query
                + (index // QUERIES)[:, None] * query_head_stride
                + (index % QUERIES)[:, None] * query_stride
                + channel[None, :],
                mask=is_row[:, None] & is_channel[None, :],
                other=0.0,
            )  # [ROWS, CHANNELS]
            if q.dtype != k.dtype:
                q = q.to(tl.float32)
                k = k.to(tl.float32)
            x = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [ROWS, BLOCK_KEYS]
            tl.store(
                scores + index.to(tl.int64)[:, None] * span + column[None, :],
                x,
                mask=is_row[:, None] & inside[None, :],
            )
        else:
            k = k.to(tl.float32)
            for index in tl.static_range(SERVED * QUERIES):
                q = tl.load(
                    query + (index // QUERIES) * query_head_stride + (index % QUERIES) * query_stride + channel,
                    mask=is_channel,
                    other=0.0,
                ).to(tl.float32)  # [CHANNELS]
                x = tl.sum(k * q[None, :], 1) * scale  # [BLOCK_KEYS]
                tl.store(scores + index * tl.cast(span, tl.int64) + column, x, mask=inside)


@triton.jit
def _compose(
    a,
    query_factors,
    query_channel_stride,
    key_factors,
    key_channel_stride,
    static,
    head,
    is_head,
    is_pair,
    HEADS: tl.constexpr,
    QUERY_CHANNELS: tl.constexpr,
    KEY_CHANNELS: tl.constexpr,
):
    """
    Equation 7 on [HEADS, BLOCK_KEYS] of one query: every branch reads the tile `a` as it came.

    `query_factors` points at [HEADS], `key_factors` at [HEADS, BLOCK_KEYS] first channels, `static` at a whole map.
    """
    composed = a
    if QUERY_CHANNELS > 0:
        for r in tl.static_range(QUERY_CHANNELS // 2):
            w1 = tl.load(query_factors + r * query_channel_stride, mask=is_head, other=0.0).to(tl.float32)
            w2 = tl.load(query_factors + (QUERY_CHANNELS // 2 + r) * query_channel_stride, mask=is_head, other=0.0).to(
                tl.float32
            )
            composed += tl.sum(a * w1[:, None], 0)[None, :] * w2[:, None]
        if QUERY_CHANNELS % 2 == 1:
            gate = tl.load(query_factors + (QUERY_CHANNELS - 1) * query_channel_stride, mask=is_head, other=0.0)
            composed += a * gate.to(tl.float32)[:, None]
    if KEY_CHANNELS > 0:
        for r in tl.static_range(KEY_CHANNELS // 2):
            w1 = tl.load(key_factors + r * key_channel_stride, mask=is_pair, other=0.0).to(tl.float32)
            w2 = tl.load(key_factors + (KEY_CHANNELS // 2 + r) * key_channel_stride, mask=is_pair, other=0.0)
            composed += tl.sum(a * w1, 0)[None, :] * w2.to(tl.float32)
        if KEY_CHANNELS % 2 == 1:
            gate = tl.load(key_factors + (KEY_CHANNELS - 1) * key_channel_stride, mask=is_pair, other=0.0)
            composed += a * gate.to(tl.float32)
    if static is not None:
        for j in range(HEADS):
            source = tl.sum(tl.where((head == j)[:, None], a, 0.0), 0)  # [BLOCK_KEYS], head j
            column = tl.load(static + j * HEADS + head, mask=is_head, other=0.0).to(tl.float32)
            composed += source[None, :] * column[:, None]
    return composed


@triton.jit(do_not_specialize=LENGTHS)
def compose_kernel(
    scores,
    maxima,
    sums,
    query_factors,
    key_factors,
    static,
    padding,
    visible,
    lengths,
    table,
    keys,
    query_offset,
    window,
    ring_size,
    span,
    splits,
    query_batch_stride,
    query_head_stride,
    query_stride,
    query_channel_stride,
    key_block_stride,
    key_head_stride,
    key_served_stride,
    key_stride,
    key_channel_stride,
    padding_batch_stride,
    padding_key_stride,
    visible_batch_stride,
    visible_query_stride,
    visible_key_stride,
    table_stride,
    HEADS: tl.constexpr,
    GROUP_HEADS: tl.constexpr,
    GROUP_HEADS_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    SERVED: tl.constexpr,
    QUERY_CHANNELS: tl.constexpr,
    KEY_CHANNELS: tl.constexpr,
    AFTER_SOFTMAX: tl.constexpr,
    PAGE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    RING: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """
    Compose the heads of one group for one query, in place: program (part, group and query, batch row).

    Before the softmax: composes scores, hides keys, and keeps maximum and sum of exponentials of this part. After it:
    joins those of all parts and turns scores into composed weights.
    """
    row = tl.program_id(2).to(tl.int64)
    group = tl.program_id(1) // QUERIES
    index = tl.program_id(1) % QUERIES
    first, last, offset = _key_range(lengths, row, keys, query_offset, window, ring_size, QUERIES, CAUSAL, WINDOW, RING)
    start, stop = _part(first, last, tl.program_id(0), splits, BLOCK_KEYS)
    member = tl.arange(0, GROUP_HEADS_PADDED)
    is_head = member < GROUP_HEADS
    head = (group * GROUP_HEADS + member).to(tl.int64)
    line = (row * HEADS + head) * QUERIES + index
    scores += line[:, None] * span
    if table is not None:
        table += row * table_stride
    if QUERY_CHANNELS > 0:
        query_factors += row * query_batch_stride + head * query_head_stride + index * query_stride
    if KEY_CHANNELS > 0:
        key_factors += (head // SERVED) * key_head_stride + (head % SERVED) * key_served_stride
    if static is not None:
        static += group * GROUP_HEADS * GROUP_HEADS

    maximum = tl.full([GROUP_HEADS_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_HEADS_PADDED], tl.float32)
    if AFTER_SOFTMAX:
        for split in range(0, splits, BLOCK_SPLITS):
            part = split + tl.arange(0, BLOCK_SPLITS)
            is_part = is_head[:, None] & (part < splits)[None, :]
            part_at = line[:, None] * splits + part[None, :]
            part_maximum = tl.load(maxima + part_at, mask=is_part, other=float("-inf"))  # [HEADS, BLOCK_SPLITS]
            part_sum = tl.load(sums + part_at, mask=is_part, other=0.0)
            highest = tl.maximum(maximum, tl.max(part_maximum, 1))
            # A head that has seen no key yet has -inf here, and -inf - -inf is not a number.
            base = tl.where(highest == float("-inf"), 0.0, highest)
            total = total * tl.exp2(maximum - base) + tl.sum(part_sum * tl.exp2(part_maximum - base[:, None]), 1)
            maximum = highest
        maximum = tl.where(maximum == float("-inf"), 0.0, maximum)
        inverse = tl.where(total > 0.0, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0)

    for block_start in range(start, stop, BLOCK_KEYS):
        position = block_start + tl.arange(0, BLOCK_KEYS)
        inside = position < stop
        is_pair = is_head[:, None] & inside[None, :]
        block, place, slot = _place_of(position, inside, table, row, ring_size, RING, PAGE)
        score_at = scores + (position - first)[None, :]
        a = tl.load(score_at, mask=is_pair, other=float("-inf") if AFTER_SOFTMAX else 0.0)  # [HEADS, BLOCK_KEYS]
        if AFTER_SOFTMAX:
            a = tl.exp2(a - maximum[:, None]) * inverse[:, None]
        pair_factors = key_factors
        if KEY_CHANNELS > 0:
            pair_factors = key_factors[:, None] + (block * key_block_stride + place * key_stride)[None, :]
        a = _compose(
            a,
            query_factors,
            query_channel_stride,
            pair_factors,
            key_channel_stride,
            static,
            member,
            is_head,
            is_pair,
            GROUP_HEADS,
            QUERY_CHANNELS,
            KEY_CHANNELS,
        )
        if not AFTER_SOFTMAX:
            age = offset + index - position
            seen = inside
            if CAUSAL:
                seen = seen & (age >= 0)
            if WINDOW:
                seen = seen & (age < window) & (age > -window)
            if padding is not None:
                real = tl.load(
                    padding + row * padding_batch_stride + slot.to(tl.int64) * padding_key_stride,
                    mask=inside,
                    other=0,
                )
                seen = seen & (real != 0)
            if visible is not None:
                shown = tl.load(
                    visible
                    + row * visible_batch_stride
                    + index * visible_query_stride
                    + slot.to(tl.int64) * visible_key_stride,
                    mask=inside,
                    other=0,
                )
                if visible.dtype.element_ty == tl.float32:
                    a += shown[None, :]
                else:
                    seen = seen & (shown != 0)
            a = tl.where(seen[None, :], a, float("-inf"))
            highest = tl.maximum(maximum, tl.max(a, 1))
            base = tl.where(highest == float("-inf"), 0.0, highest)
            total = total * tl.exp2(maximum - base) + tl.sum(tl.exp2(a - base[:, None]), 1)
            maximum = highest
        tl.store(score_at, a, mask=is_pair)
    if not AFTER_SOFTMAX:
        part_at = line * splits + tl.program_id(0)
        tl.store(maxima + part_at, maximum, mask=is_head)
        tl.store(sums + part_at, total, mask=is_head)


@triton.jit(do_not_specialize=LENGTHS)
def values_kernel(
    weights,
    value,
    output,
    lengths,
    table,
    keys,
    query_offset,
    window,
    ring_size,
    span,
    splits,
    value_block_stride,
    value_head_stride,
    value_stride,
    table_stride,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    SERVED: tl.constexpr,
    CHANNELS: tl.constexpr,
    CHANNELS_PADDED: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    DOT: tl.constexpr,
    UNIT: tl.constexpr,
    PAGE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    RING: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """
    Weighted sums of values for the heads that one key/value head serves: program (part, key/value head, batch row).

    `output` is (batch, parts, heads x queries, channels); with one part that is the output itself.
    """
    row = tl.program_id(2).to(tl.int64)
    value_head = tl.program_id(1).to(tl.int64)
    first, last, _offset = _key_range(
        lengths, row, keys, query_offset, window, ring_size, QUERIES, CAUSAL, WINDOW, RING
    )
    start, stop = _part(first, last, tl.program_id(0), splits, BLOCK_KEYS)
    if table is not None:
        table += row * table_stride
    value += value_head * value_head_stride * UNIT
    weights += (row * HEADS + value_head * SERVED) * QUERIES * span
    output += ((row * splits + tl.program_id(0)) * HEADS + value_head * SERVED) * QUERIES * CHANNELS
    channel = tl.arange(0, CHANNELS_PADDED)
    is_channel = channel < CHANNELS
    line = tl.arange(0, ROWS_PADDED)
    is_row = line < SERVED * QUERIES
    if DOT:
        together = tl.zeros([ROWS_PADDED, CHANNELS_PADDED], tl.float32)
    else:
        apart = ()
        for _index in tl.static_range(SERVED * QUERIES):
            apart = apart + (tl.zeros([CHANNELS_PADDED], tl.float32),)
    for block_start in range(start, stop, BLOCK_KEYS):
        position = block_start + tl.arange(0, BLOCK_KEYS)
        inside = position < stop
        block, offset, _slot = _place_of(position, inside, table, row, ring_size, RING, PAGE)
        place = block * value_block_stride * UNIT + offset * value_stride * UNIT
        v = tl.load(
            value + place[:, None] + channel[None, :], mask=inside[:, None] & is_channel[None, :], other=0.0
        )  # [BLOCK_KEYS, CHANNELS]
        column = position - first
        if DOT:
            w = tl.load(
                weights + line.to(tl.int64)[:, None] * span + column[None, :],
                mask=is_row[:, None] & inside[None, :],
                other=0.0,
            )  # [ROWS, BLOCK_KEYS]
            together = tl.dot(w.to(v.dtype), v, together, input_precision="ieee")
        else:
            v = v.to(tl.float32)
            added = ()
            for index in tl.static_range(SERVED * QUERIES):
                w = tl.load(weights + index * tl.cast(span, tl.int64) + column, mask=inside, other=0.0)
                added = added + (apart[index] + tl.sum(v * w[:, None], 0),)
            apart = added
    if DOT:
        tl.store(
            output + line[:, None] * CHANNELS + channel[None, :],
            together.to(output.dtype.element_ty),
            mask=is_row[:, None] & is_channel[None, :],
        )
    else:
        for index in tl.static_range(SERVED * QUERIES):
            tl.store(output + index * CHANNELS + channel, apart[index].to(output.dtype.element_ty), mask=is_channel)


@triton.jit(do_not_specialize=["splits"])
def join_kernel(
    parts,
    output,
    splits,
    LINES: tl.constexpr,
    CHANNELS: tl.constexpr,
    CHANNELS_PADDED: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Sum of the parts of one head and query, in their order: program (head and query, batch row)."""
    row = tl.program_id(1).to(tl.int64)
    line = tl.program_id(0)
    channel = tl.arange(0, CHANNELS_PADDED)
    is_channel = channel < CHANNELS
    total = tl.zeros([CHANNELS_PADDED], tl.float32)
    for split in range(0, splits, BLOCK_SPLITS):
        part = split + tl.arange(0, BLOCK_SPLITS)
        part_at = ((row * splits + part)[:, None] * LINES + line) * CHANNELS + channel[None, :]
        x = tl.load(parts + part_at, mask=(part < splits)[:, None] & is_channel[None, :], other=0.0)
        total += tl.sum(x, 0)  # [BLOCK_SPLITS, CHANNELS] -> [CHANNELS]
    tl.store(output + (row * LINES + line) * CHANNELS + channel, total.to(output.dtype.element_ty), mask=is_channel)
