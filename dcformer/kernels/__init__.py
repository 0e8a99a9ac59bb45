"""Backends of composed attention beside plain torch: C++ for CPUs, Triton for GPUs."""

from ..dcmha import register_backend
from .cpu.cpu_backend import CPUBackend, has_bfloat16_products
from .triton.triton_backend import TritonBackend, set_workspace_bytes


def register() -> None:
    """Add the backends "native" and "triton"."""
    register_backend(CPUBackend())
    register_backend(TritonBackend())


__all__ = ["has_bfloat16_products", "register", "set_workspace_bytes"]
