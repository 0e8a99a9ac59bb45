"""The baseline "authors": composed attention, and a decoder, that compute as the authors' PyTorch code does.

The code is ours, after the paper's equations. Prompts go in chunks of queries, by products that broadcast and sums over
heads. The cache is allocated at once, for the longest text (in layers with a window a ring of its size), and holds two
whole maps between heads for every key, identity + W_k1 W_k2 + diag(W_kg), before and after the softmax; a step adds the
query's map to those of all keys and applies the sum to the whole cache.

Axis letters: b batch, t query, s key, c stage (before and after the softmax), p query-wise and key-wise, r rank, m and
n heads, k inner channels of the projections.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dcformer import DCFormerForCausalLM
from dcformer.dcmha import ComposeWeights
from dcformer.modeling_dcformer import apply_rotary_pos_emb


CHUNK = 128


class Factors(NamedTuple):
    """Results of equations 5 and 6: w1 and w2 (b, length, c, p, r, heads), gate without r."""

    w1: Tensor
    w2: Tensor
    gate: Tensor

    @classmethod
    def of(cls, pre: ComposeWeights, post: ComposeWeights) -> Factors:
        """Convert two compositions that have all factors."""

        def joined(name: str) -> Tensor:  # four of (b, heads, length, ...) to (b, length, c, p, ..., heads)
            parts = [getattr(factors, name) for weights in (pre, post) for factors in (weights.query, weights.key)]
            return torch.stack(parts, 0).unflatten(0, (2, 2)).moveaxis((2, 4, 3), (0, 1, -1)).contiguous()

        return cls(joined("w1"), joined("w2"), joined("gate"))

    def at(self, stage: int, start: int, first: int, stop: int) -> tuple[tuple[Tensor, ...], ...]:
        """The factors w1, w2 and gate of a stage: query-wise of positions start..stop, key-wise of first..stop."""
        return tuple(tuple(t[:, begin:stop, stage, p] for t in self) for p, begin in enumerate((start, first)))


def attend_in_chunks(query: Tensor, key: Tensor, value: Tensor, factors: Factors, window: int | None = None) -> Tensor:
    """Take `CHUNK` queries at a time, against the keys from their window's beginning to the chunk's end."""
    output, query = torch.zeros_like(value), query * query.shape[3] ** -0.5
    positions = torch.arange(query.shape[2], device=query.device)
    for start in range(0, query.shape[2], CHUNK):
        stop = min(start + CHUNK, query.shape[2])
        first = 0 if window is None else max(0, start - window)
        pre, post = (factors.at(stage, start, first, stop) for stage in range(2))
        age = positions[start:stop, None] - positions[first:stop]
        scores = compose_chunk(query[:, :, start:stop] @ key[:, :, first:stop].transpose(2, 3), *pre)
        mask = (age >= 0) if window is None else (age >= 0) & (age < window)
        weights = scores.where(mask, torch.finfo(scores.dtype).min).softmax(-1)
        output[:, :, start:stop] = compose_chunk(weights, *post) @ value[:, :, first:stop]
    return output


def compose_chunk(attention: Tensor, query_wise: tuple, key_wise: tuple) -> Tensor:
    """Equation 7 on (b, heads, t, s), by products that broadcast, and sums over heads."""
    composed = attention
    factors = [
        [tensor.transpose(-2, -1).unsqueeze(dim) for tensor in (*w1.unbind(2), *w2.unbind(2), gate)]
        for dim, (w1, w2, gate) in ((-1, query_wise), (-2, key_wise))
    ]  # (b, heads, t, 1) and (b, heads, 1, s)
    rank = len(factors[0]) // 2
    for index in range(rank):
        for rows in factors:
            projected = (attention * rows[index]).sum(1)
            composed = composed + projected.unsqueeze(1) * rows[rank + index]
    for rows in factors:
        composed = composed + attention * rows[-1]
    return composed


class Cache(list):
    """Cached keys and values (b, heads, slots, head_dim) and maps (b, slots, c, m, n), an item per layer."""

    length = 0  # tokens that it has seen


class AuthorsDecoder:
    """A decoder with the weights of a model of the published architecture, for texts of `max_length` tokens."""

    def __init__(self, model: DCFormerForCausalLM, max_length: int):
        self.model, self.config = model, model.config
        positions = torch.arange(max_length, device=model.device)
        self.rotation = model.model.rotary_emb(model.lm_head.weight, positions[None])  # (1, position, head_dim) each
        self.causal = positions[:, None] >= positions
        kinds = [kind == "sliding_attention" for kind in self.config.layer_types]
        self.windows = [self.config.sliding_window if is_sliding else None for is_sliding in kinds]
        self.slots = [min(window or max_length, max_length) for window in self.windows]
        compose = [layer.self_attn.compose for layer in model.model.layers]
        # One product makes the inner channels and the gates, another one w1 and w2.
        self.projections = [
            torch.cat((each.hidden_weight.flatten(1), each.gate_weight.flatten(1)), dim=1).detach() for each in compose
        ]  # (hidden, 4 k + 4 heads)
        self.low_rank = [each.low_rank_weight[0].flatten(2).detach() for each in compose]  # (4, k, 2 r heads)
        self.identity = torch.eye(self.config.num_attention_heads, device=model.device, dtype=model.dtype)

    def new_cache(self, batch: int = 1) -> Cache:
        heads, zeros = self.config.num_attention_heads, self.identity.new_zeros
        states = [[zeros(batch, heads, slots, self.config.head_dim) for _ in range(2)] for slots in self.slots]
        return Cache([*pair, zeros(batch, slots, 2, heads, heads)] for pair, slots in zip(states, self.slots))

    @torch.no_grad()
    def __call__(self, token_ids: Tensor, cache: Cache, logits_to_keep: int = 0) -> Tensor:
        """Read a whole prompt into an empty cache, or one token after what it holds: (b, kept length, vocabulary)."""
        positions = torch.arange(cache.length, cache.length + token_ids.shape[1], device=token_ids.device)
        x = self.model.model.embed_tokens(token_ids)
        for index, layer in enumerate(self.model.model.layers):
            x = x + self.attention(index, layer.input_layernorm(x), positions, cache[index])
            z, mlp = layer.post_attention_layernorm(x), layer.mlp
            x = x + mlp.down_proj(functional.silu(mlp.gate_proj(z)) * mlp.up_proj(z))
        cache.length += token_ids.shape[1]
        return self.model.lm_head(self.model.model.norm(x[:, -logits_to_keep:]))

    def factors(self, index: int, x: Tensor) -> Factors:
        """Equations 5 and 6 for every position of x (b, length, hidden), which the q, k and v projections read too."""
        (batch, length), rank, low_rank = x.shape[:2], self.config.compose_rank, self.low_rank[index]
        heads = self.config.num_attention_heads
        inner, gate = (x @ self.projections[index]).split((4 * low_rank.shape[1], 4 * heads), dim=-1)
        approximation = "tanh" if self.config.compose_activation == "gelu_pytorch_tanh" else "none"
        inner = functional.gelu(inner, approximate=approximation).view(batch, length, 4, -1)
        if length == 1:
            weights = (inner.unsqueeze(-1) * low_rank).sum(-2)
        else:
            weights = torch.einsum("btck,ckd->btcd", inner, low_rank)
        w1, w2 = weights.view(batch, length, 2, 2, 2 * rank, heads).split(rank, dim=-2)
        w1 = functional.rms_norm(w1, w1.shape[-1:], None, self.config.compose_norm_eps)
        return Factors(w1, w2, gate.tanh().view(batch, length, 2, 2, heads))

    def attention(self, index: int, x: Tensor, positions: Tensor, cache: list[Tensor]) -> Tensor:
        """Composed attention of one layer, which writes its states into the cache first."""
        attention, heads, (batch, length) = self.model.model.layers[index].self_attn, len(self.identity), x.shape[:2]
        query, key, value = attention.qkv_proj(x).view(batch, length, 3, heads, -1).unbind(2)
        query, key = attention.q_norm(query), attention.k_norm(key)
        query, key, value = (states.transpose(1, 2) for states in (query, key, value))
        rotation = [part[:, positions] for part in self.rotation]
        cos, sin = (each.unsqueeze(1) for each in rotation)
        query, key = (apply_rotary_pos_emb(states, cos, sin) for states in (query, key))
        factors = self.factors(index, x)
        # W_1 W_2 + diag(gate) of every position, (b, length, c, m, n), of queries and of keys
        maps_of_all = torch.einsum("btcprm,btcprn->btcpmn", factors.w1, factors.w2) + torch.diag_embed(factors.gate)
        query_maps, key_maps = maps_of_all.unbind(3)
        keys, values, maps = cache
        number = min(length, self.slots[index])  # of a prompt longer than the ring, the last ones
        slots = positions[-number:] % self.slots[index]
        keys[:, :, slots], values[:, :, slots] = key[:, :, -number:], value[:, :, -number:]
        maps[:, slots] = (key_maps + self.identity)[:, -number:]
        if length > 1:
            y = attend_in_chunks(query, key, value, factors, self.windows[index])
        else:
            scores = query @ keys.transpose(2, 3) * query.shape[3] ** -0.5  # (b, heads, 1, s)
            pre, post = (maps + query_maps).permute(2, 0, 3, 4, 1).unbind(0)  # (b, m, n, s)
            scores = (scores * pre).sum(1).unsqueeze(2)
            visible = self.causal[positions, : self.slots[index]]
            weights = scores.where(visible, torch.finfo(scores.dtype).min).softmax(-1)
            y = (weights * post).sum(1).unsqueeze(2) @ values
        return attention.o_proj(y.transpose(1, 2).flatten(2))
