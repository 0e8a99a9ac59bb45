"""Whether a model fits into the memory of this machine, found before anything of it is made."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ..configuration_dcformer import DCFormerConfig


_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
_BYTES = 4  # of a parameter in float32


def count_parameters(config: DCFormerConfig) -> int:
    """
    Parameters of a model, by the shapes of its first two layers alone.

    Args:
        config (`DCFormerConfig`): Configuration of the model; all of its layers have the same shapes.
    """
    counts = []
    for layers in (1, 2):
        values = {"num_hidden_layers": layers, "layer_types": (config.layer_types * 2)[:layers]}
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(type(config).from_dict({**config.to_dict(), **values}))
        counts.append(sum(parameter.numel() for parameter in model.parameters()))
    return counts[0] + (counts[1] - counts[0]) * (config.num_hidden_layers - 1)


def check_size(config: PreTrainedConfig) -> None:
    """Raise ValueError if the memory of this machine, on which a model is made, cannot hold the weights alone."""
    if not isinstance(config, DCFormerConfig):
        return
    import psutil

    memory = psutil.virtual_memory().total + psutil.swap_memory().total
    parameters = count_parameters(config)
    needed = parameters * _BYTES
    if needed <= memory:
        return
    sizes = ", ".join(f"model.{name} {getattr(config, name):,}" for name in _SIZES)
    raise ValueError(
        f"A model with {sizes} has {parameters:,} parameters, which take {needed / 1e9:,.0f} GB in float32, and this "
        f"machine has {memory / 1e9:,.0f} GB; lower the largest."
    )
