"""The heads x heads matrices of equation 8: how a pair of tokens composes the heads, and who lends to whom."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..dcmha import ComposeSide, ComposeWeights, compose, map_tensors
from ..modeling_dcformer import at_least_float32
from .branches import compose_layers
from .recording import forwards, watch


def head_maps(weights: ComposeWeights, query: int | Tensor, key: int | Tensor, batch: int | Tensor = 0) -> Tensor:
    """
    The matrices W_ij of equation 8 that compose the heads of pairs of tokens: A'_ij = A_ij W_ij.

    W is the identity, plus the static matrix, plus w1 w2 and the gate on the diagonal of the query, and of the key.

    Args:
        weights (`ComposeWeights`): Factors of a layer, before or after the softmax, as [`record`] finds them.
        query, key (`int` or `Tensor`): Positions, counted in the factors' queries and keys; (pairs,) each.
        batch (`int` or `Tensor`, defaults to 0): Rows, one or (pairs,).

    Returns:
        `Tensor`: (heads, heads) [from, to] of one pair, or (pairs, heads, heads).
    """
    rows, queries, keys = (torch.as_tensor(each).view(-1) for each in (batch, query, key))
    rows, queries, keys = torch.broadcast_tensors(rows, queries, keys)

    def of_pairs(side: ComposeSide | None, places: Tensor) -> ComposeSide | None:
        return None if side is None else ComposeSide(factors=side.factors[rows, :, places].unsqueeze(2))

    weights = map_tensors(weights, lambda tensor, place: at_least_float32(tensor))
    picked = weights._replace(query=of_pairs(weights.query, queries), key=of_pairs(weights.key, keys))
    sides = [side.factors for side in (picked.query, picked.key) if side is not None]
    like = sides[0] if sides else weights.static
    heads = like.shape[1] if sides else weights.groups * like.shape[1]
    # What comes out if one head alone attends, with 1, is that head's row.
    maps = [
        compose(unit.view(1, heads, 1, 1).expand(len(rows), -1, -1, -1), picked)[:, :, 0, 0]
        for unit in torch.eye(heads, dtype=like.dtype, device=like.device)
    ]
    stacked = torch.stack(maps, dim=1)
    return stacked[0] if all(isinstance(each, int) for each in (batch, query, key)) else stacked


def effective_rank(singular_values: Tensor) -> Tensor:
    """
    The exponential of the entropy of singular values (..., values) that are divided by their sum: (...).

    Source: Roy and Vetterli, The effective rank, 2007.
    """
    shares = singular_values / singular_values.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return torch.special.entr(shares).sum(-1).exp()


@dataclass(frozen=True)
class HeadMapStatistics:
    """
    Means over pairs of a query and a key that it sees, of the matrices W of [`head_maps`] of a layer.

    Attributes:
        singular_values (`Tensor`): (heads,), falling.
        effective_rank (`float`): Of W; the number of heads for the identity.
        added_rank (`float`): Effective rank of W without the identity, of what is composed.
        lending (`Tensor`): (heads, heads) [from, to], |W_mn| divided by the sum of its column: from which heads a head
            takes. Columns sum to one.
        pairs (`int`): Number of pairs.
    """

    singular_values: Tensor
    effective_rank: float
    added_rank: float
    lending: Tensor
    pairs: int

    @property
    def borrowed(self) -> Tensor:
        """(heads,): the share of a head that comes from others, the mean sum off the diagonal."""
        return 1 - self.lending.diagonal()


@torch.no_grad()
def head_map_statistics(
    model: Any,
    inputs: Any,
    layers: int | Sequence[int] | None = None,
    pairs: int = 1000,
    seed: int = 0,
    tokenizer: Any = None,
) -> dict[tuple[int, str], HeadMapStatistics]:
    """
    Spectrum, rank and lending of the head maps of a corpus.

    Args:
        model, inputs, layers, tokenizer: As of [`branch_shares`].
        pairs (`int`, defaults to 1000): Pairs drawn from every forward, at most.
        seed (`int`, defaults to 0): Of the draw.

    Returns:
        By layer and map, "scores" before the softmax and "weights" after it.

    Raises:
        ValueError: for a model that composes nothing, or `pairs` below 1.
    """
    if pairs < 1:
        raise ValueError(f"pairs must be at least 1, got {pairs}.")
    compose_layers(model)
    generator = torch.Generator().manual_seed(seed)
    factors: dict[int, Any] = {}
    found: dict[tuple[int, str], list[tuple[Tensor, Tensor, Tensor, Tensor]]] = {}

    def add(layer: int, name: str, value: Any) -> None:
        if name == "factors":
            factors[layer] = value
            return
        visible = (value != 0).any(1).nonzero()  # (pairs, 3): row, query, key
        drawn = visible[torch.randperm(len(visible), generator=generator)[:pairs].to(visible.device)]
        for kind, weights in zip(("scores", "weights"), factors.pop(layer)):
            if weights is None:
                continue
            maps = head_maps(weights, drawn[:, 1], drawn[:, 2], drawn[:, 0]).cpu().double()  # (pairs, head, head)
            values = torch.linalg.svdvals(maps)
            added = torch.linalg.svdvals(maps - torch.eye(maps.shape[-1], dtype=maps.dtype))
            shares = maps.abs() / maps.abs().sum(1, keepdim=True)
            found.setdefault((layer, kind), []).append((values, effective_rank(values), effective_rank(added), shares))

    with watch(model, add, ("factors", "weights"), layers):
        for arguments in forwards(model, inputs, tokenizer):
            model(**arguments)
    statistics = {}
    for place, parts in found.items():
        values, rank, added_rank, shares = (torch.cat(part) for part in zip(*parts))
        means = values.mean(0), float(rank.mean()), float(added_rank.mean()), shares.mean(0)
        statistics[place] = HeadMapStatistics(*means, pairs=len(rank))
    return statistics
