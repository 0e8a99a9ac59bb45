"""
Decoding with composed attention heads: 1 to 8 queries a row against a cache, as four or five Triton kernels.

1. scores: a program reads keys of one key/value head once, for all queries of all heads that it serves;
2. compose: scores of all heads of a group before the softmax, the mask, and maximum and sum of each part of the keys;
3. compose: joins the parts, so that weights are normalised before heads are mixed, and composes them;
4. values: as 1, with the values;
5. a sum over the parts of 4, where there are several.

Scores and weights of all heads, (batch, heads, queries, keys in sight) in float32, are kept between the kernels: a
small fraction of what the keys and values take. The composition after the softmax has a kernel of its own, because done
inside 4 every head's program would read the factors and scores of all heads of its group.

Nothing waits for the device: the grids are sized by the keys that a row can hold, and programs share out those that it
does hold. Results are the same bit by bit from run to run.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .arguments import LOG2_E, Composition, Mask, dense_mask
from .config import tuned
from .decode_checks import check_call, check_composition
from .decode_kernels import compose_kernel, join_kernel, scores_kernel, values_kernel
from .examples import random_operands


# From so many rows a product on tensor cores, of 16 rows at least, takes fewer registers than a sum for each row.
_ROWS_FOR_DOT = 5
# Factors that a program of the composition holds; more did not fit into registers.
_FACTORS_AT_ONCE = 2**14


class DecodeConfig(NamedTuple):
    """
    How the kernels of one decode step share the work.

    Args:
        score_keys, compose_keys, value_keys (`int`): Keys that a program holds at once; powers of two, 16 at least.
            The composition takes fewer where many heads or ranks would not fit into registers.
        score_warps, compose_warps, value_warps (`int`): Warps of a program; powers of two.
        programs (`int`): Programs that a kernel should have before its keys are no longer split further; some per
            multiprocessor of the device.
        max_splits (`int`): Parts into which the keys of a row are split at most.
    """

    score_keys: int = 32
    score_warps: int = 4
    compose_keys: int = 32
    compose_warps: int = 8
    value_keys: int = 32
    value_warps: int = 4
    programs: int = 528
    max_splits: int = 128


# What `dcformer bench tune` tries, the default first.
KERNELS = {
    "decode": [
        DecodeConfig(*sizes)._asdict()
        for sizes in (
            (),
            (16, 4, 32, 8, 16, 4),
            (32, 2, 32, 8, 32, 2),
            (64, 4, 32, 8, 64, 4),
            (32, 4, 16, 4, 32, 4),
            (32, 4, 32, 8, 32, 4, 264),
            (32, 4, 32, 8, 32, 4, 1056),
        )
    ]
}


class _Rows(NamedTuple):
    """Where keys lie, and how many there can be: what all kernels share."""

    batch: int
    heads: int
    queries: int
    key_heads: int
    slots: int
    span: int
    offset: int


def composed_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: Composition | None,
    post: Composition | None,
    *,
    scaling: float,
    mask: Mask,
    key_lengths: Tensor | None = None,
    block_table: Tensor | None = None,
    block_size: int | None = None,
    ring_size: int | None = None,
    config: DecodeConfig | None = None,
) -> Tensor:
    """
    Attention of few queries with composed heads over a contiguous, static, ring or paged cache, without gradients.

    Keys, values and factors may be views of cache rows [key | factors] and [value | factors]; nothing is copied.
    Columns of `mask.padding` and `mask.visible` are places in a row: positions, in a ring their remainders.

    Args:
        query (`Tensor`): (batch, heads, queries, channels), 1 to 8 queries; float32, bfloat16 or float16.
        key, value (`Tensor`): (batch, key/value heads, keys, channels), or with `block_table` (blocks, key/value
            heads, block size, channels). Any strides but one of 1 between channels.
        pre, post (`Composition`, *optional*): Before and after the softmax. None: heads are not composed. The key side
            is (batch, heads, keys, channels), or as it lies in the cache: (batch or blocks, key/value heads, keys or
            block size, served heads x channels), one served head after the other. With `block_table` it is the latter.
        scaling (`float`): Factor of the scores.
        mask (`Mask`): Which keys a query sees. `sequence_ids` are refused.
        key_lengths (`Tensor`, *optional*): (batch,) keys of each row, int32 or int64, on the device. The last query
            stands at the last of them, whatever `mask.query_offset` says. None: all rows are full.
        block_table (`Tensor`, *optional*): (batch, blocks of a row) int32, the block of each stretch of a row. Entries
            past a row's length, or before its window, are not read.
        block_size (`int`, *optional*): Keys of a block. None: what the shape of `key` says.
        ring_size (`int`, *optional*): The key at position p lies in place p mod `ring_size`; places not yet written
            are hidden. Needs `key_lengths`, and to show several queries their whole window, window + queries - 1
            places.
        config (`DecodeConfig`, *optional*): Sizes of the tiles. None: the defaults.

    Returns:
        `Tensor`: (batch, heads, queries, value channels), contiguous, of query's type. Zeros for a query that sees no
        key.

    Raises:
        ValueError: if the arguments do not fit together.
    """
    config = config or tuned(DecodeConfig(), "decode", query)
    check_call(query, key, value, mask, key_lengths, block_table, block_size, ring_size)
    rows = _rows(query, key, mask, key_lengths, block_table, ring_size)
    batch, heads, queries, key_heads = rows.batch, rows.heads, rows.queries, rows.key_heads
    for name, stage in (("pre", pre), ("post", post)):
        if stage is not None:
            check_composition(name, stage, query, key, block_table is not None)
    if query.shape[3] > 1 and query.stride(3) != 1:
        query = query.contiguous()
    served = heads // key_heads
    device = query.device
    geometry: dict[str, Any] = {
        "lengths": key_lengths,
        "table": block_table,
        "keys": rows.slots,
        "query_offset": rows.offset,
        "window": mask.sliding_window or 0,
        "ring_size": ring_size or 0,
        "span": rows.span,
        "table_stride": 0 if block_table is None else block_table.stride(0),
    }
    constants: dict[str, Any] = {
        "HEADS": heads,
        "QUERIES": queries,
        "SERVED": served,
        "PAGE": 0 if block_table is None else key.shape[2],
        "CAUSAL": mask.is_causal,
        "WINDOW": mask.sliding_window is not None,
        "RING": ring_size is not None,
    }
    lines = served * queries
    tile: dict[str, Any] = {
        "DOT": lines >= _ROWS_FOR_DOT,
        "ROWS_PADDED": max(16, triton.next_power_of_2(lines)),
    }

    scores = torch.empty(batch, heads, queries, rows.span, device=device, dtype=torch.float32)
    unit = _unit(key)
    splits = _splits(config, batch * key_heads, rows.span, config.score_keys)
    scores_kernel[(splits, key_heads, batch)](
        query,
        key,
        scores,
        scale=scaling * LOG2_E,
        splits=splits,
        query_batch_stride=query.stride(0),
        query_head_stride=query.stride(1),
        query_stride=query.stride(2),
        key_block_stride=key.stride(0) // unit,
        key_head_stride=key.stride(1) // unit,
        key_stride=key.stride(2) // unit,
        UNIT=unit,
        CHANNELS=query.shape[3],
        CHANNELS_PADDED=_padded_channels(query.shape[3]),
        BLOCK_KEYS=config.score_keys,
        num_warps=config.score_warps,
        enable_fp_fusion=True,
        **geometry,
        **constants,
        **tile,
    )

    heads_together = heads // min(1 if stage is None else stage.groups for stage in (pre, post))
    compose_keys = _compose_keys(config, heads_together, max(_channels(stage, rows) for stage in (pre, post)))
    splits = _splits(config, batch * queries * (heads // heads_together), rows.span, compose_keys)
    maxima, sums = torch.empty(2, batch, heads, queries, splits, device=device, dtype=torch.float32)
    for stage, after_softmax in ((pre, False), (post, True)):
        _launch_compose(
            scores, maxima, sums, stage, after_softmax, mask, splits, compose_keys, rows, geometry, constants, config
        )

    output = query.new_empty(batch, heads, queries, value.shape[3])
    splits = _splits(config, batch * key_heads, rows.span, config.value_keys)
    parts = output
    if splits > 1:
        parts = torch.empty(batch, splits, heads, queries, value.shape[3], device=device, dtype=torch.float32)
    unit = _unit(value)
    values_kernel[(splits, key_heads, batch)](
        scores,
        value,
        parts,
        splits=splits,
        value_block_stride=value.stride(0) // unit,
        value_head_stride=value.stride(1) // unit,
        value_stride=value.stride(2) // unit,
        UNIT=unit,
        CHANNELS=value.shape[3],
        CHANNELS_PADDED=_padded_channels(value.shape[3]),
        BLOCK_KEYS=config.value_keys,
        num_warps=config.value_warps,
        enable_fp_fusion=True,
        **geometry,
        **constants,
        **tile,
    )
    if splits > 1:
        join_kernel[(heads * queries, batch)](
            parts,
            output,
            splits,
            LINES=heads * queries,
            CHANNELS=value.shape[3],
            CHANNELS_PADDED=_padded_channels(value.shape[3]),
            BLOCK_SPLITS=min(32, triton.next_power_of_2(splits)),
            num_warps=4,
            enable_fp_fusion=True,
        )
    return output


def _launch_compose(
    scores: Tensor,
    maxima: Tensor,
    sums: Tensor,
    stage: Composition | None,
    after_softmax: bool,
    mask: Mask,
    splits: int,
    compose_keys: int,
    rows: _Rows,
    geometry: dict[str, Any],
    constants: dict[str, Any],
    config: DecodeConfig,
) -> None:
    """Compose `scores` in place, before the softmax or after it; without a stage only mask or normalise."""
    stage = Composition() if stage is None else stage
    group_heads = rows.heads // stage.groups
    query, key = stage.query, stage.key
    key_channels, key_strides = (0, (0,) * 5) if key is None else _key_factor_layout(key, rows)
    padding = None if mask.padding is None else mask.padding.view(torch.uint8)
    visible = None if mask.visible is None or after_softmax else dense_mask(mask.visible)
    compose_kernel[(splits, stage.groups * rows.queries, rows.batch)](
        scores,
        maxima,
        sums,
        query,
        key,
        None if stage.static is None else stage.static.contiguous(),
        # The mask is done with once the softmax is.
        None if after_softmax else padding,
        visible,
        splits=splits,
        query_batch_stride=0 if query is None else query.stride(0),
        query_head_stride=0 if query is None else query.stride(1),
        query_stride=0 if query is None else query.stride(2),
        query_channel_stride=0 if query is None else query.stride(3),
        key_block_stride=key_strides[0],
        key_head_stride=key_strides[1],
        key_served_stride=key_strides[2],
        key_stride=key_strides[3],
        key_channel_stride=key_strides[4],
        padding_batch_stride=_batch_stride(padding),
        padding_key_stride=0 if padding is None else padding.stride(1),
        visible_batch_stride=_batch_stride(visible),
        visible_query_stride=0 if visible is None else visible.stride(2),
        visible_key_stride=0 if visible is None else visible.stride(3),
        GROUP_HEADS=group_heads,
        GROUP_HEADS_PADDED=triton.next_power_of_2(group_heads),
        QUERY_CHANNELS=0 if query is None else query.shape[3],
        KEY_CHANNELS=key_channels,
        AFTER_SOFTMAX=after_softmax,
        BLOCK_KEYS=compose_keys,
        BLOCK_SPLITS=min(32, triton.next_power_of_2(splits)),
        num_warps=config.compose_warps,
        enable_fp_fusion=True,
        **geometry,
        **constants,
    )


def _key_factor_layout(factors: Tensor, rows: _Rows) -> tuple[int, tuple[int, ...]]:
    """Channels of a head, and strides between blocks, key/value heads, heads that one serves, keys and channels."""
    served = rows.heads // rows.key_heads
    block, head, key, channel = factors.stride()
    if factors.shape[1] == rows.heads:
        return factors.shape[3], (block, served * head, head, key, channel)
    channels = factors.shape[3] // served
    return channels, (block, head, channels * channel, key, channel)


def _rows(
    query: Tensor,
    key: Tensor,
    mask: Mask,
    key_lengths: Tensor | None,
    block_table: Tensor | None,
    ring_size: int | None,
) -> _Rows:
    """Sizes that are known without waiting for the device; `span` is the most keys that a row's queries see."""
    batch, heads, queries, _ = query.shape
    slots = key.shape[2] if block_table is None else block_table.shape[1] * key.shape[2]
    slots = slots if ring_size is None else ring_size
    window = mask.sliding_window
    if key_lengths is not None:
        offset = 0
        span = slots if window is None else min(slots, window + queries - 1)
    else:
        offset = mask.query_offset
        first = 0 if window is None else max(0, offset - window + 1)
        last = min(slots, offset + queries) if mask.is_causal else slots
        if window is not None:
            last = min(last, offset + queries - 1 + window)
        span = last - first
    return _Rows(batch, heads, queries, key.shape[1], slots, max(1, span), offset)


def _splits(config: DecodeConfig, programs: int, span: int, block_keys: int) -> int:
    """Parts of the keys of a row, so that there are enough programs where each part has `programs`."""
    wanted = triton.cdiv(config.programs, programs)
    return max(1, min(wanted, config.max_splits, triton.cdiv(span, block_keys)))


def _channels(stage: Composition | None, rows: _Rows) -> int:
    """Factors of a head in a composition, of both sides."""
    if stage is None:
        return 0
    return (0 if stage.query is None else stage.query.shape[3]) + (
        0 if stage.key is None else _key_factor_layout(stage.key, rows)[0]
    )


def _compose_keys(config: DecodeConfig, heads_together: int, channels: int) -> int:
    """Keys that a program of the composition holds at once."""
    fitting = _FACTORS_AT_ONCE // (triton.next_power_of_2(heads_together) * max(1, channels))
    return min(config.compose_keys, max(8, triton.next_power_of_2(fitting + 1) // 2))


def _padded_channels(channels: int) -> int:
    """The power of two that holds them, 16 at least as tensor cores ask."""
    return max(16, triton.next_power_of_2(channels))


def _unit(states: Tensor) -> int:
    """Greatest common power of two of the strides, up to 8: rows of a cache start at 16 bytes, which loads can use."""
    strides = [stride for size, stride in zip(states.shape[:3], states.stride()[:3]) if size > 1]
    return next(unit for unit in (8, 4, 2, 1) if all(stride % unit == 0 for stride in strides))


def _batch_stride(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0)


def tuning_example(
    heads: int, channels: int, dtype: torch.dtype, device: torch.device
) -> Callable[[dict[str, dict[str, int]]], Tensor]:
    """One query over 2048 keys, as [`tuning`] asks for it."""
    operands = random_operands(heads, channels, 1, 2048, dtype, device)
    mask = Mask(query_offset=2047)

    def call(configs: dict[str, dict[str, int]]) -> Tensor:
        config = DecodeConfig(**configs.get("decode", {}))
        return composed_decode(*operands, scaling=channels**-0.5, mask=mask, config=config)

    return call
