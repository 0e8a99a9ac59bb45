"""Composed attention: equations 3 to 8 and appendix D of the paper, in plain torch.

`compose` is equation 7. `composed_attention_reference` is appendix D line by line: it materialises every head's full
score matrix and serves as the yardstick. `composed_attention` computes the same in chunks of queries, each over the
keys it can see, so that memory grows linearly with the sequence. On a CPU, chunks go through `head_loop` (in place,
closed-form gradients); elsewhere through `compose` with the chunk recomputed in the backward pass.

Axis letters: b batch, g group, m and n heads of a group, t query, s key, r rank, d channel.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.utils.import_utils import is_tracing

from .attention_visibility import Visibility
from .head_loop import compute_dtype, head_loop_attention


class ComposeSide(NamedTuple):
    """
    What one side, the queries or the keys, contributes to a composition. Any of the three may be None (switched off;
    `w1` and `w2` together).

    Args:
        w1 (`Tensor`): (batch, rank, heads, length), heads -> rank; W_q1 or W_k1 of equation 8, normalised over heads.
        w2 (`Tensor`): (batch, rank, heads, length), rank -> heads; W_q2 or W_k2.
        gate (`Tensor`): (batch, heads, length); W_qg or W_kg, after tanh.
    """

    w1: Tensor | None = None
    w2: Tensor | None = None
    gate: Tensor | None = None


class ComposeWeights(NamedTuple):
    """
    Everything one composition (before or after the softmax) needs. With groups, `rank` is the rank per group and the
    heads of a group are consecutive.

    Args:
        query (`ComposeSide`, *optional*): Query-wise weights (branches 2 and 3), length = queries.
        key (`ComposeSide`, *optional*): Key-wise weights (branches 4 and 5), length = keys.
        static (`Tensor`, *optional*): (groups, heads per group, heads per group) [in, out]; branch 1, no identity.
        groups (`int`, defaults to 1): Groups of heads that compose among themselves (section 3.2).
    """

    query: ComposeSide | None = None
    key: ComposeSide | None = None
    static: Tensor | None = None
    groups: int = 1


def compose(attention: Tensor, weights: ComposeWeights | None) -> Tensor:
    """
    Mix attention scores or weights across heads: equation 7, batched over queries and keys as in equation 8.

    Args:
        attention (`Tensor`): (batch, heads, query, key).
        weights (`ComposeWeights`, *optional*): None leaves the heads as they are.

    Returns:
        `Tensor`: (batch, heads, query, key). Every term reads the un-composed input.
    """
    if weights is None:
        return attention
    a = attention.unflatten(1, (weights.groups, -1))  # (batch, group, head, query, key)
    composed = a
    if weights.static is not None:
        composed = composed + torch.einsum("bgmts,gmn->bgnts", a, weights.static)
    for side, x in ((weights.query, "t"), (weights.key, "s")):
        if side is None:
            continue
        if side.w1 is not None:
            w1, w2 = (w.unflatten(2, (weights.groups, -1)) for w in side[:2])  # (batch, rank, group, head, length)
            low_rank = _contract(f"bgmts,brgm{x}->bgrts", a, w1)  # (batch, group, rank, query, key)
            composed = composed + _contract(f"bgrts,brgn{x}->bgnts", low_rank, w2)
        if side.gate is not None:
            gate = side.gate.unflatten(1, (weights.groups, -1)).unsqueeze(-1 if x == "t" else -2)
            composed = composed + a * gate
    return composed.flatten(1, 2)


def _contract(equation: str, attention: Tensor, weights: Tensor) -> Tensor:
    """
    `torch.einsum`, as a sum of products where there is one query: einsum would multiply one tiny matrix per key, and
    take twice as long to decode.
    """
    if attention.shape[3] > 1:
        return torch.einsum(equation, attention, weights)
    # (batch, group, rank, head, query, key), one of the last two of length 1
    weights = weights.transpose(1, 2).unsqueeze(-1 if "t->" in equation else -2)
    if "bgrts," in equation:
        return (attention.unsqueeze(3) * weights).sum(2)
    return (attention.unsqueeze(2) * weights).sum(3)


def _without_autocast(attention):
    """Autocast would take the sums of a composition down to 16 bits; the functions below choose their own types."""

    @functools.wraps(attention)
    def wrapper(query, *args, **kwargs):
        if not torch.amp.is_autocast_available(query.device.type):
            return attention(query, *args, **kwargs)
        with torch.autocast(query.device.type, enabled=False):
            return attention(query, *args, **kwargs)

    return wrapper


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
    attention_mask: "Tensor | Visibility | None" = None,
    dropout: float = 0.0,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """
    [`composed_attention`] in the paper's words, with memory quadratic in the sequence. Same arguments.

    Returns:
        `Tensor`: (batch, heads, query, channels), in the query's dtype; with `return_weights` also the composed
        weights (batch, heads, query, key). The softmax and the compositions run in float64 if query or key are, else
        in float32; the two matrix products in the inputs' own types.

    Source: equation 4 and appendix D.
    """
    check_arguments(query, key, value, pre, post)
    visibility = _visibility(query, key, is_causal, sliding_window, attention_mask)
    if _is_empty(query, key):
        output = query.new_zeros(*query.shape[:3], value.shape[3])
        return (output, query.new_zeros(*query.shape[:3], key.shape[2])) if return_weights else output
    return _attend(
        query,
        key,
        value,
        pre,
        post,
        scaling=_default_scaling(query, scaling),
        bias=visibility.bias(0, query.shape[2], 0, key.shape[2]),
        hidden=visibility.hidden(0, query.shape[2], 0, key.shape[2], query.device),
        dropout=dropout,
        return_weights=return_weights,
    )


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
    attention_mask: "Tensor | Visibility | None" = None,
    dropout: float = 0.0,
    chunk_size: int | None = None,
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
        chunk_size (`int`, *optional*): Queries computed at once. None: chosen so that a chunk stays small.

    Returns:
        `Tensor`: (batch, heads, query, value channels), in the query's dtype. A query that sees no key gets zeros.
        The softmax and the compositions run in float32 (float64 for float64 inputs). Second derivatives need
        [`composed_attention_reference`] where the CPU form runs: without dropout, for at least 16 queries.

    Raises:
        ValueError: if shapes do not fit together, or `chunk_size` or `sliding_window` is below 1.

    Source: equations 3 to 8 of the paper.
    """
    check_arguments(query, key, value, pre, post)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}; use None to have it chosen.")
    visibility = _visibility(query, key, is_causal, sliding_window, attention_mask)
    scaling = _default_scaling(query, scaling)
    batch, heads, queries = query.shape[:3]
    if _is_empty(query, key):
        return query.new_zeros(batch, heads, queries, value.shape[3])
    # The head loop trades one large operation for many small ones: that pays on a CPU and for blocks of queries only.
    # It writes in place and has its own gradient, which neither tracing nor torch.func see through.
    if (
        query.device.type == "cpu"
        and dropout == 0.0
        and not is_tracing(query)
        and not torch._C._are_functorch_transforms_active()
        and queries >= 16
        and visibility.same_for_all_heads
        and not visibility.requires_grad
    ):
        return head_loop_attention(query, key, value, pre, post, scaling, visibility, chunk_size)

    if not visibility.lengths_are_known:
        # A graph for any length cannot hold one piece of code per chunk.
        hidden = visibility.hidden(0, queries, 0, key.shape[2], query.device)
        bias = visibility.bias(0, queries, 0, key.shape[2])
        return _attend(query, key, value, pre, post, scaling=scaling, bias=bias, hidden=hidden, dropout=dropout)
    chunk_size = chunk_size or max(16, min(256, 2**26 // (batch * heads * key.shape[2] + 1)))
    recompute = torch.is_grad_enabled() and queries > chunk_size
    outputs = []
    for start in range(0, queries, chunk_size):
        stop = min(start + chunk_size, queries)
        first, last = visibility.key_range(start, stop)
        arguments = (
            query[:, :, start:stop],
            key[:, :, first:last],
            value[:, :, first:last],
            _slice(pre, start, stop, first, last),
            _slice(post, start, stop, first, last),
        )
        options = {
            "scaling": scaling,
            "bias": visibility.bias(start, stop, first, last),
            "hidden": visibility.hidden(start, stop, first, last, query.device),
            "dropout": dropout,
        }
        if recompute:
            outputs.append(checkpoint(_attend, *arguments, use_reentrant=False, **options))
        else:
            outputs.append(_attend(*arguments, **options))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    *,
    scaling: float,
    bias: Tensor | None,
    hidden: Tensor | None,
    dropout: float = 0.0,
    return_weights: bool = False,
):
    """Appendix D, lines 43 to 48, for one block of queries and keys."""
    output_dtype = query.dtype
    query_key_dtype = torch.promote_types(query.dtype, key.dtype)
    query, key = query.to(query_key_dtype), key.to(query_key_dtype)
    dtype = compute_dtype(query, key)
    # A power of two scales the query exactly, and before the product, which could leave the range of float16.
    power_of_two = 2.0 ** (math.frexp(scaling)[1] - 1)
    # Folding the queries that share a key/value head into one matrix spares copying keys and values for each of them.
    key_value_heads = key.shape[1]
    grouped_query = (query * power_of_two).unflatten(1, (key_value_heads, -1)).flatten(2, 3)
    scores = grouped_query.matmul(key.transpose(-1, -2)).to(dtype) * (scaling / power_of_two)
    scores = scores.unflatten(2, (-1, query.shape[2])).flatten(1, 2)  # (batch, heads, query, key)
    scores = compose(scores, _to_dtype(pre, dtype))
    if bias is not None:
        scores = scores + bias.to(dtype)
    if hidden is not None:
        scores = scores.masked_fill(hidden, torch.finfo(dtype).min)
    weights = scores.softmax(dim=-1)
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0.0)  # a query that sees no key at all
    weights = compose(weights, _to_dtype(post, dtype))
    weights = torch.nn.functional.dropout(weights, p=dropout, training=dropout > 0.0)
    grouped_weights = weights.to(value.dtype).unflatten(1, (key_value_heads, -1)).flatten(2, 3)
    output = grouped_weights.matmul(value).to(output_dtype)
    output = output.unflatten(2, (-1, query.shape[2])).flatten(1, 2)  # (batch, heads, query, value channels)
    return (output, weights.to(output_dtype)) if return_weights else output


def _default_scaling(query: Tensor, scaling: float | None) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if scaling is None else scaling


def _is_empty(query: Tensor, key: Tensor) -> bool:
    return query.shape[0] * query.shape[2] * key.shape[2] == 0


def _visibility(query, key, is_causal, sliding_window, attention_mask) -> Visibility:
    visibility = attention_mask
    if not isinstance(visibility, Visibility):
        visibility = Visibility.from_mask(
            attention_mask,
            query_length=query.shape[2],
            key_length=key.shape[2],
            is_causal=is_causal,
            sliding_window=sliding_window,
        )
    visibility.check_fits(*query.shape[:3], key.shape[2])
    return visibility


def map_tensors(weights: ComposeWeights | None, function) -> ComposeWeights | None:
    """Apply `function(tensor, side)` to every tensor, where side is "query", "key" or "static"."""
    if weights is None:
        return None

    def apply(tensor, side):
        return None if tensor is None else function(tensor, side)

    query, key = (
        None if side is None else ComposeSide(*(apply(tensor, name) for tensor in side))
        for side, name in ((weights.query, "query"), (weights.key, "key"))
    )
    return ComposeWeights(query, key, apply(weights.static, "static"), weights.groups)


def _to_dtype(weights: ComposeWeights | None, dtype: torch.dtype) -> ComposeWeights | None:
    return map_tensors(weights, lambda tensor, _: tensor.to(dtype))


def _slice(weights: ComposeWeights | None, start: int, stop: int, first: int, last: int) -> ComposeWeights | None:
    ranges = {"query": slice(start, stop), "key": slice(first, last), "static": slice(None)}
    return map_tensors(weights, lambda tensor, side: tensor[..., ranges[side]])


def check_arguments(
    query: Tensor, key: Tensor, value: Tensor, pre: ComposeWeights | None, post: ComposeWeights | None
) -> None:
    """Raise ValueError if the shapes of one call of composed attention do not fit together."""
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise ValueError(
            "query, key and value must be (batch, heads, length, channels), got shapes "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}."
        )
    batch, heads, queries, channels = query.shape
    keys = key.shape[2]
    if key.shape[0] != batch or key.shape[3] != channels or value.shape[:3] != key.shape[:3]:
        raise ValueError(
            "key must share query's batch and channels, and value key's batch, heads and length, got query "
            f"{tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}."
        )
    if key.shape[1] == 0 or heads % key.shape[1] != 0:
        raise ValueError(f"The {key.shape[1]} key/value heads must divide the {heads} query heads.")
    for name, weights in (("pre", pre), ("post", post)):
        if weights is None:
            continue
        if weights.groups < 1 or heads % weights.groups != 0:
            raise ValueError(f"{name}.groups must divide the {heads} heads, got {weights.groups}.")
        per_group = heads // weights.groups
        if weights.static is not None and weights.static.shape != (weights.groups, per_group, per_group):
            raise ValueError(
                f"{name}.static must be (groups, heads per group, heads per group) = "
                f"{(weights.groups, per_group, per_group)}, got {tuple(weights.static.shape)}."
            )
        for side_name, side, length in (("query", weights.query, queries), ("key", weights.key, keys)):
            if side is None:
                continue
            if (side.w1 is None) != (side.w2 is None):
                raise ValueError(f"{name}.{side_name} needs both w1 and w2, or neither.")
            for field, tensor in side._asdict().items():
                if tensor is None:
                    continue
                rank = side.w1.shape[1] if field != "gate" and side.w1.dim() > 1 else 1
                expected = (batch, heads, length) if field == "gate" else (batch, rank, heads, length)
                if tensor.shape != expected:
                    raise ValueError(f"{name}.{side_name}.{field} must be {expected}, got {tuple(tensor.shape)}.")
