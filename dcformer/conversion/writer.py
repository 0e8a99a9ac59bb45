"""Writing a plan as sharded safetensors, one shard at a time, and resuming from the finished ones.

A shard is finished when a note beside it lists its tensors with their hashes. A later run of the same plan reuses it if
the file still has these hashes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..common.files import write_atomically
from .arrays import dtype_name
from .plan import Parameter, Part, Plan, UnfitWeightsError


INDEX_FILE = "model.safetensors.index.json"


class ShardWriter:
    """
    Writes the parameters of a plan into a folder. Memory: a shard, and what is read of one source array for it.

    Args:
        plan: Complete.
        folder: Where the files go.
        notes: Folder of the notes on finished files.
        max_shard_bytes: Largest size of a file, unless a single parameter is larger.
        only_finite: Refuse parameters that hold NaN or infinity.
    """

    def __init__(self, plan: Plan, folder: Path, notes: Path, max_shard_bytes: int, only_finite: bool = True):
        self._plan, self._folder, self._notes, self._only_finite = plan, folder, notes, only_finite
        self.shards = shard_layout(plan.parameters, max_shard_bytes)
        self.resumed = 0

    def run(self, advance: Callable[[int], object] = lambda nbytes: None) -> list[dict[str, Any]]:
        """Write all that is not there yet."""
        records: dict[str, dict[str, Any]] = {}
        for file, names in self.shards.items():
            found = self._finished(file)
            if found is not None:
                self.resumed += 1
                advance(self._plan.source_bytes(names))
            found = found or self._write(file, names, advance)
            records |= {record["parameter"]: record for record in found}
        return [records[name] for name in self._plan.parameters]

    def _finished(self, file: str) -> list[dict[str, Any]] | None:
        """The records of a file that an earlier run finished; None if it did not."""
        note, path = self._notes / f"{file}.json", self._folder / file
        if not note.is_file() or not path.is_file():
            return None
        records = json.loads(note.read_bytes())
        tensors = load_file(path)
        if {record["parameter"]: record["sha256"] for record in records} != {
            name: tensor_digest(values) for name, values in tensors.items()
        }:
            return None
        return records

    def _write(self, file: str, names: list[str], advance: Callable[[int], object]) -> list[dict[str, Any]]:
        sources: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        rounding = dict.fromkeys(names, 0.0)

        def note(name: str, part: Part, values: Tensor, error: float) -> None:
            rounding[name] = max(rounding[name], error)
            sources[name].append(
                {
                    "array": part.array,
                    "region": [list(interval) for interval in part.region],
                    "transform": part.transform,
                    "dtype": dtype_name(values.dtype),
                    "sha256": tensor_digest(values),
                }
            )
            advance(values.nbytes)

        tensors = self._plan.read(names, note)
        records = []
        for name, values in tensors.items():
            is_finite = bool(values.isfinite().all())
            if self._only_finite and not is_finite:
                raise not_finite_error(name, values)
            records.append(
                {
                    "parameter": name,
                    "shape": list(values.shape),
                    "dtype": dtype_name(values.dtype),
                    "file": file,
                    "sha256": tensor_digest(values),
                    "finite": is_finite,
                    "max_rounding_error": rounding[name],
                    "sources": sources[name],
                }
            )
        save_file(tensors, self._folder / file, metadata={"format": "pt"})
        write_atomically(self._notes / f"{file}.json", json.dumps(records))
        return records

    def index(self) -> dict[str, Any] | None:
        """Content of the index file; None if one file holds the whole model."""
        model = self._plan.model_parameters()
        weights = {name: file for file, names in self.shards.items() for name in names if name in model}
        if len(set(weights.values())) == 1:
            return None
        total = sum(parameter.nbytes for parameter in model.values())
        return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}


def shard_layout(parameters: dict[str, Parameter], max_shard_bytes: int) -> dict[str, list[str]]:
    """Distribute parameters over files, in order, none larger than asked for unless a single parameter is."""
    groups: list[list[str]] = [[]]
    others: dict[str, list[str]] = {}
    filled = 0
    for name, parameter in parameters.items():
        if parameter.file is not None:
            others.setdefault(parameter.file, []).append(name)
            continue
        if groups[-1] and filled + parameter.nbytes > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += parameter.nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0], **others}
    count = len(groups)
    return {f"model-{i + 1:05d}-of-{count:05d}.safetensors": group for i, group in enumerate(groups)} | others


def tensor_digest(values: Tensor) -> str:
    """SHA-256 of the bytes of the elements, in row-major order."""
    return hashlib.sha256(values.contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


def source_digest(records: list[dict[str, Any]], plan: Plan) -> str:
    """SHA-256 over the name, dtype and shape of every array that was read, and the hashes of its parts."""
    parts = [(part["array"], part["region"], part["sha256"]) for record in records for part in record["sources"]]
    arrays = [(name, dtype_name(array.dtype), array.shape) for name, array in sorted(plan.arrays.items())]
    return hashlib.sha256(json.dumps([arrays, sorted(parts)]).encode()).hexdigest()


def not_finite_error(name: str, values: Tensor) -> UnfitWeightsError:
    """The error for a tensor that holds NaN or infinity."""
    bad = (~values.isfinite()).nonzero()
    return UnfitWeightsError(
        f"{name} holds NaN or infinity, as after a run that diverged: {len(bad)} such values, the first at "
        f"{bad[0].tolist()}; pass --no-verify to convert it all the same."
    )
