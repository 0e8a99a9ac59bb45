"""The weights of a composition from hidden states (equations 5, 6 and 8), and how a cache stores the key-wise ones.

Key-wise weights depend on the key alone, so decoding reads them from the cache. They are 2 rank + 1 numbers per key,
query head and stage. `pack` appends those before the softmax to the key states, and those after it to the value states,
as extra channels: one query head after the other, padded to a multiple of 8 so that rows stay 16-byte aligned in 16-bit
types. To a Transformers cache and its operations (reorder, crop, repeat, offload) these are slightly wider heads.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.utils.import_utils import is_tracing

from .configuration_dcformer import CACHE_ROW_ALIGNMENT, DCFormerConfig
from .dcmha import compute_fused
from .types_dcformer import ComposeSide, ComposeWeights, Weights


class ComposeProjection(nn.Module):
    """
    Computes from the input of an attention layer the weights that compose its heads.

    As in the authors' checkpoints, each parameter has four slots, used or not: query-wise and key-wise before the
    softmax, then the same after it. Shapes: `hidden_weight` (hidden, groups, 4, K) with K = 2 rank x heads per group,
    `low_rank_weight` (groups, 4, K, 2 rank, heads per group), `gate_weight` (hidden, groups, 4 x heads per group), and
    `static_weight` (2, groups, heads per group, heads per group), before and after the softmax, [in, out]. Key-wise
    slots have a separate `key_hidden_weight` and `key_gate_weight` where `key_size` differs from `hidden_size`. Call
    `reset_parameters` or `load_state_dict` before the first use: parameters are not initialised.

    Args:
        hidden_size (`int`): Channels of the attention's input.
        num_heads (`int`): Query heads.
        rank (`int`, defaults to 2): Rank of the low-rank maps, per group.
        groups (`int`, defaults to 1): Groups of consecutive heads that compose among themselves (section 3.2).
        activation (`str`, defaults to `"gelu"`): Between the two projections of the low-rank maps.
        norm_eps (`float`, defaults to 1e-6): Epsilon of the normalisation of w1 over the heads of a group.
        pre, post (`bool`, defaults to `True`): Compose scores before the softmax, weights after it.
        query_wise, key_wise (`bool`, defaults to `True`): Use query-wise, key-wise weights.
        low_rank, gate (`bool`, defaults to `True`): Use low-rank maps, gates.
        static (`bool`, defaults to `False`): Use an input-independent matrix (Talking-Heads attention).
        key_size (`int`, *optional*): Channels of the sequence that the keys come from. None: `hidden_size`.
        device, dtype (*optional*): Of the parameters. None: torch's defaults.

    Raises:
        ValueError: if the groups do not divide the heads, `rank` is below 1, or there is no such activation or epsilon.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        rank: int = 2,
        groups: int = 1,
        activation: str = "gelu",
        norm_eps: float = 1e-6,
        pre: bool = True,
        post: bool = True,
        query_wise: bool = True,
        key_wise: bool = True,
        low_rank: bool = True,
        gate: bool = True,
        static: bool = False,
        key_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if groups < 1 or num_heads % groups != 0:
            raise ValueError(f"groups must divide the {num_heads} heads, got {groups}.")
        if rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank}; switch low_rank off for no low-rank maps.")
        if activation not in ACT2FN or not 0.0 <= norm_eps < 1.0:
            raise ValueError(f"activation must be in ACT2FN and norm_eps in [0, 1), got {activation!r} and {norm_eps}.")
        self.rank = rank
        self.groups = groups
        self.norm_eps = norm_eps
        self.heads = num_heads // groups  # per group
        self.act_fn = ACT2FN[activation]
        self.stages = [stage for stage, used in enumerate((pre, post)) if used]
        self.sides = [side for side, used in enumerate((query_wise, key_wise)) if used]
        self.slots = [2 * stage + side for stage in self.stages for side in self.sides]
        heads, inner = self.heads, 2 * rank * self.heads
        dynamic = len(self.slots) > 0
        self.hidden_weight = self.low_rank_weight = self.gate_weight = self.static_weight = None
        self.key_hidden_weight = self.key_gate_weight = None
        key_size = hidden_size if key_size is None else key_size
        if key_wise and not query_wise:
            hidden_size = key_size  # then nothing is computed from the query's sequence
        self.needs_key_states = own_key_weights = key_wise and dynamic and key_size != hidden_size

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        if low_rank and dynamic:
            self.hidden_weight = parameter(hidden_size, groups, 4, inner)
            self.low_rank_weight = parameter(groups, 4, inner, 2 * rank, heads)
            if own_key_weights:
                self.key_hidden_weight = parameter(key_size, groups, 4, inner)
        if gate and dynamic:
            self.gate_weight = parameter(hidden_size, groups, 4 * heads)
            if own_key_weights:
                self.key_gate_weight = parameter(key_size, groups, 4 * heads)
        if static:
            self.static_weight = parameter(2, groups, heads, heads)

    @torch.no_grad()
    def reset_parameters(self, identity: bool = False) -> None:
        """
        Initialise the parameters, except those that Transformers has loaded from a file.

        Args:
            identity (`bool`, defaults to `False`): Start with w2, gates and static matrices of zero: nothing is
                composed at first, but all parameters that are zero have a gradient.

        Source: section 4 of the paper, whose standard deviations keep the composition small. The authors' JAX code has
        other ones for gates and static matrices, and their torch code starts from zeros.
        """
        heads = self.heads
        if self.hidden_weight is not None and self.low_rank_weight is not None:
            inner = self.low_rank_weight.shape[2]
            for weight in (self.hidden_weight, self.key_hidden_weight):
                if weight is not None:
                    init.normal_(weight, std=math.sqrt(2 / (weight.shape[0] + inner)))
            std = 0.02 / (math.sqrt(inner) * (heads + self.rank))
            if identity:
                initial = torch.zeros_like(self.low_rank_weight)
                initial[..., : self.rank, :].normal_(std=std)  # w1: if w1 and w2 were zero, neither had a gradient
                init.copy_(self.low_rank_weight, initial)
            else:
                init.normal_(self.low_rank_weight, std=std)
        for weight in (self.gate_weight, self.key_gate_weight):
            if weight is not None:
                init.normal_(weight, std=0.0 if identity else 0.05 * math.sqrt(2) / (weight.shape[0] + heads))
        if self.static_weight is not None:
            init.normal_(self.static_weight, std=0.0 if identity else math.sqrt(1 / heads))

    def forward(
        self, hidden_states: Tensor, key_states: Tensor | None = None, *, fused: bool = True
    ) -> tuple[Weights, Weights]:
        """
        Args:
            hidden_states (`Tensor`): (batch, length, hidden), the input of the q, k and v projections.
            key_states (`Tensor`, *optional*): (batch, key length, key size), the input of the k projection in
                cross-attention, from which the key-wise weights are then computed. None: `hidden_states`.
            fused (`bool`, defaults to `True`): Use a fused kernel if there is one for these inputs.

        Returns:
            The weights before and after the softmax; None for a stage that is switched off.
        """
        if key_states is None and self.needs_key_states:
            raise ValueError("key_states must be given, since key_size differs from hidden_size.")
        if key_states is None:
            factors = self._factors(hidden_states, self.hidden_weight, self.gate_weight, self.slots, fused)
        else:
            key_hidden_weight = self.hidden_weight if self.key_hidden_weight is None else self.key_hidden_weight
            key_gate_weight = self.gate_weight if self.key_gate_weight is None else self.key_gate_weight
            query_slots, key_slots = ([slot for slot in self.slots if slot % 2 == side] for side in (0, 1))
            factors = self._factors(hidden_states, self.hidden_weight, self.gate_weight, query_slots, fused)
            factors |= self._factors(key_states, key_hidden_weight, key_gate_weight, key_slots, fused)
        return self.weights_of(factors)

    def weights_of(self, factors: dict[int, Tensor]) -> tuple[Weights, Weights]:
        """The weights before and after the softmax, from factors (batch, heads, length, channels) by slot."""
        sides = {slot: ComposeSide(factors=each) for slot, each in factors.items()}
        stages: list[Weights] = [None, None]
        maps: Tensor | None = self.static_weight
        if maps is not None and not torch.is_grad_enabled():
            maps = maps.detach()  # views of it would ask for gradients, which torch's `FlopCounterMode` takes amiss
        for stage in self.stages:
            static = None if maps is None else maps[stage]
            stages[stage] = ComposeWeights(sides.get(2 * stage), sides.get(2 * stage + 1), static, self.groups)
        return stages[0], stages[1]

    def _factors(
        self, states: Tensor, hidden_weight: Tensor | None, gate_weight: Tensor | None, slots: list[int], fused: bool
    ) -> dict[int, Tensor]:
        """The factors of these slots, from one sequence."""
        if not slots or hidden_weight is gate_weight is None:
            return {}
        # A slice, since torch would copy a list of indices to the device.
        these = slice(slots[0], slots[-1] + 1, slots[1] - slots[0] if len(slots) > 1 else 1)
        low_rank_weight = None
        if hidden_weight is not None and self.low_rank_weight is not None:
            hidden_weight, low_rank_weight = hidden_weight[:, :, these], self.low_rank_weight[:, these]
        if gate_weight is not None:
            gate_weight = gate_weight.unflatten(2, (4, self.heads))[:, :, these]
        call = self.act_fn, self.norm_eps, states, hidden_weight, low_rank_weight, gate_weight
        factors = compute_fused("factors", states.device, *call) if fused else None
        if factors is None:
            hidden, gates = product(states, hidden_weight), product(states, gate_weight)
            factors = plain_factors(self.act_fn, self.norm_eps, hidden, low_rank_weight, gates)
        return dict(zip(slots, factors.permute(0, 1, 4, 2, 3).unbind(0)))  # (batch, heads, length, channels) each


DCFormerCompose = ComposeProjection  # the name in version 0.1


def product(states: Tensor, weight: Tensor | None) -> Tensor | None:
    """(batch, length, hidden) by (hidden, group, slot, n): (batch, length, group, slot, n)."""
    return None if weight is None else (states @ weight.flatten(1)).unflatten(2, weight.shape[1:])


def plain_factors(
    act_fn: Callable[[Tensor], Tensor], eps: float, hidden: Tensor | None, weight: Tensor | None, gates: Tensor | None
) -> Tensor:
    """
    Compute what [`Backend.factors`] returns, from the products of the states with `hidden_weight` and `gate_weight`,
    (batch, length, groups, slots, K or heads per group), and `low_rank_weight`.
    """
    parts: list[Tensor] = []  # (group, slot, batch, length, channels, heads per group) each
    if hidden is not None and weight is not None:
        batch, length, groups, slots, _ = hidden.shape
        hidden = act_fn(hidden).flatten(2, 3).flatten(0, 1).transpose(0, 1)  # (group x slot, batch x length, K)
        # Groups and slots as one dimension give the gradient the parameter's strides, which DDP asks for.
        maps = torch.bmm(hidden, weight.flatten(0, 1).flatten(2).to(hidden.dtype))
        maps = maps.view(groups, slots, batch, length, *weight.shape[3:])
        w1, w2 = maps.split(weight.shape[3] // 2, dim=4)
        parts += [functional.rms_norm(w1, weight.shape[4:], eps=eps), w2]
    if gates is not None:
        parts.append(torch.tanh(gates).permute(2, 3, 0, 1, 4).unsqueeze(4))
    return torch.cat(parts, dim=4).permute(1, 2, 3, 4, 0, 5).flatten(4)


def make_compose(config: Any, ranks: int = 1) -> ComposeProjection | None:
    """The composition of a layer, or the part of it that one of `ranks` processes computes; None if it is off."""
    if not config.composes_heads:
        return None
    same = ("rank", "activation", "norm_eps", "pre", "post", "low_rank", "gate", "static")
    options = {name: getattr(config, f"compose_{name}") for name in same}
    options |= {"query_wise": config.compose_query, "key_wise": config.compose_key}
    groups, heads = config.compose_groups // ranks, config.num_attention_heads // ranks
    return ComposeProjection(config.hidden_size, heads, groups=groups, **options)


def pack(states: Tensor, side: ComposeSide | None, width: int = 0) -> Tensor:
    """
    Append the key-wise weights of one composition, if there are any, to key or value states.

    Args:
        states (`Tensor`): (batch, key/value heads, key, channels).
        width (`int`, defaults to 0): Smallest number of channels of the result; those that fill it up mean nothing.

    Returns:
        `Tensor`: (batch, key/value heads, key, channels + extra).
    """
    if side is None:
        return functional.pad(states, (0, width - states.shape[-1])) if width > states.shape[-1] else states
    extra, rows = side.factors, side.packed
    if rows is not None and rows.shape[-1] >= width and rows.data_ptr() == states.data_ptr():
        return rows  # in which a backend has put both, unless somebody has replaced the states since
    if extra.shape[1] != states.shape[1]:  # (batch, key/value heads, key, query heads of each x channels)
        extra = extra.unflatten(1, (states.shape[1], -1)).transpose(2, 3).flatten(3)
    extra = extra.to(states.dtype)
    channels = states.shape[-1] + extra.shape[-1]
    padding = max(-extra.shape[-1] % CACHE_ROW_ALIGNMENT, width - channels)
    # Padding is never read: factors once more, where they are enough, spare the launch of a kernel for zeros.
    filler = extra[..., :padding] if padding <= extra.shape[-1] else states.new_zeros(*states.shape[:-1], padding)
    return torch.cat((states, extra, filler), dim=-1)


def unpack(rows: Tensor, channels: int, like: ComposeSide | None, heads: int) -> tuple[Tensor, ComposeSide | None]:
    """Undo `pack`: states of this number of channels, and the key-wise weights of all keys, of the layout of `like`."""
    states, factors = _split_rows(rows, channels, like, heads)
    return states, None if factors is None else ComposeSide(factors=factors)


def _split_rows(rows: Tensor, channels: int, like: ComposeSide | None, heads: int = 0) -> tuple[Tensor, Tensor | None]:
    """The states and the factors (batch, heads, key, factors) that rows hold, for as many heads as `like`."""
    if like is None:
        return rows[..., :channels], None
    kv_groups = (heads or like.factors.shape[1]) // rows.shape[1]
    number = kv_groups * like.factors.shape[-1]
    states, factors, _ = rows.split_with_sizes((channels, number, rows.shape[-1] - channels - number), dim=-1)
    return states, factors.unflatten(3, (kv_groups, -1)).transpose(2, 3).flatten(1, 2) if kv_groups > 1 else factors


def update_cache(
    cache: Any, layer_idx: int, key: Tensor, value: Tensor, pre: Weights, post: Weights
) -> tuple[Tensor, Tensor, Weights, Weights]:
    """
    Store keys and values (batch, key/value heads, new, head_dim) in a Transformers cache with their key-wise weights;
    return keys, values and weights of all cached tokens.
    """
    channels, (key_width, value_width) = key.shape[-1], allocated_widths(cache, layer_idx)
    pre_side, post_side = None if pre is None else pre.key, None if post is None else post.key
    rows = cache.update(pack(key, pre_side, key_width), pack(value, post_side, value_width), layer_idx)
    (key, before), (value, after) = _split_rows(rows[0], channels, pre_side), _split_rows(rows[1], channels, post_side)
    if pre is not None and before is not None:
        pre = ComposeWeights(pre.query, ComposeSide(factors=before), pre.static, pre.groups)
    if post is not None and after is not None:
        post = ComposeWeights(post.query, ComposeSide(factors=after), post.static, post.groups)
    return key, value, pre, post


def allocated_widths(cache: Any, layer_idx: int) -> tuple[int, int]:
    """Channels of the key and value rows that a cache has allocated for a layer; 0 before it allocates them."""
    layer = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    if layer is None or not layer.is_initialized or layer.keys.dim() != 4:
        return 0, 0
    return layer.keys.shape[-1], layer.values.shape[-1]


def widen_cache_rows(cache: Cache, config: DCFormerConfig) -> None:
    """
    Append zeros, which compose nothing, to cached rows without key-wise weights: those of learned prefixes, and of
    static caches that were allocated with `head_dim` channels.

    Raises:
        ValueError: for rows of any other width, which another model has cached.
    """
    head_dim, extra = config.head_dim, config.compose_cache_channels
    expected = head_dim + extra[0], head_dim + extra[1]
    for layer_idx, layer in enumerate(cache.layers):
        has_rows = layer.is_initialized and layer.keys.dim() == 4
        if not has_rows or (layer.keys.shape[-1], layer.values.shape[-1]) == expected:
            continue
        for name, channels in zip(("keys", "values"), extra):
            rows = getattr(layer, name)  # (batch, key/value heads, key, channels)
            width = rows.shape[-1]
            if width in (head_dim + channels, max(expected)) or not config.composes_layer(layer_idx):
                continue
            if width != head_dim:
                raise ValueError(
                    f"The cache holds {name} of {width} channels, but this model's have {head_dim + channels}; it is "
                    "that of another model."
                )
            if is_tracing(rows):
                raise ValueError(
                    f"The cache was allocated with rows of head_dim={head_dim} channels, which no graph can widen; "
                    f"call early_initialization with head_dim={max(expected)}."
                )
            rows = functional.pad(rows, (0, channels))
            if getattr(layer, "is_compileable", False):
                torch._dynamo.mark_static_address(rows)  # as Transformers does for static caches
            setattr(layer, name, rows)
