"""The baseline of the benchmarks: composed attention in PyTorch as the authors' training code computes it.

It is written from the paper's equations, and goes in chunks of queries, by products that broadcast and sums over heads.

Axis letters: b batch, t query, s key, c composition (before and after the softmax), p side (query and key), r rank.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..dcmha import ComposeWeights


CHUNK = 128


class Factors(NamedTuple):
    """Results of equations 5 and 6: w1 and w2 (b, length, c, p, r, heads), gate without r."""

    w1: Tensor
    w2: Tensor
    gate: Tensor

    @classmethod
    def of(cls, pre: ComposeWeights, post: ComposeWeights) -> "Factors":
        """Convert two compositions that have all factors."""

        def joined(name: str) -> Tensor:  # (b, heads, length, ...) of four sides to (b, length, c, p, ..., heads)
            sides = [getattr(side, name) for weights in (pre, post) for side in (weights.query, weights.key)]
            return torch.stack(sides, 0).unflatten(0, (2, 2)).moveaxis((2, 4, 3), (0, 1, -1)).contiguous()

        return cls(joined("w1"), joined("w2"), joined("gate"))

    def side(self, stage: int, side: int, first: int = 0, last: int | None = None) -> tuple[Tensor, ...]:
        """w1, w2 (b, length, r, heads) and gate (b, length, heads) of one composition and side, at first..last."""
        return tuple(tensor[:, first:last, stage, side] for tensor in self)


def attend_chunk(query: Tensor, key: Tensor, value: Tensor, pre: tuple, post: tuple, mask: Tensor) -> Tensor:
    """Queries that are scaled already against some keys; `pre` and `post` are the factors of both sides."""
    scores = compose_chunk(query @ key.transpose(2, 3), *pre)
    scores = scores.where(mask, torch.finfo(scores.dtype).min)
    return compose_chunk(scores.softmax(-1), *post) @ value


def attend_in_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    factors: Factors,
    mask: Tensor,
    scaling: float,
    window: int | None = None,
    attend: Callable[..., Tensor] = attend_chunk,
) -> Tensor:
    """Take `CHUNK` queries at a time, against the keys from their window's beginning to the chunk's end."""
    output = torch.zeros_like(value)
    query = query * scaling
    for start in range(0, query.shape[2], CHUNK):
        stop = min(start + CHUNK, query.shape[2])
        first = 0 if window is None else max(0, start - window)
        pre, post = ((factors.side(stage, 0, start, stop), factors.side(stage, 1, first, stop)) for stage in range(2))
        keys, values = (states[:, :, first:stop] for states in (key, value))
        output[:, :, start:stop] = attend(
            query[:, :, start:stop], keys, values, pre, post, mask[start:stop, first:stop]
        )
    return output


def compose_chunk(attention: Tensor, query_side: tuple, key_side: tuple) -> Tensor:
    """Equation 7 on (b, heads, t, s), by products that broadcast over the other side, and sums over heads."""
    composed = attention
    sides = [
        [tensor.transpose(-2, -1).unsqueeze(dim) for tensor in (*w1.unbind(2), *w2.unbind(2), gate)]
        for dim, (w1, w2, gate) in ((-1, query_side), (-2, key_side))
    ]  # (b, heads, t, 1) and (b, heads, 1, s)
    rank = len(sides[0]) // 2
    for index in range(rank):
        for side in sides:
            projected = (attention * side[index]).sum(1)
            composed = composed + projected.unsqueeze(1) * side[rank + index]
    for side in sides:
        composed = composed + attention * side[-1]
    return composed
