"""What a call of the model may be given: every length must fit every other, or attention would silently be wrong.

A mask that is narrower than the input hides nothing of what it lacks: keys and queries would slide against each other
and every token would see the future. So lengths of ids, embeddings, positions, masks, labels and cache are compared
before anything is computed. Values (an id without an embedding row, a position that restarts) are looked at only where
they can be read, that is not in a graph that is being traced and not on the meta device.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache
from transformers.utils import logging
from transformers.utils.import_utils import is_tracing

from .configuration_dcformer import DCFormerConfig
from .dcmha_cache import compose_channels


logger = logging.get_logger(__name__)


class KeySizes(NamedTuple):
    """
    What a cache hands to the layers of one type, beside the keys of the input.

    Args:
        past_length (`int` or `Tensor`): Tokens that were seen before.
        key_length (`int`): Keys in all that attention will get, for a static cache with the rows not yet filled.
        key_offset (`int`): Tokens before the first of these keys, which a sliding cache no longer holds.
    """

    past_length: int | Tensor
    key_length: int
    key_offset: int


def values_are_known(tensor: Tensor) -> bool:
    """Whether Python may look at the values of a tensor and decide by them."""
    return not (tensor.is_meta or is_tracing(tensor))


def checked_input_ids(input_ids: object, rows: int, oov_policy: str) -> Tensor:
    """
    Ids that all have an embedding row; an id without one would read foreign memory on a GPU.

    Args:
        input_ids (`Tensor`): (batch, length), any integer type.
        rows (`int`): Rows of the embedding.
        oov_policy (`str`): As in the configuration. While a graph is traced ids are clamped whatever it says.

    Raises:
        ValueError: if they are no (batch, length) integers, or an id has no row.
    """
    if not isinstance(input_ids, Tensor):
        raise ValueError(f"input_ids must be a tensor of shape (batch, length), got {type(input_ids).__name__}.")
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids must be (batch, length), got shape {tuple(input_ids.shape)}.")
    if input_ids.dtype.is_floating_point or input_ids.dtype == torch.bool:
        raise ValueError(f"input_ids must be integers, got {input_ids.dtype}; pass embeddings as inputs_embeds.")
    if input_ids.dtype not in (torch.int32, torch.int64):
        input_ids = input_ids.long()
    # A compiled decoding step feeds back the model's own choices; clamping costs it nothing and keeps it safe.
    if oov_policy == "clamp" or not values_are_known(input_ids):
        return input_ids.clamp(0, rows - 1)
    _refuse_unknown("Token id", "the embedding", input_ids, (input_ids < 0) | (input_ids >= rows), rows)
    return input_ids


def checked_labels(labels: Tensor, name: str, shape: torch.Size, rows: int, oov_policy: str, ignored: int) -> Tensor:
    """
    Labels that fit the logits in shape and value, by the same `oov_policy` as the ids that they usually repeat.

    Args:
        labels (`Tensor`): (batch, length) ids, or `ignored` where there is no loss.
        name (`str`): The argument's name, for messages.
        shape (`torch.Size`): (batch, length) of the logits.
        rows (`int`): Size of the vocabulary.

    Raises:
        ValueError: if the shape is another one, or a label is not in the vocabulary.
    """
    if labels.shape != shape:
        raise ValueError(
            f"{name} must be (batch, length) = {tuple(shape)} as the logits, got shape {tuple(labels.shape)}; with "
            "logits_to_keep give the labels of the positions that are kept."
        )
    known = labels == ignored
    if oov_policy == "clamp" or not values_are_known(labels):
        return torch.where(known, labels, labels.clamp(0, rows - 1))
    outside = ((labels < 0) | (labels >= rows)) & ~known
    _refuse_unknown(f"{name}: token id", "the output layer", labels, outside, rows)
    return labels


def _refuse_unknown(what: str, where: str, ids: Tensor, outside: Tensor, rows: int) -> None:
    if outside.any():
        position = outside.nonzero()[0].tolist()
        raise ValueError(
            f"{what} {int(ids[tuple(position)])} at position {position} has no row in {where}, which has {rows}; use "
            "a tokenizer of that vocabulary, or config.oov_policy='clamp' or 'pad'."
        )


def check_embeddings(inputs_embeds: Tensor, hidden_size: int) -> None:
    """Raise ValueError unless the embeddings are (batch, length, hidden_size) and hold at least one token."""
    if inputs_embeds.dim() != 3 or inputs_embeds.shape[2] != hidden_size:
        raise ValueError(
            f"inputs_embeds must be (batch, length, {hidden_size}), got shape {tuple(inputs_embeds.shape)}."
        )
    if inputs_embeds.shape[0] == 0 or inputs_embeds.shape[1] == 0:
        raise ValueError(
            f"The input is empty: (batch, length) is {tuple(inputs_embeds.shape[:2])}; give at least one token."
        )


def check_position_ids(position_ids: Tensor, batch: int, length: int) -> None:
    """Raise ValueError unless there is one position for every token of the input."""
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != length:
        raise ValueError(
            f"position_ids must be (batch, length) = {(batch, length)} as the input, or (1, {length}), got shape "
            f"{tuple(position_ids.shape)}."
        )


def checked_learned_positions(position_ids: Tensor, rows: int) -> Tensor:
    """Positions that all have a learned embedding; RoPE has no such end."""
    if not values_are_known(position_ids):
        return position_ids.clamp(0, rows - 1)
    if position_ids.max() >= rows or position_ids.min() < 0:
        outside = position_ids[(position_ids < 0) | (position_ids >= rows)]
        raise ValueError(
            f"Position {int(outside[0])} has no learned embedding; max_position_embeddings is {rows}, so shorten the "
            "input."
        )
    return position_ids


def check_cache(cache: Cache, config: DCFormerConfig, batch: int, length: int, key_value_heads: int) -> None:
    """
    Make sure that a cache can take up the input.

    Rows that are as wide as a head alone (a past that PEFT's prefix tuning learned, or `early_initialization` by
    `head_dim`) get room for the compose weights; zeros there are keys whose own side composes nothing.

    Args:
        key_value_heads (`int`): Of this process, which in a tensor parallel model may have some of the heads only.

    Raises:
        ValueError: if it is no cache, is of another batch or model, or a static one without room for the input.
    """
    if not isinstance(cache, Cache):
        raise ValueError(
            f"past_key_values must be a Transformers Cache, got {type(cache).__name__}; use DynamicCache(config=...)."
        )
    widths = [config.head_dim + channels for channels in compose_channels(config)]
    layers: list[Any] = getattr(cache, "layers", [])  # of many kinds, which share no declared attributes
    # For a draft of the first layers alone; Transformers 5.17 cannot crop those that are never filled.
    if len(layers) > config.num_hidden_layers and not any(layer.is_initialized for layer in layers):
        del layers[config.num_hidden_layers :]
    for index, layer in enumerate(layers):
        if not getattr(layer, "is_initialized", False) or layer.keys.dim() != 4:
            continue
        if layer.keys.shape[0] != batch:
            raise ValueError(
                f"past_key_values holds a batch of {layer.keys.shape[0]}, but the input has {batch} rows; give the "
                "cache of these rows, or none."
            )
        if layer.keys.shape[1] != key_value_heads:
            raise ValueError(
                f"past_key_values holds {layer.keys.shape[1]} key/value heads in layer {index}, but this model has "
                f"{key_value_heads}; it is the cache of another model."
            )
        for name, width in zip(("keys", "values"), widths):
            _widen(layer, name, width, config.head_dim, index)
    # One layer stands for all: reading the length of a static one waits for the device.
    static = next((layer for layer in layers if hasattr(layer, "max_cache_len") and not layer.is_sliding), None)
    if static is None or not (values_are_known(static.keys) if static.is_initialized else not is_tracing()):
        return
    past_length = int(static.get_seq_length())
    if past_length + length > static.max_cache_len:
        raise ValueError(
            f"past_key_values has room for {static.max_cache_len} tokens and holds {past_length}, so {length} more do "
            "not fit; create it with a larger max_cache_len."
        )


def _widen(layer: Any, name: str, width: int, head_dim: int, index: int) -> None:
    rows = getattr(layer, name)  # (batch, key/value heads, key, channels)
    if rows.shape[-1] >= width:
        return
    if rows.shape[-1] != head_dim:
        raise ValueError(
            f"past_key_values holds {name} of {rows.shape[-1]} channels in layer {index}; this model's have {width} "
            f"({head_dim} of the head and {width - head_dim} for its compose weights), or {head_dim}."
        )
    rows = functional.pad(rows, (0, width - head_dim))
    if getattr(layer, "is_compileable", False) and not is_tracing(rows):
        torch._dynamo.mark_static_address(rows)  # as Transformers does for static caches
    setattr(layer, name, rows)


def checked_mask(
    attention_mask: Any, batch: int, length: int, heads: int, sizes: dict[str, KeySizes], is_static: bool
) -> Tensor | dict[str, Any]:
    """
    A mask for which every key of every layer is accounted.

    Args:
        attention_mask: (batch, past + length); or (batch or 1, heads or 1, length, keys); or such masks by layer type.
        sizes: Of the keys, by layer type.
        is_static (`bool`): A static cache counts its rows, not the tokens in them.

    Returns:
        A (batch, past + length) mask as it is; or a dictionary with a mask of four dimensions for every layer type.

    Raises:
        ValueError: if lengths disagree.
    """
    if isinstance(attention_mask, dict):
        if missing := sorted(set(sizes) - set(attention_mask)):
            raise ValueError(f"attention_mask by layer type lacks {missing[0]!r}; it has {sorted(attention_mask)}.")
        for layer_type, mask in attention_mask.items():
            if layer_type in sizes and isinstance(mask, Tensor) and mask.dim() == 4:
                key_length = sizes[layer_type].key_length
                _check_dense(mask, batch, length, heads, (key_length,), f"attention_mask[{layer_type!r}]")
        return attention_mask
    if not isinstance(attention_mask, Tensor):
        return attention_mask  # a BlockMask of flex attention, which checks itself
    if attention_mask.dim() == 4:
        return {
            layer_type: _dense_columns(attention_mask, batch, length, heads, layer_sizes)
            for layer_type, layer_sizes in sizes.items()
        }
    if attention_mask.dim() != 2 or attention_mask.shape[0] not in (1, batch):
        raise ValueError(
            "attention_mask must be (batch, past + length) or (batch or 1, heads or 1, length, past + length) for a "
            f"batch of {batch} and {length} tokens, got shape {tuple(attention_mask.shape)}."
        )
    _check_covers(attention_mask.shape[1], length, sizes, is_static)
    return attention_mask.expand(batch, -1)


def _check_covers(covered: int, length: int, sizes: dict[str, KeySizes], is_static: bool) -> None:
    past_length = next(iter(sizes.values())).past_length
    longest = max(layer_sizes.key_length for layer_sizes in sizes.values()) if is_static else None
    if isinstance(past_length, Tensor):
        if not values_are_known(past_length):
            return  # a compiled decoding step; the lengths were compared when the cache was filled
        past_length = int(past_length)
    total = past_length + length
    if covered < total or (covered > total and (longest is None or covered > max(total, longest))):
        raise ValueError(
            f"attention_mask covers {covered} tokens, but cache and input hold {total}; it must cover both, and "
            "nothing else."
        )


def _dense_columns(mask: Tensor, batch: int, length: int, heads: int, sizes: KeySizes) -> Tensor:
    """The columns of a mask over all tokens that belong to the keys of one layer type."""
    total = sizes.key_offset + sizes.key_length
    _check_dense(mask, batch, length, heads, (sizes.key_length, total), "attention_mask")
    if not mask.dtype.is_floating_point:
        mask = mask.to(torch.bool)
    return mask if mask.shape[-1] == sizes.key_length else mask[..., sizes.key_offset :]


def _check_dense(mask: Tensor, batch: int, length: int, heads: int, keys: tuple[int, ...], name: str) -> None:
    fits = mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads) and mask.shape[2] == length
    if not fits or mask.shape[3] not in keys:
        raise ValueError(
            f"{name} must be (batch or 1, heads or 1, length, keys) = ({batch}, {heads}, {length}, {keys[-1]}), got "
            f"shape {tuple(mask.shape)}."
        )


def warn_of_documents_that_mix(position_ids: Tensor, attention_mask: Any, has_cache: bool) -> None:
    """
    Say once that packed documents see each other: as in Transformers, positions that restart keep them apart only
    where neither a mask nor a cache is given.

    Args:
        position_ids (`Tensor`): (batch or 1, length), as the caller gave them.
        attention_mask: As the caller gave it.
        has_cache (`bool`): Whether keys and values go into a cache.
    """
    is_flat = isinstance(attention_mask, Tensor) and attention_mask.dim() == 2
    if not (is_flat or (attention_mask is None and has_cache)) or not values_are_known(position_ids):
        return
    restarts = position_ids[:, 1:] <= position_ids[:, :-1]
    if is_flat:
        real = attention_mask[:, -position_ids.shape[1] :] != 0  # padding has positions that mean nothing
        restarts = restarts & real[:, 1:] & real[:, :-1]
    if restarts.any():
        logger.warning_once(
            "position_ids restart within a row, as where several documents are packed into it, but a cache or an "
            "attention_mask is given too: the documents see each other. To keep them apart call the model without "
            "attention_mask and with use_cache=False."
        )
