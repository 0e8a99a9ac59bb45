"""The branches of a composition, the terms of equation 7: what each adds, and what happens without it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..common.optional import import_optional
from ..compose_dcformer import DCFormerCompose
from ..dcmha import ComposeWeights, Weights, compose, map_tensors
from .recording import attention_layers, chosen, forwards, in_float64, watch


if TYPE_CHECKING:
    from pandas import DataFrame

# Numbered as in Figure 2 (b); the head itself, the identity in W_b, is no branch but always there.
BRANCHES = ("static", "query_low_rank", "query_gate", "key_low_rank", "key_gate")
OWN_HEAD = "own_head"
_ABLATIONS = {branch: (branch,) for branch in BRANCHES} | {
    "query": ("query_low_rank", "query_gate"),
    "key": ("key_low_rank", "key_gate"),
    "pre": BRANCHES,
    "post": BRANCHES,
    "all": BRANCHES,
}
TABLES = "A table of an analysis"


def branches_of(compose: DCFormerCompose) -> list[str]:
    """The branches that a layer has, in the order of `BRANCHES`."""
    weights = {"low_rank": compose.hidden_weight, "gate": compose.gate_weight}
    kinds = [kind for kind, weight in weights.items() if weight is not None]
    found = [f"{('query', 'key')[side]}_{kind}" for side in compose.sides for kind in kinds]
    return (["static"] if compose.static_weight is not None else []) + found


def without(weights: Weights, branches: Collection[str]) -> Weights:
    """The same weights, of the same shapes, with these branches at zero."""

    def cut(tensor: Tensor, place: str) -> Tensor:
        if place == "static":
            return torch.zeros_like(tensor) if place in branches else tensor
        channels = tensor.shape[-1]
        kept = tensor.new_ones(channels)  # w1 and w2 of every rank, then the gate if the number is odd
        if f"{place}_low_rank" in branches:
            kept[: channels // 2 * 2] = 0.0
        if f"{place}_gate" in branches and channels % 2:
            kept[-1] = 0.0
        return tensor * kept

    return map_tensors(weights, cut)


def branch_terms(attention: Tensor, weights: ComposeWeights) -> dict[str, Tensor]:
    """
    The terms of equation 7, which together are the composed map; Figure 7 of the paper shows them of one pair.

    Args:
        attention (`Tensor`): Scores or weights that are not yet composed, (batch, heads, query, key).
        weights (`ComposeWeights`): The layer's factors before the softmax for scores, after it for weights.

    Returns:
        By branch, "own_head" first, which is `attention`: (batch, heads, query, key) in float64, zeros for a branch
        that the layer lacks.
    """
    attention = in_float64(attention)
    weights = map_tensors(weights, lambda tensor, place: in_float64(tensor))
    terms = {OWN_HEAD: attention}
    for branch in BRANCHES:
        only = without(weights, set(BRANCHES) - {branch})
        terms[branch] = compose(attention, only) - attention
    return terms


@torch.no_grad()
def branch_shares(
    model: Any, inputs: Any, layers: int | Sequence[int] | None = None, tokenizer: Any = None
) -> DataFrame:
    """
    How much each branch adds to the composed scores and weights of each head.

    The share of a branch is the sum of the absolute values of its term of equation 7, over all queries and the keys
    that they see, divided by that of all terms: Figures 7 and 8 of the paper, over a corpus.

    Args:
        model: A DCFormer or DCPythia that composes its heads.
        inputs, tokenizer: As of [`dcformer.analysis.forwards`].
        layers (*optional*): Numbers from 0; negative ones count from the end. None: all.

    Returns:
        `pandas.DataFrame` with the columns layer, map ("scores" or "weights"), head, branch and share. Those of a head
        sum to one.

    Raises:
        ValueError: for a model that composes nothing.
    """
    pandas = import_optional("pandas", TABLES, "analysis")
    compose_layers(model)
    factors: dict[int, Any] = {}
    scores: dict[int, Tensor] = {}
    sums: dict[tuple[int, str], dict[str, Tensor]] = {}  # by layer and map, by branch: (head,)

    def add(layer: int, name: str, value: Any) -> None:
        if name == "factors":
            factors[layer] = value
        elif name == "scores":
            scores[layer] = value
        else:
            visible = (in_float64(value) != 0).any(1, keepdim=True)  # (batch, 1, query, key)
            for kind, attention, weights in zip(("scores", "weights"), (scores.pop(layer), value), factors.pop(layer)):
                for branch, term in ({} if weights is None else branch_terms(attention, weights)).items():
                    total = (term.abs() * visible).sum((0, 2, 3)).cpu()
                    known = sums.setdefault((layer, kind), {})
                    known[branch] = known.get(branch, 0.0) + total

    with watch(model, add, ("factors", "scores", "weights"), layers):
        for arguments in forwards(model, inputs, tokenizer):
            model(**arguments)
    rows = [
        (layer, kind, head, branch, float(total[head] / sum(known.values())[head]))
        for (layer, kind), known in sums.items()
        for head in range(model.config.num_attention_heads)
        for branch, total in known.items()
    ]
    return pandas.DataFrame(rows, columns=["layer", "map", "head", "branch", "share"])


@contextlib.contextmanager
def ablated(
    model: Any, layers: int | Sequence[int] | None = None, branch: str | Sequence[str] = "all"
) -> Iterator[None]:
    """
    Within the block the model composes without these branches; a layer without "all" is plain attention.

    It holds for everything that runs the model, with a cache or without: `generate`, `dcformer.eval`, training with its
    backward passes. The factors of keys lie in the cache, so a cache is to be filled within the block, too. Compiled
    models run uncompiled meanwhile.

    Args:
        model: A DCFormer or DCPythia that composes its heads.
        layers (*optional*): Numbers from 0; negative ones count from the end. None: all.
        branch (defaults to `"all"`): Of "static", "query_low_rank", "query_gate", "key_low_rank" and "key_gate", the
            branches of equation 7, before and after the softmax; "query" and "key" for both of a side; "pre" for all
            before the softmax, "post" for all after it.

    Raises:
        ValueError: for a branch that the model lacks or that does not exist, or a model that composes nothing.
    """
    modules = compose_layers(model)
    names = [branch] if isinstance(branch, str) else list(branch)
    for name in names:
        if name not in _ABLATIONS:
            raise ValueError(f"branch must be of {', '.join(_ABLATIONS)}, got {name!r}.")
    # Before and after the softmax.
    off = [{part for name in names if name != other for part in _ABLATIONS[name]} for other in ("post", "pre")]
    with contextlib.ExitStack() as stack:
        for layer in chosen(layers, len(modules), "layers"):
            for name in names:
                has_stage = name not in ("pre", "post") or ("pre", "post").index(name) in modules[layer].stages
                if not has_stage or set(_ABLATIONS[name]).isdisjoint(branches_of(modules[layer])):
                    raise ValueError(f"Layer {layer} has no branch {name!r}, but {branches_of(modules[layer])}.")
            handle = modules[layer].register_forward_hook(
                lambda module, args, output: tuple(without(*each) for each in zip(output, off))
            )
            stack.callback(handle.remove)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def compose_layers(model: Any) -> list[DCFormerCompose]:
    """The composition of every layer; ValueError for a model that composes nothing."""
    modules = [getattr(attention, "compose", None) for attention in attention_layers(model)]
    if not all(isinstance(module, DCFormerCompose) for module in modules):
        raise ValueError(f"model must compose heads in every layer, and this {model.config.model_type} does not.")
    return modules  # type: ignore[return-value]


@torch.no_grad()
def what_matters(
    model: Any,
    inputs: Any,
    layers: int | Sequence[int] | None = None,
    branches: Sequence[str] | None = None,
    tokenizer: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> DataFrame:
    """
    The loss on a text without each branch of each layer, one at a time.

    Args:
        model: A DCFormerForCausalLM or DCPythiaForCausalLM that composes its heads.
        inputs, tokenizer: As of [`dcformer.analysis.forwards`]; padding is left out of the loss.
        layers (*optional*): Numbers from 0; negative ones count from the end. None: all.
        branches (*optional*): Names of [`ablated`]. None: all branches that a layer has.
        progress (*optional*): Called with the numbers of losses that are done and of all.

    Returns:
        `pandas.DataFrame` with the columns layer, branch, loss in nats per token, difference from the model as it is,
        and the standard error of the difference over forwards, NaN for a single one.

    Raises:
        ValueError: of [`ablated`], and for inputs without a token that another predicts.
    """
    pandas = import_optional("pandas", TABLES, "analysis")
    modules = compose_layers(model)
    cases = [
        (layer, branch)
        for layer in chosen(layers, len(modules), "layers")
        for branch in (branches_of(modules[layer]) if branches is None else branches)
    ]
    arguments = forwards(model, inputs, tokenizer)
    before, tokens = _losses(model, arguments)
    if tokens.sum() == 0:
        raise ValueError("The inputs hold no token after another, so there is no loss; give longer texts.")
    rows = []
    for done, (layer, branch) in enumerate(cases, start=1):
        with ablated(model, layer, branch):
            without_it, _ = _losses(model, arguments)
        difference = (without_it - before).sum() / tokens.sum()
        spread = (without_it - before - difference * tokens).square().sum()  # of a ratio of sums
        count = len(tokens)
        error = (spread * count / (count - 1)).sqrt() / tokens.sum() if count > 1 else torch.nan
        rows.append((layer, branch, float(without_it.sum() / tokens.sum()), float(difference), float(error)))
        if progress is not None:
            progress(done, len(cases))
    return pandas.DataFrame(rows, columns=["layer", "branch", "loss", "difference", "standard_error"])


def _losses(model: Any, forwards: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Of every forward, the sum of the losses in nats, and the number of tokens that are predicted."""
    losses, tokens = [], []
    for arguments in forwards:
        if "input_ids" not in arguments:
            raise ValueError(f"A loss needs input_ids, got {', '.join(arguments)}.")
        ids = arguments["input_ids"]
        real = arguments.get("attention_mask", torch.ones_like(ids)).bool()
        counted = real[:, 1:] & real[:, :-1]
        logits = in_float64(model(**arguments).logits[:, :-1][counted])  # (counted tokens, vocabulary)
        targets = ids[:, 1:][counted].to(logits.device)
        losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        tokens.append(counted.sum())
    return torch.stack(losses).cpu(), torch.stack(tokens).cpu()
