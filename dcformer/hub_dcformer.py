"""Loading and saving of models that compose heads: the authors' parameter names, and checks for missing weights."""

import json
import os
import re
from typing import Any

import torch
from safetensors.torch import save
from transformers.core_model_loading import PrefixChange, WeightRenaming
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto import modeling_auto

from .dcmha import checked_implementation


# Parts of the authors' parameter names -> ours. Renaming only: in a sharded load each rank has a part of a tensor, so
# tensors cannot be split or merged.
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
# Parameters of a composition, and the configuration fields besides `compose_*` that a saved composition must match.
COMPOSITION = re.compile(r"\.compose\.\w+_weight$")
COMPOSED_SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads")
# By model type; the output layer is outside the decoder.
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
# Merged copies, identity buffers and caches that the authors' files hold besides the parameters.
AUTHORS_BUFFERS = [
    r"dyn_w_proj\.(dw_m|qkw_m|sw|(pre|post)_proj\.w)$",
    r"attention\.kv_cache\.",
    r"(^|\.)(freqs_cis|causal_mask|mask_cache)$",
]


def authors_patterns(model_type: str) -> dict[str, str]:
    """
    A `key_mapping` for Transformers' `from_pretrained` that renames the authors' parameters: regular expression -> our
    part of the name. Empty for model types that the authors have not published.
    """
    names = {**AUTHORS_NAMES[model_type], **AUTHORS_OUTPUT_NAMES} if model_type in AUTHORS_NAMES else {}
    return {_pattern(theirs): ours for theirs, ours in names.items()}


def _pattern(part: str) -> str:
    # A part without a leading dot starts the name; one without a trailing dot ends it. Transformers turns the pattern
    # into a name when it saves, and then drops lookarounds, but would keep a "$".
    start, end = "" if part.startswith(".") else "(?<![^.])", "" if part.endswith(".") else "(?!.)"
    return start + re.escape(part) + end


class ComposingModel(PreTrainedModel):
    """Base class of models that may compose heads: which attention implementations they accept, and how they load."""

    # These compute one head at a time, so they cannot compose; models without composition switch them on below.
    _supports_sdpa = False
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    # Weights that are initialised where the checkpoint of another task lacks them, as a regular expression.
    _heads_that_may_be_new: str | None = None

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Return the implementation to use; with composition only those that compose are accepted."""
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
        Load a model as `PreTrainedModel.from_pretrained` does; also from checkpoints of the authors' torch code.

        Args:
            output_loading_info (`bool`, defaults to `False`): Also return the loading info. Weights that the checkpoint
                lacks are then initialised at random and listed there, instead of being an error.

        Raises:
            ValueError: if the checkpoint lacks a weight that its configuration needs.
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
                    "convert torch`, or pass output_loading_info=True to initialise them at random."
                )
        return (model, info) if output_loading_info else model

    @classmethod
    def _expected_in_file(cls, config: Any) -> set[str]:
        """Parameters that a checkpoint of this configuration must have; of another task, only those of the decoder."""
        with torch.device("meta"):
            expected = {name for name, _ in cls(config).named_parameters()}
        if (config.architectures or [cls.__name__])[0] != cls.__name__:
            expected = {name for name in expected if name.startswith(f"{cls.base_model_prefix}.")} or expected
        may_be_new = cls._heads_that_may_be_new
        return {name for name in expected if may_be_new is None or not re.match(may_be_new, name)}

    def save_pretrained(self, *args: Any, save_original_format: bool = False, **kwargs: Any) -> None:
        """
        Save a model as `PreTrainedModel` does, with this package's parameter names even if the authors' were loaded.

        Args:
            save_original_format (`bool`, defaults to `False`): Write the authors' parameter names.
        """
        read: Any = getattr(self, "_weight_conversions", None)
        if save_original_format:
            renamed = [WeightRenaming(*names) for names in authors_patterns(self.config.model_type).items()]
            # With the authors the output layer is one of the decoder's modules.
            self._weight_conversions = [*renamed, PrefixChange(prefix_to_add=self.base_model_prefix)] if renamed else []
        try:
            super().save_pretrained(*args, save_original_format=save_original_format, **kwargs)
        finally:
            self._weight_conversions = read

    def freeze_all_but_composition(self) -> None:
        """Train the parameters of the composition only; ValueError if the model composes nothing."""
        if not any(".compose." in name for name, _ in self.named_parameters()):
            raise ValueError("The model composes no heads, so nothing would be trained; switch composition on.")
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(".compose." in name)

    def save_composition(self, path: str | os.PathLike) -> None:
        """
        Write only the parameters of the composition as a safetensors file, for `dcformer convert upcycle
        --composition`; ValueError if there are none.
        """
        weights = {name: values.detach().cpu() for name, values in self.named_parameters() if COMPOSITION.search(name)}
        if not weights:
            raise ValueError("There is no composition to save; of a PEFT model call merge_and_unload() first.")
        values = self.config.to_dict().items()
        fields = {name: value for name, value in values if name in COMPOSED_SHAPE or name.startswith("compose_")}
        content = save(weights, {"composition": json.dumps(fields), "source": self.name_or_path})
        with open(path, "wb") as file:  # where save_file puts a file of its owner alone, also over a link or a device
            file.write(content)


def register_model(model_class: Any) -> None:
    """
    Register a model with the Auto class of its task, and its name in the task's table of model names, by which Trainer
    (label smoothing, model cards), pipelines, and lm-eval recognise language models.
    """
    config_class = model_class.config_class
    task = model_class.__name__.removeprefix(config_class.__name__.removesuffix("Config")).removeprefix("Model")
    auto_class = getattr(modeling_auto, f"AutoModel{task}")
    auto_class.register(config_class, model_class, exist_ok=True)
    auto_class._model_mapping._model_mapping.setdefault(config_class.model_type, model_class.__name__)


__all__ = ["ComposingModel", "register_model"]
