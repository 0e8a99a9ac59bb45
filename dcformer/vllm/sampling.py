"""Keep rows that `oov_policy="pad"` added from being sampled, as `suppress_tokens` does in `generate`."""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor

from .checks import trained_rows


class AddedRows(LogitsProcessor):
    """Their logits are the mean of the others, so the largest is never theirs, but they have a probability."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        self.trained_rows = trained_rows(vllm_config.model_config.hf_config)

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        """Nothing depends on the requests."""

    def apply(self, logits: Tensor) -> Tensor:
        """(requests, vocabulary) logits, changed in place."""
        logits[:, self.trained_rows :] = float("-inf")
        return logits
