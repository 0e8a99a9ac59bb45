"""The Triton forms as one entry of the operator's table: which of them a call takes, and which calls take none."""

import functools
import importlib.metadata
import os
import re

import torch
from torch import Tensor

from ..dcmha_factors import ComposeWeights
from ..dcmha_mask import Visibility
from ..ops.folding import can_fold, fold
from .adapters import to_composition, to_mask, why_no_mask
from .custom_ops import FlatCall, decode, forward_op


# What the kernel of decoding holds of a call at once.
MOST_DECODE_QUERIES = 8
MOST_CHANNELS = 256
OLDEST_TRITON = (3, 4)
OLDEST_CAPABILITY = (8, 0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def triton_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    *,
    scaling: float,
    mask: Visibility,
    dropout: float = 0.0,
    chunk_size: int | None = None,
) -> Tensor:
    """As every implementation in the table, without dropout; chunks are as large as the workspace allows."""
    before, after = to_composition(pre), to_composition(post)
    sizes = query.shape[1], key.shape[1], key.shape[2], query.shape[3]
    decodes = is_decoding(query, key, value, pre, post, mask)
    if before is not None and can_fold(before, *sizes):
        query, before = fold(query, before), None
    folds_after = after is not None and can_fold(after, *sizes)
    call = FlatCall.of(query, key, value, before, None if folds_after else after, to_mask(mask), scaling)
    output = decode(call) if decodes else forward_op(*call)[0]
    return fold(output, after) if after is not None and folds_after else output


def is_decoding(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    mask: Visibility,
) -> bool:
    """Whether the kernel for a few queries takes a call."""
    few = query.shape[2] <= MOST_DECODE_QUERIES and mask.sequence_ids is None
    return few and not needs_gradient(query, key, value, pre, post)


def needs_gradient(
    query: Tensor, key: Tensor, value: Tensor, pre: ComposeWeights | None, post: ComposeWeights | None
) -> bool:
    """Whether a call will be differentiated, as far as can be known."""
    tensors = [query, key, value, *_factors(pre), *_factors(post)]
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def why_not_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    *,
    mask: Visibility,
    dropout: float = 0.0,
) -> str | None:
    """Why the Triton forms cannot compute this, as the end of a sentence; None if they can."""
    reason = _why_not_here(query.device.type, query.device.index)
    return reason or _why_not_these(query, key, value, pre, post, mask, dropout)


@torch.compiler.assume_constant_result
def _why_not_here(device_type: str, device_index: int | None) -> str | None:
    """Reasons that lie in the machine."""
    version = triton_version()
    if version is None:
        return "Triton is not installed; install it with `pip install 'dcformer[triton]'`"
    if _release(version) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        return f"Triton {version} is too old; install {oldest} or later with `pip install 'dcformer[triton]'`"
    if device_type == "cpu":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return None
        return "the tensors are on the CPU, where Triton runs in its slow interpreter only (TRITON_INTERPRET=1)"
    if device_type != "cuda":
        return f"the tensors are on {device_type}"
    capability = _capability(device_index)
    if capability < OLDEST_CAPABILITY:
        return f"the GPU is of compute capability {'.'.join(map(str, capability))}, and they need 8.0 or later"
    return None


def _why_not_these(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    mask: Visibility,
    dropout: float,
) -> str | None:
    """Reasons that lie in the arguments."""
    if not query.dtype == key.dtype == value.dtype:
        names = ", ".join(_name(states.dtype) for states in (query, key, value))
        return f"query, key and value must be of one type, and are {names}"
    if query.dtype not in DTYPES:
        return f"it takes float32, bfloat16 and float16, not {_name(query.dtype)}"
    if any(factors.dtype not in DTYPES for factors in (*_factors(pre), *_factors(post))):
        return "it takes compose weights in float32, bfloat16 and float16 only"
    if max(query.shape[3], value.shape[3]) > MOST_CHANNELS:
        return f"it takes heads of {MOST_CHANNELS} channels at most"
    before, after = to_composition(pre), to_composition(post)
    if before is not None and after is not None and before.groups != after.groups:
        return f"there are {before.groups} groups of heads before the softmax and {after.groups} after it"
    if dropout > 0.0:
        return "it has no dropout"
    if (reason := why_no_mask(mask)) is not None:
        return reason
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return "torch.func does not see through it"
    if torch.autograd.forward_ad._current_level >= 0:
        return "it has no derivatives in forward mode"
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


def _release(version: str) -> tuple[int, ...]:
    """Major and minor number."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


@functools.cache
def _capability(device_index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device_index)


def _factors(weights: ComposeWeights | None) -> list[Tensor]:
    composition = to_composition(weights)
    return [] if composition is None else [tensor for tensor in composition[:3] if tensor is not None]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
