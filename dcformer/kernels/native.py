"""Composed attention on CPUs by C++ (`native/`), as one more entry of the operator's table and as operators of torch.

The C++ code is called with pointers and strides: the fields of its `Call` are one array of 64-bit numbers. Its loops
run on torch's own threads, whose entry point is handed to it. Where nothing is traced or differentiated, it is called
straight away, which spares a decoding step the dispatcher; else through `torch.ops.dcformer.native_attention`.
"""

import ctypes
import functools
import logging
import math
import os
import struct
from array import array
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from transformers.activations import GELUActivation, GELUTanh, SiLUActivation
from transformers.utils.import_utils import is_tracing

from .. import compose_dcformer
from ..compose_dcformer import DCFormerCompose
from ..dcmha import Visibility, Weights, register_implementation
from ..modeling_dcformer import DCFormerRMSNorm, is_hooked
from .build_native import compile_library, find_library, instruction_sets
from .call import Call, channels_last, needs_gradient, why_no_kernel
from .ops import differentiable_op, inference_op


logger = logging.getLogger(__name__)

MOST_RANK = 8
# So many tokens do not fill the tiles of a product of matrices: what is made of them is bound by reading the weights.
FEW_TOKENS = 8
# Of a product in bfloat16 that torch makes; between two of them the scores are in memory.
_QUERIES_PER_BLOCK = 256
_TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.bool: 3, torch.int64: 4}
_NOTHING = (0,) * 6
_ACTIVATIONS = {GELUActivation: 0, GELUTanh: 1, SiLUActivation: 2, torch.nn.GELU: 0, torch.nn.SiLU: 2}


def native_attention(*inputs: Any, scaling: float, mask: Visibility, **_: Any) -> Tensor:
    """The `forward` of an [`Implementation`], without dropout and with tiles of its own."""
    call = Call.of(*inputs, mask, scaling)
    if needs_gradient(call):
        return forward_op(*call)[0]
    return attention_op(*call) if is_tracing(call.query) else _forward(call)


def why_not_native(
    query: Tensor, key: Tensor, value: Tensor, pre: Weights, post: Weights, *, mask: Visibility, dropout: float = 0.0
) -> str | None:
    """Why the C++ form cannot compute this, as the end of a sentence; None if it can."""
    if query.device.type != "cpu":
        return f"the tensors are on {query.device.type}"
    if (reason := _why_no_library()) is not None:
        return reason
    call = Call.of(query, key, value, pre, post, mask, 1.0)
    for tensor in call[:9]:
        if tensor is not None and tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"it takes float32, bfloat16 and float16, not {str(tensor.dtype).removeprefix('torch.')}"
    if _rank(call) > MOST_RANK:
        return f"it takes ranks of {MOST_RANK} at most"
    return why_no_kernel(pre, post, mask, dropout)


def is_transformed() -> bool:
    """Whether torch.func or derivatives in forward mode are at work, which see through no kernel."""
    is_functional = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
    return is_functional or torch.autograd.forward_ad._current_level >= 0


def native_projection(
    attention: Any, states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor] | None:
    """As [`compose_dcformer.fused_projection`], for a few tokens, whose weights are read once."""
    compose, linear, norms = attention.compose, attention.qkv_proj, (attention.q_norm, attention.k_norm)
    if compose is None or states.device.type != "cpu" or torch.is_grad_enabled() or is_tracing(states):
        return None
    if not 0 < states.shape[0] * states.shape[1] <= FEW_TOKENS or torch.is_autocast_enabled("cpu"):
        return None
    if _has_any_global_hook() or is_transformed():
        return None
    modules = zip((compose, linear, *norms), (DCFormerCompose, torch.nn.Linear, DCFormerRMSNorm, DCFormerRMSNorm))
    if not all(module is None or _runs_as_written(module, module_class) for module, module_class in modules):
        return None
    activation = _ACTIVATIONS.get(type(compose.act_fn))
    if activation is None or is_hooked(compose.act_fn) or compose.rank > MOST_RANK or not compose.slots:
        return None
    of_compose, of_linear = compose._parameters, linear._parameters  # the look-up of attributes takes ten times as long
    weights = (
        *(of_compose.get("hidden_weight"), of_compose.get("low_rank_weight"), of_compose.get("gate_weight")),
        *(of_linear["weight"], of_linear["bias"]),
        *(None if norm is None else norm._parameters["weight"] for norm in norms),
    )
    cosine, sine = position_embeddings or (None, None)
    if weights[0] is weights[2] is None or not all(map(_is_plain, (states, *weights))):
        return None
    if (cosine is not None and cosine.dtype != torch.float32) or _why_no_library() is not None:
        return None
    batch, length, hidden_size = states.shape
    rank, heads = 0 if weights[0] is None else compose.rank, compose.groups * compose.heads
    slots, channels = compose.slots, 2 * rank + (weights[2] is not None)
    factors = states.new_empty(len(slots), batch, length, heads, channels).transpose(2, 3)
    projected = states.new_empty(batch, length, linear.out_features)
    call = (
        *(batch, length, hidden_size, compose.groups, compose.heads, rank, activation, _bits(compose.norm_eps)),
        *_view_along(states, 0, None, 1, 2),
        *(number for weight in weights[:3] for number in _flat_view(weight)),
        *_view(factors[0]),
        *(factors.stride(0), len(slots), slots[0], slots[1] - slots[0] if len(slots) > 1 else 1),
        *(linear.out_features, attention.head_dim, attention.num_heads, attention.num_key_value_heads),
        0 if cosine is None else cosine.shape[2],
        *(_bits(1.0 if norm is None else norm.eps) for norm in norms),
        *(number for weight in weights[3:] for number in _flat_view(weight)),
        *(number for tensor in (cosine, sine, projected) for number in _view_along(tensor, 0, None, 1, 2)),
    )
    _run("dcformer_project", call)
    return projected, factors


def _runs_as_written(module: torch.nn.Module, module_class: type) -> bool:
    """Whether this is such a module, that nobody has wrapped, parametrised, hooked or given another forward pass."""
    return type(module) is module_class and not is_hooked(module) and "forward" not in module.__dict__


def _is_plain(tensor: Tensor | None) -> bool:
    """Whether the code can read it as it lies in memory."""
    return tensor is None or (
        type(tensor) in (Tensor, torch.nn.Parameter) and tensor.dtype in _TYPES and tensor.is_contiguous()
    )


def _forward(given: Call, log_sums: Tensor | None = None) -> Tensor:
    """(batch, heads, query, value channels), (batch, query, heads, channels) in memory as models go on with it."""
    call = _readable_call(given)
    query, value = call.query, call.value
    batch, heads, queries, _ = query.shape
    dtype = query.dtype if query.dtype == given.query.dtype else torch.float32
    output = torch.empty(batch, queries, heads, value.shape[3], dtype=dtype).transpose(1, 2)
    in_16_bits = query.dtype == call.key.dtype == value.dtype == torch.bfloat16
    if log_sums is None and queries > FEW_TOKENS and in_16_bits and has_bfloat16_products():
        _forward_in_bfloat16(call, output)
    else:
        _run("dcformer_forward", _fields(call, output=output, log_sums=log_sums))
    return output.to(given.query.dtype)


def _forward_in_bfloat16(call: Call, output: Tensor) -> None:
    """Where the CPU has products in bfloat16, torch makes both of them and the code composes between them."""
    query, key, value = call[:3]
    (batch, heads, queries, channels), key_heads = query.shape, key.shape[1]
    # A power of two scales exactly; the rest follows in float32.
    power_of_two = 2.0 ** (math.frexp(call.scaling)[1] - 1)
    masks = ("is_causal", "sliding_window", "query_offset", "sequence_ids")
    mask = Visibility(queries, key.shape[2], **{name: getattr(call, name) for name in masks})
    for start in range(0, queries, _QUERIES_PER_BLOCK):
        stop = min(start + _QUERIES_PER_BLOCK, queries)
        first, last = mask.key_range(start, stop)
        rows = (query[:, :, start:stop] * power_of_two).reshape(batch * key_heads, -1, channels)
        keys, values = (states[:, :, first:last].flatten(0, 1) for states in (key, value))
        scores = torch.bmm(rows, keys.mT)  # (batch x key/value heads, heads that share one x query, key)
        block = scores.view(batch, heads, stop - start, last - first)
        # As if all queries and keys were there.
        whole = block.data_ptr() - block.element_size() * (start * block.stride(2) + first)
        view = (whole, _TYPES[block.dtype], *block.stride())
        _run(
            "dcformer_compose_block",
            _fields(call, scaling=call.scaling / power_of_two, block=(*view, start, stop, first, last)),
        )
        output[:, :, start:stop] = torch.bmm(scores, values).view(batch, heads, stop - start, -1)


def _forward_with_log_sums(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = Call(*arguments)
    log_sums = torch.empty(call.query.shape[:3])
    return _forward(call, log_sums), log_sums


def _backward(output_gradient: Tensor, *arguments: Any) -> list[Tensor]:
    given, log_sums = Call(*arguments[:-1]), arguments[-1]
    call = _readable_call(given)
    found = tuple(None if tensor is None else torch.empty(tensor.shape) for tensor in given[:9])
    for static in (found[5], found[8]):
        if static is not None:
            static.zero_()
    output_gradient = channels_last(_readable(output_gradient))  # alive until the code has read it
    _run("dcformer_backward", _fields(call, log_sums=log_sums, output_gradient=output_gradient, gradients=found))
    return [gradient.to(tensor.dtype) for gradient, tensor in zip(found, given) if gradient is not None]


forward_op = differentiable_op("native", _forward_with_log_sums, _backward, "C++")
attention_op = inference_op("native_attention", lambda *arguments: _forward(Call(*arguments)))


def _rank(call: Call) -> int:
    """The largest rank of any side."""
    sides = (call.pre_query, call.pre_key, call.post_query, call.post_key)
    return max([0, *[side.shape[3] // 2 for side in sides if side is not None]])


def _readable_call(call: Call) -> Call:
    """The same in types and strides that the C++ code knows; as a rule nothing is copied."""
    states = [channels_last(_readable(tensor)) for tensor in call[:3]]
    factors = [None if tensor is None else _readable(tensor) for tensor in call[3:9]]
    for i in (2, 5):  # static maps
        factors[i] = None if (static := factors[i]) is None else static.float().contiguous()
    return Call(*states, *factors, *call[9:11], _readable_mask(call.dense), *call[12:])


def _readable(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in _TYPES else tensor.float()


def _readable_mask(dense: Tensor | None) -> Tensor | None:
    """A dense mask of booleans, or of float32 with -inf where it hides."""
    if dense is None or dense.dtype in (torch.bool, torch.float32):
        return dense
    if not dense.dtype.is_floating_point:
        return dense != 0
    return dense.float().masked_fill(dense <= torch.finfo(dense.dtype).min / 2, -torch.inf)


def _view(tensor: Tensor | None) -> tuple[int, ...]:
    """A four-dimensional tensor as the code's `View`."""
    return _NOTHING if tensor is None else (tensor.data_ptr(), _TYPES[tensor.dtype], *tensor.stride())


def _flat_view(tensor: Tensor | None) -> tuple[int, ...]:
    """A contiguous tensor as the code's `View`."""
    return _NOTHING if tensor is None else (tensor.data_ptr(), _TYPES[tensor.dtype], 0, 0, 0, 1)


def _view_along(tensor: Tensor | None, *dims: int | None) -> tuple[int, ...]:
    """A tensor as a `View`, whose four strides are those of these dimensions, 0 where it is the same along one."""
    if tensor is None:
        return _NOTHING
    strides = (0 if dim is None or tensor.shape[dim] == 1 else tensor.stride(dim) for dim in dims)
    return tensor.data_ptr(), _TYPES[tensor.dtype], *strides


def _stage(call: Call, first: int, gradients: tuple[Tensor | None, ...]) -> tuple[int, ...]:
    """One composition as the code's `Stage`, whose tensors stand from field `first` on."""
    query, key, static = call[first : first + 3]
    channels = (0 if side is None else side.shape[3] for side in (query, key))
    of_query, of_key, of_static = gradients[first : first + 3]
    of_gradients = (*_view(of_query), *_view(of_key), *_flat_view(of_static))
    return *_view(query), *_view(key), *_flat_view(static), *of_gradients, call.groups, *channels


def _fields(
    call: Call,
    *,
    output: Tensor | None = None,
    log_sums: Tensor | None = None,
    output_gradient: Tensor | None = None,
    gradients: tuple[Tensor | None, ...] = (None,) * 9,
    scaling: float | None = None,
    block: tuple[int, ...] = (0,) * 10,
) -> tuple[int, ...]:
    """The fields of the code's `Call`."""
    query, key, value = call[:3]
    (batch, heads, queries, channels), key_heads, keys = query.shape, key.shape[1], key.shape[2]
    return (
        *(batch, heads, key_heads, queries, keys, channels, value.shape[3], _rank(call)),
        _bits(call.scaling if scaling is None else scaling),
        *(call.is_causal, call.sliding_window or 0, call.query_offset),
        *_view_along(call.padding, 0, None, 1, None),
        *_view_along(call.sequence_ids, 0, None, 1, None),
        *_view_along(call.dense, 0, None, 2, 3),
        *(*_view(query), *_view(key), *_view(value), *_view(output)),
        *_view_along(log_sums, 0, 1, 2, None),
        *(number for tensor in (output_gradient, *gradients[:3]) for number in _view(tensor)),
        *_stage(call, 3, gradients),
        *_stage(call, 6, gradients),
        *block,
    )


@functools.lru_cache(maxsize=64)
def _bits(number: float) -> int:
    """A double among 64-bit integers."""
    return struct.unpack("q", struct.pack("d", number))[0]


@functools.cache
def _parallel_for() -> int:
    """The address of `torch_parallel_for`, which torch exports for extensions."""
    libraries = Path(torch.__file__).parent / "lib"
    path = next(libraries / name for name in ("libtorch_cpu.so", "libtorch_cpu.dylib") if (libraries / name).exists())
    return ctypes.cast(ctypes.CDLL(str(path)).torch_parallel_for, ctypes.c_void_p).value or 0


def _run(function: str, call: tuple[int, ...]) -> None:
    """Call a function of the library, whose fields begin with how it runs a loop on torch's threads."""
    fields = array("q", (_parallel_for(), torch.get_num_threads(), *call))
    getattr(_library(), function)(ctypes.c_void_p(fields.buffer_info()[0]))


@torch.compiler.assume_constant_result
def _why_no_library() -> str | None:
    library = _library()
    return library if isinstance(library, str) else None


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The library for this CPU, found beside this file, or in the user's cache, or compiled into it; else why not."""
    if os.environ.get("DCFORMER_NATIVE") == "0":
        return "it is switched off by DCFORMER_NATIVE=0"
    instruction_set = _instruction_set()
    if instruction_set is None:
        return "it is made for CPUs with AVX2, AVX-512 or NEON"
    try:
        found = find_library(instruction_set, Path(__file__).with_name("native"))
        if found is None:
            cache = Path(os.environ.get("DCFORMER_CACHE") or "~/.cache/dcformer").expanduser()
            found = find_library(instruction_set, cache) or compile_library(instruction_set, cache)
        library = ctypes.CDLL(str(found))
        _parallel_for()
        return library
    except (OSError, AttributeError, RuntimeError) as error:  # the last of a user without a home directory
        reason = f"it could not be compiled or loaded ({error})"
        logger.warning(
            "Composed attention runs in plain torch, which takes several times as long: %s. It needs a C++ compiler, a "
            "folder to write to (DCFORMER_CACHE, by default ~/.cache/dcformer) and torch 2.10 or later; "
            "DCFORMER_NATIVE=0 does without it.",
            reason,
        )
        return reason


def _instruction_set() -> str | None:
    known = instruction_sets()
    if known == ("neon",):
        return "neon"
    capability = torch.backends.cpu.get_cpu_capability().lower()
    return capability if capability in known else None


@functools.cache
def has_bfloat16_products() -> bool:
    """Whether this CPU multiplies in bfloat16, which others do by way of float32, many times slower."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def register() -> None:
    """Add the form to the operator's table, and the projections of few tokens to the models'."""
    register_implementation("native", native_attention, why_not_native, automatic=why_not_native)
    compose_dcformer.fused_projection = native_projection
