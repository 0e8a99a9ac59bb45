"""The kernels as an implementation of composed attention: which calls they take, and when they are chosen unasked."""

import functools
import importlib.metadata
import logging
import os
import re
from typing import Any

import torch
from torch import Tensor
from transformers.utils.import_utils import is_tracing

from ..dcmha import ComposeSide, ComposeWeights, Visibility, Weights, plain_attention
from .call import DIFFERENTIABLE, Call, why_no_kernel
from .ops import decode_op, forward_op


logger = logging.getLogger(__name__)

# What decoding takes of a call.
MOST_DECODE_QUERIES = 8
MOST_CHANNELS = 256
OLDEST_TRITON = (3, 4)
OLDEST_CAPABILITY = (8, 0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Where it is chosen unasked.
_UNASKED_ON = "cuda"
# Largest error in a comparison, of the largest number that is expected.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_TOKENS = 300


def triton_attention(*inputs: Any, scaling: float, mask: Visibility, **_: Any) -> Tensor:
    """The `forward` of an [`Implementation`], without dropout and with chunks as large as the workspace allows."""
    call = Call.of(*inputs, mask, scaling)
    if is_decoding(call):
        return decode_op(*call, None, None, None)
    return forward_op(*call)[0]


def is_decoding(call: Call) -> bool:
    """Whether the kernels for a few queries take a call: without documents, and without gradients."""
    return call.query.shape[2] <= MOST_DECODE_QUERIES and call.sequence_ids is None and not call.needs_gradient


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
    return why_no_kernel(pre, post, mask, dropout)


def why_not_automatic(
    query: Tensor, key: Tensor, value: Tensor, pre: Weights, post: Weights, *, mask: Visibility, dropout: float = 0.0
) -> str | None:
    """
    Why the kernels are not chosen unasked: what `why_not_triton` says, or a comparison with plain torch that failed, or
    has yet to be made in this process on this device, in this type and with such heads.
    """
    if query.device.type != _UNASKED_ON:
        return "it is chosen unasked on CUDA devices only"
    if (reason := why_not_triton(query, key, value, pre, post, mask=mask, dropout=dropout)) is not None:
        return reason
    call = Call.of(query, key, value, pre, post, mask, 1.0)
    factors = tuple(0 if tensor is None else tensor.shape[-1] for tensor in call[3:9])
    shape = (query.shape[1], key.shape[1], query.shape[3], value.shape[3], *factors, call.groups)
    decodes = is_decoding(call)
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if is_tracing(query) or capturing or torch._C._current_graph_task_id() != -1:
        return _known(query.device.index, query.dtype, shape, decodes)
    why = _compare(query.device, query.dtype, shape, decodes)
    if not decodes:
        # Generation goes on with steps of decoding, which may be captured before one was ever run.
        _compare(query.device, query.dtype, shape, True)
    return why


_compared: dict[tuple[Any, ...], str | None] = {}


@torch.compiler.assume_constant_result
def _known(device_index: int | None, dtype: torch.dtype, shape: tuple[int, ...], decodes: bool) -> str | None:
    """What a comparison has found, where none can be made: in a graph or a backward pass."""
    unknown = "it was not compared with plain torch yet, which a graph or a backward pass cannot do; run it once before"
    return _compared.get((device_index, dtype, shape, decodes), unknown)


def _compare(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], decodes: bool) -> str | None:
    """Compute a small problem by the kernels and by plain torch, once for each kind; why not to use the kernels."""
    kind = (device.index, dtype, shape, decodes)
    if kind not in _compared:
        devices = [device] if device.type == "cuda" else []
        # The call may be one of inference, where tensors can have no gradients.
        with torch.random.fork_rng(devices), torch.inference_mode(False), torch.set_grad_enabled(not decodes):
            torch.manual_seed(0)
            try:
                error = _largest_error(device, dtype, shape, decodes)
                why = None if error <= _TOLERANCES[dtype] else f"its results differ from plain torch's by {error:.2g}"
            except Exception as failure:  # whatever a compiler or a driver may raise
                why = f"it fails here with {type(failure).__name__}: {failure}"
        _compared[kind] = why
        if why is not None:
            logger.warning("Composed attention in %s runs without its Triton kernels: %s.", _name(dtype), why)
    return _compared[kind]


def _largest_error(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], decodes: bool) -> float:
    """Of the output and, unless it decodes, of all gradients, each relative to the largest number expected in it."""
    heads, key_heads, channels, value_channels, *factors, groups = shape
    queries, keys = 1 if decodes else _TOKENS, _TOKENS

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(size, device=device)).to(dtype).requires_grad_(not decodes)

    states = [normal(1, heads, queries, channels), normal(1, key_heads, keys, channels)]
    states.append(normal(1, key_heads, keys, value_channels))
    stages = []
    for of_query, of_key, static in (factors[:3], factors[3:]):
        sides = [
            ComposeSide(factors=normal(1, heads, length, number, scale=heads**-0.5)) if number else None
            for length, number in ((queries, of_query), (keys, of_key))
        ]
        stages.append(ComposeWeights(*sides, normal(groups, static, static, scale=0.1) if static else None, groups))
    errors = []
    for window in (None, 100):  # which have tiles of different sizes
        mask = Visibility(queries, keys, sliding_window=window)
        call = Call.of(*states, *stages, mask, 1.0)
        leaves = [tensor for tensor in call[: len(DIFFERENTIABLE)] if tensor is not None]
        found = []
        for form in (triton_attention, plain_attention):
            output = form(*states, *stages, scaling=channels**-0.5, mask=mask)
            gradients = [] if decodes else torch.autograd.grad(output, leaves, torch.ones_like(output))
            found.append([tensor.detach().float() for tensor in (output, *gradients)])
        errors += [(ours - theirs).abs().max() / theirs.abs().max() for ours, theirs in zip(*found)]
    return float(torch.stack(errors).nan_to_num(nan=float("inf")).max())


@torch.compiler.assume_constant_result
def _why_not_here(device_type: str, device_index: int | None) -> str | None:
    """Reasons that lie in the machine."""
    version = triton_version()
    if version is None:
        return "Triton is not installed; install it with `pip install 'dcformer[triton]'`"
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        return f"Triton {version} is too old; install {oldest} or later with `pip install 'dcformer[triton]'`"
    if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "the tensors are on the CPU, where Triton runs in its slow interpreter only (TRITON_INTERPRET=1)"
    if device_type not in ("cpu", "cuda"):
        return f"the tensors are on {device_type}"
    if device_type == "cuda" and (capability := _capability(device_index)) < OLDEST_CAPABILITY:
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


@functools.cache
def _capability(device_index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device_index)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
