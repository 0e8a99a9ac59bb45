"""One call of composed attention laid out flat, as torch's operators take it and kernels are launched from it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ..common.dtypes import dtype_name
from ..compose_dcformer import DCFormerCompose
from ..dcmha import ComposeWeights, Visibility, Weights
from ..modeling_dcformer import DCFormerRMSNorm, is_hooked


LOG2_E = 1.4426950408889634
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_RANK = 8
# What code that is fused stands for, and others replace, with an emulated precision for example.
_STANDS_FOR = [
    (functional, "linear", torch._C._nn.linear),
    (functional, "gelu", torch._C._nn.gelu),
    *((torch, name, getattr(torch._C._VariableFunctions, name)) for name in ("bmm", "tanh")),
    (functional, "rms_norm", functional.rms_norm),
    *((kind, "forward", kind.forward) for kind in (nn.Linear, DCFormerRMSNorm, DCFormerCompose)),
    (nn.Module, "__call__", nn.Module.__call__),
    (Tensor, "__matmul__", Tensor.__matmul__),
]
DIFFERENTIABLE, TENSORS = 9, 12  # of a call's fields, the first that may have gradients, and all that are no numbers


class Call(NamedTuple):
    """All tensors, those that may have gradients first, then all numbers."""

    query: Tensor  # (batch, heads, query, channels)
    key: Tensor  # (batch, key/value heads, key, channels)
    value: Tensor  # (batch, key/value heads, key, value channels)
    pre_query: Tensor | None  # (batch, heads, query, factors), as `ComposeSide.factors`
    # (batch, heads, key, factors), or, as cached, (batch, key/value heads, key, query heads of each x factors)
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
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, pre: Weights, post: Weights, mask: Visibility, scaling: float
    ) -> "Call":
        """The call with these arguments; pre and post have the same groups."""
        groups = (*groups_of(pre, post), 1)[0]
        masks = (mask.padding, mask.sequence_ids, mask.dense)
        band = (mask.is_causal, mask.sliding_window, mask.query_offset)
        return cls(query, key, value, *_tensors(pre), *_tensors(post), *masks, groups, *band, scaling)

    def with_channels_last(self) -> "Call":
        """The same with the channels of query, key and value side by side in memory, as the kernels read them."""
        return Call(*map(channels_last, self[:3]), *self[3:])

    def needs_gradient(self) -> bool:  # no property: older Dynamos stop at one of a named tuple
        """Whether it will be differentiated, as far as can be known."""
        given = [tensor for tensor in self[:DIFFERENTIABLE] if tensor is not None]
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)

    def rank(self) -> int:
        """The largest of any side."""
        sides = (self.pre_query, self.pre_key, self.post_query, self.post_key)
        return max(0 if side is None else side.shape[3] // 2 for side in sides)

    def new_gradients(self, in_float32: str | tuple[str, ...] = ()) -> list[Tensor | None]:
        """Memory for gradients, in float32 of fields whose names end so; of static maps zeros, to be added to."""
        gradients: list[Tensor | None] = []
        for name, tensor in zip(self._fields, self[:DIFFERENTIABLE]):
            make = (
                new_states if name in self._fields[:3] else Tensor.new_zeros if "static" in name else Tensor.new_empty
            )
            dtype = torch.float32 if name.endswith(in_float32) else None
            gradients.append(None if tensor is None else make(tensor, tensor.shape, dtype=dtype))
        return gradients


def groups_of(*stages: Weights) -> list[int]:
    """Groups of heads of each composition that changes something."""
    return [each.groups for each in stages if each and not (each.query is each.key is each.static is None)]


def why_no_kernel(*inputs: Any, mask: Visibility, dropout: float = 0.0) -> str | None:
    """Why no kernel of this folder computes a call, as the end of a sentence; None if nothing here forbids it."""
    call = Call.of(*inputs, mask, 1.0)
    for tensor in call[:DIFFERENTIABLE]:
        if tensor is not None and tensor.dtype not in DTYPES:
            return f"it takes float32, bfloat16 and float16, not {dtype_name(tensor.dtype)}"
    if (rank := call.rank()) > MOST_RANK:
        return f"it takes low-rank maps of rank {MOST_RANK} at most, not {rank}"
    if any(groups != call.groups for groups in groups_of(*inputs[3:])):
        return "there are different groups of heads before and after the softmax"
    if dropout > 0.0:
        return "it has no dropout"
    if mask.dense is not None and mask.dense.requires_grad:
        return "the mask has a gradient"
    if mask.dense is not None and mask.dense.shape[1] > 1:
        return "the mask differs between heads"
    return why_transformed()


def why_transformed() -> str | None:
    """Likewise, where torch.func or derivatives in forward mode are at work."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return "torch.func does not see through it"
    return "it has no derivatives in forward mode" if torch.autograd.forward_ad._current_level >= 0 else None


def is_traced() -> bool:
    """Whether torch records or replaces what is computed; what captures CUDA graphs records kernels as well."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    if torch._C._len_torch_function_stack() > 0:  # a default device is such a mode too, which changes nothing here
        return any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())
    return any(getattr(owner, name) is not function for owner, name, function in _STANDS_FOR)


def is_changed(module: nn.Module) -> bool:
    """Whether a module has hooks or a forward pass of its own."""
    return is_hooked(module) or "forward" in module.__dict__


def cdiv(number: int, divisor: int) -> int:
    """As Triton's, which like the next takes two microseconds of every launch."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
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


def _tensors(weights: Weights) -> tuple[Tensor | None, ...]:
    """The factors of the queries and of the keys, and the static map."""
    query, key, static, _ = weights or ComposeWeights()
    return *(None if side is None else side.factors for side in (query, key)), static
