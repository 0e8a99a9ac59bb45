"""GGUF files, which Transformers reads and dequantises: what it would pass over in them is refused."""

import os
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.utils import cached_file

from ..common.optional import import_optional
from .plan import listed


# Settings that Transformers does not read, with the values that change nothing.
_NEUTRAL: dict[str, tuple] = {
    "rope.scaling.type": ("none",),
    **dict.fromkeys(("rope.scaling.factor", "rope.scaling.attn_factor", "rope.scale_linear"), (1.0,)),
    **dict.fromkeys(("expert_count", "expert_used_count"), (0,)),
    **dict.fromkeys(("rope.scaling.finetuned", "attention.causal"), (True,)),
}
_DEFAULT_THETA = 10000.0  # of the format
# Settings of sampling, by their names in generation_config.json.
_SAMPLING = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
_SAMPLING |= {name: name for name in ("top_k", "top_p", "min_p")}


def open_gguf(folder: str, file: dict[str, Any], config: PreTrainedConfig) -> tuple[PreTrainedModel, dict[str, Any]]:
    """
    The model of a GGUF file in a folder or of a name on the Hub, as Transformers makes it, in float32, and all that the
    file states, by key; ValueError if it holds what Transformers does not read into the model or into its
    configuration, or lacks weights. `file` is the `gguf_file` and `revision` of `from_pretrained`.
    """
    gguf = import_optional("gguf", "Reading a GGUF file", "convert")
    reader = gguf.GGUFReader(cached_file(folder, file["gguf_file"], revision=file["revision"]))
    where = repr(os.path.join(folder, file["gguf_file"]))
    stated = {key: field.contents() for key, field in reader.fields.items()}
    if not (unread := _unread_settings(stated, config)):
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, **file, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        if missing := sorted(info["missing_keys"]):
            raise ValueError(f"{where} lacks {listed(missing)}, which Transformers would initialise at random.")
        numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        names = gguf.get_tensor_name_map(numbers[stated["general.architecture"]], config.num_hidden_layers)
        taken = {names.get_name(name, try_suffixes=(".weight", ".bias")) for name in model.state_dict()}
        unread = [tensor.name for tensor in reader.tensors if tensor.name not in taken]
    if unread:
        raise ValueError(
            f"Transformers does not read {listed(unread, most=8)} of {where}, which may change what the model "
            "computes; take its safetensors files instead."
        )
    return model, stated


def generation_settings(stated: dict[str, Any]) -> dict[str, Any]:
    """The settings of a GGUF file for `generate`, named as in generation_config.json; Transformers reads none."""
    ends = {stated[key] for name in ("eos", "eot", "eom") if (key := f"tokenizer.ggml.{name}_token_id") in stated}
    sampling = {name: stated.get(f"general.sampling.{key}") for name, key in _SAMPLING.items()}
    # Decimal fractions are stored in float32; llama.cpp has also -1 for what is off.
    sampling = {name: max(0, round(v, 6)) for name, v in sampling.items() if v is not None}
    if sampling:
        sampling = {"do_sample": True, **sampling} if sampling.get("temperature", 1) else {"do_sample": False}
    ids = {"bos_token_id": stated.get("tokenizer.ggml.bos_token_id"), "eos_token_id": sorted(ends)}
    return ids | sampling if sampling or len(ends) > 1 else {}


def _unread_settings(stated: dict[str, Any], config: PreTrainedConfig) -> list[str]:
    """The settings that a GGUF file states of its architecture and that the configuration made of it lacks."""
    prefix = f"{stated['general.architecture']}."
    values = {key.removeprefix(prefix): value for key, value in stated.items() if key.startswith(prefix)}
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    same = dict.fromkeys(("rope.dimension_count", "attention.key_length", "attention.value_length"), (width,))
    same |= {"rope.freq_base": (config.rope_parameters["rope_theta"],), **_NEUTRAL}
    read = GGUF_CONFIG_MAPPING[config.model_type].keys() - same.keys()
    return [
        f"{prefix}{key}={value!r}"
        for key, value in {"rope.freq_base": _DEFAULT_THETA, **values}.items()
        if key not in read and value not in same.get(key, ())
    ]
