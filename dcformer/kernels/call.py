"""One call of composed attention laid out flat, as torch's operators take it and kernels are launched from it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ..common.dtypes import dtype_name
from ..compose_dcformer import ComposeProjection
from ..modeling_dcformer import DCFormerRMSNorm
from ..types_dcformer import AttentionInputs, ComposeWeights


LOG2_E = 1.4426950408889634
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_RANK = 8
_NOTHING = ComposeWeights()
# What fused code stands for, as torch and this package define it: `is_traced` asks whether somebody has replaced one.
_ORIGINALS = (
    *(torch._C._nn.linear, torch._C._nn.gelu, torch._C._VariableFunctions.bmm, torch._C._VariableFunctions.tanh),
    *(functional.rms_norm, nn.Linear.forward, DCFormerRMSNorm.forward, ComposeProjection.forward),
    *(nn.Module.__call__, Tensor.__matmul__),
)
DIFFERENTIABLE, TENSORS = 9, 12  # of a call's fields, the first that may have gradients, and all that are no numbers


class Call(NamedTuple):
    """All tensors, those that may have gradients first, then all numbers; `csrc/call.h` has a structure of its own."""

    query: Tensor  # (batch, heads, query, channels)
    key: Tensor  # (batch, key/value heads, key, channels)
    value: Tensor  # (batch, key/value heads, key, value channels)
    pre_query: Tensor | None  # (batch, heads, query, factors), as `ComposeSide.factors`
    # (batch, heads, key, factors), or, where vLLM calls `decode_op`, (blocks, key/value heads, keys of a block, query
    # heads of each x factors)
    pre_key: Tensor | None
    pre_static: Tensor | None  # (groups, heads per group, heads per group) [in, out]
    post_query: Tensor | None  # after the softmax, shaped as before it
    post_key: Tensor | None
    post_static: Tensor | None
    padding: Tensor | None  # (batch or 1, key) boolean, True for real tokens; masks as those of a `Visibility`
    sequence_ids: Tensor | None  # (batch or 1, length)
    dense: Tensor | None  # (batch or 1, 1, query, key)
    groups: int
    is_causal: bool
    sliding_window: int | None
    query_offset: int
    scaling: float

    @classmethod
    def of(cls, inputs: AttentionInputs) -> "Call":
        """The call with these arguments, whose compositions have the same groups."""
        tensors: list[Any] = list(inputs[:3])
        groups, mask = 1, inputs.mask
        for query, key, static, own_groups in (inputs.pre or _NOTHING, inputs.post or _NOTHING):
            tensors += (None if query is None else query.factors, None if key is None else key.factors, static)
            groups = groups if query is None and key is None and static is None else own_groups
        tensors += (mask.padding, mask.sequence_ids, mask.dense)
        numbers: list[Any] = [groups, mask.is_causal, mask.sliding_window, mask.query_offset, inputs.scaling]
        return cls(*tensors, *numbers)

    def with_channels_last(self) -> "Call":
        """A call with the channels of query, key and value side by side in memory, as the kernels read them."""
        fields: Any = (*map(channels_last, self[:3]), *self[3:])
        return Call(*fields)

    def needs_gradient(self) -> bool:  # no property: older Dynamos stop at one of a named tuple
        """Tell whether a call will be differentiated, as far as can be known."""
        if torch.is_grad_enabled():
            tensors: Any = self[:DIFFERENTIABLE]
            for tensor in tensors:
                if tensor is not None and tensor.requires_grad:
                    return True
        return False

    def rank(self) -> int:
        """The largest rank of any side."""
        sides = (self.pre_query, self.pre_key, self.post_query, self.post_key)
        return max(0 if side is None else side.shape[3] // 2 for side in sides)

    def new_gradients(self, in_float32: str | tuple[str, ...] = ()) -> list[Tensor | None]:
        """Memory for gradients, in float32 of fields whose names end so; of static maps zeros, to be added to."""
        gradients: list[Tensor | None] = []
        tensors: Any = self[:DIFFERENTIABLE]
        for name, tensor in zip(self._fields, tensors):
            make: Any = Tensor.new_zeros if "static" in name else Tensor.new_empty
            make = new_states if name in self._fields[:3] else make
            dtype = torch.float32 if name.endswith(in_float32) else None
            gradients.append(None if tensor is None else make(tensor, tensor.shape, dtype=dtype))
        return gradients


def groups_of(inputs: AttentionInputs) -> list[int]:
    """Groups of heads of each composition that changes something."""
    groups = []
    for weights in (inputs.pre or _NOTHING, inputs.post or _NOTHING):
        if weights[:3] != (None, None, None):
            groups.append(weights.groups)
    return groups


def why_no_kernel(inputs: AttentionInputs) -> str | None:
    """Why no kernel of this folder computes a call, as the end of a sentence; None if nothing here forbids it."""
    query, key, value, pre, post, *_ = inputs
    dense, tensors = inputs.mask.dense, [query, key, value]
    for weights in (pre or _NOTHING, post or _NOTHING):
        for side in weights[:2]:
            if side is not None:
                tensors.append(side.factors)
                if side.factors.shape[3] // 2 > MOST_RANK:
                    return f"it takes low-rank maps of rank {MOST_RANK} at most, not {side.rank}"
        if weights.static is not None:
            tensors.append(weights.static)
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            return f"it takes float32, bfloat16 and float16, not {dtype_name(tensor.dtype)}"
    if len(set(groups_of(inputs))) > 1:
        return "there are different groups of heads before and after the softmax"
    if inputs.dropout > 0.0:
        return "it has no dropout"
    if dense is not None and dense.requires_grad:
        return "the mask has a gradient"
    if dense is not None and dense.shape[1] > 1:
        return "the mask differs between heads"
    return why_transformed()


def why_transformed() -> str | None:
    """Why kernels cannot be used under a transform of torch.func or in forward-mode derivatives; None elsewhere."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return "torch.func does not see through it"
    return "it has no derivatives in forward mode" if torch.autograd.forward_ad._current_level >= 0 else None


def is_traced() -> bool:
    """Tell whether torch records or replaces what is computed; CUDA graphs, which record kernels too, do not count."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    if torch._C._len_torch_function_stack() > 0:  # a default device is such a mode too, which changes nothing here
        return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())
    # Others may replace them, by an emulated precision for example.
    functions = (functional.linear, functional.gelu, torch.bmm, torch.tanh, functional.rms_norm)
    methods = (nn.Linear.forward, DCFormerRMSNorm.forward, ComposeProjection.forward)
    return (*functions, *methods, nn.Module.__call__, Tensor.__matmul__) != _ORIGINALS


def are_replaced(*expected: tuple[nn.Module | None, type | None]) -> bool:
    """Tell whether modules are not of the expected class (None: any), or observed, or torch.func transforms them."""
    for module, kind in expected:
        if module is not None:
            state = module.__dict__  # which is quicker to ask than the module
            if type(module) is not (kind or type(module)) or "forward" in state:
                return True
            if state["_forward_hooks"] or state["_forward_pre_hooks"]:
                return True
            if state["_backward_hooks"] or state["_backward_pre_hooks"]:
                return True
    return _has_any_global_hook() or why_transformed() is not None


def must_run_modules(*expected: tuple[nn.Module | None, type | None]) -> bool:
    """Tell whether a layer must run its modules one by one: they are replaced, or torch records or replaces them."""
    return is_traced() or are_replaced(*expected)


def cdiv(number: int, divisor: int) -> int:
    """Ceiling division; triton.cdiv takes 2 us of every launch."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The power of 2 that is not smaller; triton.next_power_of_2 takes 2 us of every launch."""
    return 1 << (number - 1).bit_length()


def channels_last(states: Tensor) -> Tensor:
    return states if states.shape[-1] == 1 or states.stride(-1) == 1 else states.contiguous()


def new_states(like: Tensor, shape: Sequence[int], **options: Any) -> Tensor:
    """(batch, heads, length, channels), in memory (batch, length, heads, channels), as models go on with it."""
    batch, heads, length, channels = shape
    return like.new_empty(batch, length, heads, channels, **options).transpose(1, 2)


def new_output(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return new_states(query, (*query.shape[:3], value.shape[3]))


def readable_mask(dense: Tensor) -> Tensor:
    """A dense mask of booleans, or of float32 with -inf where it hides."""
    if not dense.dtype.is_floating_point:
        return dense.to(torch.bool)
    return dense.float().masked_fill(dense <= torch.finfo(dense.dtype).min / 2, -torch.inf)
