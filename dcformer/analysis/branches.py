"""The branches of a composition, which are the terms of equation 7: what each adds, and what happens without it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.optional import import_optional
from ..compose_dcformer import ComposeProjection
from ..plain_dcformer import compose
from ..types_dcformer import ComposeWeights, Weights, map_tensors
from .recording import Inputs, attention_layers, forwards, in_float64, measured, resolve_numbers


if TYPE_CHECKING:
    from pandas import DataFrame

# In the order of Figure 2 (b). The head itself, the identity in W_b, is always there and not a branch.
BRANCHES = ("static", "query_low_rank", "query_gate", "key_low_rank", "key_gate")
OWN_HEAD = "own_head"
STAGES = ("scores", "weights")  # the maps that are composed, before the softmax and after it
_ABLATIONS: dict[str, tuple[str, ...]] = {branch: (branch,) for branch in BRANCHES}
_ABLATIONS |= {"query": ("query_low_rank", "query_gate"), "key": ("key_low_rank", "key_gate")}
_ABLATIONS |= dict.fromkeys(("pre", "post", "all"), BRANCHES)
TABLES = "A table of an analysis"


def composition_in(module: nn.Module) -> Any:
    """The composition that a module is or wraps; None if there is none."""
    return next((part for part in module.modules() if isinstance(part, ComposeProjection)), None)


def branches_of(compose: ComposeProjection) -> list[str]:
    """The branches that a layer has, in the order of `BRANCHES`."""
    weights = {"low_rank": compose.hidden_weight, "gate": compose.gate_weight}
    kinds = [kind for kind, weight in weights.items() if weight is not None]
    dynamic = [f"{('query', 'key')[side]}_{kind}" for side in compose.sides for kind in kinds]
    return (["static"] if compose.static_weight is not None else []) + dynamic


def without(weights: Weights, branches: Collection[str]) -> Weights:
    """The weights with these branches at zero, in the same shapes."""

    def zero(tensor: Tensor, name: str) -> Tensor:
        if name == "static":
            return tensor * (name not in branches)
        rank, gates = divmod(tensor.shape[-1], 2)  # w1 and w2 of every rank, then the gate if there is one
        kinds = ["low_rank"] * 2 * rank + ["gate"] * gates
        return tensor * tensor.new_tensor([f"{name}_{kind}" not in branches for kind in kinds])

    return map_tensors(weights, zero)


def branch_terms(attention: Tensor, weights: ComposeWeights) -> dict[str, Tensor]:
    """
    The terms of equation 7, which add up to the composed map; Figure 7 of the paper shows those of one pair.

    Args:
        attention: Scores or weights before composition, (batch, heads, query, key).
        weights: The layer's factors, those before the softmax for scores, after it for weights.

    Returns:
        By branch, (batch, heads, query, key) in float64: first "own_head", which is `attention`, then `BRANCHES`, with
        zeros for a branch that the layer lacks.
    """
    attention = in_float64(attention)
    precise = map_tensors(weights, lambda tensor, _: in_float64(tensor))
    alone = {branch: without(precise, set(BRANCHES) - {branch}) for branch in BRANCHES}
    return {OWN_HEAD: attention} | {branch: compose(attention, each) - attention for branch, each in alone.items()}


def branch_shares(
    model: PreTrainedModel,
    inputs: Inputs,
    layers: int | Sequence[int] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> DataFrame:
    """
    Compute how much each branch adds to the composed scores and weights of each head.

    The share of a branch is the sum of the absolute values of its term of equation 7, over all queries and the keys
    that they see, divided by the same sum for all terms: Figures 7 and 8 of the paper, over a corpus.

    Args:
        model: A DCFormer or DCPythia that composes its heads.
        inputs, tokenizer: As for [`dcformer.analysis.forwards`].
        layers: As for [`dcformer.analysis.record`].

    Returns:
        `pandas.DataFrame` with the columns layer, map ("scores" or "weights"), head, branch and share. The shares of a
        head sum to one.

    Raises:
        ValueError: for a model that composes nothing.
    """
    pandas = import_optional("pandas", TABLES, "analysis")
    compose_layers(model)

    def sizes(maps: dict[str, Any]) -> dict[str, Tensor]:
        visible = (in_float64(maps["weights"]) != 0).any(1, keepdim=True)  # (batch, 1, query, key)
        sums = {}
        for stage, factors in zip(STAGES, maps["factors"]):
            if factors is not None:
                terms = branch_terms(maps[stage], factors).values()
                sums[stage] = torch.stack([(term.abs() * visible).sum((0, 2, 3)) for term in terms])  # (branch, head)
        return sums

    rows = []
    for key, passes in measured(model, inputs, ("factors", *STAGES), sizes, layers, tokenizer).items():
        total = torch.stack(passes).sum(0)
        for head, shares in enumerate((total / total.sum(0)).T.tolist()):
            rows += [(*key, head, branch, share) for branch, share in zip((OWN_HEAD, *BRANCHES), shares)]
    return pandas.DataFrame(rows, columns=["layer", "map", "head", "branch", "share"])


@contextlib.contextmanager
def ablated(
    model: PreTrainedModel, layers: int | Sequence[int] | None = None, branch: str | Sequence[str] = "all"
) -> Iterator[None]:
    """
    Within the block, the model composes without these branches; without "all" of them a layer is plain attention.

    This holds for everything that runs the model, with a cache or without: `generate`, `dcformer.eval`, training with
    its backward passes. The key-wise factors are cached, so fill a cache within the block, too. Compiled models run
    uncompiled within the block.

    Args:
        model: As for [`branch_shares`].
        layers: As for [`dcformer.analysis.record`].
        branch (defaults to `"all"`): One or several of `BRANCHES`, before and after the softmax; "query" and "key" for
            both query-wise or key-wise ones; "pre" for all before the softmax, "post" for all after it.

    Raises:
        ValueError: for a branch that the model lacks or that does not exist, or a model that composes nothing.
    """
    modules = compose_layers(model)
    names = [branch] if isinstance(branch, str) else list(branch)
    if unknown := [name for name in names if name not in _ABLATIONS]:
        raise ValueError(f"branch must be one of {', '.join(_ABLATIONS)}, got {unknown[0]!r}.")
    # What is left out before the softmax, and after it.
    off = [{part for name in names if name != other for part in _ABLATIONS[name]} for other in ("post", "pre")]
    with contextlib.ExitStack() as stack:
        for layer in resolve_numbers(layers, len(modules), "layers"):
            compose = composition_in(modules[layer])
            for name in names:
                has_stage = name not in ("pre", "post") or ("pre", "post").index(name) in compose.stages
                if not has_stage or set(_ABLATIONS[name]).isdisjoint(branches_of(compose)):
                    raise ValueError(f"Layer {layer} has no branch {name!r}, but {branches_of(compose)}.")
            hook = modules[layer].register_forward_hook(lambda module, args, output: tuple(map(without, output, off)))
            stack.callback(hook.remove)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def compose_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The composition of every layer, or what wraps it; ValueError for a model that composes nothing."""
    attentions = attention_layers(model)
    parts = [getattr(attention, "compose", None) for attention in attentions]
    modules: list[nn.Module] = [part for part in parts if part is not None and composition_in(part)]
    if len(modules) < len(attentions):
        raise ValueError(f"model must compose heads in every layer, and this {model.config.model_type} does not.")
    return modules


@torch.no_grad()
def what_matters(
    model: PreTrainedModel,
    inputs: Inputs,
    layers: int | Sequence[int] | None = None,
    branches: Sequence[str] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DataFrame:
    """
    The loss on a text without each branch of each layer, one at a time.

    Args:
        model: A DCFormerForCausalLM or DCPythiaForCausalLM that composes its heads.
        inputs, tokenizer: As for [`dcformer.analysis.forwards`]; padding is left out of the loss.
        layers: As for [`dcformer.analysis.record`].
        branches (*optional*): Names as for [`ablated`]. None: all branches that a layer has.
        progress (*optional*): Called with the number of losses that are measured, and of all.

    Returns:
        `pandas.DataFrame` with the columns layer, branch, loss (nats per token), difference (from the loss of the
        unchanged model) and standard_error (of the difference, over forward passes; NaN for a single one).

    Raises:
        ValueError: as [`ablated`], and for inputs of single tokens, which predict none.
    """
    pandas = import_optional("pandas", TABLES, "analysis")
    modules = compose_layers(model)
    cases = [
        (layer, branch)
        for layer in resolve_numbers(layers, len(modules), "layers")
        for branch in (branches_of(composition_in(modules[layer])) if branches is None else branches)
    ]
    arguments = forwards(model, inputs, tokenizer)
    before, tokens = _losses(model, arguments)
    count, total = len(tokens), tokens.sum()
    if total == 0:
        raise ValueError("The inputs hold no token after another, so there is no loss; give longer texts.")
    rows = []
    for done, (layer, branch) in enumerate(cases, start=1):
        with ablated(model, layer, branch):
            without_it, _ = _losses(model, arguments)
        difference = (without_it - before).sum() / total
        spread = (without_it - before - difference * tokens).square().sum()  # of a ratio of sums
        error = (spread * count / (count - 1)).sqrt() / total if count > 1 else torch.nan
        rows.append((layer, branch, float(without_it.sum() / total), float(difference), float(error)))
        if progress is not None:
            progress(done, len(cases))
    return pandas.DataFrame(rows, columns=["layer", "branch", "loss", "difference", "standard_error"])


def _losses(model: PreTrainedModel, forwards: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Sums of the losses in nats and numbers of predicted tokens, an item for every forward pass."""
    losses, tokens = [], []
    for arguments in forwards:
        if "input_ids" not in arguments:
            raise ValueError(f"A loss needs input_ids, got {', '.join(arguments)}.")
        ids = arguments["input_ids"]
        real = arguments.get("attention_mask", torch.ones_like(ids)).bool()
        counted = real[:, 1:] & real[:, :-1]
        logits = in_float64(model(**arguments).logits[:, :-1][counted])  # (counted tokens, vocabulary)
        targets = ids[:, 1:][counted].to(logits.device)
        losses.append(nn.functional.cross_entropy(logits, targets, reduction="sum"))
        tokens.append(counted.sum())
    return torch.stack(losses).cpu(), torch.stack(tokens).cpu()
