"""What `generate()` of composing models refuses in one sentence, where Transformers itself would fail without one."""

from typing import Any

import torch
from transformers.generation import GenerationConfig, GenerationMixin


class DCFormerGenerationMixin(GenerationMixin):
    """As `GenerationMixin`, with an answer for every option that cannot work here."""

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        implementation = generation_config.cache_implementation
        if str(implementation).startswith("offloaded") and not torch.accelerator.is_available():
            raise ValueError(
                f"cache_implementation={implementation!r} keeps the cache in the machine's memory while the model "
                "computes on an accelerator, and none is available here; leave it out."
            )
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)

    def _get_stopping_criteria(self, generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._get_stopping_criteria(generation_config, *args, **kwargs)
        except ValueError as error:
            if "substring not found" not in str(error):
                raise
            raise ValueError(
                f"stop_strings={generation_config.stop_strings!r} needs a tokenizer that can spell any text, and this "
                "one knows whole words only; give eos_token_id the id of the word to stop at."
            ) from error

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        if self.config.composes_heads:
            raise ValueError(
                "Continuous batching stores keys and values of head_dim channels and runs sdpa, flash or paged eager "
                "attention, none of which can compose heads; use generate() with a padded batch."
            )
        return super().init_continuous_batching(*args, **kwargs)
