"""Random operands of usual sizes, for tuning."""

import torch
from torch import Tensor

from .arguments import Composition


def random_operands(
    heads: int, channels: int, queries: int, keys: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Composition, Composition]:
    """
    Query, key, value (1, heads, length, channels), and what is composed before and after the softmax, of rank 2 with
    gates from both sides.

    Raises:
        ValueError: on a CPU, where kernels run in Triton's interpreter, whose times mean nothing.
    """
    if device.type == "cpu":
        raise ValueError("Kernels are tuned on a GPU, and the device is 'cpu'; give --device cuda where there is one.")
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def composition() -> Composition:
        # Small factors, as those of trained models are.
        query, key = (0.1 * normal(1, heads, length, 5) for length in (queries, keys))
        return Composition(query, key)

    states = (normal(1, heads, length, channels) for length in (queries, keys, keys))
    return *states, composition(), composition()
