"""The forms for GPUs in the operator's table. On CUDA devices Triton's is tried first, then the compiled one."""

from typing import Any

from torch import Tensor

from ..dcmha import register_implementation
from .automatic import why_not_chosen
from .triton_form import triton_attention, why_not_triton


def _compiled(*arguments: Any, **options: Any) -> Tensor:
    from .compiled import compiled_forward

    return compiled_forward(*arguments, **options)


def _why_not_compiled(*arguments: Any, **options: Any) -> str | None:
    from .compiled import why_not_compiled

    return why_not_compiled(*arguments, **options)


def register() -> None:
    """Add both to the table."""
    # What is added later is tried earlier.
    register_implementation(
        "compiled",
        _compiled,
        _why_not_compiled,
        "any GPU, by torch.compile",
        is_automatic=True,
        automatic_on="cuda",
    )
    register_implementation(
        "triton",
        triton_attention,
        why_not_triton,
        "fused kernels for training, prefill and decoding on GPUs",
        is_automatic=True,
        automatic_on="cuda",
        why_not_automatic=why_not_chosen,
    )
