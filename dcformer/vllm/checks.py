"""What vLLM is asked for and these models cannot do, each refused in one sentence before an engine starts."""

from collections.abc import Sequence
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.renderers.base import BaseRenderer

from ..configuration_dcformer import DCFormerConfig
from ..loading_dcformer import padded_rows
from ..parallel_dcformer import shards_heads


_CACHE_DTYPES = ("auto", "float16", "bfloat16", "float32")
# Their frequencies follow the length of the sequence, of which a step of vLLM has many at once.
_ROPE_TYPES_BY_LENGTH = ("dynamic", "longrope")


class ModelChecks(VerifyAndUpdateConfig):
    """What vLLM calls with its configuration of one of these models."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        config = model_config.hf_config
        if config.oov_policy == "pad" and not hasattr(config, "trained_vocab_size"):
            config.trained_vocab_size = config.vocab_size
            config.vocab_size = padded_rows(config.vocab_size)
            model_config.model_arch_config = model_config.get_model_arch_config()
            processors = list(model_config.logits_processors or [])
            model_config.logits_processors = [*processors, "dcformer.vllm.sampling:AddedRows"]

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """
        Raises:
            ValueError: for what these models cannot do.
        """
        config = vllm_config.model_config.hf_config
        if (reason := _why_not(config, vllm_config)) is not None:
            raise ValueError(reason)


def _why_not(config: DCFormerConfig, vllm_config: Any) -> str | None:
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    if ranks > 1 and not shards_heads(config, ranks):
        return _about_groups(config, ranks)
    for name, size in (("intermediate_size", config.intermediate_size), ("mlp_gate_dim", config.mlp_gate_dim)):
        if size is not None and size % ranks != 0:
            return f"tensor_parallel_size={ranks} does not divide {name}={size}; choose a size that does."
    if not getattr(config, "is_causal", True):
        return (
            "is_causal=False makes an encoder of this model, and vLLM generates from it; leave it out of config.json."
        )
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    if config.position_embedding_type == "rope" and rope_type in _ROPE_TYPES_BY_LENGTH:
        return (
            f"rope_type={rope_type!r} turns positions by frequencies that depend on the length of a sequence, which "
            "sequences computed together do not share; use rope_type 'linear', 'yarn' or 'llama3', or generate()."
        )
    if not config.composes_heads:
        return None
    if vllm_config.attention_config.backend is not None:
        return (
            f"attention_backend={vllm_config.attention_config.backend.name!r} cannot compose attention heads, since it "
            "never holds two heads' scores at once; leave it out, the model brings its own."
        )
    if vllm_config.cache_config.cache_dtype not in _CACHE_DTYPES:
        return (
            f"kv_cache_dtype={vllm_config.cache_config.cache_dtype!r} would also quantise the factors of composition, "
            "which ride in the cached rows; use 'auto'."
        )
    if vllm_config.speculative_config is not None:
        return "Speculative decoding has not been tested with composed attention; leave speculative_config out."
    if vllm_config.kv_transfer_config is not None:
        return "Moving cached rows to other engines has not been tested with composed attention; leave it out."
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return (
                f"{name}={getattr(parallel, name)} cannot compose attention heads, whose scores it would part; use 1."
            )
    return None


def _about_groups(config: DCFormerConfig, ranks: int) -> str:
    groups = f"compose_groups={config.compose_groups}"
    if not config.composes_heads:
        groups = f"num_attention_heads={config.num_attention_heads}"
    return (
        f"tensor_parallel_size={ranks} does not divide the heads of this model, which has {groups} and "
        f"num_key_value_heads={config.num_key_value_heads}: heads of one group compose in one process; choose a size "
        "that divides both."
    )


def trained_rows(config: DCFormerConfig) -> int:
    """Rows of the vocabulary that the checkpoint holds."""
    return getattr(config, "trained_vocab_size", config.vocab_size)


def check_token_ids_of_prompts() -> None:
    """
    Let vLLM refuse prompts with an id that has no embedding row, by `oov_policy` of the model. Its own check lets the
    ids of a tokenizer pass that is larger than the model; in a step, one of them would end the engine for everybody.
    """
    checks_already = getattr(BaseRenderer.validate_token_ids, "checks_composing_models", False)
    if checks_already:
        return
    of_vllm = BaseRenderer.validate_token_ids

    def validate_token_ids(self: Any, token_ids: Sequence[int], *, parameter: str | None = None) -> None:
        config = self.model_config.hf_config
        if not isinstance(config, DCFormerConfig):
            of_vllm(self, token_ids, parameter=parameter)
        elif token_ids and config.oov_policy != "clamp":
            rows = config.vocab_size
            if min(token_ids) < 0 or max(token_ids) >= rows:
                position = next(place for place, token in enumerate(token_ids) if not 0 <= token < rows)
                raise VLLMValidationError(
                    f"Token id {token_ids[position]} at position {position} has no row in the embedding, which has "
                    f"{rows}; use a tokenizer of that vocabulary, or oov_policy='clamp' or 'pad' in config.json.",
                    parameter=parameter,
                )

    validate_token_ids.checks_composing_models = True  # type: ignore[attr-defined]
    BaseRenderer.validate_token_ids = validate_token_ids
