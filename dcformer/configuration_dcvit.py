# Copyright 2026 The dcformer authors. All rights reserved.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Configuration of DCViT, a vision transformer with Dynamically Composable Multi-Head Attention (section 4.5)."""

import os
from typing import Any, TypeVar

from huggingface_hub.dataclasses import strict
from transformers.models.vit.configuration_vit import ViTConfig

from .configuration_dcformer import DCFormerConfig, with_value_errors
from .sharing_dcformer import SharedConfig


_Config = TypeVar("_Config", bound="DCViTConfig")


@with_value_errors
@strict
class DCViTConfig(SharedConfig, ViTConfig):
    r"""
    Configuration of a DCViT model: every field of Transformers' `ViTConfig`, and the composition of
    [`DCFormerConfig`]. The defaults are DCViT-S/16 of Table 7 with 22 million parameters.

    Args:
        hidden_size (`int`, defaults to 384): Width of the residual stream.
        num_hidden_layers (`int`, defaults to 12): Number of layers.
        num_attention_heads (`int`, defaults to 6): Heads; composition mixes these.
        intermediate_size (`int`, defaults to 1536): Width of the MLP's inner layer.
        hidden_act, hidden_dropout_prob, attention_probs_dropout_prob, initializer_range, layer_norm_eps, image_size,
            patch_size, num_channels, qkv_bias, encoder_stride, pooler_output_size, pooler_act: As in `ViTConfig`; the
            image has 224 x 224 pixels and a patch 16 x 16. The paper says of ViT only its sizes: class token, learned
            positions and epsilons are those of Transformers.
        compose_init (`str`, defaults to `"paper"`): How composition parameters that no checkpoint holds start:
            `"paper"` small, as section 4 draws them, or `"identity"`, composing nothing at first, for weights that
            were trained without.
        compose_rank, compose_groups, compose_activation, compose_norm_eps, compose_pre, compose_post, compose_query,
            compose_key, compose_low_rank, compose_gate, compose_static: As in [`DCFormerConfig`].

    With every composition switched off the model is a plain ViT and runs through sdpa or FlashAttention.

    Raises:
        ValueError: for a value that no model can have; the message names the field, the value and what is allowed.

    Source: section 4.5 and Table 7 of the paper.

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
    _validate_composition = DCFormerConfig._validate_composition

    @classmethod
    def from_vit(cls: type[_Config], config: ViTConfig, **overrides: Any) -> _Config:
        """
        The configuration of a ViT with composition, which starts as identity.

        Args:
            config (`ViTConfig`): Its fields are taken over.
            overrides: Fields that replace them, and those of the composition.
        """
        return cls.from_dict({**_of_vit(config.to_dict()), **overrides})

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """As the base class; the configuration of a ViT is read as by [`from_vit`]."""
        values, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return _of_vit(values) if values.get("model_type") == ViTConfig.model_type else values, kwargs

    def validate_architecture(self) -> None:
        """Part of `@strict` validation: values that no model can have."""
        sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "num_channels")
        for name in (*sizes, "compose_rank", "compose_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}.")
        for name in ("layer_norm_eps", "compose_norm_eps"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must not be negative and must be at most 1, got {getattr(self, name)}.")
        for name, allowed in (
            ("compose_activation", ("gelu", "gelu_pytorch_tanh")),
            ("compose_init", ("paper", "identity")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be {allowed[0]!r} or {allowed[1]!r}, got {getattr(self, name)!r}.")
        if self.hidden_size % self.num_attention_heads != 0:
            raise ValueError(
                f"num_attention_heads must divide hidden_size ({self.hidden_size}), got {self.num_attention_heads}."
            )
        self._validate_composition()
        for image, patch in zip(_height_and_width(self.image_size), _height_and_width(self.patch_size)):
            if not 1 <= patch <= image:
                raise ValueError(
                    f"patch_size must be at least 1 and at most image_size ({self.image_size}), got {self.patch_size}."
                )


def _height_and_width(size: int | list[int] | tuple[int, ...]) -> tuple[int, ...]:
    return (size, size) if isinstance(size, int) else tuple(size)


def _of_vit(values: dict[str, Any]) -> dict[str, Any]:
    """What a ViT's configuration says, as one of ours whose composition starts as identity."""
    kept = {name: value for name, value in values.items() if name not in ("architectures", "auto_map")}
    return {**kept, "model_type": DCViTConfig.model_type, "compose_init": "identity"}


__all__ = ["DCViTConfig"]
