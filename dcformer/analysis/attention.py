"""Attention weights of one layer with and without its composition, from the same queries and keys (equation 4).

What a layer hands to its attention is recorded in one forward pass of the model. Composed attention then computes the
weights twice: as the layer has them, and as they would be if no head read another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..configuration_dcformer import DCFormerConfig
from ..dcmha import composed_attention, register_implementation
from ..dcmha_factors import ComposeWeights
from ..dcmha_mask import Visibility


_NAME = "recording"


@dataclass(frozen=True)
class AttentionInputs:
    """
    What one layer hands to its attention.

    Attributes:
        query (`Tensor`): (batch, heads, query, channels), rotated.
        key (`Tensor`): (batch, key/value heads, key, channels), rotated.
        value (`Tensor`): (batch, key/value heads, key, channels).
        pre, post (`ComposeWeights`, *optional*): Of this text; `None` where the layer composes nothing.
        scaling (`float`): Factor of the scores.
        mask (`Visibility`): Causality, window and padding of the layer.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    pre: ComposeWeights | None
    post: ComposeWeights | None
    scaling: float
    mask: Visibility

    def weights(self, *, pre: bool = True, post: bool = True) -> Tensor:
        """
        Attention weights, (batch, heads, query, key).

        Args:
            pre, post (default to `True`): Compose the scores before the softmax, the weights after it. With neither,
                these are the softmax of every head alone.
        """
        _, weights = composed_attention(
            self.query,
            self.key,
            self.value,
            self.pre if pre else None,
            self.post if post else None,
            scaling=self.scaling,
            attention_mask=self.mask,
            return_weights=True,
        )
        return weights


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
        model: A DCFormer or DCPythia, with a head or without, whose composition may be switched off.
        input_ids: Of one text: a list, (length,) or (1, length).
        layer: Its number, from 0; a negative one counts from the end.

    Raises:
        ValueError: for another model, a layer that it does not have, or more than one text.
    """
    ids = torch.as_tensor(input_ids)
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or ids.shape[0] != 1 or ids.shape[1] == 0:
        raise ValueError(f"input_ids must be of one text, (length,) or (1, length), got shape {tuple(ids.shape)}.")
    inputs = attention_inputs(model, layer, input_ids=ids.to(model.device))
    plain, composed = inputs.weights(pre=False, post=False), inputs.weights()
    is_composed = inputs.pre is not None or inputs.post is not None
    return LayerAttention(plain[0].float().cpu(), composed[0].float().cpu(), is_composed)


@torch.no_grad()
def attention_inputs(model: Any, layer: int, **inputs: Any) -> AttentionInputs:
    """
    Run a model without a cache and record what one layer hands to its attention.

    Args:
        model: As in [`layer_attention`].
        layer: Its number, from 0; a negative one counts from the end.
        inputs: Arguments of the model's forward, such as `input_ids` and `attention_mask`.

    Raises:
        ValueError: for another model, or a layer that it does not have.
    """
    attention = _attention_module(model, layer)
    recorded: list[AttentionInputs] = []
    with _recording(attention, recorded.append):
        model(**inputs, use_cache=False, output_attentions=False)
    return recorded[-1]


def _attention_module(model: Any, layer: int) -> Any:
    if not isinstance(model.config, DCFormerConfig):
        raise ValueError(
            f"The attention of a {model.config.model_type} model cannot be taken apart; give a DCFormer or DCPythia."
        )
    layers = model.base_model.layers
    if not -len(layers) <= layer < len(layers):
        raise ValueError(f"layer must be from 0 to {len(layers) - 1}, got {layer}.")
    return layers[layer].self_attn


# Of the thread that records: others may use the model meanwhile.
_record: ContextVar[Callable[[AttentionInputs], None] | None] = ContextVar("record", default=None)


@contextmanager
def _recording(attention: Any, record: Callable[[AttentionInputs], None]) -> Iterator[None]:
    """Let one layer alone use the implementation below, by a configuration of its own."""
    before = attention.config
    attention.config = copy.copy(before)
    attention.config._attn_implementation = f"dcmha_{_NAME}"
    token = _record.set(record)
    try:
        yield
    finally:
        _record.reset(token)
        attention.config = before


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    *,
    scaling: float,
    mask: Visibility,
    dropout: float,
    chunk_size: int | None = None,
) -> Tensor:
    if (record := _record.get()) is not None:
        record(AttentionInputs(query, key, value, pre, post, scaling, mask))
    options: dict[str, Any] = {"scaling": scaling, "attention_mask": mask, "dropout": dropout}
    return composed_attention(query, key, value, pre, post, chunk_size=chunk_size, **options)


register_implementation(_NAME, _forward)
