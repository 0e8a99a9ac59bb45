"""The plugin's entry point, which vLLM calls in every process that it starts."""

import logging

from packaging.specifiers import SpecifierSet


# Ours, and those in the authors' config.json.
ARCHITECTURES = ("DCFormerForCausalLM", "DCPythiaForCausalLM", "DCFormer", "DCPythia")
# vLLM promises no stable interface to models and attention backends from outside.
TESTED_VERSIONS = ">=0.32,<0.34"

logger = logging.getLogger(__name__)


def register() -> None:
    """Add the models and the attention backend to a tested version of vLLM; may be called more than once."""
    import vllm

    if not SpecifierSet(TESTED_VERSIONS).contains(vllm.__version__, prereleases=True):
        logger.warning(
            f"DCFormer models need vLLM {TESTED_VERSIONS} and are not registered in vLLM {vllm.__version__}; "
            f"pip install 'vllm{TESTED_VERSIONS}'."
        )
        return

    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.engine.input_processor import InputProcessor

    import dcformer  # noqa: F401  registers the configurations and tokenizers

    from .checks import TOKENIZER_MODE, ModelChecks, with_checked_adapters

    if "DCMHA" in AttentionBackendEnum.__members__:
        return
    register_backend("DCMHA", "dcformer.vllm.attention_backend.ComposedAttentionBackend")
    TokenizerRegistry.register(TOKENIZER_MODE, "vllm.tokenizers.hf", "CachedHfTokenizer")
    RENDERER_REGISTRY.register(TOKENIZER_MODE, "dcformer.vllm.checks", "CheckedRenderer")
    # vLLM would find out while it computes, and end with all its requests.
    InputProcessor._validate_lora = with_checked_adapters(InputProcessor._validate_lora)
    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, "dcformer.vllm.model:DCFormerForCausalLM")
        MODELS_CONFIG_MAP[name] = ModelChecks
