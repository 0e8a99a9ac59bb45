"""Telling, opening and describing a checkpoint of any format."""

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from ..common.dtypes import dtype_name
from .arrays import Source, SourceArray
from .authors_torch import local_folder, open_torch, read_torch
from .maxtext import open_maxtext, read_maxtext
from .pax import PAX_ROOT, open_pax, read_pax
from .plan import Checkpoint, Origin, make_plan
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
        path = local_folder(path)
        if (path / "config.json").is_file():
            return "torch"
        if path.suffix == ".npz" or any(path.glob("*.npy")):
            return "pax"
    names = Store(path).names
    if not any(re.search(r"(^|/)(_METADATA|manifest\.ocdbt|\.zarray|zarr\.json)$", name) for name in names):
        raise ValueError(
            f"{str(path)!r} holds no checkpoint: no config.json, no .npz or .npy arrays, and nothing of orbax "
            "(_METADATA, manifest.ocdbt or zarr arrays)."
        )
    return "pax" if any(PAX_ROOT.rstrip(".") in name for name in names) else "maxtext"


def open_source(
    path: str | os.PathLike,
    step: int | None = None,
    train_config: str | os.PathLike | None = None,
    config: str | os.PathLike | None = None,
) -> tuple[Source, Callable[[], Checkpoint]]:
    """Return what lies in a checkpoint, and a function that reads its model; arguments as of [`inspect_checkpoint`]."""
    name = detect_format(path)
    if name == "torch":
        source = open_torch(path)
        return source, partial(read_torch, source)
    if name == "maxtext":
        source = open_maxtext(path, step)
        return source, partial(read_maxtext, source, train_config)
    source = open_pax(path, step)
    return source, partial(read_pax, source, config)


@dataclass(frozen=True)
class Inspection:
    """The description of a checkpoint, without its weights."""

    format: str  #: such as `"MaxText (OCDBT, zarr 2)"` or `"torch files, the authors' names"`
    location: str
    step: int | None
    tensors: Sequence[SourceArray]  #: every array but the training state, sorted by name
    optimizer_arrays: int  #: how many there are
    state_arrays: Sequence[str]  #: names of the step counter and random states
    total_parameters: int  #: of the model if its architecture is known, else elements of all `tensors`
    total_bytes: int  #: of all `tensors`, uncompressed
    dtypes: Mapping[str, int]  #: how many `tensors` have each dtype
    architecture: Sequence[Origin] = ()  #: values of the configuration; empty if the model is not known
    note: str = ""  #: why it is not
    skipped_steps: Mapping[str, str] = field(default_factory=dict)  #: later ones that are not whole, with the reason

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
    revision: str | None = None,
) -> Inspection:
    """
    Describe any checkpoint that this package reads. Only metadata are read, and nothing of the optimizer.

    Args:
        path: A folder (local, remote, or a name on the Hub) or a PAX `.npz`.
        step (*optional*): Step of a run folder; `None`: the latest.
        train_config (*optional*): Training YAML of a MaxText run; `None`: `train_config.yml` beside the step.
        config (*optional*): `config.json` of a PAX checkpoint.
        revision (*optional*): Branch, tag or commit on the Hub; `None`: `main`.

    Raises:
        FileNotFoundError: if the path, the step or a configuration does not exist.
        ValueError: if the arrays cannot be listed.
    """
    path = path if is_remote(path) else local_folder(path, revision)
    source, read_model = open_source(path, step, train_config, config)
    tensors = [array for _, array in sorted(source.arrays.items())]
    state = [name for name in source.training_state if name.split(".")[-1] == "step" or "rng" in name]
    origins: Sequence[Origin] = ()
    note, count = "", sum(math.prod(tensor.shape) for tensor in tensors)
    try:
        plan = make_plan(read_model())
    except ValueError as error:
        note = str(error)
    else:
        source, origins = plan.source, plan.origins
        count = sum(parameter.numel() for parameter in plan.model_parameters.values())
    return Inspection(
        source.format,
        source.location,
        source.step,
        tensors,
        optimizer_arrays=len(source.training_state) - len(state),
        state_arrays=state,
        total_parameters=count,
        total_bytes=sum(tensor.nbytes for tensor in tensors),
        dtypes=Counter(dtype_name(tensor.dtype) for tensor in tensors),
        architecture=origins,
        note=note,
        skipped_steps=source.facts.get("skipped_steps", {}),
    )
