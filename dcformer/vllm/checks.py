"""Refuse options of vLLM and adapters with which these models would compute something else, and unknown token ids."""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM
from vllm.config import CompilationMode
from vllm.distributed.utils import get_pp_indices
from vllm.exceptions import VLLMValidationError
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import get_adapter_absolute_path
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform
from vllm.renderers.hf import HfRenderer


TOKENIZER_MODE = "dcformer"  # vLLM's Hugging Face tokenizer, with the renderer below
# Their heads are trained on hidden states of one model, and read those.
_METHODS_BY_STATES = ("eagle", "eagle3", "medusa", "dflash", "dspark", "extract_hidden_states")
_CACHE_DTYPES = ("auto", "float16", "bfloat16", "float32")
# Their frequencies follow the length of a sequence, and one step of vLLM computes sequences of many lengths.
_ROPE_TYPES_BY_LENGTH = ("dynamic", "longrope")


class ModelChecks(VerifyAndUpdateConfig):
    """The checks that vLLM calls with its configuration of a DCFormer or DCPythia."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Choose the renderer that checks token ids."""
        model_config.tokenizer_mode = TOKENIZER_MODE

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Raise ValueError for the first option that a DCFormer or DCPythia cannot follow."""
        for reason in _refusals(vllm_config.model_config.hf_config, vllm_config):
            raise ValueError(reason)
        if vllm_config.speculative_config is not None and vllm_config.speculative_config.uses_draft_model():
            # vLLM has one group of blocks for all layers of a draft model, so those behind a window stay.
            vllm_config.scheduler_config.disable_hybrid_kv_cache_manager = True
        model, compilation = vllm_config.model_config, vllm_config.compilation_config
        stages = vllm_config.parallel_config.pipeline_parallel_size
        if stages > 1 and model.enforce_eager and current_platform.is_cpu():
            # On CPUs vLLM makes room for the states of the stage before only where it traces.
            model.enforce_eager = False
            compilation.mode, compilation.backend = CompilationMode.DYNAMO_TRACE_ONCE, "eager"


def _refusals(config: Any, vllm_config: Any) -> Iterator[str]:
    parallel, cache_dtype = vllm_config.parallel_config, vllm_config.cache_config.cache_dtype
    backend = vllm_config.attention_config.backend
    ranks, stages, layers = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, config.num_hidden_layers
    method = vllm_config.speculative_config and vllm_config.speculative_config.method
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    beside_stages = f"is not supported with pipeline_parallel_size={stages}"
    bounds = [get_pp_indices(layers, stage, stages) for stage in range(stages)]
    if any(start >= stop for start, stop in bounds):
        yield f"pipeline_parallel_size={stages} leaves a stage without layers: the model has {layers}."
    if method in _METHODS_BY_STATES:
        yield f"speculative_config with method={method!r} is not supported; use 'ngram' or 'draft_model'."
    if method is not None and stages > 1:
        yield f"speculative_config {beside_stages}; leave out one of them."
    if (config.mlp_gate_dim or 0) % ranks:
        yield f"tensor_parallel_size={ranks} must divide mlp_gate_dim={config.mlp_gate_dim}; choose another size."
    if vllm_config.lora_config is not None and stages > 1 and current_platform.is_cpu():
        yield f"enable_lora {beside_stages} on CPUs; leave out one of them."
    if not getattr(config, "is_causal", True):
        yield "is_causal=False is not supported; leave it out of config.json."
    if config.position_embedding_type == "rope" and rope_type in _ROPE_TYPES_BY_LENGTH:
        yield f"rope_type={rope_type!r} depends on the length of a sequence; use another type, or generate()."
    if not config.composes_heads:
        return
    if backend is not None:
        yield f"attention_backend={backend} cannot compose attention heads; leave it out."
    if cache_dtype not in _CACHE_DTYPES:
        yield f"kv_cache_dtype={cache_dtype!r} would quantise the factors of composition too; use 'auto'."
    if config.compose_layers is not None:
        yield f"compose_layers={config.compose_layers} is not supported; use generate()."
    if vllm_config.kv_transfer_config is not None:
        yield "kv_transfer_config is not supported with composed attention."
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if (size := getattr(parallel, name)) > 1:
            yield f"{name}={size} would part the heads' scores; use 1."


class CheckedRenderer(HfRenderer):
    """A renderer that checks ids by the embedding; vLLM's own checks by the tokenizer, which may be larger."""

    def validate_token_ids(self, token_ids: Sequence[int], *, parameter: str | None = None) -> None:
        """Raise VLLMValidationError for an id without an embedding row, unless `oov_policy="clamp"`."""
        config = self.model_config.hf_config
        wrong = [(position, token) for position, token in enumerate(token_ids) if not 0 <= token < config.vocab_size]
        if wrong and config.oov_policy != "clamp":
            position, token = wrong[0]
            raise VLLMValidationError(
                f"Token id {token} at position {position} has no row in the embedding, which has {config.vocab_size}; "
                "use a tokenizer of that vocabulary, or oov_policy='clamp' in config.json.",
                parameter=parameter,
            )

    @functools.cached_property
    def linear_layers(self) -> dict[str, nn.Linear]:
        """The linear layers that adapters may change, under their names in the Transformers model."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.model_config.hf_config)
        layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        return {name: layer for name, layer in layers.items() if name != "lm_head"}

    @functools.cached_property
    def checked_adapters(self) -> set[tuple[Any, ...]]:
        """Paths of adapters that fit, with the sizes and times of their files."""
        return set()

    def check_adapter(self, path: str, lora_config: Any) -> None:
        """Raise VLLMValidationError for an adapter of which vLLM would leave out or misplace a weight."""
        try:
            folder = Path(_adapter_folder(path))
            stats = [(folder / name).stat() for name in ("adapter_config.json", "adapter_model.safetensors")]
            version = (path, *(number for stat in stats for number in (stat.st_size, stat.st_mtime_ns)))
            if version not in self.checked_adapters:
                self._check_weights(folder, lora_config)
                self.checked_adapters.add(version)
        except (AttributeError, OSError, TypeError, ValueError, SafetensorError) as error:
            message = f"Adapter {path!r} cannot be served: {error}"
            raise VLLMValidationError(message, parameter="lora_request") from error

    def _check_weights(self, folder: Path, lora_config: Any) -> None:
        helper = PEFTHelper.from_local_dir(str(folder), None)
        helper.validate_legal(lora_config)
        with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        if not shapes:
            raise ValueError("it holds no weights.")
        for layer, name in {_ADAPTED.sub(r"\1", name): name for name in shapes}.items():
            if layer not in self.linear_layers:
                what = "changes the composition" if ".compose" in name else "is not of a linear layer of this model"
                raise ValueError(f"{name} {what}; serve what merge_and_unload() gives.")
            linear, (rank, _) = self.linear_layers[layer], helper.get_rank_and_scaling(layer)
            for part, fits in ("A", (rank, linear.in_features)), ("B", (linear.out_features, rank)):
                name = f"base_model.model.{layer}.lora_{part}.weight"
                if (shape := shapes.get(name)) != fits:
                    raise ValueError(f"{name} has shape {shape}, not {fits}; it was made for another model.")


_ADAPTED = re.compile(r"^base_model\.model\.(.*)\.lora_[AB]\.weight$")
_adapter_folder = functools.lru_cache(get_adapter_absolute_path)


def with_checked_adapters(validate: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Make vLLM's check of a request's adapter, a method of its `InputProcessor`, look into the adapter."""

    @functools.wraps(validate)
    def validated(self: Any, lora_request: Any) -> None:
        validate(self, lora_request)
        if lora_request is not None and isinstance(self.renderer, CheckedRenderer):
            self.renderer.check_adapter(lora_request.lora_path, self.lora_config)

    return validated
