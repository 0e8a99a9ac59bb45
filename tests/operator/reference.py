"""Composed attention as appendix D of the paper writes it: what every implementation is held to.

It holds the scores of all heads, queries and keys at once, in float32 at least and in float64 for float64 inputs, and
shares nothing with the implementations but the classes of its arguments.

Axis letters: b batch, j and h heads (in and out), t query, s key, l either of them, r rank, d channel.
"""

import torch
from torch import Tensor

from dcformer.dcmha import ComposeSide, ComposeWeights, Visibility, map_tensors


def composed_attention_reference(
    query, key, *others, scaling=None, is_causal=True, sliding_window=None, attention_mask=None
) -> Tensor:
    """The output alone, by the arguments of `composed_attention`."""
    mask = as_visibility(attention_mask, query.shape[2], key.shape[2], is_causal, sliding_window)
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    return reference_attention(query, key, *others, scaling=scaling, mask=mask)[0]


def as_visibility(
    mask: Tensor | Visibility | None, queries: int, keys: int, is_causal: bool, sliding_window: int | None
) -> Visibility:
    if isinstance(mask, Visibility):
        return mask
    given = {} if mask is None else {"padding" if mask.dim() == 2 else "dense": mask}
    return Visibility(queries, keys, is_causal=is_causal, sliding_window=sliding_window, **given)


def reference_attention(query, key, value, pre, post, *, scaling: float, mask: Visibility) -> tuple[Tensor, Tensor]:
    """The output (batch, heads, query, value channels) and the composed weights (batch, heads, query, key)."""
    dtype = torch.promote_types(torch.float32, torch.promote_types(query.dtype, key.dtype))
    shared_heads = query.shape[1] // key.shape[1]
    keys, values = (states.repeat_interleave(shared_heads, dim=1) for states in (key, value))
    hidden, bias = hidden_pairs(mask, query.device), mask_bias(mask, dtype)

    scores = torch.einsum("bhtd,bhsd->bhts", query.to(dtype), keys.to(dtype)) * scaling
    scores = reference_compose(scores, pre) + bias
    weights = torch.softmax(scores.masked_fill(hidden, torch.finfo(dtype).min), dim=-1)
    weights = reference_compose(weights.masked_fill(hidden, 0.0), post)
    output = torch.einsum("bhts,bhsd->bhtd", weights, values.to(dtype))
    return output.to(query.dtype), weights.to(query.dtype)


def reference_compose(attention: Tensor, weights: ComposeWeights | None) -> Tensor:
    """Equation 7 on (batch, heads, query, key) scores or weights; every branch reads the un-composed ones."""
    if weights is None:
        return attention
    a = attention  # (batch, heads, query, key)
    weights = map_tensors(weights, lambda tensor, _: tensor.to(a.dtype))
    composed = a.clone()
    if weights.static is not None:
        composed += torch.einsum("bjts,jh->bhts", a, torch.block_diag(*weights.static))  # A W_b
    if weights.query is not None:
        composed += torch.einsum("bjts,btjh->bhts", a, position_maps(weights.query, weights.groups))
    if weights.key is not None:
        composed += torch.einsum("bjts,bsjh->bhts", a, position_maps(weights.key, weights.groups))
    return composed


def position_maps(side: ComposeSide, groups: int) -> Tensor:
    """W_1 W_2 + diag(W_g) of every query or key, (batch, length, heads in, heads out); zero between groups."""
    heads = side.factors.shape[1]
    maps = side.factors.new_zeros(1, 1, heads, heads)
    if side.w1 is not None:
        same_group = torch.block_diag(*maps.new_ones(groups, heads // groups, heads // groups))
        maps = torch.einsum("bjlr,bhlr->bljh", side.w1, side.w2) * same_group
    if side.gate is not None:
        maps = maps + torch.diag_embed(side.gate.transpose(1, 2))
    return maps


def hidden_pairs(mask: Visibility, device: torch.device) -> Tensor:
    """Boolean, broadcasts to (batch, heads, query, key): True where the query must not see the key."""
    positions = torch.arange(mask.query_length, device=device)[:, None] + mask.query_offset
    age = positions - torch.arange(mask.key_length, device=device)  # (query, key)
    hidden = torch.zeros_like(age, dtype=torch.bool)[None, None]
    if mask.is_causal:
        hidden = hidden | (age < 0)
    if mask.sliding_window is not None:
        hidden = hidden | (age.abs() >= mask.sliding_window)
    if mask.padding is not None:
        hidden = hidden | ~mask.padding[:, None, None, :]
    if mask.sequence_ids is not None:
        hidden = hidden | (mask.sequence_ids[:, None, :, None] != mask.sequence_ids[:, None, None, :])
    if mask.dense is not None and mask.dense.dtype.is_floating_point:
        hidden = hidden | (mask.dense <= torch.finfo(mask.dense.dtype).min / 2)
    elif mask.dense is not None:
        hidden = hidden | (mask.dense == 0)
    return hidden


def mask_bias(mask: Visibility, dtype: torch.dtype) -> Tensor | float:
    """What a floating point mask adds to the scores, nothing where it hides."""
    if mask.dense is None or not mask.dense.dtype.is_floating_point:
        return 0.0
    return mask.dense.masked_fill(mask.dense <= torch.finfo(mask.dense.dtype).min / 2, 0.0).to(dtype)
