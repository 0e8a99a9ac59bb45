"""A conversion as data: for every parameter, which parts of which arrays fill it. Complete before anything is written.

All layout differences (fused projections, transposed kernels, stacked layers) come down to a [`Part`]: a region of an
array whose axes are put into another order. It works both ways: `to_parameter` and `from_parameter` are inverses.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..common.dtypes import dtype_name
from ..configuration_dcformer import DCFormerConfig
from ..modeling_dcformer import DCFormerForCausalLM, DCPythiaForCausalLM
from .arrays import Region, Source, SourceArray


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
    """A region of a source array and the elements of a parameter that it fills."""

    array: str  #: name of the source array
    region: Region  #: the elements that are taken
    #: The array's axes in the order of the parameter. Those left out have length 1 in the region: one layer of a stack.
    order: tuple[int, ...]
    offset: int = 0  #: the first element of the parameter, in row-major order, that is filled
    transform: str = "as is"  #: the same in words, for the report

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

    def within(self, region: Region) -> tuple[slice, ...]:
        """The slices of the part in the values of a larger region of its array."""
        return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(self.region, region))


@dataclass(frozen=True)
class Layout:
    """The places of a source's arrays in the parameters of a model."""

    parts: Mapping[str, Sequence[Part]]  #: what fills each parameter, by its name, in the order of writing
    ignored: Mapping[str, str] = field(default_factory=dict)  #: what is not read as a parameter, with the reason
    #: Elements (start, stop) of a parameter that no array fills because the model never reads them.
    zeros: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    unused: Sequence[str] = ()  #: arrays that the model has no use for, kept in [`UNUSED_FILE`]; they have parts too


@dataclass(frozen=True)
class Checkpoint:
    """A source whose model is known."""

    source: Source
    config: DCFormerConfig
    origins: Sequence[Origin]  #: where each value of the configuration comes from
    layout: Layout


@dataclass(frozen=True)
class Files:
    """The files and notes that go beside the weights."""

    tokenizer: PreTrainedTokenizerBase | None = None
    generation: bytes | None = None  #: content of generation_config.json; `None`: it follows from the configuration
    licences: Sequence[Path] = ()  #: files to copy
    token_ids: Mapping[str, int | list[int]] = field(default_factory=dict)  #: that replace those of the configuration
    origins: Sequence[Origin] = ()  #: where they come from


@dataclass(frozen=True)
class Plan(Checkpoint):
    """All that a conversion will do, from [`make_plan`]; the configuration is that of the model that results."""

    files: Files
    parameters: Mapping[str, Tensor]  #: every tensor to write, by name, without memory (on the device `meta`)

    @property
    def model_parameters(self) -> dict[str, Tensor]:
        """The parameters of the model, without arrays that it does not use."""
        return {name: parameter for name, parameter in self.parameters.items() if name not in self.layout.unused}

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The identity of a conversion, which changes if a resumed run would convert something else."""
        source = {key: value for key, value in self.source.record.items() if key != "skipped_steps"}
        parameters = {name: [spec.shape, str(spec.dtype)] for name, spec in self.parameters.items()}
        config = self.config.to_dict()
        return {"source": source, "stamps": self.source.stamps, "config": config, "parameters": parameters}

    def source_bytes(self, names: Iterable[str]) -> int:
        """Bytes that are read for parameters."""
        parts = [part for name in names for part in self.layout.parts[name]]
        return sum(part.size * self.source.arrays[part.array].dtype.itemsize for part in parts)

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
            for part in self.layout.parts[name]:
                by_array[part.array].append((name, part))
        for array, needed in by_array.items():
            # A stored chunk often holds all layers of a stack: read all that is needed of it at once.
            region = joint_region(part for _, part in needed)
            stored = self.source.arrays[array].read(region)
            for name, part in needed:
                values = stored[part.within(region)]
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


def _model_class(config: DCFormerConfig) -> type[DCFormerForCausalLM]:
    return DCPythiaForCausalLM if config.model_type == "dcpythia" else DCFormerForCausalLM


def meta_model(config: DCFormerConfig) -> DCFormerForCausalLM:
    """A model without memory for its weights."""
    with torch.device("meta"):
        return _model_class(config)(config).eval()


def parameter_shapes(config: DCFormerConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that `save_pretrained` writes for a configuration."""
    model = meta_model(config)
    tied = model.all_tied_weights_keys if config.tie_word_embeddings else {}
    return {name: tuple(values.shape) for name, values in model.state_dict().items() if name not in tied}


def group_parts(parts: Iterable[tuple[str, Part]]) -> dict[str, list[Part]]:
    """The parts of each parameter, from pairs of its name and a part."""
    grouped: dict[str, list[Part]] = {}
    for name, part in parts:
        grouped.setdefault(name, []).append(part)
    return grouped


def make_plan(checkpoint: Checkpoint, dtype: str = "keep", files: Files | None = None) -> Plan:
    """
    The plan of a conversion, once it is sure that it covers everything.

    Args:
        checkpoint: What is converted.
        dtype (defaults to `"keep"`): `"float32"`, `"bfloat16"`, `"float16"`, or `"keep"` for the dtype of the arrays.
        files (*optional*): What goes beside the weights; `None`: nothing.

    Raises:
        ValueError: for an unknown dtype; if a parameter would be filled in part, twice or not at all, or an array is
            neither read nor ignored; for quantised weights.
    """
    source, layout, files = checkpoint.source, checkpoint.layout, files or Files()
    if dtype != "keep" and dtype not in DTYPES:
        raise ValueError(f"dtype must be keep, {', '.join(DTYPES)}, got {dtype!r}.")
    if getattr(checkpoint.config, "quantization_config", None):
        raise ValueError(
            f"The configuration of {source.location} has a quantization_config; convert the unquantised model."
        )
    config = copy.deepcopy(checkpoint.config)
    shapes = parameter_shapes(config) | {name: source.arrays[name].shape for name in layout.unused}
    _check_coverage(source, layout, shapes)
    parameters = {}
    for name, parts in layout.parts.items():
        stored = reduce(torch.promote_types, [source.arrays[part.array].dtype for part in parts])
        target = stored if name in layout.unused else DTYPES.get(dtype, stored)
        parameters[name] = torch.empty(shapes[name], dtype=target, device="meta")
    config.dtype = reduce(
        torch.promote_types, [spec.dtype for name, spec in parameters.items() if name not in layout.unused]
    )
    config.architectures = [_model_class(config).__name__]
    for key, value in files.token_ids.items():
        setattr(config, key, value)
    unstored = [f"chunks of {name}" for name, array in source.arrays.items() if not array.is_whole]
    ignored = {**layout.ignored, **dict.fromkeys(unstored, "not stored, so read as the fill value")}
    origins = [*checkpoint.origins, *files.origins]
    return Plan(source, config, origins, replace(layout, ignored=ignored), files, parameters)


def _check_coverage(source: Source, layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError unless each array is read or ignored, and each parameter filled exactly once, by weights."""
    where, parts = source.location, layout.parts
    read = {part.array for of_parameter in parts.values() for part in of_parameter}
    if unread := sorted(source.arrays.keys() - read - layout.ignored.keys()):
        raise ValueError(f"{where} holds arrays that no parameter takes: {listed(unread)}.")
    if unknown := sorted({part.array for name in parts.keys() - shapes.keys() for part in parts[name]}):
        raise ValueError(f"{where} holds arrays that the configuration does not have: {listed(unknown)}.")
    if missing := [name for name in shapes if name not in parts]:
        raise ValueError(f"{where} holds nothing for {len(missing)} parameters of the model: {listed(missing)}.")
    for name, of_parameter in parts.items():
        filled = [(part.offset, part.offset + part.size) for part in of_parameter]
        filled = sorted(filled + ([layout.zeros[name]] if name in layout.zeros else []))
        stops = [0] + [stop for _, stop in filled]
        if [start for start, _ in filled] != stops[:-1] or stops[-1] != math.prod(shapes[name]):
            sources = ", ".join(f"{part.array} {part.shape}" for part in of_parameter)
            raise ValueError(f"{name} has shape {shapes[name]} and is not filled exactly once by {sources} in {where}.")
    for array in (source.arrays[part.array] for name in parts if name not in layout.unused for part in parts[name]):
        if not array.dtype.is_floating_point or array.dtype.itemsize < 2:
            raise ValueError(f"{array.name} in {where} is {dtype_name(array.dtype)}; convert the unquantised model.")


def listed(names: Sequence[str], most: int = 4) -> str:
    """The first few of a list, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
