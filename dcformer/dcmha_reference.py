"""Composed attention as appendix D of the paper writes it, for checking everything else.

It holds the scores of all heads, queries and keys at once, in float32 at least and in float64 for float64 inputs, and
shares nothing with the fast implementations but the check of its arguments.

Axis letters: b batch, g group, m and n heads of a group, t query, s key, r rank.
"""

import torch
from torch import Tensor

from .dcmha_factors import ComposeWeights
from .dcmha_mask import Visibility


def reference_attention(
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
    """The output (batch, heads, query, value channels) and the composed weights (batch, heads, query, key)."""
    dtype = torch.promote_types(torch.float32, torch.promote_types(query.dtype, key.dtype))
    shared_heads = query.shape[1] // key.shape[1]
    keys, values = (states.repeat_interleave(shared_heads, dim=1) for states in (key, value))
    hidden, bias = hidden_pairs(mask, query.device), mask_bias(mask, dtype)

    scores = torch.einsum("bhtd,bhsd->bhts", query.to(dtype), keys.to(dtype)) * scaling
    scores = reference_compose(scores, pre) + bias
    weights = torch.softmax(scores.masked_fill(hidden, torch.finfo(dtype).min), dim=-1)
    weights = reference_compose(weights.masked_fill(hidden, 0.0), post)
    weights = torch.nn.functional.dropout(weights, p=dropout, training=dropout > 0.0)
    output = torch.einsum("bhts,bhsd->bhtd", weights, values.to(dtype))
    return output.to(query.dtype), weights.to(query.dtype)


def reference_compose(attention: Tensor, weights: ComposeWeights | None) -> Tensor:
    """Equation 7 on (batch, heads, query, key) scores or weights; every branch reads the un-composed ones."""
    if weights is None:
        return attention
    a = attention.unflatten(1, (weights.groups, -1))
    composed = a.clone()
    if weights.static is not None:
        composed += torch.einsum("bgmts,gmn->bgnts", a, weights.static.to(a.dtype))
    for side, position in ((weights.query, "t"), (weights.key, "s")):
        w1, w2, gate = (None, None, None) if side is None else side
        if w1 is not None:
            w1, w2 = (w.to(a.dtype).unflatten(2, (weights.groups, -1)) for w in (w1, w2))
            maps = torch.einsum("brgmx,brgnx->bgmnx", w1, w2)  # one heads x heads map for every position
            composed += torch.einsum(f"bgmts,bgmn{position}->bgnts", a, maps)
        if gate is not None:
            gate = gate.to(a.dtype).unflatten(1, (weights.groups, -1))
            composed += torch.einsum(f"bgnts,bgn{position}->bgnts", a, gate)
    return composed.flatten(1, 2)


def hidden_pairs(mask: Visibility, device) -> Tensor:
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


def mask_bias(mask: Visibility, dtype: torch.dtype) -> "Tensor | float":
    """What a floating point mask adds to the scores, nothing where it hides."""
    if mask.dense is None or not mask.dense.dtype.is_floating_point:
        return 0.0
    return mask.dense.masked_fill(mask.dense <= torch.finfo(mask.dense.dtype).min / 2, 0.0).to(dtype)
