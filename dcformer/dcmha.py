"""Dynamically Composable Multi-Head Attention as an operator: equations 3 to 8 and appendix D of the paper.

`composed_attention` checks its arguments and passes them to a backend of the table `BACKENDS`, which computes them.
"plain", in torch's operators, supports every device, mask and dtype; kernels add faster ones. A backend may also fuse
what surrounds attention in a layer. In a model, `attn_implementation="dcmha_NAME"` selects the backend NAME.
"""

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .plain_dcformer import attend_block, plain_attention
from .plain_dcformer import compose as compose
from .types_dcformer import AttentionInputs, Observer, Projected, Weights
from .types_dcformer import ComposeSide as ComposeSide
from .types_dcformer import ComposeWeights as ComposeWeights
from .types_dcformer import map_tensors as map_tensors
from .visibility_dcformer import Visibility


# Transformers knows the backend NAME as the attention function dcmha_NAME.
PREFIX = "dcmha_"


class Backend:
    """
    One way to compute composed attention, and perhaps parts of a layer around it: these are asked of all backends for a
    device, whichever computes attention, except in models with `attn_implementation="dcmha_plain"`.

    Attributes:
        name (`str`): As `implementation=` takes it.
        device_type (`str`, *optional*): The devices where calls that name no backend try it, and layers ask it for
            their parts, such as "cpu"; "any": everywhere, for attention alone. None: attention by name only.
    """

    name: str
    device_type: str | None = None

    def why_not(self, inputs: AttentionInputs) -> str | None:
        """Return why it cannot compute a call, as the end of a sentence that messages quote, or None if it can."""
        return None

    def why_not_automatic(self, inputs: AttentionInputs) -> str | None:
        """Return why it does not take a call that names no backend, or None if it does."""
        return self.why_not(inputs)

    def attention(self, inputs: AttentionInputs) -> Tensor:
        """The output in the query's dtype, zeros for a query that sees no key. Autocast is off, nothing is empty."""
        raise NotImplementedError

    # Parts of a layer. None leaves them to the layer's own modules, which it must where somebody may observe these.

    def projection(self, layer: Any, hidden_states: Tensor, position_embeddings: Any) -> Projected | None:
        """All of a layer's projections: queries and keys are normalised and rotated, key-wise factors may be packed."""
        return None

    def rotation(
        self, query: Tensor, key: Tensor, norms: tuple[Any, Any], position_embeddings: Any
    ) -> tuple[Tensor, Tensor] | None:
        """Queries and keys (batch, heads, length, channels), normalised by these modules, if any, and rotated."""
        return None

    def factors(self, act_fn: Any, eps: float, states: Tensor, *weights: Tensor | None) -> Tensor | None:
        """
        The factors of a composition, (slots, batch, length, channels, heads): w1, normalised over the heads of a group,
        w2, and tanh of the gates; from hidden states (batch, length, hidden) and the weights of the slots in use, None
        where there are none: (hidden, groups, slots, K), (groups, slots, K, 2 rank, heads per group) and (hidden,
        groups, slots, heads per group).
        """
        return None


class PlainBackend(Backend):
    """Torch's operators, for every device, mask and dtype."""

    name, device_type = "plain", "any"

    def attention(self, inputs: AttentionInputs) -> Tensor:
        return plain_attention(inputs)


class _Functions(Backend):
    """The backend that `register_implementation` makes of functions."""

    def __init__(self, name: str, forward: Any, supports: Any, automatic: Any):
        self.name, self.device_type = name, None if automatic is None else "any"
        self.forward, self.supports, self.automatic = forward, supports, automatic

    def why_not(self, inputs: AttentionInputs) -> str | None:
        return self.supports(*inputs[:5], mask=inputs.mask, dropout=inputs.dropout)

    def why_not_automatic(self, inputs: AttentionInputs) -> str | None:
        return self.automatic(*inputs[:5], mask=inputs.mask, dropout=inputs.dropout)

    def attention(self, inputs: AttentionInputs) -> Tensor:
        options = {"scaling": inputs.scaling, "mask": inputs.mask, "dropout": inputs.dropout}
        return self.forward(*inputs[:5], **options, chunk_size=inputs.chunk_size)


BACKENDS: dict[str, Backend] = {}


def register_backend(backend: Backend) -> None:
    """
    Add a backend, or replace the one of its name. The last one that was registered is tried first. In a model,
    `attn_implementation="dcmha_NAME"` selects it.
    """
    BACKENDS.pop(backend.name, None)
    BACKENDS[backend.name] = backend
    attend = functools.partial(composed_attention_forward, implementation=backend.name)
    ALL_ATTENTION_FUNCTIONS.register(PREFIX + backend.name, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PREFIX + backend.name, eager_mask)


def register_implementation(
    name: str,
    forward: Callable[..., Tensor],
    supports: Callable[..., str | None] = lambda *_, **__: None,
    automatic: Callable[..., str | None] | None = None,
) -> None:
    """
    Add a backend made of functions, as [`register_backend`] adds one.

    Args:
        name (`str`): As `implementation=` takes it.
        forward (`Callable`): `forward(query, key, value, pre, post, *, scaling, mask, dropout, chunk_size)` returns the
            output. Shapes are checked already; `mask` is a [`Visibility`]; autocast is off.
        supports (`Callable`): `supports(query, key, value, pre, post, *, mask, dropout)` returns what `why_not` does.
        automatic (`Callable`, *optional*): As `supports`, for calls that name no backend; None: those never use it.
    """
    register_backend(_Functions(name, forward, supports, automatic))


def implementations() -> dict[str, Backend]:
    """Return all backends by name, in the order in which they were registered."""
    return dict(BACKENDS)


def explain_choice(
    query: Tensor, key: Tensor, value: Tensor, pre: Weights, post: Weights, *, dropout: float = 0.0, **mask: Any
) -> list[tuple[str, str | None]]:
    """
    The backends that [`composed_attention`] would try for these arguments; `mask` stands for its `is_causal`,
    `sliding_window` and `attention_mask`.

    Returns:
        `list[tuple[str, str | None]]`: names with the reasons why they are not selected; None for the one that is.
    """
    inputs = _checked_inputs(query, key, value, pre, post, dropout=dropout, **mask)
    return [(backend.name, reason) for backend, reason in _tried_backends(inputs)]


def choose_backend(inputs: AttentionInputs, name: str | None = None) -> Backend:
    """Return the backend of this name, or else the first that takes the call; ValueError if the named one does not."""
    if name is None:
        return _tried_backends(inputs)[-1][0]
    if name not in BACKENDS:
        raise ValueError(f"implementation must be one of {', '.join(BACKENDS)}, got {name!r}.")
    if (reason := BACKENDS[name].why_not(inputs)) is not None:
        raise ValueError(f"implementation {name!r} cannot run here: {reason}; leave it out to have one chosen.")
    return BACKENDS[name]


def _tried_backends(inputs: AttentionInputs) -> list[tuple[Backend, str | None]]:
    """Backends with the reason why they do not take the call, up to the one that does."""
    tried: list[tuple[Backend, str | None]] = []
    for backend in [BACKENDS["plain"]] if is_exporting() else reversed(BACKENDS.values()):
        if backend.device_type in ("any", inputs.query.device.type):
            tried.append((backend, backend.why_not_automatic(inputs)))
            if tried[-1][1] is None:
                break
        elif backend.device_type is not None:
            tried.append((backend, f"it is selected automatically on {backend.device_type.upper()} devices only"))
    return tried


@torch.compiler.assume_constant_result  # Dynamo before torch 2.14 takes any compilation for an export
def is_exporting() -> bool:
    """True while torch.export or TorchScript makes a graph for another runtime, which has only torch's operators."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


def compute_fused(part: str, device: torch.device, *arguments: Any) -> Any:
    """
    Have a backend for this device compute a part of a layer, `projection`, `rotation` or `factors` (see [`Backend`]).
    None if the layer is to compute it itself.
    """
    for backend in [] if is_exporting() else reversed(BACKENDS.values()):
        if backend.device_type == device.type and (result := getattr(backend, part)(*arguments)) is not None:
            return result
    return None


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
        softmax runs in float32 (float64 for float64 inputs), and so do the compositions, but for "triton" with many
        queries in 16 bits. With `return_weights` a pair of this and the composed weights (batch, heads, query, key),
        which can be negative, and need not sum to one. Second derivatives need `implementation="plain"`.

    Raises:
        ValueError: if shapes do not fit, a number is below 1, or the implementation cannot compute this.
    """
    mask = is_causal, sliding_window, attention_mask
    inputs = _checked_inputs(query, key, value, pre, post, scaling, dropout, chunk_size, *mask)
    wants_maps = return_weights or observe is not None
    backend = choose_backend(inputs, "plain" if wants_maps and implementation in (None, *BACKENDS) else implementation)
    if query.shape[0] * query.shape[2] * key.shape[2] == 0:
        output = query.new_zeros(*query.shape[:3], value.shape[3])
        return (output, query.new_zeros(*query.shape[:3], key.shape[2])) if return_weights else output
    device = query.device.type
    autocasts = device != "meta" and torch.is_autocast_enabled(device)  # compositions would be computed in 16 bits
    with torch.autocast(device, enabled=False) if autocasts else nullcontext():
        if not wants_maps:
            return backend.attention(inputs)
        output, weights = attend_block(inputs, (0, query.shape[2], 0, key.shape[2]), observe)
        return (output, weights.to(query.dtype)) if return_weights else output


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
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    output_attentions: bool = False,
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
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options: Any = {"scaling": scaling, "dropout": dropout, "implementation": implementation, "observe": observe}
    options |= {"is_causal": is_causal and not is_dense, "sliding_window": None if is_dense else sliding_window}
    result = composed_attention(
        query, key, value, pre, post, attention_mask=attention_mask, return_weights=output_attentions, **options
    )
    output, weights = result if output_attentions else (result, None)
    return output.transpose(1, 2).contiguous(), weights


def checked_implementation(name: str) -> str:
    """The name of an attention implementation that composes; ValueError for others, which would compute without it."""
    names = ["eager", *(PREFIX + known for known in BACKENDS)]
    if name not in names:
        raise ValueError(
            f"attn_implementation={name!r} cannot compose attention heads; use one of {', '.join(names)}, or switch "
            "composition off."
        )
    return name


def _checked_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: Weights,
    post: Weights,
    scaling: float | None = None,
    dropout: float = 0.0,
    chunk_size: int | None = None,
    is_causal: bool = True,
    sliding_window: int | None = None,
    attention_mask: Tensor | Visibility | None = None,
) -> AttentionInputs:
    """The arguments of [`composed_attention`]; ValueError if a shape does not fit, or a number is below 1."""
    query_shape, key_shape, value_shape = query.shape, key.shape, value.shape  # every look-up makes a new object
    fits = len(query_shape) == len(key_shape) == len(value_shape) == 4 and value_shape[:3] == key_shape[:3]
    if not fits or key_shape[0] != query_shape[0] or key_shape[3] != query_shape[3]:
        raise ValueError(
            "query must be (batch, heads, query, channels), key (batch, key/value heads, key, channels) and value "
            f"(batch, key/value heads, key, value channels), got {tuple(query_shape)}, {tuple(key_shape)} and "
            f"{tuple(value_shape)}."
        )
    (batch, heads, queries, channels), (_, key_heads, keys, _) = query_shape, key_shape
    if key_heads == 0 or heads % key_heads != 0:
        raise ValueError(f"The {key_heads} key/value heads must divide the {heads} query heads.")
    for name, weights in (("pre", pre), ("post", post)):
        if weights is None:
            continue
        if weights.groups < 1 or heads % weights.groups != 0:
            raise ValueError(f"{name}.groups must divide the {heads} heads, got {weights.groups}.")
        static, size = weights.static, (weights.groups, *[heads // weights.groups] * 2)
        if static is not None and static.shape != size:
            raise ValueError(
                f"{name}.static must be (groups, heads per group, heads per group) = {size}, got {tuple(static.shape)}."
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
    fits = (mask.query_length, mask.key_length) == (queries, keys)
    fits = fits and (mask.dense is None or mask.dense.shape[1] in (1, heads))
    for tensor in (mask.padding, mask.dense, mask.sequence_ids):
        fits = fits and (tensor is None or tensor.shape[0] in (1, batch))
    if not fits:
        shapes = [tuple(t.shape) for t in (mask.padding, mask.dense, mask.sequence_ids) if t is not None]
        raise ValueError(
            f"The mask must be for {batch} rows, {heads} heads, {queries} queries and {keys} keys, got one for "
            f"{mask.query_length} queries and {mask.key_length} keys with {shapes}."
        )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}; use None to have it chosen.")
    scaling = 1.0 / math.sqrt(channels) if scaling is None else scaling
    return AttentionInputs(query, key, value, pre, post, scaling, mask, dropout, chunk_size)


register_backend(PlainBackend())
