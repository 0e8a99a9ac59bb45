"""The kernels as an implementation of composed attention: which calls they take, and when they are selected unnamed."""

import functools
import importlib.metadata
import os
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from ..common.dtypes import dtype_name
from ..dcmha import Visibility, Weights, is_number
from .call import Call, groups_of, why_no_kernel
from .ops import decode_op, forward_op


# What decoding takes of a call.
MOST_DECODE_QUERIES = 8
MOST_CHANNELS = 256
MOST_HEADS = 64  # of a group
OLDEST_TRITON = "3.6"
OLDEST_CAPABILITY = (8, 0)

_AUTOMATIC_ON = "cuda"  # where it is selected automatically
# For fewer scores in a graph of `torch.compile` launches are estimated to take longer than PyTorch, which Inductor
# fuses: on an H100 a training step of a small model took 10 ms so, and 54 by kernels that are launched one at a time.
FEWEST_SCORES_IN_A_GRAPH = 2**24


def triton_attention(*inputs: Any, scaling: float, mask: Visibility, **_: Any) -> Tensor:
    """The `forward` of an [`Implementation`], without dropout and with chunks as large as the workspace allows."""
    call = Call.of(*inputs, mask, scaling)
    # The kernels for a few queries take no documents, no gradients and no symbols as lengths.
    may_decode = call.sequence_ids is None and not call.needs_gradient() and is_number(call.query.shape[2])
    if may_decode and call.query.shape[2] <= MOST_DECODE_QUERIES:
        return decode_op(*call, None, None, None)
    return forward_op(*call)[0]


def why_not_triton(query: Tensor, key: Tensor, value: Tensor, *stages: Weights, **options: Any) -> str | None:
    """Why the kernels cannot compute this, as the end of a sentence; None if they can."""
    if (reason := _why_not_here(query.device.type, query.device.index)) is not None:
        return reason
    if not query.dtype == key.dtype == value.dtype:
        names = ", ".join(dtype_name(states.dtype) for states in (query, key, value))
        return f"query, key and value must be of one type, and are {names}"
    if query.dtype == torch.bfloat16 and query.device.type == "cpu":
        return "Triton's interpreter multiplies no bfloat16; float16 comes closest"
    if max(query.shape[3], value.shape[3]) > MOST_CHANNELS:
        return f"it takes heads of {MOST_CHANNELS} channels at most"
    for groups in groups_of(*stages):
        if (heads := query.shape[1] // groups) > MOST_HEADS:
            return f"it composes {MOST_HEADS} heads of a group at most, not {heads}"
    return why_no_kernel(query, key, value, *stages, **options)


def why_not_automatic(query: Tensor, key: Tensor, *others: Any, mask: Visibility, dropout: float = 0.0) -> str | None:
    """Why the kernels are not selected automatically: they are on CUDA devices, except for small calls in graphs."""
    if query.device.type != _AUTOMATIC_ON:
        return "it is selected automatically on CUDA devices only"
    sizes = (*query.shape[:3], key.shape[2])
    if torch.compiler.is_compiling() and all(map(is_number, sizes)) and query.shape[2] > MOST_DECODE_QUERIES:
        seen = key.shape[2] if mask.sliding_window is None else min(key.shape[2], mask.sliding_window)
        if (scores := query.shape[:3].numel() * seen) < FEWEST_SCORES_IN_A_GRAPH:
            return f"a compiled graph takes it from {FEWEST_SCORES_IN_A_GRAPH:,} scores on, and these are {scores:,}"
    return why_not_triton(query, key, *others, mask=mask, dropout=dropout)


@torch.compiler.assume_constant_result
def _why_not_here(device_type: str, device_index: int | None) -> str | None:
    """Reasons that lie in the machine."""
    version = triton_version()
    if version is None:
        return "Triton is not installed; install it with `pip install triton`"
    if TorchVersion(version) < OLDEST_TRITON:
        return f"Triton {version} is too old; install {OLDEST_TRITON} or later with the torch that brings it"
    if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "the tensors are on the CPU, where Triton runs in its slow interpreter only (TRITON_INTERPRET=1)"
    if device_type not in ("cpu", "cuda"):
        return f"the tensors are on {device_type}"
    if device_type == "cuda" and not torch.cuda.is_available():
        return "there is no CUDA device, as where fake tensors stand for what is on one"
    if device_type == "cuda" and (capability := torch.cuda.get_device_capability(device_index)) < OLDEST_CAPABILITY:
        return f"the GPU is of compute capability {'.'.join(map(str, capability))}, and they need 8.0 or later"
    return None


@functools.cache
def triton_version() -> str | None:
    """Of the Triton that is installed; None without one."""
    packages = ("triton", "pytorch-triton", "triton-windows", "pytorch-triton-rocm")
    installed = (importlib.metadata.distributions(name=package) for package in packages)
    return next((distribution.version for distributions in installed for distribution in distributions), None)
