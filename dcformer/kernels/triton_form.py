"""The kernels as an implementation of composed attention: which calls they take, and when they are chosen unasked."""

import functools
import importlib.metadata
import os
import re
from typing import Any

import torch
from torch import Tensor

from ..dcmha import Visibility, Weights, is_number
from .call import Call, is_empty, needs_gradient, why_no_kernel
from .ops import decode_op, forward_op


# What decoding takes of a call.
MOST_DECODE_QUERIES = 8
MOST_CHANNELS = 256
MOST_HEADS, MOST_RANK = 64, 8  # of a group
OLDEST_TRITON = (3, 4)
OLDEST_CAPABILITY = (8, 0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_UNASKED_ON = "cuda"  # where it is chosen unasked
# For fewer scores in a graph of `torch.compile` launches take longer than PyTorch, which Inductor fuses: on an H100 a
# training step of a small model took 27 ms with the kernels and 10 ms without.
FEWEST_SCORES_IN_A_GRAPH = 2**24


def triton_attention(*inputs: Any, scaling: float, mask: Visibility, **_: Any) -> Tensor:
    """The `forward` of an [`Implementation`], without dropout and with chunks as large as the workspace allows."""
    call = Call.of(*inputs, mask, scaling)
    if is_decoding(call):
        return decode_op(*call, None, None, None)
    return forward_op(*call)[0]


def is_decoding(call: Call) -> bool:
    """Whether the kernels for a few queries take a call: without documents, without gradients, not of any length."""
    queries = call.query.shape[2]
    if call.sequence_ids is not None or needs_gradient(call) or not is_number(queries):
        return False
    return bool(queries <= MOST_DECODE_QUERIES)  # a tensor under torch.jit.trace


def why_not_triton(
    query: Tensor, key: Tensor, value: Tensor, pre: Weights, post: Weights, *, mask: Visibility, dropout: float = 0.0
) -> str | None:
    """Why the kernels cannot compute this, as the end of a sentence; None if they can."""
    if (reason := _why_not_here(query.device.type, query.device.index)) is not None:
        return reason
    if not query.dtype == key.dtype == value.dtype:
        names = ", ".join(_name(states.dtype) for states in (query, key, value))
        return f"query, key and value must be of one type, and are {names}"
    factors = [tensor for tensor in Call.of(query, key, value, pre, post, mask, 1.0)[3:9] if tensor is not None]
    if any(tensor.dtype not in DTYPES for tensor in (query, *factors)):
        names = ", ".join(sorted({_name(tensor.dtype) for tensor in (query, *factors)}))
        return f"it takes float32, bfloat16 and float16, not {names}"
    if max(query.shape[3], value.shape[3]) > MOST_CHANNELS:
        return f"it takes heads of {MOST_CHANNELS} channels at most"
    for weights in (pre, post):
        if weights is None or is_empty(weights):
            continue
        if (heads := query.shape[1] // weights.groups) > MOST_HEADS:
            return f"it composes {MOST_HEADS} heads of a group at most, not {heads}"
        for side in (weights.query, weights.key):
            if side is not None and (rank := side.factors.shape[-1] // 2) > MOST_RANK:
                return f"it takes low-rank maps of rank {MOST_RANK} at most, not {rank}"
    return why_no_kernel(pre, post, mask, dropout)


def why_not_automatic(
    query: Tensor, key: Tensor, value: Tensor, pre: Weights, post: Weights, *, mask: Visibility, dropout: float = 0.0
) -> str | None:
    """Why the kernels are not chosen unasked: they are on every CUDA device, but for small calls in compiled graphs."""
    if query.device.type != _UNASKED_ON:
        return "it is chosen unasked on CUDA devices only"
    sizes = (*query.shape[:3], key.shape[2])
    if torch.compiler.is_compiling() and all(map(is_number, sizes)) and query.shape[2] > MOST_DECODE_QUERIES:
        seen = key.shape[2] if mask.sliding_window is None else min(key.shape[2], mask.sliding_window)
        if (scores := query.shape[:3].numel() * seen) < FEWEST_SCORES_IN_A_GRAPH:
            return f"a compiled graph takes it from {FEWEST_SCORES_IN_A_GRAPH:,} scores on, and these are {scores:,}"
    return why_not_triton(query, key, value, pre, post, mask=mask, dropout=dropout)


@torch.compiler.assume_constant_result
def _why_not_here(device_type: str, device_index: int | None) -> str | None:
    """Reasons that lie in the machine."""
    version = triton_version()
    if version is None:
        return "Triton is not installed; install it with `pip install triton`"
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        return f"Triton {version} is too old; install {oldest} or later with the torch that brings it"
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
    for package in ("triton", "pytorch-triton", "triton-windows", "pytorch-triton-rocm"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
