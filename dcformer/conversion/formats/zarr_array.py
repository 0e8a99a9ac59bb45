"""Arrays that orbax wrote as zarr 2 or zarr 3, each in a folder of its own or all inside an OCDBT database."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import cached_property

import torch
from torch import Tensor

from ...common.json_text import parse_json
from ...common.quoting import quoted
from ..leaves import Leaf, from_numpy
from ..pieces import Box
from ..stores import Store, first_sentence, import_tensorstore


_DTYPES = {
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


class ZarrLeaf(Leaf):
    """An array that orbax wrote, as zarr 2 or 3, in a folder of its own or inside an OCDBT database."""

    def __init__(
        self,
        name: str,
        store: Store,
        folder: str,
        files: list[str],
        *,
        ocdbt: bool = False,
        read_file: Callable[[str], bytes],
    ):
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
        if not isinstance(name, str) or name not in _DTYPES:
            raise ValueError(
                f"{self.metadata_file} gives the dtype {name!r}, which no parameter has; known are "
                f"{', '.join(_DTYPES)}."
            )
        return _DTYPES[name]

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
