"""Torch files (`pytorch_model.bin`): their tensors, read lazily, without running code and with their checksums checked.

A torch file is a zip archive of one pickle, which describes the tensors, and one member for the data of each. torch
writes a checksum for every member but does not look at it when it reads.
"""

from __future__ import annotations

import pickle
import threading
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...common.quoting import quoted
from ..leaves import Leaf, file_fingerprint
from ..pieces import Box


_READ_BYTES = 2**20


def list_torch(path: Path) -> list[Leaf]:
    """
    The tensors of one torch file.

    Raises:
        ValueError: if it is damaged, compressed, or holds something else than dense tensors.
    """
    file = TorchFile(path)
    state = file.load()
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(values, Tensor) for name, values in state.items()
    ):
        raise ValueError(f"{path} is not a dictionary of tensors; give the file that save_pretrained wrote.")
    for name, values in state.items():
        if (kind := _unusual_kind(values)) is not None:
            raise ValueError(f"{path} holds {quoted(name)} as a {kind} tensor; save the model with dense tensors.")

    return [TorchLeaf(name, file, tuple(values.shape), values.dtype) for name, values in state.items()]


def _unusual_kind(values: Tensor) -> str | None:
    if values.is_meta:
        return "meta (without data)"
    if values.is_quantized:
        return "quantised"
    return None if values.layout == torch.strided else "sparse" if "sparse" in str(values.layout) else "nested"


class TorchFile:
    """
    A file of `torch.save`.

    Args:
        path (`Path`): The file.

    Raises:
        ValueError: if its archive is damaged or compressed.
    """

    def __init__(self, path: Path):
        self.path = path
        # The format before torch 1.6 is no archive: it cannot be mapped and has no checksums.
        self._is_archive = zipfile.is_zipfile(path)
        self._lock, self._is_checked = threading.Lock(), not self._is_archive
        if self._is_archive:
            self._check(lambda member: not _is_data(member))

    def load(self) -> Any:
        """What was saved. Mapped, so that a read costs the memory of one tensor."""
        try:
            with self._lock, warnings.catch_warnings():
                # Of pickle protocols, where a failure says the same and success needs no words.
                warnings.simplefilter("ignore", UserWarning)
                return torch.load(self.path, map_location="cpu", weights_only=True, mmap=self._is_archive)
        except (pickle.UnpicklingError, EOFError, RuntimeError, OSError, ValueError) as error:
            raise ValueError(damaged(self.path, error)) from error

    def read(self, name: str) -> Tensor:
        """One tensor. The first read of a file checks the data of all, since damage anywhere is damage."""
        with self._lock:
            if not self._is_checked:
                self._check(_is_data)
                self._is_checked = True
        return self.load()[name]

    def _check(self, is_wanted: Callable[[zipfile.ZipInfo], bool]) -> None:
        """Compare the members with their checksums."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                members = [member for member in archive.infolist() if not member.is_dir()]
                self._refuse_unlike_torch(members)
                # torch can be told to leave the checksums out; they are zero then.
                has_checksums = any(member.CRC for member in members)
                for member in members if has_checksums else []:
                    if is_wanted(member):
                        with archive.open(member) as content:
                            while content.read(_READ_BYTES):
                                pass
        except (zipfile.BadZipFile, EOFError, OSError, RuntimeError, NotImplementedError) as error:
            raise ValueError(damaged(self.path, error)) from error

    def _refuse_unlike_torch(self, members: list[zipfile.ZipInfo]) -> None:
        names = set()
        for member in members:
            if member.compress_type != zipfile.ZIP_STORED:
                raise ValueError(
                    f"{self.path} is compressed ({member.filename}), which torch does not write and maps as garbage; "
                    f"load it with torch.load(..., weights_only=True) and save it again with torch.save."
                )
            if member.filename in names:
                raise ValueError(f"{self.path} holds {member.filename} twice; copy or download it again.")
            names.add(member.filename)


class TorchLeaf(Leaf):
    """A tensor of a torch file."""

    def __init__(self, name: str, file: TorchFile, shape: tuple[int, ...], dtype: torch.dtype):
        self.name, self.where, self.shape, self.dtype = name, str(file.path), shape, dtype
        self.chunk_shape = shape
        self._file = file

    def fingerprint(self) -> list:
        return file_fingerprint(self.where)

    def read(self, box: Box) -> Tensor:
        return self._file.read(self.name)[tuple(slice(*interval) for interval in box)]


def _is_data(member: zipfile.ZipInfo) -> bool:
    return member.filename.split("/")[-2:-1] == ["data"]


def damaged(path: Path, error: Exception) -> str:
    """A sentence on a file of tensors, torch's or safetensors, that cannot be read."""
    reason = str(error).split("\n")[0].split(". ")[0]
    return f"{path} is truncated, damaged or holds something else than tensors ({reason}); copy or download it again."
