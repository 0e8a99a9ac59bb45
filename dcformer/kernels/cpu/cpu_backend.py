"""Composed attention on CPUs by C++ (`csrc/`), as a backend and as operators of torch.

The C++ code takes structures of numbers, pointers and strides, and runs its loops on torch's threads. Where nothing is
traced or differentiated, it is called directly; else through `torch.ops.dcformer.native_attention` and its like.
"""

import ctypes
import functools
import itertools
import logging
import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import GELUActivation, GELUTanh

from ...compose_dcformer import ComposeProjection
from ...configuration_dcformer import CACHE_ROW_ALIGNMENT
from ...dcmha import Backend
from ...modeling_dcformer import DCFormerRMSNorm
from ...types_dcformer import AttentionInputs, Projected
from ...visibility_dcformer import Visibility
from ..call import (
    DIFFERENTIABLE,
    MOST_RANK,
    TENSORS,
    Call,
    channels_last,
    is_traced,
    must_run_modules,
    readable_mask,
    why_no_kernel,
)
from ..operators import ARGUMENTS, attention_flops, differentiable_op, register_op
from .build import SOURCES, compile_library, find_library, instruction_sets


logger = logging.getLogger(__name__)

FEW_TOKENS = 8  # which do not fill the tiles of a product: their projection is bound by reading the weights
_QUERIES_PER_BLOCK = 256  # of a product in bfloat16 by torch; between two of them the scores are in memory
_TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.bool: 3, torch.int64: 4}
_WEIGHTS = "hidden_weight", "low_rank_weight", "gate_weight", "weight", "bias", "weight", "weight"
_ACTIVATIONS = {GELUActivation: 0, GELUTanh: 1}

# The structures of `csrc/call.h` and `csrc/factors.h`: numbers, then views of tensors, each of 7 numbers.
_NO_VIEW = (0,) * 7
_CALL = struct.Struct(f"13q d {7 * 25}q")
_PROJECTION = struct.Struct(f"10q 3d {7 * 17}q")


class CPUBackend(Backend):
    """C++ for CPUs with AVX2, AVX-512 or NEON: attention with gradients, and the projections of a few tokens."""

    name, device_type = "native", "cpu"

    def why_not(self, inputs: AttentionInputs) -> str | None:
        if inputs.query.device.type != "cpu":
            return f"the tensors are on {inputs.query.device.type}"
        return _why_no_library() or why_no_kernel(inputs)

    def attention(self, inputs: AttentionInputs) -> Tensor:
        call = Call.of(inputs)
        if call.needs_gradient():
            return forward_op(*call)[0]
        # Classes of tensors define operators, and may have no memory of their own.
        if is_traced() or not set(map(type, call[:TENSORS])) <= {Tensor, type(None)}:
            return attention_op(*call)
        return _forward(call)[0]

    def projection(self, layer: Any, hidden_states: Tensor, position_embeddings: Any) -> Projected | None:
        """Project a few tokens, whose weights are read once."""
        batch, length, _ = hidden_states.shape
        if torch.is_grad_enabled() or not 0 < batch * length <= FEW_TOKENS or torch.is_autocast_enabled("cpu"):
            return None
        # Modules and parameters take ten times as long to read as attributes.
        names = "compose", "qkv_proj", "q_norm", "k_norm"
        compose, linear, query_norm, key_norm = map(layer._modules.get, names)
        if type(compose) is not ComposeProjection:
            return None
        act_fn: Any = compose._modules["act_fn"]
        norms = (query_norm, DCFormerRMSNorm), (key_norm, DCFormerRMSNorm)
        expected = (compose, None), (linear, nn.Linear), (act_fn, None), *norms
        activation, slots = _ACTIVATIONS.get(type(act_fn)), compose.slots
        if activation is None or compose.rank > MOST_RANK or not slots or must_run_modules(*expected):
            return None
        cosine, sine = position_embeddings or (None, None)
        if _why_no_library() or (cosine is not None and cosine.dtype != torch.float32):
            return None
        heads, key_heads, width = layer.num_heads, layer.num_key_value_heads, layer.head_dim
        weights: list[Any] = []
        modules = compose, compose, compose, linear, linear, query_norm, key_norm
        for module, name in zip(modules, _WEIGHTS):
            parameters = {} if module is None else module._parameters
            # Wrappers such as FSDP's, and callers, have tensors in the place of parameters.
            weights.append(parameters[name] if name in parameters else getattr(module, name, None))
        hidden, low_rank, gate = weights[:3]
        if hidden is gate is None or (hidden is None) != (low_rank is None):
            return None
        eps = 0.0 if query_norm is None else query_norm.eps, 0.0 if key_norm is None else key_norm.eps
        channels = hidden_states.shape[2]
        sizes = _weight_sizes(channels, compose.groups, compose.heads, compose.rank, heads + 2 * key_heads, width)
        views: list[int] = []
        for tensor, size in zip((*weights, hidden_states), (*sizes, batch * length * channels)):
            if tensor is None:
                views += _NO_VIEW
            elif (
                type(tensor) in (Tensor, nn.Parameter)
                and tensor.dtype in _TYPES
                and tensor.is_contiguous()
                and tensor.numel() == size
            ):
                views += (tensor.data_ptr(), _TYPES[tensor.dtype], 0, 0, 0, 0, 0)
            else:
                return None
        # The hidden states, checked last, have strides that matter, unlike the weights.
        views[-len(_NO_VIEW) :] = _views(hidden_states, cosine, sine)
        number = 2 * compose.rank * (hidden is not None) + (gate is not None)  # of factors
        is_packed = key_heads == heads
        behind, padding, parts_of_row, rows = _row_layout(tuple(slots), number, width, is_packed)
        parts, written = _new_rows(hidden_states, heads, parts_of_row)
        if not is_packed:
            of_states = _new_rows(hidden_states, key_heads, rows)
            parts, written = parts + of_states[0], written + of_states[1]
        states, state_views = parts[-2:], written[-2:]  # of keys and values
        factors, factor_views, packed = dict(zip(behind, parts[1:])), dict(zip(behind, written[1:])), {}
        for stage, slot in enumerate((1, 3)):
            if is_packed and slot in slots:
                packed[slot], (address, dtype, _, *strides) = states[stage], state_views[stage]
                states[stage], factors[slot], _ = packed[slot].split_with_sizes((width, number, padding), dim=3)
                address += width * hidden_states.element_size()
                factor_views[slot] = (address, dtype, number, *strides)
        for view in (written[0], *state_views):
            views += view
        for slot in range(4):
            views += factor_views.get(slot, _NO_VIEW)
        shape = batch, length, compose.groups, compose.heads, activation, width, heads, key_heads
        _run("dcformer_project", _PROJECTION, *shape, compose.norm_eps, *eps, *views)
        pre, post = compose.weights_of(factors)
        for slot, composition in ((1, pre), (3, post)):
            if composition is not None and composition.key is not None:
                composition.key.packed = packed.get(slot)
        return parts[0], states[0], states[1], pre, post


@functools.cache
def _weight_sizes(channels: int, groups: int, heads: int, rank: int, rows: int, width: int) -> tuple[int, ...]:
    """Numbers of elements of the weights that a projection reads; others are for the modules to refuse."""
    inner = 2 * rank * heads
    composing = channels * groups * 4 * inner, groups * 4 * inner * inner, channels * groups * 4 * heads
    return *composing, rows * width * channels, rows * width, width, width


@functools.cache
def _row_layout(
    slots: tuple[int, ...], number: int, width: int, is_packed: bool
) -> tuple[list[int], int, tuple[int, ...], tuple[int, ...]]:
    """
    The slots whose factors lie behind the query, the padding of a row of the cache, and the sizes of the parts that the
    memory of a query's and of a key/value head consists of.

    The memory of a head holds a query with its factors, then key and value in rows as a cache has them, each with its
    key-wise factors; where key/value heads are fewer, they have their own, and all factors lie behind the query.
    """
    behind = [slot for slot in slots if slot % 2 == 0 or not is_packed]
    padding = -number % CACHE_ROW_ALIGNMENT
    rows = tuple(width + number + padding if is_packed and slot in slots else width for slot in (1, 3))
    sizes = (width, *[number] * len(behind))
    return behind, padding, sizes + rows if is_packed else sizes, rows


def _new_rows(like: Tensor, heads: int, sizes: Sequence[int]) -> tuple[list[Any], list[Any]]:
    """
    Rows of zeros for the heads of every token of (batch, length, hidden), divided into parts of these sizes: the parts,
    (batch, heads, length, size), and their views for the code, which `_views` would take longer to make.
    """
    rows = like.new_zeros(*like.shape[:2], heads, sum(sizes)).transpose(1, 2)
    starts = itertools.accumulate(sizes, initial=0)
    address, item, dtype, strides = rows.data_ptr(), rows.element_size(), _TYPES[rows.dtype], rows.stride()
    views = [(address + start * item, dtype, size, *strides) for start, size in zip(starts, sizes)]
    return [*rows.split_with_sizes(sizes, dim=3)], views


def _forward(given: Call, log_sums: Tensor | None = None) -> tuple[Tensor, Any]:
    """The output and, written to, the `log_sums` that a backward pass needs."""
    call = _readable_call(given)
    (batch, heads, queries, _), channels = call.query.shape, call.value.shape[3]
    # In memory (batch, query, heads, channels), as models go on with it.
    output = call.query.new_empty(batch, queries, heads, channels).transpose(1, 2)
    in_16_bits = call.query.dtype == call.key.dtype == call.value.dtype == torch.bfloat16
    if log_sums is None and call.query.shape[2] > FEW_TOKENS and in_16_bits and has_bfloat16_products():
        _forward_in_bfloat16(call, output)
    else:
        _run_attention("dcformer_forward", call, output=output, log_sums=log_sums)
    return output if output.dtype == given.query.dtype else output.to(given.query.dtype), log_sums


def _forward_in_bfloat16(call: Call, output: Tensor) -> None:
    """Write the output, on a CPU with products in bfloat16: torch makes both, and the code composes between them."""
    query, key, value = call[:3]
    (batch, heads, queries, channels), key_heads = query.shape, key.shape[1]
    # A power of two scales exactly; the rest follows in float32.
    rest, exponent = math.frexp(call.scaling)
    call = call._replace(scaling=rest)
    masks = ("is_causal", "sliding_window", "query_offset", "sequence_ids")
    mask = Visibility(queries, key.shape[2], **{name: getattr(call, name) for name in masks})
    for start in range(0, queries, _QUERIES_PER_BLOCK):
        stop = min(start + _QUERIES_PER_BLOCK, queries)
        first, last = mask.key_range(start, stop)
        rows = (query[:, :, start:stop] * 2.0**exponent).reshape(batch * key_heads, -1, channels)
        keys, values = (states[:, :, first:last].flatten(0, 1) for states in (key, value))
        scores = torch.bmm(rows, keys.mT)  # (batch x key/value heads, heads that share one x query, key)
        composed = scores.view(batch, heads, stop - start, last - first)  # in place
        _run_attention("dcformer_forward", call, (start, stop, first, last), scores=composed)
        output[:, :, start:stop] = torch.bmm(scores, values).view(batch, heads, stop - start, -1)


def _forward_for_gradients(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _forward(Call(query, *others), query.new_empty(query.shape[:3], dtype=torch.float32))


def _backward(output_gradient: Tensor, *arguments: Any) -> list[Tensor]:
    given: Any = Call(*arguments[:-1])
    call, log_sums = _readable_call(given), arguments[-1]
    gradients = given.new_gradients("")  # all in float32
    output_gradient = channels_last(_readable(output_gradient))  # alive until the code has read it
    _run_attention("dcformer_backward", call, log_sums=log_sums, gradients=(output_gradient, *gradients))
    return [gradient.to(tensor.dtype) for gradient, tensor in zip(gradients, given) if gradient is not None]


forward_op = differentiable_op("native", _forward_for_gradients, _backward, "C++")
attention_op = register_op(
    "native_attention", lambda *call: _forward(Call(*call))[0], attention_flops, schema=f"({ARGUMENTS}) -> Tensor"
)


def _readable_call(call: Call) -> Call:
    """The call in types and strides that the C++ code knows; as a rule nothing is copied."""
    fields: Any = call
    if call.pre_static is call.post_static is call.dense is None:
        dtypes = {tensor.dtype for tensor in fields[:DIFFERENTIABLE] if tensor is not None}
        if dtypes <= _TYPES.keys() and call.query.stride(3) == call.key.stride(3) == call.value.stride(3) == 1:
            return call
    readable: list[Any] = [None if tensor is None else _readable(tensor) for tensor in fields[:DIFFERENTIABLE]]
    readable[:3] = map(channels_last, readable[:3])
    dense = call.dense if call.dense is None or call.dense.dtype == torch.float32 else readable_mask(call.dense)
    rest: Any = (*fields[DIFFERENTIABLE : TENSORS - 1], dense, *fields[TENSORS:])
    return Call(*readable, *rest)


def _readable(tensor: Tensor) -> Tensor:
    if tensor.dim() == 3:  # a static map
        return tensor.float().contiguous()
    return tensor if tensor.dtype in _TYPES else tensor.float()


def _views(*tensors: Tensor | None) -> list[int]:
    """
    Tensors as the code's `View`s: (batch, heads, length, channels), or without heads, as masks also without channels.
    """
    views: list[int] = []
    for tensor in tensors:
        if tensor is None:
            views += _NO_VIEW
            continue
        strides = tensor.stride()
        views += (tensor.data_ptr(), _TYPES[tensor.dtype], tensor.size(-1))
        if len(strides) < 4:  # one row may be for all of a batch
            strides = (strides[0] if tensor.size(0) > 1 else 0, 0, *strides[1:], *(0,) * (3 - len(strides)))
        views += strides[:4]
    return views


def _run_attention(
    function: str,
    call: Call,
    block: tuple[int, int, int, int] | None = None,
    *,
    output: Tensor | None = None,
    scores: Tensor | None = None,
    log_sums: Tensor | None = None,
    gradients: Sequence[Tensor | None] = (None,) * (1 + DIFFERENTIABLE),
) -> None:
    """
    Call a function that takes a call; `gradients` are those of the output and of the call's first tensors. With scores
    only the queries and keys of a block are computed.
    """
    query, key, dense = call.query, call.key, call.dense
    if dense is not None:
        dense = dense.expand(*query.shape[:2], -1, -1)
    values: list[Any] = [*query.shape[:2], key.shape[1], call.groups, call.is_causal, call.sliding_window or 0]
    values += [call.query_offset, *(block or (0, query.shape[2], 0, key.shape[2])), call.scaling]
    states = (call.padding, call.sequence_ids, dense, *call[:3], output, scores, log_sums, *gradients[:4])
    _run(function, _CALL, *values, *_views(*states, *call[3:6], *gradients[4:7], *call[6:9], *gradients[7:]))


def _run(function: str, structure: struct.Struct, *values: Any) -> None:
    """Call a function of the library, which runs its loops on torch's threads."""
    library = _library()
    packed = structure.pack(library.parallel_for, torch.get_num_threads(), *values)
    if failure := getattr(library, function)(packed):
        raise RuntimeError(f"The C++ code of composed attention failed: {failure.decode()}.")


@torch.compiler.assume_constant_result
def _why_no_library() -> str | None:
    library = _library()
    return library if isinstance(library, str) else None


@functools.cache
def _library() -> Any:
    """The library for this CPU, from beside this file or the user's cache, or compiled into it; else why not."""
    if os.environ.get("DCFORMER_NATIVE") == "0":
        return "it is switched off by DCFORMER_NATIVE=0"
    instruction_set = _instruction_set()
    if instruction_set is None:
        return "it is made for CPUs with AVX2, AVX-512 or NEON"
    try:
        path = find_library(instruction_set, SOURCES)
        if path is None:
            cache = Path(os.environ.get("DCFORMER_CACHE") or "~/.cache/dcformer").expanduser()
            path = find_library(instruction_set, cache) or compile_library(instruction_set, cache)
        library: Any = ctypes.CDLL(str(path))
        for function in (library.dcformer_forward, library.dcformer_backward, library.dcformer_project):
            function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_char_p
        torch_parallel_for = ctypes.CDLL(torch._C.__file__).torch_parallel_for  # which torch exports for extensions
        library.parallel_for = ctypes.cast(torch_parallel_for, ctypes.c_void_p).value
        sizes = [*(ctypes.c_int64 * 2).in_dll(library, "dcformer_sizes")]
        if sizes != [_CALL.size, _PROJECTION.size]:
            raise ValueError(f"The structures of {path} have {sizes} bytes, those of {__file__} have others.")
        return library
    except (OSError, AttributeError, RuntimeError) as error:  # the last of a user without a home directory
        reason = f"it could not be compiled or loaded ({error})"
        logger.warning(
            "Composed attention runs in plain torch, which takes several times as long: %s. It needs torch 2.10, a C++ "
            "compiler and a folder to write to (DCFORMER_CACHE, by default ~/.cache/dcformer), or DCFORMER_NATIVE=0.",
            reason,
        )
        return reason


def _instruction_set() -> str | None:
    capability = torch.backends.cpu.get_cpu_capability().lower()
    return next((name for name in instruction_sets() if name in ("neon", capability)), None)


@functools.cache
def has_bfloat16_products() -> bool:
    """True if this CPU multiplies in bfloat16, which others do by way of float32, many times slower."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
