"""Composed attention in torch's operators: the mathematics that every other backend computes faster."""

import functools
import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .types_dcformer import AttentionInputs, Observer, Weights, map_tensors
from .visibility_dcformer import Visibility, is_number


def compose(attention: Tensor, weights: Weights) -> Tensor:
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
    a = _in_groups(attention, weights.groups)  # (batch, group, head, query, key)
    composed = a
    if weights.static is not None:
        composed = composed + torch.einsum("bgmts,gmn->bgnts", a, weights.static)  # A W_b
    for side, axis in ((weights.query, "t"), (weights.key, "s")):
        if side is None:
            continue
        w1, w2, gate = (
            None if part is None else _in_groups(part, weights.groups) for part in (side.w1, side.w2, side.gate)
        )  # (batch, group, head, length, rank), the gate without the rank
        if w1 is not None and w2 is not None:
            low_rank = torch.einsum(f"bgmts,bgm{axis}r->bgrts", a, w1)  # (batch, group, rank, query, key)
            composed = composed + torch.einsum(f"bgrts,bgn{axis}r->bgnts", low_rank, w2)  # (A W_1) W_2
        if gate is not None:
            composed = composed + torch.einsum(f"bgmts,bgm{axis}->bgmts", a, gate)  # A * W_g
    return composed.flatten(1, 2)


def _in_groups(tensor: Tensor, groups: int) -> Tensor:
    """(batch, heads, ...) -> (batch, group, head of the group, ...)."""
    return tensor.reshape(tensor.shape[0], groups, tensor.shape[1] // groups, *tensor.shape[2:])


def plain_attention(inputs: AttentionInputs) -> Tensor:
    """
    Composed attention in torch operators, with derivatives of any order. Chunks of queries are computed over the keys
    that they can see, and again in the backward pass, so that memory grows linearly with the sequence.
    """
    (batch, heads, queries, _), keys, mask = inputs.query.shape, inputs.key.shape[2], inputs.mask
    if not mask.lengths_are_known:
        # A graph for all lengths cannot contain a loop over chunks.
        return attend_block(inputs, (0, queries, 0, keys))[0]
    # A program for every batch cannot have chunks for its own.
    rows = heads if torch.compiler.is_exporting() and not is_number(batch) else batch * heads
    blocks = plain_blocks(mask, rows, inputs.chunk_size)
    # Recomputing hooks into what a backward pass saves, which torch.func does not support.
    recompute = len(blocks) > 1 and torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
    attend = functools.partial(checkpoint, attend_block, use_reentrant=False) if recompute else attend_block
    outputs = [attend(inputs, block)[0] for block in blocks]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def plain_blocks(mask: Visibility, rows: int, chunk_size: int | None = None) -> list[tuple[int, int, int, int]]:
    """First and last + 1 of the queries, then of the keys, that [`plain_attention`] takes at once of so many heads."""
    queries, keys = mask.query_length, mask.key_length
    chunk_size = chunk_size or max(16, min(256, 2**26 // (rows * keys + 1)))
    bounds = ((start, min(start + chunk_size, queries)) for start in range(0, queries, chunk_size))
    return [(start, stop, *mask.key_range(start, stop)) for start, stop in bounds]


def attend_block(
    inputs: AttentionInputs, block: tuple[int, int, int, int], observe: Observer | None = None
) -> tuple[Tensor, Tensor]:
    """Appendix D, lines 43 to 48: the output and the composed weights (batch, heads, query, key) of a block."""
    start, stop, first, last = block  # of queries, and of keys
    query, key, value, pre, post, scaling, mask, dropout, _ = inputs
    output_dtype = query.dtype
    # Scores, softmax and compositions are computed in float32, or float64 if the query or the key is.
    dtype = torch.float64 if torch.float64 in (query.dtype, key.dtype) else torch.float32
    query, key, value = query[:, :, start:stop], key[:, :, first:last], value[:, :, first:last]
    if query.device.type == "cpu":
        # Most CPUs multiply 16-bit numbers far more slowly than 32-bit numbers.
        query, key, value = (states.to(dtype) for states in (query, key, value))

    def in_block(weights: Tensor, name: str) -> Tensor:
        if name != "static":
            weights = weights[:, :, start:stop] if name == "query" else weights[:, :, first:last]
        return weights.to(dtype)

    pre, post = (map_tensors(stage, in_block) for stage in (pre, post))
    bias, hidden = mask.bias(*block), mask.hidden(*block, query.device)
    observe = (lambda name, attention: attention) if observe is None else observe
    scores = observe("scores", _scaled_scores(query, key, scaling, dtype))  # (batch, heads, query, key)
    scores = observe("composed_scores", compose(scores, pre))
    if bias is not None:
        scores = scores + bias.to(dtype)
    if hidden is not None:
        scores = scores.masked_fill(hidden, torch.finfo(dtype).min)
    weights = scores.softmax(dim=-1)
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0.0)  # a query that sees no key at all
    weights = observe("composed_weights", compose(observe("weights", weights), post))
    if dropout > 0.0:
        weights = torch.nn.functional.dropout(weights, p=dropout)
    return _weighted_values(weights, value).to(output_dtype), weights


def _scaled_scores(query: Tensor, key: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """Scores (batch, heads, query, key) in `dtype`; lines 43 and 44 of appendix D."""
    product_dtype = torch.promote_types(query.dtype, key.dtype)
    # In 16 bits a power of two scales the query exactly, and before the product, which could leave float16's range.
    factor = scaling if product_dtype == dtype else 2.0 ** (math.frexp(scaling)[1] - 1)
    query = _by_key_head(query.to(product_dtype) * factor, key.shape[1])
    scores = torch.einsum("bkhtd,bksd->bkhts", query, key.to(product_dtype)).to(dtype)
    return (scores if factor == scaling else scores * (scaling / factor)).flatten(1, 2)


def _weighted_values(weights: Tensor, value: Tensor) -> Tensor:
    """Values summed by their weights, (batch, heads, query, value channels); line 48 of appendix D."""
    weights = _by_key_head(weights.to(value.dtype), value.shape[1])
    return torch.einsum("bkhts,bksd->bkhtd", weights, value).flatten(1, 2)


def _by_key_head(tensor: Tensor, key_heads: int) -> Tensor:
    """(batch, heads, ...) -> (batch, key/value head, head that shares it, ...), so that none has to be repeated."""
    return tensor.unflatten(1, (key_heads, tensor.shape[1] // key_heads))
