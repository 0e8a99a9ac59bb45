"""RMS norm and rotary position embedding of queries and keys in one kernel."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import cdiv, channels_last, new_states, next_power_of_2
from .tuning import constant


_BLOCK_H = 8  # heads of a program


class Heads(NamedTuple):
    """Queries or keys, and where they go when they are normalised and rotated."""

    states: Tensor  # (batch, heads, length, channels), any strides but that of the channels
    strides: tuple[int, ...]  # of its first three dimensions
    result: Tensor  # (batch, heads, length, channels), which lies in memory as (batch, length, heads, channels)
    weight: Tensor | None  # (channels,) of the norm
    eps: float
    NUMBER: tl.constexpr
    CHANNELS: tl.constexpr
    CHANNELS_PADDED: tl.constexpr

    @classmethod
    def of(cls, states: Tensor, weight: Tensor | None, eps: float) -> "Heads":
        """Describe queries or keys, with memory for the result."""
        states = channels_last(states)
        heads, channels = states.shape[1], states.shape[3]
        sizes = map(constant, (heads, channels, next_power_of_2(channels)))
        return cls(states, states.stride()[:3], new_states(states, states.shape), weight, eps, *sizes)


def launch_rotation(query: Heads, key: Heads, cosine: Tensor | None, sine: Tensor | None) -> None:
    """Normalise and rotate by cosine and sine, (batch or 1, length, rotary size) in float32: the first channels."""
    batch, _, length, _ = query.states.shape
    rotary, strides = 0, (0, 0)
    if cosine is not None and sine is not None:
        cosine, sine = cosine.contiguous(), sine.contiguous()
        rotary, strides = cosine.shape[2], (cosine.stride(0) if cosine.shape[0] > 1 else 0, cosine.stride(1))
    angles = {"cosine": cosine, "sine": sine, "strides": strides, "length": length}
    # Grid: a token, a block of the heads of queries, then of keys.
    grid = batch * length, sum(cdiv(heads.NUMBER.value, _BLOCK_H) for heads in (query, key))
    with torch.cuda.device_of(query.states):
        rotation_fwd_kernel[grid](query=query, key=key, **angles, ROTARY=rotary, BLOCK_H=_BLOCK_H, num_warps=4)


@triton.jit
def rotation_fwd_kernel(query, key, cosine, sine, strides, length, ROTARY: tl.constexpr, BLOCK_H: tl.constexpr):
    """Some heads of the queries or the keys of a token."""
    t = tl.program_id(0)
    b, position = (t // length).to(tl.int64), t % length
    angles = b * strides[0] + position * strides[1]
    block, blocks = tl.program_id(1), tl.cdiv(query.NUMBER, BLOCK_H)
    if block < blocks:
        _rotate(query, cosine, sine, angles, t, b, position, block, ROTARY, BLOCK_H)
    else:
        _rotate(key, cosine, sine, angles, t, b, position, block - blocks, ROTARY, BLOCK_H)


@triton.jit
def _rotate(heads, cosine, sine, angles, t, b, position, block, ROTARY: tl.constexpr, BLOCK_H: tl.constexpr):
    """Normalise and rotate a block of heads at position t of all rows."""
    h, c = block * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, heads.CHANNELS_PADDED)
    inside = (h < heads.NUMBER)[:, None] & (c < heads.CHANNELS)[None, :]
    rows = heads.states + b * heads.strides[0] + h * heads.strides[1] + position.to(tl.int64) * heads.strides[2]
    x = _normalised(heads, rows, c, inside)
    if cosine is not None:
        HALF: tl.constexpr = ROTARY // 2
        is_first, is_rotary = c < HALF, c < ROTARY
        # The other channel of each pair, from what was read already.
        y = _normalised(heads, rows, tl.where(is_first, c + HALF, tl.where(is_rotary, c - HALF, c)), inside)
        cosines = tl.load(cosine + angles + c, mask=is_rotary, other=1.0)
        sines = tl.load(sine + angles + c, mask=is_rotary, other=0.0)
        x = x * cosines[None, :] + y * tl.where(is_first, -sines, sines)[None, :]
    results = heads.result + (t.to(tl.int64) * heads.NUMBER + h)[:, None] * heads.CHANNELS + c[None, :]
    tl.store(results, x.to(heads.result.dtype.element_ty), mask=inside)


@triton.jit
def _normalised(heads, rows, c, inside):
    """Channels [heads, channels] in float32, rounded to the norm's type if there is one."""
    x = tl.load(rows[:, None] + c[None, :], mask=inside, other=0.0).to(tl.float32)
    if heads.weight is not None:
        x *= tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / heads.CHANNELS + heads.eps)
        weight = tl.load(heads.weight + c, mask=c < heads.CHANNELS, other=0.0).to(tl.float32)
        x = (x * weight[None, :]).to(heads.result.dtype.element_ty).to(tl.float32)
    return x
