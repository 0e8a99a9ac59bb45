"""The forms for GPUs in the operator's table. On CUDA devices Triton's is tried first, then the compiled one."""

from ..dcmha import register_implementation
from .automatic import why_not_chosen
from .compiled import compiled_forward, why_not_compiled, why_not_unasked
from .preparation import prepare_step
from .triton_form import triton_attention, why_not_triton


def register() -> None:
    """Add both to the table."""
    # What is added later is tried earlier.
    register_implementation(
        "compiled",
        compiled_forward,
        why_not_compiled,
        "chunks whose compositions torch.compile fuses, with gradients",
        is_automatic=True,
        automatic_on="cuda",
        why_not_automatic=why_not_unasked,
    )
    register_implementation(
        "triton",
        triton_attention,
        why_not_triton,
        "fused kernels for training, prefill and decoding on GPUs",
        is_automatic=True,
        prepare=prepare_step,
        automatic_on="cuda",
        why_not_automatic=why_not_chosen,
    )
