"""Writing a plan as sharded safetensors, one shard at a time, and resuming from the finished ones.

A shard is finished when a note beside it lists its tensors, with its size and SHA-256. A later run of the same plan
reuses it if the file still has these.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

from .arrays import dtype_name
from .destination import read_note, write_note
from .plan import UNUSED_FILE, Part, Plan, UnfitWeightsError


INDEX_FILE = "model.safetensors.index.json"


class ShardWriter:
    """
    Writes the parameters of a plan into a folder, and notes on finished files into another.

    Memory: a shard, of `max_shard_bytes` or a single larger parameter, and what is read of one source array for it.
    """

    def __init__(self, plan: Plan, folder: Path, notes: Path, max_shard_bytes: int, only_finite: bool = True):
        self._plan, self._folder, self._notes, self._only_finite = plan, folder, notes, only_finite
        split = split_torch_state_dict_into_shards(plan.model_parameters(), max_shard_size=max_shard_bytes)
        self.shards = split.filename_to_tensors | ({UNUSED_FILE: plan.unused} if plan.unused else {})
        self.index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename} if split.is_sharded else None
        self.resumed = 0

    def run(self, advance: Callable[[int], object] = lambda nbytes: None) -> list[dict[str, Any]]:
        """Write all that is not there yet."""
        records: dict[str, dict[str, Any]] = {}
        for file, names in self.shards.items():
            found = read_note(self._notes / f"{file}.json", self._folder)
            if found is None:
                found = self._write(file, names, advance)
            else:
                self.resumed += 1
                advance(self._plan.source_bytes(names))
            records |= {record["parameter"]: record for record in found}
        return [records[name] for name in self._plan.parameters]

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
        write_note(self._notes / f"{file}.json", self._folder, [self._folder / file], records)
        return records


def tensor_digest(values: Tensor) -> str:
    """SHA-256 of the bytes of the elements, in row-major order."""
    return hashlib.sha256(values.contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


def source_digest(records: list[dict[str, Any]], plan: Plan) -> str:
    """SHA-256 over the name, dtype and shape of every array that was read, and the hashes of its parts."""
    parts = [(part["array"], part["region"], part["sha256"]) for record in records for part in record["sources"]]
    arrays = [(name, dtype_name(array.dtype), array.shape) for name, array in sorted(plan.arrays.items())]
    return hashlib.sha256(json.dumps([arrays, sorted(parts)]).encode()).hexdigest()


def not_finite_error(name: str, values: Tensor) -> UnfitWeightsError:
    bad = (~values.isfinite()).nonzero()
    return UnfitWeightsError(
        f"{name} holds NaN or infinity, as after a run that diverged: {len(bad)} such values, the first at "
        f"{bad[0].tolist()}; pass --no-verify to convert it all the same."
    )
