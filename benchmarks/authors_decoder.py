"""A decoder that computes as the authors' PyTorch code does; the code is ours, after the paper's equations.

It differs from `dcformer` in how it computes, not in what:
- Its cache is allocated at once, for the longest text (a ring of the window's size in layers that have one), and holds
  for every key two whole maps between heads, identity + W_k1 W_k2 + diag(W_kg), before and after the softmax.
- A decoding step adds the query's map to those of all keys and applies the sum to the whole cache.
- A prompt goes in chunks of queries, as in their code for training.

Axis letters: as in dcformer/bench/authors.py; m and n heads, k inner channels of the projections.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from dcformer import DCFormerConfig, DCFormerForCausalLM
from dcformer.bench.authors import Factors, attend_in_chunks


class LayerCache:
    """Keys, values (b, heads, slots, head_dim) and maps (b, slots, c, m, n) of one layer, allocated at once."""

    def __init__(self, batch: int, slots: int, heads: int, head_dim: int, like: Tensor):
        self.slots = slots
        self.keys, self.values = (like.new_zeros(batch, heads, slots, head_dim) for _ in range(2))
        self.maps = like.new_zeros(batch, slots, 2, heads, heads)

    def write(self, positions: Tensor, key: Tensor, value: Tensor, maps: Tensor) -> None:
        """Store the states of these positions; of a prompt longer than the ring, the last ones."""
        number = min(len(positions), self.slots)
        slots = positions[-number:] % self.slots
        self.keys[:, :, slots] = key[:, :, -number:]
        self.values[:, :, slots] = value[:, :, -number:]
        self.maps[:, slots] = maps[:, -number:]


class Cache(list):
    """The `LayerCache` of every layer, and how many tokens they have seen."""

    length = 0


class AuthorsDecoder:
    """
    A decoder with the weights of `model`, shared except for merged copies of the small projections.

    Args:
        model (`DCFormerForCausalLM`): A model of the published architecture.
        max_length (`int`): Tokens that a cache has room for.
    """

    def __init__(self, model: DCFormerForCausalLM, max_length: int):
        config, weights = model.config, model.state_dict()
        self.embedding = weights["model.embed_tokens.weight"]
        self.norm, self.output = weights["model.norm.weight"], weights["lm_head.weight"]
        self.norm_eps = config.norm_eps
        device = self.embedding.device
        positions = torch.arange(max_length, device=device)
        exponents = torch.arange(0, config.head_dim, 2, device=device) / config.head_dim
        angles = torch.outer(positions.float(), config.rope_parameters["rope_theta"] ** -exponents)
        self.rotation = torch.stack((angles.cos(), angles.sin()))  # (2, position, head_dim / 2)
        age = positions[:, None] - positions
        self.causal = age >= 0
        self.layers = []
        for index, layer_type in enumerate(config.layer_types):
            prefix = f"model.layers.{index}."
            of_layer = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
            window = config.sliding_window if layer_type == "sliding_attention" else None
            mask = self.causal if window is None else self.causal & (age < window)
            self.layers.append(_Layer(config, of_layer, mask, min(window or max_length, max_length)))

    def new_cache(self, batch: int = 1) -> Cache:
        return Cache([layer.attention.new_cache(batch) for layer in self.layers])

    @torch.no_grad()
    def __call__(self, token_ids: Tensor, cache: Cache, logits_to_keep: int = 0) -> Tensor:
        """
        Read a whole prompt into an empty cache, or one token after what the cache holds.

        Args:
            token_ids (`Tensor`): (batch, length).
            cache (`Cache`): From `new_cache`; it is changed.
            logits_to_keep (`int`, defaults to 0): Logits of the last so many positions; 0 for all.

        Returns:
            `Tensor`: (batch, kept length, vocabulary).
        """
        positions = torch.arange(cache.length, cache.length + token_ids.shape[1], device=token_ids.device)
        x = functional.embedding(token_ids, self.embedding)
        for layer, layer_cache in zip(self.layers, cache):
            x = layer(x, positions, self.rotation[:, positions], self.causal[positions], layer_cache)
        cache.length += token_ids.shape[1]
        return functional.linear(_norm(x[:, -logits_to_keep:], self.norm_eps, self.norm), self.output)


class _Layer:
    """Attention and MLP, each after a norm and added to what came in."""

    def __init__(self, config: DCFormerConfig, weights: dict[str, Tensor], mask: Tensor, slots: int):
        self.attention = Attention(config, weights, mask, slots)
        self.norms = weights["input_layernorm.weight"], weights["post_attention_layernorm.weight"]
        self.norm_eps = config.norm_eps
        self.gate, self.up, self.down = (weights[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))

    def __call__(self, x: Tensor, positions: Tensor, rotation: Tensor, causal: Tensor, cache: LayerCache) -> Tensor:
        x = x + self.attention(_norm(x, self.norm_eps, self.norms[0]), positions, rotation, causal, cache)
        z = _norm(x, self.norm_eps, self.norms[1])
        inner = functional.silu(functional.linear(z, self.gate)) * functional.linear(z, self.up)
        return x + functional.linear(inner, self.down)


class Attention:
    """Composed attention of one layer; `weights` by our names of the layer's parameters."""

    def __init__(self, config: DCFormerConfig, weights: dict[str, Tensor], mask: Tensor, slots: int):
        self.heads, self.head_dim, self.rank = config.num_attention_heads, config.head_dim, config.compose_rank
        self.scaling = 1 / math.sqrt(self.head_dim)
        self.mask, self.slots = mask, slots
        self.window = None if config.sliding_window is None or slots > config.sliding_window else slots
        self.qkv, self.output, *self.qk_norms = (
            weights[f"self_attn.{name}.weight"] for name in ("qkv_proj", "o_proj", "q_norm", "k_norm")
        )
        self.qk_norm_eps, self.compose_norm_eps = config.qk_norm_eps, config.compose_norm_eps
        hidden, gate, low_rank = (
            weights[f"self_attn.compose.{name}_weight"] for name in ("hidden", "gate", "low_rank")
        )
        # One product makes the inner channels and the gates, another one w1 and w2.
        self.projection = torch.cat((hidden.flatten(1), gate.flatten(1)), dim=1)  # (hidden, 4 k + 4 heads)
        self.low_rank = low_rank[0].flatten(2)  # (4, k, 2 r heads)
        self.approximation = "tanh" if config.compose_activation == "gelu_pytorch_tanh" else "none"
        self.identity = torch.eye(self.heads, dtype=self.qkv.dtype, device=self.qkv.device)

    def new_cache(self, batch: int) -> LayerCache:
        return LayerCache(batch, self.slots, self.heads, self.head_dim, self.qkv)

    def factors(self, x: Tensor) -> Factors:
        """Equations 5 and 6 for every position of x (b, length, hidden), which the q, k and v projections read too."""
        batch, length = x.shape[:2]
        inner, gate = (x @ self.projection).split((4 * self.low_rank.shape[1], 4 * self.heads), dim=-1)
        inner = functional.gelu(inner, approximate=self.approximation).view(batch, length, 4, -1)
        if length == 1:
            weights = (inner.unsqueeze(-1) * self.low_rank).sum(-2)
        else:
            weights = torch.einsum("btck,ckd->btcd", inner, self.low_rank)
        w1, w2 = weights.view(batch, length, 2, 2, 2 * self.rank, self.heads).split(self.rank, dim=-2)
        return Factors(_norm(w1, self.compose_norm_eps), w2, gate.tanh().view(batch, length, 2, 2, self.heads))

    def __call__(self, x: Tensor, positions: Tensor, rotation: Tensor, causal: Tensor, cache: LayerCache) -> Tensor:
        batch, length = x.shape[:2]
        query, key, value = functional.linear(x, self.qkv).view(batch, length, 3, self.heads, self.head_dim).unbind(2)
        query, key = (_norm(z, self.qk_norm_eps, w) for z, w in zip((query, key), self.qk_norms))
        query, key = (rotate(states, rotation) for states in (query, key))
        query, key, value = (states.transpose(1, 2) for states in (query, key, value))
        factors = self.factors(x)
        query_maps, key_maps = maps_between_heads(factors).unbind(3)  # (b, length, c, m, n)
        cache.write(positions, key, value, key_maps + self.identity)
        if length == 1:
            y = self.attend_one(query, query_maps, cache, causal[:, : self.slots])
        else:
            mask = self.mask[:length, :length]
            y = attend_in_chunks(query, key, value, factors, mask, self.scaling, self.window)
        return functional.linear(y.transpose(1, 2).flatten(2), self.output)

    def attend_one(self, query: Tensor, query_maps: Tensor, cache: LayerCache, visible: Tensor) -> Tensor:
        """One query against the whole cache: (b, heads, 1, head_dim)."""
        scores = query @ cache.keys.transpose(2, 3) * self.scaling  # (b, heads, 1, s)
        pre, post = (cache.maps + query_maps).permute(2, 0, 3, 4, 1).unbind(0)  # (b, m, n, s)
        scores = (scores * pre).sum(1).unsqueeze(2)
        weights = scores.where(visible, torch.finfo(scores.dtype).min).softmax(-1)
        return (weights * post).sum(1).unsqueeze(2) @ cache.values


def maps_between_heads(factors: Factors) -> Tensor:
    """W_1 W_2 + diag(gate) of every position: (b, length, c, p, m, n)."""
    return torch.einsum("btcprm,btcprn->btcpmn", factors.w1, factors.w2) + torch.diag_embed(factors.gate)


def _norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


def rotate(states: Tensor, rotation: Tensor) -> Tensor:
    """Rotary position embedding of (b, length, heads, head_dim) by (2, length, head_dim / 2) cosines and sines."""
    first, second = states.float().chunk(2, dim=-1)
    cos, sin = rotation.unsqueeze(2)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.type_as(states)
