"""The memory that a cache takes, with the key-wise weights beside keys and values."""

import torch

from .configuration_dcformer import DCFormerConfig


def cache_bytes_per_token(config: DCFormerConfig, dtype: torch.dtype = torch.bfloat16) -> int:
    """
    The bytes that a cache stores per token, layer and sequence: keys, values and key-wise weights. A layer with a
    sliding window caches at most `sliding_window` tokens.

    Args:
        config (`DCFormerConfig`): The model.
        dtype (`torch.dtype`, defaults to `torch.bfloat16`): Type of the cached states.
    """
    rows = 2 * config.head_dim + sum(config.compose_cache_channels)
    return config.num_key_value_heads * rows * dtype.itemsize
