"""
The kernels of `projection`: what follows the wide products, for some tokens, one slot and one group of heads; and the
products of a few tokens, whose time is that of reading the weights.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .call import channels_last


_power_of_2 = functools.cache(triton.next_power_of_2)  # which takes microseconds of each decoding step
_MOST_PARTS = 32  # of the hidden channels: with four slots 128 programs, about one per multiprocessor


class Wide(NamedTuple):
    """The weight of a wide product, (hidden, groups, slots, columns), and the product by parts of hidden channels."""

    weight: Tensor
    product: Tensor  # (groups, slots, tokens, parts, columns) in float32
    HIDDEN_STRIDE: tl.constexpr  # constants, so that the compiler knows how far rows are aligned
    GROUP_STRIDE: tl.constexpr
    SLOT_STRIDE: tl.constexpr
    COLUMNS: tl.constexpr
    COLUMNS_PADDED: tl.constexpr

    @classmethod
    def of(cls, weight: Tensor, tokens: int, parts: int) -> "Wide":
        weight = channels_last(weight)
        _, groups, slots, columns = weight.shape
        product = weight.new_empty(groups, slots, tokens, parts, columns, dtype=torch.float32)
        return cls(weight, product, *map(tl.constexpr, (*weight.stride()[:3], columns, _padded(columns))))


def _padded(columns: int) -> int:
    return max(_power_of_2(columns), 16)  # as `tl.dot` asks for


def launch_products(states: Tensor, *weights: Tensor | None) -> list[Tensor | None]:
    """The products of up to 16 hidden states, (batch, length, hidden), with wide weights, by parts as in [`Wide`]."""
    rows = states.flatten(0, 1).contiguous()
    tokens, channels = rows.shape
    shapes = [weight.shape for weight in weights if weight is not None]
    # Channels that are multiplied together: the weights of about 10 KB, of which four times as much is on its way.
    units = sum(_padded(shape[3]) for shape in shapes) * rows.itemsize // 2  # of 16 bits, of each channel
    block = min(128, max(16, _power_of_2(4096 // units)))
    parts = min(_MOST_PARTS, _power_of_2(-(-channels // block)))
    wide = [None if weight is None else Wide.of(weight, tokens, parts) for weight in weights]
    _products_kernel[(parts, shapes[0][2], shapes[0][1])](
        *(rows, *wide, tokens, channels, block),
        num_stages=5 if block * units <= 10240 else 2,
    )
    return [None if each is None else each.product for each in wide]


def launch_factors(approximate: str, eps: float, hidden: Any, weight: Any, gates: Any, factors: Tensor) -> None:
    """Compute the factors, (slot, token, channel, all heads), from products, which may be those by parts."""
    slots, tokens, channels, all_heads = factors.shape
    products = gates if hidden is None else hidden
    parts = products.shape[3] if products.dim() == 5 else 0
    groups = products.shape[0 if parts else 1]
    heads, rank = all_heads // groups, channels // 2
    channels_padded = _power_of_2(max(2 * rank, 1))
    columns = _padded(channels_padded * _power_of_2(heads))
    # More tokens share what is read of the weights, fewer leave registers, and programs for more of a GPU.
    block = 32 if tokens > 1024 and columns <= 128 else 16
    _factors_kernel[(tokens if parts else triton.cdiv(tokens, block), slots, groups)](
        *(hidden, None if weight is None else weight.contiguous(), gates, factors, tokens, eps, approximate),
        *(rank, heads, channels_padded, columns // channels_padded, parts, block),
        num_warps=8 if columns > 256 else 4,
        num_stages=5 if parts and columns <= 128 else 3,  # all of a usual weight is on its way at once
    )


@triton.jit
def _load_wide(wide, channel, is_channel):
    """[channels, columns] of a program's slot and group."""
    column = tl.arange(0, wide.COLUMNS_PADDED)
    row = tl.program_id(1) * wide.SLOT_STRIDE + tl.program_id(2) * wide.GROUP_STRIDE + channel * wide.HIDDEN_STRIDE
    inside = is_channel[:, None] & (column < wide.COLUMNS)[None, :]
    return tl.load(wide.weight + row[:, None] + column[None, :], mask=inside, other=0)


@triton.jit
def _store_product(wide, product, tokens):
    m, column = tl.arange(0, 16)[:, None], tl.arange(0, wide.COLUMNS_PADDED)[None, :]
    row = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tokens + m
    row = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(wide.product + row * wide.COLUMNS + column, product, mask=(m < tokens) & (column < wide.COLUMNS))


@triton.jit(do_not_specialize=["tokens"])
def _products_kernel(states, hidden, gates, tokens, channels, BLOCK_K: tl.constexpr):
    """Products of all tokens with the weights of one slot and group: program (part of the channels, slot, group)."""
    m = tl.arange(0, 16)  # `tl.dot` asks for as many rows; those past the tokens are zeros
    if hidden is not None:
        of_hidden = tl.zeros([16, hidden.COLUMNS_PADDED], tl.float32)
    if gates is not None:
        of_gates = tl.zeros([16, gates.COLUMNS_PADDED], tl.float32)
    channels_of_part = tl.cdiv(channels, tl.num_programs(0) * BLOCK_K) * BLOCK_K
    first = tl.program_id(0) * channels_of_part
    for start in range(first, tl.minimum(first + channels_of_part, channels), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = (m < tokens)[:, None] & (k < channels)[None, :]
        x = tl.load(states + m[:, None] * channels + k[None, :], mask=inside, other=0)
        if hidden is not None:
            of_hidden = tl.dot(x, _load_wide(hidden, k, k < channels), of_hidden, input_precision="ieee")
        if gates is not None:
            of_gates = tl.dot(x, _load_wide(gates, k, k < channels), of_gates, input_precision="ieee")
    if hidden is not None:
        _store_product(hidden, of_hidden, tokens)
    if gates is not None:
        _store_product(gates, of_gates, tokens)


@triton.jit
def _gelu(x, APPROXIMATE: tl.constexpr):
    if APPROXIMATE == "tanh":
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # (1 + tanh(x)) / 2 is sigmoid(2 x)
    else:
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _load_products(products, row, is_row, column, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """[rows, columns], or [parts, columns] of the one row that a program has of products by parts."""
    inside = (column < COLUMNS)[None, :]
    if PARTS > 0:
        row = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
        row = row * PARTS + tl.arange(0, PARTS)
    else:
        inside = is_row[:, None] & inside
    return tl.load(products + row[:, None] * COLUMNS + column[None, :], mask=inside, other=0)


@triton.jit
def _join_parts(products, PARTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """[BLOCK_M, columns] in float32; the sums of parts in every row."""
    products = products.to(tl.float32)
    if PARTS > 0:
        products = tl.broadcast_to(tl.sum(products, 0)[None, :], [BLOCK_M, products.shape[1]])
    return products


@triton.jit(do_not_specialize=["tokens"])
def _factors_kernel(
    hidden,
    weight,
    gates,
    factors,
    tokens,
    eps,
    APPROXIMATE: tl.constexpr,
    RANK: tl.constexpr,
    HEADS: tl.constexpr,
    CHANNELS_PADDED: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    CHANNELS: tl.constexpr = 2 * RANK + (gates is not None)
    slot, slots = tl.program_id(1), tl.num_programs(1)
    group, groups = tl.program_id(2), tl.num_programs(2)
    TOKENS: tl.constexpr = BLOCK_M if PARTS == 0 else 1
    m = tl.arange(0, BLOCK_M)
    t = (tl.program_id(0) * TOKENS + m).to(tl.int64)
    row, is_token = (t * groups + group) * slots + slot, (t < tokens) & (m < TOKENS)  # of the products
    h = tl.arange(0, HEADS_PADDED)
    factors += ((slot * tokens + t) * CHANNELS * groups + group)[:, None] * HEADS + h[None, :]  # [BLOCK_M, HEADS]
    if gates is not None:  # on its way while the maps are made
        gate = _load_products(gates, row, is_token, h, HEADS, PARTS)
    if hidden is not None:
        INNER: tl.constexpr = 2 * RANK * HEADS
        DTYPE: tl.constexpr = factors.dtype.element_ty
        BLOCK_K: tl.constexpr = 512 // DTYPE.primitive_bitwidth
        column = tl.arange(0, CHANNELS_PADDED * HEADS_PADDED)
        c, head = column // HEADS_PADDED, column % HEADS_PADDED
        is_column = (c < 2 * RANK) & (head < HEADS)
        maps = tl.zeros([BLOCK_M, CHANNELS_PADDED * HEADS_PADDED], tl.float32)
        for start in range(0, INNER, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            states = _load_products(hidden, row, is_token, k, INNER, PARTS)
            offsets = ((group * slots + slot) * INNER + k)[:, None] * INNER + (c * HEADS + head)[None, :]
            weights = tl.load(weight + offsets, mask=(k < INNER)[:, None] & is_column[None, :], other=0)
            states = _gelu(_join_parts(states, PARTS, BLOCK_M), APPROXIMATE)  # [BLOCK_M, BLOCK_K]
            maps = tl.dot(states.to(DTYPE), weights.to(DTYPE), maps, input_precision="ieee")
        maps = tl.reshape(maps, [BLOCK_M, CHANNELS_PADDED, HEADS_PADDED])
        channel = tl.arange(0, CHANNELS_PADDED)[None, :, None]
        scale = tl.rsqrt(tl.sum(maps * maps, 2, keep_dims=True) / HEADS + eps)
        maps = tl.where(channel < RANK, maps * scale, maps)
        inside = is_token[:, None, None] & (channel < 2 * RANK) & (h < HEADS)[None, None, :]
        tl.store(factors[:, None, :] + channel * (groups * HEADS), maps, mask=inside)
    if gates is not None:
        gate = _join_parts(gate, PARTS, BLOCK_M)
        # The difference of numbers near 1 has few digits of what is small.
        hyperbolic = tl.where(tl.abs(gate) < 0.01, gate - gate * gate * gate / 3, 2 * tl.sigmoid(2 * gate) - 1)
        tl.store(factors + 2 * RANK * groups * HEADS, hyperbolic, mask=is_token[:, None] & (h < HEADS)[None, :])
