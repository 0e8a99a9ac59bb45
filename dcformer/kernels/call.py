"""One call of composed attention, laid out flat: what the operators of torch take and the kernels are launched from."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..dcmha_factors import ComposeWeights
from ..dcmha_mask import Visibility


LOG2_E = 1.4426950408889634


class Call(NamedTuple):
    """
    All tensors, those that may have gradients first, then all numbers.

    Args:
        query (`Tensor`): (batch, heads, query, channels).
        key (`Tensor`): (batch, key/value heads, key, channels).
        value (`Tensor`): (batch, key/value heads, key, value channels).
        pre_query, post_query (`Tensor`, *optional*): (batch, heads, query, factors): w1 of each rank, w2 of each rank,
            and the gate if the number of factors is odd.
        pre_key, post_key (`Tensor`, *optional*): (batch, heads, key, factors), or as they lie in a cache, (batch,
            key/value heads, key, served heads x factors), which decoding alone takes.
        pre_static, post_static (`Tensor`, *optional*): (groups, heads per group, heads per group) [in, out].
        padding (`Tensor`, *optional*): (batch or 1, key) boolean, True for real tokens.
        sequence_ids (`Tensor`, *optional*): (batch or 1, length) numbers of packed documents.
        dense (`Tensor`, *optional*): (batch or 1, 1, query, key), boolean with True for visible, or floating point,
            added to the composed scores; at or below half the smallest number of its type it hides.
        groups (`int`): Groups of heads that compose among themselves.
        is_causal (`bool`), sliding_window (`int`, *optional*), query_offset (`int`): Of a [`Visibility`].
        scaling (`float`): Factor of the scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    pre_query: Tensor | None
    pre_key: Tensor | None
    pre_static: Tensor | None
    post_query: Tensor | None
    post_key: Tensor | None
    post_static: Tensor | None
    padding: Tensor | None
    sequence_ids: Tensor | None
    dense: Tensor | None
    groups: int
    is_causal: bool
    sliding_window: int | None
    query_offset: int
    scaling: float

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pre: ComposeWeights | None,
        post: ComposeWeights | None,
        mask: Visibility,
        scaling: float,
    ) -> "Call":
        """The call with these arguments; pre and post have the same groups."""
        composed = [weights for weights in (pre, post) if not is_empty(weights)]
        return cls(
            query,
            key,
            value,
            *_tensors(pre),
            *_tensors(post),
            mask.padding,
            mask.sequence_ids,
            mask.dense,
            composed[0].groups if composed else 1,
            mask.is_causal,
            mask.sliding_window,
            mask.query_offset,
            scaling,
        )

    @property
    def needs_gradient(self) -> bool:
        """Whether it will be differentiated, as far as can be known."""
        tensors = self[: len(DIFFERENTIABLE)]
        return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)

    def with_channels_last(self) -> "Call":
        """The same with the channels of query, key and value side by side in memory, as the kernels read them."""
        return self._replace(**{name: channels_last(getattr(self, name)) for name in ("query", "key", "value")})


# Those that may have gradients.
DIFFERENTIABLE = Call._fields[:9]


def is_empty(weights: ComposeWeights | None) -> bool:
    """Whether a composition changes nothing."""
    return weights is None or (weights.query is None and weights.key is None and weights.static is None)


def why_no_kernel(
    pre: ComposeWeights | None, post: ComposeWeights | None, mask: Visibility, dropout: float
) -> str | None:
    """Why no kernel of this folder computes a call, as the end of a sentence; None if its own reasons decide."""
    if pre is not None and post is not None and pre.groups != post.groups and not (is_empty(pre) or is_empty(post)):
        return "there are different groups of heads before and after the softmax"
    if dropout > 0.0:
        return "it has no dropout"
    if mask.requires_grad:
        return "the mask has a gradient"
    if not mask.same_for_all_heads:
        return "the mask differs between heads"
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return "torch.func does not see through it"
    if torch.autograd.forward_ad._current_level >= 0:
        return "it has no derivatives in forward mode"
    return None


def channels_last(states: Tensor) -> Tensor:
    return states if states.shape[-1] == 1 or states.stride(-1) == 1 else states.contiguous()


def _tensors(weights: ComposeWeights | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The factors of the queries and of the keys, and the static map."""
    if weights is None:
        return None, None, None
    query, key = (None if side is None else side.factors for side in (weights.query, weights.key))
    return query, key, weights.static
