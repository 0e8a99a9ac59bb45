"""How different the heads of a layer are: by their projections, as in Figure 5 of the paper, and by what they see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..common.optional import import_optional
from ..modeling_dcformer import DCFormerAttention, at_least_float32
from .branches import TABLES
from .recording import attention_layers, forwards, in_float64, watch


if TYPE_CHECKING:
    from pandas import DataFrame


@torch.no_grad()
def head_diversity(model: Any) -> dict[str, Tensor]:
    """
    Figure 5 of the paper: the variance that principal components capture of a layer's concatenated heads.

    W_Q and W_K of all heads are concatenated, and so are W_V and W_O, as we read section 4.3. The k-th value of a layer
    is the share of the squares of the k largest singular values of W_Q W_K^T, or of W_O W_V, among all of them. Lower
    curves mean heads that are more diverse; the figure shows the mean over layers, `diversity["query_key"].mean(0)`.
    Rotations by position, biases and norms of queries and keys are left out.

    Args:
        model: A DCFormer or DCPythia, composing or not; a Llama and its like, a GPT-NeoX.

    Returns:
        "query_key" and "value_output": (layers, hidden size) each, rising to one.

    Raises:
        ValueError: for a model whose projections are laid out otherwise.

    Source: section 4.3; Cordonnier et al., Multi-Head Attention: Collaborate Instead of Concatenate, 2020, whose
    matrices are not centred either.
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
    W_Q, W_K and W_V, (heads, channels, hidden), and W_O, (heads, hidden, channels), of an attention layer; heads that
    share keys and values have the same ones.
    """
    module: Any = attention
    if isinstance(attention, DCFormerAttention):
        parts = [part.unflatten(0, (-1, module.head_dim)) for part in module.qkv_proj.weight.split(module.qkv_sizes)]
        output = module.o_proj.weight
    elif all(hasattr(attention, f"{name}_proj") for name in "qkvo"):
        parts = [getattr(module, f"{name}_proj").weight.unflatten(0, (-1, module.head_dim)) for name in "qkv"]
        output = module.o_proj.weight
    elif hasattr(attention, "query_key_value") and hasattr(attention, "head_size"):
        # GPT-NeoX: query, key and value of a head lie together.
        parts = list(module.query_key_value.weight.unflatten(0, (-1, 3, module.head_size)).unbind(1))
        output = module.dense.weight
    else:
        raise ValueError(
            f"The projections of {type(attention).__name__} are laid out in a way that is not known here; use a "
            "DCFormer, Llama or GPT-NeoX model."
        )
    heads = len(parts[0])
    query, key, value = (part.repeat_interleave(heads // len(part), dim=0) for part in parts)
    return query, key, value, output.unflatten(1, (heads, -1)).transpose(0, 1)


def effective_heads(maps: Tensor) -> Tensor:
    """
    How many different heads there are for each query, from 1, if all see the same, to their number, if no two heads
    see a key in common.

    It is the exponential of the entropy of the eigenvalues of the heads' cosine similarities, divided by their number.
    Composed weights are signed and do not sum to one, so measures of distributions do not take them; a cosine does, and
    is the same for a head that is scaled.

    Args:
        maps (`Tensor`): Weights, (batch, heads, query, key).

    Returns:
        `Tensor`: (batch, query) in float64, NaN for a query that sees nothing.

    Source: Friedman and Dieng, The Vendi Score, 2023.
    """
    rows = torch.nn.functional.normalize(in_float64(maps).transpose(1, 2), dim=-1)  # (batch, query, head, key)
    eigenvalues = torch.linalg.eigvalsh(rows @ rows.mT / rows.shape[2]).clamp(min=0.0)
    number = torch.special.entr(eigenvalues).sum(-1).exp()
    return number.masked_fill((rows == 0).all(3).all(2), torch.nan)


@torch.no_grad()
def map_diversity(
    model: Any, inputs: Any, layers: int | Sequence[int] | None = None, tokenizer: Any = None
) -> DataFrame:
    """
    The mean number of [`effective_heads`] of each layer over a text, before and after composition.

    Args:
        model, inputs, layers, tokenizer: As of [`record`], of any number of forwards.

    Returns:
        `pandas.DataFrame` with the columns layer, map ("weights", and of a DCFormer "composed_weights"),
        effective_heads and heads.
    """
    pandas = import_optional("pandas", TABLES, "analysis")
    is_ours = isinstance(attention_layers(model)[0], DCFormerAttention)
    found: dict[tuple[int, str], list[Tensor]] = {}

    def add(layer: int, name: str, value: Tensor) -> None:
        found.setdefault((layer, name), []).append(effective_heads(value).flatten().cpu())

    with watch(model, add, ("weights", "composed_weights") if is_ours else ("weights",), layers):
        for arguments in forwards(model, inputs, tokenizer):
            model(**arguments)
    heads = model.config.num_attention_heads
    rows = [(*place, float(torch.cat(numbers).nanmean()), heads) for place, numbers in found.items()]
    return pandas.DataFrame(rows, columns=["layer", "map", "effective_heads", "heads"])
