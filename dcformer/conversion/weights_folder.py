"""The weight files of a Transformers folder, safetensors or torch, whole or sharded, as arrays that are read lazily."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..common.json_text import parse_json
from ..common.quoting import quoted
from .leaves import TensorLeaf
from .torch_file import damaged, list_torch


SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# In the order in which Transformers looks for them.
_SINGLE_AND_INDEX = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def weight_files(folder: Path) -> list[Path]:
    """
    The files that hold a folder's weights.

    Raises:
        FileNotFoundError: if there are none, or one that the index names is missing.
        ValueError: if the index is damaged or points outside its folder.
    """
    for single, index in _SINGLE_AND_INDEX:
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            return _indexed(folder, folder / index)
    raise FileNotFoundError(
        f"{str(folder)!r} holds no weights: there is none of "
        f"{', '.join(name for pair in _SINGLE_AND_INDEX for name in pair)}."
    )


def _indexed(folder: Path, index: Path) -> list[Path]:
    try:
        names = sorted(set(parse_json(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not a valid index of weights; copy or download it again.") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise ValueError(
                f"{index} names the file {quoted(name)}, which is not in its own folder; refusing to read it."
            )
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{index} names {name!r}, which is missing; copy or download it again.")
    return [folder / name for name in names]


def open_weights(folder: str | Path) -> dict[str, TensorLeaf]:
    """
    Every tensor of a folder, by name. No pickle is unpickled beyond tensors.

    Raises:
        FileNotFoundError, ValueError: as `weight_files`, or if a file is damaged or two files hold the same name.
    """
    leaves: dict[str, TensorLeaf] = {}
    for path in weight_files(Path(folder)):
        listing = list_safetensors if path.suffix == ".safetensors" else list_torch
        for leaf in listing(path):
            if leaf.name in leaves:
                raise ValueError(f"{leaf.name} is in {leaves[leaf.name].where} and in {path}; remove one of the two.")
            leaves[leaf.name] = leaf
    return leaves


def count_layers(names: Iterable[str]) -> int:
    """How many layers tensors of these names make."""
    return 1 + max((int(match[1]) for name in names if (match := _LAYER.search(name))), default=-1)


def list_safetensors(path: Path) -> list[TensorLeaf]:
    """The tensors of one safetensors file."""
    try:
        with safe_open(path, framework="pt"):  # checks the header and the length of the file
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries = parse_json(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(damaged(path, error)) from error
    entries.pop("__metadata__", None)
    for name, entry in entries.items():
        if entry["dtype"] not in SAFETENSORS_DTYPES:
            raise ValueError(
                f"{path} holds {name} as {entry['dtype']}, which no parameter has; convert the model unquantised."
            )
    return [SafetensorsLeaf(name, path, entry, 8 + length) for name, entry in entries.items()]


class SafetensorsLeaf(TensorLeaf):
    """A tensor of a safetensors file. It is read, not mapped: mapped pages are slow to come and count as memory."""

    def __init__(self, name: str, where: Path, entry: dict, data_start: int):
        super().__init__(name, where, entry["shape"], SAFETENSORS_DTYPES[entry["dtype"]], None)
        self._start = data_start + entry["data_offsets"][0]

    def read(self, box) -> Tensor:
        first, last = box[0] if box else (0, 1)
        row = math.prod(self.shape[1:])
        values = torch.empty((last - first) * row, dtype=self.dtype)
        buffer = memoryview(values.view(torch.uint8).numpy())
        with open(self.where, "rb", buffering=0) as file:
            file.seek(self._start + first * row * self.dtype.itemsize)
            while buffer:
                count = file.readinto(buffer)
                if not count:
                    raise ValueError(f"{self.where} ends inside {self.name}; copy or download it again.")
                buffer = buffer[count:]
        values = values.view(last - first, *self.shape[1:]) if box else values.view(())
        return values[(slice(None), *(slice(*interval) for interval in box[1:]))] if box else values
