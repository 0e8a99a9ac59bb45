"""What a checkpoint is, without converting it: its format, its arrays, and the model that it holds."""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from ..sharing_dcformer import read_header_notes
from .detect import list_contents, open_checkpoint
from .pieces import dtype_name
from .plan import Origin, Plan
from .stores import is_remote


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
        total_parameters (`int`): Parameters of the model if its architecture is known, else elements of all `tensors`.
        total_bytes (`int`): Bytes of all `tensors`, uncompressed.
        dtypes: How many `tensors` have each dtype.
        architecture: Configuration values and where each comes from; empty if the model is not known.
        note (`str`): Why it is not.
        skipped_steps: Later steps of the run that are not whole, with the reason.
        notes: What the header of the weights notes, if dcformer wrote them: `dcformer_version`, and `source_sha256` of
            the checkpoint that they were converted from.
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
    notes: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The same in lists and dictionaries, for JSON."""
        return asdict(self)


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
    contents = list_contents(path, step=step)
    plan: Plan | None = None
    note = ""
    try:
        plan = open_checkpoint(path, step=step, train_config=train_config, config=config)
    except ValueError as error:
        note = str(error)
    tensors = [
        TensorInfo(name, leaf.shape, dtype_name(leaf.dtype), leaf.chunk_shape, leaf.nbytes)
        for name, leaf in sorted(contents.leaves.items())
    ]
    return Inspection(
        contents.format if plan is None else _planned_format(plan),
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
        {} if is_remote(contents.location) else read_header_notes(contents.location),
    )


def _parameters(plan: Plan | None, tensors: list[TensorInfo]) -> int:
    if plan is None:
        return sum(math.prod(tensor.shape) for tensor in tensors)
    return sum(spec.size for spec in plan.parameters.values() if spec.file is None)


def _planned_format(plan: Plan) -> str:
    if plan.source["format"] != "torch files":
        return plan.source["format"]
    ours = all(piece.transform == "as is" for piece in plan.pieces)
    return "torch files, our names" if ours else "torch files, the authors' names"
