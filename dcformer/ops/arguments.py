"""What the operators of this folder take beside queries, keys and values: tensors and numbers, gathered under names."""

from typing import NamedTuple

import torch
from torch import Tensor


LOG2_E = 1.4426950408889634


class Composition(NamedTuple):
    """
    One composition of attention heads, before the softmax or after it: equation 7 of the paper.

    A side holds, for every position and head, a row of channels: w1 of each rank, w2 of each rank, then the gate if
    their number is odd. Heads of a group are consecutive and compose among themselves.

    Args:
        query (`Tensor`, *optional*): (batch, heads, query, channels), what the queries contribute.
        key (`Tensor`, *optional*): (batch, heads, key, channels), what the keys contribute.
        static (`Tensor`, *optional*): (groups, heads per group, heads per group) [in, out], without the identity.
        groups (`int`, defaults to 1): Groups of heads.
    """

    query: Tensor | None = None
    key: Tensor | None = None
    static: Tensor | None = None
    groups: int = 1


class Mask(NamedTuple):
    """
    Which key a query sees. A query's position, counted in keys, is its index + `query_offset`.

    Args:
        is_causal (`bool`, defaults to `True`): Hide keys after the query.
        sliding_window (`int`, *optional*): position - window < key <= position if causal, else |position - key| <
            window.
        query_offset (`int`, defaults to 0): Position of the first query.
        padding (`Tensor`, *optional*): (batch or 1, key) boolean, True for real tokens.
        sequence_ids (`Tensor`, *optional*): (batch or 1, length) integers that never fall along a row; a token sees
            tokens of its own number only. Queries and keys are the same tokens then.
        visible (`Tensor`, *optional*): (batch or 1, 1, query, key), boolean with True for visible, or floating point,
            added to the composed scores; at or below half the smallest number of its type it hides.
    """

    is_causal: bool = True
    sliding_window: int | None = None
    query_offset: int = 0
    padding: Tensor | None = None
    sequence_ids: Tensor | None = None
    visible: Tensor | None = None


def dense_mask(visible: Tensor) -> Tensor:
    """`Mask.visible` as kernels read it: bytes, or float32 to be added to scores to base 2, -inf where it hides."""
    if not visible.dtype.is_floating_point:
        return visible.to(torch.bool).view(torch.int8)
    hidden = visible <= torch.finfo(visible.dtype).min / 2
    return (visible.float() * LOG2_E).masked_fill(hidden, float("-inf"))


def channels_of(factors: Tensor | None) -> tuple[int, bool]:
    """Rank of a side's low-rank map, 0 without one, and whether it has a gate."""
    return (0, False) if factors is None else (factors.shape[-1] // 2, factors.shape[-1] % 2 == 1)
