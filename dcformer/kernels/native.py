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
from array import array
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.activations import GELUActivation, GELUTanh, SiLUActivation
from transformers.utils.import_utils import is_tracing

from ..compose_dcformer import DCFormerCompose
from ..dcmha import Visibility
from ..modeling_dcformer import DCFormerRMSNorm, is_hooked
from .build_native import compile_library, find_library, instruction_sets
from .call import MOST_RANK, Call, channels_last, readable_mask, why_no_kernel, why_transformed
from .ops import ARGUMENTS, differentiable_op, new_output, register_op


logger = logging.getLogger(__name__)

# So many tokens do not fill the tiles of a product of matrices: what is made of them is bound by reading the weights.
FEW_TOKENS = 8
# Of a product in bfloat16 that torch makes; between two of them the scores are in memory.
_QUERIES_PER_BLOCK = 256
_TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.bool: 3, torch.int64: 4}
_ACTIVATIONS = {GELUActivation: 0, GELUTanh: 1, SiLUActivation: 2, nn.SiLU: 2}


def native_attention(*inputs: Any, scaling: float, mask: Visibility, **_: Any) -> Tensor:
    """The `forward` of an [`Implementation`], without dropout and with tiles of its own."""
    call = Call.of(*inputs, mask, scaling)
    if call.needs_gradient():
        return forward_op(*call)[0]
    return attention_op(*call) if is_tracing(call.query) else _forward(call)[0]


def why_not_native(query: Tensor, *inputs: Any, **options: Any) -> str | None:
    """Why the C++ form cannot compute this, as the end of a sentence; None if it can."""
    if query.device.type != "cpu":
        return f"the tensors are on {query.device.type}"
    return _why_no_library() or why_no_kernel(query, *inputs, **options)


def native_projection(attention: Any, states: Tensor, position_embeddings: Any) -> tuple[Tensor, Tensor] | None:
    """As [`compose_dcformer.fused_projection`], for a few tokens, whose weights are read once."""
    compose, linear, norms = attention.compose, attention.qkv_proj, (attention.q_norm, attention.k_norm)
    if compose is None or states.device.type != "cpu" or torch.is_grad_enabled() or is_tracing(states):
        return None
    are_few = 0 < states.shape[0] * states.shape[1] <= FEW_TOKENS
    if not are_few or torch.is_autocast_enabled("cpu") or _has_any_global_hook() or why_transformed():
        return None
    modules = zip((compose, linear, *norms), (DCFormerCompose, nn.Linear, DCFormerRMSNorm, DCFormerRMSNorm))
    if not all(module is None or _runs_as_written(module, module_class) for module, module_class in modules):
        return None
    activation = _ACTIVATIONS.get(type(compose.act_fn))
    if activation is None or is_hooked(compose.act_fn) or compose.rank > MOST_RANK or not compose.slots:
        return None
    # The look-up of attributes takes ten times as long.
    of_compose = map(compose._parameters.get, ("hidden_weight", "low_rank_weight", "gate_weight"))
    of_norms = (None if norm is None else norm._parameters["weight"] for norm in norms)
    weights = (*of_compose, linear._parameters["weight"], linear._parameters["bias"], *of_norms)
    given = [tensor for tensor in (states, *weights) if tensor is not None]
    kinds = (Tensor, nn.Parameter)
    if any(type(each) not in kinds or each.dtype not in _TYPES or not each.is_contiguous() for each in given):
        return None
    cosine, sine = position_embeddings or (None, None)
    if weights[0] is weights[2] is None or (cosine is not None and cosine.dtype != torch.float32) or _why_no_library():
        return None
    batch, length, hidden_size = states.shape
    rank, heads = 0 if weights[0] is None else compose.rank, compose.groups * compose.heads
    slots, channels = compose.slots, 2 * rank + (weights[2] is not None)
    factors = states.new_empty(len(slots), batch, length, heads, channels).transpose(2, 3)
    projected = states.new_empty(batch, length, linear.out_features)
    call = (
        *(batch, length, hidden_size, compose.groups, compose.heads, rank, activation, _bits(compose.norm_eps)),
        *_view(states, 0, None, 1, 2),
        *chain(*map(_view, weights[:3])),
        *_view(factors[0]),
        *(factors.stride(0), len(slots), slots[0], slots[1] - slots[0] if len(slots) > 1 else 1),
        *(linear.out_features, attention.head_dim, attention.num_heads, attention.num_key_value_heads),
        0 if cosine is None else cosine.shape[2],
        *(_bits(1.0 if norm is None else norm.eps) for norm in norms),
        *chain(*map(_view, weights[3:])),
        *(number for tensor in (cosine, sine, projected) for number in _view(tensor, 0, None, 1, 2)),
    )
    _run("dcformer_project", call)
    return projected, factors


def _runs_as_written(module: nn.Module, module_class: type) -> bool:
    """Whether this is such a module, that nobody has wrapped, parametrised, hooked or given another forward pass."""
    return type(module) is module_class and not is_hooked(module) and "forward" not in module.__dict__


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
        block = scores.view(batch, heads, stop - start, last - first)
        # As if all queries and keys were there.
        whole = block.data_ptr() - block.element_size() * (start * block.stride(2) + first)
        _run("dcformer_compose_block", _fields(call, block=(whole, *_view(block)[1:], start, stop, first, last)))
        output[:, :, start:stop] = torch.bmm(scores, values).view(batch, heads, stop - start, -1)


def _forward_for_gradients(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _forward(Call(query, *others), query.new_empty(query.shape[:3], dtype=torch.float32))


def _backward(output_gradient: Tensor, *arguments: Any) -> list[Tensor]:
    given, log_sums = Call(*arguments[:-1]), arguments[-1]
    call = _readable_call(given)
    make = {3: Tensor.new_zeros, 4: Tensor.new_empty}  # the code adds to those of the static maps, of three dimensions
    found = [each if each is None else make[each.dim()](each, each.shape, dtype=torch.float32) for each in given[:9]]
    output_gradient = channels_last(_readable(output_gradient))  # alive until the code has read it
    _run("dcformer_backward", _fields(call, log_sums=log_sums, gradients=(output_gradient, *found)))
    return [gradient.to(tensor.dtype) for gradient, tensor in zip(found, given) if gradient is not None]


forward_op = differentiable_op("native", _forward_for_gradients, _backward, "C++")
attention_op = register_op("native_attention", f"({ARGUMENTS}) -> Tensor", lambda *call: _forward(Call(*call))[0])


def _readable_call(call: Call) -> Call:
    """The same in types and strides that the C++ code knows; as a rule nothing is copied."""
    states = map(channels_last, map(_readable, call[:3]))
    dense = call.dense if call.dense is None or call.dense.dtype == torch.float32 else readable_mask(call.dense)
    return Call(*states, *map(_readable, call[3:9]), *call[9:11], dense, *call[12:])


def _readable(tensor: Tensor | None) -> Tensor | None:
    if tensor is not None and tensor.dim() == 3:  # a static map
        return tensor.float().contiguous()
    return tensor if tensor is None or tensor.dtype in _TYPES else tensor.float()


def _view(tensor: Tensor | None, *dims: int | None) -> tuple[int, ...]:
    """As the code's `View`, which has four strides: those of `dims`, 0 where it is the same along one, or its own."""
    if tensor is None:
        return (0,) * 6
    if not dims:  # none of weights and static maps is read, of whatever dimensions
        return tensor.data_ptr(), _TYPES[tensor.dtype], *(tensor.stride() if tensor.dim() == 4 else (0,) * 4)
    strides = (0 if dim is None or tensor.shape[dim] == 1 else tensor.stride(dim) for dim in dims)
    return tensor.data_ptr(), _TYPES[tensor.dtype], *strides


def _stage(groups: int, *tensors: Tensor | None) -> tuple[int, ...]:
    """One composition as the code's `Stage`: factors of queries and of keys, static map, and their gradients."""
    channels = (0 if side is None else side.shape[3] for side in tensors[:2])
    return *chain(*map(_view, tensors)), groups, *channels


def _fields(
    call: Call,
    output: Tensor | None = None,
    log_sums: Tensor | None = None,
    gradients: tuple[Tensor | None, ...] = (None,) * 10,
    block: tuple[int, ...] = (0,) * 10,
) -> tuple[int, ...]:
    """The fields of the code's `Call`; the gradients are that of the output, then those of the call's tensors."""
    query, key, value = call[:3]
    (batch, heads, queries, channels), key_heads, keys = query.shape, key.shape[1], key.shape[2]
    return (
        *(batch, heads, key_heads, queries, keys, channels, value.shape[3], call.rank()),
        *(_bits(call.scaling), call.is_causal, call.sliding_window or 0, call.query_offset),
        *_view(call.padding, 0, None, 1, None),
        *_view(call.sequence_ids, 0, None, 1, None),
        *_view(call.dense, 0, None, 2, 3),
        *chain(*map(_view, (query, key, value, output))),
        *_view(log_sums, 0, 1, 2, None),
        *chain(*map(_view, gradients[:4])),
        *_stage(call.groups, *call[3:6], *gradients[4:7]),
        *_stage(call.groups, *call[6:9], *gradients[7:]),
        *block,
    )


@functools.lru_cache(maxsize=64)
def _bits(number: float) -> int:
    """A double among 64-bit integers."""
    return array("q", array("d", (number,)).tobytes())[0]


@functools.cache
def _parallel_for() -> int:
    """The address of `torch_parallel_for`, which torch exports for extensions."""
    return ctypes.cast(ctypes.CDLL(torch._C.__file__).torch_parallel_for, ctypes.c_void_p).value or 0


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
    capability = torch.backends.cpu.get_cpu_capability().lower()
    return next((name for name in instruction_sets() if name in ("neon", capability)), None)


@functools.cache
def has_bfloat16_products() -> bool:
    """Whether this CPU multiplies in bfloat16, which others do by way of float32, many times slower."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
