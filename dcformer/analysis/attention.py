"""Attention weights of one layer with and without its composition, from operands recorded in a forward (equation 4)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..configuration_dcformer import DCFormerConfig
from ..dcmha import ComposeWeights, Visibility, composed_attention, register_implementation


@dataclass(frozen=True)
class AttentionInputs:
    """
    The operands of one layer's attention.

    Attributes:
        query (`Tensor`): (batch, heads, query, channels), rotated.
        key (`Tensor`): (batch, key/value heads, key, channels), rotated.
        value (`Tensor`): (batch, key/value heads, key, channels).
        pre, post (`ComposeWeights`, *optional*): `None` where the layer composes nothing.
        scaling (`float`): Factor of the scores.
        mask (`Visibility`): Causality, window and padding.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    pre: ComposeWeights | None
    post: ComposeWeights | None
    scaling: float
    mask: Visibility

    def weights(self, *, pre: bool = True, post: bool = True) -> Tensor:
        """Attention weights (batch, heads, query, key), composed before the softmax and after it, or not."""
        composed = self.pre if pre else None, self.post if post else None
        options: dict[str, Any] = {"scaling": self.scaling, "attention_mask": self.mask, "return_weights": True}
        return composed_attention(self.query, self.key, self.value, *composed, **options)[1]


@dataclass(frozen=True)
class LayerAttention:
    """
    Attention of one layer over one text.

    Attributes:
        plain (`Tensor`): (heads, query, key) in float32, the softmax of every head alone: rows sum to one.
        composed (`Tensor`): The same shape, as the layer uses them: signed, and rows need not sum to one.
        is_composed (`bool`): Whether the layer composes at all; otherwise the two are the same.
    """

    plain: Tensor
    composed: Tensor
    is_composed: bool


@torch.no_grad()
def layer_attention(model: Any, input_ids: Sequence[int] | Tensor, layer: int) -> LayerAttention:
    """
    A layer's attention weights before and after composition, in the same forward pass.

    Args:
        model: A DCFormer or DCPythia, with any head or none.
        input_ids: One text: a list, (length,) or (1, length).
        layer: Its number, from 0; a negative one counts from the end.

    Raises:
        ValueError: for another model, or more than one text.
    """
    ids = torch.as_tensor(input_ids)
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or ids.shape[0] != 1:
        raise ValueError(f"input_ids must be of one text, (length,) or (1, length), got shape {tuple(ids.shape)}.")
    inputs = attention_inputs(model, layer, input_ids=ids.to(model.device))
    plain, composed = (inputs.weights(pre=on, post=on)[0].float().cpu() for on in (False, True))
    return LayerAttention(plain, composed, is_composed=inputs.pre is not None or inputs.post is not None)


@torch.no_grad()
def attention_inputs(model: Any, layer: int, **inputs: Any) -> AttentionInputs:
    """
    Run a model without a cache and record the operands of one layer's attention.

    Args:
        model, layer: As of [`layer_attention`].
        inputs: Arguments of the model's forward, such as `input_ids` and `attention_mask`.

    Raises:
        ValueError: for another model.
    """
    if not isinstance(model.config, DCFormerConfig):
        raise ValueError(f"model must be a DCFormer or DCPythia, got a {model.config.model_type} model.")
    attention = model.base_model.layers[layer].self_attn
    recorded: list[AttentionInputs] = []
    before, token = attention.config, _record.set(recorded.append)
    # The layer alone uses the implementation below, by a configuration of its own.
    attention.config = copy.copy(before)
    attention.config._attn_implementation = "dcmha_recording"
    try:
        model(**inputs, use_cache=False, output_attentions=False)
    finally:
        attention.config = before
        _record.reset(token)
    return recorded[-1]


# Of the thread that records: others may use the model meanwhile.
_record: ContextVar[Callable[[AttentionInputs], None] | None] = ContextVar("record", default=None)


def _forward(*operands: Any, scaling: float, mask: Visibility, dropout: float, chunk_size: int | None = None) -> Tensor:
    if (record := _record.get()) is not None:
        record(AttentionInputs(*operands, scaling, mask))
    return composed_attention(*operands, scaling=scaling, attention_mask=mask, dropout=dropout, chunk_size=chunk_size)


register_implementation("recording", _forward)
