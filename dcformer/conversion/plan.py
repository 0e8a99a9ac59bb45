"""A conversion as data: for every parameter, which parts of which arrays fill it. Complete before anything is written.

All layout differences (fused projections, transposed kernels, stacked layers) come down to a [`Part`]: a region of an
array whose axes are put into another order. It works both ways: `to_parameter` and `from_parameter` are inverses.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common.dtypes import dtype_name
from ..configuration_dcformer import DCFormerConfig
from ..modeling_dcformer import DCFormerForCausalLM, DCPythiaForCausalLM
from .arrays import Region, SourceArray


# Arrays that the model has no use for, kept for the conversion back to MaxText.
UNUSED_FILE = "unused_arrays.safetensors"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Origin:
    """The origin of a value of the configuration."""

    field: str
    value: Any
    origin: str
    is_default: bool = False


@dataclass(frozen=True)
class Part:
    """
    A region of a source array and the elements of a parameter that it fills.

    Attributes:
        array: Name of the source array.
        region: The elements that are taken.
        order: The array's axes in the order of the parameter. Axes that are left out have length 1 in the region (one
            layer of a stack, one of two fused matrices).
        offset: The first element of the parameter, in row-major order, that is filled.
        transform: The same in words, for the report.
    """

    array: str
    region: Region
    order: tuple[int, ...]
    offset: int = 0
    transform: str = "as is"

    @classmethod
    def all_of(cls, array: SourceArray, offset: int = 0, transform: str = "as is") -> "Part":
        """A whole array, its axes in the order that they have."""
        return cls(array.name, array.whole, tuple(range(len(array.shape))), offset, transform)

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes in the parameter's order."""
        return tuple(self.region[axis][1] - self.region[axis][0] for axis in self.order)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def to_parameter(self, values: Tensor) -> Tensor:
        """The elements of the region, in its shape, with axes in the parameter's order."""
        kept = sorted(self.order)
        return values.reshape([values.shape[axis] for axis in kept]).permute([kept.index(axis) for axis in self.order])

    def from_parameter(self, parameter: Tensor) -> Tensor:
        """The inverse of `to_parameter`: the elements of the region, in its shape, from the whole parameter."""
        values = parameter.flatten()[self.offset : self.offset + self.size].view(self.shape)
        values = values.permute([self.order.index(axis) for axis in sorted(self.order)])
        return values.reshape([stop - start for start, stop in self.region])


@dataclass
class Plan:
    """
    All that a conversion will do.

    Attributes:
        config: Configuration of the model that results.
        arrays: Source arrays that are read, by name.
        source: For the report: `format`, `location`, `step`, and `skipped_steps` if later steps are not whole.
        stamps: Names, sizes and times of the source's files.
        parts: The parts that fill each parameter, by its name, in the order of writing.
        zeros: Elements (start, stop) of a parameter that no array fills because the model never reads them.
        ignored: Source arrays that are not read, with the reason.
        unused: Source arrays that the model has no use for but that are kept in [`UNUSED_FILE`].
        origins: Where each value of the configuration comes from.
        training: Values of the run's training YAML, for the model card.
        generation: Content of the source's generation_config.json, if it states how to generate.
        beside: Local folder whose tokenizer and licence come along, if there is one.
        stated: Fields of the configuration that the source states, which that tokenizer does not replace.
        check: Further check of the finished folder; returns its results by name, raises ValueError if it fails.
        parameters: Every tensor to write, by name, without memory (on the device `meta`); [`complete`] fills it in.
    """

    config: DCFormerConfig
    arrays: dict[str, SourceArray]
    source: dict[str, Any]
    stamps: list = field(default_factory=list)
    parts: dict[str, list[Part]] = field(default_factory=lambda: defaultdict(list))
    zeros: dict[str, tuple[int, int]] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    training: dict[str, Any] = field(default_factory=dict)
    generation: bytes | None = None
    beside: Path | None = None
    stated: set[str] = field(default_factory=set)
    check: Callable[[Path], dict[str, str]] | None = None
    parameters: dict[str, Tensor] = field(default_factory=dict)

    def source_bytes(self, names: Iterable[str]) -> int:
        """Bytes that are read for parameters."""
        return sum(part.size * self.arrays[part.array].dtype.itemsize for name in names for part in self.parts[name])

    def model_parameters(self) -> dict[str, Tensor]:
        """The parameters of the model, without arrays that it does not use."""
        return {name: parameter for name, parameter in self.parameters.items() if name not in self.unused}

    def fingerprint(self) -> dict[str, Any]:
        """The identity of a conversion, which changes if a resumed run would convert something else."""
        source = {key: value for key, value in self.source.items() if key != "skipped_steps"}
        parameters = {name: [spec.shape, str(spec.dtype)] for name, spec in self.parameters.items()}
        return {"source": source, "stamps": self.stamps, "config": self.config.to_dict(), "parameters": parameters}

    def read(
        self, names: Iterable[str], note: Callable[[str, Part, Tensor, float], None] = lambda *_: None
    ) -> dict[str, Tensor]:
        """
        Parameters, each in its dtype. An array that several of them need is read once.

        Args:
            names: Of the parameters.
            note: Called for every part with the parameter's name, the part, its elements as stored, and the largest
                absolute rounding error of the cast.

        Raises:
            ValueError: if a finite value overflows the dtype.
        """
        tensors = {name: torch.zeros_like(self.parameters[name], device="cpu") for name in names}
        by_array: dict[str, list[tuple[str, Part]]] = defaultdict(list)
        for name in tensors:
            for part in self.parts[name]:
                by_array[part.array].append((name, part))
        for array, needed in by_array.items():
            # A stored chunk often holds all layers of a stack: read all that is needed of it at once.
            region = joint_region(part for _, part in needed)
            stored = self.arrays[array].read(region)
            for name, part in needed:
                values = stored[tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(part.region, region))]
                exact = part.to_parameter(values)
                target = tensors[name].view(-1)[part.offset : part.offset + part.size].view(part.shape).copy_(exact)
                note(name, part, values, _rounding_error(exact, target, array))
        return tensors

    def read_one(self, name: str) -> Tensor:
        return self.read([name])[name]


class UnfitWeightsError(ValueError):
    """Weights that no further attempt can convert."""


def joint_region(parts: Iterable[Part]) -> Region:
    """The smallest region of an array that holds those of all these parts of it."""
    axes = zip(*(part.region for part in parts))
    return tuple((min(start for start, _ in axis), max(stop for _, stop in axis)) for axis in axes)


def _rounding_error(exact: Tensor, rounded: Tensor, array: str) -> float:
    """Largest absolute difference of finite values."""
    if exact.dtype == rounded.dtype or not exact.numel():
        return 0.0
    # The difference of a number and its rounding is a number of the wider format.
    wide = reduce(torch.promote_types, [exact.dtype, rounded.dtype, torch.float32])
    error = (exact.to(wide) - rounded).abs_().masked_fill_(~exact.isfinite(), 0).max().item()
    if not math.isfinite(error):
        raise UnfitWeightsError(
            f"{array} holds {exact[exact.isfinite()].abs().max().item():.4g}, which overflows "
            f"{dtype_name(rounded.dtype)}; convert with --dtype bfloat16, float32 or keep."
        )
    return error


def meta_model(config: DCFormerConfig) -> DCFormerForCausalLM:
    """A model without memory for its weights."""
    model_class = DCPythiaForCausalLM if config.model_type == "dcpythia" else DCFormerForCausalLM
    with torch.device("meta"):
        return model_class(config).eval()


def parameter_shapes(config: DCFormerConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that `save_pretrained` writes for a configuration."""
    model = meta_model(config)
    tied = model.all_tied_weights_keys if config.tie_word_embeddings else {}
    return {name: tuple(values.shape) for name, values in model.state_dict().items() if name not in tied}


def complete(plan: Plan, dtype: str) -> Plan:
    """
    Fix shapes and dtypes of the parameters, and check that the plan covers everything.

    Args:
        dtype: `"float32"`, `"bfloat16"`, `"float16"`, or `"keep"` for the dtype of the source arrays.

    Raises:
        ValueError: for an unknown dtype; if a parameter would be filled in part, twice or not at all, or an array is
            neither read nor ignored; for quantised weights.
    """
    if dtype != "keep" and dtype not in DTYPES:
        raise ValueError(f"dtype must be keep, {', '.join(DTYPES)}, got {dtype!r}.")
    where = plan.source["location"]
    if getattr(plan.config, "quantization_config", None):
        raise ValueError(f"The configuration of {where} has a quantization_config; convert the unquantised model.")
    for name in [name for name, array in plan.arrays.items() if not array.is_whole]:
        plan.ignored[f"chunks of {name}"] = "not stored, so read as the fill value"
    shapes = parameter_shapes(plan.config)
    _check_coverage(plan, shapes)
    for name, parts in plan.parts.items():
        sources = [plan.arrays[part.array].dtype for part in parts]
        for part, source in zip(parts, sources):
            if not source.is_floating_point or source.itemsize < 2:
                raise ValueError(f"{part.array} in {where} is {dtype_name(source)}; convert the unquantised model.")
        target = reduce(torch.promote_types, sources) if dtype == "keep" else DTYPES[dtype]
        plan.parameters[name] = torch.empty(shapes[name], dtype=target, device="meta")
    plan.config.dtype = reduce(torch.promote_types, [spec.dtype for spec in plan.parameters.values()])
    for name in plan.unused:
        array = plan.arrays[name]
        plan.parameters[name] = torch.empty(array.shape, dtype=array.dtype, device="meta")
        plan.parts[name] = [Part.all_of(array)]
    return plan


def _check_coverage(plan: Plan, shapes: dict[str, tuple[int, ...]]) -> None:
    where = plan.source["location"]
    read = {part.array for parts in plan.parts.values() for part in parts}
    if unread := sorted(set(plan.arrays) - read - set(plan.unused)):
        raise ValueError(f"{where} holds arrays that no parameter takes: {listed(unread)}.")
    if unknown := sorted({part.array for name in plan.parts.keys() - shapes.keys() for part in plan.parts[name]}):
        raise ValueError(f"{where} holds arrays that the configuration does not have: {listed(unknown)}.")
    if missing := [name for name in shapes if name not in plan.parts]:
        raise ValueError(f"{where} holds nothing for {len(missing)} parameters of the model: {listed(missing)}.")
    for name, parts in plan.parts.items():
        filled = [(part.offset, part.offset + part.size) for part in parts]
        filled = sorted(filled + ([plan.zeros[name]] if name in plan.zeros else []))
        stops = [0] + [stop for _, stop in filled]
        if [start for start, _ in filled] != stops[:-1] or stops[-1] != math.prod(shapes[name]):
            sources = ", ".join(f"{part.array} {part.shape}" for part in parts)
            raise ValueError(f"{name} has shape {shapes[name]} and is not filled exactly once by {sources} in {where}.")


def listed(names: list[str], most: int = 4) -> str:
    """The first few of a list, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
