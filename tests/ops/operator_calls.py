"""Composed attention by the operators of `dcformer.ops`, from the inputs of the operator's own tests."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from operator_inputs import Inputs, make_inputs
from torch import Tensor

from dcformer import ComposeWeights, Visibility, composed_attention_reference
from dcformer.ops.arguments import Composition, Mask


class Call(NamedTuple):
    """Shapes of the inputs, and the mask: window, left padding, documents, any pairs, numbers that are added."""

    shape: dict = {}
    is_causal: bool = True
    window: int | None = None
    padded: int = 0
    documents: tuple[int, ...] | None = None
    sees_at_random: bool = False
    adds: bool = False
    dtype: torch.dtype = torch.float32
    workspace_bytes: int = 2**28

    def inputs(self) -> Inputs:
        return make_inputs(**{"batch": 1, "channels": 16, **self.shape})

    def visibility(self, inputs: Inputs) -> Visibility:
        batch, _, queries, _ = inputs.query.shape
        keys = inputs.key.shape[2]
        padding = dense = sequence_ids = None
        if self.padded:
            padding = torch.ones(batch, keys, dtype=torch.bool)
            padding[0, : self.padded] = False
        if self.sees_at_random:
            dense = torch.rand(batch, 1, queries, keys, generator=torch.Generator().manual_seed(5)) > 0.5
            if self.adds:
                dense = torch.where(
                    dense,
                    torch.randn(dense.shape, generator=torch.Generator().manual_seed(6)),
                    torch.finfo(torch.float32).min,
                )
        if self.documents:
            numbers = torch.tensor([number for number, _ in enumerate(self.documents)])
            sequence_ids = numbers.repeat_interleave(torch.tensor(self.documents)).expand(batch, -1)
        return Visibility(
            queries,
            keys,
            is_causal=self.is_causal,
            sliding_window=self.window,
            padding=padding,
            dense=dense,
            sequence_ids=sequence_ids,
        )


def composition_of(weights: ComposeWeights | None) -> Composition | None:
    if weights is None:
        return None
    query, key = (None if side is None else side.factors for side in (weights.query, weights.key))
    return Composition(query, key, weights.static, weights.groups)


def mask_of(visibility: Visibility) -> Mask:
    return Mask(
        visibility.is_causal,
        visibility.sliding_window,
        visibility.query_offset,
        visibility.padding,
        visibility.sequence_ids,
        visibility.dense,
    )


def expected_output(inputs: Inputs, visibility: Visibility) -> Tensor:
    """By the reference, in float64."""
    return composed_attention_reference(*inputs, attention_mask=visibility)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every new tensor that nothing was written to holds NaN, as memory of a GPU may."""

    def poisoned(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
        for name in ("empty", "empty_like"):
            patch.setattr(torch, name, poisoned(getattr(torch, name)))
        yield
