"""The heads x heads matrices of equation 8: how the heads of a query and a key are composed, and who lends to whom."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..modeling_dcformer import at_least_float32
from ..plain_dcformer import compose
from ..types_dcformer import ComposeWeights, map_tensors
from .branches import STAGES, compose_layers
from .recording import Inputs, measured


def head_maps(weights: ComposeWeights, query: int | Tensor, key: int | Tensor, batch: int | Tensor = 0) -> Tensor:
    """
    The matrices W_ij of equation 8 that compose the heads for a query i and a key j: A'_ij = A_ij W_ij.

    W is the identity plus the static matrix plus, of the query and of the key, w1 w2 and the gate on the diagonal.

    Args:
        weights: Factors of a layer, before or after the softmax, as [`record`] returns them.
        query, key: Positions among the queries and the keys of the factors: one, or (pairs,).
        batch (defaults to 0): Rows of the batch: one, or (pairs,).

    Returns:
        (heads, heads) [from, to] of one pair, or (pairs, heads, heads).
    """
    indices = batch, query, key
    rows, queries, keys = torch.broadcast_tensors(*(torch.as_tensor(index).view(-1) for index in indices))
    positions = {"query": queries, "key": keys}
    tensors: dict[str, Tensor] = {}

    def pick(tensor: Tensor, name: str) -> Tensor:
        tensor = at_least_float32(tensor)
        if name != "static":
            tensor = tensor[rows, :, positions[name]].unsqueeze(2)  # (pairs, heads, 1, channels)
        return tensors.setdefault(name, tensor)

    picked = map_tensors(weights, pick)
    name, like = next(iter(tensors.items()))
    heads = like.shape[1] * (weights.groups if name == "static" else 1)
    # If only one head attends, with 1, the composed heads are the row of that head; each has a place among the queries.
    alone = torch.eye(heads, dtype=like.dtype, device=like.device)[None, :, :, None]  # (1, head, from, 1)
    maps = compose(alone, picked)[..., 0].mT.expand(len(rows), -1, -1)  # (pairs, from, to)
    return maps[0] if all(isinstance(index, int) for index in indices) else maps


def effective_rank(singular_values: Tensor) -> Tensor:
    """
    The exponential of the entropy of singular values divided by their sum: (..., values) becomes (...).

    Source: Roy and Vetterli, The effective rank, 2007.
    """
    shares = singular_values / singular_values.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return torch.special.entr(shares).sum(-1).exp()


@dataclass(frozen=True)
class HeadMapStatistics:
    """
    Statistics of a layer's matrices W of [`head_maps`]: means over pairs of a query and a key that it sees.

    `lending` is |W_mn| divided by the sum of its column: from which heads a head takes. Columns sum to one.
    """

    singular_values: Tensor  #: of W, (heads,), from the largest
    effective_rank: float  #: of W; for the identity it is the number of heads
    added_rank: float  #: effective rank of W minus the identity, which is what composition adds
    lending: Tensor  #: (heads, heads) [from, to]
    pairs: int  #: number of pairs

    @property
    def borrowed(self) -> Tensor:
        """(heads,): the share of each head that comes from other heads."""
        return 1 - self.lending.diagonal()


def head_map_statistics(
    model: PreTrainedModel,
    inputs: Inputs,
    layers: int | Sequence[int] | None = None,
    pairs: int = 1000,
    seed: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> dict[tuple[int, str], HeadMapStatistics]:
    """
    Spectrum, rank and lending of the head maps over a corpus.

    Args:
        model, inputs, layers, tokenizer: As for [`branch_shares`].
        pairs (defaults to 1000): Pairs sampled from every forward pass, at most.
        seed (defaults to 0): Seed of the sampling.

    Returns:
        Statistics by layer and map: "scores" before the softmax, "weights" after it.

    Raises:
        ValueError: for a model that composes nothing, or `pairs` below 1.
    """
    if pairs < 1:
        raise ValueError(f"pairs must be at least 1, got {pairs}.")
    compose_layers(model)
    generator = torch.Generator().manual_seed(seed)

    def sample(maps: dict[str, Any]) -> dict[str, Tensor]:
        visible = (maps["weights"] != 0).any(1).nonzero()  # (pairs, 3): row, query, key
        chosen = torch.randperm(len(visible), generator=generator)[:pairs]
        row, query, key = visible[chosen.to(visible.device)].unbind(1)
        stages = zip(STAGES, maps["factors"])
        return {stage: head_maps(factors, query, key, row) for stage, factors in stages if factors is not None}

    sampled = measured(model, inputs, ("factors", "weights"), sample, layers, tokenizer)
    return {layer_and_map: _statistics(torch.cat(matrices).double()) for layer_and_map, matrices in sampled.items()}


def _statistics(matrices: Tensor) -> HeadMapStatistics:
    identity = torch.eye(matrices.shape[-1], dtype=matrices.dtype)
    values, added = (torch.linalg.svdvals(maps) for maps in (matrices, matrices - identity))
    sizes = matrices.abs()
    return HeadMapStatistics(
        singular_values=values.mean(0),
        effective_rank=float(effective_rank(values).mean()),
        added_rank=float(effective_rank(added).mean()),
        lending=(sizes / sizes.sum(1, keepdim=True)).mean(0),
        pairs=len(matrices),
    )
