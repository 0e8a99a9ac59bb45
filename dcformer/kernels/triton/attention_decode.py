"""
Decoding with composed attention heads: 1 to 8 queries a row against a cache, as two Triton kernels.

1. scores of all heads of a group for a part of the keys, their composition before the softmax, the mask, and the
   logarithm of the part's sum;
2. weights: joins the sums, so that weights are normalised before heads are mixed, composes them, and sums up the values
   of a part. The program that is done last adds up what all have written, part by part.

Composed scores (batch, heads, queries, keys in sight) in float32 are kept between 1 and 2: a small fraction of what the
keys and values take. Nothing waits for the device: the grids are sized by the keys that a row can hold, and programs
share out those that it does hold. Results are the same bit by bit from run to run.

Keys are counted by position. `_locate` turns a position into where it lies in memory: in a ring by the remainder, in a
paged cache through the table of blocks. A row of the batch has keys `first` to `last` that any of its queries may see;
only these are read, and the scores of key `position` are in column `position - first`.

A tile is [1, HEADS, BLOCK_N]: with the first dimension Triton changes how threads hold the scores, not the factors.
Factors are two tuples, of [1, HEADS, 1] for the query's side and [1, HEADS, BLOCK_N] for the keys'.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import LOG2_E, Call, cdiv, new_output, next_power_of_2
from .blocks import load_factors, offsets_of
from .layout import Mask, Stage, States, constant, odd


# Programs of a kernel, if there are keys for them: about one per multiprocessor of a device, and at most.
_PROGRAMS = 132
_MOST_PROGRAMS = 1024
# Parts at most: of the scores, whose sums all programs of the values read, and of the values, which one program joins.
_MOST_PARTS = 256, 66
# Scores of a tile, of all heads of a group and some keys, one a thread, and channels that are read for each at once.
_SCORES_OF_A_TILE = 256
_BLOCK_D = tl.constexpr(32)


class Step(NamedTuple):
    """Where keys lie, how many there can be, and what the first kernel leaves to the second."""

    lengths: Tensor | None  # (batch,)
    table: Tensor | None  # (batch, blocks of a row)
    table_stride: int
    ring_size: int | None
    slots: int  # of a row; this one and the next three are `odd`
    query_offset: int
    span: int  # the most keys that a row's queries see
    parts: int  # of the scores
    scores: Tensor  # (batch, heads, queries, span)
    log_sums: Tensor  # (batch, groups x queries, parts, heads of a group)
    tickets: Tensor  # (batch, groups x queries, blocks of value channels)
    PAGE: tl.constexpr  # keys of a block; 0 if the cache is not paged
    HEADS: tl.constexpr  # of a group
    HEADS_PADDED: tl.constexpr
    PARTS_PADDED: tl.constexpr
    BLOCKS: tl.constexpr  # of value channels


def composed_decode(
    call: Call, key_lengths: Tensor | None = None, block_table: Tensor | None = None, ring_size: int | None = None
) -> Tensor:
    """
    Attention of 1 to 8 queries over a cache, without gradients: (batch, heads, queries, value channels).

    Keys, values and factors may be views of cache rows [key | factors] and [value | factors]; nothing is copied.
    Columns of the call's padding and dense mask are slots of a row: positions, in a ring their remainders. Of each row
    the first `key_lengths` (batch,) keys are valid, by default all; the last query is at the last of them.

    With `block_table` (batch, blocks of a row) in int32, keys, values and their factors are (blocks, key/value heads,
    block size, channels); entries past a row's length, or before its window, are not read. With `ring_size` the key at
    position p lies in slot p mod `ring_size`, and queries see a window of at most `ring_size` - queries + 1 keys.
    """
    query, key, value = call.query, call.key, call.value
    slots = _check(call, key_lengths, block_table, ring_size)
    batch, heads, queries, _ = query.shape
    mask = Mask.of(call)._replace(keys=0, query_offset=0)  # which the step has
    pre, post = Stage.both(call, is_cached=True)
    group = heads // call.groups
    has_static = call.pre_static is not None or call.post_static is not None
    padded = max(next_power_of_2(group), 16 if has_static else 1)
    span = _span(call, slots, key_lengths is not None)
    # Programs that share a part: of each group and query and, in the second kernel, block of channels.
    shares = call.groups * queries
    blocks = cdiv(value.shape[3], _BLOCK_D.value)
    keys, parts, warps = _split(span, batch * shares, padded, _MOST_PARTS[0])
    scores = query.new_empty(batch, heads, queries, span, dtype=torch.float32)
    log_sums = query.new_empty(batch, shares, parts, padded, dtype=torch.float32)
    # The first kernel sets them to 0: zeros from PyTorch would be one more launch. No other call or stream has them.
    tickets = query.new_empty(batch, shares, blocks, dtype=torch.int32)
    page, table_stride = (0, 0) if block_table is None else (key.shape[2], block_table.stride(0))
    sizes = map(constant, (page, group, padded, next_power_of_2(parts), blocks))
    numbers = map(odd, (slots, call.query_offset, span, parts))
    step = Step(key_lengths, block_table, table_stride, ring_size, *numbers, scores, log_sums, tickets, *sizes)
    _scores_kernel[(parts, shares, batch)](
        mask, step, pre, States.of(query), States.of(key, heads), call.scaling * LOG2_E, keys, num_warps=warps
    )
    output = new_output(query, key, value)
    keys, parts, warps = _split(span, tickets.numel(), padded, _MOST_PARTS[1])
    of_parts = query.new_empty(batch, shares, blocks, parts, padded, _BLOCK_D.value, dtype=torch.float32)
    at_once = min(next_power_of_2(parts), max(2, 64 * warps // padded))  # parts: 64 numbers a thread
    _values_kernel[(parts, shares * blocks, batch)](
        mask, step, post, States.of(value, heads), of_parts, States.of(output), keys, at_once, num_warps=warps
    )
    return output


def _split(span: int, programs: int, heads: int, most: int) -> tuple[int, int, int]:
    """Keys of a tile, parts of a row, at most so many, and warps of a kernel of which `programs` share a part."""
    # Few keys in sight, as in a window, are spread over many programs, but each has four tiles where these are enough.
    spread = next_power_of_2(cdiv(span * programs, _PROGRAMS) + 1) // 2
    keys = min(64, max(4, min(_SCORES_OF_A_TILE // heads, spread)))
    tiles = cdiv(span, keys)
    least = cdiv(tiles, max(1, min(most, _MOST_PROGRAMS // programs)))
    parts = cdiv(tiles, max(1, least, min(4, round(tiles * programs / _PROGRAMS))))
    return keys, parts, min(16, max(1, keys * heads // 32))


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


def _check(call: Call, key_lengths: Tensor | None, block_table: Tensor | None, ring_size: int | None) -> int:
    """Raise ValueError if what a call says about the cache does not fit; else return how many slots a row has."""
    batch, slots = call.query.shape[0], call.key.shape[2]
    if call.sequence_ids is not None:
        raise ValueError("Decoding takes no packed sequences; give a mask without sequence_ids.")
    for name, states in (("key", call.key), ("value", call.value)):
        if states.shape[3] > 1 and states.stride(3) != 1:
            raise ValueError(f"The channels of {name} must lie side by side, got strides {states.stride()}.")
    if block_table is not None:
        if block_table.dim() != 2 or block_table.shape[0] != batch or block_table.stride(1) != 1:
            got = f"got shape {tuple(block_table.shape)}, strides {block_table.stride()}"
            raise ValueError(f"block_table must be (batch = {batch}, blocks of a row), contiguous in each row, {got}.")
        slots *= block_table.shape[1]
    if key_lengths is not None and key_lengths.shape != (batch,):
        raise ValueError(f"key_lengths must be (batch,) = ({batch},), got {tuple(key_lengths.shape)}.")
    if ring_size is not None:
        if key_lengths is None:
            raise ValueError("A ring needs key_lengths, which say where its newest key is.")
        if not 1 <= ring_size <= slots:
            raise ValueError(f"ring_size must be from 1 to the {slots} slots of a row, got {ring_size}.")
    return ring_size or slots


@triton.jit
def _factors_of_keys(side, block, h, row, is_pair):
    return load_factors(
        side, block[None, None, :], h[None, :, None], row[None, None, :], is_pair[None, :, :], tl.float32
    )


@triton.jit
def compose(a, query, key, static, stage):
    """Equation 7 for a tile [1, HEADS, BLOCK_N]: every term reads the tile as it came."""
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
        x += tl.dot(tl.permute(static[0], [0, 2, 1]), a, input_precision="ieee")
    return x


@triton.jit
def _heads_of_program(step, queries, stage, BLOCKS: tl.constexpr):
    """Row of the batch, heads, which of them exist, their lines in (batch, heads, queries), and what composes them."""
    b = tl.program_id(2).to(tl.int64)
    share = tl.program_id(1) // BLOCKS
    member = tl.arange(0, step.HEADS_PADDED)
    is_head = member < step.HEADS
    h = (share // queries * step.HEADS + member).to(tl.int64)
    line = (b * (tl.num_programs(1) // (BLOCKS * queries) * step.HEADS) + h) * queries + share % queries
    factors = load_factors(stage.query, b, h[None, :, None], share % queries, is_head[None, :, None], tl.float32)
    static = ()  # or [1, HEADS, HEADS], heads in by heads out
    if stage.HAS_STATIC:
        inside = is_head[:, None] & is_head[None, :]
        static = tl.load(stage.static + (h[:, None] * step.HEADS + member[None, :]), mask=inside, other=0)
        static = (static.to(tl.float32)[None, :, :],)
    return b, h, is_head, line, factors, static


@triton.jit
def _keys_of_program(mask, step, b, BLOCK_N: tl.constexpr):
    """First key that the row's queries see, first and last + 1 of the part (whole tiles), position of query 0."""
    if step.lengths is None:
        length = step.slots >> 1
        offset = step.query_offset >> 1
    else:
        length = tl.load(step.lengths + b).to(tl.int32)
        offset = length - mask.queries
    if step.ring_size is None:
        length = tl.minimum(length, step.slots >> 1)
    first = tl.maximum(length - (step.slots >> 1), 0)
    last = length
    if mask.CAUSAL:
        last = tl.minimum(last, offset + mask.queries)
    if mask.window is not None:
        first = tl.maximum(first, offset - mask.window + 1)
        if not mask.CAUSAL:
            last = tl.minimum(last, offset + mask.queries - 1 + mask.window)
    size = tl.cdiv(tl.cdiv(tl.maximum(last - first, 0), BLOCK_N), tl.num_programs(0)) * BLOCK_N
    start = first + tl.program_id(0) * size
    return first, start, tl.minimum(start + size, last), offset


@triton.jit
def _locate(position, inside, step, b):
    """Block (or row of the batch) of keys and their rows in it, 64 bits each, and their slots; [BLOCK_N]."""
    slot = position
    if step.ring_size is not None:
        slot = position % step.ring_size
    if step.PAGE == 0:
        return tl.zeros_like(slot).to(tl.int64) + b, slot.to(tl.int64), slot
    else:
        table = step.table + b * step.table_stride
        block = tl.load(table + slot // step.PAGE, mask=inside, other=0).to(tl.int64)
        return block, (slot % step.PAGE).to(tl.int64), slot


@triton.jit
def _scores_kernel(mask, step, pre, query, key, scale, BLOCK_N: tl.constexpr):
    """Composed scores of all heads of a group for one query: program (part; group and query; row of the batch)."""
    b, h, is_head, line, factors, static = _heads_of_program(step, mask.queries, pre, 1)
    index = tl.program_id(1) % mask.queries
    first, start, stop, offset = _keys_of_program(mask, step, b, BLOCK_N)
    share = b * tl.num_programs(1) + tl.program_id(1)
    for i in tl.static_range(step.BLOCKS):
        tl.store(step.tickets + share * step.BLOCKS + i, 0)
    # Below all scores that are seen, but finite: -inf - -inf is not a number.
    maximum = tl.full([step.HEADS_PADDED], -3e38, tl.float32)
    total = tl.zeros([step.HEADS_PADDED], tl.float32)
    for tile in range(start, stop, BLOCK_N):
        position = tile + tl.arange(0, BLOCK_N)
        inside = position < stop
        is_pair = is_head[:, None] & inside[None, :]
        block, row, slot = _locate(position, inside, step, b)
        rows = key.pointer + offsets_of(key, block[None, :], h[:, None], row[None, :])
        queries = query.pointer + offsets_of(query, b, h, index)
        of_keys = _factors_of_keys(pre.key, block, h, row, is_pair)
        products = tl.zeros([step.HEADS_PADDED, BLOCK_N, _BLOCK_D], tl.float32)
        for c in tl.static_range(0, query.CHANNELS, _BLOCK_D):
            d = c + tl.arange(0, _BLOCK_D)
            is_channel = d < query.CHANNELS
            q = tl.load(queries[:, None] + d[None, :], mask=is_head[:, None] & is_channel[None, :], other=0.0)
            is_pair_channel = is_pair[:, :, None] & is_channel[None, None, :]
            k = tl.load(rows[:, :, None] + d[None, None, :], mask=is_pair_channel, other=0.0)
            products += q.to(tl.float32)[:, None, :] * k.to(tl.float32)
        a = (tl.sum(products, 2) * scale)[None, :, :]
        x = tl.reshape(compose(a, factors, of_keys, static, pre), [step.HEADS_PADDED, BLOCK_N])
        age = offset + index - position
        seen = inside
        if mask.CAUSAL:
            seen = seen & (age >= 0)
        if mask.window is not None:
            seen = seen & (age < mask.window) & (age > -mask.window)
        if mask.padding is not None:
            seen = seen & (tl.load(mask.padding + b * (mask.padding_stride >> 1) + slot, mask=inside, other=0) != 0)
        if mask.dense is not None:
            dense = mask.dense + b * (mask.dense_batch_stride >> 1) + index * (mask.dense_stride >> 1)
            dense = tl.load(dense + slot, mask=inside, other=0)
            if mask.dense.dtype.element_ty == tl.float32:
                x += dense[None, :]
            else:
                seen = seen & (dense != 0)
        x = tl.where(seen[None, :], x, float("-inf"))
        highest = tl.maximum(maximum, tl.max(x, 1))
        total = total * tl.exp2(maximum - highest) + tl.sum(tl.exp2(x - highest[:, None]), 1)
        maximum = highest
        tl.store(step.scores + line[:, None] * (step.span >> 1) + (position - first)[None, :], x, mask=is_pair)
    offsets = (share * (step.parts >> 1) + tl.program_id(0)) * step.HEADS_PADDED + tl.arange(0, step.HEADS_PADDED)
    tl.store(step.log_sums + offsets, maximum + tl.log2(tl.maximum(total, 1.0)))  # 0 only where no key is seen


@triton.jit
def _load_tile(tile, stop, scores, value, post, step, b, h, is_head, d, is_channel, BLOCK_N: tl.constexpr):
    """Composed scores [HEADS, BLOCK_N], factors and values [.., CHANNELS] of a tile's keys before `stop`."""
    position = tile + tl.arange(0, BLOCK_N)
    inside = position < stop
    is_pair = is_head[:, None] & inside[None, :]
    block, row, _slot = _locate(position, inside, step, b)
    rows = value.pointer + offsets_of(value, block[None, :], h[:, None], row[None, :])
    is_value = is_pair[:, :, None] & is_channel[None, None, :]
    v = tl.load(rows[:, :, None] + d[None, None, :], mask=is_value, other=0.0)
    x = tl.load(scores + position[None, :], mask=is_pair, other=float("-inf"))
    return x, _factors_of_keys(post.key, block, h, row, is_pair), v


@triton.jit
def _values_kernel(mask, step, post, value, of_parts, output, BLOCK_N: tl.constexpr, AT_ONCE: tl.constexpr):
    """Sums of values by composed weights: program (part; group, query and block of channels; row of the batch)."""
    b, h, is_head, line, factors, static = _heads_of_program(step, mask.queries, post, step.BLOCKS)
    first, start, stop, _offset = _keys_of_program(mask, step, b, BLOCK_N)
    d = tl.program_id(1) % step.BLOCKS * _BLOCK_D + tl.arange(0, _BLOCK_D)
    is_channel = d < value.CHANNELS
    # Tiles are loaded early: the first one comes while the sums are joined.
    scores = step.scores + line[:, None] * (step.span >> 1) - first
    x, of_keys, v = _load_tile(start, stop, scores, value, post, step, b, h, is_head, d, is_channel, BLOCK_N)
    share = b * tl.num_programs(1) + tl.program_id(1)
    part = tl.arange(0, step.PARTS_PADDED)[:, None]
    row = share // step.BLOCKS * (step.parts >> 1) + part
    offsets = row * step.HEADS_PADDED + tl.arange(0, step.HEADS_PADDED)[None, :]
    sums = tl.load(step.log_sums + offsets, mask=part < step.parts >> 1, other=float("-inf"))  # [PARTS, HEADS]
    log_sum = tl.max(sums, 0)
    log_sum += tl.log2(tl.sum(tl.exp2(sums - log_sum[None, :]), 0))
    products = tl.zeros([step.HEADS_PADDED, BLOCK_N, _BLOCK_D], tl.float32)
    for tile in range(start, stop, BLOCK_N):
        e = tl.exp2(x - log_sum[:, None])[None, :, :]
        y = tl.reshape(compose(e, factors, of_keys, static, post), [step.HEADS_PADDED, BLOCK_N])
        products += y[:, :, None] * v.to(tl.float32)
        x, of_keys, v = _load_tile(
            tile + BLOCK_N, stop, scores, value, post, step, b, h, is_head, d, is_channel, BLOCK_N
        )
    result = tl.sum(products, 1)
    index = tl.program_id(1) // step.BLOCKS % mask.queries
    outputs = output.pointer + (offsets_of(output, b, h, index)[:, None] + d[None, :])
    is_output = is_head[:, None] & is_channel[None, :]
    if AT_ONCE == 1:
        tl.store(outputs, result.to(output.pointer.dtype.element_ty), mask=is_output)
    else:
        SIZE: tl.constexpr = step.HEADS_PADDED * _BLOCK_D
        of_parts += share * tl.num_programs(0) * SIZE + tl.arange(0, SIZE)[None, :]
        tl.store(of_parts + tl.program_id(0) * SIZE, tl.reshape(result, [1, SIZE]))
        # A thread takes the ticket when all of them have written (barrier, release), and who takes the last one sees
        # what all programs wrote (acquire), past a first-level cache that may hold something older (cg).
        tl.debug_barrier()
        if tl.atomic_add(step.tickets + share, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
            joined = tl.zeros([SIZE], tl.float32)
            for begin in range(0, tl.num_programs(0), AT_ONCE):
                number = begin + tl.arange(0, AT_ONCE)[:, None]
                some = tl.load(of_parts + number * SIZE, number < tl.num_programs(0), 0.0, cache_modifier=".cg")
                joined += tl.sum(some, 0)
            result = tl.reshape(joined, [step.HEADS_PADDED, _BLOCK_D])
            tl.store(outputs, result.to(output.pointer.dtype.element_ty), mask=is_output)
