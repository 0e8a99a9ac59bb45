"""Composed attention in chunks of queries, each over the keys that it can see: memory grows linearly with the sequence.

The form for every device and every mask. A chunk is recomputed in the backward pass; a graph that is traced for any
length holds one chunk of all queries.

Axis letters: b batch, g group, m and n heads of a group, t query, s key, r rank.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .dcmha_cpu import compute_dtype
from .dcmha_factors import ComposeSide, ComposeWeights, Parts, in_groups, map_tensors, slice_factors
from .dcmha_mask import Visibility


def chunked_attention(
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
    """As every implementation in the table; `chunk_size` queries at a time, chosen so that a chunk stays small."""
    batch, heads, queries = query.shape[:3]
    if not mask.lengths_are_known:
        # A graph for any length cannot hold one piece of code per chunk.
        hidden = mask.hidden(0, queries, 0, key.shape[2], query.device)
        bias = mask.bias(0, queries, 0, key.shape[2])
        return attend_block(query, key, value, pre, post, scaling=scaling, bias=bias, hidden=hidden, dropout=dropout)
    chunk_size = chunk_size or max(16, min(256, 2**26 // (batch * heads * key.shape[2] + 1)))
    recompute = torch.is_grad_enabled() and queries > chunk_size
    outputs = []
    for start in range(0, queries, chunk_size):
        stop = min(start + chunk_size, queries)
        first, last = mask.key_range(start, stop)
        arguments = (
            query[:, :, start:stop],
            key[:, :, first:last],
            value[:, :, first:last],
            slice_factors(pre, start, stop, first, last),
            slice_factors(post, start, stop, first, last),
        )
        options: dict[str, Any] = {
            "scaling": scaling,
            "bias": mask.bias(start, stop, first, last),
            "hidden": mask.hidden(start, stop, first, last, query.device),
            "dropout": dropout,
        }
        if recompute:
            outputs.append(checkpoint(attend_block, *arguments, use_reentrant=False, **options))
        else:
            outputs.append(attend_block(*arguments, **options))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def compose(attention: Tensor, weights: ComposeWeights | None) -> Tensor:
    """
    Mix attention scores or weights across heads: equation 7, batched over queries and keys as in equation 8.

    Args:
        attention (`Tensor`): (batch, heads, query, key).
        weights (`ComposeWeights`, *optional*): None leaves the heads as they are.

    Returns:
        `Tensor`: (batch, heads, query, key). Every term reads the un-composed input.
    """
    if weights is None:
        return attention
    a = in_groups(attention, weights.groups)  # (batch, group, head, query, key)
    w_q1, w_q2, w_qg = _grouped_parts(weights.query, weights.groups)
    w_k1, w_k2, w_kg = _grouped_parts(weights.key, weights.groups)
    terms = [
        static_term(a, weights.static),  # A W_b
        query_low_rank_term(a, w_q1, w_q2),  # (A W_q1) W_q2
        query_gate_term(a, w_qg),  # A * W_qg
        key_low_rank_term(a, w_k1, w_k2),  # (A W_k1) W_k2
        key_gate_term(a, w_kg),  # A * W_kg
    ]
    composed = a
    for term in terms:
        if term is not None:
            composed = composed + term
    return composed.flatten(1, 2)


def _grouped_parts(side: ComposeSide | None, groups: int) -> Parts:
    """w1 and w2 as (batch, group, head, length, rank), the gate without the rank."""
    if side is None:
        return None, None, None
    w1, w2, gate = (None if part is None else in_groups(part, groups) for part in (side.w1, side.w2, side.gate))
    return w1, w2, gate


def static_term(a: Tensor, static: Tensor | None) -> Tensor | None:
    return None if static is None else torch.einsum("bgmts,gmn->bgnts", a, static)


def query_gate_term(a: Tensor, gate: Tensor | None) -> Tensor | None:
    return None if gate is None else torch.einsum("bgmts,bgmt->bgmts", a, gate)


def key_gate_term(a: Tensor, gate: Tensor | None) -> Tensor | None:
    return None if gate is None else torch.einsum("bgmts,bgms->bgmts", a, gate)


def query_low_rank_term(a: Tensor, w1: Tensor | None, w2: Tensor | None) -> Tensor | None:
    if w1 is None or w2 is None:
        return None
    maps = torch.einsum("bgmts,bgmtr->bgrts", a, w1)
    return torch.einsum("bgrts,bgntr->bgnts", maps, w2)


def key_low_rank_term(a: Tensor, w1: Tensor | None, w2: Tensor | None) -> Tensor | None:
    if w1 is None or w2 is None:
        return None
    maps = torch.einsum("bgmts,bgmsr->bgrts", a, w1)
    return torch.einsum("bgrts,bgnsr->bgnts", maps, w2)


def attend_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    *,
    scaling: float,
    bias: Tensor | None,
    hidden: Tensor | None,
    dropout: float = 0.0,
) -> Tensor:
    """Appendix D, lines 43 to 48, for one block of queries and keys."""
    scores = scaled_scores(query, key, scaling)
    dtype = scores.dtype
    scores = compose(scores, _to_dtype(pre, dtype))
    if bias is not None:
        scores = scores + bias.to(dtype)
    if hidden is not None:
        scores = scores.masked_fill(hidden, torch.finfo(dtype).min)
    weights = scores.softmax(dim=-1)
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0.0)  # a query that sees no key at all
    weights = compose(weights, _to_dtype(post, dtype))
    if dropout > 0.0:
        weights = torch.nn.functional.dropout(weights, p=dropout)
    return weighted_values(weights, value, query.dtype)


def scaled_scores(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Scores (batch, heads, query, key) in float32, or float64 for float64 inputs; lines 43 and 44 of appendix D."""
    batch, heads, queries, channels = query.shape
    dtype = compute_dtype(query, key)
    query_key_dtype = query.dtype if query.dtype == key.dtype else torch.promote_types(query.dtype, key.dtype)
    # Folding the queries that share a key/value head into one matrix spares copying keys and values for each of them.
    query = query.to(query_key_dtype).reshape(batch * key.shape[1], -1, channels)
    key = key.to(query_key_dtype).reshape(batch * key.shape[1], -1, channels).transpose(1, 2)
    if query_key_dtype == dtype:
        scores = torch.baddbmm(query.new_empty(1), query, key, beta=0, alpha=scaling)
    else:
        # A power of two scales the query exactly, and before the product, which could leave the range of float16.
        power_of_two = 2.0 ** (math.frexp(scaling)[1] - 1)
        scores = torch.bmm(query * power_of_two, key).to(dtype) * (scaling / power_of_two)
    return scores.view(batch, heads, queries, -1)


def weighted_values(weights: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Values summed by their weights, (batch, heads, query, value channels); line 48 of appendix D."""
    batch, heads, queries, keys = weights.shape
    grouped_weights = weights.to(value.dtype).reshape(batch * value.shape[1], -1, keys)
    output = torch.bmm(grouped_weights, value.reshape(batch * value.shape[1], keys, -1))
    return output.to(dtype).view(batch, heads, queries, -1)


def _to_dtype(weights: ComposeWeights | None, dtype: torch.dtype) -> ComposeWeights | None:
    return map_tensors(weights, lambda tensor, _: tensor.to(dtype))
