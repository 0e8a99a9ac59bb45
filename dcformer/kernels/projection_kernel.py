"""The kernels of `projection`: what follows the wide product, for some tokens, one slot and one group of heads."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


MOST_ROWS = 512  # tokens of one product for the weight's gradient: few long ones would leave a GPU without work


class Shape(NamedTuple):
    APPROXIMATE: tl.constexpr
    RANK: tl.constexpr
    HEADS: tl.constexpr  # of a group
    WIDTH: tl.constexpr  # of a slot's products: K, then gates
    CHANNELS_PADDED: tl.constexpr
    HEADS_PADDED: tl.constexpr
    BLOCK_M: tl.constexpr  # tokens of a program

    @classmethod
    def of(cls, approximate: str, products: Tensor, weight: Tensor | None) -> tuple["Shape", int]:
        """With the warps of a program."""
        tokens, width = products.shape[:2].numel(), products.shape[4]
        channels, heads = (0, width) if weight is None else weight.shape[3:]
        channels_padded = triton.next_power_of_2(max(channels, 1))
        columns = max(channels_padded * triton.next_power_of_2(heads), 16)  # as `tl.dot` asks for
        # More tokens share what is read of the weights, fewer leave registers, and programs for more of a GPU.
        block = 32 if tokens > 1024 and columns <= 128 else 16
        sizes = channels // 2, heads, width, channels_padded, columns // channels_padded, block
        return cls(*map(tl.constexpr, (approximate, *sizes))), 8 if columns > 256 else 4


def launch_factors(approximate: str, eps: float, products: Tensor, weight: Tensor | None, factors: Tensor) -> None:
    """Compute the factors, (slot, batch, length, channel, all heads)."""
    batch, length, groups, slots, _ = products.shape
    shape, warps = Shape.of(approximate, products, weight)
    weight = None if weight is None else weight.contiguous()
    grid = triton.cdiv(batch * length, shape.BLOCK_M.value), slots, groups
    _factors_kernel[grid](products, weight, factors, batch * length, eps, shape, num_warps=warps)


def launch_gradients(
    approximate: str, eps: float, gradient: Tensor, products: Tensor, weight: Tensor | None, of_products: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """
    Compute the gradient of the products from that of the factors, of any strides. Return what products over the tokens
    make the weight's of: activated states and gradients of the maps, (groups x slots x parts, tokens of a part, K).
    """
    batch, length, groups, slots, _ = products.shape
    shape, warps = Shape.of(approximate, products, weight)
    parts = max(1, triton.cdiv(batch * length, MOST_ROWS))
    blocks = triton.cdiv(batch * length, parts * shape.BLOCK_M.value)  # of a part
    activated = of_maps = None
    if weight is not None:
        weight = weight.contiguous()
        activated = products.new_empty(groups * slots * parts, blocks * shape.BLOCK_M.value, weight.shape[2])
        of_maps = torch.empty_like(activated)
    tensors = products, weight, gradient, gradient.stride(), of_products, activated, of_maps
    # As many warps again hold the gradients of what the others hold.
    _gradients_kernel[(parts * blocks, slots, groups)](
        *tensors, batch * length, length, eps, shape, num_warps=2 * warps
    )
    return activated, of_maps


@triton.jit
def _gelu(x, APPROXIMATE: tl.constexpr):
    """And its derivative."""
    if APPROXIMATE == "tanh":
        share = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # (1 + tanh(x)) / 2 is sigmoid(2 x)
        slope = share * (1 - share) * (1.5957691216057308 + 0.21406644488780728 * x * x)
    else:
        share = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        slope = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return x * share, share + x * slope


@triton.jit
def _tanh(x):
    # The difference of numbers near 1 has few digits of what is small.
    return tl.where(tl.abs(x) < 0.01, x - x * x * x / 3, 2 * tl.sigmoid(2 * x) - 1)


@triton.jit
def _multiply(rows, is_token, weight, k_stride, columns, is_column, INNER: tl.constexpr, ACTIVATION: tl.constexpr):
    """[BLOCK_M, columns]: rows of INNER numbers, which ACTIVATION says how to activate first, by the weight."""
    BLOCK_K: tl.constexpr = 512 // rows.dtype.element_ty.primitive_bitwidth
    total = tl.zeros([is_token.shape[0], columns.shape[0]], tl.float32)
    for start in range(0, INNER, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        states = tl.load(rows + k[None, :], mask=is_token[:, None] & (k < INNER)[None, :], other=0)
        if ACTIVATION is not None:
            states = _gelu(states.to(tl.float32), ACTIVATION)[0].to(states.dtype)  # [BLOCK_M, BLOCK_K]
        offsets = k[:, None] * k_stride + columns[None, :]
        weights = tl.load(weight + offsets, mask=(k < INNER)[:, None] & is_column[None, :], other=0)
        total = tl.dot(states, weights.to(states.dtype), total, input_precision="ieee")
    return total


@triton.jit
def _low_rank_factors(hidden, is_token, weight, eps, shape, ACTIVATION: tl.constexpr):
    """[BLOCK_M, channels, heads]: w1 / norm, w2; and [BLOCK_M, channels, 1]: 1 / norm for w1, 1 for w2."""
    INNER: tl.constexpr = 2 * shape.RANK * shape.HEADS
    column = tl.arange(0, shape.CHANNELS_PADDED * shape.HEADS_PADDED)
    c, head = column // shape.HEADS_PADDED, column % shape.HEADS_PADDED
    is_column = (c < 2 * shape.RANK) & (head < shape.HEADS)
    maps = _multiply(hidden, is_token, weight, INNER, c * shape.HEADS + head, is_column, INNER, ACTIVATION)
    maps = tl.reshape(maps, [is_token.shape[0], shape.CHANNELS_PADDED, shape.HEADS_PADDED])
    scale = tl.rsqrt(tl.sum(maps * maps, 2, keep_dims=True) / shape.HEADS + eps)
    scale = tl.where(tl.arange(0, shape.CHANNELS_PADDED)[None, :, None] < shape.RANK, scale, 1.0)
    return maps * scale, scale


@triton.jit(do_not_specialize=["tokens"])
def _factors_kernel(products, weight, factors, tokens, eps, shape):
    INNER: tl.constexpr = 2 * shape.RANK * shape.HEADS
    CHANNELS: tl.constexpr = 2 * shape.RANK + (shape.WIDTH > INNER)
    slot, slots = tl.program_id(1), tl.num_programs(1)
    group, groups = tl.program_id(2), tl.num_programs(2)
    t = (tl.program_id(0) * shape.BLOCK_M + tl.arange(0, shape.BLOCK_M)).to(tl.int64)
    is_token, h = t < tokens, tl.arange(0, shape.HEADS_PADDED)
    products += (((t * groups + group) * slots + slot) * shape.WIDTH)[:, None]
    factors += ((slot * tokens + t) * CHANNELS * groups + group)[:, None] * shape.HEADS + h[None, :]
    if weight is not None:
        weight += (group * slots + slot) * INNER * INNER
        low_rank, _ = _low_rank_factors(products, is_token, weight, eps, shape, shape.APPROXIMATE)
        c = tl.arange(0, shape.CHANNELS_PADDED)[None, :, None]
        inside = is_token[:, None, None] & (c < 2 * shape.RANK) & (h < shape.HEADS)[None, None, :]
        tl.store(factors[:, None, :] + c * (groups * shape.HEADS), low_rank, mask=inside)
    if shape.WIDTH > INNER:
        inside = is_token[:, None] & (h < shape.HEADS)[None, :]
        gates = tl.load(products + INNER + h[None, :], mask=inside, other=0).to(tl.float32)
        tl.store(factors + 2 * shape.RANK * groups * shape.HEADS, _tanh(gates), mask=inside)


@triton.jit(do_not_specialize=["tokens", "length"])
def _gradients_kernel(products, weight, gradient, strides, of_products, activated, of_maps, tokens, length, eps, shape):
    INNER: tl.constexpr = 2 * shape.RANK * shape.HEADS
    slot, slots = tl.program_id(1), tl.num_programs(1)
    group, groups = tl.program_id(2), tl.num_programs(2)
    first, m, h = tl.program_id(0) * shape.BLOCK_M, tl.arange(0, shape.BLOCK_M), tl.arange(0, shape.HEADS_PADDED)
    t, is_token = first + m, first + m < tokens
    # Where a program begins may be far away, and what it reads from there on takes an index of 32 bits.
    offset = ((first.to(tl.int64) * groups + group) * slots + slot) * shape.WIDTH
    products = products + offset + (m * (groups * slots * shape.WIDTH))[:, None]
    of_products = of_products + offset + (m * (groups * slots * shape.WIDTH))[:, None]
    slot_stride, batch_stride, token_stride, channel_stride, head_stride = strides
    gradient += slot.to(tl.int64) * slot_stride + (first // length).to(tl.int64) * batch_stride
    rows = (t // length - first // length) * batch_stride + t % length * token_stride
    rows = ((group * shape.HEADS + h) * head_stride)[:, None] + rows[None, :]  # [heads, BLOCK_M]
    if weight is not None:
        branch = group * slots + slot
        weight += branch * INNER * INNER
        offset = (branch.to(tl.int64) * tl.num_programs(0) * shape.BLOCK_M + first) * INNER
        activated = activated + offset + (m * INNER)[:, None]
        of_maps = of_maps + offset + (m * INNER)[:, None]
        # Read as a model's gradients lie in memory: channels side by side, then tokens, then heads.
        c = tl.arange(0, shape.CHANNELS_PADDED)
        inside = (h < shape.HEADS)[:, None, None] & is_token[None, :, None] & (c < 2 * shape.RANK)[None, None, :]
        of_factors = tl.load(gradient + (rows[:, :, None] + c[None, None, :] * channel_stride), mask=inside, other=0)
        k = tl.arange(0, shape.CHANNELS_PADDED * shape.HEADS_PADDED)
        is_state = is_token[:, None] & (k < INNER)[None, :]
        states = tl.load(products + k[None, :], mask=is_state, other=0).to(tl.float32)
        tl.store(activated + k[None, :], _gelu(states, shape.APPROXIMATE)[0], mask=(k < INNER)[None, :])
        tl.debug_barrier()  # before other threads read them
        low_rank, scale = _low_rank_factors(activated, is_token, weight, eps, shape, None)
        of_factors = tl.permute(of_factors, 1, 2, 0).to(tl.float32)  # [BLOCK_M, channels, heads]
        along = tl.sum(of_factors * low_rank, 2, keep_dims=True) / shape.HEADS
        maps = tl.where(c[None, :, None] < shape.RANK, scale * (of_factors - low_rank * along), of_factors)
        maps = tl.where(is_token[:, None, None], maps, 0)  # which is NaN for no token if eps is 0
        inside = (c < 2 * shape.RANK)[:, None] & (h < shape.HEADS)[None, :]
        columns = c[:, None] * shape.HEADS + h[None, :]
        tl.store(of_maps[:, :, None] + columns[None, :, :], maps, mask=inside[None, :, :])
        tl.debug_barrier()
        of_states = _multiply(of_maps, is_token, weight, 1, k * INNER, k < INNER, INNER, None)
        # Computed once more, it takes no registers until here.
        states = tl.load(products + k[None, :], mask=is_state, other=0).to(tl.float32)
        tl.store(of_products + k[None, :], of_states * _gelu(states, shape.APPROXIMATE)[1], mask=is_state)
    if shape.WIDTH > INNER:
        inside = is_token[:, None] & (h < shape.HEADS)[None, :]
        gates = _tanh(tl.load(products + INNER + h[None, :], mask=inside, other=0).to(tl.float32))
        of_gates = tl.load(gradient + (tl.trans(rows) + 2 * shape.RANK * channel_stride), mask=inside, other=0)
        tl.store(of_products + INNER + h[None, :], of_gates.to(tl.float32) * (1 - gates * gates), mask=inside)
