"""The kernel that prepares a decode step, as an operator of torch: `torch.compile` and CUDA graphs take it whole.

It writes the rows of the cache in place and says so; what it returns shares no memory with what it takes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.decode_preparation import JoinedProjection, prepare_step


def run(
    projected: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor | None,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    low_rank_weight: Tensor | None,
    heads: int,
    key_value_heads: int,
    head_dim: int,
    groups: int,
    rank: int,
    has_gate: bool,
    slots: Sequence[int],
    norm_eps: float,
    compose_norm_eps: float,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """[`dcformer.ops.decode_preparation.prepare_step`], with the numbers of its layout one by one."""
    layout = JoinedProjection(heads, key_value_heads, head_dim, groups, rank, has_gate, tuple(slots))
    return prepare_step(
        projected,
        layout,
        keys,
        values,
        positions,
        query_norm=query_norm,
        key_norm=key_norm,
        norm_eps=norm_eps,
        cos=cos,
        sin=sin,
        low_rank_weight=low_rank_weight,
        compose_norm_eps=compose_norm_eps,
        activation=activation,
    )


prepare_decode_step = torch.library.custom_op("dcformer::prepare_decode_step", run, mutates_args=("keys", "values"))


@prepare_decode_step.register_fake
def _shapes(
    projected: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor | None,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    low_rank_weight: Tensor | None,
    heads: int,
    key_value_heads: int,
    head_dim: int,
    groups: int,
    rank: int,
    has_gate: bool,
    slots: Sequence[int],
    norm_eps: float,
    compose_norm_eps: float,
    activation: str,
) -> tuple[Tensor, Tensor]:
    layout = JoinedProjection(heads, key_value_heads, head_dim, groups, rank, has_gate, tuple(slots))
    shape = projected.shape[0], heads, projected.shape[1]
    factors = projected.new_empty(len(layout.query_stages), *shape, layout.channels)
    return projected.new_empty(*shape, head_dim), factors
