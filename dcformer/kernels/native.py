"""Composed attention on CPUs by C++ (`native/`), as one more entry of the operator's table and as operators of torch.

The C++ code takes structures of pointers and strides, and runs its loops on torch's threads. Where nothing is traced or
differentiated, it is called directly, without the dispatcher; else through `torch.ops.dcformer.native_attention`.
"""

import ctypes
import functools
import logging
import math
import os
from collections.abc import Iterable, Sequence
from ctypes import c_double, c_int64
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.activations import GELUActivation, GELUTanh

from ..compose_dcformer import DCFormerCompose
from ..dcmha import Visibility
from ..modeling_dcformer import DCFormerRMSNorm
from .build_native import compile_library, find_library, instruction_sets
from .call import (
    MOST_RANK,
    TENSORS,
    Call,
    channels_last,
    is_changed,
    is_traced,
    new_output,
    readable_mask,
    why_no_kernel,
    why_transformed,
)
from .ops import ARGUMENTS, attention_flops, differentiable_op, register_op


logger = logging.getLogger(__name__)

FEW_TOKENS = 8  # which do not fill the tiles of a product: their projection is bound by reading the weights
_QUERIES_PER_BLOCK = 256  # of a product in bfloat16 by torch; between two of them the scores are in memory
_TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.bool: 3, torch.int64: 4}
_ACTIVATIONS = {GELUActivation: 0, GELUTanh: 1}


def _structure(*fields: tuple[Any, str]) -> Any:
    """A structure of the C++ code: types, and the names of consecutive fields of each."""
    members = [(name, kind) for kind, names in fields for name in names.split()]
    return type("Structure", (ctypes.Structure,), {"_fields_": members})


_View = _structure((c_int64, "data type channels batch_stride head_stride stride channel_stride"))
_Stage = _structure((_View, "query key static_map query_gradient key_gradient static_gradient"))
_Call = _structure(
    (c_int64, "parallel_for threads batch heads key_heads groups is_causal sliding_window query_offset"),
    (c_int64, "first_query last_query first_key last_key"),
    (c_double, "scaling"),
    (_View, "padding sequence_ids dense query key value output scores log_sums"),
    (_View, "output_gradient query_gradient key_gradient value_gradient"),
    (_Stage, "pre post"),
)
_Projection = _structure(
    (c_int64, "parallel_for threads batch length groups heads activation branches stride"),
    (c_int64, "head_dim query_heads key_heads"),
    (c_double, "norm_eps query_eps key_eps"),
    (_View, "states hidden_weight low_rank_weight gate_weight factors weight bias query_norm key_norm"),
    (_View, "cosine sine projected"),
)


def native_attention(*inputs: Any, scaling: float, mask: Visibility, **_: Any) -> Tensor:
    """The `forward` of an [`Implementation`], without dropout and with the code's tiles."""
    call = Call.of(*inputs, mask, scaling)
    if call.needs_gradient():
        return forward_op(*call)[0]
    # Classes of tensors define operators, and may have no memory of their own.
    is_plain = not is_traced() and all(tensor is None or type(tensor) is Tensor for tensor in call[:TENSORS])
    return _forward(call)[0] if is_plain else attention_op(*call)


def why_not_native(query: Tensor, *inputs: Any, **options: Any) -> str | None:
    """Why the C++ form cannot compute this, as the end of a sentence; None if it can."""
    if query.device.type != "cpu":
        return f"the tensors are on {query.device.type}"
    return _why_no_library() or why_no_kernel(query, *inputs, **options)


def native_projection(attention: Any, states: Tensor, position_embeddings: Any) -> tuple[Tensor, Tensor] | None:
    """As [`compose_dcformer.fused_projection`], for a few tokens; their weights are read once."""
    compose, linear, norms = attention.compose, attention.qkv_proj, (attention.q_norm, attention.k_norm)
    if compose is None or states.device.type != "cpu" or torch.is_grad_enabled() or is_traced():
        return None
    are_few = 0 < states.shape[0] * states.shape[1] <= FEW_TOKENS
    if not are_few or torch.is_autocast_enabled("cpu") or _has_any_global_hook() or why_transformed():
        return None
    modules: Any = zip((compose, linear, *norms), (DCFormerCompose, nn.Linear, DCFormerRMSNorm, DCFormerRMSNorm))
    for module, kind in modules:  # nobody has wrapped or parametrised them
        if module is not None and (type(module) is not kind or is_changed(module)):
            return None
    activation = _ACTIVATIONS.get(type(compose.act_fn))
    if activation is None or is_changed(compose.act_fn) or compose.rank > MOST_RANK or not compose.slots:
        return None
    # The look-up of attributes takes ten times as long.
    weights = {name: compose._parameters.get(name) for name in ("hidden_weight", "low_rank_weight", "gate_weight")}
    weights |= {"weight": linear._parameters["weight"], "bias": linear._parameters["bias"]}
    weights |= {f"{n}_norm": norm._parameters["weight"] for n, norm in zip(("query", "key"), norms) if norm is not None}
    given = [tensor for tensor in (states, *weights.values()) if tensor is not None]
    if any(type(x) not in (Tensor, nn.Parameter) or x.dtype not in _TYPES or not x.is_contiguous() for x in given):
        return None
    cosine, sine = position_embeddings or (None, None)
    low_rank, gate = weights["hidden_weight"] is not None, weights["gate_weight"] is not None
    if not (low_rank or gate) or (cosine is not None and cosine.dtype != torch.float32) or _why_no_library():
        return None
    batch, length, slots = *states.shape[:2], compose.slots
    channels = 2 * compose.rank * low_rank + gate
    factors = states.new_empty(len(slots), batch, length, compose.groups * compose.heads, channels).transpose(2, 3)
    projected = states.new_empty(batch, length, linear.out_features)
    pointers = {name: _View(x.data_ptr(), _TYPES[x.dtype]) for name, x in weights.items() if x is not None}
    tensors = {"states": states, "cosine": cosine, "sine": sine, "projected": projected, "factors": factors[0]}
    call = _Projection(**pointers, **_views(tensors.items()))
    call.batch, call.length, call.groups, call.heads = batch, length, compose.groups, compose.heads
    call.activation, call.norm_eps, call.head_dim = activation, compose.norm_eps, attention.head_dim
    call.query_heads, call.key_heads = attention.num_heads, attention.num_key_value_heads
    call.query_eps, call.key_eps = (0.0 if norm is None else norm.eps for norm in norms)
    call.branches, call.stride = sum(1 << slot for slot in slots), factors.stride(0)
    _run("dcformer_project", call)
    return projected, factors


def _forward(given: Call, log_sums: Tensor | None = None) -> tuple[Tensor, Any]:
    """The output and, written to, the `log_sums` that a backward pass needs."""
    call = _readable_call(given)
    output = new_output(*call)
    in_16_bits = call.query.dtype == call.key.dtype == call.value.dtype == torch.bfloat16
    if log_sums is None and call.query.shape[2] > FEW_TOKENS and in_16_bits and has_bfloat16_products():
        _forward_in_bfloat16(call, output)
    else:
        _run("dcformer_forward", _fields(call, output=output, log_sums=log_sums))
    return output.to(given.query.dtype), log_sums


def _forward_in_bfloat16(call: Call, output: Tensor) -> None:
    """Where the CPU has products in bfloat16, torch makes both of them and the code composes between them."""
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
        fields = _fields(call, scores=scores.view(batch, heads, stop - start, last - first))
        fields.first_query, fields.last_query, fields.first_key, fields.last_key = start, stop, first, last
        _run("dcformer_forward", fields)
        output[:, :, start:stop] = torch.bmm(scores, values).view(batch, heads, stop - start, -1)


def _forward_for_gradients(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _forward(Call(query, *others), query.new_empty(query.shape[:3], dtype=torch.float32))


def _backward(output_gradient: Tensor, *arguments: Any) -> list[Tensor]:
    given, log_sums = Call(*arguments[:-1]), arguments[-1]
    call = _readable_call(given)
    gradients = given.new_gradients("")  # all in float32
    output_gradient = channels_last(_readable(output_gradient))  # alive until the code has read it
    names = ("output_gradient", "query_gradient", "key_gradient", "value_gradient")
    tensors = dict(zip(names, (output_gradient, *gradients)), log_sums=log_sums)
    _run("dcformer_backward", _fields(call, gradients[3:], **tensors))
    return [gradient.to(tensor.dtype) for gradient, tensor in zip(gradients, given) if gradient is not None]


forward_op = differentiable_op("native", _forward_for_gradients, _backward, "C++")
attention_op = register_op(
    "native_attention", f"({ARGUMENTS}) -> Tensor", lambda *call: _forward(Call(*call))[0], attention_flops
)


def _readable_call(call: Call) -> Call:
    """The same in types and strides that the C++ code knows; as a rule nothing is copied."""
    states = map(channels_last, map(_readable, call[:3]))
    dense = call.dense if call.dense is None or call.dense.dtype == torch.float32 else readable_mask(call.dense)
    return Call(*states, *map(_readable, call[3:9]), *call[9:11], dense, *call[12:])


def _readable(tensor: Tensor | None) -> Tensor | None:
    if tensor is not None and tensor.dim() == 3:  # a static map
        return tensor.float().contiguous()
    return tensor if tensor is None or tensor.dtype in _TYPES else tensor.float()


def _view(tensor: Tensor) -> Any:
    """A tensor (batch, heads, length, channels) as the code's `View`, without heads, as masks also without channels."""
    if tensor.dim() == 4:
        return _View(tensor.data_ptr(), _TYPES[tensor.dtype], tensor.size(3), *tensor.stride())
    batch_stride = tensor.stride(0) if tensor.size(0) > 1 else 0  # one row may be for all of a batch
    return _View(tensor.data_ptr(), _TYPES[tensor.dtype], tensor.size(-1), batch_stride, 0, *tensor.stride()[1:])


def _views(tensors: Iterable[tuple[str, Tensor | None]]) -> dict[str, Any]:
    """Views by name; those of None are left out, as the fields of a structure begin as zeros."""
    return {name: _view(tensor) for name, tensor in tensors if tensor is not None}


def _stage(*tensors: Tensor | None) -> Any:
    """One composition: factors of queries and of keys, static map, then their gradients if there are any."""
    names = ("query", "key", "static_map", "query_gradient", "key_gradient", "static_gradient")
    return _Stage(**_views(zip(names, tensors)))


def _fields(call: Call, gradients: Sequence[Tensor | None] = (), **tensors: Tensor | None) -> Any:
    """A call as the code takes it, with the gradients of its factors and static maps, and further tensors."""
    tensors |= {name: getattr(call, name) for name in ("query", "key", "value", "padding", "sequence_ids")}
    tensors["dense"] = None if call.dense is None else call.dense.expand(*call.query.shape[:2], -1, -1)
    views = _views(tensors.items())
    fields = _Call(pre=_stage(*call[3:6], *gradients[:3]), post=_stage(*call[6:9], *gradients[3:]), **views)
    fields.batch, fields.heads, fields.last_query, _ = call.query.shape
    _, fields.key_heads, fields.last_key, _ = call.key.shape
    fields.groups, fields.scaling, fields.is_causal = call.groups, call.scaling, call.is_causal
    fields.sliding_window, fields.query_offset = call.sliding_window or 0, call.query_offset
    return fields


def _run(function: str, call: Any) -> None:
    """Call a function of the library, which runs its loops on torch's threads."""
    library = _library()
    call.parallel_for, call.threads = library.parallel_for, torch.get_num_threads()
    if failure := getattr(library, function)(ctypes.byref(call)):
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
        path = find_library(instruction_set, Path(__file__).with_name("native"))
        if path is None:
            cache = Path(os.environ.get("DCFORMER_CACHE") or "~/.cache/dcformer").expanduser()
            path = find_library(instruction_set, cache) or compile_library(instruction_set, cache)
        library: Any = ctypes.CDLL(str(path))
        for function in (library.dcformer_forward, library.dcformer_backward, library.dcformer_project):
            function.restype = ctypes.c_char_p
        torch_parallel_for = ctypes.CDLL(torch._C.__file__).torch_parallel_for  # which torch exports for extensions
        library.parallel_for = ctypes.cast(torch_parallel_for, ctypes.c_void_p).value
        sizes = [*(c_int64 * 2).in_dll(library, "dcformer_sizes")]
        if sizes != [ctypes.sizeof(_Call), ctypes.sizeof(_Projection)]:
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
    """Whether this CPU multiplies in bfloat16, which others do by way of float32, many times slower."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
