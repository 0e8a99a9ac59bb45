"""
Query-wise composition that needs no scores: where the heads of a group share one key, it is a map of the queries.

sum_j m[j, h] (q_j . k) = (sum_j m[j, h] q_j) . k, and the same holds for weights and one value. So with grouped-query
attention, if the heads that compose among themselves are served by one key/value head and nothing key-wise is composed,
the composition before the softmax becomes one of queries, and that after it one of outputs: work for each query instead
of each pair of query and key.
"""

import torch
from torch import Tensor

from .arguments import Composition, channels_of


def can_fold(composition: Composition | None, heads: int, key_value_heads: int, keys: int, channels: int) -> bool:
    """Whether folding is exact, and worth it: mixing channels takes less than mixing scores of so many keys."""
    if composition is None or composition.key is not None:
        return False
    served, per_group = heads // key_value_heads, heads // composition.groups
    return served > 1 and served % per_group == 0 and keys > channels


def fold(states: Tensor, composition: Composition) -> Tensor:
    """
    Compose the heads of queries or outputs in place of those of scores or weights.

    Args:
        states (`Tensor`): (batch, heads, query, channels).
        composition (`Composition`): Without a key's side.

    Returns:
        `Tensor`: of the same shape and type; sums run in float32, differentiable.

    Source: equation 7, applied before the product with keys and after that with values.
    """
    batch, heads, queries, channels = states.shape
    grouped = (batch, composition.groups, heads // composition.groups, queries)
    x = states.float().reshape(*grouped, channels)  # (batch, group, head, query, channels)
    composed = x
    if composition.query is not None:
        rank, has_gate = channels_of(composition.query)
        factors = composition.query.float().reshape(*grouped, -1)
        w1, w2, gate = factors.split([rank, rank, int(has_gate)], dim=-1)
        if has_gate:
            composed = composed + x * gate
        if rank > 0:
            maps = torch.einsum("bgjtd,bgjtr->bgrtd", x, w1)
            composed = composed + torch.einsum("bgrtd,bghtr->bghtd", maps, w2)
    if composition.static is not None:
        composed = composed + torch.einsum("bgjtd,gjh->bghtd", x, composition.static.float())
    return composed.reshape(states.shape).to(states.dtype)
