"""Which keys each chunk of queries reads: what causality, the window, the documents and a dense mask leave of them.

Causality and window follow from numbers. Where the documents of a packed row begin, and which keys a dense mask shows,
stand in tensors; reading them makes a GPU finish what it has been given before the host goes on. That is done once a
mask, for all its chunks, and all the layers that take the same tensor share it.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .arguments import Mask


# (first, last) of the keys that one chunk of queries sees.
Range: TypeAlias = tuple[int, int]

# A product of matrices in 16 bits is fast where rows begin at multiples of 16 bytes, and lengths are multiples of them.
_KEYS_TOGETHER = 16

# What was read of a tensor: its version, and the ranges by the chunks' boundaries.
_KNOWN: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class Chunk(NamedTuple):
    """Queries start..stop and the keys first..last, which hold all that these queries see."""

    start: int
    stop: int
    first: int
    last: int


def split_into_chunks(mask: Mask, queries: int, keys: int, size: int, reads_tensors: bool = True) -> list[Chunk]:
    """
    Chunks of `size` queries, each with the smallest range of keys that holds all that it sees, up to 15 keys more at
    either end, and never empty.

    Args:
        mask (`Mask`): Whose queries and keys are meant.
        queries, keys (`int`): How many there are, at least 1 each.
        size (`int`): Queries of a chunk, at least 1. A last query that would be alone joins the chunk before it, as
            compilers make code of its own for a length of 1.
        reads_tensors (`bool`, defaults to `True`): Whether documents and dense masks may be read on the host.
    """
    starts = list(range(0, queries, size))
    if len(starts) > 1 and size > 1 and queries - starts[-1] == 1:
        starts.pop()
    boundaries = tuple(zip(starts, [*starts[1:], queries]))
    ranges = [_band_range(mask, start, stop, keys) for start, stop in boundaries]
    if reads_tensors and queries > 1:
        for tensor, seen_by in ((mask.sequence_ids, _seen_by_documents), (mask.visible, _seen_by_dense)):
            if tensor is not None and _may_be_read(tensor):
                seen = _known_ranges(tensor, boundaries, seen_by)
                ranges = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(ranges, seen)]
    chunks = []
    for (start, stop), (first, last) in zip(boundaries, ranges):
        first = min(max(first, 0), keys - 1) // _KEYS_TOGETHER * _KEYS_TOGETHER
        last = min(-(-max(last, first + 1) // _KEYS_TOGETHER) * _KEYS_TOGETHER, keys)
        chunks.append(Chunk(start, stop, first, last))
    return chunks


def _band_range(mask: Mask, start: int, stop: int, keys: int) -> Range:
    first, last = 0, keys
    if mask.is_causal:
        last = min(last, stop + mask.query_offset)
    if mask.sliding_window is not None:
        first = max(first, start + mask.query_offset - mask.sliding_window + 1)
        last = min(last, stop - 1 + mask.query_offset + mask.sliding_window)
    return first, last


def _may_be_read(tensor: Tensor) -> bool:
    """Nothing can be read of tensors without storage, nor while a CUDA graph is recorded."""
    return not (tensor.is_meta or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()))


def _known_ranges(
    tensor: Tensor, boundaries: tuple[Range, ...], seen_by: Callable[[Tensor, tuple[Range, ...]], Tensor]
) -> list[Range]:
    """The range of every chunk by one tensor, read once for as long as the tensor is not written to."""

    def read() -> list[Range]:
        ranges: list[Range] = [(first, last) for first, last in seen_by(tensor, boundaries).tolist()]
        return ranges

    if tensor.is_inference():  # writing to it leaves no trace
        return read()
    version, known = _KNOWN.get(tensor, (None, {}))
    if version != tensor._version:
        known = {}
        _KNOWN[tensor] = (tensor._version, known)
    if boundaries not in known:
        known[boundaries] = read()
    return known[boundaries]


def _seen_by_documents(ids: Tensor, boundaries: tuple[Range, ...]) -> Tensor:
    """(chunks, 2): from the first to behind the last key whose number lies among those of a chunk's queries."""
    lengths = [stop - start for start, stop in boundaries]
    chunks = ids.split(lengths, dim=1)
    lowest = torch.stack([chunk.amin(1) for chunk in chunks], dim=1)  # (batch, chunk)
    highest = torch.stack([chunk.amax(1) for chunk in chunks], dim=1)
    seen = (ids[:, None] >= lowest[..., None]) & (ids[:, None] <= highest[..., None])  # (batch, chunk, key)
    return _first_and_last(seen.any(0))


def _seen_by_dense(visible: Tensor, boundaries: tuple[Range, ...]) -> Tensor:
    """(chunks, 2): from the first to behind the last key that any query of a chunk sees."""
    chunks = visible.flatten(0, 1).any(0).split([stop - start for start, stop in boundaries])
    return _first_and_last(torch.stack([chunk.any(0) for chunk in chunks]))


def _first_and_last(seen: Tensor) -> Tensor:
    """(chunks, 2): the first True of (chunks, key) and the place behind the last; (0, 1) where there is none."""
    keys = seen.shape[1]
    first = seen.int().argmax(1)
    last = keys - seen.int().flip(1).argmax(1)
    is_empty = ~seen.any(1)
    return torch.stack([first.masked_fill(is_empty, 0), last.masked_fill(is_empty, 1)], dim=1)
