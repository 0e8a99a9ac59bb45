"""The preparation of a decode step: all that attention needs of a few new tokens, from one matrix product.

The product takes the hidden states with a joined weight: queries, keys, values, the hidden layer of the compositions'
low-rank maps, and their gates. One kernel then normalises and rotates queries and keys, finishes the factors of the
compositions (equations 5, 6 and 8 of the paper), and writes every new key and value, with its key-wise factors behind
it, into a row of the cache. Intermediate results stay in float32; only the norms round where a model does between its
modules.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional


# Forms of the activation between the two projections of a low-rank map.
ACTIVATIONS = ("gelu", "gelu_tanh")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The rows of the joined weight are filled up to a multiple, so that those of the product stay aligned.
_COLUMN_ALIGNMENT = 8
_HEADS_PER_PROGRAM = 4


class JoinedProjection(NamedTuple):
    """
    How the channels of a joined projection follow each other: queries, keys and values, head by head; then, group by
    group and slot by slot, the 2 x rank x heads per group hidden channels of the low-rank maps; then, likewise, the
    gates, one per head.

    Args:
        heads (`int`): Query heads.
        key_value_heads (`int`): Heads of keys and of values; they divide the query heads.
        head_dim (`int`): Channels of a head.
        groups (`int`, defaults to 1): Groups of consecutive heads that compose among themselves.
        rank (`int`, defaults to 0): Rank of the low-rank maps, per group; 0 without them.
        has_gate (`bool`, defaults to `False`): Whether there are gates.
        slots (`tuple[int, ...]`, defaults to `()`): What is composed, ascending: 0 by queries and 1 by keys before the
            softmax, 2 by queries and 3 by keys after it.
    """

    heads: int
    key_value_heads: int
    head_dim: int
    groups: int = 1
    rank: int = 0
    has_gate: bool = False
    slots: tuple[int, ...] = ()

    @property
    def channels(self) -> int:
        """Numbers that one position has in one head and slot: w1 of each rank, w2 of each rank, the gate."""
        return 2 * self.rank + self.has_gate

    @property
    def stages(self) -> tuple[int, ...]:
        """Of the compositions that there are: 0 before the softmax, 1 after it."""
        return tuple(sorted({slot // 2 for slot in self.slots}))

    @property
    def sides(self) -> tuple[int, ...]:
        """Of every composition: 0 by queries, 1 by keys."""
        return tuple(sorted({slot % 2 for slot in self.slots}))

    @property
    def query_stages(self) -> tuple[int, ...]:
        """Compositions to which queries contribute."""
        return self.stages if 0 in self.sides else ()

    @property
    def hidden_size(self) -> int:
        """Hidden channels of one low-rank map."""
        return 2 * self.rank * (self.heads // self.groups)

    @property
    def states(self) -> int:
        """Channels of queries, keys and values."""
        return (self.heads + 2 * self.key_value_heads) * self.head_dim

    @property
    def columns(self) -> int:
        """Channels in all, filled up to a multiple of 8."""
        number = self.states + self.groups * len(self.slots) * self.hidden_size
        number += self.heads * len(self.slots) * self.has_gate
        return -(-number // _COLUMN_ALIGNMENT) * _COLUMN_ALIGNMENT

    def row_channels(self, stage: int) -> int:
        """Channels in use of a cached key row (stage 0) or value row (stage 1)."""
        composed = 2 * stage + 1 in self.slots
        return self.head_dim + composed * self.channels * (self.heads // self.key_value_heads)

    def check(self) -> None:
        """Raise ValueError if the numbers do not fit together."""
        for name, number in (("key_value_heads", self.key_value_heads), ("groups", self.groups)):
            if number < 1 or self.heads % number != 0:
                raise ValueError(f"{name} must divide the {self.heads} heads, got {number}.")
        whole = tuple(2 * stage + side for stage in self.stages for side in self.sides)
        if self.slots != whole or any(slot not in range(4) for slot in self.slots):
            raise ValueError(f"slots must be ascending and have the same sides in every stage, got {self.slots}.")
        if self.slots and self.channels == 0:
            raise ValueError(f"slots {self.slots} need low-rank maps or gates; give no slots where there are neither.")


def join_weights(
    layout: JoinedProjection,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None = None,
    hidden_weight: Tensor | None = None,
    gate_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """
    The joined weight and bias of a projection, as copies.

    Args:
        layout (`JoinedProjection`): What there is.
        qkv_weight (`Tensor`): (query, key and value channels, hidden).
        qkv_bias (`Tensor`, *optional*): (query, key and value channels,).
        hidden_weight (`Tensor`, *optional*): (hidden, groups, 4, hidden channels of a low-rank map), with such maps.
        gate_weight (`Tensor`, *optional*): (hidden, groups, 4 x heads per group), with gates.

    Returns:
        `tuple[Tensor, Tensor | None]`: weight (`layout.columns`, hidden), bias (`layout.columns`,), zero where nothing
        was given.
    """
    layout.check()
    slots = list(layout.slots)
    parts = [qkv_weight]
    if slots and layout.rank > 0 and hidden_weight is not None:
        parts.append(hidden_weight[:, :, slots].flatten(1).T)
    if slots and layout.has_gate and gate_weight is not None:
        parts.append(gate_weight.unflatten(2, (4, -1))[:, :, slots].flatten(1).T)
    weight = torch.cat(parts)
    if weight.shape[0] > layout.columns or weight.shape[0] <= layout.columns - _COLUMN_ALIGNMENT:
        raise ValueError(f"{layout} has {layout.columns} channels, but the weights have {weight.shape[0]}.")
    weight = functional.pad(weight, (0, 0, 0, layout.columns - weight.shape[0]))
    if qkv_bias is None:
        return weight, None
    return weight, functional.pad(qkv_bias, (0, layout.columns - qkv_bias.shape[0]))


@triton.jit
def _tanh(x):
    # 1 - exp(-2x) would cancel near zero; there the series to x^9 is exact to float32.
    small = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - small) / (1.0 + small)
    square = x * x
    near = 2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0))
    near = x * (1.0 + square * (-1.0 / 3.0 + square * near))
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0.0, -far, far))


@triton.jit
def _gelu(x, TANH_FORM: tl.constexpr):
    if TANH_FORM:
        return 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    else:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _normalized(states, norm, channel, inside, scale):
    # Rounded after the norm and after its weight, as a model's modules are.
    dtype = norm.dtype.element_ty
    weight = tl.load(norm + channel, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_CHANNELS]
    states = (states * scale[:, None]).to(dtype).to(tl.float32)
    return (states * weight[None, :]).to(dtype).to(tl.float32)


@triton.jit
def _head_states(
    projected, head, heads, norm, norm_eps, cos, sin,
    HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """States of some heads, [BLOCK_HEADS, BLOCK_CHANNELS] in float32, normalised and rotated where asked for."""
    channel = tl.arange(0, BLOCK_CHANNELS)
    inside = channel < HEAD_DIM
    at = projected + head[:, None] * HEAD_DIM  # [BLOCK_HEADS, 1]
    present = (head < heads)[:, None] & inside[None, :]
    states = tl.load(at + channel[None, :], mask=present, other=0.0).to(tl.float32)
    scale = tl.sum(states * states, axis=1) / HEAD_DIM  # [BLOCK_HEADS]
    scale = tl.rsqrt(scale + norm_eps)
    if norm is not None:
        states = _normalized(states, norm, channel, inside, scale)
    if ROTARY > 0:
        half: tl.constexpr = ROTARY // 2
        turns = channel < ROTARY
        first = channel < half
        partner = tl.where(turns, tl.where(first, channel + half, channel - half), channel)
        other = tl.load(at + partner[None, :], mask=present, other=0.0).to(tl.float32)
        if norm is not None:
            other = _normalized(other, norm, partner, inside, scale)
        other = tl.where(first[None, :], -other, other)
        cosine = tl.load(cos + channel, mask=turns, other=1.0).to(tl.float32)
        sine = tl.load(sin + channel, mask=turns, other=0.0).to(tl.float32)
        states = states * cosine[None, :] + other * sine[None, :]
    return states


@triton.jit
def _store_rows(
    states, rows, head, written, head_stride, padding,
    HEAD_DIM: tl.constexpr, USED: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write the states of some heads to their cache rows, and zeros behind what composition writes there."""
    channel = tl.arange(0, BLOCK_CHANNELS)
    at = rows + head.to(tl.int64)[:, None] * head_stride  # [BLOCK_HEADS, 1]
    tl.store(at + channel[None, :], states, mask=written[:, None] & (channel < HEAD_DIM)[None, :])
    for start in range(0, padding, BLOCK_CHANNELS):
        column = start + channel
        inside = written[:, None] & (column < padding)[None, :]
        tl.store(at + (USED + column)[None, :], tl.zeros_like(states), mask=inside)


@triton.jit
def _factor(
    projected, low_rank_weight, norm_eps, group, place, slot, channel,
    PLACES: tl.constexpr, GROUPS: tl.constexpr, GROUP_HEADS: tl.constexpr, RANK: tl.constexpr,
    TANH_FORM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HIDDEN: tl.constexpr,
):  # fmt: skip
    """One channel of one slot and group, [BLOCK_HEADS] in float32: w1 or w2 of a rank, or the gate."""
    head = tl.arange(0, BLOCK_HEADS)
    HIDDEN: tl.constexpr = 2 * RANK * GROUP_HEADS
    part = group * PLACES + place
    factor = tl.zeros([BLOCK_HEADS], dtype=tl.float32)
    if channel < 2 * RANK:
        if RANK > 0:
            total = tl.zeros([BLOCK_HIDDEN, BLOCK_HEADS], dtype=tl.float32)
            weight = low_rank_weight + (group * 4 + slot).to(tl.int64) * (HIDDEN * 2 * RANK * GROUP_HEADS)
            weight += channel * GROUP_HEADS
            for start in range(0, HIDDEN, BLOCK_HIDDEN):
                inner = start + tl.arange(0, BLOCK_HIDDEN)
                hidden = tl.load(projected + part * HIDDEN + inner, mask=inner < HIDDEN, other=0.0).to(tl.float32)
                at = inner[:, None] * (2 * RANK * GROUP_HEADS) + head[None, :]
                inside = (inner < HIDDEN)[:, None] & (head < GROUP_HEADS)[None, :]
                tile = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
                total += _gelu(hidden, TANH_FORM)[:, None] * tile  # [BLOCK_HIDDEN, BLOCK_HEADS]
            factor = tl.sum(total, axis=0)
            if channel < RANK:
                factor *= tl.rsqrt(tl.sum(factor * factor, axis=0) / GROUP_HEADS + norm_eps)
    else:
        gates = projected + GROUPS * PLACES * HIDDEN + part * GROUP_HEADS
        factor = _tanh(tl.load(gates + head, mask=head < GROUP_HEADS, other=0.0).to(tl.float32))
    return factor


@triton.jit(do_not_specialize=["length", "rows", "key_padding", "value_padding"])
def _prepare_kernel(
    projected, projected_stride,
    query_norm, key_norm, norm_eps,
    cos, sin, angle_batch_stride, angle_stride,
    low_rank_weight, compose_norm_eps,
    query, factors,
    keys, key_batch_stride, key_head_stride, key_row_stride, key_padding,
    values, value_batch_stride, value_head_stride, value_row_stride, value_padding,
    positions, position_batch_stride, position_stride,
    batch, length, rows,
    HEADS: tl.constexpr, KEY_VALUE_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr,
    GROUPS: tl.constexpr, RANK: tl.constexpr, CHANNELS: tl.constexpr,
    STAGES: tl.constexpr, FIRST_STAGE: tl.constexpr, SIDES: tl.constexpr, FIRST_SIDE: tl.constexpr,
    KEY_USED: tl.constexpr, VALUE_USED: tl.constexpr, TANH_FORM: tl.constexpr, POSITIONS_FOLLOW: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
    BLOCK_GROUP_HEADS: tl.constexpr, BLOCK_HIDDEN: tl.constexpr,
):  # fmt: skip
    """
    A program has one token and either some heads of its query, key or value, or one channel of a slot and group.

    Grid: (tokens, blocks of query heads + 2 x blocks of key/value heads + groups x slots x channels).
    """
    token = tl.program_id(0)
    part = tl.program_id(1)
    sequence = (token // length).to(tl.int64)
    step = (token % length).to(tl.int64)
    query_blocks: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    row_blocks: tl.constexpr = (KEY_VALUE_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    projected += token.to(tl.int64) * projected_stride
    row = step
    if positions is not None:
        if POSITIONS_FOLLOW:
            row += tl.load(positions + sequence * position_batch_stride).to(tl.int64)
        else:
            row = tl.load(positions + sequence * position_batch_stride + step * position_stride).to(tl.int64)
    fits = (row >= 0) & (row < rows)  # nothing is written beyond the cache, whatever the positions hold
    keys += sequence * key_batch_stride + row * key_row_stride
    values += sequence * value_batch_stride + row * value_row_stride
    channel = tl.arange(0, BLOCK_CHANNELS)
    if ROTARY > 0:
        cos += sequence * angle_batch_stride + step * angle_stride
        sin += sequence * angle_batch_stride + step * angle_stride

    if part < query_blocks:
        query_head = part * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        states = _head_states(
            projected, query_head, HEADS, query_norm, norm_eps, cos, sin, HEAD_DIM, ROTARY, BLOCK_CHANNELS
        )
        query += (sequence * HEADS * length + step) * HEAD_DIM
        inside = (query_head < HEADS)[:, None] & (channel < HEAD_DIM)[None, :]
        tl.store(query + (query_head * length * HEAD_DIM)[:, None] + channel[None, :], states, mask=inside)
    elif part < query_blocks + row_blocks:
        row_head = (part - query_blocks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        states = _head_states(
            projected + HEADS * HEAD_DIM, row_head, KEY_VALUE_HEADS,
            key_norm, norm_eps, cos, sin, HEAD_DIM, ROTARY, BLOCK_CHANNELS,
        )  # fmt: skip
        written = row_head < tl.where(fits, KEY_VALUE_HEADS, 0)
        _store_rows(states, keys, row_head, written, key_head_stride, key_padding, HEAD_DIM, KEY_USED, BLOCK_CHANNELS)
    elif part < query_blocks + 2 * row_blocks:
        row_head = (part - query_blocks - row_blocks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        states = _head_states(
            projected + (HEADS + KEY_VALUE_HEADS) * HEAD_DIM, row_head, KEY_VALUE_HEADS,
            None, norm_eps, None, None, HEAD_DIM, 0, BLOCK_CHANNELS,
        )  # fmt: skip
        written = row_head < tl.where(fits, KEY_VALUE_HEADS, 0)
        _store_rows(
            states, values, row_head, written, value_head_stride, value_padding, HEAD_DIM, VALUE_USED, BLOCK_CHANNELS
        )
    elif CHANNELS > 0:
        GROUP_HEADS: tl.constexpr = HEADS // GROUPS
        SERVED: tl.constexpr = HEADS // KEY_VALUE_HEADS
        PLACES: tl.constexpr = STAGES * SIDES
        rest = part - query_blocks - 2 * row_blocks
        which = rest % CHANNELS
        place = rest // CHANNELS % PLACES
        group = rest // CHANNELS // PLACES
        stage = FIRST_STAGE + place // SIDES
        side = FIRST_SIDE + place % SIDES
        factor = _factor(
            projected + (HEADS + 2 * KEY_VALUE_HEADS) * HEAD_DIM, low_rank_weight, compose_norm_eps,
            group, place, 2 * stage + side, which,
            PLACES, GROUPS, GROUP_HEADS, RANK, TANH_FORM, BLOCK_GROUP_HEADS, BLOCK_HIDDEN,
        )  # fmt: skip
        group_head = tl.arange(0, BLOCK_GROUP_HEADS)
        head = group * GROUP_HEADS + group_head
        present = group_head < GROUP_HEADS
        stored = group_head < tl.where(fits, GROUP_HEADS, 0)
        column = HEAD_DIM + (head % SERVED) * CHANNELS + which
        served_by = (head // SERVED).to(tl.int64)
        if side == 0:
            factors += ((place // SIDES).to(tl.int64) * batch + sequence) * HEADS * length * CHANNELS
            tl.store(factors + (head * length + step) * CHANNELS + which, factor, mask=present)
        elif stage == 0:
            tl.store(keys + served_by * key_head_stride + column, factor, mask=stored)
        else:
            tl.store(values + served_by * value_head_stride + column, factor, mask=stored)


def prepare_step(
    projected: Tensor,
    layout: JoinedProjection,
    keys: Tensor,
    values: Tensor,
    positions: Tensor | None = None,
    *,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    norm_eps: float = 1e-6,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    low_rank_weight: Tensor | None = None,
    compose_norm_eps: float = 1e-6,
    activation: str = "gelu",
) -> tuple[Tensor, Tensor]:
    """
    Queries and their factors from a joined projection; keys and values, with their factors, go into their rows.

    Args:
        projected (`Tensor`): (batch, length, `layout.columns`), the hidden states times the joined weight; float32,
            bfloat16 or float16.
        layout (`JoinedProjection`): Of its channels.
        keys (`Tensor`): (batch, key/value heads, rows, at least `layout.row_channels(0)`) of the same type; a row gets
            the key, the factors of each query head that it serves, one head after the other, and zeros.
        values (`Tensor`): (batch, key/value heads, rows, at least `layout.row_channels(1)`), likewise.
        positions (`Tensor`, *optional*): Integers on the same device: (batch or 1, length), the row of every token, or
            (batch or 1,), that of the first token, which the others follow. They are never read on the host; what lies
            outside of the rows is not written. None: token i goes into row i.
        query_norm, key_norm (`Tensor`, *optional*): (head_dim,) in the same type, weights of the RMS norms of queries
            and of keys. None: they are not normalised.
        norm_eps (`float`, defaults to 1e-6): Epsilon of these norms.
        cos, sin (`Tensor`, *optional*): (batch or 1, length, rotary size) in float32: the rotary size is even, and the
            channels after it pass. None: nothing is rotated.
        low_rank_weight (`Tensor`, *optional*): (groups, 4, hidden channels, 2 x rank, heads per group), the second
            projection of the low-rank maps, if there are any.
        compose_norm_eps (`float`, defaults to 1e-6): Epsilon of the norm of w1 over the heads of a group.
        activation (`str`, defaults to `"gelu"`): `"gelu"` (by the error function) or `"gelu_tanh"`.

    Returns:
        `tuple[Tensor, Tensor]`: the query (batch, heads, length, head_dim), and the query-wise factors (compositions
        with such factors, batch, heads, length, channels), that before the softmax first.

    Raises:
        ValueError: if shapes, types or devices do not fit together, or for another activation.

    Source: equations 5, 6 and 8 of the paper.
    """
    _check(projected, layout, keys, values, positions, query_norm, key_norm, cos, sin, low_rank_weight, activation)
    batch, length = projected.shape[:2]
    projected = projected.contiguous()
    shape = batch, layout.heads, length
    query = projected.new_empty(*shape, layout.head_dim)
    factors = projected.new_empty(len(layout.query_stages), *shape, layout.channels)
    if batch * length == 0:
        return query, factors
    group_heads = layout.heads // layout.groups
    block_group_heads = triton.next_power_of_2(group_heads)
    options: dict[str, Any] = {
        "HEADS": layout.heads,
        "KEY_VALUE_HEADS": layout.key_value_heads,
        "HEAD_DIM": layout.head_dim,
        "ROTARY": 0 if cos is None else cos.shape[2],
        "GROUPS": layout.groups,
        "RANK": layout.rank,
        "CHANNELS": layout.channels if layout.slots else 0,
        "STAGES": max(1, len(layout.stages)),
        "FIRST_STAGE": min(layout.stages, default=0),
        "SIDES": max(1, len(layout.sides)),
        "FIRST_SIDE": min(layout.sides, default=0),
        "KEY_USED": layout.row_channels(0),
        "VALUE_USED": layout.row_channels(1),
        "TANH_FORM": activation == "gelu_tanh",
        "POSITIONS_FOLLOW": positions is not None and positions.dim() == 1,
        "BLOCK_HEADS": _HEADS_PER_PROGRAM,
        "BLOCK_CHANNELS": triton.next_power_of_2(layout.head_dim),
        "BLOCK_GROUP_HEADS": block_group_heads,
        # A tile of hidden channels and heads that four warps hold in their registers.
        "BLOCK_HIDDEN": max(1, min(triton.next_power_of_2(max(1, layout.hidden_size)), 2048 // block_group_heads)),
    }
    blocks = -(-layout.heads // _HEADS_PER_PROGRAM) + 2 * -(-layout.key_value_heads // _HEADS_PER_PROGRAM)
    grid = batch * length, blocks + layout.groups * len(layout.slots) * layout.channels
    cos, sin, query_norm, key_norm, low_rank_weight = (
        None if tensor is None else tensor.contiguous() for tensor in (cos, sin, query_norm, key_norm, low_rank_weight)
    )
    with torch.cuda.device_of(projected):
        _prepare_kernel[grid](
            projected, projected.shape[2],
            query_norm, key_norm, norm_eps,
            cos, sin, *(_strides(cos, batch)),
            low_rank_weight, compose_norm_eps,
            query, factors,
            keys, *keys.stride()[:3], keys.shape[3] - layout.row_channels(0),
            values, *values.stride()[:3], values.shape[3] - layout.row_channels(1),
            positions, *(_strides(positions, batch)),
            batch, length, keys.shape[2],
            **options, num_warps=4, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
    return query, factors


def _strides(tensor: Tensor | None, batch: int) -> tuple[int, int]:
    """Of the batch, 0 where all sequences share one entry, and of the length."""
    if tensor is None:
        return 0, 0
    return 0 if tensor.shape[0] == 1 else tensor.stride(0), 0 if tensor.dim() == 1 else tensor.stride(1)


def _check(
    projected: Tensor,
    layout: JoinedProjection,
    keys: Tensor,
    values: Tensor,
    positions: Tensor | None,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    low_rank_weight: Tensor | None,
    activation: str,
) -> None:
    layout.check()
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}.")
    if projected.dtype not in DTYPES:
        raise ValueError(f"projected must be float32, bfloat16 or float16, got {projected.dtype}.")
    if projected.dim() != 3 or projected.shape[2] != layout.columns:
        raise ValueError(f"projected must be (batch, length, {layout.columns}), got {tuple(projected.shape)}.")
    batch, length = projected.shape[:2]
    for name, rows, stage in (("keys", keys, 0), ("values", values, 1)):
        needed = batch, layout.key_value_heads, layout.row_channels(stage)
        if rows.dim() != 4 or (rows.shape[0], rows.shape[1]) != needed[:2] or rows.shape[3] < needed[2]:
            raise ValueError(
                f"{name} must be (batch, key/value heads, rows, channels) with {needed[0]} sequences, {needed[1]} "
                f"heads and at least {needed[2]} channels, got {tuple(rows.shape)}."
            )
        if rows.stride(3) != 1 or rows.dtype != projected.dtype:
            raise ValueError(
                f"{name} must be {projected.dtype} with the channels of a row side by side, got {rows.dtype} with "
                f"strides {rows.stride()}."
            )
    if values.shape[2] != keys.shape[2]:
        raise ValueError(f"values must have as many rows as keys, {keys.shape[2]}, got {values.shape[2]}.")
    if positions is None and keys.shape[2] < length:
        raise ValueError(f"keys must have a row for each of the {length} tokens, got {keys.shape[2]}.")
    if positions is not None:
        fits = positions.dim() in (1, 2) and positions.shape[0] in (1, batch)
        if not fits or positions.shape[1:] not in ((), (length,)) or positions.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"positions must be integers (batch or 1, {length}) or (batch or 1,), got {positions.dtype} "
                f"{tuple(positions.shape)}."
            )
    for name, weight in (("query_norm", query_norm), ("key_norm", key_norm)):
        if weight is not None and (weight.shape != (layout.head_dim,) or weight.dtype != projected.dtype):
            raise ValueError(
                f"{name} must be {projected.dtype} ({layout.head_dim},), got {weight.dtype} {tuple(weight.shape)}."
            )
    if cos is not None or sin is not None:
        shapes = [None if angles is None else tuple(angles.shape) for angles in (cos, sin)]
        shape = shapes[0] or ()
        fits = shapes[0] == shapes[1] and len(shape) == 3 and shape[0] in (1, batch) and shape[1] == length
        if not fits or shape[2] > layout.head_dim or shape[2] % 2 != 0:
            raise ValueError(
                f"cos and sin must be (batch or 1, {length}, an even number up to {layout.head_dim}), got {shapes}."
            )
    if layout.slots and layout.rank > 0:
        heads = layout.heads // layout.groups
        shape = layout.groups, 4, layout.hidden_size, 2 * layout.rank, heads
        if low_rank_weight is None or low_rank_weight.shape != shape:
            given = None if low_rank_weight is None else tuple(low_rank_weight.shape)
            raise ValueError(f"low_rank_weight must be {shape}, got {given}.")
    tensors: Sequence[Tensor | None] = keys, values, positions, query_norm, key_norm, cos, sin, low_rank_weight
    for tensor in tensors:
        if tensor is not None and tensor.device != projected.device:
            raise ValueError(f"All tensors must be on {projected.device}, as projected is; one is on {tensor.device}.")
