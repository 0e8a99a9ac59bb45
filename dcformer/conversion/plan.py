"""What a conversion will do, complete before the first byte is written: every piece, parameter and ignored array."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..configuration_dcformer import DCFormerConfig
from ..modeling_dcformer import DCFormerForCausalLM, DCPythiaForCausalLM
from .leaves import Leaf
from .pieces import PART_BYTES, Piece, dtype_name


# File of arrays that the model has no use for, kept for the way back.
UNUSED_FILE = "unused_leaves.safetensors"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Origin:
    """Where a configuration value comes from."""

    field: str
    value: Any
    origin: str
    is_default: bool = False


@dataclass(frozen=True)
class Parameter:
    """A tensor to write: its shape, its dtype, and its file if that is not one of the model's weight files."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclass
class Plan:
    """
    What a conversion will do. The words leaf, piece and span are explained in `pieces.py`.

    Attributes:
        config (`DCFormerConfig`): Configuration of the model that results.
        leaves: Source arrays that are read, by name.
        pieces: In the order in which the leaves are read.
        parameters: What is written, by name, in the order in which it is written.
        zeros: Spans (start, stop) of a parameter that no array fills because the model never reads them.
        ignored: Source arrays that are not read, with the reason.
        origins: Where each configuration value comes from.
        source: For the report, `format`, `location`, `step` and, where later steps of the run are not whole,
            `skipped_steps`: each with the reason.
        unused: Source arrays that the model has no use for but that are kept in a file of their own.
        training: Values of the run's training YAML, for the model card; empty if there is none.
    """

    config: DCFormerConfig
    leaves: dict[str, Leaf]
    pieces: list[Piece]
    source: dict[str, Any]
    parameters: dict[str, Parameter] = field(default_factory=dict)
    zeros: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    training: dict[str, Any] = field(default_factory=dict)

    def by_leaf(self) -> dict[str, list[Piece]]:
        grouped: dict[str, list[Piece]] = defaultdict(list)
        for piece in self.pieces:
            grouped[piece.leaf].append(piece)
        return grouped

    def by_parameter(self) -> dict[str, list[Piece]]:
        grouped: dict[str, list[Piece]] = defaultdict(list)
        for piece in self.pieces:
            grouped[piece.parameter].append(piece)
        return grouped

    def fingerprint(self) -> dict[str, Any]:
        """What tells that an earlier run converted the same arrays in the same way."""
        return {
            # A step that a running training begins meanwhile makes no difference.
            "source": {key: value for key, value in self.source.items() if key != "skipped_steps"},
            "config": self.config.to_dict(),
            "arrays": {name: leaf.fingerprint() for name, leaf in self.leaves.items()},
            "parameters": {name: [spec.shape, str(spec.dtype)] for name, spec in self.parameters.items()},
        }

    def read(self, parameter: str) -> Tensor:
        """One parameter in its own dtype, read from the source."""
        spec = self.parameters[parameter]
        values = torch.zeros(spec.size, dtype=spec.dtype)
        for piece in self.pieces:
            if piece.parameter != parameter:
                continue
            read = self.leaves[piece.leaf].read(piece.box)
            for part in piece.split(PART_BYTES // spec.dtype.itemsize):
                part.write_to_parameter(read, piece.box, values[part.offset : part.offset + part.size])
        return values.view(spec.shape)


def parameter_shapes(config: DCFormerConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what `save_pretrained` writes for a configuration."""
    model = meta_model(config)
    tied = model.all_tied_weights_keys if config.tie_word_embeddings else {}
    return {name: tuple(values.shape) for name, values in model.state_dict().items() if name not in tied}


def model_class(config: DCFormerConfig) -> type[DCFormerForCausalLM]:
    """The class of the models of a configuration."""
    return DCPythiaForCausalLM if config.model_type == "dcpythia" else DCFormerForCausalLM


def meta_model(config: DCFormerConfig) -> DCFormerForCausalLM:
    """A model without memory for its weights."""
    with torch.device("meta"):
        return model_class(config)(config).eval()


def complete(plan: Plan, dtype: str, shapes: dict[str, tuple[int, ...]] | None = None) -> Plan:
    """
    Fix the parameters of a plan and check that it covers everything.

    Args:
        dtype (`str`): `"float32"`, `"bfloat16"`, `"float16"`, or `"keep"` for the dtype of the source arrays.
        shapes: Shapes of all parameters by name. None: those of the configuration's model.

    Raises:
        ValueError: for an unknown dtype, or if a parameter would be written in part, twice or not at all; if a source
            array is neither read nor ignored; if one that is needed is incomplete.
    """
    if dtype != "keep" and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)} or keep, got {dtype!r}.")
    shapes = parameter_shapes(plan.config) if shapes is None else shapes
    by_parameter = plan.by_parameter()
    _check_coverage(plan, shapes, by_parameter)
    for piece in plan.pieces:
        leaf = plan.leaves[piece.leaf]
        if not leaf.dtype.is_floating_point or leaf.dtype.itemsize < 2:
            raise ValueError(
                f"{leaf.name} in {plan.source['location']} is of {dtype_name(leaf.dtype)}, which no "
                "weight is; convert the model unquantised."
            )
    for name, pieces in by_parameter.items():
        sources = [plan.leaves[piece.leaf].dtype for piece in pieces]
        target = reduce(torch.promote_types, sources) if dtype == "keep" else DTYPES[dtype]
        plan.parameters[name] = Parameter(shapes[name], target)
    for name in plan.unused:
        leaf = plan.leaves[name]
        plan.parameters[name] = Parameter(leaf.shape, leaf.dtype, UNUSED_FILE)
        plan.pieces.append(Piece(name, leaf.whole(), tuple(range(len(leaf.shape))), name, 0, "as is"))
    for leaf in plan.leaves.values():
        leaf.check()
    plan.config.dtype = reduce(
        torch.promote_types, [spec.dtype for spec in plan.parameters.values() if spec.file is None]
    )
    return plan


def _check_coverage(plan: Plan, shapes: dict, by_parameter: dict[str, list[Piece]]) -> None:
    where = plan.source["location"]
    unread = sorted(set(plan.leaves) - {piece.leaf for piece in plan.pieces} - set(plan.unused))
    if unread:
        raise ValueError(f"{where} holds arrays that no parameter takes: {listed(unread)}.")
    unknown = sorted(set(by_parameter) - set(shapes))
    if unknown:
        leaves = sorted({piece.leaf for name in unknown for piece in by_parameter[name]})
        raise ValueError(
            f"{where} holds arrays that the configuration has no place for: {listed(leaves)}; check the configuration "
            "given."
        )
    missing = [name for name in shapes if name not in by_parameter]
    if missing:
        raise ValueError(
            f"{where} holds nothing for {len(missing)} parameters of the model: {listed(missing)}; the checkpoint is "
            "incomplete, or of another architecture."
        )
    for name, pieces in by_parameter.items():
        spans = sorted([(p.offset, p.offset + p.size) for p in pieces] + plan.zeros.get(name, []))
        ends = [0] + [stop for _, stop in spans]
        if [start for start, _ in spans] != ends[:-1] or ends[-1] != math.prod(shapes[name]):
            sources = ", ".join(f"{p.leaf} {tuple(b - a for a, b in p.box)}" for p in pieces)
            raise ValueError(
                f"{name} has shape {shapes[name]} and is not filled exactly once by {sources} in {where}; the "
                "checkpoint is incomplete, or of another architecture."
            )


def listed(names: list[str], most: int = 4) -> str:
    """The first few of a list, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
