"""Equation 7 on one tile of scores on a CPU, its adjoint, and the gradients of its weights.

Axis order: (query, rank, batch, group, head, key), where whatever does not vary along an axis has length 1 there, so
that all products broadcast. A tile A of scores or weights is (query, 1, batch, group, head, key).

The weights of a query are the same for all its keys: the identity, the static term, the queries' gate and their map of
low rank are one heads x heads matrix M for each query, and M A is a product of matrices with the keys as columns. The
weights of a key differ from column to column, so their terms stay sums of products:

    C(A) = M A + A gate_k + sum_r w2_r L_r,    L_r = sum_h A w1_r    (w1, w2, gate_k of the keys)

With d the gradient of C(A), the gradient of A is the same map with M transposed and w1 and w2 swapped, applied to d.
It makes R_r = sum_h d w2_r on its way, and with it the gradients of the weights are

    dM = d A^T    dgate_k = sum_t A d    dw1_r = sum_t A R_r    dw2_r = sum_t d L_r

of which dM, one more product of matrices, holds the gradients of all the queries' weights.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .dcmha_factors import in_groups, split_channels


# How many partial sums `sum_of_products` keeps: more make fewer, longer operations, but fill the cache.
_PARTIAL_SUMS = 4


class Workspace:
    """Buffers that the blocks of one thread take turns in: fresh memory costs as much as a pass over it."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor of this shape, valid until the same name is taken again."""
        size = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = torch.empty(size, dtype=dtype)
        return self.buffers[name][:size].view(shape)


class Side(NamedTuple):
    """The weights of the queries or of the keys, in the type that is computed in."""

    w1: Tensor | None  # queries: (query, batch, group, head, rank); keys: (1, rank, batch, group, head, key)
    w2: Tensor | None
    gate: Tensor | None  # queries: (query, batch, group, head); keys: (1, 1, batch, group, head, key)

    @classmethod
    def of_channels(cls, factors: Tensor, axis: int) -> "Side":
        """From one tensor that has w1 of every rank, w2 of every rank and the gate along an axis."""
        w1, w2, gate = split_channels(factors, axis)
        return cls(w1, w2, gate if gate is None or axis != -1 else gate.squeeze(axis))

    def channels(self, axis: int) -> Tensor | None:
        """The opposite of `of_channels`."""
        gate = self.gate if self.gate is None or axis != -1 else self.gate.unsqueeze(axis)
        parts = [part for part in (self.w1, self.w2, gate) if part is not None]
        return torch.cat(parts, axis) if parts else None


class Stage(NamedTuple):
    """One composition, pre or post, or the gradients of its weights."""

    query: Side
    key: Side
    static: Tensor | None  # (group, head [in], head [out])
    groups: int

    @classmethod
    def lay_out(cls, tensors: Sequence[Tensor | None], groups: int, dtype: torch.dtype) -> "Stage":
        """
        Args:
            tensors (`Sequence`): The factors of the queries and of the keys, (batch, heads, length, channels) each, and
                the static map, as in `ComposeWeights`.
        """
        query = key = Side(None, None, None)
        if tensors[0] is not None:
            factors = in_groups(tensors[0], groups).permute(3, 0, 1, 2, 4)  # (query, batch, group, head, channel)
            query = Side.of_channels(factors.to(dtype).contiguous(), -1)
        if tensors[1] is not None:
            key = Side.of_channels(in_groups(tensors[1], groups).permute(4, 0, 1, 2, 3).to(dtype).contiguous()[None], 1)
        return cls(query, key, None if tensors[2] is None else tensors[2].to(dtype), groups)

    def tensors(self) -> list[Tensor | None]:
        """The opposite of `lay_out`, not contiguous."""
        query, key = self.query.channels(-1), self.key.channels(1)
        return [
            None if query is None else query.permute(1, 2, 3, 0, 4).flatten(1, 2),
            None if key is None else key[0].permute(1, 2, 3, 4, 0).flatten(1, 2),
            self.static,
        ]

    def zeros(self, query: Side | None = None) -> "Stage":
        """Zeros of the same shapes; those of the queries may be given."""
        query, key = (
            side if side is not None else Side(*(None if w is None else torch.zeros_like(w) for w in own))
            for side, own in ((query, self.query), (None, self.key))
        )
        return Stage(query, key, None if self.static is None else torch.zeros_like(self.static), self.groups)

    def add_(self, other: "Stage") -> "Stage":
        """Add what `other` has of the keys' weights and the static ones."""
        for own, more in zip((*self.key, self.static), (*other.key, other.static)):
            if own is not None and more is not None:
                own.add_(more)
        return self

    def matrices(self, queries: int, batch: int) -> Tensor | None:
        """M of every query: (query, batch, group, head [out], head [in]); None if that is the identity."""
        w1, w2, gate = self.query
        matrices = None
        if w1 is not None and w2 is not None:
            pairs = [(w2[..., r, None], w1[..., None, :, r]) for r in range(w1.shape[-1])]
            matrices = torch.mul(*pairs[0])
            for pair in pairs[1:]:
                matrices.addcmul_(*pair)
        elif gate is not None:
            matrices = gate.new_zeros(*gate.shape, gate.shape[-1])
        elif self.static is not None:
            matrices = torch.zeros_like(self.static)
        if matrices is None:
            return None
        if self.static is not None:
            matrices += self.static.mT
        diagonal = matrices.diagonal(dim1=-2, dim2=-1)
        diagonal += 1 if gate is None else gate + 1
        return matrices.expand(queries, batch, *matrices.shape[-3:])

    def heads_in_groups(self, attention: Tensor) -> Tensor:
        """(query, batch, all heads, key) as a tile."""
        queries, batch, _, keys = attention.shape
        return attention.view(queries, 1, batch, self.groups, -1, keys)


class Tile(NamedTuple):
    """One composition's weights for some queries and keys, as `compose` takes them."""

    matrices: Tensor | None  # (query, batch, group, head [out], head [in])
    key: Side

    @classmethod
    def cut(cls, stage: Stage, matrices: Tensor | None, queries: slice, keys: slice) -> "Tile":
        matrices = None if matrices is None else matrices[queries]
        return cls(matrices, Side(*(None if w is None else w[..., keys] for w in stage.key)))

    def adjoint(self) -> "Tile":
        return Tile(None if self.matrices is None else self.matrices.mT, Side(self.key.w2, self.key.w1, self.key.gate))


def compose(a: Tensor, out: Tensor, weights: Tile, workspace: Workspace, name: str) -> Tensor | None:
    """
    `out` = C(`a`), both (query, 1, batch, group, head, key).

    Returns:
        `Tensor`: L, (query, rank, batch, group, 1, key), in the workspace's buffer of that name; None without w1.
    """
    if weights.matrices is None:
        out.copy_(a)
    else:
        torch.bmm(weights.matrices.flatten(0, 2), a.flatten(0, 3), out=out.flatten(0, 3))
    w1, w2, gate = weights.key
    if gate is not None:
        out.addcmul_(a, gate)
    if w1 is None or w2 is None:
        return None
    maps = sum_of_products(a, w1, 4, workspace, name)
    for rank_map, rank_w2 in zip(maps.chunk(maps.shape[1], 1), w2.chunk(w2.shape[1], 1)):
        out.addcmul_(rank_map, rank_w2)
    return maps


def accumulate_weight_gradients(
    gradients: Stage,
    stage: Stage,
    a: Tensor,
    d: Tensor,
    maps: tuple[Tensor | None, Tensor | None],
    queries: slice,
    keys: slice,
    workspace: Workspace,
) -> None:
    """
    Write what one tile says of the gradients of its queries' weights, and add what it says of all others.

    Args:
        a, d (`Tensor`): The input of the composition and the gradient of its output.
        maps (`tuple`): L and R.
    """
    w1, w2, gate = gradients.query
    own_w1, own_w2, _ = stage.query
    if w1 is not None or gate is not None or gradients.static is not None:
        products = torch.bmm(d.flatten(0, 3), a.flatten(0, 3).mT)
        products = products.unflatten(0, (*d.shape[:1], *d.shape[2:4]))  # dM: (query, batch, group, head, head)
        if w1 is not None and w2 is not None and own_w1 is not None and own_w2 is not None:
            w1[queries] = torch.matmul(products.mT, own_w2[queries])
            w2[queries] = torch.matmul(products, own_w1[queries])
        if gate is not None:
            gate[queries] = products.diagonal(dim1=-2, dim2=-1)
        if gradients.static is not None:
            gradients.static.add_(products.sum((0, 1)).mT)
    w1, w2, gate = gradients.key
    input_maps, gradient_maps = maps
    if w1 is not None and w2 is not None and input_maps is not None and gradient_maps is not None:
        w1[..., keys] += sum_of_products(a, gradient_maps, 0, workspace, "sums")
        w2[..., keys] += sum_of_products(d, input_maps, 0, workspace, "sums")
    if gate is not None:
        gate[..., keys] += sum_of_products(a, d, 0, workspace, "sums")


def sum_of_products(left: Tensor, right: Tensor, axis: int, workspace: Workspace, name: str) -> Tensor:
    """
    (left * right).sum(axis, keepdim=True) without the products in memory. Both have that axis whole.

    Returns:
        `Tensor`: in the workspace's buffer of that name.
    """
    length = left.shape[axis]
    lanes = math.gcd(_PARTIAL_SUMS, length)
    lefts, rights = left.chunk(length // lanes, axis), right.chunk(length // lanes, axis)
    shape = [max(sizes) for sizes in zip(left.shape, right.shape)]
    shape[axis] = lanes
    sums = workspace.take(name, *shape, dtype=left.dtype)
    torch.mul(lefts[0], rights[0], out=sums)
    for part, other in zip(lefts[1:], rights[1:]):
        sums.addcmul_(part, other)
    if lanes == 1:
        return sums
    shape[axis] = 1
    total = workspace.take(f"{name}, total", *shape, dtype=left.dtype)
    return torch.sum(sums, dim=axis, keepdim=True, out=total)
