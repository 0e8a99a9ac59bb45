"""The baseline "authors" of the benchmarks: composed attention as the authors' training code formulates it.

The code is ours, after the equations of the paper: chunks of queries, products that broadcast, and sums over heads.

Axis letters: b batch, t query, s key, c stage (before and after the softmax), p query-wise and key-wise, r rank.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..dcmha import ComposeWeights


CHUNK = 128
NOTE = "'authors' is our own PyTorch code, written after the equations of the paper."


class Factors(NamedTuple):
    """Results of equations 5 and 6: w1 and w2 (b, length, c, p, r, heads), gate without r."""

    w1: Tensor
    w2: Tensor
    gate: Tensor

    @classmethod
    def of(cls, pre: ComposeWeights, post: ComposeWeights) -> "Factors":
        """Convert two compositions that have all factors."""

        def joined(name: str) -> Tensor:  # four of (b, heads, length, ...) to (b, length, c, p, ..., heads)
            parts = [getattr(factors, name) for weights in (pre, post) for factors in (weights.query, weights.key)]
            return torch.stack(parts, 0).unflatten(0, (2, 2)).moveaxis((2, 4, 3), (0, 1, -1)).contiguous()

        return cls(joined("w1"), joined("w2"), joined("gate"))

    def at(self, stage: int, start: int, first: int, stop: int) -> tuple[tuple[Tensor, ...], ...]:
        """w1, w2, gate without c and p: query-wise of positions start..stop, and key-wise of first..stop."""
        return tuple(tuple(t[:, begin:stop, stage, p] for t in self) for p, begin in enumerate((start, first)))


def attend_chunk(query: Tensor, key: Tensor, value: Tensor, pre: tuple, post: tuple, mask: Tensor) -> Tensor:
    """Queries that are scaled already against some keys; `pre` and `post` as `Factors.at` gives them."""
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
        pre, post = (factors.at(stage, start, first, stop) for stage in range(2))
        keys, values = (states[:, :, first:stop] for states in (key, value))
        output[:, :, start:stop] = attend(
            query[:, :, start:stop], keys, values, pre, post, mask[start:stop, first:stop]
        )
    return output


def compose_chunk(attention: Tensor, query_wise: tuple, key_wise: tuple) -> Tensor:
    """Equation 7 on (b, heads, t, s), by products that broadcast, and sums over heads."""
    composed = attention
    factors = [
        [tensor.transpose(-2, -1).unsqueeze(dim) for tensor in (*w1.unbind(2), *w2.unbind(2), gate)]
        for dim, (w1, w2, gate) in ((-1, query_wise), (-2, key_wise))
    ]  # (b, heads, t, 1) and (b, heads, 1, s)
    rank = len(factors[0]) // 2
    for index in range(rank):
        for rows in factors:
            projected = (attention * rows[index]).sum(1)
            composed = composed + projected.unsqueeze(1) * rows[rank + index]
    for rows in factors:
        composed = composed + attention * rows[-1]
    return composed
