"""
Decoding with composed attention heads: 1 to 8 queries a row against a cache, as two Triton kernels.

1. `decode_scores_kernel`: scores of all heads of a group for a part of the keys, their composition before the softmax,
   the mask, and the logarithm of the part's sum;
2. `decode_values_kernel`: joins the sums, so that weights are normalised before heads are mixed, composes them, and
   sums up the values of a part. The program that is done last adds up what all have written, part by part.

Composed scores (batch, heads, queries, keys in sight) in float32 are kept between 1 and 2: a small fraction of what the
keys and values take. Nothing waits for the device: the grids are sized by the keys that a row can hold, and programs
share out those that it does hold. Results are the same bit by bit from run to run.

Keys are counted by position, their slot in a row; `_locate` finds it in memory, in a paged cache through the table of
blocks. A row of the batch has keys `first` to `last` that any of its queries may see; only these are read, and the
scores of key `position` are in column `position - first`.

A tile is [1, HEADS, BLOCK_N]: with the first dimension Triton changes how threads hold the scores, not the factors.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import LOG2_E, Call, cdiv, new_output, next_power_of_2
from .blocks import band, load_factors, state_offsets
from .tuning import constant
from .workspace import Mask, Stage, States, unspecialized


# Programs of a kernel, if there are keys for them: about one per multiprocessor of a device, and at most.
_PROGRAMS = 132
_MOST_PROGRAMS = 1024
# Parts at most: of the scores, whose sums all programs of the values read, and of the values, which one program joins.
_MOST_PARTS = 256, 66
# Scores of a tile, of all heads of a group and some keys, one a thread, and channels that are read for each at once.
_SCORES_OF_A_TILE = 256
_BLOCK_D = tl.constexpr(32)


class Step(NamedTuple):
    """The cache of a decoding step: how keys lie in it, and what the first kernel leaves to the second."""

    lengths: Tensor | None  # (batch,)
    table: Tensor | None  # (batch, blocks of a row)
    table_stride: int
    slots: int  # of a row; this one and the next three are `unspecialized`
    query_offset: int
    span: int  # the most keys that a row's queries see
    parts: int  # of the scores
    scores: Tensor  # (batch, heads, queries, span)
    log_sums: Tensor  # (batch, groups x queries, parts, heads of a group, padded)
    tickets: Tensor  # (batch, groups x queries, blocks of value channels)
    PAGE: tl.constexpr  # keys of a block; 0 if the cache is not paged
    HEADS: tl.constexpr  # of a group
    HEADS_PADDED: tl.constexpr
    PARTS_PADDED: tl.constexpr
    BLOCKS: tl.constexpr  # of value channels


def composed_decode(call: Call, key_lengths: Tensor | None = None, block_table: Tensor | None = None) -> Tensor:
    """
    Attention of 1 to 8 queries over a cache, without gradients: (batch, heads, queries, value channels).

    Keys, values and factors may be views of cache rows [key | factors] and [value | factors]; nothing is copied.
    Columns of the call's padding and dense mask are slots of a row. Of each row the first `key_lengths` (batch,) keys
    are valid, by default all; the last query is at the last of them.

    With `block_table` (batch, blocks of a row) in int32, keys, values and their factors are (blocks, key/value heads,
    block size, channels); entries past a row's length, or before its window, are not read.
    """
    query, key, value = call.query, call.key, call.value
    slots = _check(call, key_lengths, block_table)
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
    numbers = map(unspecialized, (slots, call.query_offset, span, parts))
    step = Step(key_lengths, block_table, table_stride, *numbers, scores, log_sums, tickets, *sizes)
    q, k = States.of(query), States.of(key, heads)
    # Grid: a part of the keys, a query of a group of heads, a row of the batch.
    grid, options = (parts, shares, batch), {"BLOCK_N": keys, "num_warps": warps}
    decode_scores_kernel[grid](mask=mask, step=step, pre=pre, q=q, k=k, scale=call.scaling * LOG2_E, **options)
    output = new_output(query, key, value)
    keys, parts, warps = _split(span, tickets.numel(), padded, _MOST_PARTS[1])
    part_outputs = query.new_empty(batch, shares, blocks, parts, padded, _BLOCK_D.value, dtype=torch.float32)
    at_once = min(next_power_of_2(parts), max(2, 64 * warps // padded))  # parts: 64 numbers a thread
    v, o = States.of(value, heads), States.of(output)
    # Grid: a part of the keys, a block of channels of a query of a group of heads, a row of the batch.
    grid, options = (parts, shares * blocks, batch), {"BLOCK_N": keys, "AT_ONCE": at_once, "num_warps": warps}
    decode_values_kernel[grid](mask=mask, step=step, post=post, v=v, part_outputs=part_outputs, o=o, **options)
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


def _check(call: Call, key_lengths: Tensor | None, block_table: Tensor | None) -> int:
    """Raise ValueError if what a call says about the cache does not fit; else return how many slots a row has."""
    batch, slots = call.query.shape[0], call.key.shape[2]
    if call.sequence_ids is not None:
        raise ValueError("Decoding takes no packed sequences; give a mask without sequence_ids.")
    if block_table is not None:
        if block_table.dim() != 2 or block_table.shape[0] != batch or block_table.stride(1) != 1:
            got = f"got shape {tuple(block_table.shape)}, strides {block_table.stride()}"
            raise ValueError(f"block_table must be (batch = {batch}, blocks of a row), contiguous in each row, {got}.")
        slots *= block_table.shape[1]
    if key_lengths is not None and key_lengths.shape != (batch,):
        raise ValueError(f"key_lengths must be (batch,) = ({batch},), got {tuple(key_lengths.shape)}.")
    return slots


class Heads(NamedTuple):
    """The heads of a group for which a program computes one query."""

    b: Any
    index: Any  # of the query
    offs_h: Any  # [HEADS_PADDED]
    is_head: Any  # [HEADS_PADDED]: False where the group has no more heads
    line: Any  # [HEADS_PADDED]: where they are in (batch, heads, queries)


@triton.jit
def _program_heads(mask, step, BLOCKS: tl.constexpr):
    """The heads of a program, which the second axis of the grid counts with queries and blocks of channels."""
    b, share = tl.program_id(2).to(tl.int64), tl.program_id(1) // BLOCKS
    member = tl.arange(0, step.HEADS_PADDED)
    offs_h, index = (share // mask.queries * step.HEADS + member).to(tl.int64), share % mask.queries
    heads = tl.num_programs(1) // (BLOCKS * mask.queries) * step.HEADS
    return Heads(b, index, offs_h, member < step.HEADS, (b * heads + offs_h) * mask.queries + index)


@triton.jit
def _program_part(mask, step, b, BLOCK_N: tl.constexpr):
    """Positions: of the first key in sight of the row, of a program's keys, whole tiles, begin and stop, of query 0."""
    if step.lengths is None:
        length = step.slots >> 1
        query_position = step.query_offset >> 1
    else:
        length = tl.load(step.lengths + b).to(tl.int32)
        query_position = length - mask.queries
    length = tl.minimum(length, step.slots >> 1)
    first = tl.maximum(length - (step.slots >> 1), 0)  # 0, but where the compiler knows it two registers spill on 8.0
    last = length
    if mask.CAUSAL:
        last = tl.minimum(last, query_position + mask.queries)
    if mask.window is not None:
        first = tl.maximum(first, query_position - mask.window + 1)
        if not mask.CAUSAL:
            last = tl.minimum(last, query_position + mask.queries - 1 + mask.window)
    size = tl.cdiv(tl.cdiv(tl.maximum(last - first, 0), BLOCK_N), tl.num_programs(0)) * BLOCK_N
    begin = first + tl.program_id(0) * size
    return first, begin, tl.minimum(begin + size, last), query_position


@triton.jit
def _locate(slot, is_key, step, b):
    """Find keys: block of a paged cache, or row of the batch; and row in the block."""
    if step.PAGE == 0:
        return tl.zeros_like(slot).to(tl.int64) + b, slot.to(tl.int64)
    else:
        table = step.table + b * step.table_stride
        block = tl.load(table + slot // step.PAGE, mask=is_key, other=0).to(tl.int64)
        return block, (slot % step.PAGE).to(tl.int64)


@triton.jit
def _load_query_side(stage, step, heads):
    """The factors of the query, [1, HEADS, 1] each, and the static map [1, heads in, heads out], as tuples."""
    is_head = heads.is_head
    offs_h = heads.offs_h[None, :, None]
    factors = load_factors(stage.query, heads.b, offs_h, heads.index, is_head[None, :, None], tl.float32)
    static = ()
    if stage.HAS_STATIC:
        pointers = stage.static + (heads.offs_h[:, None] * step.HEADS + tl.arange(0, step.HEADS_PADDED)[None, :])
        static = tl.load(pointers, mask=is_head[:, None] & is_head[None, :], other=0).to(tl.float32)
        static = (static[None, :, :],)
    return factors, static


@triton.jit
def _load_key_factors(side, block, row, heads, is_pair):
    """The factors of keys, a tuple of [1, HEADS, BLOCK_N]."""
    block, row = block[None, None, :], row[None, None, :]
    return load_factors(side, block, heads.offs_h[None, :, None], row, is_pair[None, :, :], tl.float32)


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
def _mask_scores(x, mask, heads, offs_n, is_key, stop, query_position):
    """Add a float mask to scores [HEADS, BLOCK_N], and hide keys by the rule of visibility_dcformer.py."""
    first, last = band(mask, query_position + heads.index, stop)
    is_visible = offs_n <= last
    if mask.window is not None:
        is_visible = is_visible & (offs_n >= first)
    if mask.padding is not None:
        padding = mask.padding + heads.b * (mask.padding_stride_b >> 1)
        is_visible = is_visible & (tl.load(padding + offs_n, mask=is_key, other=0) != 0)
    if mask.dense is not None:
        dense = mask.dense + heads.b * (mask.dense_stride_b >> 1) + heads.index * (mask.dense_stride_m >> 1)
        dense = tl.load(dense + offs_n, mask=is_key, other=0)
        if mask.dense.dtype.element_ty == tl.float32:
            x += dense[None, :]
        else:
            is_visible = is_visible & (dense != 0)
    return tl.where(is_visible[None, :], x, float("-inf"))


@triton.jit
def decode_scores_kernel(mask, step, pre, q, k, scale, BLOCK_N: tl.constexpr):
    """Composed scores of all heads of a group for one query and a part of the keys, and the logarithm of their sum."""
    heads = _program_heads(mask, step, 1)
    factors, static = _load_query_side(pre, step, heads)
    first, begin, stop, query_position = _program_part(mask, step, heads.b, BLOCK_N)
    share = heads.b * tl.num_programs(1) + tl.program_id(1)
    for i in tl.static_range(step.BLOCKS):
        tl.store(step.tickets + share * step.BLOCKS + i, 0)
    # Below all scores that are seen, but finite: -inf - -inf is not a number.
    maximum = tl.full([step.HEADS_PADDED], -3e38, tl.float32)
    total = tl.zeros([step.HEADS_PADDED], tl.float32)
    for start in range(begin, stop, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        is_key = offs_n < stop
        is_pair = heads.is_head[:, None] & is_key[None, :]
        block, row = _locate(offs_n, is_key, step, heads.b)
        k_rows = k.pointer + state_offsets(k, block[None, :], heads.offs_h[:, None], row[None, :])
        q_rows = q.pointer + state_offsets(q, heads.b, heads.offs_h, heads.index)
        key_factors = _load_key_factors(pre.key, block, row, heads, is_pair)
        products = tl.zeros([step.HEADS_PADDED, BLOCK_N, _BLOCK_D], tl.float32)
        for c in tl.static_range(0, q.CHANNELS, _BLOCK_D):
            offs_d = c + tl.arange(0, _BLOCK_D)
            is_channel = offs_d < q.CHANNELS
            is_inside = heads.is_head[:, None] & is_channel[None, :]
            q_block = tl.load(q_rows[:, None] + offs_d[None, :], mask=is_inside, other=0.0)
            is_inside = is_pair[:, :, None] & is_channel[None, None, :]
            k_block = tl.load(k_rows[:, :, None] + offs_d[None, None, :], mask=is_inside, other=0.0)
            products += q_block.to(tl.float32)[:, None, :] * k_block.to(tl.float32)
        a = (tl.sum(products, 2) * scale)[None, :, :]
        x = tl.reshape(compose(a, factors, key_factors, static, pre), [step.HEADS_PADDED, BLOCK_N])
        x = _mask_scores(x, mask, heads, offs_n, is_key, stop, query_position)
        highest = tl.maximum(maximum, tl.max(x, 1))
        total = total * tl.exp2(maximum - highest) + tl.sum(tl.exp2(x - highest[:, None]), 1)
        maximum = highest
        offsets = heads.line[:, None] * (step.span >> 1) + (offs_n - first)[None, :]
        tl.store(step.scores + offsets, x, mask=is_pair)
    offsets = (share * (step.parts >> 1) + tl.program_id(0)) * step.HEADS_PADDED + tl.arange(0, step.HEADS_PADDED)
    tl.store(step.log_sums + offsets, maximum + tl.log2(tl.maximum(total, 1.0)))  # 0 only where no key is seen


@triton.jit
def _load_tile(start, stop, scores, v, post, step, heads, offs_d, BLOCK_N: tl.constexpr):
    """Composed scores [HEADS, BLOCK_N], factors and values [HEADS, BLOCK_N, BLOCK_D] of a tile's keys before `stop`."""
    offs_n = start + tl.arange(0, BLOCK_N)
    is_key = offs_n < stop
    is_pair = heads.is_head[:, None] & is_key[None, :]
    block, row = _locate(offs_n, is_key, step, heads.b)
    rows = v.pointer + state_offsets(v, block[None, :], heads.offs_h[:, None], row[None, :])
    is_value = is_pair[:, :, None] & (offs_d < v.CHANNELS)[None, None, :]
    values = tl.load(rows[:, :, None] + offs_d[None, None, :], mask=is_value, other=0.0)
    x = tl.load(scores + offs_n[None, :], mask=is_pair, other=float("-inf"))
    return x, _load_key_factors(post.key, block, row, heads, is_pair), values


@triton.jit
def decode_values_kernel(mask, step, post, v, part_outputs, o, BLOCK_N: tl.constexpr, AT_ONCE: tl.constexpr):
    """Sums of some channels of the values by composed weights of a part of the keys; the last program joins them."""
    heads = _program_heads(mask, step, step.BLOCKS)
    factors, static = _load_query_side(post, step, heads)
    first, begin, stop, _ = _program_part(mask, step, heads.b, BLOCK_N)
    offs_d = tl.program_id(1) % step.BLOCKS * _BLOCK_D + tl.arange(0, _BLOCK_D)
    # Tiles are loaded early: the first one comes while the sums are joined.
    scores = step.scores + heads.line[:, None] * (step.span >> 1) - first
    x, key_factors, values = _load_tile(begin, stop, scores, v, post, step, heads, offs_d, BLOCK_N)
    share = heads.b * tl.num_programs(1) + tl.program_id(1)
    number = tl.arange(0, step.PARTS_PADDED)[:, None]
    offsets = (share // step.BLOCKS * (step.parts >> 1) + number) * step.HEADS_PADDED
    offsets += tl.arange(0, step.HEADS_PADDED)[None, :]
    sums = tl.load(step.log_sums + offsets, mask=number < step.parts >> 1, other=float("-inf"))  # [PARTS, HEADS]
    log_sum = tl.max(sums, 0)
    log_sum += tl.log2(tl.sum(tl.exp2(sums - log_sum[None, :]), 0))
    products = tl.zeros([step.HEADS_PADDED, BLOCK_N, _BLOCK_D], tl.float32)
    for start in range(begin, stop, BLOCK_N):
        e = tl.exp2(x - log_sum[:, None])[None, :, :]
        y = tl.reshape(compose(e, factors, key_factors, static, post), [step.HEADS_PADDED, BLOCK_N])
        products += y[:, :, None] * values.to(tl.float32)
        x, key_factors, values = _load_tile(start + BLOCK_N, stop, scores, v, post, step, heads, offs_d, BLOCK_N)
    result = tl.sum(products, 1)
    outputs = o.pointer + (state_offsets(o, heads.b, heads.offs_h, heads.index)[:, None] + offs_d[None, :])
    is_output = heads.is_head[:, None] & (offs_d < v.CHANNELS)[None, :]
    if AT_ONCE == 1:
        tl.store(outputs, result.to(o.pointer.dtype.element_ty), mask=is_output)
    else:
        SIZE: tl.constexpr = step.HEADS_PADDED * _BLOCK_D
        part_outputs += share * tl.num_programs(0) * SIZE + tl.arange(0, SIZE)[None, :]
        tl.store(part_outputs + tl.program_id(0) * SIZE, tl.reshape(result, [1, SIZE]))
        # A thread takes the ticket when all of them have written (barrier, release), and who takes the last one sees
        # what all programs wrote (acquire), past a first-level cache that may hold something older (cg).
        tl.debug_barrier()
        if tl.atomic_add(step.tickets + share, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
            joined = tl.zeros([SIZE], tl.float32)
            for part in range(0, tl.num_programs(0), AT_ONCE):
                some = part + tl.arange(0, AT_ONCE)[:, None]
                some = tl.load(part_outputs + some * SIZE, some < tl.num_programs(0), 0.0, cache_modifier=".cg")
                joined += tl.sum(some, 0)
            result = tl.reshape(joined, [step.HEADS_PADDED, _BLOCK_D])
            tl.store(outputs, result.to(o.pointer.dtype.element_ty), mask=is_output)
