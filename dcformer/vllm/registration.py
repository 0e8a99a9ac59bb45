"""The plugin's entry point: what vLLM calls in every process that it starts."""

import logging
import re
from typing import Any


MODEL_CLASSES = {
    "DCFormerForCausalLM": "dcformer.vllm.model:DCFormerForCausalLM",
    "DCPythiaForCausalLM": "dcformer.vllm.model:DCPythiaForCausalLM",
}
# The names in the authors' own config.json.
AUTHORS_CLASSES = {"DCFormer": "DCFormerForCausalLM", "DCPythia": "DCPythiaForCausalLM"}
# vLLM promises nothing about models and attention backends from outside, and changes both from release to release.
FIRST_VERSION, FIRST_VERSION_AFTER = (0, 32), (0, 33)

logger = logging.getLogger(__name__)


def register() -> None:
    """
    Add the models, their configurations and the attention backend to vLLM.

    In a version of vLLM that this was not tested with, other models go on to work, and these are refused with a
    sentence that names the tested versions. May be called more than once in a process.
    """
    import vllm
    from vllm import ModelRegistry

    if (reason := why_not_with(vllm.__version__)) is not None:
        logger.warning(reason)
        for name in (*MODEL_CLASSES, *AUTHORS_CLASSES):
            ModelRegistry.register_model(name, _refusing_class(reason))
        return

    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    import dcformer  # noqa: F401  registers the configurations and tokenizers

    from .checks import ModelChecks, check_token_ids_of_prompts

    if "DCMHA" not in AttentionBackendEnum.__members__:
        register_backend("DCMHA", "dcformer.vllm.backend.ComposedAttentionBackend")
    for name in (*MODEL_CLASSES, *AUTHORS_CLASSES):
        ModelRegistry.register_model(name, MODEL_CLASSES[AUTHORS_CLASSES.get(name, name)])
        MODELS_CONFIG_MAP[name] = ModelChecks
    check_token_ids_of_prompts()


def why_not_with(version: str) -> str | None:
    """The reason why these models do not run in a version of vLLM, or None if they do."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and FIRST_VERSION <= (int(numbers[1]), int(numbers[2])) < FIRST_VERSION_AFTER:
        return None
    first, after = (".".join(map(str, numbers)) for numbers in (FIRST_VERSION, FIRST_VERSION_AFTER))
    return (
        f"DCFormer models were tested with vLLM >={first},<{after} and do not run in vLLM {version}; "
        f"pip install 'vllm>={first},<{after}'."
    )


def _refusing_class(reason: str) -> type:
    """A model class that vLLM can register, and that raises `reason` when it is to be loaded."""
    from torch import nn

    class Refused(nn.Module):
        def __init__(self, *, vllm_config: Any, prefix: str = ""):
            raise ValueError(reason)

        def embed_input_ids(self, input_ids: Any) -> Any: ...

        def forward(self, input_ids: Any, positions: Any) -> Any: ...

        def compute_logits(self, hidden_states: Any) -> Any: ...

    return Refused
