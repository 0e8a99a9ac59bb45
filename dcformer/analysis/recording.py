"""Recording what the attention layers of a model compute while it runs: the maps of equation 4 of the paper."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..modeling_dcformer import ATTENTION_MAPS, DCFormerAttention
from ..types_dcformer import map_tensors


MAPS = (*ATTENTION_MAPS, "factors")

# A text or several, token ids of a text or a batch or several of these, or arguments of a model's `forward`.
Inputs: TypeAlias = str | Tensor | Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True)
class Recording:
    """
    The maps of one forward pass, on the CPU; `recording["weights"][3]` is that of layer 3.

    Attributes:
        maps: By name, then by layer: (batch, head, query, key), of the chosen heads. "factors" are the two
            [`ComposeWeights`] of a layer instead, before and after the softmax, of all heads.
        heads: Numbers of the heads along the second axis.
        tokens: The text of every token of each row of the batch, or its id as text if no tokenizer was given.
    """

    maps: dict[str, dict[int, Any]]
    heads: list[int]
    tokens: list[list[str]]

    def __getitem__(self, name: str) -> dict[int, Any]:
        if name not in self.maps:
            raise ValueError(f"{name!r} was not recorded, only {', '.join(self.maps)}; name it in maps.")
        return self.maps[name]


@torch.no_grad()
def record(
    model: PreTrainedModel,
    inputs: Inputs,
    maps: Sequence[str] | None = None,
    layers: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Recording:
    """
    Record the maps of chosen layers and heads in one forward pass; each is moved to the CPU when it is computed.

    Args:
        model: A DCFormer or DCPythia, with any head or none; or another decoder of Transformers, loaded with
            `attn_implementation="eager"`, which has "weights" alone.
        inputs, tokenizer: As for [`forwards`]: one text, or one batch of token ids.
        maps (*optional*): Any of "scores" (scaled, not masked), "composed_scores", "weights" (after the softmax),
            "composed_weights" and "factors". None: all maps that the model has, without the factors.
        layers, heads (*optional*): Numbers from 0; negative ones count from the end. None: all.

    Raises:
        ValueError: for a map, a layer or a head that the model lacks, or for several texts that are not one batch.
    """
    arguments, *others = forwards(model, inputs, tokenizer)
    if others:
        raise ValueError(
            f"record takes the inputs of one forward pass, got {1 + len(others)}; give one text or a batch."
        )
    if maps is None:
        maps = ATTENTION_MAPS if isinstance(attention_layers(model)[0], DCFormerAttention) else ("weights",)
    kept: dict[str, dict[int, Any]] = {name: {} for name in maps}
    numbers = resolve_numbers(heads, model.config.num_attention_heads, "heads")

    def keep(layer: int, name: str, value: Any) -> None:
        if name == "factors":
            kept[name][layer] = tuple(map_tensors(stage, lambda tensor, _: tensor.cpu()) for stage in value)
        else:
            kept[name][layer] = (value if heads is None else value[:, numbers]).cpu()

    with watch(model, keep, maps, layers):
        model(**arguments)
    rows = arguments["input_ids"].tolist() if "input_ids" in arguments else []
    tokens = [[str(number) if tokenizer is None else tokenizer.decode([number]) for number in row] for row in rows]
    return Recording(kept, numbers, tokens)


@contextlib.contextmanager
def watch(
    model: PreTrainedModel,
    function: Callable[[int, str, Any], Any],
    maps: Sequence[str] = ATTENTION_MAPS,
    layers: int | Sequence[int] | None = None,
) -> Iterator[None]:
    """
    Within the block, call `function(layer, name, value)` with these maps in every forward pass, also in `generate`.

    If the function returns a tensor, a DCFormer goes on with it instead of the value; None leaves the value. Passes of
    all threads are watched. "factors" are those of the new tokens of a pass, not of cached ones. Compiled models run
    uncompiled within the block, since their graphs do not look for hooks.

    Args:
        model, maps, layers: As for [`record`].

    Raises:
        ValueError: for a map or a layer that the model lacks.
    """
    modules = attention_layers(model)
    with contextlib.ExitStack() as stack:
        for layer in dict.fromkeys(resolve_numbers(layers, len(modules), "layers")):
            for name in maps:
                stack.callback(_hook(modules[layer], layer, name, function).remove)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@torch.no_grad()
def measured(
    model: PreTrainedModel,
    inputs: Inputs,
    maps: Sequence[str],
    measure: Callable[[dict[str, Any]], dict[str, Tensor]],
    layers: int | Sequence[int] | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> dict[tuple[int, str], list[Tensor]]:
    """Tensors that `measure` makes of these maps of a layer, one for each forward pass, by the layer and its names."""
    computed: dict[str, Any] = {}  # of one layer, since layers run one after the other
    results: dict[tuple[int, str], list[Tensor]] = {}

    def collect(layer: int, name: str, value: Any) -> None:
        computed[name] = value
        if len(computed) == len(maps):
            for kind, result in measure(computed).items():
                results.setdefault((layer, kind), []).append(result.cpu())
            computed.clear()

    with watch(model, collect, maps, layers):
        for arguments in forwards(model, inputs, tokenizer):
            model(**arguments)
    return results


def _hook(attention: nn.Module, layer: int, name: str, function: Callable[[int, str, Any], Any]) -> RemovableHandle:
    if name not in MAPS:
        raise ValueError(f"maps must be any of {', '.join(MAPS)}, got {name!r}.")
    if isinstance(attention, DCFormerAttention):
        module = attention.compose if name == "factors" else getattr(attention, name)
        if module is None:
            raise ValueError(f"layer {layer} composes no heads, so it has no factors; leave them out of maps.")
        return module.register_forward_hook(lambda module, args, output: function(layer, name, output))
    if name != "weights":
        raise ValueError(f"{type(attention).__name__} composes no heads and shows weights alone, not {name!r}.")

    def show(module: nn.Module, args: Any, output: Any) -> None:
        if not isinstance(output, tuple) or output[1] is None:
            raise ValueError('The model does not show its weights; load it with attn_implementation="eager".')
        function(layer, name, output[1])

    return attention.register_forward_hook(show)


def attention_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The attention modules of a Transformers model in the order of its layers; ValueError if it does not name them."""
    kind = (getattr(model, "_can_record_outputs", None) or {}).get("attentions")
    kind = getattr(kind, "target_class", kind)
    modules: list[Any] = [module for module in model.modules() if isinstance(kind, type) and isinstance(module, kind)]
    if not modules:
        name = type(model).__name__
        raise ValueError(
            f"model must be a decoder that names its attention, as DCFormer, Llama and GPT-NeoX, got {name}."
        )
    return modules


def forwards(
    model: PreTrainedModel, inputs: Inputs, tokenizer: PreTrainedTokenizerBase | None = None
) -> list[dict[str, Any]]:
    """
    The arguments of one forward pass, without a cache, for every text.

    Args:
        inputs: A text or several, with a tokenizer; token ids (length,) or (batch, length), or a list of such; or a
            mapping of arguments of the model's `forward`, such as input_ids and attention_mask.

    Raises:
        ValueError: for texts without a tokenizer, for no token at all, or ids of other dimensions.
    """
    if isinstance(inputs, Mapping):
        moved = {name: value.to(model.device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
        return [{"use_cache": False, **moved}]
    if isinstance(inputs, str):
        if tokenizer is None:
            raise ValueError(f"A text such as {inputs[:20]!r} needs a tokenizer; give one, or token ids.")
        inputs = tokenizer(inputs)["input_ids"]
    elif isinstance(inputs, Sequence) and len(inputs) > 0 and not isinstance(inputs[0], int):
        return [arguments for text in inputs for arguments in forwards(model, text, tokenizer)]
    ids = torch.as_tensor(inputs, device=model.device)
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or ids.numel() == 0:
        raise ValueError(f"Token ids must be (length,) or (batch, length), at least one, got {tuple(ids.shape)}.")
    return [{"input_ids": ids, "use_cache": False}]


def in_float64(tensor: Tensor) -> Tensor:
    """The tensor in float64, on the CPU if its device lacks float64."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def resolve_numbers(numbers: int | Sequence[int] | None, count: int, what: str) -> list[int]:
    """The numbers counted from 0, where None stands for all; ValueError if one is not below `count`."""
    if numbers is None:
        return list(range(count))
    listed = [numbers] if isinstance(numbers, int) else list(numbers)
    for number in listed:
        if not -count <= number < count:
            raise ValueError(f"{what} must lie between {-count} and {count - 1}, got {number}.")
    return [number % count for number in listed]
