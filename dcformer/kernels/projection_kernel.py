"""The kernel of `projection`: what follows the wide products, for some tokens, one slot and one group of heads."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor


def launch_factors(approximate: str, eps: float, hidden: Any, weight: Any, gates: Any, factors: Tensor) -> None:
    """Compute the factors, (slot, token, channel, all heads)."""
    slots, tokens, channels, all_heads = factors.shape
    groups = gates.shape[1] if hidden is None else hidden.shape[1]
    heads, rank = all_heads // groups, channels // 2
    channels_padded = triton.next_power_of_2(max(2 * rank, 1))
    columns = max(channels_padded * triton.next_power_of_2(heads), 16)  # as `tl.dot` asks for
    # More tokens share what is read of the weights, fewer leave registers, and programs for more of a GPU.
    block = 32 if tokens > 1024 and columns <= 128 else 16
    _factors_kernel[(triton.cdiv(tokens, block), slots, groups)](
        *(hidden, None if weight is None else weight.contiguous(), gates, factors, tokens, eps, approximate),
        *(rank, heads, channels_padded, columns // channels_padded, block),
        num_warps=8 if columns > 256 else 4,
    )


@triton.jit
def _gelu(x, APPROXIMATE: tl.constexpr):
    if APPROXIMATE == "tanh":
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # (1 + tanh(x)) / 2 is sigmoid(2 x)
    else:
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))


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
    BLOCK_M: tl.constexpr,
):
    CHANNELS: tl.constexpr = 2 * RANK + (gates is not None)
    slot, slots = tl.program_id(1), tl.num_programs(1)
    group, groups = tl.program_id(2), tl.num_programs(2)
    t = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    row, is_token = (t * groups + group) * slots + slot, t < tokens  # of the products
    h = tl.arange(0, HEADS_PADDED)
    factors += ((slot * tokens + t) * CHANNELS * groups + group)[:, None] * HEADS + h[None, :]  # [BLOCK_M, HEADS]
    if hidden is not None:
        INNER: tl.constexpr = 2 * RANK * HEADS
        BLOCK_K: tl.constexpr = 512 // hidden.dtype.element_ty.primitive_bitwidth
        column = tl.arange(0, CHANNELS_PADDED * HEADS_PADDED)
        c, head = column // HEADS_PADDED, column % HEADS_PADDED
        is_column = (c < 2 * RANK) & (head < HEADS)
        maps = tl.zeros([BLOCK_M, CHANNELS_PADDED * HEADS_PADDED], tl.float32)
        for start in range(0, INNER, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            inside = is_token[:, None] & (k < INNER)[None, :]
            states = tl.load(hidden + row[:, None] * INNER + k[None, :], mask=inside, other=0)  # [BLOCK_M, BLOCK_K]
            states = _gelu(states.to(tl.float32), APPROXIMATE).to(states.dtype)
            offsets = ((group * slots + slot) * INNER + k)[:, None] * INNER + (c * HEADS + head)[None, :]
            weights = tl.load(weight + offsets, mask=(k < INNER)[:, None] & is_column[None, :], other=0)
            maps = tl.dot(states, weights.to(states.dtype), maps, input_precision="ieee")
        maps = tl.reshape(maps, [BLOCK_M, CHANNELS_PADDED, HEADS_PADDED])
        channel = tl.arange(0, CHANNELS_PADDED)[None, :, None]
        scale = tl.rsqrt(tl.sum(maps * maps, 2, keep_dims=True) / HEADS + eps)
        maps = tl.where(channel < RANK, maps * scale, maps)
        inside = is_token[:, None, None] & (channel < 2 * RANK) & (h < HEADS)[None, None, :]
        tl.store(factors[:, None, :] + channel * (groups * HEADS), maps, mask=inside)
    if gates is not None:
        inside = is_token[:, None] & (h < HEADS)[None, :]
        gate = tl.load(gates + row[:, None] * HEADS + h[None, :], mask=inside, other=0).to(tl.float32)
        # The difference of numbers near 1 has few digits of what is small.
        hyperbolic = tl.where(tl.abs(gate) < 0.01, gate - gate * gate * gate / 3, 2 * tl.sigmoid(2 * gate) - 1)
        tl.store(factors + 2 * RANK * groups * HEADS, hyperbolic, mask=inside)
