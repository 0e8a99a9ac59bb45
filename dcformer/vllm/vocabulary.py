"""Token ids beyond the embedding, by the model's `oov_policy`: refused, clamped, or given rows of their own."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.exceptions import VLLMValidationError
from vllm.renderers.hf import HfRenderer
from vllm.v1.sample.logits_processor import LogitsProcessor

from ..configuration_dcformer import DCFormerConfig
from ..hub_dcformer import padded_rows


TOKENIZER_MODE = "dcformer"  # vLLM's Hugging Face tokenizer, with the renderer below


def trained_rows(config: DCFormerConfig) -> int:
    """Rows of the vocabulary that the checkpoint holds, without those of `oov_policy="pad"`."""
    return getattr(config, "trained_vocab_size", config.vocab_size)


def prepare_vocabulary(model_config: Any) -> None:
    """Choose the renderer that checks token ids, and make room for the rows of `oov_policy="pad"`."""
    config = model_config.hf_config
    model_config.tokenizer_mode = TOKENIZER_MODE
    if config.oov_policy == "pad" and not hasattr(config, "trained_vocab_size"):
        config.trained_vocab_size = config.vocab_size
        config.vocab_size = padded_rows(config.vocab_size)
        model_config.model_arch_config = model_config.get_model_arch_config()
        processors = list(model_config.logits_processors or [])
        model_config.logits_processors = [*processors, f"{__name__}:AddedRows"]


class CheckedRenderer(HfRenderer):
    """vLLM's own check admits every id of a tokenizer that is larger than the embedding; this one does not."""

    def validate_token_ids(self, token_ids: Sequence[int], *, parameter: str | None = None) -> None:
        """
        Raises:
            VLLMValidationError: for an id without an embedding row, unless `oov_policy="clamp"`.
        """
        config = self.model_config.hf_config
        wrong = [(position, token) for position, token in enumerate(token_ids) if not 0 <= token < config.vocab_size]
        if wrong and config.oov_policy != "clamp":
            position, token = wrong[0]
            raise VLLMValidationError(
                f"Token id {token} at position {position} has no row in the embedding, which has {config.vocab_size}; "
                "use a tokenizer of that vocabulary, or oov_policy='clamp' or 'pad' in config.json.",
                parameter=parameter,
            )


class AddedRows(LogitsProcessor):
    """Never sample a row that `oov_policy="pad"` added, as `suppress_tokens` does in `generate`."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        self.trained_rows = trained_rows(vllm_config.model_config.hf_config)

    def is_argmax_invariant(self) -> bool:
        return True  # an added row is the mean of the others, so its logit is never the largest

    def update_state(self, batch_update: Any) -> None:
        """Nothing depends on the requests."""

    def apply(self, logits: Tensor) -> Tensor:
        """(requests, vocabulary) logits, changed in place."""
        logits[:, self.trained_rows :] = float("-inf")
        return logits
