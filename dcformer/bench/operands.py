"""What a DCFormer's attention hands to the operator: queries, keys, values and factors, as they lie in memory there.

The operands are caught in a model of one layer, by an implementation of the operator that only takes them down. So they
lie in memory as in a model, whatever that layout is: factors of a prompt as the projections leave them, and those of a
decoding step as views of the cache's rows.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from ..configuration_dcformer import DCFormerConfig
from ..dcmha import ComposeWeights, composed_attention, register_implementation
from ..modeling_dcformer import DCFormerForCausalLM
from . import authors


# Beside the implementations that compute something, once operands have been taken down.
NAME = "take_down"


class Operands(NamedTuple):
    """
    Operands of one call of `composed_attention`.

    Args:
        query (`Tensor`): (batch, heads, queries, channels).
        key, value (`Tensor`): (batch, heads, keys, channels).
        pre, post (`ComposeWeights`, *optional*): Factors of both sides, of rank 2 with gates, or some of them.
        peer (`authors.Factors`, *optional*): A prompt's factors for the authors' formulation.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    pre: ComposeWeights | None
    post: ComposeWeights | None
    peer: authors.Factors | None = None

    def composed(self, **options: Any) -> Tensor:
        return composed_attention(self.query, self.key, self.value, self.pre, self.post, **options)

    @property
    def states(self) -> list[Tensor]:
        return [self.query, self.key, self.value]

    @property
    def factors(self) -> list[Tensor]:
        """Of both sides, those that there are."""
        sides = [side for stage in (self.pre, self.post) if stage is not None for side in (stage.query, stage.key)]
        return [side.factors for side in sides if side is not None]


def one_layer(
    heads: int, head_dim: int, device: torch.device, dtype: torch.dtype, **values: Any
) -> DCFormerForCausalLM:
    """A model of which only the attention is of use; factors are as large as in a trained one, so that they matter."""
    config = DCFormerConfig(
        vocab_size=1,
        hidden_size=heads * head_dim,
        intermediate_size=1,
        num_hidden_layers=1,
        num_attention_heads=heads,
        sliding_window=None,
        bos_token_id=None,
        eos_token_id=None,
        **values,
    )
    torch.manual_seed(0)
    with device:
        model = DCFormerForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("low_rank_weight"):
                parameter.normal_(std=parameter.shape[2] ** -0.5)
            elif name.endswith("gate_weight"):
                parameter.normal_(std=0.1 * parameter.shape[0] ** -0.5)
    return model.to(device, dtype)


@torch.no_grad()
def prompt_operands(
    heads: int, head_dim: int, length: int, device: torch.device, dtype: torch.dtype, batch: int = 1
) -> Operands:
    """As for a prompt of random hidden states that is read at once."""
    model = one_layer(heads, head_dim, device, dtype, max_position_embeddings=length)
    hidden_states = _hidden_states(model, batch, length)
    with _taking_down(model) as taken:
        model(inputs_embeds=hidden_states, use_cache=False)
    return Operands(*taken)._replace(peer=authors.Factors.of(*taken[3:]))


@torch.no_grad()
def step_operands(heads: int, head_dim: int, keys: int, device: torch.device, dtype: torch.dtype) -> Operands:
    """As for one decoding step that sees `keys` keys, its own included, with a dynamic cache."""
    model = one_layer(heads, head_dim, device, dtype, max_position_embeddings=keys)
    hidden_states = _hidden_states(model, 1, keys)
    cache = DynamicCache(config=model.config)
    model(inputs_embeds=hidden_states[:, :-1], past_key_values=cache)
    with _taking_down(model) as taken:
        model(inputs_embeds=hidden_states[:, -1:], past_key_values=cache)
    return Operands(*taken)


def _hidden_states(model: DCFormerForCausalLM, batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, length, model.config.hidden_size, generator=generator).to(model.device, model.dtype)


@contextlib.contextmanager
def _taking_down(model: DCFormerForCausalLM) -> Iterator[list]:
    """The list into which the model's next call puts its operands."""
    taken: list = []

    def take_down(query: Tensor, key: Tensor, value: Tensor, *factors: Any, **options: Any) -> Tensor:
        taken.extend((query, key, value, *factors))
        return query.new_zeros(*query.shape[:3], value.shape[3])

    register_implementation(NAME, take_down)
    before = model.config._attn_implementation
    model.set_attn_implementation(f"dcmha_{NAME}")
    yield taken
    model.set_attn_implementation(before)
