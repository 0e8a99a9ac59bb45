"""A peer for the benchmarks: DCMHA in PyTorch as the authors' code computes it, written from the paper's equations.

What sets it apart from `dcformer` is how it computes, not what:
- Its cache is allocated at once, for the longest text (a ring of the window's size in layers that have one), and holds
  for every key two whole maps between heads, identity + W_k1 W_k2 + diag(W_kg), before and after the softmax.
- A decoding step adds the query's map to those of all keys and applies the sum, always to the whole cache.
- A prompt has the scores of all pairs and heads at once, and each rank of equation 7 is two einsums over them
  (`compose_pairs`), as their code for inference; or it goes in chunks of queries, by products that broadcast and sums
  (`compose_chunk`), as their code for training, which is several times faster.

It runs any model of the published DCFormer architecture with that model's weights. Windows hold as many keys as ours;
in a prompt their code has one more.

Axis letters: b batch, t query, s key, c stage (before and after the softmax), p side (query and key), r rank, m and n
heads, k inner channels of the projections.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..configuration_dcformer import DCFormerConfig
from ..dcmha import ComposeWeights
from ..modeling_dcformer import DCFormerForCausalLM


CHUNK = 128
# Fields that must have these values: the architecture of the published DCFormer models.
_ARCHITECTURE = {
    "mlp_type": "gated",
    "mlp_gate_dim": None,
    "norm_type": "rms_norm",
    "hidden_act": "silu",
    "parallel_residual": False,
    "attention_bias": False,
    "mlp_bias": False,
    "position_embedding_type": "rope",
    "compose_groups": 1,
    "compose_static": False,
    **dict.fromkeys(("compose_pre", "compose_post", "compose_query", "compose_key"), True),
    **dict.fromkeys(("compose_low_rank", "compose_gate", "qk_norm"), True),
}


class Factors(NamedTuple):
    """What equations 5 and 6 make of the hidden states: w1 and w2 (b, length, c, p, r, heads), gate without r."""

    w1: Tensor
    w2: Tensor
    gate: Tensor

    @classmethod
    def of(cls, pre: ComposeWeights, post: ComposeWeights) -> "Factors":
        """The factors of two compositions that have all of them, as a layer of the authors' would hold them."""
        sides = [[stage.query, stage.key] for stage in (pre, post)]

        def joined(name: str) -> Tensor:  # from (b, heads, length, ...)
            return torch.stack([torch.stack([getattr(side, name) for side in stage], 0) for stage in sides], 0)

        w1, w2 = (joined(name).permute(2, 4, 0, 1, 5, 3).contiguous() for name in ("w1", "w2"))
        return cls(w1, w2, joined("gate").permute(2, 4, 0, 1, 3).contiguous())

    def side(self, stage: int, side: int, first: int = 0, last: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """w1, w2 (b, length, r, heads) and gate (b, length, heads) of one stage and side, at first..last."""
        w1, w2, gate = (tensor[:, first:last, stage, side] for tensor in self)
        return w1, w2, gate

    def maps(self) -> Tensor:
        """The same as maps between heads, W_1 W_2 + diag(gate): (b, length, c, p, m, n)."""
        return torch.einsum("btcprm,btcprn->btcpmn", self.w1, self.w2) + torch.diag_embed(self.gate)


class LayerCache:
    """Keys, values (b, heads, slots, channels) and maps (b, slots, c, m, n) of one layer, allocated at once."""

    def __init__(self, batch: int, slots: int, heads: int, head_dim: int, like: Tensor):
        self.slots = slots
        self.keys, self.values = (like.new_zeros(batch, heads, slots, head_dim) for _ in range(2))
        self.maps = like.new_zeros(batch, slots, 2, heads, heads)

    def write(self, positions: Tensor, key: Tensor, value: Tensor, maps: Tensor) -> None:
        """Store what stands at these positions, of a prompt longer than the ring the last ones."""
        kept = positions[-self.slots :]
        slots, number = kept % self.slots, len(kept)
        self.keys[:, :, slots] = key[:, :, -number:]
        self.values[:, :, slots] = value[:, :, -number:]
        self.maps[:, slots] = maps[:, -number:]


class Cache:
    """The caches of all layers, and how many tokens they have seen."""

    def __init__(self, layers: list[LayerCache]):
        self.layers = layers
        self.length = 0


class AuthorsDecoder:
    """
    A decoder with the weights of `model`, which it shares but for merged copies of the small projections.

    Args:
        model (`DCFormerForCausalLM`): Of the published DCFormer architecture.
        max_length (`int`): Tokens that a cache has room for.
        chunk (`int`, *optional*): Queries of a prompt computed at once. None: all of them, as the authors' inference.

    Raises:
        ValueError: if the model has another architecture.
    """

    def __init__(self, model: DCFormerForCausalLM, max_length: int, chunk: int | None = None):
        config = model.config
        for name, value in _ARCHITECTURE.items():
            if getattr(config, name) != value:
                raise ValueError(f"The authors' formulation needs {name}={value!r}, got {getattr(config, name)!r}.")
        weights = model.state_dict()
        self.embedding = weights["model.embed_tokens.weight"]
        self.norm, self.output = weights["model.norm.weight"], weights["lm_head.weight"]
        self.norm_eps = config.norm_eps
        self.max_length = max_length
        device = self.embedding.device
        positions = torch.arange(max_length, device=device)
        exponents = torch.arange(0, config.head_dim, 2, device=device) / config.head_dim
        angles = torch.outer(positions.float(), config.rope_parameters["rope_theta"] ** -exponents)
        self.rotation = torch.stack((angles.cos(), angles.sin()))  # (2, position, channels / 2)
        age = positions[:, None] - positions
        self.causal = age >= 0
        in_window = self.causal if config.sliding_window is None else self.causal & (age < config.sliding_window)
        self.layers = []
        for index, layer_type in enumerate(config.layer_types):
            prefix = f"model.layers.{index}."
            own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
            window = config.sliding_window if layer_type == "sliding_attention" else None
            mask = self.causal if window is None else in_window
            self.layers.append(_Layer(config, own, mask, min(window or max_length, max_length), chunk))

    def new_cache(self, batch: int = 1) -> Cache:
        return Cache([layer.attention.new_cache(batch) for layer in self.layers])

    @torch.no_grad()
    def __call__(self, token_ids: Tensor, cache: Cache, logits_to_keep: int = 0) -> Tensor:
        """
        Read a whole prompt into an empty cache, or one token after what the cache holds.

        Args:
            token_ids (`Tensor`): (batch, length); length 1 unless the cache is empty.
            cache (`Cache`): From `new_cache`; changed in place.
            logits_to_keep (`int`, defaults to 0): Logits of the last so many positions; 0 for all.

        Returns:
            `Tensor`: (batch, kept length, vocabulary).

        Raises:
            ValueError: if several tokens follow others, or there is no room left.
        """
        length = token_ids.shape[1]
        if cache.length > 0 and length > 1:
            raise ValueError(f"Only single tokens can follow the {cache.length} in the cache, got {length}.")
        if cache.length + length > self.max_length:
            raise ValueError(f"{length} tokens after {cache.length} are more than the cache's {self.max_length}.")
        positions = torch.arange(cache.length, cache.length + length, device=token_ids.device)
        rotation = self.rotation[:, positions]
        causal = self.causal[positions]
        x = functional.embedding(token_ids, self.embedding)
        for layer, layer_cache in zip(self.layers, cache.layers):
            x = layer(x, positions, rotation, causal, layer_cache)
        cache.length += length
        return functional.linear(rms_norm(x[:, -logits_to_keep:], self.norm_eps, self.norm), self.output)


class _Layer:
    """Attention and MLP, each after a norm and added to what came in."""

    def __init__(self, config: DCFormerConfig, weights: dict[str, Tensor], mask: Tensor, slots: int, chunk: int | None):
        self.attention = Attention(config, weights, mask, slots, chunk)
        self.norms = weights["input_layernorm.weight"], weights["post_attention_layernorm.weight"]
        self.norm_eps = config.norm_eps
        self.gate, self.up, self.down = (weights[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))

    def __call__(self, x: Tensor, positions: Tensor, rotation: Tensor, causal: Tensor, cache: LayerCache) -> Tensor:
        x = x + self.attention(rms_norm(x, self.norm_eps, self.norms[0]), positions, rotation, causal, cache)
        z = rms_norm(x, self.norm_eps, self.norms[1])
        inner = functional.silu(functional.linear(z, self.gate)) * functional.linear(z, self.up)
        return x + functional.linear(inner, self.down)


class Attention:
    """Composed attention of one layer; `weights` by our names of the layer's parameters."""

    def __init__(self, config: DCFormerConfig, weights: dict[str, Tensor], mask: Tensor, slots: int, chunk: int | None):
        self.heads, self.head_dim, self.rank = config.num_attention_heads, config.head_dim, config.compose_rank
        self.scaling = 1 / math.sqrt(self.head_dim)
        self.mask, self.slots, self.chunk = mask, slots, chunk
        self.window = None if config.sliding_window is None or slots > config.sliding_window else slots
        own = {name.removeprefix("self_attn."): value for name, value in weights.items()}
        self.qkv, self.output = own["qkv_proj.weight"], own["o_proj.weight"]
        self.qk_norms, self.qk_norm_eps = (own["q_norm.weight"], own["k_norm.weight"]), config.qk_norm_eps
        self.compose_norm_eps = config.compose_norm_eps
        hidden, gate, low_rank = (own[f"compose.{name}_weight"] for name in ("hidden", "gate", "low_rank"))
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
        return Factors(rms_norm(w1, self.compose_norm_eps), w2, gate.tanh().view(batch, length, 2, 2, self.heads))

    def __call__(self, x: Tensor, positions: Tensor, rotation: Tensor, causal: Tensor, cache: LayerCache) -> Tensor:
        batch, length = x.shape[:2]
        projected = functional.linear(x, self.qkv).view(batch, length, 3, self.heads, self.head_dim)
        query, key, value = projected.unbind(2)
        query, key = (rms_norm(z, self.qk_norm_eps, w) for z, w in zip((query, key), self.qk_norms))
        query, key = (rotate(states, rotation) for states in (query, key))
        query, key, value = (states.transpose(1, 2) for states in (query, key, value))
        factors = self.factors(x)
        query_maps, key_maps = factors.maps().unbind(3)  # (b, length, c, m, n)
        cache.write(positions, key, value, key_maps + self.identity)
        if length == 1:
            y = self.attend_one(query, query_maps, cache, causal[:, : self.slots])
        else:
            y = self.attend(query, key, value, factors)
        return functional.linear(y.transpose(1, 2).flatten(2), self.output)

    def attend_one(self, query: Tensor, query_maps: Tensor, cache: LayerCache, visible: Tensor) -> Tensor:
        """One query against the whole cache: (b, heads, 1, channels)."""
        scores = query @ cache.keys.transpose(2, 3) * self.scaling  # (b, heads, 1, s)
        pre, post = (cache.maps + query_maps).permute(2, 0, 3, 4, 1).unbind(0)  # (b, m, n, s)
        scores = (scores * pre).sum(1).unsqueeze(2)
        weights = scores.where(visible, torch.finfo(scores.dtype).min).softmax(-1)
        return (weights * post).sum(1).unsqueeze(2) @ cache.values

    def attend(self, query: Tensor, key: Tensor, value: Tensor, factors: Factors) -> Tensor:
        """A prompt's queries against its keys, all at once or in chunks: (b, heads, t, channels)."""
        length = query.shape[2]
        mask = self.mask[:length, :length]
        if self.chunk is None:
            return attend_pairs(query, key, value, factors, mask, self.scaling)
        return attend_in_chunks(query, key, value, factors, mask, self.scaling, self.window, self.chunk)


def attend_pairs(query: Tensor, key: Tensor, value: Tensor, factors: Factors, mask: Tensor, scaling: float) -> Tensor:
    """All pairs of queries and keys at once; `mask` is (t, s), True for visible."""
    scores = query @ key.transpose(2, 3) * scaling
    scores = compose_pairs(scores, *(factors.side(0, side) for side in range(2)))
    weights = scores.where(mask, torch.finfo(scores.dtype).min).softmax(-1)
    return compose_pairs(weights, *(factors.side(1, side) for side in range(2))) @ value


def attend_in_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    factors: Factors,
    mask: Tensor,
    scaling: float,
    window: int | None = None,
    chunk: int = CHUNK,
    attend: Callable[..., Tensor] | None = None,
) -> Tensor:
    """
    `chunk` queries at a time against the keys up to the chunk's end, from the window's beginning on; each by `attend`,
    which is `attend_chunk` or what torch.compile makes of it.
    """
    attend = attend or attend_chunk
    length = query.shape[2]
    output = torch.zeros_like(value)
    query = query * scaling
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        first = 0 if window is None else max(0, start - window)
        pre, post = ((factors.side(stage, 0, start, stop), factors.side(stage, 1, first, stop)) for stage in range(2))
        keys, values = (states[:, :, first:stop] for states in (key, value))
        output[:, :, start:stop] = attend(
            query[:, :, start:stop], keys, values, pre, post, mask[start:stop, first:stop]
        )
    return output


def attend_chunk(query: Tensor, key: Tensor, value: Tensor, pre: tuple, post: tuple, mask: Tensor) -> Tensor:
    """Queries that are scaled already against some keys; `pre` and `post` are the factors of both sides."""
    scores = compose_chunk(query @ key.transpose(2, 3), *pre)
    scores = scores.where(mask, torch.finfo(scores.dtype).min)
    return compose_chunk(scores.softmax(-1), *post) @ value


def compose_pairs(attention: Tensor, query_side: tuple, key_side: tuple) -> Tensor:
    """Equation 7 on (b, heads, t, s), each rank of each side as one einsum to the rank and one back to the heads."""
    composed = attention
    for axis, (w1, w2, _) in zip("ts", (query_side, key_side)):
        for w1_of_rank, w2_of_rank in zip(w1.unbind(2), w2.unbind(2)):
            projected = torch.einsum(f"bmts,b{axis}m->bts", attention, w1_of_rank)
            composed = composed + torch.einsum(f"bts,b{axis}m->bmts", projected, w2_of_rank)
    for axis, (_, _, gate) in zip("ts", (query_side, key_side)):
        composed = composed + torch.einsum(f"bmts,b{axis}m->bmts", attention, gate)
    return composed


def compose_chunk(attention: Tensor, query_side: tuple, key_side: tuple) -> Tensor:
    """The same by products that broadcast over the other side's positions, and sums over the heads."""
    composed = attention
    sides = [
        [tensor.transpose(-2, -1).unsqueeze(dim) for tensor in (*w1.unbind(2), *w2.unbind(2), gate)]
        for dim, (w1, w2, gate) in ((-1, query_side), (-2, key_side))
    ]  # (b, heads, t, 1) and (b, heads, 1, s)
    rank = len(sides[0]) // 2
    for index in range(rank):
        for side in sides:
            projected = (attention * side[index]).sum(1)
            composed = composed + projected.unsqueeze(1) * side[rank + index]
    for side in sides:
        composed = composed + attention * side[-1]
    return composed


def rms_norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps), times the weight, over the last axis."""
    normalized = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return normalized if weight is None else normalized * weight


def rotate(states: Tensor, rotation: Tensor) -> Tensor:
    """Rotary position embedding of (b, length, heads, channels) by (2, length, channels / 2) cosines and sines."""
    first, second = states.float().chunk(2, dim=-1)
    cos, sin = rotation.unsqueeze(2)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.type_as(states)
