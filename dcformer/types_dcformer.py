"""The arguments of composed attention: the weights of a composition, and the arguments of one call."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .visibility_dcformer import Visibility


class ComposeSide:
    """
    The query-wise or the key-wise side of a composition: a low-rank map, a gate, or both, for every position.

    Args:
        w1 (`Tensor`, *optional*): (batch, heads, length, rank), maps heads to ranks; W_q1 or W_k1 of equation 8,
            normalised over heads. Given together with `w2`.
        w2 (`Tensor`, *optional*): (batch, heads, length, rank), maps ranks to heads; W_q2 or W_k2.
        gate (`Tensor`, *optional*): (batch, heads, length); W_qg or W_kg, after tanh.
        factors (`Tensor`, *optional*): All of this in one tensor (batch, heads, length, 2 rank + 1) instead, as the
            cache stores it: w1, then w2, then the gate. 2 rank channels have no gate, a single one is a gate.

    Raises:
        ValueError: if too little or too much is given, or shapes do not fit.
    """

    packed: Tensor | None = None  # rows as `pack` makes them of states and these factors, where both lie in them

    def __init__(
        self,
        w1: Tensor | None = None,
        w2: Tensor | None = None,
        gate: Tensor | None = None,
        *,
        factors: Tensor | None = None,
    ):
        if (w1 is None) != (w2 is None) or (factors is None) == (w1 is None and gate is None):
            raise ValueError("A ComposeSide takes factors, or w1 and w2, a gate, or all three; use None for no side.")
        if factors is None:
            if w1 is not None and w2 is not None and w1.shape != w2.shape:
                raise ValueError(f"w1 and w2 must have the same shape, got {tuple(w1.shape)} and {tuple(w2.shape)}.")
            parts = (w1, w2, None if gate is None else gate.unsqueeze(-1))
            factors = torch.cat([part for part in parts if part is not None], dim=-1)
        if factors.dim() != 4:
            raise ValueError(f"factors must be (batch, heads, length, channels), got shape {tuple(factors.shape)}.")
        self.factors = factors

    @property
    def rank(self) -> int:
        """Rank of the low-rank map; 0 if there is none."""
        return int(self.factors.shape[-1]) // 2  # a tensor under torch.jit.trace

    @property
    def w1(self) -> Tensor | None:
        """(batch, heads, length, rank)."""
        return self.factors[..., : self.rank] if self.rank > 0 else None

    @property
    def w2(self) -> Tensor | None:
        """(batch, heads, length, rank)."""
        return self.factors[..., self.rank : 2 * self.rank] if self.rank > 0 else None

    @property
    def gate(self) -> Tensor | None:
        """(batch, heads, length)."""
        return self.factors[..., -1] if int(self.factors.shape[-1]) % 2 else None


class ComposeWeights(NamedTuple):
    """
    The weights of one stage of composition: of the attention scores, or of the attention weights.

    Args:
        query (`ComposeSide`, *optional*): Query-wise low-rank map and gate (branches 2 and 3), length = queries.
        key (`ComposeSide`, *optional*): Key-wise low-rank map and gate (branches 4 and 5), length = keys.
        static (`Tensor`, *optional*): (groups, heads per group, heads per group) [in, out]; the static matrix of
            branch 1, to which equation 7 adds the identity.
        groups (`int`, defaults to 1): Number of groups of consecutive heads that compose among themselves (section
            3.2); the rank is per group.
    """

    query: ComposeSide | None = None
    key: ComposeSide | None = None
    static: Tensor | None = None
    groups: int = 1


Weights: TypeAlias = ComposeWeights | None
Projected: TypeAlias = tuple[Tensor, Tensor, Tensor, Weights, Weights]  # query, key, value, pre and post
# Called with the name of a map and the map, (batch, heads, query, key); what it returns replaces it.
Observer: TypeAlias = Callable[[str, Tensor], Tensor]


def map_tensors(weights: Weights, function: Callable[[Tensor, str], Tensor]) -> Weights:
    """Apply `function(tensor, name)` to all tensors; their names are "query", "key" and "static"."""
    if weights is None:
        return None
    query, key = (
        None if side is None else ComposeSide(factors=function(side.factors, name))
        for side, name in ((weights.query, "query"), (weights.key, "key"))
    )
    static = None if weights.static is None else function(weights.static, "static")
    return ComposeWeights(query, key, static, weights.groups)


class AttentionInputs(NamedTuple):
    """The arguments of one call of [`composed_attention`], whose shapes were checked to fit together."""

    query: Tensor  # (batch, heads, query, channels)
    key: Tensor  # (batch, key/value heads, key, channels)
    value: Tensor  # (batch, key/value heads, key, value channels)
    pre: Weights
    post: Weights
    scaling: float
    mask: Visibility
    dropout: float = 0.0
    chunk_size: int | None = None
