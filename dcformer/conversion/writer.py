"""Writing a plan as sharded safetensors, one shard at a time, except those that an earlier run has finished."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

from ..common.dtypes import dtype_name
from ..common.files import json_digest, set_usual_mode
from .destination import Destination
from .plan import UNUSED_FILE, Part, Plan, UnfitWeightsError


_INDEX_FILE = "model.safetensors.index.json"


def write_shards(
    plan: Plan, target: Destination, max_shard_bytes: int, only_finite: bool, advance: Callable[[int], object]
) -> list[dict[str, Any]]:
    """
    Write the parameters of a plan into the folder of an opened destination, and return a record of each. In memory are
    a shard, of `max_shard_bytes` or a single larger parameter, and what is read of one source array for it.
    """
    split = split_torch_state_dict_into_shards(plan.model_parameters, max_shard_size=max_shard_bytes)
    records: dict[str, dict[str, Any]] = {}
    unused = {UNUSED_FILE: [*plan.layout.unused]} if plan.layout.unused else {}
    for file, names in (split.filename_to_tensors | unused).items():
        if file in target.finished:
            advance(plan.source_bytes(names))
        else:
            path = target.folder / file
            target.finish(file, [path], _write_shard(plan, path, names, only_finite, advance))
        records |= {record["parameter"]: record for record in target.finished[file]}
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (target.folder / _INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [records[name] for name in plan.parameters]


def _write_shard(
    plan: Plan, path: Path, names: list[str], only_finite: bool, advance: Callable[[int], object]
) -> list[dict[str, Any]]:
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

    tensors = plan.read(names, note)
    records = []
    for name, values in tensors.items():
        is_finite = bool(values.isfinite().all())
        if only_finite and not is_finite:
            raise not_finite_error(name, values)
        records.append(
            {
                "parameter": name,
                "shape": list(values.shape),
                "dtype": dtype_name(values.dtype),
                "file": path.name,
                "sha256": tensor_digest(values),
                "finite": is_finite,
                "max_rounding_error": rounding[name],
                "sources": sources[name],
            }
        )
    save_file(tensors, path, metadata={"format": "pt"})
    set_usual_mode(path)
    return records


def tensor_digest(values: Tensor) -> str:
    """SHA-256 of the bytes of the elements, in row-major order."""
    return hashlib.sha256(values.contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


def source_digest(records: list[dict[str, Any]], plan: Plan) -> str:
    """SHA-256 over the name, dtype and shape of every array that was read, and the hashes of its parts."""
    parts = [(part["array"], part["region"], part["sha256"]) for record in records for part in record["sources"]]
    read = {name: plan.source.arrays[name] for name in sorted({name for name, _, _ in parts})}
    arrays = [(name, dtype_name(array.dtype), array.shape) for name, array in read.items()]
    return json_digest([arrays, sorted(parts)])


def not_finite_error(name: str, values: Tensor) -> UnfitWeightsError:
    bad = (~values.isfinite()).nonzero()
    return UnfitWeightsError(
        f"{name} holds NaN or infinity, as after a run that diverged: {len(bad)} such values, the first at "
        f"{bad[0].tolist()}; pass --no-verify to convert it all the same."
    )
