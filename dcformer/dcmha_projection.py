"""From hidden states to the factors of a composition: equations 5, 6 and 8, and `dw_proj` of appendix D.

The module takes sizes and switches and nothing of a model, so that every attention can have one.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from .dcmha_factors import ComposeSide, ComposeWeights


class DCFormerCompose(nn.Module):
    """
    Computes, from the attention's input, the weights that compose its heads.

    Each parameter holds four slots (query-wise and key-wise before the softmax, then the same after it), used or not,
    as the authors' checkpoints do. Shapes: `hidden_weight` (hidden, groups, 4, K) with K = 2 rank x heads per group,
    `low_rank_weight` (groups, 4, K, 2 rank, heads per group), `gate_weight` (hidden, groups, 4 x heads per group),
    `static_weight` (2, groups, heads per group, heads per group), before and after the softmax, [in, out].

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

    Raises:
        ValueError: if the groups do not divide the heads, or `rank` is below 1.
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
    ):
        super().__init__()
        if groups < 1 or num_heads % groups != 0:
            raise ValueError(f"groups must divide the {num_heads} heads, got {groups}.")
        if rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank}; switch low_rank off for no low-rank maps.")
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
        if low_rank and dynamic:
            self.hidden_weight = nn.Parameter(torch.empty(hidden_size, groups, 4, inner))
            self.low_rank_weight = nn.Parameter(torch.empty(groups, 4, inner, 2 * rank, heads))
        if gate and dynamic:
            self.gate_weight = nn.Parameter(torch.empty(hidden_size, groups, 4 * heads))
        if static:
            self.static_weight = nn.Parameter(torch.empty(2, groups, heads, heads))

    def forward(self, hidden_states: Tensor) -> tuple[ComposeWeights | None, ComposeWeights | None]:
        """
        Args:
            hidden_states (`Tensor`): (batch, length, hidden), what the q, k and v projections read too.

        Returns:
            The weights before and after the softmax; None for a place that is switched off.
        """
        hidden_weight, low_rank_weight, gate_weight = self.hidden_weight, self.low_rank_weight, self.gate_weight
        parts: list[Tensor] = []  # (group, slot, batch x length, channels, heads per group) each
        if hidden_weight is not None and low_rank_weight is not None:
            parts.extend(self._low_rank(hidden_states, hidden_weight, low_rank_weight))
        if gate_weight is not None:
            parts.append(self._gates(hidden_states, gate_weight))
        sides: dict[int, ComposeSide] = {}  # by slot
        if parts:
            factors = torch.cat(parts, dim=3)
            factors = factors.view(*factors.shape[:2], *hidden_states.shape[:2], *factors.shape[3:])
            factors = factors.permute(1, 2, 0, 5, 3, 4).flatten(2, 3)  # (slot, batch, heads, length, channels)
            sides = {slot: ComposeSide(factors=rows) for slot, rows in zip(self.slots, factors.unbind(0))}
        stages: list[ComposeWeights | None] = [None, None]
        for stage in self.stages:
            static = None if self.static_weight is None else self.static_weight[stage]
            stages[stage] = ComposeWeights(sides.get(2 * stage), sides.get(2 * stage + 1), static, self.groups)
        return stages[0], stages[1]

    def _low_rank(self, hidden_states: Tensor, hidden_weight: Tensor, low_rank_weight: Tensor) -> tuple[Tensor, Tensor]:
        """w1, normalised over heads, and w2 of every slot in use."""
        if len(self.slots) < 4:
            hidden_weight, low_rank_weight = hidden_weight[:, :, self.slots], low_rank_weight[:, self.slots]
        groups, slots, inner, _, heads = low_rank_weight.shape
        hidden = self.act_fn(hidden_states @ hidden_weight.flatten(1))
        hidden = hidden.view(-1, groups * slots, inner).transpose(0, 1)  # (group x slot, batch x length, K)
        # Groups and slots as one dimension give the gradient the parameter's strides, which DDP asks for.
        weights = torch.bmm(hidden, low_rank_weight.flatten(0, 1).flatten(2))
        w1, w2 = weights.view(groups, slots, -1, 2 * self.rank, heads).split(self.rank, dim=3)
        return functional.rms_norm(w1, (heads,), eps=self.norm_eps), w2

    def _gates(self, hidden_states: Tensor, gate_weight: Tensor) -> Tensor:
        """The gate of every slot in use."""
        gates = torch.tanh(hidden_states @ gate_weight.flatten(1)).view(-1, self.groups, 4, 1, self.heads)
        if len(self.slots) < 4:
            gates = gates[:, :, self.slots]
        return gates.permute(1, 2, 0, 3, 4)
