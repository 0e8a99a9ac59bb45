"""`config.json` of a model: read strictly, so that every wrong value is an error that names the file and the field."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from ...common.json_text import parse_json
from ...common.quoting import quoted
from ...configuration_dcformer import DCFormerConfig, DCPythiaConfig
from ..plan import parameter_shapes
from .transformers_folder import count_layers, open_weights


# So many layers are checked against the weights before a configuration is made.
_MANY_LAYERS = 1000
_LAYER_KEYS = ("num_hidden_layers", "n_layer")
_DTYPE_KEYS = ("dtype", "torch_dtype")
_ROPE_KEYS = ("rope_base", "rope_theta", "rotary_pct", "partial_rotary_factor")
_ROPE_GROUPS = ("rope_parameters", "rope_scaling")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "compose_rank",
)
_LONGEST_REASON = 400


def read_config(path: Path) -> DCFormerConfig:
    """
    The configuration of a folder with weights, in the authors' keys or ours.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no JSON object or holds a bad value.
    """
    values, layers = read_values(path), None
    if any(isinstance(values.get(key), int) and values[key] > _MANY_LAYERS for key in _LAYER_KEYS):
        layers = count_layers(open_weights(path.parent))
    return make_config(values, path, layers)


def read_values(path: Path) -> dict[str, Any]:
    """
    What the file holds.

    Raises:
        FileNotFoundError, ValueError: as [`read_config`], but for the values.
    """
    if not path.is_file():
        raise FileNotFoundError(f"There is no configuration {str(path)!r}; check the path.")
    try:
        values = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); correct it or download it again.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}.")
    return values


def make_config(
    values: dict[str, Any], path: Path, layers: int | None = None, where: str = "the weights"
) -> DCFormerConfig:
    """
    The configuration that values stand for, in the authors' keys or ours.

    Args:
        values: What [`read_values`] returned.
        path (`Path`): The file that they are from, for messages.
        layers (`int`, *optional*): Layers that the weights have. A configuration with more of them is refused before
            it is made, which for a billion takes long.
        where (`str`): What has these layers, for the message.

    Raises:
        ValueError: for a bad value; the message names file and field.
    """
    model_type = values.get("model_type", DCFormerConfig.model_type)
    if model_type not in (DCFormerConfig.model_type, DCPythiaConfig.model_type):
        raise ValueError(f"{path} is of the model type {quoted(model_type)}; it must be 'dcformer' or 'dcpythia'.")
    try:
        _check_layers(values, layers, where)
        _check_values(values)
        config_class = DCPythiaConfig if model_type == DCPythiaConfig.model_type else DCFormerConfig
        return config_class.from_dict(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{path}: {str(error)[:_LONGEST_REASON]}") from error


def _check_layers(values: dict[str, Any], layers: int | None, where: str) -> None:
    for key in _LAYER_KEYS:
        count = values.get(key)
        if layers is not None and isinstance(count, int) and count > layers:
            raise ValueError(
                f"{key} is {quoted(count)} (num_hidden_layers), but {where} hold {layers} layers and nothing for "
                f"model.layers.{layers}; correct it or complete the weights."
            )


def _check_values(values: dict[str, Any]) -> None:
    for key in _DTYPE_KEYS:
        name = values.get(key)
        if name is not None and not (isinstance(name, str) and isinstance(getattr(torch, name, None), torch.dtype)):
            raise ValueError(f"{key} must be the name of a dtype such as 'float32', got {quoted(name)}.")
    groups = {key: values[key] for key in _ROPE_GROUPS if isinstance(values.get(key), dict)}
    for where, group in {"": values, **groups}.items():
        for key in _ROPE_KEYS:
            if key in group and group[key] is not None:
                _check_positive(f"{where}[{key!r}]" if where else key, group[key])


def _check_positive(key: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise ValueError(f"{key} must be a positive number, got {quoted(value)}.")


def shapes_of(config: DCFormerConfig, path: Path) -> dict[str, tuple[int, ...]]:
    """
    Names and shapes of a configuration's parameters.

    Raises:
        ValueError: naming the file and its largest size, if tensors cannot have these sizes.
    """
    try:
        return parameter_shapes(config)
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:
        largest = max(_SIZES, key=lambda name: getattr(config, name))
        raise ValueError(
            f"{path}: {largest} is {quoted(getattr(config, largest))}, more than a tensor can hold; correct it."
        ) from error
