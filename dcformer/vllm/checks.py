"""Refuse options of vLLM with which these models would compute something else, and token ids beyond the embedding."""

from collections.abc import Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.renderers.hf import HfRenderer

from ..parallel_dcformer import shards_heads


TOKENIZER_MODE = "dcformer"  # vLLM's Hugging Face tokenizer, with the renderer below
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
        for is_refused, reason in _refusals(vllm_config.model_config.hf_config, vllm_config):
            if is_refused:
                raise ValueError(reason)


def _refusals(config: Any, vllm_config: Any) -> list[tuple[bool, str]]:
    parallel, cache_dtype = vllm_config.parallel_config, vllm_config.cache_config.cache_dtype
    backend = vllm_config.attention_config.backend
    ranks = parallel.tensor_parallel_size
    sizes = {"num_attention_heads": config.num_attention_heads}
    if config.composes_heads:
        sizes = {"compose_groups": config.compose_groups, "num_key_value_heads": config.num_key_value_heads}
    divided = " and ".join(f"{name}={size}" for name, size in sizes.items())
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    by_length = config.position_embedding_type == "rope" and rope_type in _ROPE_TYPES_BY_LENGTH
    context_ranks = {
        name: getattr(parallel, name) for name in ("prefill_context_parallel_size", "decode_context_parallel_size")
    }
    of_any_model = [
        (
            ranks > 1 and not shards_heads(config, ranks),
            f"tensor_parallel_size={ranks} must divide {divided}: the heads of a group compose in one process.",
        ),
        (
            bool((config.mlp_gate_dim or 0) % ranks),
            f"tensor_parallel_size={ranks} must divide mlp_gate_dim={config.mlp_gate_dim}; choose another size.",
        ),
        (not getattr(config, "is_causal", True), "is_causal=False is not supported; leave it out of config.json."),
        (by_length, f"rope_type={rope_type!r} depends on the length of a sequence; use another type, or generate()."),
    ]
    of_composed_heads = [
        (backend is not None, f"attention_backend={backend} cannot compose attention heads; leave it out."),
        (
            cache_dtype not in _CACHE_DTYPES,
            f"kv_cache_dtype={cache_dtype!r} would quantise the factors of composition too; use 'auto'.",
        ),
        (
            config.compose_layers is not None,
            f"compose_layers={config.compose_layers} is not supported; use generate().",
        ),
        (vllm_config.speculative_config is not None, "speculative_config is not supported with composed attention."),
        (vllm_config.kv_transfer_config is not None, "kv_transfer_config is not supported with composed attention."),
        *((size > 1, f"{name}={size} would part the heads' scores; use 1.") for name, size in context_ranks.items()),
    ]
    return [*of_any_model, *(of_composed_heads if config.composes_heads else [])]


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
