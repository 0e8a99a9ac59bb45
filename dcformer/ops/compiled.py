"""Composed attention in torch alone, shaped so that its compiler fuses each composition into few kernels.

Of a chunk of queries, the scores of all heads are one product of matrices; the composition before the softmax, mask,
softmax and the composition after it follow in float32 as sums over heads and elementwise arithmetic, which the compiler
joins; and one product with the values ends it. A rank's map is a multiplication and a sum over heads, not a product of
matrices: heads x 1 is too small for one, and would keep the compiler from joining what comes before and after.

The backward pass is compiled likewise: it scores and composes a chunk again and derives it, so that nothing of the size
of the scores outlives a chunk, and adds what a chunk gives to keys into float32.

One piece of code serves every length. The numbers of queries and keys of a chunk are symbols of the compiler, and what
a query sees of causality and window are two numbers in a tensor, so that no length or position is a constant of it.

Axis letters: b batch, g group, m and n heads of a group, t query, s key.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import _config as _symbols
from torch.fx.experimental.symbolic_shapes import has_static_value
from torch.utils.checkpoint import checkpoint

from .arguments import Composition, Mask
from .chunks import Chunk, split_into_chunks


# Scores of a chunk: 128 MiB of float32, which a handful of temporary tensors multiply.
_SCORES_PER_CHUNK = 2**25
_MOST_QUERIES = 512
_FEWEST_QUERIES = 16

# A part of a tensor that is longer by this is never contiguous, and begins where 16 bytes do if the whole does.
_PADDING = 16

# A graph for every set of inputs that are there or not, types, and batches of one; torch gives up after 8.
_MOST_GRAPHS = 256

# By the names that tensors have here: the dimension of the queries, that of the keys, and the dimensions whose sizes
# are constants of the code; the batch and the lengths are not.
_DIMENSIONS: dict[str, tuple[int | None, int | None, list[int]]] = {
    "query": (3, None, [1, 2, 4]),
    "key": (None, 1, [2]),
    "value": (None, 1, [2]),
    "pre.query": (4, None, [0, 2, 3]),
    "pre.key": (None, 4, [0, 2, 3]),
    "pre.static": (None, None, [0, 1, 2]),
    "post.query": (4, None, [0, 2, 3]),
    "post.key": (None, 4, [0, 2, 3]),
    "post.static": (None, None, [0, 1, 2]),
    "bias": (2, 3, [1]),
    "lowest": (0, None, []),
    "highest": (0, None, []),
    "position": (None, 0, []),
    "padding": (None, 1, []),
    "query_ids": (1, None, []),
    "key_ids": (None, 1, []),
    "visible": (2, 3, [1]),
    "keep": (2, 3, [1]),
}


def compiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: Composition | None,
    post: Composition | None,
    *,
    scaling: float,
    mask: Mask,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    chunk_size: int | None = None,
) -> Tensor:
    """
    Composed attention by code that torch compiles when it is first needed, some ten seconds for each kind of input.

    Inside a graph that is being compiled already it becomes a part of that graph: as chunks where the lengths are
    numbers, as one chunk of all queries, with memory quadratic in the length, where they are symbols.

    Args:
        query (`Tensor`): (batch, heads, query, channels).
        key (`Tensor`): (batch, key/value heads, key, channels); the key/value heads divide the heads.
        value (`Tensor`): (batch, key/value heads, key, value channels).
        pre, post (`Composition`, *optional*): None for no composition at that place.
        scaling (`float`): Factor of the scores.
        mask (`Mask`): What each query sees. `visible` may also differ between heads.
        bias (`Tensor`, *optional*): (batch or 1, heads or 1, query, key), added to the composed scores; has a gradient.
        dropout (`float`, defaults to 0.0): Probability of dropping a composed weight.
        chunk_size (`int`, *optional*): Queries computed at once. None: 16 to 512, so that their scores stay below
            128 MiB of float32, and in a window not much more than the window.

    Returns:
        `Tensor`: (batch, heads, query, value channels), in the query's dtype. A query that sees no key gets zeros.
        Products of matrices are in the inputs' type, softmax and compositions in float32 (float64 for float64).

    Raises:
        ValueError: where second derivatives are asked for.

    Source: equations 3 to 8 of the paper.
    """
    operands = _operands(query, key, value, pre, post, bias)
    hidden_by = _hidden_by(mask, query.shape[2], key.shape[2], query.device)
    if _is_watched(query):
        return _attend_in_the_open(operands, hidden_by, mask, scaling, dropout, chunk_size)
    keep_seed = int(torch.randint(2**62, ()).item()) if dropout > 0.0 else None
    size = chunk_size or _chosen_size(query, key, mask)
    chunks = split_into_chunks(mask, query.shape[2], key.shape[2], size)
    call = _Call(chunks, hidden_by, scaling, dropout, keep_seed, list(operands))
    output: Tensor = _ChunkedAttention.apply(call, *operands.values())
    return output


class _Call:
    """What one call of composed attention holds beside tensors with a gradient."""

    def __init__(
        self,
        chunks: list[Chunk],
        hidden_by: dict[str, Tensor],
        scaling: float,
        dropout: float,
        keep_seed: int | None,
        names: list[str],
    ):
        self.chunks = chunks
        self.hidden_by = hidden_by
        self.scaling = scaling
        self.dropout = dropout
        self.keep_seed = keep_seed
        self.names = names

    def keeps(self, operands: dict[str, Tensor]) -> torch.Generator | None:
        """The random numbers of dropout, the same at every pass over the chunks."""
        if self.keep_seed is None:
            return None
        return torch.Generator(operands["query"].device).manual_seed(self.keep_seed)

    def chunk_of(
        self, chunk: Chunk, operands: dict[str, Tensor], generator: torch.Generator | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The parts of all tensors that belong to a chunk."""
        # Compiled code is tied to what a view is a view of (`data` is no view), and to whether a tensor is contiguous:
        # what `_laid_out` pads never is, and all else, which is small, always.
        parts = {name: _part(name, tensor, chunk).data for name, tensor in operands.items()}
        for name in ("query", "bias"):
            if name in parts:
                parts[name] = parts[name].contiguous()
        hidden_by = {name: _part(name, tensor, chunk).contiguous().data for name, tensor in self.hidden_by.items()}
        if generator is not None:
            query, keys = parts["query"], parts["key"].shape[1]
            batch, key_value_heads, shared, queries, _ = query.shape
            keep = query.new_empty(batch, key_value_heads * shared, queries, keys, dtype=torch.bool)
            hidden_by["keep"] = keep.bernoulli_(1.0 - self.dropout, generator=generator)
        for name, tensor in (*parts.items(), *hidden_by.items()):
            torch._dynamo.mark_static(tensor, _DIMENSIONS[name][2])
        return parts, hidden_by


class _ChunkedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        operands = _laid_out(dict(zip(call.names, tensors)))
        query, value = operands["query"], operands["value"]
        batch, key_value_heads, shared, queries, _ = query.shape
        # As models go on with it: (batch, query, heads, value channels) in memory.
        output = query.new_empty(batch, queries, key_value_heads * shared, value.shape[2]).transpose(1, 2)
        generator = call.keeps(operands)
        for chunk in call.chunks:
            parts, hidden_by = call.chunk_of(chunk, operands, generator)
            own_output = _run(attend_chunk, parts, hidden_by, call.scaling, 1.0 - call.dropout)
            output[:, :, chunk.start : chunk.stop] = own_output
        return output

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ValueError(
                "Second derivatives (create_graph=True) are not in the compiled form of composed attention; use "
                "attn_implementation='dcmha_chunked' in a model, or implementation='chunked'."
            )
        call: _Call = ctx.call
        inputs = dict(zip(call.names, ctx.saved_tensors))
        with torch.autocast(output_gradient.device.type, enabled=False):
            gradients = _gradients(call, inputs, output_gradient, ctx.needs_input_grad[1:])
        return None, *(gradients.get(name) for name in call.names)


def _gradients(
    call: _Call, inputs: dict[str, Tensor], output_gradient: Tensor, wanted: tuple[bool, ...]
) -> dict[str, Tensor]:
    """The gradients of the inputs that are wanted, in their shapes and types."""
    operands = _laid_out(inputs)
    names = [name for name, is_wanted in zip(call.names, wanted) if is_wanted]
    # Chunks share keys, so their shares are added up in float32; those of queries and biases do not overlap.
    sums = {}
    for name in names:
        dtype = operands[name].dtype
        sums[name] = torch.zeros_like(operands[name], dtype=dtype if dtype == torch.float64 else torch.float32)
    generator = call.keeps(operands)
    for chunk in call.chunks:
        parts, hidden_by = call.chunk_of(chunk, operands, generator)
        varied = {name: parts.pop(name) for name in names}
        upstream = output_gradient[:, :, chunk.start : chunk.stop].contiguous().data
        torch._dynamo.mark_static(upstream, [1, 3])
        shares = _run(chunk_gradients, varied, parts, hidden_by, upstream, call.scaling, 1.0 - call.dropout)
        for name, share in shares.items():
            _part(name, sums[name], chunk).add_(share)
    return {name: _as_given(name, total, inputs[name]) for name, total in sums.items()}


def _attend_in_the_open(
    operands: dict[str, Tensor],
    hidden_by: dict[str, Tensor],
    mask: Mask,
    scaling: float,
    dropout: float,
    chunk_size: int | None,
) -> Tensor:
    """The same operations as plain ones of torch, for whatever looks on: a compiler, a tracer, a transformation."""
    query, key = operands["query"], operands["key"]
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    if not torch.compiler.is_compiling():
        # Where torch.jit.trace looks on, sizes are tensors.
        queries, keys, mask = int(queries), int(keys), mask._replace(query_offset=int(mask.query_offset))
        chunks = split_into_chunks(mask, queries, keys, chunk_size or _chosen_size(query, key, mask), False)
    elif all(has_static_value(number) for number in (queries, keys, mask.query_offset)):
        chunks = split_into_chunks(mask, queries, keys, chunk_size or _chosen_size(query, key, mask), False)
    else:
        # A graph for any length cannot hold one piece of code per chunk.
        chunks = [Chunk(0, queries, 0, keys)]
    operands = _laid_out(operands)

    def attend(parts: dict[str, Tensor], hidden_by: dict[str, Tensor]) -> Tensor:
        if dropout > 0.0:
            random = torch.rand(batch, heads, parts["query"].shape[3], parts["key"].shape[1], device=query.device)
            hidden_by = {**hidden_by, "keep": random >= dropout}
        return attend_chunk(parts, hidden_by, scaling, 1.0 - dropout)

    outputs = []
    for chunk in chunks:
        parts = {name: _part(name, tensor, chunk) for name, tensor in operands.items()}
        hidden_by_part = {name: _part(name, tensor, chunk) for name, tensor in hidden_by.items()}
        if torch.is_grad_enabled() and len(chunks) > 1:
            outputs.append(checkpoint(attend, parts, hidden_by_part, use_reentrant=False))
        else:
            outputs.append(attend(parts, hidden_by_part))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _is_watched(query: Tensor) -> bool:
    """Whether something looks on that sees through torch's operations alone, not through compiled code."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or query.is_meta
        or type(query) not in (Tensor, torch.nn.Parameter)
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


def _chosen_size(query: Tensor, key: Tensor, mask: Mask) -> int:
    """Queries of a chunk whose scores stay small, and few enough that a window is most of what they see."""
    batch, heads, keys = int(query.shape[0]), int(query.shape[1]), int(key.shape[2])
    most = _MOST_QUERIES
    if mask.sliding_window is not None:
        most = min(most, max(128, mask.sliding_window))
        keys = min(keys, 2 * mask.sliding_window + most)
    size = min(most, _SCORES_PER_CHUNK // (batch * heads * keys))
    return max(_FEWEST_QUERIES, size // _FEWEST_QUERIES * _FEWEST_QUERIES)


def _part(name: str, tensor: Tensor, chunk: Chunk) -> Tensor:
    """What belongs to a chunk of the tensor of this name, as a view."""
    by_query, by_key, _ = _DIMENSIONS[name]
    if by_query is not None:
        tensor = tensor.narrow(by_query, chunk.start, chunk.stop - chunk.start)
    if by_key is not None:
        tensor = tensor.narrow(by_key, chunk.first, chunk.last - chunk.first)
    return tensor


def _run(function: Callable[..., Any], *arguments: Any) -> Any:
    # Where the first chunk sees as many keys as it has queries, torch would take them to be equal for all time.
    no_equalities = _symbols.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    with torch._dynamo.config.patch(recompile_limit=_MOST_GRAPHS), no_equalities:
        return compiled(function)(*arguments)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled once for all lengths, batches and masks of a kind; torch keeps one graph for each kind."""
    return torch.compile(function, fullgraph=True, dynamic=True)


def chunk_gradients(
    varied: dict[str, Tensor],
    fixed: dict[str, Tensor],
    hidden_by: dict[str, Tensor],
    output_gradient: Tensor,
    scaling: float,
    kept: float,
) -> dict[str, Tensor]:
    """The gradients of `varied` for one chunk, whose other tensors are `fixed`."""

    def attend(varied: dict[str, Tensor]) -> Tensor:
        return attend_chunk({**varied, **fixed}, hidden_by, scaling, kept)

    pull_back: Callable[..., Any] = torch.func.vjp(attend, varied)[1]
    gradients: dict[str, Tensor] = pull_back(output_gradient)[0]
    return gradients


def attend_chunk(operands: dict[str, Tensor], hidden_by: dict[str, Tensor], scaling: float, kept: float) -> Tensor:
    """
    Equations 3 to 8 for one chunk: the output (batch, heads, query, value channels).

    Args:
        operands (`dict`): query (batch, key/value heads, heads that share one, query, channels), key and value (batch
            x key/value heads, key, channels), the factors (channels, batch, groups, heads per group, length) of each
            side as `pre.query` and so on, `pre.static` and `post.static`, and the bias, as far as there are any.
        hidden_by (`dict`): `lowest` and `highest`, (query,), the first and last key that a query sees, and `position`,
            (key,); perhaps `padding`, `query_ids`, `key_ids`, `visible`, and `keep`, what dropout leaves.
        scaling (`float`): Factor of the scores.
        kept (`float`): Part of the weights that dropout leaves.
    """
    query, key, value = operands["query"], operands["key"], operands["value"]
    scores = _scores(query, key, scaling)  # (batch, heads, query, key)
    dtype = scores.dtype
    scores = compose(scores, *(operands.get(f"pre.{name}") for name in ("query", "key", "static")))
    if "bias" in operands:
        scores = scores + operands["bias"].to(dtype)
    hidden = _hidden(hidden_by)
    scores = scores.masked_fill(hidden, torch.finfo(dtype).min)
    weights = scores.softmax(dim=-1)
    weights = weights.masked_fill(hidden, 0.0)  # a query that sees no key at all
    weights = compose(weights, *(operands.get(f"post.{name}") for name in ("query", "key", "static")))
    if "keep" in hidden_by:
        weights = weights * hidden_by["keep"] / kept
    batch, key_value_heads, shared, queries, _ = query.shape
    weights = weights.to(value.dtype).reshape(batch * key_value_heads, shared * queries, value.shape[1])
    output = torch.bmm(weights, value).to(query.dtype)
    return output.view(batch, key_value_heads * shared, queries, value.shape[2])


def compose(attention: Tensor, query: Tensor | None, key: Tensor | None, static: Tensor | None) -> Tensor:
    """
    Mix scores or weights across heads: equation 7; every branch reads the un-composed ones.

    Args:
        attention (`Tensor`): (batch, heads, query, key).
        query, key (`Tensor`, *optional*): (channels, batch, groups, heads per group, query or key).
        static (`Tensor`, *optional*): (groups, heads per group, heads per group) [in, out].
    """
    sides = [(factors.to(attention.dtype), dim) for factors, dim in ((query, -1), (key, -2)) if factors is not None]
    if sides:
        groups = sides[0][0].shape[2]
    elif static is not None:
        groups = static.shape[0]
    else:
        return attention
    batch, heads, queries, keys = attention.shape
    a = attention.view(batch, groups, heads // groups, queries, keys)  # (batch, group, head, query, key)
    composed = a
    for factors, dim in sides:
        rank, has_gate = divmod(int(factors.shape[0]), 2)  # a tensor where torch.jit.trace looks on
        rows = [row.unsqueeze(dim) for row in factors.unbind(0)]  # along queries or keys, 1 along the others
        for w1, w2 in zip(rows[:rank], rows[rank : 2 * rank]):
            composed = composed + (a * w1).sum(dim=2, keepdim=True) * w2  # (A W_1) W_2
        if has_gate:
            composed = composed + a * rows[-1]  # A * W_g
    if static is not None:
        composed = composed + torch.einsum("bgmts,gmn->bgnts", a, static.to(a.dtype))  # A W_b
    return composed.reshape(batch, heads, queries, keys)


def _scores(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Scores (batch, heads, query, key) in float32, or float64 for float64 inputs."""
    product_dtype = torch.promote_types(query.dtype, key.dtype)
    dtype = torch.promote_types(product_dtype, torch.float32)
    # A power of two scales the query exactly, and before the product, which could leave the range of float16.
    power_of_two = 2.0 ** (math.frexp(scaling)[1] - 1)
    batch, key_value_heads, shared, queries, channels = query.shape
    # Queries of the heads that share a key/value head make one matrix, which spares copies of keys and values. Sizes
    # are written out, since whatever the compiler has to find out of symbols becomes a condition of its code.
    query = (query.to(product_dtype) * power_of_two).reshape(batch * key_value_heads, shared * queries, channels)
    scores = torch.bmm(query, key.to(product_dtype).transpose(1, 2))
    scores = scores.view(batch, key_value_heads * shared, queries, key.shape[1])
    return scores.to(dtype) * (scaling / power_of_two)


def _hidden(hidden_by: dict[str, Tensor]) -> Tensor:
    """Boolean, broadcasts to (batch, heads, query, key)."""
    position = hidden_by["position"]
    hidden = (position < hidden_by["lowest"][:, None]) | (position > hidden_by["highest"][:, None])  # (query, key)
    if "padding" in hidden_by:
        hidden = hidden | ~hidden_by["padding"][:, None, None]
    if "query_ids" in hidden_by:
        hidden = hidden | (hidden_by["query_ids"][:, None, :, None] != hidden_by["key_ids"][:, None, None])
    if "visible" in hidden_by:
        hidden = hidden | ~hidden_by["visible"]
    return hidden


def _operands(
    query: Tensor, key: Tensor, value: Tensor, pre: Composition | None, post: Composition | None, bias: Tensor | None
) -> dict[str, Tensor]:
    """All tensors with a gradient by their names; factors as (batch, groups, heads per group, length, channels)."""
    operands = {"query": query, "key": key, "value": value}
    for stage, composition in (("pre", pre), ("post", post)):
        if composition is None:
            continue
        for side, factors in (("query", composition.query), ("key", composition.key)):
            if factors is not None:
                operands[f"{stage}.{side}"] = factors.unflatten(1, (composition.groups, -1))
        if composition.static is not None:
            operands[f"{stage}.static"] = composition.static
    if bias is not None:
        operands["bias"] = bias
    return operands


def _laid_out(operands: dict[str, Tensor]) -> dict[str, Tensor]:
    """
    Factors with their channels first, so that each of them lies along queries or keys; keys and values as
    (batch x heads, key, channels), which products of matrices take as they are, whatever part of them; queries as
    (batch, key/value heads, heads that share one, query, channels).
    """

    def laid_out(name: str, tensor: Tensor) -> Tensor:
        if tensor.dim() == 5:
            return _padded(tensor.movedim(-1, 0), 4)
        if name in ("key", "value"):
            return _padded(tensor, 2).flatten(0, 1)
        return tensor.unflatten(1, (key_value_heads, -1)) if name == "query" else tensor

    key_value_heads = operands["key"].shape[1]
    return {name: laid_out(name, tensor) for name, tensor in operands.items()}


def _padded(tensor: Tensor, dim: int) -> Tensor:
    """A copy with zeros behind its end along `dim`, for chunks to take their parts of."""
    return torch.nn.functional.pad(tensor, (0, 0) * (tensor.dim() - 1 - dim) + (0, _PADDING))


def _as_given(name: str, gradient: Tensor, given: Tensor) -> Tensor:
    """A gradient in the layout of `_laid_out` in that of what was given, and in its type."""
    if given.dim() == 5:
        return gradient[..., : given.shape[3]].movedim(0, -1).to(given.dtype)
    if name in ("key", "value"):
        gradient = gradient[:, : given.shape[2]]
    return gradient.to(given.dtype).view(given.shape)


def _hidden_by(mask: Mask, queries: int, keys: int, device: torch.device) -> dict[str, Tensor]:
    """The mask in tensors, from which each chunk takes its part."""
    own = torch.arange(queries, dtype=torch.int32, device=device) + mask.query_offset
    window = mask.sliding_window
    # Without a bound, a number that no position reaches.
    lowest = torch.full_like(own, -1) if window is None else own - (window - 1)
    highest = torch.full_like(own, 2**31 - 1) if window is None else own + (window - 1)
    tensors = {"lowest": lowest, "highest": own if mask.is_causal else highest}
    tensors["position"] = torch.arange(keys, dtype=torch.int32, device=device)
    if mask.padding is not None:
        tensors["padding"] = mask.padding
    if mask.sequence_ids is not None:
        tensors["query_ids"] = tensors["key_ids"] = mask.sequence_ids
    if mask.visible is not None:
        tensors["visible"] = mask.visible
    return tensors
