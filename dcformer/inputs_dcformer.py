"""Checks of a model's inputs and labels, and the attention masks that are made of the inputs."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.utils import logging
from transformers.utils.deprecation import deprecate_kwarg

from .configuration_dcformer import DCFormerConfig
from .visibility_dcformer import Visibility, in_graph, values_are_known


logger = logging.get_logger(__name__)

# The name of the argument by which Transformers passes a cache to masks, layers and outputs: it was renamed in 5.24.
CACHE_NAME = next(n for n in ("cache", "past_key_values") if n in inspect.signature(create_causal_mask).parameters)


def takes_older_cache_name(forward: Callable) -> Callable:
    """Let `past_key_values` stand for `cache`: with the warning of Transformers from 5.24, in silence before it."""
    if CACHE_NAME == "cache":
        return deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")(forward)
    silent = deprecate_kwarg("past_key_values", "5.0.0", new_name="cache")(forward)
    signature = inspect.signature(forward)
    parameters = [p.replace(name=CACHE_NAME) if p.name == "cache" else p for p in signature.parameters.values()]
    silent.__signature__ = signature.replace(parameters=parameters)
    return silent


@takes_older_cache_name
def older_cache(cache: Any) -> Any:  # for layers, in which this wrapper would take microseconds of every step
    return cache


def checked_ids(input_ids: Any, embed_tokens: nn.Module, config: DCFormerConfig) -> Tensor:
    """
    Token ids that all have an embedding row: clamped with `oov_policy="clamp"` and in graphs.

    Raises:
        ValueError: for any other id without a row; on a GPU torch would read beyond the embedding, or crash.
    """
    # Adapters and assisted generation wrap the embedding, and callers may replace it.
    sizes = (part.num_embeddings for part in embed_tokens.modules() if isinstance(part, nn.Embedding))
    rows = next(sizes, config.vocab_size)
    # A graph cannot raise an error that depends on a value.
    if config.oov_policy == "clamp" or in_graph(input_ids):
        return input_ids.clamp(0, rows - 1)
    if values_are_known(input_ids) and (outside := (input_ids < 0) | (input_ids >= rows)).any():
        position = outside.nonzero()[0].tolist()
        raise ValueError(
            f"Token id {int(input_ids[tuple(position)])} at position {position} has no row in the embedding, which "
            f"has {rows}; use a tokenizer of that vocabulary, or config.oov_policy='clamp'."
        )
    return input_ids


def checked_labels(labels: Tensor, logits: Tensor, config: DCFormerConfig, ignore_index: int = -100) -> Tensor:
    """The labels of these logits, clamped as the token ids that they repeat; ValueError for another shape."""
    if labels.shape != logits.shape[:2]:
        raise ValueError(
            f"labels must be (batch, length) = {tuple(logits.shape[:2])} as the logits, got {tuple(labels.shape)}; "
            "with logits_to_keep give the labels of the positions that are kept."
        )
    if config.oov_policy != "clamp":
        return labels
    return torch.where(labels == ignore_index, labels, labels.clamp(0, config.vocab_size - 1))


def make_masks(
    config: DCFormerConfig,
    layer_ids: list[int],
    inputs_embeds: Tensor,
    attention_mask: Any,
    cache: Any,
    position_ids: Tensor | None,
) -> dict[str, Any]:
    """
    Make the mask of every layer type, where heads are composed a [`Visibility`], which grows linearly with the length.
    `layer_ids` are the layers of this process; the others are the arguments of [`DCFormerModel.forward`].
    """
    batch, length = inputs_embeds.shape[:2]
    # Static caches are made for compiled steps, which take tensors, and know their length only on the device.
    is_static = getattr(cache, "is_compileable", False)
    sequence_ids = None
    if position_ids is not None and attention_mask is None and cache is None and not position_ids.is_meta:
        # Where a position does not follow the one before it, another document starts.
        starts = position_ids.diff(dim=1, prepend=position_ids[:, :1] - 1) != 1
        if not values_are_known(starts) or starts.any():
            sequence_ids = starts.cumsum(1).expand(batch, -1)
    cache_here = cache
    if cache is not None and len(layer_ids) < config.num_hidden_layers:
        cache_here = copy.copy(cache)  # Transformers looks at its first layers, which another stage fills
        cache_here.layers = [cache.layers[i] for i in layer_ids if i < len(cache.layers)]

    layer_types = config.layer_types
    masks: dict[str, Any] = dict.fromkeys(layer_types)
    for layer_type, layer_idx in {layer_types[i]: i for i in reversed(layer_ids)}.items():
        past_length, key_length, key_offset = 0, length, 0  # the keys are those of the tokens from key_offset on
        if cache is not None:
            past_length = cache.get_seq_length(layer_idx)
            key_length, key_offset = cache.get_mask_sizes(length, layer_idx)
        if isinstance(attention_mask, Tensor):
            total = key_offset + key_length if is_static else past_length + length
            _check_mask(attention_mask, batch, length, total, past_length + length)
            attention_mask = attention_mask.expand(batch, *attention_mask.shape[1:])
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4:
            is_bias = attention_mask.dtype.is_floating_point
            masks[layer_type] = (attention_mask if is_bias else attention_mask.bool())[..., key_offset:]
        elif config.composes_heads and not is_static:
            padding = None if attention_mask is None else attention_mask[:, key_offset:]
            if padding is not None and values_are_known(padding) and bool((padding != 0).all()):
                padding = None  # it hides nothing
            band: Any = {"is_causal": getattr(config, "is_causal", True), "query_offset": past_length - key_offset}
            if layer_type == "sliding_attention":
                band["sliding_window"] = config.sliding_window
            masks[layer_type] = Visibility(length, key_length, **band, padding=padding, sequence_ids=sequence_ids)
        else:
            make_mask = create_causal_mask if layer_type == "full_attention" else create_sliding_window_causal_mask
            mask = make_mask(
                config=config,
                inputs_embeds=inputs_embeds,
                attention_mask=None if inputs_embeds.is_meta else attention_mask,
                **{CACHE_NAME: cache_here},
                position_ids=None if inputs_embeds.is_meta else position_ids,
            )
            # Eager masks hold zero and the smallest number; booleans are less work for every layer.
            masks[layer_type] = mask == 0 if config.composes_heads and mask is not None else mask
    return masks


def check_positions(position_ids: Tensor, shape: tuple[int, int], attention_mask: Any, has_cache: bool) -> None:
    """Raise ValueError unless every token has a position; warn once of packed documents that see each other."""
    if tuple(position_ids.shape) not in (shape, (1, shape[1])):
        raise ValueError(
            f"position_ids must be (batch, length) = {shape} or (1, {shape[1]}), got {tuple(position_ids.shape)}."
        )
    # As in Transformers, positions that restart keep documents apart only without a mask and without a cache.
    is_flat = isinstance(attention_mask, Tensor) and attention_mask.dim() == 2
    known = values_are_known(position_ids) and values_are_known(attention_mask)
    if not known or not (is_flat or (attention_mask is None and has_cache)):
        return
    restarts = position_ids[:, 1:] <= position_ids[:, :-1]
    if is_flat:  # padding has positions that mean nothing
        real = attention_mask[:, -shape[1] :] != 0
        restarts = restarts & real[:, 1:] & real[:, :-1]
    if restarts.any():
        logger.warning_once(
            "position_ids restart within a row, but a cache or an attention_mask is given too: packed documents see "
            "each other. To keep them apart call the model without attention_mask and with use_cache=False."
        )


def _check_mask(attention_mask: Tensor, batch: int, length: int, total: int, tokens: int | Tensor) -> None:
    """
    Raise ValueError unless a mask covers the `tokens` of cache and input, and no more than `total`, which for a static
    cache counts the rows not yet filled. A narrower mask would shift keys against queries.
    """
    covered, is_dense = attention_mask.shape[-1], attention_mask.dim() == 4
    fits = attention_mask.dim() in (2, 4) and attention_mask.shape[0] in (1, batch)
    if fits and is_dense:
        fits = attention_mask.shape[2] == length and covered == total
    elif fits and values_are_known(tokens):
        # Numbers of symbols too, whose conversion would fix the length of a graph; a static cache counts on its device.
        tokens = int(tokens) if isinstance(tokens, Tensor) else tokens
        fits = tokens <= covered <= max(total, tokens)
    if not fits:
        raise ValueError(
            "attention_mask must be (batch, past + length) or (batch or 1, heads or 1, length, past + length) for a "
            f"batch of {batch}, {length} tokens and {total} of cache and input, got {tuple(attention_mask.shape)}."
        )
