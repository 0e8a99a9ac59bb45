"""Batches of prompts answered by vLLM with the options of generate()."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig

from ..common.optional import import_optional
from ..loading import FoundModel
from .generator import eos_token_ids, new_tokens, sampling_options, text_before


# stdout is for answers; on a CPU the cache would take nine tenths of the memory (in GiB).
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
}


class VLLMGenerator:
    """
    vLLM with a model and options of generate().

    Args:
        found: From [`dcformer.loading.find_model`].
        stop_strings (defaults to none), options: As of [`TextGenerator`], without beams and drafts.
        dtype (*optional*): Such as `"bfloat16"`; `None`: that in which the weights are stored.
        tokenizer (*optional*): Folder or name on the Hub, in place of the model's.

    Raises:
        ImportError: without vLLM.
    """

    def __init__(
        self,
        found: FoundModel,
        *,
        stop_strings: Sequence[str] = (),
        dtype: str | None = None,
        tokenizer: str | None = None,
        **options: Any,
    ):
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._vllm: Any = import_optional("vllm", "--engine vllm needs vLLM: pip install 'dcformer[vllm]'.")
        self.found, self.stop_strings, self.options = found, tuple(stop_strings), sampling_options(options)
        try:
            self._own = GenerationConfig.from_pretrained(found.path, revision=found.revision)
        except OSError:  # a model without the file
            self._own = GenerationConfig.from_model_config(found.config)
        stored = found.config.get_text_config().dtype  # by itself vLLM rounds weights in float32 to 16 bits
        dtype = dtype or ("auto" if stored is None else str(stored).removeprefix("torch."))
        self._llm = self._vllm.LLM(found.path, dtype=dtype, tokenizer=tokenizer, revision=found.revision)

    def encode(self, prompt: str | Sequence[int], what: str = "The prompt") -> list[int]:
        """Token ids of a prompt; vLLM refuses those without an embedding."""
        return list(self.found.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt)

    def generate(self, prompts: Sequence[Sequence[int]], seed: int | None = None) -> list[str]:
        """The texts after prompts, which are token ids; the seed is of sampled tokens."""
        given = {**self._own.to_dict(), **self.options}
        defaults = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0} if given.get("do_sample") else {}
        values = {"temperature": 0.0, "repetition_penalty": 1.0, **defaults}
        values |= {name: given[name] for name in ("repetition_penalty", *defaults) if given.get(name) is not None}
        params = [
            self._vllm.SamplingParams(
                **values,
                max_tokens=new_tokens(self.options, self._own, self.found.config, len(ids)),
                seed=None if seed is None else seed + place,
                stop=list(self.stop_strings),
                stop_token_ids=eos_token_ids(self._own, self.found.tokenizer),
            )
            for place, ids in enumerate(prompts)
        ]
        outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        # vLLM's own text lacks the token that ended it, which generate() keeps.
        rows = [output.outputs[0].token_ids for output in outputs]
        texts = self.found.tokenizer.batch_decode(rows, skip_special_tokens=True)
        return ["".join(text_before(self.stop_strings, [text])) for text in texts]
