"""Dynamically Composable Multi-Head Attention as an operator: equations 3 to 8 and appendix D of the paper.

`composed_attention` checks its arguments and passes them to an implementation from a table. `plain`, in torch
operators, supports every device, mask and dtype; `register_implementation` adds faster ones. In a model,
`attn_implementation="dcmha_NAME"` selects the implementation NAME.
"""

import copy
import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import has_static_value
from torch.utils.checkpoint import checkpoint
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_tracing


# Transformers knows the implementation NAME as the attention function dcmha_NAME.
PREFIX = "dcmha_"


class ComposeSide:
    """
    The query-wise or the key-wise side of a composition: a low-rank map, a gate, or both, for every position.

    Args:
        w1 (`Tensor`, *optional*): (batch, heads, length, rank), maps heads to ranks; W_q1 or W_k1 of equation 8,
            normalised over heads. Given together with `w2`.
        w2 (`Tensor`, *optional*): (batch, heads, length, rank), maps ranks to heads; W_q2 or W_k2.
        gate (`Tensor`, *optional*): (batch, heads, length); W_qg or W_kg, after tanh.
        factors (`Tensor`, *optional*): All of this in one tensor (batch, heads, length, 2 rank + 1) instead, as the
            cache stores it: w1, then w2, then the gate. 2 rank channels have no gate, a single one is a gate.

    Raises:
        ValueError: if too little or too much is given, or shapes do not fit.
    """

    def __init__(
        self,
        w1: Tensor | None = None,
        w2: Tensor | None = None,
        gate: Tensor | None = None,
        *,
        factors: Tensor | None = None,
    ):
        if (w1 is None) != (w2 is None) or (factors is None) == (w1 is None and gate is None):
            raise ValueError("A ComposeSide takes factors, or w1 and w2, a gate, or all three; use None for no side.")
        if factors is None:
            if w1 is not None and w2 is not None and w1.shape != w2.shape:
                raise ValueError(f"w1 and w2 must have the same shape, got {tuple(w1.shape)} and {tuple(w2.shape)}.")
            parts = (w1, w2, None if gate is None else gate.unsqueeze(-1))
            factors = torch.cat([part for part in parts if part is not None], dim=-1)
        if factors.dim() != 4:
            raise ValueError(f"factors must be (batch, heads, length, channels), got shape {tuple(factors.shape)}.")
        self.factors = factors

    @property
    def rank(self) -> int:
        """Rank of the low-rank map; 0 if there is none."""
        return int(self.factors.shape[-1]) // 2  # a tensor under torch.jit.trace

    @property
    def w1(self) -> Tensor | None:
        """(batch, heads, length, rank)."""
        return self.factors[..., : self.rank] if self.rank > 0 else None

    @property
    def w2(self) -> Tensor | None:
        """(batch, heads, length, rank)."""
        return self.factors[..., self.rank : 2 * self.rank] if self.rank > 0 else None

    @property
    def gate(self) -> Tensor | None:
        """(batch, heads, length)."""
        return self.factors[..., -1] if int(self.factors.shape[-1]) % 2 else None

    def __repr__(self) -> str:
        return f"ComposeSide(factors={tuple(self.factors.shape)}, rank={self.rank}, gate={self.gate is not None})"


class ComposeWeights(NamedTuple):
    """
    The weights of one stage of composition: of the attention scores, or of the attention weights.

    Args:
        query (`ComposeSide`, *optional*): Query-wise low-rank map and gate (branches 2 and 3), length = queries.
        key (`ComposeSide`, *optional*): Key-wise low-rank map and gate (branches 4 and 5), length = keys.
        static (`Tensor`, *optional*): (groups, heads per group, heads per group) [in, out]; the static matrix of
            branch 1, to which equation 7 adds the identity.
        groups (`int`, defaults to 1): Number of groups of consecutive heads that compose among themselves (section
            3.2); the rank is per group.
    """

    query: ComposeSide | None = None
    key: ComposeSide | None = None
    static: Tensor | None = None
    groups: int = 1


Weights: TypeAlias = ComposeWeights | None
# Called with the name of a map and the map, (batch, heads, query, key); what it returns replaces it.
Observer: TypeAlias = Callable[[str, Tensor], Tensor]


def map_tensors(weights: Weights, function: Callable[[Tensor, str], Tensor]) -> Weights:
    """Apply `function(tensor, name)` to all tensors; their names are "query", "key" and "static"."""
    if weights is None:
        return None
    query, key = (
        None if side is None else ComposeSide(factors=function(side.factors, name))
        for side, name in ((weights.query, "query"), (weights.key, "key"))
    )
    static = None if weights.static is None else function(weights.static, "static")
    return ComposeWeights(query, key, static, weights.groups)


def values_are_known(values: Any) -> bool:
    """Whether Python can read the values and branch on them: not while a graph is traced, nor under `vmap`."""
    if not isinstance(values, Tensor):
        return True
    functorch = torch._C._functorch
    if values.is_meta or is_tracing(values) or functorch.is_batchedtensor(values):
        return False
    # Other transforms of torch.func wrap what they are given, inside of `vmap` too.
    return not functorch.is_functorch_wrapped_tensor(values) or values_are_known(functorch.get_unwrapped(values))


@torch.compiler.assume_constant_result  # Dynamo before torch 2.14 takes any compilation for an export
def is_exporting() -> bool:
    """Whether torch.export or TorchScript makes a graph for another runtime, which has no operators but torch's."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


def is_number(length: int) -> bool:
    """Whether a length is a number, and not a symbol, or a tensor of TorchScript, in a graph for all lengths."""
    return not isinstance(length, Tensor) and (not torch.compiler.is_compiling() or has_static_value(length))


@dataclass(eq=False, repr=False)
class Visibility:
    """
    The mask of an attention layer, evaluated for one block of queries and keys at a time.

    Except for `dense` it grows linearly with the sequence. Keys that no query of a block can see are not computed.

    Args:
        query_length (`int`): Number of queries.
        key_length (`int`): Number of keys.
        is_causal (`bool`, defaults to `True`): Hide keys after the query.
        sliding_window (`int`, *optional*): t - w < s <= t if causal, else |t - s| < w.
        query_offset (`int`, *optional*): Index of the key at the position of the first query. None: the last query is
            at the position of the last key.
        padding (`Tensor`, *optional*): (batch, key), nonzero for real tokens.
        dense (`Tensor`, *optional*): (batch or 1, heads or 1, query, key), boolean with True for visible, or floating
            point, added to the scores; values at or below half the dtype's smallest number hide.
        sequence_ids (`Tensor`, *optional*): (batch, query) numbers of packed sequences: a token sees only tokens of
            the same number. Queries and keys must be the same tokens.

    Raises:
        ValueError: if a shape does not fit, or the window is below 1.
    """

    query_length: int
    key_length: int
    _: KW_ONLY
    is_causal: bool = True
    sliding_window: int | None = None
    query_offset: int | Any = None  # always a number once it is made
    padding: Tensor | None = None
    dense: Tensor | None = None
    sequence_ids: Tensor | None = None

    def __post_init__(self) -> None:
        query_length, key_length = self.query_length, self.key_length
        padding, dense, sequence_ids = self.padding, self.dense, self.sequence_ids
        if self.sliding_window is not None and self.sliding_window < 1:
            window = self.sliding_window
            raise ValueError(f"sliding_window must be at least 1, got {window}; use None for full attention.")
        if padding is not None and padding.shape[-1] != key_length:
            raise ValueError(f"The padding mask covers {padding.shape[-1]} keys, but there are {key_length}.")
        if dense is not None and dense.shape[-2:] != (query_length, key_length):
            raise ValueError(
                f"The attention mask must end in (query, key) = {(query_length, key_length)}, got {tuple(dense.shape)}."
            )
        if sequence_ids is not None and (query_length != key_length or sequence_ids.shape[-1] != key_length):
            raise ValueError(
                "Packed sequences need as many queries as keys and one number for each, got "
                f"{query_length} queries, {key_length} keys and {sequence_ids.shape[-1]} numbers."
            )
        if self.query_offset is None:
            self.query_offset = key_length - query_length
        if padding is not None:
            self.padding = padding.to(torch.bool)

    def to(self, *args: Any, **kwargs: Any) -> "Visibility":
        """A copy with its tensors moved, as `Tensor.to`, for models spread over devices."""
        moved = copy.copy(self)
        for name in ("padding", "dense", "sequence_ids"):
            tensor = getattr(self, name)
            setattr(moved, name, None if tensor is None else tensor.to(*args, **kwargs))
        return moved

    @property
    def lengths_are_known(self) -> bool:
        """Whether lengths and offset are numbers, not symbols of a graph for all lengths."""
        return all(is_number(length) for length in (self.query_length, self.key_length, self.query_offset))

    def key_range(self, start: int, stop: int) -> tuple[int, int]:
        """Range of keys, at least one, that covers those which queries start to stop - 1 see."""
        first, last = 0, self.key_length
        if self.is_causal:
            last = min(last, stop + self.query_offset)
        if self.sliding_window is not None:
            first = max(first, start + self.query_offset - self.sliding_window + 1)
            last = min(last, stop - 1 + self.query_offset + self.sliding_window)
        for tensor in (self.dense, self.sequence_ids):
            # Reading its values saves no work for a single query.
            if tensor is None or self.query_length == 1 or not values_are_known(tensor):
                continue
            if tensor is self.dense:
                seen = (~_hidden_by_dense(tensor[:, :, start:stop])).flatten(0, 2).any(0)
            else:
                seen = (tensor[:, start:stop, None] == tensor[:, None, :]).flatten(0, 1).any(0)
            indices = seen.nonzero()  # (seen keys, 1)
            if len(indices) > 0:
                first, last = max(first, int(indices[0])), min(last, int(indices[-1]) + 1)
        first = min(max(first, 0), self.key_length - 1)
        return first, max(last, first + 1)

    def hidden(self, start: int, stop: int, first: int, last: int, device: torch.device | None = None) -> Tensor | None:
        """Which of the keys first to last - 1 those queries cannot see, broadcasts to (batch, heads, query, key)."""
        parts = self._hidden_by_band(start, stop, first, last, device)
        if self.dense is not None:
            parts.append(_hidden_by_dense(self.dense[:, :, start:stop, first:last]))
        if self.padding is not None:
            parts.append(~self.padding[:, None, None, first:last])
        if self.sequence_ids is not None:
            ids = self.sequence_ids
            parts.append((ids[:, start:stop, None] != ids[:, None, first:last])[:, None])
        return functools.reduce(torch.logical_or, parts) if parts else None

    def _hidden_by_band(
        self, start: int, stop: int, first: int, last: int, device: torch.device | None
    ) -> list[Tensor]:
        """Masks (query, key) of what causality and window hide, without those that hide nothing."""
        window, known = self.sliding_window, self.lengths_are_known
        first_position, last_position = start + self.query_offset, stop - 1 + self.query_offset
        # Comparing symbols would restrict the graph to lengths with the same result.
        too_late = self.is_causal and not (known and last - 1 <= first_position)
        too_old = window is not None and not (known and last_position - first < window)
        too_new = window is not None and not self.is_causal and not (known and last - 1 - first_position < window)
        if not (too_late or too_old or too_new):
            return []
        position = torch.arange(first_position, last_position + 1, device=device)
        age = position[:, None] - torch.arange(first, last, device=device)  # (query, key)
        parts = [age < 0] if too_late else []
        if window is not None:
            parts += [age >= window] if too_old else []
            parts += [age <= -window] if too_new else []
        return parts

    def bias(self, start: int, stop: int, first: int, last: int) -> Tensor | None:
        """What a floating point mask adds to this block's scores, (batch or 1, heads or 1, query, key), or None."""
        if self.dense is None or not self.dense.dtype.is_floating_point:
            return None
        block = self.dense[:, :, start:stop, first:last]
        return block.masked_fill(_hidden_by_dense(block), 0.0)


def _hidden_by_dense(block: Tensor) -> Tensor:
    if block.dtype.is_floating_point:
        return block <= torch.finfo(block.dtype).min / 2
    return ~block.to(torch.bool)


def compose(attention: Tensor, weights: Weights) -> Tensor:
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
    # Axis letters: b batch, g group, m and n heads of a group (in and out), t query, s key, r rank.
    a = _in_groups(attention, weights.groups)  # (batch, group, head, query, key)
    composed = a
    if weights.static is not None:
        composed = composed + torch.einsum("bgmts,gmn->bgnts", a, weights.static)  # A W_b
    for side, axis in ((weights.query, "t"), (weights.key, "s")):
        if side is None:
            continue
        w1, w2, gate = (
            None if part is None else _in_groups(part, weights.groups) for part in (side.w1, side.w2, side.gate)
        )  # (batch, group, head, length, rank), the gate without the rank
        if w1 is not None and w2 is not None:
            low_rank = torch.einsum(f"bgmts,bgm{axis}r->bgrts", a, w1)  # (batch, group, rank, query, key)
            composed = composed + torch.einsum(f"bgrts,bgn{axis}r->bgnts", low_rank, w2)  # (A W_1) W_2
        if gate is not None:
            composed = composed + torch.einsum(f"bgmts,bgm{axis}->bgmts", a, gate)  # A * W_g
    return composed.flatten(1, 2)


def _in_groups(tensor: Tensor, groups: int) -> Tensor:
    """(batch, heads, ...) -> (batch, group, head of the group, ...)."""
    return tensor.reshape(tensor.shape[0], groups, tensor.shape[1] // groups, *tensor.shape[2:])


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: Weights,
    post: Weights,
    *,
    scaling: float,
    mask: Visibility,
    dropout: float = 0.0,
    chunk_size: int | None = None,
) -> Tensor:
    """
    Composed attention in torch operators, with derivatives of any order. Chunks of queries are computed over the keys
    that they can see, and again in the backward pass, so that memory grows linearly with the sequence.
    """
    (batch, heads, queries, _), keys = query.shape, key.shape[2]
    arguments = (query, key, value, pre, post, scaling, mask, dropout)
    if not mask.lengths_are_known:
        # A graph for all lengths cannot contain a loop over chunks.
        return _attend_block(*arguments, (0, queries, 0, keys))[0]
    blocks, outputs = plain_blocks(mask, batch * heads, chunk_size), []
    # Recomputing hooks into what a backward pass saves, which torch.func does not support.
    recompute = len(blocks) > 1 and torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
    for block in blocks:
        if recompute:
            outputs.append(checkpoint(_attend_block, *arguments, block, use_reentrant=False)[0])
        else:
            outputs.append(_attend_block(*arguments, block)[0])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def plain_blocks(mask: Visibility, rows: int, chunk_size: int | None = None) -> list[tuple[int, int, int, int]]:
    """First and last + 1 of the queries, then of the keys, that [`plain_attention`] takes at once of so many heads."""
    queries, keys = mask.query_length, mask.key_length
    chunk_size = chunk_size or max(16, min(256, 2**26 // (rows * keys + 1)))
    bounds = ((start, min(start + chunk_size, queries)) for start in range(0, queries, chunk_size))
    return [(start, stop, *mask.key_range(start, stop)) for start, stop in bounds]


def _attend_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: Weights,
    post: Weights,
    scaling: float,
    mask: Visibility,
    dropout: float,
    block: tuple[int, int, int, int],
    observe: Observer | None = None,
) -> tuple[Tensor, Tensor]:
    """Appendix D, lines 43 to 48: the output and the composed weights (batch, heads, query, key) of a block."""
    start, stop, first, last = block  # of queries, and of keys
    output_dtype = query.dtype
    # Scores, softmax and compositions are computed in float32, or float64 if the query or the key is.
    dtype = torch.float64 if torch.float64 in (query.dtype, key.dtype) else torch.float32
    query, key, value = query[:, :, start:stop], key[:, :, first:last], value[:, :, first:last]
    if query.device.type == "cpu":
        # Most CPUs multiply 16-bit numbers far more slowly than 32-bit numbers.
        query, key, value = (states.to(dtype) for states in (query, key, value))

    def in_block(weights: Tensor, name: str) -> Tensor:
        if name != "static":
            weights = weights[:, :, start:stop] if name == "query" else weights[:, :, first:last]
        return weights.to(dtype)

    pre, post = (map_tensors(stage, in_block) for stage in (pre, post))
    bias, hidden = mask.bias(*block), mask.hidden(*block, query.device)
    observe = (lambda name, attention: attention) if observe is None else observe
    scores = observe("scores", _scaled_scores(query, key, scaling, dtype))  # (batch, heads, query, key)
    scores = observe("composed_scores", compose(scores, pre))
    if bias is not None:
        scores = scores + bias.to(dtype)
    if hidden is not None:
        scores = scores.masked_fill(hidden, torch.finfo(dtype).min)
    weights = scores.softmax(dim=-1)
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0.0)  # a query that sees no key at all
    weights = observe("composed_weights", compose(observe("weights", weights), post))
    if dropout > 0.0:
        weights = torch.nn.functional.dropout(weights, p=dropout)
    return _weighted_values(weights, value).to(output_dtype), weights


def _scaled_scores(query: Tensor, key: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """Scores (batch, heads, query, key) in `dtype`; lines 43 and 44 of appendix D."""
    product_dtype = torch.promote_types(query.dtype, key.dtype)
    # In 16 bits a power of two scales the query exactly, and before the product, which could leave float16's range.
    factor = scaling if product_dtype == dtype else 2.0 ** (math.frexp(scaling)[1] - 1)
    query = _by_key_head(query.to(product_dtype) * factor, key.shape[1])
    scores = torch.einsum("bkhtd,bksd->bkhts", query, key.to(product_dtype)).to(dtype)
    return (scores if factor == scaling else scores * (scaling / factor)).flatten(1, 2)


def _weighted_values(weights: Tensor, value: Tensor) -> Tensor:
    """Values summed by their weights, (batch, heads, query, value channels); line 48 of appendix D."""
    weights = _by_key_head(weights.to(value.dtype), value.shape[1])
    return torch.einsum("bkhts,bksd->bkhtd", weights, value).flatten(1, 2)


def _by_key_head(tensor: Tensor, key_heads: int) -> Tensor:
    """(batch, heads, ...) -> (batch, key/value head, head that shares it, ...), so that none has to be repeated."""
    return tensor.unflatten(1, (key_heads, tensor.shape[1] // key_heads))


@dataclass(frozen=True)
class Implementation:
    """
    One way to compute composed attention.

    Args:
        name (`str`): As `implementation=` takes it.
        forward (`Callable`): `forward(query, key, value, pre, post, *, scaling, mask, dropout, chunk_size)` returns the
            output. Shapes are those of [`composed_attention`], already checked; `mask` is a [`Visibility`]; autocast
            is off.
        supports (`Callable`): `supports(query, key, value, pre, post, *, mask, dropout)` returns None if the
            implementation can compute this, else the reason why not, which messages quote.
        automatic (`Callable`, *optional*): As `supports`, for calls that name no implementation. None: those never
            use this implementation.
    """

    name: str
    forward: Callable[..., Tensor]
    supports: Callable[..., str | None]
    automatic: Callable[..., str | None] | None = None


_TABLE: dict[str, Implementation] = {}


def register_implementation(
    name: str,
    forward: Callable[..., Tensor],
    supports: Callable[..., str | None] = lambda *_, **__: None,
    automatic: Callable[..., str | None] | None = None,
) -> None:
    """
    Add an [`Implementation`], or replace the one with this name. The last one that was registered is tried first. In a
    model, `attn_implementation="dcmha_NAME"` selects it.
    """
    _TABLE.pop(name, None)
    _TABLE[name] = Implementation(name, forward, supports, automatic)
    ALL_ATTENTION_FUNCTIONS.register(PREFIX + name, functools.partial(composed_attention_forward, implementation=name))
    ALL_MASK_ATTENTION_FUNCTIONS.register(PREFIX + name, eager_mask)


def implementations() -> dict[str, Implementation]:
    """All implementations by name, in the order in which they were registered."""
    return dict(_TABLE)


def explain_choice(
    query: Tensor, key: Tensor, value: Tensor, pre: Weights, post: Weights, *, dropout: float = 0.0, **mask: Any
) -> list[tuple[str, str | None]]:
    """
    The implementations that [`composed_attention`] would try for these arguments; `mask` stands for its `is_causal`,
    `sliding_window` and `attention_mask`.

    Returns:
        `list[tuple[str, str | None]]`: names with the reasons why they are not selected; None for the one that is.
    """
    visibility = _checked_mask(query, key, value, pre, post, **mask)
    return _tried(query, key, value, pre, post, mask=visibility, dropout=dropout)


def _tried(*arguments: Any, **options: Any) -> list[tuple[str, str | None]]:
    tried: list[tuple[str, str | None]] = []
    for implementation in [_TABLE["plain"]] if is_exporting() else reversed(_TABLE.values()):
        if implementation.automatic is not None:
            tried.append((implementation.name, implementation.automatic(*arguments, **options)))
            if tried[-1][1] is None:
                break
    return tried


def _choose(name: str | None, *arguments: Any, **options: Any) -> Implementation:
    if name is None:
        return _TABLE[_tried(*arguments, **options)[-1][0]]
    if name not in _TABLE:
        raise ValueError(f"implementation must be one of {', '.join(_TABLE)}, got {name!r}.")
    if (reason := _TABLE[name].supports(*arguments, **options)) is not None:
        raise ValueError(f"implementation {name!r} cannot run here: {reason}; leave it out to have one chosen.")
    return _TABLE[name]


def composed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: Weights,
    post: Weights,
    *,
    scaling: float | None = None,
    is_causal: bool = True,
    sliding_window: int | None = None,
    attention_mask: Tensor | Visibility | None = None,
    dropout: float = 0.0,
    chunk_size: int | None = None,
    implementation: str | None = None,
    return_weights: bool = False,
    observe: Observer | None = None,
) -> Any:
    """
    Dynamically Composable Multi-Head Attention for any model: softmax attention in which `pre` mixes the scores across
    heads before mask and softmax, and `post` mixes the weights after them; equations 3 to 8 of the paper.

    Args:
        query (`Tensor`): (batch, heads, query, channels).
        key (`Tensor`): (batch, key/value heads, key, channels); the key/value heads divide the heads.
        value (`Tensor`): (batch, key/value heads, key, value channels).
        pre, post (`ComposeWeights`, *optional*): None for no composition at that stage.
        scaling (`float`, *optional*): Factor of the scores. None: channels ** -0.5.
        is_causal (`bool`, defaults to `True`): Hide later keys. The last query is at the position of the last key.
        sliding_window (`int`, *optional*): Visible keys, the query's position included: t - w < s <= t if causal, else
            |t - s| < w.
        attention_mask (`Tensor` or `Visibility`, *optional*): (batch, key) with 0 for padding, or
            (batch or 1, heads or 1, query, key), boolean with True for visible, or floating point, added to the
            composed scores. It further restricts what `is_causal` and `sliding_window` allow. A [`Visibility`] stands
            for all three.
        dropout (`float`, defaults to 0.0): Probability of dropping a composed weight.
        chunk_size (`int`, *optional*): Queries that "plain" computes at once. None: so many that a chunk stays small.
        implementation (`str`, *optional*): A name from [`implementations`]. None: see [`explain_choice`].
        return_weights (`bool`, defaults to `False`): Also return the composed weights. Uses "plain" and quadratic
            memory.
        observe (`Callable`, *optional*): Called with the name and the values (batch, heads, query, key) of every
            attention map; the values that it returns are used instead. The names are "scores" (scaled, not masked),
            "composed_scores", "weights" (masked) and "composed_weights". Uses "plain" and quadratic memory.

    Returns:
        `Tensor`: (batch, heads, query, value channels), in the query's dtype; zeros for a query that sees no key. The
        softmax and the compositions run in float32 (float64 for float64 inputs). With `return_weights` a pair of this
        and the composed weights (batch, heads, query, key); they can be negative, and a row need not sum to one.
        Second derivatives need `implementation="plain"`.

    Raises:
        ValueError: if shapes do not fit, a number is below 1, or the implementation cannot compute this.
    """
    mask = _checked_mask(query, key, value, pre, post, is_causal, sliding_window, attention_mask)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}; use None to have it chosen.")
    if wants_maps := return_weights or observe is not None:
        implementation = "plain"
    chosen = _choose(implementation, query, key, value, pre, post, mask=mask, dropout=dropout)
    if query.shape[0] * query.shape[2] * key.shape[2] == 0:
        output = query.new_zeros(*query.shape[:3], value.shape[3])
        return (output, query.new_zeros(*query.shape[:3], key.shape[2])) if return_weights else output
    scaling = 1.0 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    device = query.device.type
    autocasts = device != "meta" and torch.is_autocast_enabled(device)
    # Autocast would compute compositions in 16 bits; implementations choose the types.
    with torch.autocast(device, enabled=False) if autocasts else nullcontext():
        if wants_maps:
            block = (0, query.shape[2], 0, key.shape[2])
            output, weights = _attend_block(query, key, value, pre, post, scaling, mask, dropout, block, observe)
            return (output, weights.to(query.dtype)) if return_weights else output
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
    pre: Weights = None,
    post: Weights = None,
    output_attentions: bool = False,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    implementation: str | None = None,
    observe: Observer | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """
    Composed attention with the signature of Transformers' attention functions. `is_causal` defaults to the module's.

    Returns:
        (batch, query, heads, channels), and with `output_attentions` the composed weights (batch, heads, query, key).
    """
    # A mask of four dimensions contains causality and window.
    is_dense = isinstance(attention_mask, Tensor) and attention_mask.dim() == 4
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    result = composed_attention(
        query,
        key,
        value,
        pre,
        post,
        scaling=scaling,
        is_causal=is_causal and not is_dense,
        sliding_window=None if is_dense else sliding_window,
        attention_mask=attention_mask,
        dropout=dropout,
        implementation=implementation,
        return_weights=output_attentions,
        observe=observe,
    )
    output, weights = result if output_attentions else (result, None)
    return output.transpose(1, 2).contiguous(), weights


def checked_implementation(name: str) -> str:
    """The name of an attention implementation that composes; ValueError for others, which would compute without it."""
    names = ["eager", *(PREFIX + known for known in _TABLE)]
    if name not in names:
        raise ValueError(
            f"attn_implementation={name!r} cannot compose attention heads; use one of {', '.join(names)}, or switch "
            "composition off."
        )
    return name


def _checked_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: Weights,
    post: Weights,
    is_causal: bool = True,
    sliding_window: int | None = None,
    attention_mask: Tensor | Visibility | None = None,
) -> Visibility:
    """The mask of a call of [`composed_attention`]; ValueError if the shapes of the arguments do not fit together."""
    fits = query.dim() == key.dim() == value.dim() == 4 and value.shape[:3] == key.shape[:3]
    if not fits or key.shape[0] != query.shape[0] or key.shape[3] != query.shape[3]:
        raise ValueError(
            "query must be (batch, heads, query, channels), key (batch, key/value heads, key, channels) and value "
            f"(batch, key/value heads, key, value channels), got {tuple(query.shape)}, {tuple(key.shape)} and "
            f"{tuple(value.shape)}."
        )
    (batch, heads, queries, _), keys = query.shape, key.shape[2]
    if key.shape[1] == 0 or heads % key.shape[1] != 0:
        raise ValueError(f"The {key.shape[1]} key/value heads must divide the {heads} query heads.")
    for name, weights in (("pre", pre or ComposeWeights()), ("post", post or ComposeWeights())):
        if weights.groups < 1 or heads % weights.groups != 0:
            raise ValueError(f"{name}.groups must divide the {heads} heads, got {weights.groups}.")
        static_shape = (weights.groups, heads // weights.groups, heads // weights.groups)
        if weights.static is not None and weights.static.shape != static_shape:
            raise ValueError(
                f"{name}.static must be (groups, heads per group, heads per group) = {static_shape}, got "
                f"{tuple(weights.static.shape)}."
            )
        for kind, side, length in (("query", weights.query, queries), ("key", weights.key, keys)):
            if side is not None and side.factors.shape[:3] != (batch, heads, length):
                raise ValueError(
                    f"{name}.{kind} must hold factors (batch, heads, length, channels) for (batch, heads, length) "
                    f"= {(batch, heads, length)}, got {tuple(side.factors.shape)}."
                )
    mask = attention_mask
    if mask is None or isinstance(mask, Tensor):  # else a Visibility, which a copy of this file may have defined
        if mask is not None and mask.dim() not in (2, 4):
            raise ValueError(f"attention_mask must have 2 dimensions (batch, key) or 4, got shape {tuple(mask.shape)}.")
        padding, dense = (mask, None) if mask is None or mask.dim() == 2 else (None, mask)
        band: dict[str, Any] = {"is_causal": is_causal, "sliding_window": sliding_window}
        mask = Visibility(queries, keys, **band, padding=padding, dense=dense)
    tensors = [tensor for tensor in (mask.padding, mask.dense, mask.sequence_ids) if tensor is not None]
    fits = not tensors or all(tensor.shape[0] in (1, batch) for tensor in tensors)
    fits = fits and (mask.dense is None or mask.dense.shape[1] in (1, heads))
    if not fits or (mask.query_length, mask.key_length) != (queries, keys):
        raise ValueError(
            f"The mask must be for {batch} rows, {heads} heads, {queries} queries and {keys} keys, got one for "
            f"{mask.query_length} queries and {mask.key_length} keys with {[tuple(t.shape) for t in tensors]}."
        )
    return mask


register_implementation("plain", plain_attention, automatic=lambda *_, **__: None)
