"""Operands of composed attention as a model's attention hands them over, laid out in memory as there.

They are caught in a model of one layer by an implementation of the operator that only takes them down: factors of a
prompt as the projections leave them, those of a decoding step as views of the cache's rows.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from ..configuration_dcformer import DCFormerConfig
from ..dcmha import ComposeWeights, Visibility, composed_attention, map_tensors, register_implementation
from ..modeling_dcformer import DCFormerForCausalLM


CATCHER = "take_down"  # the implementation that catches operands


class Operands(NamedTuple):
    """Operands of one call of `composed_attention`."""

    query: Tensor  # (batch, heads, queries, channels)
    key: Tensor  # (batch, heads, keys, channels)
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
        found = list(self.states)
        for weights in (self.pre, self.post):
            map_tensors(weights, lambda tensor, _: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
        return found

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
    model, hidden_states = _one_layer(heads, head_dim, batch, length, device, dtype)
    return _catch(model, inputs_embeds=hidden_states, use_cache=False)


@functools.lru_cache(maxsize=2)
@torch.no_grad()
def step_operands(heads: int, head_dim: int, keys: int, device: torch.device, dtype: torch.dtype) -> Operands:
    """Operands of a decoding step that sees `keys` keys, its own included, in a dynamic cache."""
    model, hidden_states = _one_layer(heads, head_dim, 1, keys, device, dtype)
    cache = DynamicCache(config=model.config)
    model(inputs_embeds=hidden_states[:, :-1], cache=cache)
    return _catch(model, inputs_embeds=hidden_states[:, -1:], cache=cache)


def packed_documents(length: int, document: int, device: torch.device) -> Visibility:
    """A row of documents of `document` tokens that do not see each other; the last one may be shorter."""
    return Visibility(length, length, sequence_ids=(torch.arange(length, device=device) // document)[None])


def visible(length: int, window: int | None, device: torch.device) -> Tensor:
    """(query, key) boolean, True for the keys that causality and the window leave."""
    age = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (age >= 0) & (age < (window or length))


def _one_layer(
    heads: int, head_dim: int, batch: int, length: int, device: torch.device, dtype: torch.dtype
) -> tuple[DCFormerForCausalLM, Tensor]:
    """A model whose factors are as large as in a trained one, so that errors in them show, and hidden states."""
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
        model = DCFormerForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("low_rank_weight"):
            parameter.normal_(std=parameter.shape[2] ** -0.5)
        elif name.endswith("gate_weight"):
            parameter.normal_(std=0.1 * parameter.shape[0] ** -0.5)
    hidden_states = torch.randn(batch, length, config.hidden_size, generator=torch.Generator().manual_seed(0))
    return model.to(device, dtype), hidden_states.to(device, dtype)


def _catch(model: DCFormerForCausalLM, **inputs: Any) -> Operands:
    """Call a model and return the operands of its attention."""
    taken: list[Operands] = []

    def take_down(query: Tensor, key: Tensor, value: Tensor, pre: Any, post: Any, **options: Any) -> Tensor:
        taken.append(Operands(query, key, value, pre, post))
        return query.new_zeros(*query.shape[:3], value.shape[3])

    register_implementation(CATCHER, take_down)
    model.set_attn_implementation(f"dcmha_{CATCHER}")
    model(**inputs)
    return taken[0]
