"""Composed attention of one query over many keys: a decoding step.

With one query a composition has almost no arithmetic, so what counts is the number of operations and in which order
they read memory. The keys' factors lie in rows behind the cached keys and values; each channel is first laid out along
the keys, and then equation 7 takes eight operations on (heads, keys).
"""

import functools

import torch
from torch import Tensor

from .dcmha_chunked import scaled_scores, weighted_values
from .dcmha_factors import ComposeSide, ComposeWeights, Parts, split_channels
from .dcmha_mask import Visibility


def one_query_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    *,
    scaling: float,
    mask: Visibility,
    dropout: float = 0.0,
    chunk_size: int | None = None,
) -> Tensor:
    """As every implementation in the table, for a single query; `chunk_size` means nothing here."""
    keys, dtype = key.shape[2], query.dtype
    if _is_slow_in_16_bits(key):
        query, key, value = query.float(), key.float(), value.float()
    scores = scaled_scores(query, key, scaling)  # (batch, heads, 1, key)
    scores = compose_one_query(scores, pre)
    bias, hidden = mask.bias(0, 1, 0, keys), mask.hidden(0, 1, 0, keys, query.device)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if hidden is not None:
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1)
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0.0)  # a query that sees no key at all
    weights = compose_one_query(weights, post)
    if dropout > 0.0:
        weights = torch.nn.functional.dropout(weights, p=dropout)
    return weighted_values(weights, value, dtype)


def _is_slow_in_16_bits(states: Tensor) -> bool:
    """
    Whether converting to float32 first is quicker: on a CPU oneDNN sets out a product of 16-bit numbers anew for every
    number of keys that it meets, which takes several times as long as the product and the conversion together.
    """
    in_16_bits = states.dtype == torch.bfloat16 or states.dtype == torch.float16
    return in_16_bits and states.device.type == "cpu" and not torch.compiler.is_compiling()


def compose_one_query(attention: Tensor, weights: ComposeWeights | None) -> Tensor:
    """
    Equation 7 on the scores or weights of one query.

    Args:
        attention (`Tensor`): (batch, heads, 1, key).
        weights (`ComposeWeights`, *optional*): None leaves the heads as they are.

    Returns:
        `Tensor`: (batch, heads, 1, key).
    """
    if weights is None:
        return attention
    # Every group of heads composes for itself, as if it were a row of the batch.
    heads = attention.shape[1] // weights.groups
    a = attention.reshape(-1, heads, attention.shape[3])  # (batch x groups, head, key)
    w_q1, w_q2, w_qg = _of_query(weights.query, heads, a.dtype)
    w_k1, w_k2, w_kg = _of_keys(weights.key, heads, a.dtype)
    composed = a
    if w_qg is not None and w_kg is not None:
        composed = torch.addcmul(composed, a, w_qg + w_kg)  # A * W_qg + A * W_kg, in one pass
    elif w_qg is not None:
        composed = torch.addcmul(composed, a, w_qg)
    elif w_kg is not None:
        composed = torch.addcmul(composed, a, w_kg)
    if weights.static is not None:
        static = weights.static.to(a.dtype).transpose(1, 2).repeat(attention.shape[0], 1, 1)
        composed = torch.baddbmm(composed, static, a)  # A W_b
    if w_q1 is not None and w_q2 is not None:
        composed = torch.baddbmm(composed, w_q2, torch.bmm(w_q1.transpose(1, 2), a))  # (A W_q1) W_q2
    if w_k1 is not None and w_k2 is not None:
        maps = torch.linalg.vecdot(a, w_k1, dim=2).unsqueeze(2)  # (rank, batch x groups, 1, key)
        composed = composed + torch.linalg.vecdot(maps, w_k2, dim=0)  # (A W_k1) W_k2
    return composed.view_as(attention)


def _of_query(side: ComposeSide | None, heads: int, dtype: torch.dtype) -> Parts:
    """w1 and w2 as (batch x groups, head, rank), the gate as (batch x groups, head, 1)."""
    if side is None:
        return None, None, None
    channels = side.factors.shape[3]
    return split_channels(side.factors.reshape(-1, heads, channels).to(dtype), dim=2)


def _of_keys(side: ComposeSide | None, heads: int, dtype: torch.dtype) -> Parts:
    """w1 and w2 as (rank, batch x groups, head, key), the gate as (batch x groups, head, key)."""
    if side is None:
        return None, None, None
    factors, (_, _, keys, channels) = side.factors, side.factors.shape
    if _is_slow_in_16_bits(factors):
        turned = factors.new_empty(channels, factors.shape[0], factors.shape[1], keys, dtype=dtype)
        factors = turned.copy_(factors.permute(3, 0, 1, 2)).view(channels, -1, heads, keys)
    elif factors.device.type == "cpu":
        # Reading one channel of every row is slow on CPUs; a product with the identity turns all of them at once.
        factors = torch.mm(_identity(channels, factors.dtype), factors.reshape(-1, channels).t())
        factors = factors.view(channels, -1, heads, keys)
    else:
        factors = factors.reshape(-1, heads, keys, channels).permute(3, 0, 1, 2)
    w1, w2, gate = split_channels(factors.to(dtype), dim=0)
    return w1, w2, None if gate is None else gate[0]


def _identity(size: int, dtype: torch.dtype) -> Tensor:
    return torch.eye(size, dtype=dtype) if torch.compiler.is_compiling() else _kept_identity(size, dtype)


@functools.cache
@torch.inference_mode(False)
def _kept_identity(size: int, dtype: torch.dtype) -> Tensor:
    return torch.eye(size, dtype=dtype)
