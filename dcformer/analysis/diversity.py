"""The diversity of a layer's heads: of their projections, as in Figure 5 of the paper, and of their attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.optional import import_optional
from ..modeling_dcformer import DCFormerAttention, at_least_float32
from .branches import TABLES
from .recording import Inputs, attention_layers, in_float64, measured


if TYPE_CHECKING:
    from pandas import DataFrame


@torch.no_grad()
def head_diversity(model: PreTrainedModel) -> dict[str, Tensor]:
    """
    Figure 5 of the paper: the variance of a layer's concatenated heads that principal components capture.

    As we read section 4.3, W_Q and W_K of all heads are concatenated, and so are W_V and W_O. The k-th value of a layer
    is the sum of the squares of the k largest singular values of W_Q W_K^T, or of W_O W_V, divided by the sum of all.
    Lower curves mean more diverse heads; the figure shows the mean over layers, `diversity["query_key"].mean(0)`.
    Rotary embeddings, biases and norms of queries and keys are left out.

    Args:
        model: A DCFormer or DCPythia, composing or not; a Llama or a model with its projections; a GPT-NeoX.

    Returns:
        "query_key" and "value_output": (layers, hidden size), rising to one.

    Raises:
        ValueError: for a model with another layout of projections.

    Source: section 4.3; Cordonnier et al., Multi-Head Attention: Collaborate Instead of Concatenate, 2020, which does
    not centre the matrices either.
    """
    curves: dict[str, list[Tensor]] = {"query_key": [], "value_output": []}
    for attention in attention_layers(model):
        query, key, value, output = (at_least_float32(weight) for weight in projections(attention))
        circuits = torch.einsum("hci,hcj->ij", query, key), torch.einsum("hoc,hci->oi", output, value)
        for curve, circuit in zip(curves.values(), circuits):
            squares = torch.linalg.svdvals(circuit).square()
            curve.append((squares.cumsum(0) / squares.sum()).cpu())
    return {name: torch.stack(curve) for name, curve in curves.items()}


def projections(attention: nn.Module) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """
    W_Q, W_K and W_V, (heads, head dimension, hidden), and W_O, (heads, hidden, head dimension), of an attention layer;
    keys and values that several heads share are repeated.
    """
    module: Any = attention
    if isinstance(attention, DCFormerAttention):
        sizes = module.qkv_sizes
        fused = matrix(module.qkv_proj, module.config.hidden_size)
        parts = [part.unflatten(0, (-1, module.head_dim)) for part in fused.split(sizes)]
        output = matrix(module.o_proj, sizes[0])
    elif all(hasattr(attention, f"{name}_proj") for name in "qkvo"):
        linear = [matrix(getattr(module, f"{name}_proj"), module.config.hidden_size) for name in "qkv"]
        parts = [weight.unflatten(0, (-1, module.head_dim)) for weight in linear]
        output = matrix(module.o_proj, linear[0].shape[0])
    elif hasattr(attention, "query_key_value") and hasattr(attention, "head_size"):
        # GPT-NeoX: query, key and value of a head are consecutive.
        width = module.config.hidden_size
        parts = list(matrix(module.query_key_value, width).unflatten(0, (-1, 3, module.head_size)).unbind(1))
        output = matrix(module.dense, width)
    else:
        name = type(attention).__name__
        raise ValueError(f"model must have the projections of a DCFormer, Llama or GPT-NeoX, and {name} has others.")
    heads = len(parts[0])
    query, key, value = (part.repeat_interleave(heads // len(part), dim=0) for part in parts)
    return query, key, value, output.unflatten(1, (heads, -1)).transpose(0, 1)


def matrix(linear: nn.Module, width: int) -> Tensor:
    """The weight (out, width) of a linear layer; of adapters, quantised layers and wrappers, what they multiply by."""
    if type(linear) is nn.Linear and type(linear.weight) is nn.Parameter:
        return linear.weight
    example = next(linear.parameters())
    dtype = example.dtype if example.is_floating_point() else torch.get_default_dtype()
    inputs = torch.eye(width + 1, width, device=example.device, dtype=dtype)  # the last row is zero
    outputs = linear(inputs)
    return (outputs[:-1] - outputs[-1]).mT


def effective_heads(maps: Tensor) -> Tensor:
    """
    Count the heads that differ, for each query: 1 if all attend alike, all if no two attend to the same key.

    It is the exponential of the entropy of the eigenvalues of the heads' cosine similarities, divided by their number.
    Composed weights are signed and need not sum to one, so they are no distributions; a cosine takes them, and does not
    change if a head is scaled.

    Args:
        maps: Weights, (batch, heads, query, key).

    Returns:
        (batch, query) in float64, NaN for a query without a visible key.

    Source: Friedman and Dieng, The Vendi Score, 2023.
    """
    rows = torch.nn.functional.normalize(in_float64(maps).transpose(1, 2), dim=-1)  # (batch, query, head, key)
    eigenvalues = torch.linalg.eigvalsh(rows @ rows.mT / rows.shape[2]).clamp(min=0.0)
    number = torch.special.entr(eigenvalues).sum(-1).exp()
    return number.masked_fill((rows == 0).all(3).all(2), torch.nan)


def map_diversity(
    model: PreTrainedModel,
    inputs: Inputs,
    layers: int | Sequence[int] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> DataFrame:
    """
    The mean number of [`effective_heads`] of each layer over a text, before and after composition.

    Args:
        model, inputs, layers, tokenizer: As for [`record`], but of any number of texts.

    Returns:
        `pandas.DataFrame` with the columns layer, map ("weights", and for a DCFormer "composed_weights"),
        effective_heads and heads.
    """
    pandas = import_optional("pandas", TABLES, "analysis")
    names = ["weights"]
    if isinstance(attention_layers(model)[0], DCFormerAttention):
        names.append("composed_weights")

    def count(maps: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: effective_heads(weights).flatten() for name, weights in maps.items()}

    counts, heads = measured(model, inputs, names, count, layers, tokenizer), model.config.num_attention_heads
    rows = [(*layer_and_map, float(torch.cat(numbers).nanmean()), heads) for layer_and_map, numbers in counts.items()]
    return pandas.DataFrame(rows, columns=["layer", "map", "effective_heads", "heads"])
