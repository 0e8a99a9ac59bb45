"""Writing sharded safetensors piece by piece, with memory for one source chunk, and resuming.

The safetensors library writes a file from tensors that are all in memory. Here the header, which is known before any
data, is written first, the file is allocated, and pieces are copied to where they belong as they are read, in any
order. A shard is finished when all of its tensors are complete and hashed; a note beside it then says so, and a later
run reuses it after checking the hashes. The words leaf, box and piece are explained in `pieces.py`.

The header notes the version that wrote it and a checksum of the source. That is known only when all has been read, so
the header holds as many zeros until the end, and what was read is noted beside the shards.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..sharing_dcformer import SOURCE_NOTE, header_notes
from .destination import remove
from .formats.safetensors_file import SAFETENSORS_DTYPES
from .leaves import Leaf
from .pieces import PART_BYTES, Box, Piece
from .plan import Parameter, Plan
from .tensor_bytes import TensorInFile, as_bytes, not_finite_words


INDEX_FILE = "model.safetensors.index.json"
_DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
# Source chunks in flight come to no more than this, unless a single one is larger.
_READ_AHEAD_BYTES = 512 * 2**20
# What a header holds until the checksum of the source is known, and where.
_NO_CHECKSUM = "0" * 64
_CHECKSUM_KEY = f'"{SOURCE_NOTE}":"'.encode()
# The note of what was read of the source: a line for every box.
_READ_NOTE = "read.jsonl"
# Chunks of a read that are in memory beside its result.
_DECODED_AT_ONCE = 4


@dataclass
class Written:
    """What is in a finished file for one parameter."""

    file: str
    sha256: str
    rounding_error: float
    is_finite: bool = True


@dataclass
class Shard:
    """One safetensors file: its parameters with their first byte, and its header."""

    file: str
    offsets: dict[str, int]
    header: bytes
    size: int

    @property
    def checksum_start(self) -> int:
        """The first byte of the source's checksum."""
        return self.header.index(_CHECKSUM_KEY) + len(_CHECKSUM_KEY)

    def has_header(self, header: bytes) -> bool:
        """Whether a file begins as this shard does, with whatever checksum of the source."""
        start, end = self.checksum_start, self.checksum_start + len(_NO_CHECKSUM)
        return header[:start] == self.header[:start] and header[end:] == self.header[end:]


def shard_layout(parameters: dict[str, Parameter], max_shard_bytes: int) -> list[Shard]:
    """Distribute parameters over files, in order, none larger than asked for unless a single parameter is."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, spec in parameters.items():
        if spec.file is not None:
            continue
        if groups[-1] and filled + spec.nbytes > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += spec.nbytes
    files = ["model.safetensors"]
    if len(groups) > 1:
        files = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    shards = [_shard(file, names, parameters) for file, names in zip(files, groups)]
    others: dict[str, list[str]] = {}
    for name, spec in parameters.items():
        if spec.file is not None:
            others.setdefault(spec.file, []).append(name)
    return shards + [_shard(file, names, parameters) for file, names in others.items()]


def _shard(file: str, names: list[str], parameters: dict[str, Parameter]) -> Shard:
    names = sorted(names, key=lambda name: -parameters[name].dtype.itemsize)  # keeps every tensor aligned
    entries: dict = {"__metadata__": {"format": "pt", **header_notes(_NO_CHECKSUM)}}
    relative, position = {}, 0
    for name in names:
        spec = parameters[name]
        relative[name] = position
        entries[name] = {
            "dtype": _DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [position, position + spec.nbytes],
        }
        position += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    header = len(text).to_bytes(8, "little") + text
    return Shard(file, {name: len(header) + start for name, start in relative.items()}, header, len(header) + position)


class ShardWriter:
    """
    Writes the parameters of a plan into a folder.

    Args:
        plan (`Plan`): Complete.
        folder (`Path`): Where the files go; finished files that an interrupted run of the same plan left are reused.
        progress (`Path`): Folder of the notes that say which files are finished.
        max_shard_bytes (`int`): Size of a file.
        advance: Called with the number of source bytes done, from several threads.
        workers (`int`): Chunks read and written at the same time.
        only_finite (`bool`): Refuse parameters that hold NaN or infinity.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        progress: Path,
        max_shard_bytes: int,
        advance: Callable[[int], None] = lambda nbytes: None,
        workers: int = 4,
        only_finite: bool = True,
    ):
        self.plan, self.folder, self.workers, self._advance = plan, folder, workers, advance
        self._progress, self._only_finite = progress, only_finite
        self.shards = shard_layout(plan.parameters, max_shard_bytes)
        self.written: dict[str, Written] = {}
        self._shard_of = {name: shard for shard in self.shards for name in shard.offsets}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._remaining = {name: sum(piece.size for piece in ps) for name, ps in plan.by_parameter().items()}
        self._rounding = dict.fromkeys(plan.parameters, 0.0)
        self._read: dict[tuple[str, Box], str] = {}

    def resume(self) -> int:
        """
        Reuse the finished files of an earlier run whose hashes are right, and remove all others.

        Returns:
            How many.

        Raises:
            ValueError: if one of them holds NaN or infinity, which the earlier run accepted.
        """
        for entry in self.folder.iterdir():
            if entry.name not in {shard.file for shard in self.shards}:
                remove(entry)
        self._read = _noted_reads(self._progress / _READ_NOTE)
        return sum(self._reuse(shard) for shard in self.shards)

    def missing_bytes(self) -> int:
        """Disk space that is still needed."""
        return sum(shard.size for shard in self.shards if not self._is_done(shard))

    def _is_done(self, shard: Shard) -> bool:
        return all(name in self.written for name in shard.offsets)

    def _note(self, shard: Shard) -> Path:
        return self._progress / f"{shard.file}.json"

    def _reuse(self, shard: Shard) -> bool:
        path, note = self.folder / shard.file, self._note(shard)
        if not note.is_file() or not path.is_file() or path.stat().st_size != shard.size:
            return False
        try:
            records = json.loads(note.read_text(encoding="utf-8"))
        except ValueError:  # after a power cut
            return False
        with path.open("rb") as file:
            if not shard.has_header(file.read(len(shard.header))):
                return False
        found = {name: self._read_back(shard, name, records[name]["rounding_error"]) for name in shard.offsets}
        if any(written.sha256 != records[name]["sha256"] for name, written in found.items()):
            return False
        for name in found:
            self._check_finite(shard, name, found[name])
        self.written |= found
        return True

    def run(self) -> dict[str, Written]:
        """
        Write everything that is not there yet.

        Raises:
            ValueError: if an array cannot be read or does not fit its dtype.
            OSError: if the disk is full.
        """
        for shard in self.shards:
            if not self._is_done(shard):
                self._allocate(shard)
        jobs = list(self._jobs())
        budget = _Budget(_READ_AHEAD_BYTES)
        torch_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the pools use every core already
        with ThreadPoolExecutor(self.workers) as self._write_pool, ThreadPoolExecutor(self.workers) as pool:
            futures = [pool.submit(self._work, budget, *job) for job in jobs]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                self._stopped.set()
                for future in futures:
                    future.cancel()
                raise
            finally:
                torch.set_num_threads(torch_threads)
        return self.written

    def note_source(self) -> str:
        """
        Put the checksum of the source into the headers of all files; only after `run`.

        Returns:
            SHA-256 over the name, dtype and shape of every array that was read, and the SHA-256 of its values box by
            box. The same arrays, stored in the same chunks, have the same wherever they lie.
        """
        digest = hashlib.sha256()
        for name, pieces in sorted(self.plan.by_leaf().items()):
            leaf = self.plan.leaves[name]
            digest.update(json.dumps([name, str(leaf.dtype), leaf.shape]).encode())
            for box in leaf.boxes_to_read(pieces[0].order):
                # What an earlier run read just before a power cut may not have been noted.
                found = self._read.get((name, box)) or _digest(leaf.read(box))
                digest.update(json.dumps([box, found]).encode())
        checksum = digest.hexdigest()
        for shard in self.shards:
            with (self.folder / shard.file).open("r+b") as file:
                file.seek(shard.checksum_start)
                file.write(checksum.encode())
        return checksum

    def _note_read(self, leaf: str, box: Box, values: Tensor) -> None:
        digest = _digest(values)
        with self._lock:
            self._read[leaf, box] = digest
            with (self._progress / _READ_NOTE).open("a", encoding="utf-8") as file:
                file.write(json.dumps([leaf, box, digest]) + "\n")

    def _allocate(self, shard: Shard) -> None:
        """Write the header and reserve the space: writing to mapped memory on a full disk would end the process."""
        self._note(shard).unlink(missing_ok=True)
        with (self.folder / shard.file).open("wb") as file:
            file.write(shard.header)
            file.flush()
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, shard.size)
            else:
                file.truncate(shard.size)

    def _jobs(self) -> Iterator[tuple[Leaf, Box, list[Piece]]]:
        """(leaf, box, pieces, split small) for every box to read; nothing for what an earlier run finished."""
        for name, pieces in self.plan.by_leaf().items():
            leaf, order = self.plan.leaves[name], pieces[0].order
            pieces = [piece for piece in pieces if piece.parameter not in self.written]
            if not pieces:
                self._advance(leaf.nbytes)
                continue
            small = [
                part
                for piece in pieces
                for part in piece.split(PART_BYTES // self.plan.parameters[piece.parameter].dtype.itemsize)
            ]
            for box in leaf.boxes_to_read(order):
                yield leaf, box, small

    def _work(self, budget: _Budget, leaf: Leaf, box: Box, pieces: list[Piece]) -> None:
        nbytes = math.prod(stop - start for start, stop in box) * leaf.dtype.itemsize
        chunk = math.prod(leaf.chunk_shape) * leaf.dtype.itemsize
        with budget.take(nbytes + min(nbytes, _DECODED_AT_ONCE * chunk)):
            if self._stopped.is_set():
                return
            parts = [(piece, common) for piece in pieces if (common := piece.overlap(box)) is not None]
            if parts:
                values = leaf.read(box)
                self._note_read(leaf.name, box, values)
                list(self._write_pool.map(lambda part: self._write(part[0], part[1], values, box), parts))
        self._advance(nbytes)

    def _write(self, piece: Piece, common: Box, values: Tensor, box: Box) -> None:
        """Put what `values`, which hold `box`, have of a piece into its file; `common` is that part of the box."""
        shard, spec = self._shard_of[piece.parameter], self.plan.parameters[piece.parameter]
        path, start = self.folder / shard.file, shard.offsets[piece.parameter] + piece.offset * spec.dtype.itemsize
        if common == piece.box:
            elements, error = piece.cast(values, box, common, spec.dtype)
            content = elements.contiguous().flatten().view(torch.uint8).numpy().data
            with path.open("r+b", buffering=0) as file:
                file.seek(start)
                while content:
                    content = content[file.write(content) :]
        else:
            # Chunks that cut through the piece: each fills elements here and there.
            span = np.memmap(path, np.uint8, mode="r+", offset=start, shape=(piece.size * spec.dtype.itemsize,))
            error = piece.write_to_parameter(values, box, torch.from_numpy(span).view(spec.dtype))
            del span
        size = math.prod(stop - start for start, stop in common)
        with self._lock:
            self._rounding[piece.parameter] = max(self._rounding[piece.parameter], error)
            self._remaining[piece.parameter] -= size
            is_complete = self._remaining[piece.parameter] == 0
        if is_complete:
            self._complete(shard, piece.parameter)

    def _complete(self, shard: Shard, name: str) -> None:
        record = self._read_back(shard, name, self._rounding[name])
        self._check_finite(shard, name, record)
        with self._lock:
            self.written[name] = record
            if not self._is_done(shard):
                return
        notes = {
            name: {"sha256": self.written[name].sha256, "rounding_error": self.written[name].rounding_error}
            for name in shard.offsets
        }
        note = self._note(shard)
        unfinished = note.with_suffix(".tmp")
        unfinished.write_text(json.dumps(notes), encoding="utf-8")
        unfinished.replace(note)

    def _read_back(self, shard: Shard, name: str, rounding_error: float) -> Written:
        """The record of what is in the file."""
        digest, is_finite = self._in_file(shard, name).digest()
        return Written(shard.file, digest, rounding_error, is_finite)

    def _in_file(self, shard: Shard, name: str) -> TensorInFile:
        spec = self.plan.parameters[name]
        return TensorInFile(name, self.folder / shard.file, shard.offsets[name], spec.shape, spec.dtype)

    def _check_finite(self, shard: Shard, name: str, written: Written) -> None:
        if self._only_finite and not written.is_finite:
            words = not_finite_words(name, self._in_file(shard, name).parts(), self.plan.parameters[name].shape)
            raise ValueError(f"{words}; pass --no-verify to convert it all the same.")

    def index(self) -> dict | None:
        """Content of the index file; None if one file holds everything."""
        weights = {name: shard.file for shard in self.shards for name in shard.offsets}
        weights = {name: file for name, file in weights.items() if self.plan.parameters[name].file is None}
        if len(set(weights.values())) == 1:
            return None
        total = sum(self.plan.parameters[name].nbytes for name in weights)
        return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}


def _digest(values: Tensor) -> str:
    return hashlib.sha256(as_bytes(values)).hexdigest()


def _noted_reads(note: Path) -> dict[tuple[str, Box], str]:
    """What earlier runs noted; the last line may have been cut."""
    found = {}
    for line in note.read_text(encoding="utf-8").splitlines() if note.is_file() else ():
        with contextlib.suppress(ValueError):
            leaf, box, digest = json.loads(line)
            found[leaf, tuple(map(tuple, box))] = digest
    return found


class _Budget:
    """Lets threads take bytes as long as they last; one that wants more than there are in all waits to be alone."""

    def __init__(self, total: int):
        self._total, self._taken, self._condition = total, 0, threading.Condition()

    @contextlib.contextmanager
    def take(self, amount: int) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: self._taken == 0 or self._taken + amount <= self._total)
            self._taken += amount
        try:
            yield
        finally:
            with self._condition:
                self._taken -= amount
                self._condition.notify_all()
