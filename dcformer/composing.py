"""DCMHA in a model that exists: its attention modules keep their weights, and get a composition and another class."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .compose_dcformer import ComposeProjection
from .dcmha import composed_attention
from .module import DCMultiheadAttention


# timm, which need not be installed, has had its `Attention` in two places.
TIMM_MODULES = ("timm.layers.attention", "timm.models.vision_transformer")
# What each kind consists of; the composing form would leave anything else out.
TORCH_PARTS = {f"{name}_proj_weight" for name in ("in", "q", "k", "v")} | {"in_proj_bias", "out_proj"}
TIMM_PARTS = {"qkv", "q_norm", "k_norm", "attn_drop", "norm", "gate", "proj", "proj_drop"}


class DCTimmAttention(nn.Module):
    """`Attention` of timm with composed heads; [`compose_attention`] makes it of one, and keeps all its parts."""

    def forward(self: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """
        Attend, with the arguments of timm's `Attention.forward`.

        Args:
            x (`Tensor`): (batch, length, channels).
            attn_mask (`Tensor`, *optional*): Broadcasts to (batch, heads, length, length): True is visible; floating
                point is added to the composed scores.
            is_causal (`bool`, defaults to `False`): Hide later tokens; without `attn_mask`, as in PyTorch.
        """
        length = x.shape[1]
        if attn_mask is not None:
            if is_causal or not (attn_mask.dtype == torch.bool or attn_mask.is_floating_point()):
                raise ValueError(
                    "attn_mask must be boolean (True is visible) or floating point, and without is_causal, got "
                    f"{attn_mask.dtype} with is_causal={is_causal}."
                )
            attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())].expand(-1, -1, length, length)
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)  # (batch, heads, length, channels), like v
        pre, post = self.compose(x)
        options: dict[str, Any] = {"is_causal": is_causal, "attention_mask": attn_mask}
        options["dropout"] = self.attn_drop.p if self.training else 0.0
        attended = composed_attention(q.to(v.dtype), k.to(v.dtype), v, pre, post, **options)
        attended = self.norm(attended.transpose(1, 2).flatten(2))  # (batch, length, heads x channels)
        if (gate := getattr(self, "gate", None)) is not None:  # which older ones do not have
            attended = attended * gate(x).sigmoid()
        return self.proj_drop(self.proj(attended))


def compose_attention(
    model: nn.Module, names: str | Iterable[str] | None = None, *, identity: bool = True, **composition: Any
) -> Any:
    """
    Compose the heads of a model's attention modules: `nn.MultiheadAttention`, of which torchvision's and PyTorch's own
    transformers are made, and timm's `Attention`. The model is changed in place, and computes the same until its
    composition is trained.

    A module stays the object that it was, with its parameters, hooks, mode, device and dtype, and what was frozen stays
    so; it gets another class and trainable parameters `compose.*`. An `nn.TransformerEncoder` no longer makes nested
    tensors, so its outputs at padded positions are not zero. Modules that compose already are left alone.

    Args:
        model (`nn.Module`): Anything with attention in it, not yet compiled, quantized or wrapped for several devices.
        names (`str` or `Iterable[str]`, *optional*): Shell patterns such as "encoder.layers.1?.*"; only modules whose
            dotted name matches one are composed. None: all.
        identity (`bool`, defaults to `True`): Start with a composition that changes nothing. False: with the small one
            of section 4 of the paper.
        composition: Arguments of [`ComposeProjection`]: rank, groups, activation, norm_eps, pre, post, query_wise,
            key_wise, low_rank, gate and static.

    Returns:
        `nn.Module`: the model itself.

    Raises:
        ValueError: if there is nothing to compose, a pattern matches nothing, or attention is of another kind, such as
            with relative positions, RoPE or ALiBi. The modules are named, and the model is as before.

    Example:

    ```python
    >>> from torch import nn
    >>> from dcformer import compose_attention

    >>> model = compose_attention(nn.Transformer(64, 8, batch_first=True), "encoder.*", rank=1)
    ```
    """
    found: dict[Any, list[str]] = {}  # one that is shared has several names
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, DistributedDataParallel):
            raise ValueError(f"{name or 'The model'} is wrapped in DistributedDataParallel; compose before wrapping.")
        if _is_attention(module):
            found.setdefault(module, []).append(name)
    # What contains attention of a known kind, or of one that composes, is its surroundings.
    inner = {module for module in found if _composes(module) or _parts(module)}
    found = {module: own for module, own in found.items() if module in inner or inner.isdisjoint(module.modules())}
    known = _shown([own[0] or "the model itself" for own in found.values()])
    patterns = ["*"] if names is None else [names] if isinstance(names, str) else list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for own in found.values() for name in own):
            what = "to compose" if names is None else f"whose name matches {pattern!r}"
            others = f"; there is: {known}" if found else ""
            raise ValueError(f"No attention {what} is in this {type(model).__name__}{others}.")
    chosen = {
        module: own[0] or "the model itself"
        for module, own in found.items()
        if not _composes(module) and any(fnmatchcase(name, pattern) for name in own for pattern in patterns)
    }
    if not chosen:
        raise ValueError(
            f"Nothing is left to compose in this {type(model).__name__}: of {known}, what was chosen composes already."
        )
    if reasons := [f"{name} {reason}" for module, name in chosen.items() if (reason := _why_not(module)) is not None]:
        raise ValueError(
            f"Nothing was composed: {_shown(reasons)}. Only nn.MultiheadAttention and timm's Attention can be, no "
            "subclass, and nothing with relative positions, rotary embeddings or ALiBi; choose modules by `names`."
        )
    projections = [_make_projection(module, identity, composition) for module in chosen]
    for module, compose in zip(chosen, projections):
        kind: Any = DCTimmAttention
        if type(module) is nn.MultiheadAttention:
            kind, settings = DCMultiheadAttention, {"is_causal": False, "sliding_window": None, "identity": identity}
            vars(module).update(settings, _qkv_same_embed_dim=False)  # which keeps PyTorch from its fused kernel
        module.__class__ = kind
        module.compose = compose.train(module.training)
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and not chosen.keys().isdisjoint(encoder.modules()):
            encoder.use_nested_tensor = False
    return model


def _is_attention(module: nn.Module) -> bool:
    """True for attention with heads of any kind, by the names of its classes and of what it has."""
    classes = " ".join(kind.__name__ for kind in type(module).__mro__)
    return bool(re.search("attention|attn", classes, re.IGNORECASE)) and any("head" in name for name in vars(module))


def _composes(module: nn.Module) -> bool:
    return isinstance(getattr(module, "compose", None), ComposeProjection)


def _parts(module: nn.Module) -> set[str] | None:
    """The parts of a module that can be composed; None for one of another kind, or of a subclass."""
    kind = type(module)
    is_timm = kind.__name__ == "Attention" and kind.__module__ in TIMM_MODULES
    return TORCH_PARTS if kind is nn.MultiheadAttention else TIMM_PARTS if is_timm else None


def _why_not(module: nn.Module) -> str | None:
    """Why a module cannot be composed, as the end of a sentence that begins with its name; None if it can."""
    parts, kind = _parts(module), type(module)
    if parts is None:
        return f"is a {kind.__module__}.{kind.__qualname__}"
    if getattr(module, "bias_k", None) is not None or getattr(module, "add_zero_attn", False):
        return "has add_bias_kv or add_zero_attn, and the key that it adds has no compose weights"
    has = {*module._parameters, *module._buffers, *module._modules, *(vars(module).keys() & {"forward"})}
    if strange := has - parts:
        return f"has {min(strange)!r}, which is not in every {kind.__name__}"
    for name in module._modules.keys() & {"out_proj", "qkv", "proj"}:
        weight = module.get_submodule(name).weight
        if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.element_size() < 2:
            return f"has a quantized {name!r}; compose before quantizing"
    return None


def _make_projection(module: Any, identity: bool, composition: dict[str, Any]) -> ComposeProjection:
    if isinstance(module, nn.MultiheadAttention):
        width, key_size, like = module.embed_dim, module.kdim, module.out_proj.weight
    else:
        width, key_size, like = module.qkv.in_features, None, module.proj.weight
    options: dict[str, Any] = {"key_size": key_size, "device": like.device, "dtype": like.dtype}
    compose = ComposeProjection(width, module.num_heads, **options, **composition)
    compose.reset_parameters(identity)
    return compose


def _shown(entries: list[str]) -> str:
    return "; ".join(entries[:3] + [f"{len(entries) - 3} more"][: len(entries) > 3])


__all__ = ["compose_attention"]
