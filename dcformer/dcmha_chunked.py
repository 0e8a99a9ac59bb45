"""Composed attention in chunks of queries, each over the keys that it can see: memory grows linearly with the sequence.

The form for every device and every mask. A chunk is recomputed in the backward pass; a graph that is traced for any
length holds one chunk of all queries.

Axis letters: b batch, g group, m and n heads of a group, t query, s key, r rank.
"""

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .dcmha_cpu import compute_dtype
from .dcmha_factors import ComposeSide, ComposeWeights, map_tensors, slice_factors
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
        options = {
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
    low_rank = low_rank_of_one_query if attention.shape[2] == 1 else low_rank_of_queries
    a = attention.unflatten(1, (weights.groups, -1))  # (batch, group, head, query, key)
    w_q, w_k = (_of_groups(side, weights.groups) for side in (weights.query, weights.key))
    terms = [
        static_term(a, weights.static),  # A W_b
        low_rank(a, w_q.w1, w_q.w2, "query"),  # (A W_q1) W_q2
        gate_term(a, w_q.gate, "query"),  # A * W_qg
        low_rank(a, w_k.w1, w_k.w2, "key"),  # (A W_k1) W_k2
        gate_term(a, w_k.gate, "key"),  # A * W_kg
    ]
    composed = a
    for term in terms:
        if term is not None:
            composed = composed + term
    return composed.flatten(1, 2)


def _of_groups(side: ComposeSide | None, groups: int) -> ComposeSide:
    """w1 and w2 as (batch, rank, group, head, length), the gate as (batch, group, head, length)."""
    if side is None:
        return ComposeSide()
    return ComposeSide(*(None if w is None else w.unflatten(-2, (groups, -1)) for w in side))


def static_term(a: Tensor, static: Tensor | None) -> Tensor | None:
    return None if static is None else torch.einsum("bgmts,gmn->bgnts", a, static)


def gate_term(a: Tensor, gate: Tensor | None, side: str) -> Tensor | None:
    return None if gate is None else a * gate.unsqueeze(-1 if side == "query" else -2)


def low_rank_of_queries(a: Tensor, w1: Tensor | None, w2: Tensor | None, side: str) -> Tensor | None:
    """The map of low rank of the queries' or the keys' side."""
    if w1 is None:
        return None
    if side == "query":
        maps = torch.einsum("bgmts,brgmt->bgrts", a, w1)
        return torch.einsum("bgrts,brgnt->bgnts", maps, w2)
    maps = torch.einsum("bgmts,brgms->bgrts", a, w1)
    return torch.einsum("bgrts,brgns->bgnts", maps, w2)


def low_rank_of_one_query(a: Tensor, w1: Tensor | None, w2: Tensor | None, side: str) -> Tensor | None:
    """As `low_rank_of_queries`, in sums of products: einsum would multiply one tiny matrix per key."""
    if w1 is None:
        return None
    w1, w2 = (w.transpose(1, 2).unsqueeze(-1 if side == "query" else -2) for w in (w1, w2))
    # (batch, group, rank, head, query, key), one of the last two of length 1
    maps = (a.unsqueeze(2) * w1).sum(3)
    return (maps.unsqueeze(3) * w2).sum(2)


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
    output_dtype = query.dtype
    query_key_dtype = torch.promote_types(query.dtype, key.dtype)
    query, key = query.to(query_key_dtype), key.to(query_key_dtype)
    dtype = compute_dtype(query, key)
    # A power of two scales the query exactly, and before the product, which could leave the range of float16.
    power_of_two = 2.0 ** (math.frexp(scaling)[1] - 1)
    # Folding the queries that share a key/value head into one matrix spares copying keys and values for each of them.
    key_value_heads = key.shape[1]
    grouped_query = (query * power_of_two).unflatten(1, (key_value_heads, -1)).flatten(2, 3)
    scores = grouped_query.matmul(key.transpose(-1, -2)).to(dtype) * (scaling / power_of_two)
    scores = scores.unflatten(2, (-1, query.shape[2])).flatten(1, 2)  # (batch, heads, query, key)
    scores = compose(scores, _to_dtype(pre, dtype))
    if bias is not None:
        scores = scores + bias.to(dtype)
    if hidden is not None:
        scores = scores.masked_fill(hidden, torch.finfo(dtype).min)
    weights = scores.softmax(dim=-1)
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0.0)  # a query that sees no key at all
    weights = compose(weights, _to_dtype(post, dtype))
    weights = torch.nn.functional.dropout(weights, p=dropout, training=dropout > 0.0)
    grouped_weights = weights.to(value.dtype).unflatten(1, (key_value_heads, -1)).flatten(2, 3)
    output = grouped_weights.matmul(value).to(output_dtype)
    return output.unflatten(2, (-1, query.shape[2])).flatten(1, 2)  # (batch, heads, query, value channels)


def _to_dtype(weights: ComposeWeights | None, dtype: torch.dtype) -> ComposeWeights | None:
    return map_tensors(weights, lambda tensor, _: tensor.to(dtype))
