"""The form for GPUs in the operator's table."""

from typing import Any

from torch import Tensor

from ..dcmha import register_implementation
from .triton_form import triton_attention, why_not_triton


def why_not_unasked(query: Tensor, *arguments: Any, **options: Any) -> str | None:
    """Why the Triton form is not chosen without being asked for."""
    if query.device.type != "cuda":
        return f"it is for CUDA devices, and the tensors are on {query.device.type}"
    from .automatic import why_not_chosen

    return why_not_chosen(query, *arguments, **options)


def register() -> None:
    """Add it to the table."""
    register_implementation("triton", triton_attention, why_not_triton, automatic=why_not_unasked)
