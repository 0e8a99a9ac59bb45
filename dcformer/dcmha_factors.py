"""The factors of a composition: what the queries' and the keys' side contribute, and whether their shapes fit.

Every implementation of composed attention takes these; none of them is needed by another one for anything else.
"""

from typing import NamedTuple

from torch import Tensor


class ComposeSide(NamedTuple):
    """
    What one side, the queries or the keys, contributes to a composition. Any of the three may be None (switched off;
    `w1` and `w2` together).

    Args:
        w1 (`Tensor`): (batch, rank, heads, length), heads -> rank; W_q1 or W_k1 of equation 8, normalised over heads.
        w2 (`Tensor`): (batch, rank, heads, length), rank -> heads; W_q2 or W_k2.
        gate (`Tensor`): (batch, heads, length); W_qg or W_kg, after tanh.
    """

    w1: Tensor | None = None
    w2: Tensor | None = None
    gate: Tensor | None = None


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


def map_tensors(weights: ComposeWeights | None, function) -> ComposeWeights | None:
    """Apply `function(tensor, side)` to every tensor, where side is "query", "key" or "static"."""
    if weights is None:
        return None

    def apply(tensor, side):
        return None if tensor is None else function(tensor, side)

    query, key = (
        None if side is None else ComposeSide(*(apply(tensor, name) for tensor in side))
        for side, name in ((weights.query, "query"), (weights.key, "key"))
    )
    return ComposeWeights(query, key, apply(weights.static, "static"), weights.groups)


def slice_factors(weights: ComposeWeights | None, start: int, stop: int, first: int, last: int):
    """The factors of queries start..stop and keys first..last."""
    ranges = {"query": slice(start, stop), "key": slice(first, last), "static": slice(None)}
    return map_tensors(weights, lambda tensor, side: tensor[..., ranges[side]])


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
            if side is None:
                continue
            if (side.w1 is None) != (side.w2 is None):
                raise ValueError(f"{name}.{side_name} needs both w1 and w2, or neither.")
            for field, tensor in side._asdict().items():
                if tensor is None:
                    continue
                rank = side.w1.shape[1] if field != "gate" and side.w1.dim() > 1 else 1
                expected = (batch, heads, length) if field == "gate" else (batch, rank, heads, length)
                if tensor.shape != expected:
                    raise ValueError(f"{name}.{side_name}.{field} must be {expected}, got {tuple(tensor.shape)}.")
