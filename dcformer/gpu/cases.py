"""Kinds of calls that share a verdict: the same kernels at the same sizes, whatever the lengths."""

from operator import index
from typing import Any, NamedTuple

from torch import Tensor

from ..dcmha_factors import ComposeSide, ComposeWeights
from ..dcmha_mask import Visibility
from .triton_form import is_decoding, needs_gradient


DECODE, PREFILL, TRAINING = "decode", "prefill", "training"


class StageSwitches(NamedTuple):
    """What one composition consists of; ranks are 0 without a low-rank map."""

    query_rank: int = 0
    query_gate: bool = False
    key_rank: int = 0
    key_gate: bool = False
    static: bool = False

    @classmethod
    def of(cls, weights: ComposeWeights | None) -> "StageSwitches":
        if weights is None:
            return cls()
        return cls(*_channels(weights.query), *_channels(weights.key), weights.static is not None)


class Case(NamedTuple):
    """
    What a verdict is about.

    Args:
        kind (`str`): "decode", "prefill" (more queries, no gradient) or "training".
        dtype (`str`): Of query, key and value, such as "bfloat16".
        heads, key_value_heads, channels, value_channels, groups (`int`): Sizes.
        pre, post (`StageSwitches`): The compositions.
        is_causal, has_window (`bool`): The mask; true and false for decoding, where both make little difference.
    """

    kind: str
    dtype: str
    heads: int
    key_value_heads: int
    channels: int
    value_channels: int
    groups: int
    pre: StageSwitches
    post: StageSwitches
    is_causal: bool = True
    has_window: bool = False

    def flat(self) -> tuple[str | int, ...]:
        """Its strings and numbers, side by side."""
        return *self[:7], *self.pre, *self.post, *self[9:]

    @classmethod
    def of_flat(cls, *values: Any) -> "Case":
        """The case whose `flat` this is."""
        first, second = 7, 7 + len(StageSwitches._fields)
        third = second + len(StageSwitches._fields)
        return cls(
            *values[:first], StageSwitches(*values[first:second]), StageSwitches(*values[second:third]), *values[third:]
        )

    def as_decoding(self) -> "Case":
        """The decoding of a model whose prefill this is."""
        return self._replace(kind=DECODE, is_causal=True, has_window=False)


def case_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    mask: Visibility,
) -> Case:
    """The case of one call. A graph that is traced for any size is tied to heads and channels by this."""
    stage = pre or post
    case = Case(
        PREFILL,
        str(query.dtype).removeprefix("torch."),
        index(query.shape[1]),
        index(key.shape[1]),
        index(query.shape[3]),
        index(value.shape[3]),
        1 if stage is None else index(stage.groups),
        StageSwitches.of(pre),
        StageSwitches.of(post),
        mask.is_causal,
        mask.sliding_window is not None,
    )
    if is_decoding(query, key, value, pre, post, mask):
        return case.as_decoding()
    return case._replace(kind=TRAINING) if needs_gradient(query, key, value, pre, post) else case


def _channels(side: ComposeSide | None) -> tuple[int, bool]:
    if side is None:
        return 0, False
    channels = index(side.factors.shape[-1])
    return channels // 2, channels % 2 == 1
