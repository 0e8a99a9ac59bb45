"""A decode step's queries, keys, values and compose weights by one matrix product and one kernel.

The product takes a weight that joins `qkv_proj` with the two projections of `DCFormerCompose`. It is derived from them
once and kept beside them, as an attribute of the attention that no parameter list, state dict, copy or pickle sees. It
costs their memory a second time, and is there only while a model decodes with an implementation that asks for it. What
says whether it is still right are the storages and version counters of the parameters: an optimizer's step, a loaded
state dict or another type or device all change them. `torch.compile` cannot see version counters, so a compiled step
takes the joined weight as an eager call has left it: the prefill, which every generation runs first, renews it.
"""

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation
from transformers.cache_utils import Cache, StaticLayer, StaticSlidingWindowLayer

from ..configuration_dcformer import CACHE_ROW_ALIGNMENT
from ..dcmha_cache import allocated_widths, unpack
from ..dcmha_factors import ComposeSide, ComposeWeights
from ..dcmha_projection import DCFormerCompose


# More queries are a prefill, for which two large products and many small kernels are no burden.
MOST_QUERIES = 8
_ACTIVATIONS = {GELUActivation: "gelu", GELUTanh: "gelu_tanh", NewGELUActivation: "gelu_tanh"}
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_INTERPRETS = os.environ.get("TRITON_INTERPRET", "0") == "1"
_ATTRIBUTE = "_joined_projection"

Prepared = tuple[Tensor, Tensor, Tensor, ComposeWeights | None, ComposeWeights | None]


class JoinedWeight:
    """
    A joined weight and what it was derived from. Copies and pickles of the module that has it get None instead.

    Args:
        layout: The `JoinedProjection` of its channels.
        weight (`Tensor`): (columns, hidden).
        bias (`Tensor`, *optional*): (columns,).
        sources: Fingerprints of the parameters.
    """

    def __init__(self, layout: Any, weight: Tensor, bias: Tensor | None, sources: list[Any]):
        self.layout = layout
        self.weight = weight
        self.bias = bias
        self.sources = sources

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(None), ()


def prepare_step(
    attention: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None,
    past_key_values: Cache | None,
) -> Prepared | None:
    """
    What `DCFormerAttention` hands to its attention function, if these are few tokens for a cache and the kernel can.

    Args:
        attention (`DCFormerAttention`): The layer.
        hidden_states (`Tensor`): (batch, length, hidden).
        position_embeddings (`tuple[Tensor, Tensor]`, *optional*): cos and sin, (batch or 1, length, rotary size).
        past_key_values (`Cache`, *optional*): Gets the new keys and values, exactly as its `update` would store them.

    Returns:
        Query, key, value and the compose weights before and after the softmax, those of the keys from the cache. None
        if the ordinary way has to be taken; [`why_not`] says why.
    """
    compiles = torch.compiler.is_compiling()
    if _why_not_in_general(attention, hidden_states, past_key_values) is not None:
        drop(attention)
        return None
    joined = getattr(attention, _ATTRIBUTE, None)
    if not compiles:
        if joined is not None and joined.sources != _sources(attention):
            drop(attention)
            joined = None
        few = hidden_states.shape[1] <= MOST_QUERIES
        # A static cache is there to be decoded from by a compiled step, which cannot derive anything.
        wanted = few or getattr(past_key_values, "is_compileable", False)
        # What is made during the capture of a CUDA graph belongs to the graph.
        if joined is None and wanted and not (hidden_states.is_cuda and torch.cuda.is_current_stream_capturing()):
            joined = _derive(attention)
    if joined is None or hidden_states.shape[1] > MOST_QUERIES:
        return None
    return _run(attention, joined, hidden_states, position_embeddings, past_key_values)


def why_not(attention: Any, hidden_states: Tensor, past_key_values: Cache | None) -> str | None:
    """Why [`prepare_step`] leaves a call to the ordinary way, as the end of a sentence; None if it does not."""
    reason = _why_not_in_general(attention, hidden_states, past_key_values)
    if reason is None and hidden_states.shape[1] > MOST_QUERIES:
        return f"it takes up to {MOST_QUERIES} queries, and there are {hidden_states.shape[1]}"
    return reason


def drop(attention: Any) -> None:
    """Forget the joined weight of a layer; the next step that needs it derives it anew."""
    if getattr(attention, _ATTRIBUTE, None) is not None:
        setattr(attention, _ATTRIBUTE, None)


def _why_not_in_general(attention: Any, hidden_states: Tensor, past_key_values: Cache | None) -> str | None:
    if past_key_values is None:
        return "there is no cache"
    if not _HAS_TRITON:
        return "Triton is not installed; pip install 'dcformer[triton]'"
    if not (hidden_states.is_cuda or (_INTERPRETS and hidden_states.device.type == "cpu")):
        return f"the tensors are on {hidden_states.device.type}, where Triton does not run"
    if torch.compiler.is_exporting():
        return "an exported graph is to hold the parameters alone"
    if torch.is_grad_enabled():
        return "gradients may be asked for"
    if not torch.compiler.is_compiling() and not _is_ordinary(hidden_states):
        return "tracing does not see through it"
    device = hidden_states.device.type
    if torch.is_autocast_enabled(device):
        return "autocast chooses the types"
    if attention.sliding_window == 1:
        return "caches hold more keys than a window of 1 sees"
    return _why_not_of_modules(attention, hidden_states)


def _is_ordinary(tensor: Tensor) -> bool:
    """Whether it holds numbers that a kernel may read, and no transform looks on."""
    if torch.jit.is_tracing() or torch._C._are_functorch_transforms_active():
        return False
    return type(tensor) in (Tensor, nn.Parameter)


def _why_not_of_modules(attention: Any, hidden_states: Tensor) -> str | None:
    """The joined weight does what plain modules with plain parameters do, not what replaces or watches them."""
    projection, compose = attention.qkv_proj, attention.compose
    if type(projection) is not nn.Linear:
        return f"qkv_proj is a {type(projection).__name__}, not a plain linear layer"
    if type(compose) is not DCFormerCompose:
        return f"the composition is a {type(compose).__name__}"
    if type(compose.act_fn) not in _ACTIVATIONS:
        return f"its activations are the forms of gelu, not {type(compose.act_fn).__name__}"
    norms = [] if attention.q_norm is None else [attention.q_norm, attention.k_norm]
    if len(norms) == 2 and norms[0].eps != norms[1].eps:
        return "the norms of queries and keys differ"
    if _has_any_global_hook() or any(_is_watched(module) for module in (projection, compose, compose.act_fn, *norms)):
        return "a hook or another forward stands in the way"
    for parameter in (*_parameters(attention), *(norm.weight for norm in norms), compose.low_rank_weight):
        if parameter is None:
            continue
        if type(parameter) is not nn.Parameter or parameter.dtype != hidden_states.dtype:
            return "the parameters are not plain tensors of the hidden states' type"
        if parameter.device != hidden_states.device:
            return "the parameters are on another device"
    if hidden_states.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"Triton's forms take float32, bfloat16 and float16, not {hidden_states.dtype}"
    return None


def _is_watched(module: nn.Module) -> bool:
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(len(kind) > 0 for kind in hooks) or "forward" in module.__dict__


def _parameters(attention: Any) -> tuple[Tensor | None, ...]:
    """From which the joined weight is derived."""
    projection, compose = attention.qkv_proj, attention.compose
    return projection.weight, projection.bias, compose.hidden_weight, compose.gate_weight


def _sources(attention: Any) -> list[Any]:
    """
    Fingerprints of the parameters. A weak reference to a storage keeps its address from being given to another one; an
    address alone could come back with other numbers behind it.
    """
    return [
        None
        if parameter is None
        else (
            StorageWeakRef(parameter.untyped_storage()),
            None if parameter.is_inference() else parameter._version,
            parameter.data_ptr(),
            parameter.dtype,
            parameter.shape,
            parameter.stride(),
        )
        for parameter in _parameters(attention)
    ]


def _derive(attention: Any) -> JoinedWeight | None:
    """Derive the joined weight and keep it; None if nothing would tell that it became wrong."""
    from ..ops.decode_preparation import JoinedProjection, join_weights

    parameters = _parameters(attention)
    if any(parameter is not None and parameter.is_inference() for parameter in parameters):
        return None  # these count no versions
    compose = attention.compose
    has_low_rank, has_gate = compose.hidden_weight is not None, compose.gate_weight is not None
    layout = JoinedProjection(
        attention.num_heads,
        attention.num_key_value_heads,
        attention.head_dim,
        compose.groups,
        compose.rank if has_low_rank else 0,
        has_gate,
        tuple(compose.slots) if has_low_rank or has_gate else (),
    )
    sources = _sources(attention)
    with torch.inference_mode(False), torch.no_grad():
        weight, bias = join_weights(layout, *parameters)  # type: ignore[arg-type]
    # CUDA graphs then read it where it is, as they do parameters, instead of copying it at every step.
    torch._dynamo.mark_static_address(weight)
    if bias is not None:
        torch._dynamo.mark_static_address(bias)
    joined = JoinedWeight(layout, weight, bias, sources)
    setattr(attention, _ATTRIBUTE, joined)
    return joined


def _run(
    attention: Any,
    joined: JoinedWeight,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None,
    cache: Any,
) -> Prepared:
    from .preparation_ops import prepare_decode_step, run

    layout, compose = joined.layout, attention.compose
    projected = functional.linear(hidden_states, joined.weight, joined.bias)  # (batch, length, columns)
    batch, length = projected.shape[:2]
    cos, sin = (None, None) if position_embeddings is None else position_embeddings
    layer = _layer_to_write(cache, attention, projected, layout)
    if layer is not None:
        keys, values, positions = layer.keys, layer.values, layer.cumulative_length.view(1)
    else:
        widths = allocated_widths(cache, attention.layer_idx)
        # (batch, key/value heads, length, channels + extra)
        keys, values = (
            projected.new_empty(batch, layout.key_value_heads, length, max(width, _packed_width(layout, stage)))
            for stage, width in enumerate(widths)
        )
        positions = None
    # An eager step saves the time that torch takes to find what stands behind an operator.
    prepare: Any = prepare_decode_step if torch.compiler.is_compiling() else run
    query, factors = prepare(
        projected,
        keys,
        values,
        positions,
        None if attention.q_norm is None else attention.q_norm.weight,
        None if attention.k_norm is None else attention.k_norm.weight,
        cos,
        sin,
        compose.low_rank_weight,
        *layout[:-1],
        list(layout.slots),
        1e-6 if attention.q_norm is None else attention.q_norm.eps,
        compose.norm_eps,
        _ACTIVATIONS[type(compose.act_fn)],
    )
    if layer is not None:
        layer.cumulative_length.add_(length)
        if type(layer) is StaticSlidingWindowLayer:
            layer.cumulative_length_int += length
    else:
        keys, values = cache.update(keys, values, attention.layer_idx)
    key, pre_side = _unpacked(keys, layout, 0)
    value, post_side = _unpacked(values, layout, 1)
    stages: list[ComposeWeights | None] = [None, None]
    for stage in compose.stages:
        query_side = None
        if stage in layout.query_stages:
            query_side = ComposeSide(factors=factors[layout.query_stages.index(stage)])
        static = None if compose.static_weight is None else compose.static_weight[stage]
        stages[stage] = ComposeWeights(query_side, (pre_side, post_side)[stage], static, compose.groups)
    return query, key, value, stages[0], stages[1]


def _packed_width(layout: Any, stage: int) -> int:
    """Channels of a packed key row (stage 0) or value row (stage 1)."""
    used = layout.row_channels(stage)
    return used + -(used - layout.head_dim) % CACHE_ROW_ALIGNMENT


def _unpacked(rows: Tensor, layout: Any, stage: int) -> tuple[Tensor, ComposeSide | None]:
    like = None
    if 2 * stage + 1 in layout.slots:
        like = ComposeSide(factors=rows[..., layout.head_dim : layout.head_dim + layout.channels])
    return unpack(rows, layout.head_dim, like, layout.heads)


def _layer_to_write(cache: Any, attention: Any, projected: Tensor, layout: Any) -> Any:
    """
    The layer of a static cache whose rows the kernel may write itself: where `update` does no more than write them at
    `cumulative_length` and count. A window that is full or runs over moves its rows, which is left to `update`.
    """
    if type(cache).update is not Cache.update or cache.offloading or attention.layer_idx >= len(cache.layers):
        return None
    layer = cache.layers[attention.layer_idx]
    if type(layer) not in (StaticLayer, StaticSlidingWindowLayer) or not layer.is_initialized:
        return None
    batch, length = projected.shape[:2]
    if type(layer) is StaticSlidingWindowLayer and layer.cumulative_length_int + length > layer.max_cache_len:
        return None
    for stage, rows in enumerate((layer.keys, layer.values)):
        if rows.dtype != projected.dtype or rows.device != projected.device or rows.stride(3) != 1:
            return None
        if rows.shape[:2] != (batch, layout.key_value_heads) or rows.shape[3] < layout.row_channels(stage):
            return None
    looks = projected.device.type == "cpu" and not torch.compiler.is_compiling()
    if looks and int(layer.cumulative_length) + length > layer.max_cache_len:
        return None  # `update` says what is wrong; the kernel, which may not look on a GPU, leaves such rows out
    return layer
