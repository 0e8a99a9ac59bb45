"""What a checkpoint is, without converting it: its format, its arrays, and the model that it holds."""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import pax
from .hub import local_folder
from .leaves import Leaf
from .maxtext import _STATE
from .orbax_checkpoint import open_orbax
from .pieces import dtype_name
from .plan import Origin, Plan
from .verification import kind_of, open_any
from .weights_folder import open_weights


@dataclass(frozen=True)
class TensorInfo:
    """One stored array, as its metadata describe it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunk_shape: tuple[int, ...]
    nbytes: int


@dataclass
class Inspection:
    """
    Attributes:
        format: Such as `"MaxText (OCDBT, zarr 2)"` or `"torch files, the authors' names"`.
        location, step: Where the checkpoint was found.
        tensors: Every array but the training state, sorted by name.
        optimizer_arrays (`int`): How many arrays of an optimizer there are.
        state_arrays: Names of the step counter and random states.
        total_parameters (`int`): Of the model if its architecture is known, else the elements of all `tensors`.
        total_bytes (`int`): Of `tensors`, uncompressed.
        dtypes: How many `tensors` have each dtype.
        architecture: Configuration values and where each comes from; empty if the model is not known.
        note (`str`): Why it is not.
        skipped_steps: Later steps of the run that are not whole, with the reason.
    """

    format: str
    location: str
    step: int | None
    tensors: list[TensorInfo]
    optimizer_arrays: int = 0
    state_arrays: list[str] = field(default_factory=list)
    total_parameters: int = 0
    total_bytes: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)
    architecture: list[Origin] = field(default_factory=list)
    note: str = ""
    skipped_steps: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The same in lists and dictionaries, for JSON."""
        return asdict(self)


@dataclass
class _Contents:
    """What is stored, before anything is known of the model."""

    format: str
    location: str
    leaves: dict[str, Leaf]
    step: int | None = None
    optimizer: list[str] = field(default_factory=list)
    state: list[str] = field(default_factory=list)
    skipped_steps: dict[str, str] = field(default_factory=dict)


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
        step (`int`, *optional*): Step of a run folder. None: the latest.
        train_config (*optional*): Training YAML of a MaxText run.
        config (*optional*): `config.json` of a PAX checkpoint.

    Raises:
        FileNotFoundError: if the path, the step or a configuration does not exist.
        ValueError: if the arrays cannot be listed.
    """
    kind = kind_of(path)
    contents = {"torch": _torch, "pax": _pax, "maxtext": _orbax}[kind](path, step)
    plan, note = None, ""
    try:
        plan = open_any(path, step=step, train_config=train_config, config=config)
    except ValueError as error:
        note = str(error)
    tensors = [
        TensorInfo(name, leaf.shape, dtype_name(leaf.dtype), leaf.chunk_shape, leaf.nbytes)
        for name, leaf in sorted(contents.leaves.items())
    ]
    return Inspection(
        contents.format if plan is None else _planned_format(kind, plan),
        contents.location,
        contents.step,
        tensors,
        len(contents.optimizer),
        contents.state,
        _parameters(plan, tensors),
        sum(tensor.nbytes for tensor in tensors),
        dict(Counter(tensor.dtype for tensor in tensors)),
        [] if plan is None else plan.origins,
        note,
        contents.skipped_steps,
    )


def _parameters(plan: Plan | None, tensors: list[TensorInfo]) -> int:
    if plan is None:
        return sum(math.prod(tensor.shape) for tensor in tensors)
    return sum(spec.size for spec in plan.parameters.values() if spec.file is None)


def _planned_format(kind: str, plan: Plan) -> str:
    if kind != "torch":
        return plan.source["format"]
    ours = all(piece.transform == "as is" for piece in plan.pieces)
    return "torch files, our names" if ours else "torch files, the authors' names"


def _torch(path, step: int | None) -> _Contents:
    folder = local_folder(path)
    return _Contents("torch files", str(folder), open_weights(folder))


def _pax(path, step: int | None) -> _Contents:
    arrays, source = pax.open_pax(path, step)
    # A folder of zarr arrays comes without its ignored ones; the files of the other forms hold all of them.
    names = list(arrays)
    if Path(path).is_dir() and not any(Path(path).glob("*.npy")):
        names = open_orbax(path, step).names()
    ignored = [name for name in names if pax._IGNORED.fullmatch(name)]
    state = [name for name in ignored if name.removeprefix("state.") == "step"]
    optimizer = [name for name in ignored if name not in state]
    leaves = {name: leaf for name, leaf in arrays.items() if name not in set(ignored)}
    skipped = source.get("skipped_steps", {})
    return _Contents(source["format"], source["location"], leaves, source["step"], optimizer, state, skipped)


def _orbax(path, step: int | None) -> _Contents:
    checkpoint = open_orbax(path, step)
    contents = _Contents(f"orbax ({checkpoint.format})", checkpoint.store.location, {}, checkpoint.step)
    contents.skipped_steps = checkpoint.skipped_steps
    for name in checkpoint.names():
        top = name.split(".")[0]
        if top == "opt_state":
            contents.optimizer.append(name)
        elif top in _STATE:
            contents.state.append(name)
        else:
            contents.leaves[name] = checkpoint.leaf(name)
    return contents
