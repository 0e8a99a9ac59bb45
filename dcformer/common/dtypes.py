"""Number types by name."""

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without `torch.`, as configurations and reports have it: `"bfloat16"`."""
    return str(dtype).removeprefix("torch.")
