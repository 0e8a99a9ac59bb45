"""Operands of composed attention as a model's attention layer makes them, laid out in memory as there.

Factors of a prompt are as the projections leave them, key-wise ones of a decoding step are views of the cache's rows.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from ..configuration_dcformer import DCFormerConfig
from ..dcmha import ComposeWeights, Visibility, composed_attention, map_tensors
from ..modeling_dcformer import DCFormerAttention, DCFormerModel


class Operands(NamedTuple):
    """Operands of one call of `composed_attention`."""

    query: Tensor  # (batch, heads, queries, head_dim)
    key: Tensor  # (batch, heads, keys, head_dim)
    value: Tensor
    pre: ComposeWeights | None
    post: ComposeWeights | None

    def composed(self, **options: Any) -> Tensor:
        return composed_attention(self.query, self.key, self.value, self.pre, self.post, **options)

    @property
    def states(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def tensors(self) -> list[Tensor]:
        """The states, and all tensors of both compositions."""
        tensors = list(self.states)
        for weights in (self.pre, self.post):
            map_tensors(weights, lambda tensor, _: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
        return tensors

    def leaves(self, with_gradients: bool = True, dtype: torch.dtype | None = None) -> "Operands":
        """The same numbers, laid out alike, that may require gradients; in another dtype if one is given."""

        def leaf(tensor: Tensor, _: str = "") -> Tensor:
            return tensor.detach().to(dtype or tensor.dtype).requires_grad_(with_gradients)

        pre, post = (map_tensors(weights, leaf) for weights in (self.pre, self.post))
        query, key, value = map(leaf, self.states)
        return Operands(query, key, value, pre, post)


@functools.lru_cache(maxsize=2)
@torch.no_grad()
def prompt_operands(
    heads: int, head_dim: int, length: int, device: torch.device, dtype: torch.dtype, batch: int = 1
) -> Operands:
    """Operands of a prompt of random hidden states, read at once."""
    attention, hidden_states, positions = _attention(heads, head_dim, batch, length, device, dtype)
    return Operands(*attention.project(hidden_states, positions))


@functools.lru_cache(maxsize=2)
@torch.no_grad()
def step_operands(heads: int, head_dim: int, keys: int, device: torch.device, dtype: torch.dtype) -> Operands:
    """Operands of a decoding step whose query sees `keys` keys in a dynamic cache, the last of them its own."""
    attention, hidden_states, (cos, sin) = _attention(heads, head_dim, 1, keys, device, dtype)
    cache = DynamicCache(config=attention.config)
    for part in (slice(None, -1), slice(-1, None)):
        query, *states = attention.project(hidden_states[:, part], (cos[:, part], sin[:, part]))
        cached = attention.update_cache(cache, *states)
    return Operands(query, *cached)


def packed_documents(length: int, document: int, device: torch.device) -> Visibility:
    """A sequence of documents of `document` tokens that do not see each other; the last one may be shorter."""
    return Visibility(length, length, sequence_ids=(torch.arange(length, device=device) // document)[None])


def visible(length: int, window: int | None, device: torch.device) -> Tensor:
    """(query, key) boolean, True for the keys that causality and the window leave."""
    age = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (age >= 0) & (age < (window or length))


def _attention(
    heads: int, head_dim: int, batch: int, length: int, device: torch.device, dtype: torch.dtype
) -> tuple[DCFormerAttention, Tensor, tuple[Tensor, Tensor]]:
    """A layer whose factors are as large as in a trained one, so that errors in them show, with what it reads."""
    config = DCFormerConfig(
        vocab_size=1,
        hidden_size=heads * head_dim,
        intermediate_size=1,
        num_hidden_layers=1,
        num_attention_heads=heads,
        sliding_window=None,
        max_position_embeddings=length,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with device:
        model = DCFormerModel(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("low_rank_weight"):
            parameter.normal_(std=parameter.shape[2] ** -0.5)
        elif name.endswith("gate_weight"):
            parameter.normal_(std=0.1 * parameter.shape[0] ** -0.5)
    model = model.to(device, dtype)
    hidden_states = torch.randn(batch, length, config.hidden_size, generator=torch.Generator().manual_seed(0))
    hidden_states = hidden_states.to(device, dtype)
    positions = model.rotary_emb(hidden_states, torch.arange(length, device=device)[None])  # (1, length, rotary size)
    return model.layers[0].self_attn, hidden_states, positions
