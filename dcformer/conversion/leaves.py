"""Arrays of a checkpoint, read box by box as torch tensors, wherever and however they are stored."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .pieces import Box


# Chunks are read together until they come to this much.
_READ_BYTES = 320 * 2**20


class Leaf:
    """
    An array of a checkpoint, in whatever format. The words leaf, chunk and box are explained in `pieces.py`.

    Attributes:
        name (`str`): Its name in the checkpoint.
        where (`str`): The file or folder that holds it.
        shape, dtype: The array's shape and torch dtype.
        chunk_shape: What is stored, and decoded, as one.
    """

    name: str
    where: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunk_shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def check(self) -> None:
        """Raise ValueError unless everything is there that reading will need. Reads no data."""

    def fingerprint(self) -> list:
        """What tells that the stored array is still the same one."""
        raise NotImplementedError

    def read(self, box: Box) -> Tensor:
        """The elements of a box, with the box's shape."""
        raise NotImplementedError

    def boxes_to_read(self, order: Sequence[int] = ()) -> Iterator[Box]:
        """
        Boxes that cover the array, none of which cuts through a chunk: reading them one by one decodes every chunk
        once. Small chunks are read together, along the last axis of `order` first and along axes that it lacks last,
        so that a parameter whose axes have this order is filled in long contiguous parts.
        """
        lengths = [max(1, size) for size in self.chunk_shape]
        for axis in [*reversed(order), *(axis for axis in range(len(self.shape)) if axis not in order)]:
            fitting = _READ_BYTES // (math.prod(lengths) * self.dtype.itemsize)
            lengths[axis] *= max(1, min(fitting, -(-self.shape[axis] // lengths[axis])))
        ranges = [range(0, size, step) for size, step in zip(self.shape, lengths)]
        for starts in itertools.product(*ranges):
            yield tuple((a, min(a + step, size)) for a, step, size in zip(starts, lengths, self.shape))

    def whole(self) -> Box:
        """The box that is the whole array."""
        return tuple((0, size) for size in self.shape)


def file_fingerprint(path: str) -> list:
    """What tells that a file is still the same one: its name, size and time."""
    stat = Path(path).stat()
    return [path, stat.st_size, stat.st_mtime_ns]


def from_numpy(values: np.ndarray) -> Tensor:
    """A tensor over the array's memory; ml_dtypes' bfloat16, which torch does not know, is reinterpreted."""
    if not values.flags.writeable:
        values = values.copy()
    if values.dtype.name == "bfloat16":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
