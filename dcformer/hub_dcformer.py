"""Checkpoints of composing models: the authors' parameter names in both directions, and what a load must find."""

import json
import os
import re
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.core_model_loading import PrefixChange, WeightRenaming
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto import modeling_auto

from .dcmha import checked_implementation


# The authors' name of a parameter, in parts, -> ours. Only renaming: to split or merge tensors while loading is wrong
# when every rank of a sharded load sees a part of them.
_SHARED_NAMES = {
    "tok_embeddings.": "embed_tokens.",
    ".attention.wqkv.": ".self_attn.qkv_proj.",
    ".attention.wo.": ".self_attn.o_proj.",
    ".attention.q_norm.scale": ".self_attn.q_norm.weight",
    ".attention.k_norm.scale": ".self_attn.k_norm.weight",
    ".attention.dyn_w_proj.dw1": ".self_attn.compose.hidden_weight",
    ".attention.dyn_w_proj.qkw": ".self_attn.compose.low_rank_weight",
    ".attention.dyn_w_proj.dd": ".self_attn.compose.gate_weight",
    ".attention_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".feed_forward.w2.": ".mlp.down_proj.",
}
# Parameters of a composition, and the other fields of a configuration that a composition must fit.
COMPOSITION = re.compile(r"\.compose\.\w+_weight$")
COMPOSED_SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads")
# By model type; and the output layer, which is outside the decoder.
AUTHORS_NAMES = {
    "dcformer": {
        **_SHARED_NAMES,
        ".feed_forward.w1.": ".mlp.gate_proj.",
        ".feed_forward.w3.": ".mlp.up_proj.",
        ".feed_forward.mg.": ".mlp.gate_mix.",
    },
    "dcpythia": {**_SHARED_NAMES, ".feed_forward.w1.": ".mlp.up_proj."},
}
AUTHORS_OUTPUT_NAMES = {"output.": "lm_head."}


def authors_patterns(model_type: str) -> dict[str, str]:
    """
    The authors' names as the `key_mapping` of Transformers' `from_pretrained`.

    Args:
        model_type (`str`): Of a configuration.

    Returns:
        `dict[str, str]`: regular expression -> our part; empty for models that the authors have not published.
    """
    names = {**AUTHORS_NAMES[model_type], **AUTHORS_OUTPUT_NAMES} if model_type in AUTHORS_NAMES else {}
    return {_pattern(theirs): ours for theirs, ours in names.items()}


def _pattern(part: str) -> str:
    # A part that does not start with a dot starts a name; one that does not end with a dot ends it. Transformers turns
    # the pattern into a name when it saves, for which it drops lookarounds, but would keep a "$".
    start, end = "" if part.startswith(".") else "(?<![^.])", "" if part.endswith(".") else "(?!.)"
    return start + re.escape(part) + end


class ComposingModel(PreTrainedModel):
    """A model that may compose its attention heads: how attention may run, and how its checkpoints are read."""

    # These never see other heads' scores, so they cannot compose; plain models switch them on below.
    _supports_sdpa = False
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    # Weights that start anew in a checkpoint of another task, as a regular expression.
    _heads_that_may_be_new: str | None = None

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """As the base class for plain models; composing models accept what can mix heads, and nothing else."""
        if self.config.composes_heads:
            return checked_implementation(requested_attention or "eager")
        self._supports_sdpa = self._supports_flash_attn = self._supports_flex_attn = True
        return super().get_correct_attn_implementation(requested_attention, is_init_check)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *args: Any,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """
        As `PreTrainedModel.from_pretrained`. Files of the authors' torch code load as they are.

        Args:
            output_loading_info (`bool`, defaults to `False`): Return the loading info too. Weights that the file lacks
                are then drawn at random and listed there, instead of being an error.

        Raises:
            ValueError: if the file lacks a weight for which its configuration asks.
        """
        if patterns := authors_patterns(cls.config_class.model_type):
            kwargs["key_mapping"] = {**patterns, **(kwargs.get("key_mapping") or {})}
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        if info["missing_keys"] and not output_loading_info and pretrained_model_name_or_path is not None:
            where = {name: kwargs[name] for name in ("subfolder", "revision", "cache_dir", "token") if name in kwargs}
            file_config = type(model.config).from_pretrained(pretrained_model_name_or_path, **where)
            if lost := sorted(info["missing_keys"] & cls._expected_in_file(file_config)):
                raise ValueError(
                    f"{str(pretrained_model_name_or_path)!r} lacks {lost[0]} (and {len(lost) - 1} more weights), for "
                    "which its config.json asks; get the file again, convert older files of the authors by `dcformer "
                    "convert torch`, or pass output_loading_info=True to draw them at random."
                )
        return (model, info) if output_loading_info else model

    @classmethod
    def _expected_in_file(cls, config: Any) -> set[str]:
        """Parameters that a file with this configuration must hold, of the decoder alone in a file of another task."""
        with torch.device("meta"):
            expected = {name for name, _ in cls(config).named_parameters()}
        if (config.architectures or [cls.__name__])[0] != cls.__name__:
            expected = {name for name in expected if name.startswith(f"{cls.base_model_prefix}.")} or expected
        may_be_new = cls._heads_that_may_be_new
        return {name for name in expected if may_be_new is None or not re.match(may_be_new, name)}

    def save_pretrained(self, *args: Any, save_original_format: bool = False, **kwargs: Any) -> None:
        """
        As `PreTrainedModel.save_pretrained`, but under our parameter names also where the authors' were read.

        Args:
            save_original_format (`bool`, defaults to `False`): Write the authors' names.
        """
        read: Any = getattr(self, "_weight_conversions", None)
        if save_original_format:
            renamings = [WeightRenaming(*names) for names in authors_patterns(self.config.model_type).items()]
            # With the authors the output layer is one of the decoder's modules.
            prefix = PrefixChange(prefix_to_add=self.base_model_prefix)
            self._weight_conversions = [*renamings, prefix] if renamings else []
        try:
            super().save_pretrained(*args, save_original_format=save_original_format, **kwargs)
        finally:
            self._weight_conversions = read

    def freeze_all_but_composition(self) -> None:
        """Leave a gradient to the parameters of the composition alone; ValueError if the model composes nothing."""
        if not any(".compose." in name for name, _ in self.named_parameters()):
            raise ValueError("The model composes no heads, so nothing would be trained; switch composition on.")
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(".compose." in name)

    def save_composition(self, path: str | os.PathLike) -> None:
        """
        Write the parameters of the composition alone as a safetensors file, for the option `--composition` of `dcformer
        convert upcycle`; ValueError if there are none under their names.
        """
        weights = {name: values.detach().cpu() for name, values in self.named_parameters() if COMPOSITION.search(name)}
        if not weights:
            raise ValueError("There is no composition to save; of a PEFT model call merge_and_unload() first.")
        values = self.config.to_dict()
        fields = {name: values[name] for name in values if name in COMPOSED_SHAPE or name.startswith("compose_")}
        save_file(weights, path, {"composition": json.dumps(fields), "source": self.name_or_path})


def register_model(model_class: Any) -> None:
    """
    Give a model to the Auto class of its task, and its name to the table of that task.

    By that table Trainer knows for which models label smoothing shifts the labels, lm-eval which are language models,
    and `transformers serve` and the model cards of Trainer what a model is for.
    """
    config_class = model_class.config_class
    task = model_class.__name__.removeprefix(config_class.__name__.removesuffix("Config")).removeprefix("Model")
    auto_class = getattr(modeling_auto, f"AutoModel{task}")
    auto_class.register(config_class, model_class, exist_ok=True)
    auto_class._model_mapping._model_mapping.setdefault(config_class.model_type, model_class.__name__)


__all__ = ["ComposingModel", "register_model"]
