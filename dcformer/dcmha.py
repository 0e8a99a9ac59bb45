"""Dynamically Composable Multi-Head Attention as an operator: equations 3 to 8 and appendix D of the paper.

`composed_attention` checks its arguments and hands them to one of the implementations in a table, all of one signature:
`reference` is appendix D line by line, `chunked` the form for every device and mask, `one_query` that of decoding, and
`cpu` the fast form of CPUs. Other packages add theirs by `register_implementation`; `attn_implementation="dcmha_NAME"`
then takes it in a model.
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
from transformers.utils.import_utils import is_tracing

from .dcmha_chunked import chunked_attention, compose
from .dcmha_cpu import cpu_attention
from .dcmha_factors import ComposeSide, ComposeWeights, check_arguments
from .dcmha_mask import Visibility
from .dcmha_one_query import one_query_attention
from .dcmha_reference import reference_attention


__all__ = [
    "ComposeSide",
    "ComposeWeights",
    "Implementation",
    "Visibility",
    "candidates",
    "checked_implementation",
    "compose",
    "composed_attention_forward",
    "composed_attention",
    "composed_attention_reference",
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
        purpose (`str`): What it is for, in a phrase.
        is_automatic (`bool`): Whether it may be chosen without being asked for.
        automatic_on (`str`, *optional*): The only type of device, such as "cuda", on which it may. None: all.
        why_not_automatic (`Callable`, *optional*): As `supports`, and asked instead of it where nobody asked for this
            implementation: it may know reasons that do not hinder an explicit choice. None: there are no others.
    """

    name: str
    forward: Callable[..., Tensor]
    supports: Callable[..., str | None]
    purpose: str
    is_automatic: bool = True
    automatic_on: str | None = None
    why_not_automatic: Callable[..., str | None] | None = None


_TABLE: dict[str, Implementation] = {}


def register_implementation(
    name: str,
    forward: Callable[..., Tensor],
    supports: Callable[..., str | None] = lambda *arguments, **options: None,
    purpose: str = "",
    is_automatic: bool = False,
    automatic_on: str | None = None,
    why_not_automatic: Callable[..., str | None] | None = None,
) -> None:
    """
    Add an implementation to the table, or replace the one of its name. Models then take it as their
    `attn_implementation`, by the name with `dcmha_` before it.

    Args:
        name, forward, supports, purpose, is_automatic, automatic_on, why_not_automatic: Of [`Implementation`]. What is
            added later is tried earlier if it is automatic.
    """
    choice: dict[str, Any] = {"automatic_on": automatic_on, "why_not_automatic": why_not_automatic}
    _TABLE[name] = Implementation(name, forward, supports, purpose, is_automatic, **choice)
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
) -> list[tuple[str, str]]:
    """What [`composed_attention`] would try in turn for these arguments: names, with why not or what for."""
    check_arguments(query, key, value, pre, post)
    mask = _visibility(query, key, is_causal, sliding_window, attention_mask)
    tried = []
    for candidate in candidates(query.device.type):
        reason = _why_not(candidate, query, key, value, pre, post, mask=mask, dropout=dropout)
        tried.append((candidate.name, reason or candidate.purpose))
        if reason is None:
            break
    return tried


def candidates(device_type: str) -> list[Implementation]:
    """What may be chosen without being asked for on such a device, in the order in which it is tried."""
    automatic = [candidate for candidate in reversed(_TABLE.values()) if candidate.is_automatic]
    return [candidate for candidate in automatic if candidate.automatic_on in (None, device_type)]


def _why_not(candidate: Implementation, *arguments: Any, **options: Any) -> str | None:
    """Why the automatic choice passes over a candidate; None if it does not."""
    return (candidate.why_not_automatic or candidate.supports)(*arguments, **options)


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
def composed_attention_reference(
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
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """
    [`composed_attention`] in the paper's words, with memory quadratic in the sequence. Same arguments.

    Returns:
        `Tensor`: (batch, heads, query, channels), in the query's dtype; with `return_weights` also the composed
        weights (batch, heads, query, key). The softmax and the compositions run in float64 if query or key are, else
        in float32, as do the two matrix products.

    Source: equation 4 and appendix D.
    """
    check_arguments(query, key, value, pre, post)
    mask = _visibility(query, key, is_causal, sliding_window, attention_mask)
    scaling = _default_scaling(query, scaling)
    if _is_empty(query, key):
        output = query.new_zeros(*query.shape[:3], value.shape[3])
        return (output, query.new_zeros(*query.shape[:3], key.shape[2])) if return_weights else output
    output, weights = reference_attention(query, key, value, pre, post, scaling=scaling, mask=mask, dropout=dropout)
    return (output, weights) if return_weights else output


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
) -> Tensor:
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

    Returns:
        `Tensor`: (batch, heads, query, value channels), in the query's dtype. A query that sees no key gets zeros.
        The softmax and the compositions run in float32 (float64 for float64 inputs). Second derivatives need
        `implementation="chunked"` or `"reference"` where the CPU form runs: without dropout, for at least 16 queries.

    Raises:
        ValueError: if shapes do not fit together, `chunk_size` or `sliding_window` is below 1, or the implementation
            asked for does not exist or cannot run; the message says why.

    Source: equations 3 to 8 of the paper.
    """
    check_arguments(query, key, value, pre, post)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}; use None to have it chosen.")
    mask = _visibility(query, key, is_causal, sliding_window, attention_mask)
    scaling = _default_scaling(query, scaling)
    chosen = _choose(implementation, query, key, value, pre, post, mask=mask, dropout=dropout)
    if _is_empty(query, key):
        return query.new_zeros(*query.shape[:3], value.shape[3])
    options: dict[str, Any] = {"scaling": scaling, "mask": mask, "dropout": dropout, "chunk_size": chunk_size}
    return chosen.forward(query, key, value, pre, post, **options)


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
        query, key), which the reference computes.
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
    }
    if output_attentions:
        output, weights = composed_attention_reference(query, key, value, pre, post, return_weights=True, **options)
    else:
        output = composed_attention(query, key, value, pre, post, implementation=implementation, **options)
        weights = None
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
        automatic = candidates(arguments[0].device.type)
        return next(candidate for candidate in automatic if _why_not(candidate, *arguments, **options) is None)
    if name not in _TABLE:
        raise ValueError(f"implementation must be one of {', '.join(_TABLE)}, got {name!r}.")
    if (reason := _TABLE[name].supports(*arguments, **options)) is not None:
        raise ValueError(f"implementation {name!r} cannot run here: {reason}; leave it out to have one chosen.")
    return _TABLE[name]


def _why_not_on_cpu(query: Tensor, *_: Any, mask: Visibility, dropout: float) -> str | None:
    """The form for CPUs is made of Python loops and threads, and writes in place, with its own gradient."""
    if query.device.type != "cpu":
        return f"the tensors are on {query.device.type}"
    if dropout > 0.0:
        return "it has no dropout"
    if is_tracing(query) or torch._C._are_functorch_transforms_active():
        return "neither tracing nor torch.func see through it"
    if query.shape[2] < 16:
        return f"it pays from 16 queries on, and there are {query.shape[2]}"
    if not mask.same_for_all_heads:
        return "the mask differs between heads"
    return "the mask has a gradient" if mask.requires_grad else None


def _why_not_for_one_query(query: Tensor, *_: Any, **options: Any) -> str | None:
    # Naming the number would tie a graph that is traced for any length to this one.
    return None if query.shape[2] == 1 else "it takes a single query, and there are more"


def _default_scaling(query: Tensor, scaling: float | None) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if scaling is None else scaling


def _is_empty(query: Tensor, key: Tensor) -> bool:
    return query.shape[0] * query.shape[2] * key.shape[2] == 0


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


def _reference(*arguments: Any, chunk_size: int | None = None, **options: Any) -> Tensor:
    return reference_attention(*arguments, **options)[0]


register_implementation("reference", _reference, purpose="appendix D line by line, for checking")
register_implementation("chunked", chunked_attention, purpose="any device, any mask, any length", is_automatic=True)
register_implementation(
    "cpu", cpu_attention, _why_not_on_cpu, "blocks of queries on a CPU, with gradients", is_automatic=True
)
register_implementation(
    "one_query", one_query_attention, _why_not_for_one_query, "one query over many keys: decoding", is_automatic=True
)
