"""Writing checkpoints that orbax restores: zarr arrays, chunk by chunk, and the files that name them."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..destination import with_number
from ..pieces import Box, dtype_name
from ..stores import first_sentence, import_tensorstore


def create_array(folder: Path, shape: tuple[int, ...], first_chunk: Box, dtype: torch.dtype) -> Any:
    """
    An array of tensorstore's, created or opened.

    Args:
        folder (`Path`): Where its files go.
        shape, dtype: The array's shape and torch dtype.
        first_chunk: The box that is its first chunk.

    Raises:
        OSError: if it cannot be created.
    """
    chunk = [stop - start for start, stop in first_chunk]
    metadata = {"shape": shape, "chunks": chunk, "compressor": {"id": "zstd", "level": 1}}
    kvstore = {"driver": "file", "path": f"{folder}/"}
    spec = {
        "driver": "zarr",
        "kvstore": kvstore,
        "dtype": dtype_name(dtype),
        "metadata": metadata,
        # Zeros too are stored: readers of checkpoints take a chunk that is not there for a lost one.
        "store_data_equal_to_fill_value": True,
    }
    return _written(import_tensorstore().open(spec, open=True, create=True))


def write_array(array: Any, values: Tensor) -> None:
    """
    Write a part of an array.

    Args:
        array: The part, an indexed array from [`create_array`].
        values (`Tensor`): What it will hold.

    Raises:
        OSError: if it cannot be written; its `errno` tells whether the disk is full.
    """
    if values.dtype == torch.bfloat16:  # which NumPy does not know
        values = values.view(torch.int16)
    _written(array.write(values.numpy().view(array.dtype.numpy_dtype)))


def _written(future: Any) -> Any:
    """The result of what tensorstore writes; OSError if it cannot be written."""
    try:
        return future.result()
    except (ValueError, OSError) as error:
        is_full = str(error).startswith("RESOURCE_EXHAUSTED")
        raise with_number(OSError(first_sentence(error)), errno.ENOSPC if is_full else errno.EIO) from error


def orbax_tree(names: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """
    What orbax keeps of the arrays' names in `_METADATA` and in `checkpoint`.

    The arrays are declared as NumPy's: restored without further instructions, JAX's would need a `_sharding` file that
    names the devices of the machine that reads.
    """
    entries: dict[str, Any] = {}
    tree: dict[str, Any] = {"opt_state": {}}
    types = {"step": "scalar", **dict.fromkeys(names, "np.ndarray"), "opt_state": "Dict"}
    for name, value_type in types.items():
        *above, last = keys = name.split(".")
        entries[str(tuple(keys))] = {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],
            "value_metadata": {"value_type": value_type, "skip_deserialize": value_type == "Dict"},
        }
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node.setdefault(last, f"PLACEHOLDER://{name}")
    return {"tree_metadata": entries, "use_zarr3": False}, tree
