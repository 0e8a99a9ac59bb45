"""Figures that the paper prints and that commands show beside their own: Tables 2, 6 and 10.

Ratios alone can be compared: training was measured on TPU v3 pods, inference on an A100 with torch.compile, batch 1,
1024 tokens of prompt and 128 that are generated.
"""

from __future__ import annotations

from typing import NamedTuple


class Overhead(NamedTuple):
    """A row of Table 2, as shares of a model without composition."""

    preset: str
    length: int
    parameters: float
    operations: float
    length_to_width: float  # as printed


# The paper prints rho = 0.5 for 4096 tokens of the 6.9B model, whose width is 4096: its operations are those of 2048.
TABLE_2 = (
    Overhead("dcformer-1.4b", 2048, 0.026, 0.048, 1.0),
    Overhead("dcformer-6.9b", 4096, 0.013, 0.019, 0.5),
    Overhead("dcformer-6.9b", 8192, 0.013, 0.033, 2.0),
)

# Shares of Transformer++'s tokens per second, by the model's size, whether keys' side composes, and local layers for
# each global one; for decoding also those of Transformer++ with the same windows.
TRAINING = {
    ("2.8B", True, 1): 0.745,
    ("6.9B", True, 1): 0.831,
    ("6.9B", True, 3): 0.866,
    ("6.9B", True, 7): 0.881,
    ("6.9B", False, 1): 0.915,
    ("6.9B", False, 3): 0.925,
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
