"""Composed attention in plain torch operators: every device, every mask, every type, and derivatives of any order.

Queries are taken in chunks, each over the keys that it can see, so that memory grows linearly with the sequence. A
chunk is recomputed in the backward pass; a graph that is traced for any length holds one chunk of all queries.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .dcmha_factors import ComposeWeights, in_groups, map_tensors, slice_factors
from .dcmha_mask import Visibility


def plain_attention(
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
    """
    As every implementation in the table.

    Args:
        chunk_size (`int`, *optional*): Queries computed at once. None: chosen so that a chunk stays small.
    """
    batch, heads, queries, _ = query.shape
    if not mask.lengths_are_known:
        # A graph for any length cannot hold one piece of code per chunk.
        options: dict[str, Any] = {"scaling": scaling, "mask": mask, "dropout": dropout}
        return plain_attention_with_weights(query, key, value, pre, post, **options)[0]
    chunk_size = chunk_size or max(16, min(256, 2**26 // (batch * heads * key.shape[2] + 1)))
    recompute = queries > chunk_size and torch.is_grad_enabled()
    # Recomputing hooks into what a backward pass saves, which torch.func has no place for.
    recompute = recompute and not torch._C._are_functorch_transforms_active()
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
            mask.bias(start, stop, first, last),
            mask.hidden(start, stop, first, last, query.device),
            scaling,
            dropout,
        )
        if recompute:
            outputs.append(checkpoint(_attend_block, *arguments, use_reentrant=False)[0])
        else:
            outputs.append(_attend_block(*arguments)[0])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def plain_attention_with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    *,
    scaling: float,
    mask: Visibility,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The output, and the composed weights (batch, heads, query, key) in the query's dtype, all at once."""
    bias = mask.bias(0, query.shape[2], 0, key.shape[2])
    hidden = mask.hidden(0, query.shape[2], 0, key.shape[2], query.device)
    output, weights = _attend_block(query, key, value, pre, post, bias, hidden, scaling, dropout)
    return output, weights.to(query.dtype)


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
    # Axis letters: b batch, g group, m and n heads of a group (in and out), t query, s key, r rank.
    a = in_groups(attention, weights.groups)  # (batch, group, head, query, key)
    composed = a
    if weights.static is not None:
        composed = composed + torch.einsum("bgmts,gmn->bgnts", a, weights.static)  # A W_b
    for side, axis in ((weights.query, "t"), (weights.key, "s")):
        if side is None:
            continue
        w1, w2, gate = (
            None if part is None else in_groups(part, weights.groups) for part in (side.w1, side.w2, side.gate)
        )  # (batch, group, head, length, rank), the gate without the rank
        if w1 is not None and w2 is not None:
            low_rank = torch.einsum(f"bgmts,bgm{axis}r->bgrts", a, w1)  # (batch, group, rank, query, key)
            composed = composed + torch.einsum(f"bgrts,bgn{axis}r->bgnts", low_rank, w2)  # (A W_1) W_2
        if gate is not None:
            composed = composed + torch.einsum(f"bgmts,bgm{axis}->bgmts", a, gate)  # A * W_g
    return composed.flatten(1, 2)


def _attend_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    bias: Tensor | None,
    hidden: Tensor | None,
    scaling: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Appendix D, lines 43 to 48: the output and the composed weights of a block of queries over a block of keys."""
    output_dtype, dtype = query.dtype, compute_dtype(query, key)
    if query.device.type == "cpu":
        # Most CPUs multiply numbers of 16 bits by far more slowly than those of 32.
        query, key, value = (states.to(dtype) for states in (query, key, value))
    pre, post = (map_tensors(stage, lambda tensor, _: tensor.to(dtype)) for stage in (pre, post))
    scores = compose(_scaled_scores(query, key, scaling), pre)  # (batch, heads, query, key)
    if bias is not None:
        scores = scores + bias.to(dtype)
    if hidden is not None:
        scores = scores.masked_fill(hidden, torch.finfo(dtype).min)
    weights = scores.softmax(dim=-1)
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0.0)  # a query that sees no key at all
    weights = compose(weights, post)
    if dropout > 0.0:
        weights = torch.nn.functional.dropout(weights, p=dropout)
    return _weighted_values(weights, value).to(output_dtype), weights


def _scaled_scores(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Scores (batch, heads, query, key) in float32, or float64 for float64 inputs; lines 43 and 44 of appendix D."""
    batch, heads, queries, channels = query.shape
    product_dtype, dtype = torch.promote_types(query.dtype, key.dtype), compute_dtype(query, key)
    # Folding the queries that share a key/value head into one matrix spares copying keys and values for each of them.
    query = query.to(product_dtype).reshape(batch * key.shape[1], -1, channels)
    key = key.to(product_dtype).reshape(batch * key.shape[1], -1, channels)
    # In 16 bits a power of two scales the query exactly, and before the product, which could leave float16's range.
    factor = scaling if product_dtype == dtype else 2.0 ** (math.frexp(scaling)[1] - 1)
    scores = torch.bmm(query * factor, key.mT).to(dtype)
    scores = scores if factor == scaling else scores * (scaling / factor)
    return scores.view(batch, heads, queries, -1)


def _weighted_values(weights: Tensor, value: Tensor) -> Tensor:
    """Values summed by their weights, (batch, heads, query, value channels); line 48 of appendix D."""
    batch, heads, queries, keys = weights.shape
    grouped_weights = weights.to(value.dtype).reshape(batch * value.shape[1], -1, keys)
    output = torch.bmm(grouped_weights, value.reshape(batch * value.shape[1], keys, -1))
    return output.view(batch, heads, queries, -1)


def compute_dtype(query: Tensor, key: Tensor) -> torch.dtype:
    """float64 if either is, else float32: what scores, softmax and compositions are computed in."""
    return torch.float64 if torch.float64 in (query.dtype, key.dtype) else torch.float32
