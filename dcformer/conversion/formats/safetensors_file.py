"""Safetensors files: their tensors, read slice by slice."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...common.json_text import parse_json
from ..leaves import Leaf, file_fingerprint
from ..pieces import Box
from .torch_file import damaged


# The format's names of the dtypes that are read and written.
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


def list_safetensors(path: Path) -> list[Leaf]:
    """
    The tensors of one safetensors file.

    Raises:
        ValueError: if the file is damaged or cut short, or holds a dtype that no parameter has.
    """
    try:
        with safe_open(path, framework="pt") as file:
            headers = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is no dictionary
            entries = {name: (tuple(header.get_shape()), header.get_dtype()) for name, header in headers.items()}
        with path.open("rb") as content:  # of two tensors with one name, the library lists one
            parse_json(content.read(int.from_bytes(content.read(8), "little")))
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(damaged(path, error)) from error
    for name, (_, dtype) in entries.items():
        if dtype not in SAFETENSORS_DTYPES:
            raise ValueError(f"{path} holds {name} as {dtype}, which no parameter has; convert the model unquantised.")
    return [SafetensorsLeaf(name, path, shape, SAFETENSORS_DTYPES[dtype]) for name, (shape, dtype) in entries.items()]


class SafetensorsLeaf(Leaf):
    """
    A tensor of a safetensors file.

    The file is opened for every read: what was read of it counts as memory for as long as it is mapped, and a file that
    was cut short in the meantime is noticed.
    """

    def __init__(self, name: str, path: Path, shape: tuple[int, ...], dtype: torch.dtype):
        self.name, self.where, self.shape, self.dtype = name, str(path), shape, dtype
        self.chunk_shape = shape

    def fingerprint(self) -> list:
        return file_fingerprint(self.where)

    def read(self, box: Box) -> Tensor:
        try:
            with safe_open(self.where, framework="pt") as file:
                return file.get_slice(self.name)[tuple(slice(*interval) for interval in box)]
        except SafetensorError as error:
            raise ValueError(damaged(Path(self.where), error)) from error
