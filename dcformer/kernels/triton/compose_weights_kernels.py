"""
Kernels that make compose weights: what follows the wide product of hidden states, its gradients, and for a few tokens,
whose time is that of reading the weights, the product too. A slot is a side before or after the softmax.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import cdiv, channels_last, next_power_of_2
from .tuning import constant


_MOST_PARTS = 32  # of the hidden channels: with four slots 128 programs, about one per multiprocessor
MOST_ROWS = 512  # tokens of one product for the weight's gradient: few long ones would leave a GPU without work


class Shape(NamedTuple):
    """The activation and the sizes of one slot of one group, constants of the kernels."""

    APPROXIMATE: tl.constexpr
    CHANNELS: tl.constexpr  # 2 rank
    HEADS: tl.constexpr  # of a group
    INNER: tl.constexpr  # K
    WIDTH: tl.constexpr  # of a slot's products: K, then gates
    CHANNELS_PADDED: tl.constexpr
    HEADS_PADDED: tl.constexpr
    BLOCK_M: tl.constexpr  # tokens of a program, padded
    PARTS: tl.constexpr  # that the products are the sums of; 0 where they are whole

    @classmethod
    def of(cls, approximate: str, products: Tensor, weight: Tensor | None) -> tuple["Shape", int]:
        """Choose the sizes for some products, and the warps of a program."""
        tokens, width = products.shape[:2].numel(), products.shape[-1]
        parts = products.shape[4] if products.dim() == 6 else 0
        channels, heads = (0, width) if weight is None else weight.shape[3:]
        channels_padded = next_power_of_2(max(channels, 1))
        columns = max(16, channels_padded * next_power_of_2(heads))  # as `tl.dot` takes
        # More tokens share what is read of the weights, fewer leave registers, and programs for more of a GPU.
        block = 32 if tokens > 1024 and columns <= 128 else 16
        sizes = channels, heads, channels * heads, width, channels_padded, columns // channels_padded, block, parts
        return cls(*map(constant, (approximate, *sizes))), 8 if columns > 256 else 4


class Wide(NamedTuple):
    """The weight of a wide product, (hidden, groups, slots, columns)."""

    weight: Tensor
    HIDDEN_STRIDE: tl.constexpr  # constants, so that the compiler knows how far rows are aligned
    GROUP_STRIDE: tl.constexpr
    SLOT_STRIDE: tl.constexpr
    COLUMNS: tl.constexpr
    COLUMNS_PADDED: tl.constexpr

    @classmethod
    def of(cls, weight: Tensor) -> "Wide":
        """Describe a weight."""
        weight = channels_last(weight)
        columns = weight.shape[3]
        return cls(weight, *map(constant, (*weight.stride()[:3], columns, max(16, next_power_of_2(columns)))))


def launch_partial_products(states: Tensor, *weights: Tensor | None) -> Tensor:
    """Multiply few states (batch, length, hidden): (batch, length, groups, slots, parts, K, then heads) in float32."""
    rows = states.flatten(0, 1).contiguous()
    tokens, channels = rows.shape
    wide = tuple(Wide.of(weight) for weight in weights if weight is not None)
    groups, slots = wide[0].weight.shape[1:3]
    # Channels that are multiplied together: the weights of about 10 KB, of which four times as much is on its way.
    units = sum(each.COLUMNS_PADDED.value for each in wide) * rows.itemsize // 2  # of 16 bits, of each channel
    block = min(128, max(16, next_power_of_2(4096 // units)))
    parts = min(_MOST_PARTS, next_power_of_2(cdiv(channels, block)))
    width = sum(each.COLUMNS.value for each in wide)
    products = states.new_empty(*states.shape[:2], groups, slots, parts, width, dtype=torch.float32)
    stages = 5 if block * units <= 10240 else 2
    sizes = {"tokens": tokens, "channels": channels, "WIDTH": width, "BLOCK_K": block, "num_stages": stages}
    # Grid: a part of the hidden channels, a slot, a group of heads.
    partial_products_kernel[parts, slots, groups](states=rows, wide=wide, products=products, **sizes)
    return products


def launch_factors(approximate: str, eps: float, products: Tensor, weight: Tensor | None, factors: Tensor) -> None:
    """Compute the factors, (slot, batch, length, channel, all heads), from products, which may be those by parts."""
    batch, length, groups, slots = products.shape[:4]
    shape, warps = Shape.of(approximate, products, weight)
    weight = None if weight is None else weight.contiguous()
    parts, columns = shape.PARTS.value, shape.CHANNELS_PADDED.value * shape.HEADS_PADDED.value
    stages = 5 if parts and columns <= 128 else 3  # all of a usual weight is on its way at once
    options = {"tokens": batch * length, "eps": eps, "shape": shape, "num_warps": warps, "num_stages": stages}
    # Grid: some tokens, or one whose products are in parts; a slot, a group of heads.
    grid = cdiv(batch * length, 1 if parts else shape.BLOCK_M.value), slots, groups
    factors_fwd_kernel[grid](products=products, weight=weight, factors=factors, **options)


def launch_gradients(
    approximate: str, eps: float, gradient: Tensor, products: Tensor, weight: Tensor | None, of_products: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the products' gradient; return activated states and gradients of maps, which make that of the weight."""
    batch, length, groups, slots, _ = products.shape
    shape, warps = Shape.of(approximate, products, weight)
    parts = max(1, cdiv(batch * length, MOST_ROWS))
    blocks = cdiv(batch * length, parts * shape.BLOCK_M.value)  # of a part
    activated = of_maps = None
    if weight is not None:
        weight = weight.contiguous()
        sizes = 2, groups * slots * parts, blocks * shape.BLOCK_M.value, weight.shape[2]
        activated, of_maps = products.new_empty(sizes)
    inputs = {"products": products, "weight": weight, "gradient": gradient, "strides": gradient.stride()}
    outputs = {"dproducts": of_products, "activated": activated, "dmaps": of_maps}
    options = {"tokens": batch * length, "length": length, "eps": eps, "shape": shape}
    # Grid: some tokens, a slot, a group of heads. As many warps again hold the gradients of what the others hold.
    factors_bwd_kernel[parts * blocks, slots, groups](**inputs, **outputs, **options, num_warps=2 * warps)
    return activated, of_maps


@triton.jit(do_not_specialize=["tokens"])
def partial_products_kernel(states, wide, products, tokens, channels, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """Products of all tokens with the weights of one slot and group, over a part of the hidden channels."""
    m = tl.arange(0, 16)  # `tl.dot` asks for as many rows; those past the tokens are zeros
    totals = ()
    for i in tl.static_range(len(wide)):
        totals = totals + (tl.zeros([16, wide[i].COLUMNS_PADDED], tl.float32),)
    channels_of_part = tl.cdiv(channels, tl.num_programs(0) * BLOCK_K) * BLOCK_K
    first = tl.program_id(0) * channels_of_part
    for start in range(first, tl.minimum(first + channels_of_part, channels), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = (m < tokens)[:, None] & (k < channels)[None, :]
        x = tl.load(states + m[:, None] * channels + k[None, :], mask=inside, other=0)
        sums = ()
        for i in tl.static_range(len(wide)):
            column = tl.arange(0, wide[i].COLUMNS_PADDED)
            row = tl.program_id(1) * wide[i].SLOT_STRIDE + tl.program_id(2) * wide[i].GROUP_STRIDE
            row += k * wide[i].HIDDEN_STRIDE
            inside = (k < channels)[:, None] & (column < wide[i].COLUMNS)[None, :]
            weights = tl.load(wide[i].weight + row[:, None] + column[None, :], mask=inside, other=0)
            sums = sums + (tl.dot(x, weights, totals[i], input_precision="ieee"),)
        totals = sums
    for i in tl.static_range(len(wide)):
        m, column = tl.arange(0, 16)[:, None], tl.arange(0, wide[i].COLUMNS_PADDED)[None, :]
        row = (m * tl.num_programs(2) + tl.program_id(2)) * tl.num_programs(1) + tl.program_id(1)
        # The columns of the second weight are the last ones.
        offsets = (row * tl.num_programs(0) + tl.program_id(0)) * WIDTH + i * (WIDTH - wide[i].COLUMNS) + column
        tl.store(products + offsets, totals[i], mask=(m < tokens) & (column < wide[i].COLUMNS))


@triton.jit
def _gelu(x, APPROXIMATE: tl.constexpr):
    """GELU and its derivative."""
    if APPROXIMATE == "tanh":
        share = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # (1 + tanh(x)) / 2 is sigmoid(2 x)
        slope = share * (1 - share) * (1.5957691216057308 + 0.21406644488780728 * x * x)
    else:
        share = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        slope = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return x * share, share + x * slope


@triton.jit
def _tanh(x):
    """The hyperbolic tangent; the difference of numbers near 1 has few digits of what is small."""
    return tl.where(tl.abs(x) < 0.01, x - x * x * x / 3, 2 * tl.sigmoid(2 * x) - 1)


@triton.jit
def _join_parts(products, shape):
    """Products [BLOCK_M, columns] in float32; the sums of parts in every row."""
    products = products.to(tl.float32)
    if shape.PARTS > 0:
        products = tl.broadcast_to(tl.sum(products, 0)[None, :], [shape.BLOCK_M, products.shape[1]])
    return products


@triton.jit
def _multiply(rows, is_row, weight, columns, inside, k_stride, shape, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """Rows of K numbers, activated as ACTIVATION says, times columns of the weight: [BLOCK_M, columns]."""
    # Weights stay in their type on their way to shared memory: in float32 too where autocast makes products in 16 bits.
    BLOCK_K: tl.constexpr = 16 if tl.float32 == DTYPE or weight.dtype.element_ty == tl.float32 else 32
    total = tl.zeros([shape.BLOCK_M, columns.shape[0]], tl.float32)
    for start in range(0, shape.INNER, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        states = tl.load(rows + k[None, :], mask=is_row[:, None] & (k < shape.INNER)[None, :], other=0)
        if ACTIVATION is not None:
            states = _gelu(_join_parts(states, shape), ACTIVATION)[0]  # [BLOCK_M, BLOCK_K]
        offsets = k[:, None] * k_stride + columns[None, :]
        weights = tl.load(weight + offsets, mask=(k < shape.INNER)[:, None] & inside[None, :], other=0)
        total = tl.dot(states.to(DTYPE), weights.to(DTYPE), total, input_precision="ieee")
    return total


@triton.jit
def _low_rank_factors(hidden, is_row, weight, eps, shape, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """Factors w1 / norm and w2 [BLOCK_M, channels, heads], and [BLOCK_M, channels, 1]: 1 / norm for w1, 1 for w2."""
    column = tl.arange(0, shape.CHANNELS_PADDED * shape.HEADS_PADDED)
    c, head = column // shape.HEADS_PADDED, column % shape.HEADS_PADDED
    inside = (c < shape.CHANNELS) & (head < shape.HEADS)
    maps = _multiply(hidden, is_row, weight, c * shape.HEADS + head, inside, shape.INNER, shape, ACTIVATION, DTYPE)
    maps = tl.reshape(maps, [shape.BLOCK_M, shape.CHANNELS_PADDED, shape.HEADS_PADDED])
    scale = tl.rsqrt(tl.sum(maps * maps, 2, keep_dims=True) / shape.HEADS + eps)
    scale = tl.where(tl.arange(0, shape.CHANNELS_PADDED)[None, :, None] < shape.CHANNELS // 2, scale, 1.0)
    return maps * scale, scale


@triton.jit(do_not_specialize=["tokens"])
def factors_fwd_kernel(products, weight, factors, tokens, eps, shape):
    """Factors of some tokens; or of one whose products are in parts, which all rows of its products stand for."""
    CHANNELS: tl.constexpr = shape.CHANNELS + (shape.WIDTH > shape.INNER)
    TOKENS: tl.constexpr = shape.BLOCK_M if shape.PARTS == 0 else 1
    slot, slots = tl.program_id(1), tl.num_programs(1)
    group, groups = tl.program_id(2), tl.num_programs(2)
    m, h = tl.arange(0, shape.BLOCK_M), tl.arange(0, shape.HEADS_PADDED)
    t = (tl.program_id(0) * TOKENS + m).to(tl.int64)
    is_token = (t < tokens) & (m < TOKENS)
    row, is_row = (t * groups + group) * slots + slot, is_token  # of the products
    if shape.PARTS > 0:
        part = tl.arange(0, shape.PARTS)
        row = ((tl.program_id(0) * groups + group) * slots + slot) * shape.PARTS + part
        is_row = part >= 0
    products += (row * shape.WIDTH)[:, None]
    factors += ((slot * tokens + t) * CHANNELS * groups + group)[:, None] * shape.HEADS + h[None, :]
    if shape.WIDTH > shape.INNER:  # on its way while the maps are made
        gates = tl.load(products + shape.INNER + h[None, :], mask=is_row[:, None] & (h < shape.HEADS)[None, :], other=0)
    if weight is not None:
        weight += (group * slots + slot) * shape.INNER * shape.INNER
        DTYPE: tl.constexpr = factors.dtype.element_ty
        low_rank, _ = _low_rank_factors(products, is_row, weight, eps, shape, shape.APPROXIMATE, DTYPE)
        c = tl.arange(0, shape.CHANNELS_PADDED)[None, :, None]
        inside = is_token[:, None, None] & (c < shape.CHANNELS) & (h < shape.HEADS)[None, None, :]
        tl.store(factors[:, None, :] + c * (groups * shape.HEADS), low_rank, mask=inside)
    if shape.WIDTH > shape.INNER:
        gates = _tanh(_join_parts(gates, shape))
        inside = is_token[:, None] & (h < shape.HEADS)[None, :]
        tl.store(factors + shape.CHANNELS * groups * shape.HEADS, gates, mask=inside)


@triton.jit(do_not_specialize=["tokens", "length"])
def factors_bwd_kernel(products, weight, gradient, strides, dproducts, activated, dmaps, tokens, length, eps, shape):
    """Gradients of products from those of factors; and what makes the weight's: activated states, gradients of maps."""
    slot, slots = tl.program_id(1), tl.num_programs(1)
    group, groups = tl.program_id(2), tl.num_programs(2)
    first, m, h = tl.program_id(0) * shape.BLOCK_M, tl.arange(0, shape.BLOCK_M), tl.arange(0, shape.HEADS_PADDED)
    t, is_token = first + m, first + m < tokens
    # Where a program begins may be far away, and what it reads from there on takes an index of 32 bits.
    offset = ((first.to(tl.int64) * groups + group) * slots + slot) * shape.WIDTH
    products = products + offset + (m * (groups * slots * shape.WIDTH))[:, None]
    dproducts = dproducts + offset + (m * (groups * slots * shape.WIDTH))[:, None]
    slot_stride, batch_stride, token_stride, channel_stride, head_stride = strides
    gradient += slot.to(tl.int64) * slot_stride + (first // length).to(tl.int64) * batch_stride
    rows = (t // length - first // length) * batch_stride + t % length * token_stride
    rows = ((group * shape.HEADS + h) * head_stride)[:, None] + rows[None, :]  # [heads, BLOCK_M]
    if weight is not None:
        branch = group * slots + slot
        weight += branch * shape.INNER * shape.INNER
        offset = (branch.to(tl.int64) * tl.num_programs(0) * shape.BLOCK_M + first) * shape.INNER
        activated = activated + offset + (m * shape.INNER)[:, None]
        dmaps = dmaps + offset + (m * shape.INNER)[:, None]
        # Read as a model's gradients lie in memory: channels side by side, then tokens, then heads.
        c = tl.arange(0, shape.CHANNELS_PADDED)
        inside = (h < shape.HEADS)[:, None, None] & is_token[None, :, None] & (c < shape.CHANNELS)[None, None, :]
        dfactors = tl.load(gradient + (rows[:, :, None] + c[None, None, :] * channel_stride), mask=inside, other=0)
        k = tl.arange(0, shape.CHANNELS_PADDED * shape.HEADS_PADDED)
        is_state = is_token[:, None] & (k < shape.INNER)[None, :]
        states = tl.load(products + k[None, :], mask=is_state, other=0).to(tl.float32)
        tl.store(activated + k[None, :], _gelu(states, shape.APPROXIMATE)[0], mask=(k < shape.INNER)[None, :])
        tl.debug_barrier()  # before other threads read them
        DTYPE: tl.constexpr = products.dtype.element_ty
        low_rank, scale = _low_rank_factors(activated, is_token, weight, eps, shape, None, DTYPE)
        dfactors = tl.permute(dfactors, 1, 2, 0).to(tl.float32)  # [BLOCK_M, channels, heads]
        along = tl.sum(dfactors * low_rank, 2, keep_dims=True) / shape.HEADS
        maps = tl.where(c[None, :, None] < shape.CHANNELS // 2, scale * (dfactors - low_rank * along), dfactors)
        maps = tl.where(is_token[:, None, None], maps, 0)  # which is NaN for no token if eps is 0
        inside = (c < shape.CHANNELS)[:, None] & (h < shape.HEADS)[None, :]
        columns = c[:, None] * shape.HEADS + h[None, :]
        tl.store(dmaps[:, :, None] + columns[None, :, :], maps, mask=inside[None, :, :])
        tl.debug_barrier()
        dstates = _multiply(dmaps, is_token, weight, k * shape.INNER, k < shape.INNER, 1, shape, None, DTYPE)
        # Computed once more, it takes no registers until here.
        states = tl.load(products + k[None, :], mask=is_state, other=0).to(tl.float32)
        tl.store(dproducts + k[None, :], dstates * _gelu(states, shape.APPROXIMATE)[1], mask=is_state)
    if shape.WIDTH > shape.INNER:
        inside = is_token[:, None] & (h < shape.HEADS)[None, :]
        gates = _tanh(tl.load(products + shape.INNER + h[None, :], mask=inside, other=0).to(tl.float32))
        dgates = tl.load(gradient + (tl.trans(rows) + shape.CHANNELS * channel_stride), mask=inside, other=0)
        tl.store(dproducts + shape.INNER + h[None, :], dgates.to(tl.float32) * (1 - gates * gates), mask=inside)
