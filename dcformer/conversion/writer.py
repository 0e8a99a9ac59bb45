"""Writing a plan as a Transformers folder, one shard at a time, except those that an earlier run has finished."""

import copy
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils.hub import convert_file_size_to_int

from ..common.dtypes import dtype_name
from ..common.files import json_digest, set_usual_mode
from ..configuration_dcformer import DCFormerConfig
from .beside import save_files
from .conversion_report import ConversionReport, write_model_card, write_report
from .destination import Destination
from .plan import UNUSED_FILE, Origin, Part, Plan, UnfitWeightsError, listed, meta_model
from .verify import LOGIT_TOLERANCE, Progress, load_reference, verify_folder


_INDEX_FILE = "model.safetensors.index.json"


def write_model(
    plan: Plan,
    target: Destination,
    *,
    max_shard_size: str | int = "2GB",
    with_code: bool = False,
    verify: bool = True,
    reference_logits: str | os.PathLike | None = None,
    tolerance: float = LOGIT_TOLERANCE,
    check: Callable[[Path], dict[str, str]] = lambda folder: {},
    progress: Progress = lambda total: lambda nbytes: None,
) -> ConversionReport:
    """
    Write what a plan says as a Transformers folder: sharded safetensors, configuration, tokenizer, model card, report.

    The folder is built beside the destination and renamed at the end. After an interruption, the same call checks the
    hashes of the finished shards, writes the others, and ends with the same bytes.

    Args:
        plan: From [`make_plan`].
        target: Where to write.
        max_shard_size (defaults to `"2GB"`): Largest size of a weights file; memory grows with it.
        with_code (defaults to `False`): Write the Python files of the model too, so that the folder loads with
            `trust_remote_code=True` where dcformer is not installed.
        verify (defaults to `True`): Refuse weights that hold NaN or infinity, and run a short forward.
        reference_logits (*optional*): `.npz` with `tokens` (batch, length) and `logits` (batch, length, vocabulary),
            which the model must reproduce in float32.
        tolerance (defaults to 2e-4): Largest absolute difference allowed there.
        check (*optional*): Called with the finished folder if `verify` is set; returns results by name, raises
            ValueError if the folder is wrong.
        progress (*optional*): Called with the number of bytes to read; returns a function that is called with every
            part done.

    Raises:
        ValueError: if `max_shard_size` is no size, the weights are not finite, or the model does not reproduce the
            reference logits.
    """
    started = time.monotonic()
    try:
        shard_bytes = convert_file_size_to_int(max_shard_size)
    except ValueError as error:
        raise ValueError(f"max_shard_size must be a size such as '2GB', got {max_shard_size!r}.") from error
    reference = None if reference_logits is None else load_reference(reference_logits, plan.config.vocab_size)
    total = plan.source_bytes(plan.parameters)
    with target.open({**plan.fingerprint, "shard_bytes": shard_bytes, "verify": verify}) as folder:
        if target.report is not None:
            origins = [Origin(**origin) for origin in target.report["origins"]]
            found = {**target.report, "origins": origins, "destination": str(target.path)}
            return ConversionReport(**found, was_complete=True)
        resumed = len(target.finished)
        # Here, where the destination is locked: no progress bar starts for a conversion that must not run.
        records = _write_shards(plan, target, shard_bytes, verify, progress(total))
        bad = [record["parameter"] for record in records if not record["finite"]]
        values = f"NaN or infinity in {listed(bad)}" if bad else f"{len(records)} tensors, all finite"
        report = ConversionReport(
            {**plan.source.record, "sha256": _source_digest(records, plan)},
            list(plan.origins),
            records,
            dict(plan.layout.ignored),
            {"values": values},
            destination=str(target.path),
            source_bytes=total,
            resumed_shards=resumed,
        )
        config = _save_configuration(plan, folder, with_code)
        save_files(plan.files, config, folder)
        if verify or reference is not None:
            report.verification |= verify_folder(folder, reference, tolerance)
        if verify:
            report.verification |= check(folder)
        write_model_card(folder, target.path.name, plan, config, report)
        report.files = write_report(folder, report.to_dict())
    report.seconds = time.monotonic() - started
    return report


def _save_configuration(plan: Plan, folder: Path, with_code: bool) -> DCFormerConfig:
    """Write the configuration and the Python files of the classes; return it as it was written."""
    config: Any = copy.deepcopy(plan.config)
    if with_code:  # as `register_for_auto_class` does, but for these objects alone
        config._auto_class = "AutoConfig"
        causal_lm: Any = meta_model(config)
        for model, auto_class in ((causal_lm.model, "AutoModel"), (causal_lm, "AutoModelForCausalLM")):
            model._auto_class = auto_class
            custom_object_save(model, folder, config)
    config.save_pretrained(folder)
    return config


def _write_shards(
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
        records |= {record["parameter"]: record for record in target.finished[file]["records"]}
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
                "sha256": _tensor_digest(values),
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
                "sha256": _tensor_digest(values),
                "finite": is_finite,
                "max_rounding_error": rounding[name],
                "sources": sources[name],
            }
        )
    save_file(tensors, path, metadata={"format": "pt"})
    set_usual_mode(path)
    return records


def _tensor_digest(values: Tensor) -> str:
    """SHA-256 of the bytes of the elements, in row-major order."""
    return hashlib.sha256(values.contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


def _source_digest(records: list[dict[str, Any]], plan: Plan) -> str:
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
