"""
Decoding with composed attention heads: 1 to 8 queries a row against a cache, as two or three Triton kernels.

1. scores of all heads of a group for a part of the keys, their composition before the softmax, the mask, and maximum
   and sum of the part;
2. weights: joins the parts, so that weights are normalised before heads are mixed, composes them, and sums up values;
3. a sum over the parts of 2, where there are several.

Composed scores (batch, heads, queries, keys in sight) in float32 are kept between 1 and 2: a small fraction of what the
keys and values take. Nothing waits for the device: the grids are sized by the keys that a row can hold, and programs
share out those that it does hold. Results are the same bit by bit from run to run.

Keys are counted by position. `_place_of` turns a position into the place of its row in memory: in a ring by the
remainder, in a paged cache through the table of blocks. A row of the batch has keys `first` to `last` that any of its
queries may see; only these are read, and the scores of key `position` stand in column `position - first`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .call import LOG2_E, Call
from .plan import Mask, Stage, States
from .tiles import compose, key_factors, maps_over_heads, places_of, query_factors, static_map


# Programs that a kernel should have before its keys are no longer split further, some per multiprocessor of a device,
# and parts into which the keys of a row are split at most.
_PROGRAMS = 528
_MOST_PARTS = 128
# Scores of a program, of all heads of a group and some keys, and channels that it reads of each at once.
_SCORES_OF_A_TILE = 512
_CHANNELS_AT_ONCE = 32
_OPTIONS = {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": True}


class Cache(NamedTuple):
    """Where keys lie, and how many there can be."""

    lengths: Tensor | None  # (batch,)
    table: Tensor | None  # (batch, blocks of a row)
    table_stride: int
    ring_size: int | None
    span: int  # the most keys that a row's queries see
    parts: int
    PAGE: tl.constexpr  # keys of a block; 0 if the cache is not paged
    QUERIES: tl.constexpr
    SERVED: tl.constexpr  # heads that a key/value head serves
    GROUPS: tl.constexpr
    HEADS: tl.constexpr  # of a group
    HEADS_PADDED: tl.constexpr
    KEYS: tl.constexpr  # of a tile
    PARTS_PADDED: tl.constexpr


def composed_decode(
    call: Call, key_lengths: Tensor | None = None, block_table: Tensor | None = None, ring_size: int | None = None
) -> Tensor:
    """
    Attention of 1 to 8 queries over a cache, without gradients: (batch, heads, queries, value channels).

    Keys, values and factors may be views of cache rows [key | factors] and [value | factors]; nothing is copied.
    Columns of the call's padding and dense mask are places in a row: positions, in a ring their remainders. Of each row
    the first `key_lengths` (batch,) keys are there, without them all; the last query stands at the last of them.

    With `block_table` (batch, blocks of a row) in int32, keys, values and their factors are (blocks, key/value heads,
    block size, channels); entries past a row's length, or before its window, are not read. With `ring_size` the key at
    position p lies in place p mod `ring_size`, and queries see a window of at most `ring_size` - queries + 1 keys.
    """
    query, key, value = call.query, call.key, call.value
    _check(call, key_lengths, block_table, ring_size)
    batch, heads, queries, channels = query.shape
    slots = ring_size or key.shape[2] * (1 if block_table is None else block_table.shape[1])
    mask = Mask.of(call)._replace(keys=slots)
    pre, post = Stage.both(call, as_vectors=True)
    group = heads // call.groups
    has_static = call.pre_static is not None or call.post_static is not None
    padded = max(triton.next_power_of_2(group), 16 if has_static else 1)
    span = _span(call, slots, key_lengths is not None)
    programs = batch * call.groups * queries
    # Few keys in sight, as in a window, are spread over many programs.
    spread = triton.next_power_of_2(triton.cdiv(span * programs, _MOST_PARTS))
    keys = min(64, max(4, min(_SCORES_OF_A_TILE // padded, spread)))
    parts = max(1, min(triton.cdiv(_PROGRAMS, programs), _MOST_PARTS, triton.cdiv(span, keys)))
    page = 0 if block_table is None else key.shape[2]
    constants = (page, queries, heads // key.shape[1], call.groups, group, padded, keys, triton.next_power_of_2(parts))
    table_stride = 0 if block_table is None else block_table.stride(0)
    cache = Cache(key_lengths, block_table, table_stride, ring_size, span, parts, *map(tl.constexpr, constants))
    scores = query.new_empty(batch, heads, queries, span, dtype=torch.float32)
    maxima, sums = (query.new_empty(batch, heads, queries, parts, dtype=torch.float32) for _ in range(2))
    _scores_kernel[(parts, call.groups * queries, batch)](
        *(mask, cache, pre, States.of(query), States.of(key), scores, maxima, sums, call.scaling * LOG2_E),
        *(channels, min(_CHANNELS_AT_ONCE, triton.next_power_of_2(channels))),
        **_OPTIONS,
    )
    channels = value.shape[3]
    block = min(_CHANNELS_AT_ONCE, triton.next_power_of_2(channels))
    output = query.new_empty(batch, heads, queries, channels)
    of_parts = output if parts == 1 else query.new_empty(batch, parts, *output.shape[1:], dtype=torch.float32)
    _values_kernel[(parts, call.groups * queries * triton.cdiv(channels, block), batch)](
        mask, cache, post, scores, maxima, sums, States.of(value), of_parts, channels, block, **_OPTIONS
    )
    if parts > 1:
        _join_kernel[(triton.cdiv(output[0].numel(), 128), batch)](
            of_parts, output, parts, output[0].numel(), 128, min(32, triton.next_power_of_2(parts)), **_OPTIONS
        )
    return output


def _span(call: Call, slots: int, has_lengths: bool) -> int:
    """The most keys that a row's queries see, as far as is known without waiting for the device."""
    window, queries, offset = call.sliding_window, call.query.shape[2], call.query_offset
    if has_lengths:
        return slots if window is None else min(slots, window + queries - 1)
    first = 0 if window is None else max(0, offset - window + 1)
    last = min(slots, offset + queries) if call.is_causal else slots
    if window is not None:
        last = min(last, offset + queries - 1 + window)
    return max(1, last - first)


def _check(call: Call, key_lengths: Tensor | None, block_table: Tensor | None, ring_size: int | None) -> None:
    """Raise ValueError if what a call says about the cache does not fit."""
    batch, slots = call.query.shape[0], call.key.shape[2]
    if call.sequence_ids is not None:
        raise ValueError("Decoding takes no packed sequences; give a mask without sequence_ids.")
    for name, states in (("key", call.key), ("value", call.value)):
        if states.shape[3] > 1 and states.stride(3) != 1:
            raise ValueError(f"The channels of {name} must lie side by side, got strides {states.stride()}.")
    if block_table is not None:
        if block_table.dim() != 2 or block_table.shape[0] != batch or block_table.stride(1) != 1:
            raise ValueError(
                f"block_table must be (batch, blocks of a row) for a batch of {batch}, contiguous in each row, got "
                f"shape {tuple(block_table.shape)}, strides {block_table.stride()}."
            )
        slots *= block_table.shape[1]
    if key_lengths is not None and key_lengths.shape != (batch,):
        raise ValueError(f"key_lengths must be (batch,) = ({batch},), got {tuple(key_lengths.shape)}.")
    if ring_size is not None:
        if key_lengths is None:
            raise ValueError("A ring needs key_lengths, which say where its newest key is.")
        if not 1 <= ring_size <= slots:
            raise ValueError(f"ring_size must be from 1 to the {slots} places of a row, got {ring_size}.")


@triton.jit
def _key_range(mask, cache, b):
    """First and last + 1 of the keys that any query of this row may see, and the position of its first query."""
    if cache.lengths is None:
        length = mask.keys
        offset = mask.query_offset
    else:
        length = tl.load(cache.lengths + b).to(tl.int32)
        offset = length - cache.QUERIES
    first = 0
    if cache.ring_size is None:
        length = tl.minimum(length, mask.keys)
    else:
        first = tl.maximum(length - cache.ring_size, 0)
    last = length
    if mask.CAUSAL:
        last = tl.minimum(last, offset + cache.QUERIES)
    if mask.window is not None:
        first = tl.maximum(first, offset - mask.window + 1)
        if not mask.CAUSAL:
            last = tl.minimum(last, offset + cache.QUERIES - 1 + mask.window)
    return first, last, offset


@triton.jit
def _part(first, last, cache):
    """The keys of the program's part, whole tiles each but for the last."""
    tiles = tl.cdiv(tl.maximum(last - first, 0), cache.KEYS)
    size = tl.cdiv(tiles, cache.parts) * cache.KEYS
    start = first + tl.program_id(0) * size
    return start, tl.minimum(start + size, last)


@triton.jit
def _place_of(position, inside, cache, b):
    """Block (or row of the batch) of keys and their place in it, 64 bits each, and their slots; [KEYS]."""
    slot = position
    if cache.ring_size is not None:
        slot = position % cache.ring_size
    if cache.PAGE == 0:
        return tl.zeros_like(slot).to(tl.int64) + b, slot.to(tl.int64), slot
    else:
        table = cache.table + b * cache.table_stride
        block = tl.load(table + slot // cache.PAGE, mask=inside, other=0).to(tl.int64)
        return block, (slot % cache.PAGE).to(tl.int64), slot


@triton.jit
def _scores_kernel(
    mask, cache, pre, query, key, scores, maxima, sums, scale, CHANNELS: tl.constexpr, STEP: tl.constexpr
):
    """Composed scores of all heads of a group for one query: program (part, group and query, row of the batch)."""
    b = tl.program_id(2).to(tl.int64)
    group = tl.program_id(1) // cache.QUERIES
    index = tl.program_id(1) % cache.QUERIES
    member = tl.arange(0, cache.HEADS_PADDED)
    is_head = member < cache.HEADS
    h = (group * cache.HEADS + member).to(tl.int64)
    line = (b * (cache.GROUPS * cache.HEADS) + h) * cache.QUERIES + index  # [HEADS]
    first, last, offset = _key_range(mask, cache, b)
    start, stop = _part(first, last, cache)
    t = index + tl.arange(0, 1)
    factors = query_factors(pre.query, b, h, is_head, t, t >= 0)
    static = static_map(pre, group, cache.HEADS, cache.HEADS_PADDED)
    maximum = tl.full([cache.HEADS_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([cache.HEADS_PADDED], tl.float32)
    for tile in range(start, stop, cache.KEYS):
        position = tile + tl.arange(0, cache.KEYS)
        inside = position < stop
        is_pair = is_head[:, None] & inside[None, :]
        block, place, slot = _place_of(position, inside, cache, b)
        rows = key.pointer + places_of(key, block[None, :], (h // cache.SERVED)[:, None], place[None, :])
        own = query.pointer + places_of(query, b, h, index)
        a = tl.zeros([cache.HEADS_PADDED, cache.KEYS], tl.float32)
        for c in tl.static_range(0, CHANNELS, STEP):
            d = c + tl.arange(0, STEP)
            is_channel = d < CHANNELS
            q = tl.load(own[:, None] + d[None, :], mask=is_head[:, None] & is_channel[None, :], other=0.0)
            k = tl.load(
                rows[:, :, None] + d[None, None, :], mask=is_pair[:, :, None] & is_channel[None, None, :], other=0.0
            )  # [HEADS, KEYS, STEP]
            a += tl.sum(q.to(tl.float32)[:, None, :] * k.to(tl.float32), 2)
        a = (a * scale)[None, :, :]
        of_keys = key_factors(pre.key, block[None, None, :], h, is_head, place, inside)
        maps = maps_over_heads(a, factors, of_keys, pre, False)
        x = tl.reshape(compose(a, maps, factors, of_keys, static, pre, False), [cache.HEADS_PADDED, cache.KEYS])
        age = offset + index - position
        seen = inside
        if mask.CAUSAL:
            seen = seen & (age >= 0)
        if mask.window is not None:
            seen = seen & (age < mask.window) & (age > -mask.window)
        if mask.padding is not None:
            seen = seen & (tl.load(mask.padding + b * mask.padding_stride + slot, mask=inside, other=0) != 0)
        if mask.dense is not None:
            dense = mask.dense + b * mask.dense_batch_stride + index * mask.dense_stride
            dense = tl.load(dense + slot, mask=inside, other=0)
            if mask.dense.dtype.element_ty == tl.float32:
                x += dense[None, :]
            else:
                seen = seen & (dense != 0)
        x = tl.where(seen[None, :], x, float("-inf"))
        highest = tl.maximum(maximum, tl.max(x, 1))
        # A head that has seen no key yet has -inf here, and -inf - -inf is not a number.
        base = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp2(maximum - base) + tl.sum(tl.exp2(x - base[:, None]), 1)
        maximum = highest
        tl.store(scores + line[:, None] * cache.span + (position - first)[None, :], x, mask=is_pair)
    tl.store(maxima + line * cache.parts + tl.program_id(0), maximum, mask=is_head)
    tl.store(sums + line * cache.parts + tl.program_id(0), total, mask=is_head)


@triton.jit
def _values_kernel(mask, cache, post, scores, maxima, sums, value, output, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """
    Sums of values by composed weights, for all heads of a group, one query and a block of channels: program (part,
    group, query and block, row of the batch). `output` is (batch, parts, heads, queries, channels).
    """
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    b = tl.program_id(2).to(tl.int64)
    group = tl.program_id(1) // (cache.QUERIES * BLOCKS)
    index = tl.program_id(1) // BLOCKS % cache.QUERIES
    d = tl.program_id(1) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    is_channel = d < CHANNELS
    member = tl.arange(0, cache.HEADS_PADDED)
    is_head = member < cache.HEADS
    h = (group * cache.HEADS + member).to(tl.int64)
    line = (b * (cache.GROUPS * cache.HEADS) + h) * cache.QUERIES + index  # [HEADS]
    first, last, _offset = _key_range(mask, cache, b)
    start, stop = _part(first, last, cache)
    t = index + tl.arange(0, 1)
    factors = query_factors(post.query, b, h, is_head, t, t >= 0)
    static = static_map(post, group, cache.HEADS, cache.HEADS_PADDED)
    part = tl.arange(0, cache.PARTS_PADDED)
    of_parts = line[:, None] * cache.parts + part[None, :]
    is_part = is_head[:, None] & (part < cache.parts)[None, :]
    highest = tl.load(maxima + of_parts, mask=is_part, other=float("-inf"))  # [HEADS, PARTS]
    maximum = tl.max(highest, 1)
    # A head that sees no key has -inf here, and -inf - -inf is not a number.
    maximum = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.sum(tl.load(sums + of_parts, mask=is_part, other=0.0) * tl.exp2(highest - maximum[:, None]), 1)
    inverse = tl.where(total > 0.0, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0)
    result = tl.zeros([cache.HEADS_PADDED, BLOCK], tl.float32)
    for tile in range(start, stop, cache.KEYS):
        position = tile + tl.arange(0, cache.KEYS)
        inside = position < stop
        is_pair = is_head[:, None] & inside[None, :]
        block, place, _slot = _place_of(position, inside, cache, b)
        x = tl.load(
            scores + line[:, None] * cache.span + (position - first)[None, :], mask=is_pair, other=float("-inf")
        )
        e = (tl.exp2(x - maximum[:, None]) * inverse[:, None])[None, :, :]
        of_keys = key_factors(post.key, block[None, None, :], h, is_head, place, inside)
        maps = maps_over_heads(e, factors, of_keys, post, False)
        y = tl.reshape(compose(e, maps, factors, of_keys, static, post, False), [cache.HEADS_PADDED, cache.KEYS])
        rows = value.pointer + places_of(value, block[None, :], (h // cache.SERVED)[:, None], place[None, :])
        v = tl.load(
            rows[:, :, None] + d[None, None, :], mask=is_pair[:, :, None] & is_channel[None, None, :], other=0.0
        )  # [HEADS, KEYS, BLOCK]
        result += tl.sum(y[:, :, None] * v.to(tl.float32), 1)
    at = ((b * cache.parts + tl.program_id(0)) * (cache.GROUPS * cache.HEADS) + h) * cache.QUERIES + index
    places = at[:, None] * CHANNELS + d[None, :]
    tl.store(output + places, result.to(output.dtype.element_ty), mask=is_head[:, None] & is_channel[None, :])


@triton.jit
def _join_kernel(of_parts, output, parts, SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PARTS: tl.constexpr):
    """Sum of the parts, in their order: program (block of heads, queries and channels, row of the batch)."""
    row = tl.program_id(1).to(tl.int64)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = element < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, parts, BLOCK_PARTS):
        part = start + tl.arange(0, BLOCK_PARTS)
        places = (row * parts + part)[:, None] * SIZE + element[None, :]
        total += tl.sum(tl.load(of_parts + places, mask=(part < parts)[:, None] & inside[None, :], other=0.0), 0)
    tl.store(output + row * SIZE + element, total.to(output.dtype.element_ty), mask=inside)
