"""The backend of Triton's kernels: which calls they take, when they are chosen, and attention as operators of torch.

Triton itself is imported when the first kernel runs.
"""

import functools
import importlib.metadata
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from ...common.dtypes import dtype_name
from ...dcmha import Backend
from ...modeling_dcformer import DCFormerRMSNorm
from ...types_dcformer import AttentionInputs
from ...visibility_dcformer import is_number
from ..call import DTYPES, Call, channels_last, groups_of, must_run_modules, why_no_kernel
from ..operators import ARGUMENTS, attention_flops, differentiable_op, register_op
from . import compose_weights


# What decoding takes of a call.
MOST_DECODE_QUERIES = 8
MOST_CHANNELS = 256
MOST_HEADS = 64  # of a group
OLDEST_TRITON = "3.6"
OLDEST_CAPABILITY = (8, 0)
# For fewer scores in a graph of `torch.compile` launches are estimated to take longer than PyTorch, which Inductor
# fuses: on an H100 a training step of a small model took 10 ms so, and 54 by kernels that are launched one at a time.
FEWEST_SCORES_IN_A_GRAPH = 2**24
# What holds 2,048 queries and keys of 32 heads at once.
FORWARD_BYTES, BACKWARD_BYTES = 2**29, 3 * 2**29
_workspace_bytes: int | None = None


def set_workspace_bytes(number: int | None) -> None:
    """
    Set how much memory the Triton kernels may use beside inputs and outputs; see `docs/gpu.md`.

    Args:
        number (`int`, *optional*): Bytes, at least 1; one block of queries is computed at once whatever it takes. None:
            512 MB in a forward pass and 1.5 GB in a backward pass.
    """
    global _workspace_bytes
    if number is not None and not (isinstance(number, int) and number >= 1):
        raise ValueError(f"The workspace must have whole bytes, at least 1, got {number}; None is the default.")
    _workspace_bytes = number


class TritonBackend(Backend):
    """Triton kernels for CUDA devices: attention with gradients, decoding, compose weights, norms with rotation."""

    name, device_type = "triton", "cuda"

    def why_not(self, inputs: AttentionInputs) -> str | None:
        query, key, value = inputs[:3]
        if (reason := _why_not_here(query.device.type, query.device.index)) is not None:
            return reason
        if not query.dtype == key.dtype == value.dtype:
            names = ", ".join(dtype_name(states.dtype) for states in (query, key, value))
            return f"query, key and value must be of one type, and are {names}"
        if query.dtype == torch.bfloat16 and query.device.type == "cpu":
            return "Triton's interpreter multiplies no bfloat16; float16 comes closest"
        if max(query.shape[3], value.shape[3]) > MOST_CHANNELS:
            return f"it takes heads of {MOST_CHANNELS} channels at most"
        for groups in groups_of(inputs):
            if (heads := query.shape[1] // groups) > MOST_HEADS:
                return f"it composes {MOST_HEADS} heads of a group at most, not {heads}"
        return why_no_kernel(inputs)

    def why_not_automatic(self, inputs: AttentionInputs) -> str | None:
        """Reasons of `why_not`, and in a compiled graph a call's small size."""
        query, keys, window = inputs.query, inputs.key.shape[2], inputs.mask.sliding_window
        sizes = (*query.shape[:3], keys)
        if torch.compiler.is_compiling() and all(map(is_number, sizes)) and query.shape[2] > MOST_DECODE_QUERIES:
            scores = query.shape[:3].numel() * (keys if window is None else min(keys, window))
            if scores < (fewest := FEWEST_SCORES_IN_A_GRAPH):
                return f"a compiled graph takes it from {fewest:,} scores on, and these are {scores:,}"
        return self.why_not(inputs)

    def attention(self, inputs: AttentionInputs) -> Tensor:
        call = Call.of(inputs)
        # The kernels for a few queries take no documents, no gradients and no symbols as lengths.
        may_decode = call.sequence_ids is None and not call.needs_gradient() and is_number(call.query.shape[2])
        if may_decode and call.query.shape[2] <= MOST_DECODE_QUERIES:
            return decode_op(*call, None, None)
        return forward_op(*call)[0]

    def factors(self, act_fn: Any, eps: float, states: Tensor, *weights: Tensor | None) -> Tensor | None:
        if _why_not_here(states.device.type, states.device.index) is not None:
            return None
        return compose_weights.compute_factors(act_fn, eps, states, *weights)

    def rotation(
        self, query: Tensor, key: Tensor, norms: tuple[Any, ...], position_embeddings: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, Tensor] | None:
        """Normalise and rotate queries and keys, without gradients; in a graph of its own Inductor fuses it as well."""
        device, dtype, positions = query.device, query.dtype, position_embeddings or ()
        if torch.is_grad_enabled() or torch.is_autocast_enabled(device.type):
            return None
        if _why_not_here(device.type, device.index) is not None:
            return None
        norms = () if None in norms else norms  # as the layer takes them
        if dtype not in DTYPES or not (positions or norms) or must_run_modules(*[(n, DCFormerRMSNorm) for n in norms]):
            return None
        weights = [norm.weight for norm in norms]
        kinds = [(tensor, dtype) for tensor in (query, key, *weights)] + [(each, torch.float32) for each in positions]
        if any(type(tensor) not in (Tensor, nn.Parameter) or tensor.dtype != kind for tensor, kind in kinds):
            return None
        batch, _, length, channels = query.shape
        shapes = [(rows, length, min(tensor.shape[-1], channels)) for tensor in positions for rows in (1, batch)]
        if any(tensor.shape not in shapes for tensor in positions) or not all(map(Tensor.is_contiguous, weights)):
            return None
        from .rotation import Heads, launch_rotation

        options = [(norm.weight, norm.eps) for norm in norms] or 2 * [(None, 0.0)]
        heads = [Heads.of(states, *of_norm) for states, of_norm in zip((query, key), options)]
        launch_rotation(*heads, *(positions or (None, None)))
        return heads[0].result, heads[1].result


@torch.compiler.assume_constant_result
def _why_not_here(device_type: str, device_index: int | None) -> str | None:
    return _why_not_on(device_type, device_index, os.environ.get("TRITON_INTERPRET") == "1")


@functools.cache  # every layer asks several times
def _why_not_on(device_type: str, device_index: int | None, is_interpreted: bool) -> str | None:
    """Reasons against the kernels that lie in the machine."""
    version = triton_version()
    if version is None:
        return "Triton is not installed; install it with `pip install triton`"
    if TorchVersion(version) < OLDEST_TRITON:
        return f"Triton {version} is too old; install {OLDEST_TRITON} or later with the torch that brings it"
    if device_type == "cpu" and not is_interpreted:
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
    """The version of the Triton that is installed; None without one."""
    packages = ("triton", "pytorch-triton", "triton-windows", "pytorch-triton-rocm")
    installed = (importlib.metadata.distributions(name=package) for package in packages)
    return next((distribution.version for distributions in installed for distribution in distributions), None)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    from .attention_forward import composed_forward

    call = Call(*arguments).with_channels_last()
    with torch.cuda.device_of(call.query):  # where Triton launches kernels
        return composed_forward(call, _workspace_bytes or FORWARD_BYTES)


def _backward(output_gradient: Tensor, *arguments: Any) -> list[Tensor]:
    from .attention_backward import composed_backward

    call, log_sums = Call(*arguments[:-1]).with_channels_last(), arguments[-1]
    workspace_bytes = _workspace_bytes or BACKWARD_BYTES
    with torch.cuda.device_of(call.query):
        gradients = composed_backward(channels_last(output_gradient), call, log_sums, workspace_bytes)
    return [gradient for gradient in gradients if gradient is not None]


def _decode(*arguments: Any) -> Tensor:
    from .attention_decode import composed_decode

    call, of_cache = Call(*arguments[:-2]).with_channels_last(), arguments[-2:]
    with torch.cuda.device_of(call.query):
        return composed_decode(call, *of_cache)


forward_op = differentiable_op("composed", _forward, _backward, "Triton")
_SCHEMA = f"({ARGUMENTS}, Tensor? key_lengths, Tensor? block_table) -> Tensor"
decode_op = register_op("composed_decode", _decode, attention_flops, schema=_SCHEMA)
