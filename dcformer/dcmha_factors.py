"""The factors of a composition: what the queries' and the keys' side contribute, and whether their shapes fit.

Every implementation of composed attention takes these. There is one layout, that of the cache: every position has, in
every head, a short row of channels (w1 of each rank, w2 of each rank, the gate), so that `dcmha_cache` appends the rows
to keys and values in one concatenation, and what it reads back are views.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias, overload

import torch
from torch import Tensor


# w1, w2 and the gate of one side; None for what there is not.
Parts: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]


class ComposeSide:
    """
    What one side, the queries or the keys, contributes to a composition: its low-rank map, its gate, or both.

    Args:
        w1 (`Tensor`, *optional*): (batch, heads, length, rank), heads -> rank; W_q1 or W_k1 of equation 8, normalised
            over heads. Given together with `w2`.
        w2 (`Tensor`, *optional*): (batch, heads, length, rank), rank -> heads; W_q2 or W_k2.
        gate (`Tensor`, *optional*): (batch, heads, length); W_qg or W_kg, after tanh.
        factors (`Tensor`, *optional*): All of it in one tensor instead, (batch, heads, length, channels): w1 of every
            rank, then w2 of every rank, then the gate if the number of channels is odd.

    Raises:
        ValueError: if nothing is given, w1 and w2 are not given together, or their shapes do not fit.
    """

    def __init__(
        self,
        w1: Tensor | None = None,
        w2: Tensor | None = None,
        gate: Tensor | None = None,
        *,
        factors: Tensor | None = None,
    ):
        if factors is None:
            factors = _join_parts(w1, w2, gate)
        elif w1 is not None or w2 is not None or gate is not None:
            raise ValueError("A ComposeSide takes either factors or the parts w1, w2 and gate, got both.")
        elif factors.dim() != 4:
            raise ValueError(f"factors must be (batch, heads, length, channels), got shape {tuple(factors.shape)}.")
        self.factors = factors

    @property
    def rank(self) -> int:
        """Rank of the low-rank map; 0 if there is none."""
        return self.factors.shape[-1] // 2

    @property
    def w1(self) -> Tensor | None:
        """(batch, heads, length, rank)."""
        return split_channels(self.factors)[0]

    @property
    def w2(self) -> Tensor | None:
        """(batch, heads, length, rank)."""
        return split_channels(self.factors)[1]

    @property
    def gate(self) -> Tensor | None:
        """(batch, heads, length)."""
        gate = split_channels(self.factors)[2]
        return None if gate is None else gate.squeeze(-1)

    def __repr__(self) -> str:
        return f"ComposeSide(factors={tuple(self.factors.shape)}, rank={self.rank}, gate={self.gate is not None})"


class ComposeWeights(NamedTuple):
    """
    Everything one composition (before or after the softmax) needs. With groups, `rank` is the rank per group and the
    heads of a group are consecutive.

    Args:
        query (`ComposeSide`, *optional*): Query-wise weights (branches 2 and 3), length = queries.
        key (`ComposeSide`, *optional*): Key-wise weights (branches 4 and 5), length = keys.
        static (`Tensor`, *optional*): (groups, heads per group, heads per group) [in, out]; branch 1, no identity.
        groups (`int`, defaults to 1): Groups of heads that compose among themselves (section 3.2).
    """

    query: ComposeSide | None = None
    key: ComposeSide | None = None
    static: Tensor | None = None
    groups: int = 1


def split_channels(factors: Tensor, dim: int = -1) -> Parts:
    """w1, w2 and the gate of factors whose channels lie along `dim`, where the gate keeps a length of 1; views."""
    rank, has_gate = divmod(int(factors.shape[dim]), 2)  # a tensor where torch.jit.trace looks on
    w1, w2, gate = factors.split_with_sizes([rank, rank, has_gate], dim)
    return w1 if rank > 0 else None, w2 if rank > 0 else None, gate if has_gate else None


def in_groups(tensor: Tensor, groups: int) -> Tensor:
    """(batch, heads, ...) -> (batch, group, head of the group, ...)."""
    return tensor.reshape(tensor.shape[0], groups, tensor.shape[1] // groups, *tensor.shape[2:])


def _join_parts(w1: Tensor | None, w2: Tensor | None, gate: Tensor | None) -> Tensor:
    """(batch, heads, length, channels) from the parts that there are."""
    if (w1 is None) != (w2 is None):
        raise ValueError("A ComposeSide needs both w1 and w2, or neither.")
    parts: list[Tensor] = []
    if w1 is not None and w2 is not None:
        for part, name in ((w1, "w1"), (w2, "w2")):
            if part.dim() != 4 or part.shape != w1.shape:
                raise ValueError(
                    f"{name} must be (batch, heads, length, rank), w1 and w2 alike, got w1 {tuple(w1.shape)} and "
                    f"w2 {tuple(w2.shape)}."
                )
        parts += [w1, w2]
    if gate is not None:
        if gate.dim() != 3 or (w1 is not None and gate.shape != w1.shape[:3]):
            raise ValueError(
                f"gate must be (batch, heads, length), as w1 without its rank, got {tuple(gate.shape)}"
                + ("." if w1 is None else f" for w1 {tuple(w1.shape)}.")
            )
        parts.append(gate.unsqueeze(-1))
    if not parts:
        raise ValueError("A ComposeSide needs w1 and w2, a gate, or all three; give None for a side without any.")
    return torch.cat(parts, dim=-1)


@overload
def map_tensors(weights: ComposeWeights, function: Callable[[Tensor, str], Tensor]) -> ComposeWeights: ...


@overload
def map_tensors(weights: None, function: Callable[[Tensor, str], Tensor]) -> None: ...


def map_tensors(weights: ComposeWeights | None, function: Callable[[Tensor, str], Tensor]) -> ComposeWeights | None:
    """Apply `function(tensor, side)` to every tensor, where side is "query", "key" or "static"."""
    if weights is None:
        return None
    query, key = (
        None if side is None else ComposeSide(factors=function(side.factors, name))
        for side, name in ((weights.query, "query"), (weights.key, "key"))
    )
    static = None if weights.static is None else function(weights.static, "static")
    return ComposeWeights(query, key, static, weights.groups)


def slice_factors(
    weights: ComposeWeights | None, start: int, stop: int, first: int, last: int
) -> ComposeWeights | None:
    """The factors of queries start..stop and keys first..last."""
    ranges = {"query": slice(start, stop), "key": slice(first, last)}
    return map_tensors(weights, lambda tensor, side: tensor if side == "static" else tensor[:, :, ranges[side]])


def check_arguments(
    query: Tensor, key: Tensor, value: Tensor, pre: ComposeWeights | None, post: ComposeWeights | None
) -> None:
    """Raise ValueError if the shapes of one call of composed attention do not fit together."""
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise ValueError(
            "query, key and value must be (batch, heads, length, channels), got shapes "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}."
        )
    batch, heads, queries, channels = query.shape
    keys = key.shape[2]
    if key.shape[0] != batch or key.shape[3] != channels or value.shape[:3] != key.shape[:3]:
        raise ValueError(
            "key must share query's batch and channels, and value key's batch, heads and length, got query "
            f"{tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}."
        )
    if key.shape[1] == 0 or heads % key.shape[1] != 0:
        raise ValueError(f"The {key.shape[1]} key/value heads must divide the {heads} query heads.")
    for name, weights in (("pre", pre), ("post", post)):
        if weights is None:
            continue
        if weights.groups < 1 or heads % weights.groups != 0:
            raise ValueError(f"{name}.groups must divide the {heads} heads, got {weights.groups}.")
        per_group = heads // weights.groups
        if weights.static is not None and weights.static.shape != (weights.groups, per_group, per_group):
            raise ValueError(
                f"{name}.static must be (groups, heads per group, heads per group) = "
                f"{(weights.groups, per_group, per_group)}, got {tuple(weights.static.shape)}."
            )
        for side_name, side, length in (("query", weights.query, queries), ("key", weights.key, keys)):
            if side is not None and side.factors.shape[:3] != (batch, heads, length):
                raise ValueError(
                    f"{name}.{side_name} must hold factors (batch, heads, length, channels) for (batch, heads, length) "
                    f"= {(batch, heads, length)}, got {tuple(side.factors.shape)}."
                )
