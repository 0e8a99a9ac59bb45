"""Fast implementations of composed attention, which register themselves in the table: C++ for CPUs, Triton for GPUs."""

from ..compose_dcformer import register_fused
from ..dcmha import register_implementation
from .native import has_bfloat16_products, native_attention, native_projection, why_not_native
from .ops import set_workspace_bytes
from .projection import triton_factors, triton_rotation
from .triton_form import triton_attention, why_not_automatic, why_not_triton


def register() -> None:
    """Add the implementations "native" and "triton". Triton itself is imported when its kernels first run."""
    register_implementation("native", native_attention, why_not_native, automatic=why_not_native)
    register_implementation("triton", triton_attention, why_not_triton, why_not_automatic)
    register_fused(native_projection, triton_rotation, triton_factors)


__all__ = ["has_bfloat16_products", "register", "set_workspace_bytes"]
