"""How key-wise compose weights ride in any Transformers cache.

They depend on the key alone, so decoding reads them back instead of recomputing them. Per key and head they are
2 rank + 1 numbers before the softmax and as many after it. The former are appended to the key states as extra
channels, the latter to the value states, each block padded to a multiple of 8 channels so that rows stay 16-byte
aligned in 16-bit types. A cache sees nothing but slightly wider heads, so every stock cache and every operation on it
(reorder, crop, repeat, offload) works. With grouped-query attention a key/value head carries the weights of all its
query heads.

The channels of a key/value head after its states are the factors of each query head that it serves, one head after
the other, in the layout that they have everywhere (`ComposeSide.factors`): storing is one concatenation, and where
every head has keys of its own, reading is a view.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .configuration_dcformer import CACHE_ROW_ALIGNMENT, DCFormerConfig
from .dcmha_factors import ComposeSide


def compose_channels(config: DCFormerConfig) -> tuple[int, int]:
    """
    Extra channels of a cached key row and of a cached value row, per key/value head.

    Returns:
        `tuple[int, int]`: multiples of 8; 0 where nothing key-wise is composed.
    """
    return config.compose_cache_channels


def cache_bytes_per_token(config: DCFormerConfig, dtype: torch.dtype = torch.bfloat16) -> int:
    """
    Bytes that one token occupies in the cache of one layer: keys, values and what composition adds to them.

    Args:
        config (`DCFormerConfig`): The model.
        dtype (`torch.dtype`, defaults to `torch.bfloat16`): Type of the cached states.

    Returns:
        `int`: bytes per token, layer and sequence. A sliding layer holds at most `sliding_window` tokens.
    """
    rows = 2 * config.head_dim + sum(compose_channels(config))
    return config.num_key_value_heads * rows * dtype.itemsize


def pack(states: Tensor, side: ComposeSide | None, width: int = 0) -> Tensor:
    """
    Append one stage's key-wise weights to key or value states.

    Args:
        states (`Tensor`): (batch, key/value heads, key, channels).
        side (`ComposeSide`, *optional*): The weights. None: nothing is appended.
        width (`int`, defaults to 0): Channels that a row must have at least; zeros fill it up.

    Returns:
        `Tensor`: (batch, key/value heads, key, channels + extra).
    """
    if side is None:
        return functional.pad(states, (0, width - states.shape[-1])) if width > states.shape[-1] else states
    extra = _join_served_heads(side.factors, states.shape[1]).to(states.dtype)
    channels = states.shape[-1] + extra.shape[-1]
    padding = max(-extra.shape[-1] % CACHE_ROW_ALIGNMENT, width - channels)
    return torch.cat((states, extra, states.new_zeros(*states.shape[:-1], padding)), dim=-1)


def unpack(packed: Tensor, channels: int, like: ComposeSide | None, heads: int) -> tuple[Tensor, ComposeSide | None]:
    """
    Undo `pack`.

    Args:
        packed (`Tensor`): (batch, key/value heads, key, channels + extra).
        channels (`int`): Channels of the states alone.
        like (`ComposeSide`, *optional*): Weights of any length, which say what was packed and its rank.
        heads (`int`): Query heads.

    Returns:
        `tuple[Tensor, ComposeSide]`: states (batch, key/value heads, key, channels) and the weights of all these keys.
    """
    if like is None:
        return packed[..., :channels], None
    served = heads // packed.shape[1]
    stop = channels + served * like.factors.shape[-1]
    return packed[..., :channels], ComposeSide(factors=_part_served_heads(packed[..., channels:stop], served))


def allocated_widths(cache: Any, layer_idx: int) -> tuple[int, int]:
    """Channels of the key and the value rows that a cache has allocated for a layer, 0 if it has not yet."""
    layer = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    if layer is None or not layer.is_initialized or layer.keys.dim() != 4:
        return 0, 0
    return layer.keys.shape[-1], layer.values.shape[-1]


def _join_served_heads(rows: Tensor, key_value_heads: int) -> Tensor:
    """(batch, heads, key, channels) -> (batch, key/value heads, key, served heads x channels)."""
    batch, heads, keys, channels = rows.shape
    if heads == key_value_heads:
        return rows
    return rows.reshape(batch, key_value_heads, -1, keys, channels).transpose(2, 3).flatten(3)


def _part_served_heads(rows: Tensor, served: int) -> Tensor:
    """Undo `_join_served_heads`; a view where every head has keys of its own."""
    if served == 1:
        return rows
    return rows.view(*rows.shape[:3], served, -1).transpose(2, 3).flatten(1, 2)
