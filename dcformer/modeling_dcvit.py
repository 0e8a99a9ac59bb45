# SPDX-License-Identifier: Apache-2.0
"""DCViT: a vision transformer with Dynamically Composable Multi-Head Attention (section 4.5 of the paper).

Transformers' ViT, except that attention scores are mixed across heads before the softmax, and attention weights after
it. Parameter names are those of ViT. With composition switched off it is a plain ViT, and uses sdpa or FlashAttention.
"""

import os
from collections.abc import Callable
from typing import Any, Self

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.vit.configuration_vit import ViTConfig
from transformers.models.vit.modeling_vit import (
    ViTAttention,
    ViTEmbeddings,
    ViTForImageClassification,
    ViTLayer,
    ViTModel,
    ViTPooler,
    ViTPreTrainedModel,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .compose_dcformer import ComposeProjection, make_compose
from .configuration_dcformer import DCFormerConfig
from .dcmha import PREFIX, checked_implementation, composed_attention_forward
from .hub_dcformer import ComposingModel, register_model


@strict
class DCViTConfig(ViTConfig):
    r"""
    Configuration of a DCViT model: the fields of Transformers' `ViTConfig`, and the composition of [`DCFormerConfig`].
    The defaults are DCViT-S/16 of Table 7 with 22 million parameters; what the paper does not specify (class token,
    learned positions, epsilons) is as in `ViTConfig`.

    Args:
        hidden_size (`int`, defaults to 384): Width of the residual stream.
        num_attention_heads (`int`, defaults to 6): Heads; composition mixes these.
        intermediate_size (`int`, defaults to 1536): Width of the MLP's inner layer.
        compose_init (`str`, defaults to `"paper"`): How composition parameters are initialised: `"paper"`, small, as
            in section 4, or `"identity"`, composing nothing at first, for weights that were trained without.
        compose_rank, compose_groups, compose_activation, compose_norm_eps, compose_pre, compose_post, compose_query,
            compose_key, compose_low_rank, compose_gate, compose_static: As in [`DCFormerConfig`].

    Example:

    ```python
    >>> from dcformer import DCViTConfig, DCViTForImageClassification

    >>> model = DCViTForImageClassification(DCViTConfig(num_hidden_layers=2, num_labels=10))
    ```
    """

    model_type = "dcvit"

    hidden_size: int = 384
    num_attention_heads: int = 6
    intermediate_size: int = 1536
    compose_init: str = "paper"
    compose_rank: int = 2
    compose_groups: int = 1
    compose_activation: str = "gelu"
    compose_norm_eps: float | int = 1e-6
    compose_pre: bool = True
    compose_post: bool = True
    compose_query: bool = True
    compose_key: bool = True
    compose_low_rank: bool = True
    compose_gate: bool = True
    compose_static: bool = False

    composes_heads = DCFormerConfig.composes_heads

    @classmethod
    def from_vit(cls, config: ViTConfig, **overrides: Any) -> Self:
        """A ViT's configuration as that of a DCViT whose composition starts as identity; `overrides` are fields."""
        return cls.from_dict({**_of_vit(config.to_dict()), **overrides})

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read the values of a file; those of a ViT become a DCViT's, as by [`from_vit`]."""
        values, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return _of_vit(values) if values.get("model_type") == ViTConfig.model_type else values, kwargs

    def validate_architecture(self) -> None:
        """Part of `@strict` validation: values that no model can have."""
        if self.compose_init not in ("paper", "identity"):
            raise ValueError(f"compose_init must be 'paper' or 'identity', got {self.compose_init!r}.")
        for name, divided in (("num_attention_heads", "hidden_size"), ("compose_groups", "num_attention_heads")):
            if getattr(self, name) < 1 or getattr(self, divided) % getattr(self, name) != 0:
                raise ValueError(f"{name} must divide {divided} ({getattr(self, divided)}), got {getattr(self, name)}.")


def _of_vit(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a ViT's configuration as those of a DCViT whose composition starts as identity."""
    kept = {name: value for name, value in values.items() if name not in ("architectures", "auto_map")}
    return {**kept, "model_type": DCViTConfig.model_type, "compose_init": "identity"}


class DCViTAttention(ViTAttention):
    def __init__(self, config: DCViTConfig):
        super().__init__(config)
        self.compose = make_compose(config)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if self.compose is None:
            return super().forward(hidden_states, attention_mask, **kwargs)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            checked_implementation(self.config._attn_implementation), composed_attention_forward
        )
        query, key, value = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )  # (batch, heads, length, channels)
        pre, post = self.compose(hidden_states, fused=self.config._attn_implementation != f"{PREFIX}plain")
        kwargs["output_attentions"] = kwargs.get("output_attentions") or self.config.output_attentions
        kwargs.update(pre=pre, post=post, scaling=self.scaling)
        dropout = self.attention_dropout if self.training else 0.0
        output, weights = attend(self, query, key, value, attention_mask, dropout=dropout, **kwargs)
        return self.o_proj(output.flatten(2)), weights  # (batch, length, hidden)


class DCViTLayer(ViTLayer):
    def __init__(self, config: DCViTConfig):
        super().__init__(config)
        self.attention = DCViTAttention(config)


class DCViTPreTrainedModel(ComposingModel, ViTPreTrainedModel):
    config: DCViTConfig
    config_class = DCViTConfig
    _no_split_modules = ["ViTEmbeddings", "DCViTLayer"]
    _can_record_outputs = {"hidden_states": DCViTLayer, "attentions": DCViTAttention}
    # Weights that are initialised where the checkpoint of another task lacks them, as in ViT.
    _heads_that_may_be_new = r"^(classifier|(vit\.)?pooler)\."
    _vit_class: type[PreTrainedModel]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ComposeProjection):
            module.reset_parameters(identity=self.config.compose_init == "identity")

    @classmethod
    def from_vit(cls, vit: PreTrainedModel, **composition: Any) -> Any:
        """
        A copy of a ViT (a `ViTModel` or `ViTForImageClassification`, as this class) with the same outputs until its
        composition is trained. `composition` are fields of [`DCViTConfig`].
        """
        if not isinstance(vit, cls._vit_class):
            raise ValueError(f"{cls.__name__} is made of a {cls._vit_class.__name__}, got a {type(vit).__name__}.")
        config = DCViTConfig.from_vit(vit.config, **composition)
        parts = {}
        if isinstance(vit, ViTModel):
            has_pooler, has_mask_token = vit.pooler is not None, vit.embeddings.mask_token is not None
            parts = {"add_pooling_layer": has_pooler, "use_mask_token": has_mask_token}
        model = cls(config, **parts).to(device=vit.device, dtype=vit.dtype)
        model.load_state_dict({**model.state_dict(), **vit.state_dict()})
        return model.train(vit.training)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """Load a model, also of the checkpoint of a ViT, with a composition that starts as identity."""
        wants_info = output_loading_info
        if pretrained_model_name_or_path is not None:
            where = {name: kwargs[name] for name in ("subfolder", "revision", "cache_dir", "token") if name in kwargs}
            values, _ = PreTrainedConfig.get_config_dict(pretrained_model_name_or_path, **where)
            if values.get("model_type") == ViTConfig.model_type:
                # Checkpoints of ViT have older parameter names than its classes.
                renamings = get_checkpoint_conversion_mapping(ViTModel.__name__)
                names = {renaming.source_patterns[0]: renaming.target_patterns[0] for renaming in renamings}
                kwargs.setdefault("key_mapping", names)
                wants_info = True  # with it, missing weights are initialised
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=wants_info, **kwargs)
        return loaded[0] if wants_info and not output_loading_info else loaded


class DCViTModel(DCViTPreTrainedModel):
    """
    DCViT without a head. Arguments as those of `ViTModel`: by default with a pooler, without a mask token.
    """

    _vit_class = ViTModel

    def __init__(self, config: DCViTConfig, add_pooling_layer: bool = True, use_mask_token: bool = False):
        config.validate()  # values that were set after the configuration was made
        super().__init__(config)
        self.embeddings = ViTEmbeddings(config, use_mask_token=use_mask_token)
        self.layers = nn.ModuleList(DCViTLayer(config) for _ in range(config.num_hidden_layers))
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.pooler = ViTPooler(config) if add_pooling_layer else None
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: Tensor,
        bool_masked_pos: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """
        Encode images; the other arguments are those of `ViTModel.forward`.

        Args:
            attention_mask (`Tensor`, *optional*): (batch, 1 + patches), 0 for hidden patches; or
                (batch or 1, heads or 1, 1 + patches, 1 + patches), boolean with True for visible or floating point,
                added to the scores.

        Returns:
            `BaseModelOutputWithPooling`: last_hidden_state (batch, 1 + patches, hidden), the class token first, and
            with a pooler pooler_output (batch, pooler_output_size).
        """
        hidden_states = self.embeddings(
            pixel_values.to(self.dtype),
            bool_masked_pos=bool_masked_pos,
            interpolate_pos_encoding=bool(interpolate_pos_encoding),
        )  # (batch, 1 + patches, hidden)
        if not self.config.composes_heads:
            attention_mask = create_bidirectional_mask(
                config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask
            )
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask, **kwargs)
        hidden_states = self.layernorm(hidden_states)
        pooled = self.pooler(hidden_states) if self.pooler is not None else None
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)


class DCViTForImageClassification(DCViTPreTrainedModel, ViTForImageClassification):
    """
    DCViT with a linear classifier over the class token.

    `forward` is that of `ViTForImageClassification`: it takes `labels` (batch,), or (batch, labels) of 0.0 and 1.0 for
    `problem_type="multi_label_classification"`, and what [`DCViTModel.forward`] takes, and returns `logits`
    (batch, labels), and with labels the `loss`.
    """

    _vit_class = ViTForImageClassification

    def __init__(self, config: DCViTConfig):
        PreTrainedModel.__init__(self, config)  # without the ViT that the other base class would make
        self.num_labels = config.num_labels
        self.vit = DCViTModel(config, add_pooling_layer=False)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels) if config.num_labels > 0 else nn.Identity()
        self.post_init()


__all__ = ["DCViTConfig", "DCViTForImageClassification", "DCViTModel", "DCViTPreTrainedModel"]

MODELS = [DCViTForImageClassification, DCViTModel]

if __name__.startswith("transformers_modules."):  # a copy of this file beside a checkpoint, which nobody else registers
    for _model in MODELS:
        register_model(_model)
