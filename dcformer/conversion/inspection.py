"""Telling, opening and describing a checkpoint of any format."""

import math
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from ..common.dtypes import dtype_name
from .arrays import SourceArray, open_weights
from .authors_torch import local_folder, plan_torch
from .maxtext import TRAINING_STATE, plan_maxtext
from .orbax import open_orbax
from .pax import PAX_ROOT, open_pax, plan_pax
from .plan import Origin, Plan
from .stores import Store, is_remote


def detect_format(path: str | os.PathLike) -> Literal["torch", "pax", "maxtext"]:
    """
    The format of a checkpoint: `"torch"` for a folder with `config.json`, the authors' or ours, `"pax"` or `"maxtext"`.

    Args:
        path: A folder, local, remote or a name on the Hub; or a PAX `.npz` file.

    Raises:
        FileNotFoundError: if there is nothing there.
        ValueError: if it is no checkpoint.
    """
    if not is_remote(path):
        local = local_folder(path)
        if (local / "config.json").is_file():
            return "torch"
        if local.suffix == ".npz" or any(local.glob("*.npy")):
            return "pax"
        path = local
    names = Store(path).names
    if not any(re.search(r"(^|/)(_METADATA|manifest\.ocdbt|\.zarray|zarr\.json)$", name) for name in names):
        raise ValueError(
            f"{str(path)!r} holds no checkpoint: no config.json, no .npz or .npy arrays, and nothing of orbax "
            "(_METADATA, manifest.ocdbt or zarr arrays)."
        )
    return "pax" if any(PAX_ROOT.rstrip(".") in name for name in names) else "maxtext"


def open_checkpoint(
    path: str | os.PathLike,
    *,
    step: int | None = None,
    train_config: str | os.PathLike | None = None,
    config: str | os.PathLike | None = None,
) -> Plan:
    """The plan of any checkpoint; arguments as of [`inspect_checkpoint`]."""
    name = detect_format(path)
    if name == "torch":
        return plan_torch(path)
    if name == "pax":
        if config is None:
            raise ValueError(f"{str(path)!r} is a PAX checkpoint, which needs its configuration: pass --config.")
        return plan_pax(path, config, step=step)
    return plan_maxtext(path, step=step, train_config=train_config)


@dataclass
class Inspection:
    """
    Attributes:
        format: Such as `"MaxText (OCDBT, zarr 2)"` or `"torch files, the authors' names"`.
        location, step: Of the checkpoint that was read.
        tensors: Every array but the training state, sorted by name.
        optimizer_arrays: How many arrays of an optimizer there are.
        state_arrays: Names of the step counter and random states.
        total_parameters: Parameters of the model if its architecture is known, else elements of all `tensors`.
        total_bytes: Bytes of all `tensors`, uncompressed.
        dtypes: How many `tensors` have each dtype.
        architecture: Configuration values and where each comes from; empty if the model is not known.
        note: Why it is not.
        skipped_steps: Later steps of the run that are not whole, with the reason.
    """

    format: str
    location: str
    step: int | None
    tensors: list[SourceArray]
    optimizer_arrays: int = 0
    state_arrays: list[str] = field(default_factory=list)
    total_parameters: int = 0
    total_bytes: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)
    architecture: list[Origin] = field(default_factory=list)
    note: str = ""
    skipped_steps: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The inspection as lists and dictionaries, for JSON."""
        keys = ("name", "shape", "chunk_shape", "nbytes")
        tensors = [
            {**{key: getattr(array, key) for key in keys}, "dtype": dtype_name(array.dtype)} for array in self.tensors
        ]
        return vars(self) | {"tensors": tensors, "architecture": [vars(origin) for origin in self.architecture]}


def inspect_checkpoint(
    path: str | os.PathLike,
    *,
    step: int | None = None,
    train_config: str | os.PathLike | None = None,
    config: str | os.PathLike | None = None,
) -> Inspection:
    """
    Describe any checkpoint that this package reads. Only metadata are read, and nothing of the optimizer.

    Args:
        path: A folder (local, remote, or a name on the Hub) or a PAX `.npz`.
        step (*optional*): Step of a run folder; `None`: the latest.
        train_config (*optional*): Training YAML of a MaxText run; `None`: `train_config.yml` beside the step.
        config (*optional*): `config.json` of a PAX checkpoint.

    Raises:
        FileNotFoundError: if the path, the step or a configuration does not exist.
        ValueError: if the arrays cannot be listed.
    """
    source, arrays, training_state = _contents(path, step)
    tensors = [array for _, array in sorted(arrays.items())]
    state = [name for name in training_state if name.split(".")[-1] == "step" or "rng" in name]
    inspection = Inspection(
        **source,
        tensors=tensors,
        optimizer_arrays=len(training_state) - len(state),
        state_arrays=state,
        total_parameters=sum(math.prod(tensor.shape) for tensor in tensors),
        total_bytes=sum(tensor.nbytes for tensor in tensors),
        dtypes=dict(Counter(dtype_name(tensor.dtype) for tensor in tensors)),
    )
    try:
        plan = open_checkpoint(path, step=step, train_config=train_config, config=config)
    except ValueError as error:
        inspection.note = str(error)
    else:
        inspection.format, inspection.architecture = plan.source["format"], plan.origins
        inspection.total_parameters = sum(parameter.numel() for parameter in plan.model_parameters().values())
    return inspection


def _contents(path: str | os.PathLike, step: int | None) -> tuple[dict[str, Any], dict[str, SourceArray], list[str]]:
    """The place of a checkpoint, its arrays, and the names of its training state, read without knowing the model."""
    name = detect_format(path)
    if name == "torch":
        folder = local_folder(path)
        return {"format": "torch files", "location": str(folder), "step": None}, open_weights(folder), []
    if name == "pax":
        arrays, state, source, _ = open_pax(path, step)
        return source, arrays, state
    checkpoint = open_orbax(path, step)
    state = [name for name in checkpoint.names if name.split(".")[0] in TRAINING_STATE]
    arrays = checkpoint.open([name for name in checkpoint.names if name not in state])
    return checkpoint.source("orbax"), arrays, state
