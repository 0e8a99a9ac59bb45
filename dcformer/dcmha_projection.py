"""From hidden states to the factors of a composition: equations 5, 6 and 8, and `dw_proj` of appendix D.

`DCFormerCompose` takes sizes and switches and nothing of a model, so that every attention can have one.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import initialization as init
from transformers.activations import ACT2FN

from .dcmha_factors import ComposeSide, ComposeWeights


def fused_projection(
    attention: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor] | None:
    """
    All that an attention layer projects, at once. A package of kernels puts its own function in place of this one.

    Args:
        attention (`DCFormerAttention`): The layer.
        hidden_states (`Tensor`): (batch, length, hidden).
        position_embeddings (`tuple`, *optional*): Cosine and sine, (batch or 1, length, rotary channels).

    Returns:
        Queries, keys and values, normalised and rotated, (batch, length, all heads x channels), and the factors of the
        composition's slots, (slots, batch, heads, length, channels). None, as this one always says, where the layer is
        to compute them itself.
    """
    return None


class DCFormerCompose(nn.Module):
    """
    Computes, from the attention's input, the weights that compose its heads.

    Each parameter holds four slots (query-wise and key-wise before the softmax, then the same after it), used or not,
    as the authors' checkpoints do. Shapes: `hidden_weight` (hidden, groups, 4, K) with K = 2 rank x heads per group,
    `low_rank_weight` (groups, 4, K, 2 rank, heads per group), `gate_weight` (hidden, groups, 4 x heads per group),
    `static_weight` (2, groups, heads per group, heads per group), before and after the softmax, [in, out]. Only if
    `key_size` differs from `hidden_size`, the key-wise slots have `key_hidden_weight` (key size, groups, 4, K) and
    `key_gate_weight` (key size, groups, 4 x heads per group) of their own. They are not initialised before
    `reset_parameters` or `load_state_dict`.

    Args:
        hidden_size (`int`): Channels of the attention's input.
        num_heads (`int`): Query heads.
        rank (`int`, defaults to 2): Rank of the low-rank maps, per group.
        groups (`int`, defaults to 1): Groups of consecutive heads that compose among themselves (section 3.2).
        activation (`str`, defaults to `"gelu"`): Between the two projections of the low-rank maps.
        norm_eps (`float`, defaults to 1e-6): Epsilon of the normalisation of w1 over the heads of a group.
        pre, post (`bool`, defaults to `True`): Compose the scores before the softmax, the weights after it.
        query_wise, key_wise (`bool`, defaults to `True`): From the query's side, from the key's side.
        low_rank, gate (`bool`, defaults to `True`): By low-rank maps, by gates.
        static (`bool`, defaults to `False`): Also by a matrix that depends on no input (Talking-Heads attention).
        key_size (`int`, *optional*): Channels of the sequence that the keys come from. None: `hidden_size`.
        device, dtype (*optional*): Of the parameters. None: torch's defaults.

    Raises:
        ValueError: if the groups do not divide the heads, `rank` is below 1, or there is no such activation.
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
        if activation not in ACT2FN:
            raise ValueError(f"activation must be one of {', '.join(sorted(ACT2FN))}, got {activation!r}.")
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
        Draw the parameters. Those that Transformers has loaded from a file stay as they are.

        Args:
            identity (`bool`, defaults to `False`): Start with w2, gates and static matrices of zero: nothing is
                composed at first, for attention that was trained without, and every parameter that is zero has a
                gradient.

        Source: section 4 of the paper, whose deviations keep the composition small. The authors' JAX code draws gates
        with sqrt(2 / (hidden + heads)) * 0.005 and static matrices with a tenth of Xavier's deviation, their torch code
        starts from zeros; the paper wins.
        """
        heads = self.heads
        if self.hidden_weight is not None and self.low_rank_weight is not None:
            inner = self.low_rank_weight.shape[2]
            for weight in (self.hidden_weight, self.key_hidden_weight):
                if weight is not None:
                    init.normal_(weight, std=math.sqrt(2 / (weight.shape[0] + inner)))
            std = 0.02 / (math.sqrt(inner) * (heads + self.rank))
            if identity:
                drawn = torch.zeros_like(self.low_rank_weight)
                drawn[..., : self.rank, :].normal_(std=std)  # w1; with both at zero neither had a gradient
                init.copy_(self.low_rank_weight, drawn)
            else:
                init.normal_(self.low_rank_weight, std=std)
        for weight in (self.gate_weight, self.key_gate_weight):
            if weight is not None:
                init.normal_(weight, std=0.0 if identity else 0.05 * math.sqrt(2) / (weight.shape[0] + heads))
        if self.static_weight is not None:
            init.normal_(self.static_weight, std=0.0 if identity else math.sqrt(1 / heads))

    def forward(
        self, hidden_states: Tensor, key_states: Tensor | None = None
    ) -> tuple[ComposeWeights | None, ComposeWeights | None]:
        """
        Args:
            hidden_states (`Tensor`): (batch, length, hidden), what the q, k and v projections read too.
            key_states (`Tensor`, *optional*): (batch, key length, key size), what the k projection reads if it is
                another sequence; the key-wise weights are then its own. None: `hidden_states`.

        Returns:
            The weights before and after the softmax; None for a place that is switched off.

        Raises:
            ValueError: if `key_states` are not given although they have another size.
        """
        if key_states is None:
            if self.needs_key_states:
                raise ValueError("key_states must be given, since the keys come from a sequence of another size.")
            sides = self._sides(hidden_states, self.hidden_weight, self.gate_weight, self.slots)
        else:
            key_hidden_weight = self.hidden_weight if self.key_hidden_weight is None else self.key_hidden_weight
            key_gate_weight = self.gate_weight if self.key_gate_weight is None else self.key_gate_weight
            query_slots, key_slots = ([slot for slot in self.slots if slot % 2 == side] for side in (0, 1))
            sides = self._sides(hidden_states, self.hidden_weight, self.gate_weight, query_slots)
            sides |= self._sides(key_states, key_hidden_weight, key_gate_weight, key_slots)
        return self.stages_of(sides)

    def stages_of(self, sides: dict[int, ComposeSide]) -> tuple[ComposeWeights | None, ComposeWeights | None]:
        """The weights before and after the softmax, from what stands in each slot."""
        stages: list[ComposeWeights | None] = [None, None]
        for stage in self.stages:
            static = None if self.static_weight is None else self.static_weight[stage]
            stages[stage] = ComposeWeights(sides.get(2 * stage), sides.get(2 * stage + 1), static, self.groups)
        return stages[0], stages[1]

    def _sides(
        self, states: Tensor, hidden_weight: Tensor | None, gate_weight: Tensor | None, slots: list[int]
    ) -> dict[int, ComposeSide]:
        """What one sequence contributes to these slots, by slot."""
        parts: list[Tensor] = []  # (group, slot, batch x length, channels, heads per group) each
        if slots and hidden_weight is not None and self.low_rank_weight is not None:
            parts.extend(self._low_rank(states, hidden_weight, self.low_rank_weight, slots))
        if slots and gate_weight is not None:
            parts.append(self._gates(states, gate_weight, slots))
        if not parts:
            return {}
        factors = torch.cat(parts, dim=3)
        factors = factors.view(*factors.shape[:2], *states.shape[:2], *factors.shape[3:])
        factors = factors.permute(1, 2, 0, 5, 3, 4).flatten(2, 3)  # (slot, batch, heads, length, channels)
        return {slot: ComposeSide(factors=rows) for slot, rows in zip(slots, factors.unbind(0))}

    def _low_rank(
        self, states: Tensor, hidden_weight: Tensor, low_rank_weight: Tensor, slots: list[int]
    ) -> tuple[Tensor, Tensor]:
        """w1, normalised over heads, and w2 of these slots."""
        if len(slots) < 4:
            hidden_weight, low_rank_weight = hidden_weight[:, :, slots], low_rank_weight[:, slots]
        groups, number, inner, _, heads = low_rank_weight.shape
        hidden = self.act_fn(states @ hidden_weight.flatten(1))
        hidden = hidden.view(-1, groups * number, inner).transpose(0, 1)  # (group x slot, batch x length, K)
        # Groups and slots as one dimension give the gradient the parameter's strides, which DDP asks for.
        weights = torch.bmm(hidden, low_rank_weight.flatten(0, 1).flatten(2))
        w1, w2 = weights.view(groups, number, -1, 2 * self.rank, heads).split(self.rank, dim=3)
        return functional.rms_norm(w1, (heads,), eps=self.norm_eps), w2

    def _gates(self, states: Tensor, gate_weight: Tensor, slots: list[int]) -> Tensor:
        """The gates of these slots."""
        gates = torch.tanh(states @ gate_weight.flatten(1)).view(-1, self.groups, 4, 1, self.heads)
        if len(slots) < 4:
            gates = gates[:, :, slots]
        return gates.permute(1, 2, 0, 3, 4)


def make_compose(config: Any, ranks: int = 1) -> DCFormerCompose | None:
    """
    What composes the heads of one layer, by the `compose_*` fields of its configuration; None if all are off.

    Args:
        config (`DCFormerConfig`): The model.
        ranks (`int`, defaults to 1): Processes that each compose as many of the groups.
    """
    if not config.composes_heads:
        return None
    return DCFormerCompose(
        config.hidden_size,
        config.num_attention_heads // ranks,
        rank=config.compose_rank,
        groups=config.compose_groups // ranks,
        activation=config.compose_activation,
        norm_eps=config.compose_norm_eps,
        pre=config.compose_pre,
        post=config.compose_post,
        query_wise=config.compose_query,
        key_wise=config.compose_key,
        low_rank=config.compose_low_rank,
        gate=config.compose_gate,
        static=config.compose_static,
    )
