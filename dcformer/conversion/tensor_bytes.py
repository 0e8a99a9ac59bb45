"""The bytes of tensors in files, read part by part: their SHA-256, and whether every number in them is finite."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .pieces import PART_BYTES


@dataclass(frozen=True)
class TensorInFile:
    """A tensor as it lies in a file: `start` is its first byte."""

    name: str
    path: Path
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def parts(self) -> Iterator[Tensor]:
        """
        The elements, flat and in order, in parts of at most 2 MiB; each is valid until the next one.

        Raises:
            OSError: if the file ends inside the tensor.
        """
        left = math.prod(self.shape) * self.dtype.itemsize
        buffer = torch.empty(min(left, PART_BYTES), dtype=torch.uint8)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start)
            while left > 0:
                part = buffer[: min(left, len(buffer))]
                unfilled = part.numpy().data
                while unfilled:
                    count = file.readinto(unfilled)
                    if not count:
                        raise OSError(f"{self.path} ends inside {self.name}.")
                    unfilled = unfilled[count:]
                yield part.view(self.dtype)
                left -= len(part)

    def digest(self) -> tuple[str, bool]:
        """The SHA-256 of the bytes, and whether all elements are finite."""
        digest, finite = hashlib.sha256(), True
        for part in self.parts():
            digest.update(part.view(torch.uint8).numpy().data)
            finite = finite and is_finite(part)
        return digest.hexdigest(), finite


def as_bytes(values: Tensor) -> memoryview:
    """The bytes of the elements, in order."""
    return values.contiguous().flatten().view(torch.uint8).numpy().data


def is_finite(values: Tensor) -> bool:
    """Whether no element is NaN or infinity; `isfinite` would take more time than a SHA-256."""
    if not values.is_floating_point() or not values.numel():
        return True
    return all(math.isfinite(bound) for bound in torch.stack(torch.aminmax(values)).tolist())


def not_finite_words(name: str, parts: Iterable[Tensor], shape: tuple[int, ...]) -> str:
    """A sentence on the elements of a tensor, given flat and in order, that are NaN or infinity."""
    count = first = position = 0
    for part in parts:
        found = (~part.isfinite()).nonzero()
        if len(found) and not count:
            first = position + int(found[0])
        count += len(found)
        position += len(part)
    layer = name.split(".layers.")[1].split(".")[0] if ".layers." in name else ""
    where = f"The weights of layer {layer} hold" if layer.isdecimal() else "The weights hold"
    values = "1 such value," if count == 1 else f"{count} such values, the first"
    index = [int(i) for i in np.unravel_index(first, shape)] if shape else []
    return f"{where} NaN or infinity, as after a run that diverged: {name} has {values} at {index}"
