"""Dynamically Composable Multi-Head Attention as an operator: equations 3 to 8 and appendix D of the paper.

`composed_attention` checks its arguments and hands them to one of the implementations in a table, all of one signature.
The table starts with `plain`, in torch operators, for every device and mask; packages add faster ones by
`register_implementation`. A model takes the one that `attn_implementation="dcmha_NAME"` names.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .dcmha_factors import ComposeSide, ComposeWeights, check_arguments
from .dcmha_mask import Visibility
from .dcmha_plain import compose, plain_attention, plain_attention_with_weights


__all__ = [
    "ComposeSide",
    "ComposeWeights",
    "Implementation",
    "Visibility",
    "checked_implementation",
    "compose",
    "composed_attention_forward",
    "composed_attention",
    "explain_choice",
    "implementations",
    "register_implementation",
]

_Attention = TypeVar("_Attention", bound=Callable[..., Any])

# Before the name of an implementation where all of Transformers' attention functions are named.
PREFIX = "dcmha_"


@dataclass(frozen=True)
class Implementation:
    """
    One way to compute composed attention.

    Args:
        name (`str`): By which it is asked for.
        forward (`Callable`): `forward(query, key, value, pre, post, *, scaling, mask, dropout, chunk_size)`, with the
            shapes of [`composed_attention`], a [`Visibility`] as the mask, and the output as its result. Lengths and
            batch are at least 1, shapes fit, autocast is off.
        supports (`Callable`): Of the same arguments but `scaling` and `chunk_size`: None if it can, else the reason why
            not, as the end of a sentence.
    """

    name: str
    forward: Callable[..., Tensor]
    supports: Callable[..., str | None]


_TABLE: dict[str, Implementation] = {}
# By the names of those that may be chosen without being asked for: why one of them is not chosen for some arguments.
_AUTOMATIC: dict[str, Callable[..., str | None]] = {}


def _no_reason(*arguments: Any, **options: Any) -> None:
    """There is no reason against it."""


def register_implementation(
    name: str,
    forward: Callable[..., Tensor],
    supports: Callable[..., str | None] = _no_reason,
    automatic: Callable[..., str | None] | None = None,
) -> None:
    """
    Add an implementation to the table, or replace the one of its name. Models then take it as their
    `attn_implementation`, by the name with `dcmha_` before it.

    Args:
        name, forward, supports: Of [`Implementation`].
        automatic (`Callable`, *optional*): As `supports`, and asked instead of it where nobody named an
            implementation: None if this one is to be chosen, else the reason why not. What is registered later is tried
            earlier. None: it is never chosen without being asked for.
    """
    _TABLE[name] = Implementation(name, forward, supports)
    _AUTOMATIC.pop(name, None)
    if automatic is not None:
        _AUTOMATIC[name] = automatic
    forward_of_models = functools.partial(composed_attention_forward, implementation=name)
    ALL_ATTENTION_FUNCTIONS.register(PREFIX + name, forward_of_models)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PREFIX + name, eager_mask)


def implementations() -> dict[str, Implementation]:
    """The table: every implementation by its name, in the order in which they were added."""
    return dict(_TABLE)


def explain_choice(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    *,
    is_causal: bool = True,
    sliding_window: int | None = None,
    attention_mask: Tensor | Visibility | None = None,
    dropout: float = 0.0,
) -> list[tuple[str, str | None]]:
    """
    What [`composed_attention`] tries in turn for these arguments where no implementation is named.

    Returns:
        `list[tuple[str, str | None]]`: names, each with the reason why it is passed over, and None for the last, which
        is chosen.
    """
    check_arguments(query, key, value, pre, post)
    mask = _visibility(query, key, is_causal, sliding_window, attention_mask)
    return _tried(query, key, value, pre, post, mask=mask, dropout=dropout)


def _tried(*arguments: Any, **options: Any) -> list[tuple[str, str | None]]:
    tried: list[tuple[str, str | None]] = []
    for name in reversed(list(_AUTOMATIC)):
        tried.append((name, _AUTOMATIC[name](*arguments, **options)))
        if tried[-1][1] is None:
            break
    return tried


def _without_autocast(attention: _Attention) -> _Attention:
    """Autocast would take the sums of a composition down to 16 bits; the functions below choose their own types."""

    @functools.wraps(attention)
    def wrapper(query: Tensor, *args: Any, **kwargs: Any) -> Any:
        device = query.device.type
        if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
            return attention(query, *args, **kwargs)
        with torch.autocast(device, enabled=False):
            return attention(query, *args, **kwargs)

    return cast(_Attention, wrapper)


@_without_autocast
def composed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    *,
    scaling: float | None = None,
    is_causal: bool = True,
    sliding_window: int | None = None,
    attention_mask: Tensor | Visibility | None = None,
    dropout: float = 0.0,
    chunk_size: int | None = None,
    implementation: str | None = None,
    return_weights: bool = False,
) -> Any:
    """
    Dynamically Composable Multi-Head Attention, for any model: softmax attention whose scores are composed across
    heads by `pre` before the mask and the softmax, and whose weights by `post` after it (without renormalising).

    Args:
        query (`Tensor`): (batch, heads, query, channels).
        key (`Tensor`): (batch, key/value heads, key, channels); the key/value heads divide the heads.
        value (`Tensor`): (batch, key/value heads, key, value channels).
        pre, post (`ComposeWeights`, *optional*): None for no composition at that place.
        scaling (`float`, *optional*): Factor of the scores. None: channels ** -0.5.
        is_causal (`bool`, defaults to `True`): Hide later keys. With fewer queries than keys, the last query
            stands at the last key.
        sliding_window (`int`, *optional*): Keys in sight, the query's own included: t - w < s <= t if causal, else
            |t - s| < w.
        attention_mask (`Tensor` or `Visibility`, *optional*): (batch, key) with 0 for padding, or
            (batch or 1, heads or 1, query, key), boolean with True for visible, or floating point, added to the
            composed scores. It further restricts what `is_causal` and `sliding_window` allow. A [`Visibility`] stands
            for all three.
        dropout (`float`, defaults to 0.0): Probability of dropping a composed weight.
        chunk_size (`int`, *optional*): Queries computed at once, where the implementation has chunks. None: chosen so
            that a chunk stays small.
        implementation (`str`, *optional*): A name of the table, see [`implementations`]. None: the first that can.
        return_weights (`bool`, defaults to `False`): Return the composed weights too, which the implementation "plain"
            computes, with memory quadratic in the sequence.

    Returns:
        `Tensor`: (batch, heads, query, value channels), in the query's dtype. A query that sees no key gets zeros.
        The softmax and the compositions run in float32 (float64 for float64 inputs). With `return_weights` a pair of
        this and the composed weights (batch, heads, query, key), in the query's dtype; they can be negative, and a row
        need not sum to one. Second derivatives need `implementation="plain"`.

    Raises:
        ValueError: if shapes do not fit together, `chunk_size` or `sliding_window` is below 1, or the implementation
            asked for does not exist or cannot run; the message says why.

    Source: equations 3 to 8 of the paper.
    """
    check_arguments(query, key, value, pre, post)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}; use None to have it chosen.")
    mask = _visibility(query, key, is_causal, sliding_window, attention_mask)
    scaling = 1.0 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    implementation = "plain" if return_weights else implementation
    chosen = _choose(implementation, query, key, value, pre, post, mask=mask, dropout=dropout)
    if query.shape[0] * query.shape[2] * key.shape[2] == 0:
        output = query.new_zeros(*query.shape[:3], value.shape[3])
        return (output, query.new_zeros(*query.shape[:3], key.shape[2])) if return_weights else output
    options: dict[str, Any] = {"scaling": scaling, "mask": mask, "dropout": dropout}
    if return_weights:
        return plain_attention_with_weights(query, key, value, pre, post, **options)
    return chosen.forward(query, key, value, pre, post, **options, chunk_size=chunk_size)


def composed_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Visibility | None,
    scaling: float,
    dropout: float = 0.0,
    pre: ComposeWeights | None = None,
    post: ComposeWeights | None = None,
    output_attentions: bool = False,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    implementation: str | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """
    Composed attention as Transformers calls it: `is_causal` is the module's if it is not given.

    Returns:
        (batch, query, heads, channels), and with `output_attentions` the composed weights of every head (batch, heads,
        query, key).
    """
    # A mask made elsewhere says all there is to say: causality and window are in it.
    is_whole = isinstance(attention_mask, Tensor) and attention_mask.dim() == 4
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    options: dict[str, Any] = {
        "scaling": scaling,
        "is_causal": is_causal and not is_whole,
        "sliding_window": None if is_whole else sliding_window,
        "attention_mask": attention_mask,
        "dropout": dropout,
        "implementation": implementation,
        "return_weights": output_attentions,
    }
    result = composed_attention(query, key, value, pre, post, **options)
    output, weights = result if output_attentions else (result, None)
    return output.transpose(1, 2).contiguous(), weights


def checked_implementation(name: str) -> str:
    """`name` if that attention implementation can compose heads; any other would silently leave the composition out."""
    if name == "eager" or (name.removeprefix(PREFIX) in _TABLE and name.startswith(PREFIX)):
        return name
    known = [kernel for kernel in ALL_ATTENTION_FUNCTIONS.valid_keys() if "|" not in kernel]
    if name not in known and "|" not in name and "/" not in name and not name.startswith("flash_attention"):
        raise ValueError(f"attn_implementation={name!r} is not an attention implementation; use 'eager' (the default).")
    raise ValueError(
        f"attn_implementation={name!r} cannot compose attention heads, since it never holds two heads' scores at "
        "once; use attn_implementation='eager' (the default) or switch composition off."
    )


def _choose(name: str | None, *arguments: Any, **options: Any) -> Implementation:
    if name is None:
        return _TABLE[_tried(*arguments, **options)[-1][0]]
    if name not in _TABLE:
        raise ValueError(f"implementation must be one of {', '.join(_TABLE)}, got {name!r}.")
    if (reason := _TABLE[name].supports(*arguments, **options)) is not None:
        raise ValueError(f"implementation {name!r} cannot run here: {reason}; leave it out to have one chosen.")
    return _TABLE[name]


def _visibility(
    query: Tensor,
    key: Tensor,
    is_causal: bool,
    sliding_window: int | None,
    attention_mask: Tensor | Visibility | None,
) -> Visibility:
    batch, heads, queries = query.shape[:3]
    if isinstance(attention_mask, Visibility):
        visibility = attention_mask
    else:
        visibility = Visibility.from_mask(
            attention_mask,
            query_length=queries,
            key_length=key.shape[2],
            is_causal=is_causal,
            sliding_window=sliding_window,
        )
    visibility.check_fits(batch, heads, queries, key.shape[2])
    return visibility


register_implementation("plain", plain_attention, automatic=_no_reason)
