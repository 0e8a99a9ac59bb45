"""Arrays of a checkpoint, read box by box as torch tensors, wherever and however they are stored."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..common.json_text import parse_json
from ..common.quoting import quoted
from .pieces import Box
from .stores import Store, first_sentence, import_tensorstore


_ZARR_DTYPES = {
    "<f4": torch.float32,
    "<f2": torch.float16,
    "<f8": torch.float64,
    "bfloat16": torch.bfloat16,
    "<i4": torch.int32,
    "<i8": torch.int64,
    "float32": torch.float32,
    "float16": torch.float16,
    "float64": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
}
# Chunks up to this may be larger than their array.
_SMALL_CHUNK_BYTES = 2**24
# Chunks are read together until they come to this much.
_CELL_BYTES = 320 * 2**20


class Leaf:
    """
    One array.

    Attributes:
        name (`str`): Its name in the checkpoint.
        shape, dtype: Of the array, `dtype` a torch dtype.
        chunk_shape: What is stored, and decoded, as one.
    """

    name: str
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

    def cells(self, order: Sequence[int] = ()) -> Iterator[Box]:
        """
        Boxes that cover the array, none of which cuts through a chunk: reading them one by one decodes every chunk
        once. Small chunks are taken together, along the last axis of `order` first and along axes that it lacks last,
        so that a parameter whose axes have this order is filled in long runs.
        """
        cell = [max(1, size) for size in self.chunk_shape]
        for axis in [*reversed(order), *(axis for axis in range(len(self.shape)) if axis not in order)]:
            fitting = _CELL_BYTES // (math.prod(cell) * self.dtype.itemsize)
            cell[axis] *= max(1, min(fitting, -(-self.shape[axis] // cell[axis])))
        ranges = [range(0, size, step) for size, step in zip(self.shape, cell)]
        for starts in itertools.product(*ranges):
            yield tuple((a, min(a + step, size)) for a, step, size in zip(starts, cell, self.shape))

    def whole(self) -> Box:
        return tuple((0, size) for size in self.shape)


class ZarrLeaf(Leaf):
    """An array that orbax wrote, as zarr 2 or 3, in a folder of its own or inside an OCDBT database."""

    def __init__(self, name: str, store: Store, folder: str, files: list[str], *, ocdbt: bool = False, read_file=None):
        """
        Args:
            name (`str`): Name of the array.
            store (`Store`), folder (`str`): Where its files are.
            files: Names of those files.
            ocdbt (`bool`): They are entries of the OCDBT database in `store`.
            read_file: Function from a file's name to its bytes.
        """
        self.name, self.where = name, store.describe(folder)
        self._store, self._folder = store, "" if ocdbt else folder
        self._files = set(files)
        self._is_zarr3 = "zarr.json" in self._files
        kvstore = store.spec(folder + "/")
        if ocdbt:
            kvstore = {"driver": "ocdbt", "base": store.spec(), "path": folder + "/"}
        self._spec = {"driver": "zarr3" if self._is_zarr3 else "zarr", "kvstore": kvstore}
        self.metadata_file = f"{self.where}/{'zarr.json' if self._is_zarr3 else '.zarray'}"
        if not self._files & {".zarray", "zarr.json"}:
            raise ValueError(f"{self.metadata_file} is missing, so {name} cannot be read; copy the checkpoint again.")
        self._metadata = self._parse(read_file("zarr.json" if self._is_zarr3 else ".zarray"))
        self.shape = tuple(self._metadata["shape"])
        self.dtype = self._dtype()
        self.chunk_shape = self._chunk_shape()

    def _parse(self, text: bytes) -> dict:
        try:
            metadata = parse_json(text)
            shape = metadata["shape"]
            valid = isinstance(shape, list) and all(isinstance(size, int) and size >= 0 for size in shape)
            encoding = metadata.get("chunk_key_encoding", {})
            separator = encoding.get("configuration", {}).get("separator", metadata.get("dimension_separator", "."))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.metadata_file} is not valid zarr metadata; copy the checkpoint again.") from error
        if not valid:
            raise ValueError(f"{self.metadata_file} gives the shape {shape!r}; copy the checkpoint again.")
        if separator not in (".", "/") or encoding.get("name", "default") not in ("default", "v2"):
            raise ValueError(f"{self.metadata_file} gives no valid names of chunks; copy the checkpoint again.")
        return metadata

    def _dtype(self) -> torch.dtype:
        name = self._metadata.get("data_type" if self._is_zarr3 else "dtype")
        if not isinstance(name, str) or name not in _ZARR_DTYPES:
            raise ValueError(
                f"{self.metadata_file} gives the dtype {name!r}, which no parameter has; known are "
                f"{', '.join(_ZARR_DTYPES)}."
            )
        return _ZARR_DTYPES[name]

    def _chunk_shape(self) -> tuple[int, ...]:
        try:
            grid = self._metadata["chunk_grid"]["configuration"] if self._is_zarr3 else self._metadata
            chunks = tuple(grid["chunk_shape" if self._is_zarr3 else "chunks"])
            valid = len(chunks) == len(self.shape) and all(isinstance(size, int) and size > 0 for size in chunks)
        except (KeyError, TypeError):
            valid = False
        if not valid:
            raise ValueError(f"{self.metadata_file} has no valid chunk shape; copy the checkpoint again.")
        # A chunk is decoded as a whole, whatever part of it is in the array.
        if math.prod(chunks) * self.dtype.itemsize > max(2 * self.nbytes, _SMALL_CHUNK_BYTES):
            raise ValueError(
                f"{self.metadata_file} gives chunks of {quoted(list(chunks))}, far larger than the array, which is "
                f"{list(self.shape)}; copy the checkpoint again."
            )
        return chunks

    def _chunk_files(self) -> Iterator[str]:
        counts = [-(-size // step) for size, step in zip(self.shape, self.chunk_shape)]
        prefix, separator = "", self._metadata.get("dimension_separator", ".")
        if self._is_zarr3:
            encoding = self._metadata.get("chunk_key_encoding", {"name": "default"})
            is_default = encoding.get("name", "default") == "default"
            separator = encoding.get("configuration", {}).get("separator", "/" if is_default else ".")
            prefix = "c" + separator if is_default else ""
        for index in itertools.product(*map(range, counts)):
            yield prefix + separator.join(map(str, index)) if index else prefix.rstrip(separator) or "0"

    def fingerprint(self) -> list:
        return self._store.fingerprint(self._folder)

    def check(self) -> None:
        # tensorstore reads a chunk that is not there as zeros.
        for file in self._chunk_files():
            if file not in self._files:
                raise ValueError(
                    f"{self.where}/{file} is missing: a chunk of {self.name} was lost; copy the checkpoint again."
                )
        self._array  # noqa: B018  opening it checks the metadata as a whole

    @cached_property
    def _array(self):
        tensorstore = import_tensorstore()
        try:
            return self._store.result(tensorstore.open(self._spec, read=True))
        except ValueError as error:
            raise ValueError(f"{self.metadata_file} cannot be used: {first_sentence(error)}") from error

    def read(self, box: Box) -> Tensor:
        region = tuple(slice(start, stop) for start, stop in box)
        try:
            values = self._store.result(self._array[region].read() if region else self._array.read())
        except ValueError as error:
            raise ValueError(
                f"{self.name} cannot be read from {self.where}: {first_sentence(error)}; a chunk is truncated or "
                "damaged, copy the checkpoint again."
            ) from error
        return from_numpy(values)


# numpy parses the header of an array as Python, which CPython 3.11 cannot do in two threads at once (SystemError).
_NUMPY_HEADER = threading.Lock()


class ArrayLeaf(Leaf):
    """An array of an .npz or .npy file, read as a whole. `load` opens it without unpickling anything."""

    def __init__(self, name: str, where: str, shape, dtype: np.dtype, load):
        self.name, self.where, self.shape = name, where, tuple(shape)
        if dtype.name not in ("float32", "float16", "float64", "bfloat16", "int32", "int64"):
            raise ValueError(f"{where} holds {name} as {dtype.name}, which no parameter has.")
        # Another machine's byte order is turned as the array is read.
        self._native = dtype.newbyteorder("=")
        self.dtype = from_numpy(np.zeros(0, self._native)).dtype
        self.chunk_shape = self.shape
        self._load = load

    def fingerprint(self) -> list:
        return file_fingerprint(self.where)

    def read(self, box: Box) -> Tensor:
        try:
            with _NUMPY_HEADER:
                values = self._load()
        except (ValueError, OSError, EOFError) as error:
            raise ValueError(f"{self.name} cannot be read from {self.where}: {error}; copy the file again.") from error
        return from_numpy(np.ascontiguousarray(values[tuple(slice(*interval) for interval in box)], self._native))


class TensorLeaf(Leaf):
    """A tensor of a torch or safetensors file; `load` maps it into memory."""

    def __init__(self, name: str, where: Path, shape, dtype: torch.dtype, load):
        self.name, self.where, self.shape, self.dtype = name, str(where), tuple(shape), dtype
        self.chunk_shape = self.shape
        self._load = load

    def fingerprint(self) -> list:
        return file_fingerprint(self.where)

    def read(self, box: Box) -> Tensor:
        return self._load()[tuple(slice(*interval) for interval in box)]


def file_fingerprint(path: str) -> list:
    stat = Path(path).stat()
    return [path, stat.st_size, stat.st_mtime_ns]


def from_numpy(values: np.ndarray) -> Tensor:
    """A tensor over the array's memory; ml_dtypes' bfloat16, which torch does not know, is reinterpreted."""
    if not values.flags.writeable:
        values = values.copy()
    if values.dtype.name == "bfloat16":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
