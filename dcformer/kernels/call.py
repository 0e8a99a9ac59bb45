"""One call of composed attention laid out flat, as torch's operators take it and kernels are launched from it."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..dcmha import Visibility, Weights


LOG2_E = 1.4426950408889634


class Call(NamedTuple):
    """All tensors, those that may have gradients first, then all numbers."""

    query: Tensor  # (batch, heads, query, channels)
    key: Tensor  # (batch, key/value heads, key, channels)
    value: Tensor  # (batch, key/value heads, key, value channels)
    pre_query: Tensor | None  # (batch, heads, query, factors), as `ComposeSide.factors`
    # (batch, heads, key, factors), or in decoding also (batch, key/value heads, key, served heads x factors), as cached
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
        composed = [weights for weights in (pre, post) if not is_empty(weights)]
        masks = (mask.padding, mask.sequence_ids, mask.dense)
        band = (mask.is_causal, mask.sliding_window, mask.query_offset)
        groups = composed[0].groups if composed else 1
        return cls(query, key, value, *_tensors(pre), *_tensors(post), *masks, groups, *band, scaling)

    def with_channels_last(self) -> "Call":
        """The same with the channels of query, key and value side by side in memory, as the kernels read them."""
        return self._replace(**{name: channels_last(getattr(self, name)) for name in ("query", "key", "value")})


# Those that may have gradients.
DIFFERENTIABLE = Call._fields[:9]


def needs_gradient(call: Call) -> bool:  # no property: older Dynamos stop at one of a named tuple
    """Whether it will be differentiated, as far as can be known."""
    tensors = call[: len(DIFFERENTIABLE)]
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def is_empty(weights: Weights) -> bool:
    """Whether a composition changes nothing."""
    return weights is None or (weights.query is None and weights.key is None and weights.static is None)


def why_no_kernel(pre: Weights, post: Weights, mask: Visibility, dropout: float) -> str | None:
    """Why no kernel of this folder computes a call, as the end of a sentence; None if its own reasons decide."""
    if pre is not None and post is not None and pre.groups != post.groups and not (is_empty(pre) or is_empty(post)):
        return "there are different groups of heads before and after the softmax"
    if dropout > 0.0:
        return "it has no dropout"
    if mask.dense is not None and mask.dense.requires_grad:
        return "the mask has a gradient"
    if mask.dense is not None and mask.dense.shape[1] > 1:
        return "the mask differs between heads"
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return "torch.func does not see through it"
    if torch.autograd.forward_ad._current_level >= 0:
        return "it has no derivatives in forward mode"
    return None


def channels_last(states: Tensor) -> Tensor:
    return states if states.shape[-1] == 1 or states.stride(-1) == 1 else states.contiguous()


def _tensors(weights: Weights) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The factors of the queries and of the keys, and the static map."""
    if weights is None:
        return None, None, None
    query, key = (None if side is None else side.factors for side in (weights.query, weights.key))
    return query, key, weights.static
