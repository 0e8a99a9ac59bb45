"""`dcformer bench model`: Table 2 of the paper, exactly for our models, and what it is in a forward pass that is timed.

Overheads are counted from the configuration: every parameter, and the operations of the pairs of query and key that are
seen. The paper leaves out embeddings and the output layer and counts compositions over all pairs, so its formula is
shown beside, and what it prints.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..configuration_dcformer import DCFormerConfig
from ..modeling_dcformer import DCFormerForCausalLM
from ..training.throughput import flops_per_token
from . import paper, train
from .context import Context
from .layers import sizes
from .report import Row


class Overhead(NamedTuple):
    """
    What composition adds to a model.

    Args:
        parameters (`int`): Extra parameters.
        of_parameters (`float`): As a share of all parameters without composition.
        of_layer_parameters (`float`): As a share of those of the layers.
        of_operations (`float`): Extra operations, as a share of all without composition.
        of_layer_operations (`float`): As a share of those of the layers.
    """

    parameters: int
    of_parameters: float
    of_layer_parameters: float
    of_operations: float
    of_layer_operations: float


def overhead(config: DCFormerConfig, length: int) -> Overhead:
    """
    Count what composition adds to a model.

    Args:
        config (`DCFormerConfig`): Of the model with composition.
        length (`int`): Tokens of a row, for the operations.
    """
    values = {**config.to_dict(), "compose_pre": False, "compose_post": False}
    plain = type(config).from_dict(values)
    everything, layers = _parameters(plain)
    extra = _parameters(config)[0] - everything
    operations, extra_operations = flops_per_token(plain, length), flops_per_token(config, length)
    extra_operations -= operations
    in_layers = operations - 3 * 2 * config.hidden_size * config.vocab_size
    shares = extra / everything, extra / layers, extra_operations / operations, extra_operations / in_layers
    return Overhead(extra, *shares)


def _parameters(config: DCFormerConfig) -> tuple[int, int]:
    """Of the whole model, and of its layers."""
    with torch.device("meta"):
        model = DCFormerForCausalLM(config)
    return model.num_parameters(), sum(parameter.numel() for parameter in model.model.layers.parameters())


def table_2(context: Context) -> None:
    """The rows of Table 2, and the 6.9B model at the length that its printed operations are of."""
    group = "Table 2: what composition adds, in %"
    for row in paper.TABLE_2:
        config = DCFormerConfig.from_preset(row.preset, sliding_window=None)
        lengths = [row.length]
        if row.length_to_width * config.hidden_size < row.length:
            lengths.append(int(row.length_to_width * config.hidden_size))
        for length in lengths:
            counted = overhead(config, length)
            windows = overhead(DCFormerConfig.from_preset(row.preset), length)
            ratio = length / config.hidden_size
            figures = {
                "parameters": 100 * counted.of_parameters,
                "of layers": 100 * counted.of_layer_parameters,
                "formula": 100 * paper.parameter_overhead(config.compose_rank, config.head_dim),
                "paper": 100 * row.parameters,
                "FLOPs": 100 * counted.of_operations,
                "FLOPs of layers": 100 * counted.of_layer_operations,
                "FLOPs, windows": 100 * windows.of_operations,
                "FLOPs, formula": 100 * paper.operation_overhead(config.compose_rank, config.head_dim, ratio),
                "FLOPs, paper": 100 * row.operations,
            }
            note = ""
            if len(lengths) == 2:
                note = "the paper's FLOPs are those of 2048 tokens" if length == row.length else "its rho in the paper"
            context.report.add(Row(group, f"{row.preset}, {length} tokens", figures=figures, note=note))

    context.report.note(
        "FLOPs are of the pairs that are seen, all layers global unless the column says windows; the formula counts "
        "compositions over all pairs, and no embeddings. The paper prints 4096 tokens beside a rho of 0.5 for the 6.9B "
        "model, whose rho is 1 there: its 1.9 % are those of 2048 tokens."
    )


def run(context: Context) -> None:
    """Table 2, then whole models forward."""
    table_2(context)
    for size in sizes(context.is_quick):
        train.compare(context, size, trains=False)
