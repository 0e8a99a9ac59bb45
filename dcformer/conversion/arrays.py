"""Arrays of a checkpoint, read lazily as torch tensors, and the files that hold them: safetensors, torch and NumPy."""

import math
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..common.files import check_relative
from .settings import naming, read_json


# (start, stop) for each axis of an array.
Region = tuple[tuple[int, int], ...]

# In the order in which Transformers looks for them.
_WEIGHT_FILES = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)


@dataclass(frozen=True)
class SourceArray:
    """An array of a checkpoint."""

    name: str  #: in the checkpoint
    where: str  #: the file or folder that holds it
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunk_shape: tuple[int, ...]  #: the part that is stored, and decoded, as one
    load: Callable[[tuple[slice, ...]], Tensor]  #: returns the elements that a tuple of slices selects, one per axis
    is_whole: bool = True  #: whether all chunks are stored; those that are not are read as the array's fill value

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def whole(self) -> Region:
        """The region that is the whole array."""
        return tuple((0, size) for size in self.shape)

    def read(self, region: Region | None = None) -> Tensor:
        """The elements of a region, in its shape; `None`: all."""
        return self.load(tuple(slice(*interval) for interval in (self.whole if region is None else region)))


@dataclass(frozen=True)
class Source:
    """The content of a checkpoint, whatever model it is of."""

    format: str  #: such as `"PAX (flat .npz)"`; told more precisely when the model is known
    location: str
    arrays: Mapping[str, SourceArray]  #: by name, without those of the training state
    stamps: Sequence[Any]  #: names, sizes and times of its files
    step: int | None = None
    training_state: Sequence[str] = ()  #: names of an optimizer's arrays, a step counter and random states, not opened
    other_items: Sequence[str] = ()  #: of the same step, not read
    run: str = ""  #: folder of the run that it is a step of
    training: Mapping[Any, Any] = field(default_factory=dict)  #: values of the run's training YAML
    facts: Mapping[str, Any] = field(default_factory=dict)  #: further entries of `record`, such as `skipped_steps`

    @property
    def record(self) -> dict[str, Any]:
        """The `source` of a report."""
        return {"format": self.format, "location": self.location, "step": self.step, **self.facts}


def open_weights(folder: str | Path) -> dict[str, SourceArray]:
    """
    Every tensor of a folder of safetensors or torch files, by name. Only headers are read.

    Raises:
        FileNotFoundError: if there are no weights, or a file that the index names is missing.
        ValueError: if the index names a file outside the folder, or two files hold the same tensor.
    """
    arrays: dict[str, SourceArray] = {}
    for path in _weight_files(Path(folder)):
        opened = open_safetensors(path) if path.suffix == ".safetensors" else _open_torch(path)
        for name in sorted(opened.keys() & arrays.keys()):
            raise ValueError(f"{name} is in {arrays[name].where} and in {path}; remove one of the two.")
        arrays |= opened
    return arrays


def _weight_files(folder: Path) -> list[Path]:
    for single, index in _WEIGHT_FILES:
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            names = read_json(folder / index).get("weight_map", {}).values()
            if outside := [name for name in names if "/" in check_relative(name)]:
                raise ValueError(f"{str(folder / index)!r} must name files beside it, got {outside[0]!r}.")
            return [folder / name for name in sorted(set(names))]
    raise FileNotFoundError(f"{str(folder)!r} holds no weights: no {_WEIGHT_FILES[0][0]}, no {_WEIGHT_FILES[1][0]}.")


def open_safetensors(path: Path) -> dict[str, SourceArray]:
    """The arrays of a safetensors file, by name. Only its header is read."""

    def load(name: str, slices: tuple[slice, ...]) -> Tensor:
        with safe_open(path, framework="pt") as file:
            return file.get_slice(name)[slices]

    arrays = {}
    with naming(path, SafetensorError), safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  it is no dictionary
            shape = tuple(file.get_slice(name).get_shape())
            dtype = file.get_slice(name)[tuple(slice(0, 0) for _ in shape)].dtype
            arrays[name] = SourceArray(name, str(path), shape, dtype, shape, partial(load, name))
    return arrays


def _open_torch(path: Path) -> dict[str, SourceArray]:
    with naming(path, Exception):  # damaged pickles and archives raise errors of any class
        # Files from before torch 1.6 are no archives: they cannot be mapped, and have no checksums.
        archive = zipfile.ZipFile(path) if zipfile.is_zipfile(path) else None
        with path.open("rb") as file:
            if archive is None and file.read(2) == b"PK":  # the end of an archive lists what is in it
                raise ValueError("it ends too early; copy it again.")
        is_mappable = archive is not None and not any(member.compress_type for member in archive.infolist())
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mappable)
        if not isinstance(state, dict) or not all(isinstance(values, Tensor) for values in state.values()):
            raise ValueError("it is not a dictionary of tensors; give the file that save_pretrained wrote.")

    @cache
    def check() -> None:  # when the first tensor is read; torch does not look at the checksums
        if archive is not None and (damaged := archive.testzip()) is not None:
            raise ValueError(f"{str(path)!r} is damaged: the checksum of {damaged} differs. Copy it again.")

    def load(name: str, slices: tuple[slice, ...]) -> Tensor:
        check()
        return state[name][slices]

    shapes = {name: tuple(values.shape) for name, values in state.items()}
    return {
        name: SourceArray(name, str(path), shape, state[name].dtype, shape, partial(load, name))
        for name, shape in shapes.items()
    }


def open_npz(path: Path) -> dict[str, SourceArray]:
    """The arrays of an .npz file, by name. Only headers are read, and nothing is unpickled."""

    @naming(path, Exception)
    def load(name: str) -> np.ndarray:
        with np.load(path, allow_pickle=False) as arrays:
            return arrays[name]

    opened: dict[str, SourceArray] = {}
    with naming(path, Exception), zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            with archive.open(member) as file:
                is_first = np.lib.format.read_magic(file) == (1, 0)
                read = np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0
                name = member.removesuffix(".npy")
                with naming(name, ValueError):
                    shape, _, dtype = read(file)
            if name in opened:
                raise ValueError(f"it holds the array {name!r} twice.")
            opened[name] = _numpy_array(name, path, shape, dtype, partial(load, name))
    return opened


def open_npy_folder(folder: Path) -> dict[str, SourceArray]:
    """The arrays of the .npy files in a folder, by the names of the files, without unpickling."""
    opened = {}
    for path in sorted(folder.glob("*.npy")):
        load = partial(np.load, path, allow_pickle=False, mmap_mode="r")
        with naming(path, Exception):
            values = load()
        opened[path.stem] = _numpy_array(path.stem, path, values.shape, values.dtype, load)
    return opened


def _numpy_array(
    name: str, path: Path, shape: tuple[int, ...], dtype: np.dtype, load: Callable[[], np.ndarray]
) -> SourceArray:
    native = dtype.newbyteorder("=")

    def read(slices: tuple[slice, ...]) -> Tensor:
        return from_numpy(np.ascontiguousarray(load()[slices], native))

    try:
        torch_dtype = from_numpy(np.zeros(0, native)).dtype
    except TypeError as error:
        raise ValueError(
            f"{name} in {str(path)!r} is of NumPy's dtype {dtype}, which torch does not have (np.save makes V1 of "
            "float8 and int4); save it as float32, float16 or bfloat16."
        ) from error
    return SourceArray(name, str(path), tuple(shape), torch_dtype, tuple(shape), read)


def from_numpy(values: np.ndarray) -> Tensor:
    """A tensor over the array's memory; ml_dtypes' bfloat16, which np.save stores as V2, is reinterpreted."""
    if not values.flags.writeable:
        values = values.copy()
    if values.dtype.name == "bfloat16" or values.dtype == "V2":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def file_stamps(paths: Iterable[Path]) -> list[list[str | int]]:
    """Name, size and times of files, by which an interrupted conversion knows its source again."""
    stats = [(path, path.stat()) for path in sorted(paths)]
    # Copying can keep the time of the content, but not that of the inode.
    return [[str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for path, stat in stats]
