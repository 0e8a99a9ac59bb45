"""Figures that the paper prints, beside ours: Tables 2, 6 and 10.

Ratios alone can be compared: the paper trained on TPU v3 pods, and decoded on an A100 with torch.compile, batch 1,
prompts of 1024 tokens and 128 generated ones.
"""

from __future__ import annotations

import torch

from ..configuration_dcformer import DCFormerConfig
from ..modeling_dcformer import DCFormerForCausalLM
from ..training import flops_per_token
from .measure import Run


# Preset, tokens, shares of extra parameters and operations. The paper prints rho = 0.5 for 4096 tokens of the 6.9B
# model, whose width is 4096: its operations are those of 2048 tokens.
TABLE_2 = (
    ("dcformer-1.4b", 2048, 0.026, 0.048),
    ("dcformer-6.9b", 4096, 0.013, None),
    ("dcformer-6.9b", 2048, 0.013, 0.019),
    ("dcformer-6.9b", 8192, 0.013, 0.033),
)
# Size, whether the keys' side composes, local layers for each global one: shares of Transformer++'s tokens per second,
# with all keys and (decoding only) with the same windows.
TRAINING = {
    ("2.8B", True, 1): (0.745,),
    ("6.9B", True, 1): (0.831,),
    ("6.9B", True, 3): (0.866,),
    ("6.9B", True, 7): (0.881,),
    ("6.9B", False, 1): (0.915,),
    ("6.9B", False, 3): (0.925,),
}
DECODING = {
    ("2.8B", True, 1): (0.879, 0.811),
    ("6.9B", True, 1): (0.945, 0.887),
    ("6.9B", True, 3): (0.990, 0.896),
    ("6.9B", True, 7): (1.015, 0.903),
    ("6.9B", False, 1): (0.996, 0.932),
    ("6.9B", False, 3): (1.033, 0.935),
}


def parameter_overhead(rank: int, head_dim: int) -> float:
    """Extra parameters as a share of a layer's, by Table 2's last row."""
    return (2 * rank + 1) / (3 * head_dim)


def operation_overhead(rank: int, head_dim: int, length_to_width: float) -> float:
    """Extra operations as a share of a layer's, by Table 2's last row; `length_to_width` is its rho."""
    return 4 * (2 * rank + 1) * (1 + length_to_width) / ((12 + length_to_width) * head_dim)


def overhead(config: DCFormerConfig, length: int) -> dict[str, float]:
    """
    Count what composition adds to a model.

    Args:
        config (`DCFormerConfig`): Of the model with composition.
        length (`int`): Tokens of a row, for the operations, which are of the pairs that are seen.

    Returns:
        `dict[str, float]`: percentages of the parameters and operations without composition, and of the layers'.
    """
    plain = type(config).from_dict({**config.to_dict(), "compose_pre": False, "compose_post": False})
    everything, layers = _parameters(plain)
    extra = _parameters(config)[0] - everything
    operations = flops_per_token(plain, length)
    extra_operations = flops_per_token(config, length) - operations
    in_layers = operations - 3 * 2 * config.hidden_size * config.vocab_size
    return {
        "parameters": 100 * extra / everything,
        "of layers": 100 * extra / layers,
        "FLOPs": 100 * extra_operations / operations,
        "FLOPs of layers": 100 * extra_operations / in_layers,
    }


def _parameters(config: DCFormerConfig) -> tuple[int, int]:
    """Parameters of the whole model, and of its layers."""
    with torch.device("meta"):
        model = DCFormerForCausalLM(config)
    return model.num_parameters(), sum(parameter.numel() for parameter in model.model.layers.parameters())


def table_2(run: Run) -> None:
    """Overheads counted from configurations, by the paper's formula, and as it prints them."""
    for preset, length, parameters, operations in TABLE_2:
        config = DCFormerConfig.from_preset(preset, sliding_window=None)
        rank, head_dim, rho = config.compose_rank, config.head_dim, length / config.hidden_size
        figures = overhead(config, length) | {
            "FLOPs, windows": overhead(DCFormerConfig.from_preset(preset), length)["FLOPs"],
            "formula": 100 * parameter_overhead(rank, head_dim),
            "paper": 100 * parameters,
            "FLOPs, formula": 100 * operation_overhead(rank, head_dim, rho),
        }
        if operations is not None:
            figures["FLOPs, paper"] = 100 * operations
        run.add("Table 2: what composition adds, in %", f"{preset}, {length} tokens", figures=figures)
    run.note(
        "FLOPs are of the pairs that are seen, all layers global unless the column says windows; the formula counts "
        "compositions over all pairs, and no embeddings."
    )
