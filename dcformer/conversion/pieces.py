"""A piece: a part of a source array and its place in a parameter. The only arithmetic of a conversion.

A piece selects a box of a leaf, puts the leaf's axes into the order in which the parameter holds them, and fills a
span of the parameter. That is all any layout difference comes down to (fused projections, transposed kernels, stacked
layers), and it reads the same both ways: `write_to_parameter` and `write_to_leaf` are inverses.

The words of the engine, here and in `plan.py`, `leaves.py` and `shard_writer.py`:

    leaf        an array of a source checkpoint, as JAX names the arrays of a tree; read box by box (`Leaf`)
    chunk       what a leaf's format stores, and decodes, as one: a zarr chunk, or else the whole array
    parameter   a tensor of the model, written in row-major order (`Parameter`)
    box         a rectangular part of a leaf: (start, stop) for each of its axes (`Box`)
    span        a contiguous part of a parameter: (start, stop) of its elements in row-major order
    piece       a box of a leaf and the span of a parameter that it fills (`Piece`); a piece can be split into smaller
                ones, so that what is turned, cast, written or hashed at a time stays in the processor's cache
    plan        all pieces of a conversion, checked to fill every parameter exactly once (`Plan`)
    origin      where a value of the model's configuration comes from, for the report (`Origin`)
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


# Bytes that are turned, cast, written or hashed at a time: they stay in the processor's cache.
PART_BYTES = 2 * 2**20
Box = tuple[tuple[int, int], ...]


class Scratch(threading.local):
    """Memory that each thread uses again and again: fresh pages cost more than what is done with them."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, use: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, valid until this thread asks for the same use again."""
        nbytes = math.prod(shape) * dtype.itemsize
        buffer = self._buffers.get(use)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._buffers[use] = torch.empty(nbytes, dtype=torch.uint8)
        return buffer[:nbytes].view(dtype).view(*shape)


_SCRATCH = Scratch()


@dataclass(frozen=True)
class Piece:
    """
    A box of a leaf and the span of a parameter that it fills.

    Args:
        leaf (`str`): Name of the source array.
        box: The part of the leaf that this piece carries.
        order: The leaf's axes in the parameter's order. Axes that are missing have length 1 in the box (one layer of a
            stack, one of two fused matrices).
        parameter (`str`): Name of the parameter.
        offset (`int`): Start of the span: the first element of the parameter, in row-major order, that the piece fills.
        transform (`str`): The same in words, for the report.
    """

    leaf: str
    box: Box
    order: tuple[int, ...]
    parameter: str
    offset: int
    transform: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the piece's axes in the parameter's order."""
        return tuple(self.box[axis][1] - self.box[axis][0] for axis in self.order)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def split(self, most: int) -> Iterator[Piece]:
        """Pieces of at most `most` elements (or one row), cut along the first axis of the parameter's order."""
        if not self.order or self.size <= most:
            yield self
            return
        axis = self.order[0]
        start, stop = self.box[axis]
        row = self.size // (stop - start)
        step = max(1, most // row)
        for first in range(start, stop, step):
            box = list(self.box)
            box[axis] = (first, min(first + step, stop))
            yield replace(self, box=tuple(box), offset=self.offset + (first - start) * row)

    def overlap(self, box: Box) -> Box | None:
        """The part of `box` (in the leaf's coordinates) that belongs to this piece, or None."""
        common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(self.box, box))
        return common if all(start < stop for start, stop in common) else None

    def _target(self, span: Tensor, common: Box) -> Tensor:
        """The elements of this piece's span of a parameter that `common` fills, with axes in the parameter's order."""
        view = span.view(self.shape)
        return view[tuple(slice(common[a][0] - self.box[a][0], common[a][1] - self.box[a][0]) for a in self.order)]

    def turned(self, values: Tensor, box: Box, common: Box) -> Tensor:
        """
        The elements that belong to this piece, with axes in the parameter's order. They may lie in memory that this
        thread's next call of any piece uses again.

        Args:
            values (`Tensor`): What `box` of the leaf holds.
            common: The part of the box that belongs to this piece, from `overlap`.
        """
        elements = values[tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(common, box))]
        sizes = [common[axis][1] - common[axis][0] for axis in self.order]
        kept = sorted(self.order)
        elements = elements.reshape([elements.shape[axis] for axis in kept])
        order = [kept.index(axis) for axis in self.order]
        split = order[0] if order else 0
        if split > 0 and order == list(range(split, len(order))) + list(range(split)):
            # Copying the rows together first and turning two axes only is what torch has a fast loop for.
            rows = _SCRATCH.take("rows", elements.shape, elements.dtype).copy_(elements)
            rows = rows.view(math.prod(elements.shape[:split]), -1)
            return _SCRATCH.take("turned", rows.t().shape, elements.dtype).copy_(rows.t()).view(sizes)
        return elements.permute(order)

    def cast(self, values: Tensor, box: Box, common: Box, dtype: torch.dtype) -> tuple[Tensor, float]:
        """
        As `turned`, in the parameter's dtype, and the largest absolute rounding error of the cast.

        Raises:
            ValueError: if a finite value overflows the dtype.
        """
        elements = self.turned(values, box, common)
        if elements.dtype == dtype:
            return elements, 0.0
        cast = _SCRATCH.take("cast", elements.shape, dtype).copy_(elements)
        return cast, _rounding_error(elements, cast, self.leaf)

    def write_to_parameter(self, values: Tensor, box: Box, span: Tensor) -> float:
        """
        Copy what `values`, which hold `box` of the leaf, contribute to a parameter, casting if need be. `span` is the
        part of the flat parameter that this piece fills: `size` elements from `offset`.

        Returns:
            The largest absolute rounding error of the cast, 0.0 without one.

        Raises:
            ValueError: if a finite value overflows the parameter's dtype.
        """
        common = self.overlap(box)
        if common is None:
            return 0.0
        elements, error = self.cast(values, box, common, span.dtype)
        self._target(span, common).copy_(elements)
        return error

    def write_to_leaf(self, span: Tensor, values: Tensor, box: Box) -> None:
        """The inverse: copy from this piece's span of a parameter into `values`, which hold `box` of the leaf."""
        common = self.overlap(box)
        if common is None:
            return
        elements = self._target(span, common)
        kept = sorted(self.order)
        elements = elements.permute([self.order.index(axis) for axis in kept])
        view = values[tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(common, box))]
        view.copy_(elements.reshape(view.shape))


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without `torch.`, as configurations and reports have it."""
    return str(dtype).removeprefix("torch.")


def _rounding_error(exact: Tensor, rounded: Tensor, leaf: str) -> float:
    # The difference of a number and its rounding is a number of the wider format.
    wide = torch.promote_types(torch.promote_types(exact.dtype, rounded.dtype), torch.float32)
    error = (exact.to(wide) - rounded).abs_()
    if error.numel() == 0 or torch.isfinite(largest := error.max()):
        return largest.item() if error.numel() else 0.0
    finite = exact.isfinite()
    if not torch.isfinite(error[finite]).all():
        raise ValueError(
            f"{leaf} holds {exact[finite].abs().max().item():.4g}, which overflows {dtype_name(rounded.dtype)}; "
            "convert with --dtype bfloat16, float32 or keep."
        )
    return error[finite].max().item() if finite.any() else 0.0
