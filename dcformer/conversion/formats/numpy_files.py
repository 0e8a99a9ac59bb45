"""Arrays in NumPy's own files, `.npz` and `.npy`, opened without unpickling anything."""

from __future__ import annotations

import threading
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch import Tensor

from ...common.quoting import quoted
from ..leaves import Leaf, file_fingerprint, from_numpy
from ..pieces import Box


# numpy parses the header of an array as Python, which CPython 3.11 cannot do in two threads at once (SystemError).
_NUMPY_HEADER = threading.Lock()


def open_npz(path: Path) -> dict[str, Leaf]:
    """
    The arrays of an .npz file, by name.

    Raises:
        ValueError: if the file is damaged, holds a name twice or pickled objects.
    """
    headers: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                key = info.filename.removesuffix(".npy")
                if key in headers:
                    raise ValueError(f"it holds {quoted(key)} twice")
                headers[key] = _npy_header(archive.open(info))
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, RuntimeError, NotImplementedError, zlib.error) as error:
        raise ValueError(f"{path} is not a complete .npz file of arrays ({error}); copy it again.") from error

    def loader(key: str):
        def load():
            with np.load(path, allow_pickle=False) as arrays:
                return arrays[key]

        return load

    return {key: NumpyLeaf(key, str(path), shape, dtype, loader(key)) for key, (shape, dtype) in headers.items()}


def open_npy_folder(folder: Path) -> dict[str, Leaf]:
    """
    The arrays of the .npy files in a folder, by the names of the files.

    Raises:
        ValueError: if a file is damaged or holds pickled objects.
    """
    leaves: dict[str, Leaf] = {}
    for path in sorted(folder.glob("*.npy")):
        try:
            with path.open("rb") as file:
                shape, dtype = _npy_header(file)
        except (ValueError, OSError, EOFError) as error:
            raise ValueError(f"{path} is not a complete .npy file ({error}); copy it again.") from error
        key = path.name.removesuffix(".npy")

        def load(path=path):
            return np.load(path, allow_pickle=False, mmap_mode="r")

        leaves[key] = NumpyLeaf(key, str(path), shape, dtype, load)
    return leaves


def _npy_header(file) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("it holds pickled objects, which are not read")
    return shape, dtype


class NumpyLeaf(Leaf):
    """An array of an .npz or .npy file, read as a whole. `load` opens it without unpickling anything."""

    def __init__(self, name: str, where: str, shape: tuple[int, ...], dtype: np.dtype, load: Callable[[], np.ndarray]):
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
