"""Whether the arguments of a decode step fit together, as far as shapes and types tell without asking the device."""

import torch
from torch import Tensor

from .arguments import Composition, Mask


MAX_QUERIES = 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    key_lengths: Tensor | None,
    block_table: Tensor | None,
    block_size: int | None,
    ring_size: int | None,
) -> None:
    """Raise ValueError if the shapes and types of one call do not fit together."""
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise ValueError(
            "query, key and value must have four dimensions, got shapes "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}."
        )
    batch, heads, queries, channels = query.shape
    if not 1 <= queries <= MAX_QUERIES:
        raise ValueError(f"Decoding takes 1 to {MAX_QUERIES} queries, got {queries}.")
    for name, states in (("query", query), ("key", key), ("value", value)):
        if states.dtype not in DTYPES:
            raise ValueError(f"{name} must be float32, bfloat16 or float16, got {states.dtype}.")
    if key.shape[3] != channels or value.shape[:3] != key.shape[:3] or key.shape[1] == 0 or heads % key.shape[1] != 0:
        raise ValueError(
            "key must share query's channels and its heads divide query's, and value must share key's sizes, got "
            f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}."
        )
    for name, states in (("key", key), ("value", value)):
        if states.shape[3] > 1 and states.stride(3) != 1:
            raise ValueError(f"The channels of {name} must lie side by side, got strides {states.stride()}.")
    if mask.sequence_ids is not None:
        raise ValueError("Decoding knows no packed sequences; give a mask without sequence_ids.")
    if mask.sliding_window is not None and mask.sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {mask.sliding_window}; use None for all keys.")
    if block_table is None:
        if block_size is not None:
            raise ValueError(f"block_size {block_size} is of a paged cache; give its block_table too.")
        if key.shape[0] != batch:
            raise ValueError(f"key must have query's {batch} rows, got {key.shape[0]}.")
        slots = key.shape[2]
    else:
        if block_table.dim() != 2 or block_table.shape[0] != batch or block_table.stride(1) != 1:
            raise ValueError(
                f"block_table must be (batch, blocks of a row) for a batch of {batch}, contiguous in each row, got "
                f"shape {tuple(block_table.shape)}, strides {block_table.stride()}."
            )
        if block_size is not None and block_size != key.shape[2]:
            raise ValueError(f"block_size is {block_size}, but the blocks of key hold {key.shape[2]} keys.")
        slots = block_table.shape[1] * key.shape[2]
    if key_lengths is not None and key_lengths.shape != (batch,):
        raise ValueError(f"key_lengths must be (batch,) = ({batch},), got {tuple(key_lengths.shape)}.")
    if ring_size is not None:
        if key_lengths is None:
            raise ValueError("A ring needs key_lengths, which say where its newest key is.")
        if not 1 <= ring_size <= slots:
            raise ValueError(f"ring_size must be from 1 to the {slots} places of a row, got {ring_size}.")
        slots = ring_size
    if mask.padding is not None and (
        mask.padding.dtype != torch.bool
        or mask.padding.dim() != 2
        or mask.padding.shape[0] not in (1, batch)
        or mask.padding.shape[1] < slots
    ):
        raise ValueError(
            f"padding must be boolean (batch or 1, keys) for a batch of {batch} and {slots} keys, got "
            f"{mask.padding.dtype} {tuple(mask.padding.shape)}."
        )
    if mask.visible is not None and (
        mask.visible.dim() != 4
        or mask.visible.shape[0] not in (1, batch)
        or mask.visible.shape[1:3] != (1, queries)
        or mask.visible.shape[3] < slots
    ):
        raise ValueError(
            f"visible must be (batch or 1, 1, queries, keys) for a batch of {batch}, {queries} queries and {slots} "
            f"keys, got {tuple(mask.visible.shape)}."
        )


def check_composition(name: str, stage: Composition, query: Tensor, key: Tensor, is_paged: bool) -> None:
    """Raise ValueError if a composition does not fit the heads, queries and keys."""
    batch, heads, queries, _ = query.shape
    if stage.groups < 1 or heads % stage.groups != 0:
        raise ValueError(f"{name}.groups must divide the {heads} heads, got {stage.groups}.")
    per_group = heads // stage.groups
    if stage.static is not None and stage.static.shape != (stage.groups, per_group, per_group):
        raise ValueError(
            f"{name}.static must be (groups, heads per group, heads per group) = "
            f"{(stage.groups, per_group, per_group)}, got {tuple(stage.static.shape)}."
        )
    if stage.query is not None and stage.query.shape[:-1] != (batch, heads, queries):
        raise ValueError(
            f"{name}.query must be (batch, heads, queries, channels) for (batch, heads, queries) = "
            f"{(batch, heads, queries)}, got {tuple(stage.query.shape)}."
        )
    if stage.key is not None:
        by_head, by_row = (key.shape[0], heads, key.shape[2]), tuple(key.shape[:3])
        served = heads // key.shape[1]
        shape = tuple(stage.key.shape)
        if stage.key.dim() != 4 or not (
            (shape[:3] == by_head and not is_paged) or (shape[:3] == by_row and shape[3] % served == 0)
        ):
            wanted = f"{by_row} and channels of the {served} heads that each of key's serves"
            wanted = wanted if is_paged else f"{by_head} and channels of a head, or {wanted}"
            raise ValueError(f"{name}.key must be {wanted}, got {shape}.")
