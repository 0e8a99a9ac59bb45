"""Implementations of composed attention beside the plain form. Triton kernels are imported when they first run."""

from ..dcmha import register_implementation
from .triton_form import triton_attention, why_not_automatic, why_not_triton


def register() -> None:
    """Add the implementation "triton" to the operator's table."""
    register_implementation("triton", triton_attention, why_not_triton, why_not_automatic)
