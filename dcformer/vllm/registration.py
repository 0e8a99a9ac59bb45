"""The plugin's entry point, which vLLM calls in every process that it starts."""

import logging
import re


MODEL_CLASSES = {
    "DCFormerForCausalLM": "dcformer.vllm.model:DCFormerForCausalLM",
    "DCPythiaForCausalLM": "dcformer.vllm.model:DCPythiaForCausalLM",
    # The names in the authors' own config.json.
    "DCFormer": "dcformer.vllm.model:DCFormerForCausalLM",
    "DCPythia": "dcformer.vllm.model:DCPythiaForCausalLM",
}
# vLLM promises no stable interface to models and attention backends from outside.
FIRST_VERSION, FIRST_VERSION_AFTER = (0, 32), (0, 33)

logger = logging.getLogger(__name__)


def register() -> None:
    """Add the models and the attention backend to a tested version of vLLM; may be called more than once."""
    import vllm

    if not is_tested_with(vllm.__version__):
        first, after = (".".join(map(str, numbers)) for numbers in (FIRST_VERSION, FIRST_VERSION_AFTER))
        logger.warning(
            f"DCFormer models need vLLM >={first},<{after} and are not registered in vLLM {vllm.__version__}; "
            f"pip install 'vllm>={first},<{after}'."
        )
        return

    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    import dcformer  # noqa: F401  registers the configurations and tokenizers

    from .checks import TOKENIZER_MODE, ModelChecks

    if "DCMHA" in AttentionBackendEnum.__members__:
        return
    register_backend("DCMHA", "dcformer.vllm.backend.ComposedAttentionBackend")
    TokenizerRegistry.register(TOKENIZER_MODE, "vllm.tokenizers.hf", "CachedHfTokenizer")
    RENDERER_REGISTRY.register(TOKENIZER_MODE, "dcformer.vllm.checks", "CheckedRenderer")
    for name, model_class in MODEL_CLASSES.items():
        ModelRegistry.register_model(name, model_class)
        MODELS_CONFIG_MAP[name] = ModelChecks


def is_tested_with(version: str) -> bool:
    """Whether a version of vLLM is in the tested range."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and FIRST_VERSION <= (int(numbers[1]), int(numbers[2])) < FIRST_VERSION_AFTER
