"""Batches of prompts answered by vLLM with the options of generate()."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
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


def vllm_answers(
    found: FoundModel,
    *,
    stop_strings: Sequence[str] = (),
    seed: int | None = None,
    dtype: str | None = None,
    tokenizer: str | None = None,
    **options: Any,
) -> Callable[[Sequence[str | Sequence[int]], int], list[str]]:
    """
    Start vLLM.

    Args:
        found: From [`dcformer.loading.find_model`].
        stop_strings, options: As of [`TextGenerator`], without beams and drafts.
        seed (*optional*): Of sampled tokens.
        dtype (*optional*): Such as `"bfloat16"`; `None`: that in which the weights are stored.
        tokenizer (*optional*): Folder or name on the Hub, in place of the model's.

    Returns:
        A function of prompts, texts or token ids, and the number of the first of them, that returns their answers.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    vllm = import_optional("vllm", "--engine vllm needs vLLM: pip install 'dcformer[vllm]'.")
    try:
        own = GenerationConfig.from_pretrained(found.path, revision=found.revision)
    except OSError:  # a model without the file
        own = GenerationConfig.from_model_config(found.config)
    given = {**own.to_dict(), **sampling_options(options)}
    defaults = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0} if given.get("do_sample") else {}
    values = {
        name: default if given.get(name) is None else given[name]
        for name, default in {"repetition_penalty": 1.0, **defaults}.items()
    }
    ends = {"stop": list(stop_strings), "stop_token_ids": eos_token_ids(own, found.tokenizer)}
    values = {"temperature": 0.0, **values, **ends}
    # By itself vLLM rounds weights in float32 to 16 bits.
    stored = found.config.get_text_config().dtype
    dtype = dtype or ("auto" if stored is None else str(stored).removeprefix("torch."))
    engine = vllm.LLM(found.path, dtype=dtype, tokenizer=tokenizer, revision=found.revision)

    def answer(prompts: Sequence[str | Sequence[int]], first: int) -> list[str]:
        rows = [list(found.tokenizer(each)["input_ids"] if isinstance(each, str) else each) for each in prompts]
        params = [
            vllm.SamplingParams(
                **values,
                max_tokens=new_tokens(options, own, found.config, len(ids)),
                seed=None if seed is None else seed + first + place,
            )
            for place, ids in enumerate(rows)
        ]
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in rows], params, use_tqdm=False)
        # vLLM's own text lacks the token that ended it, which generate() keeps.
        texts = found.tokenizer.batch_decode([out.outputs[0].token_ids for out in outputs], skip_special_tokens=True)
        return ["".join(text_before(stop_strings, [text])) for text in texts]

    return answer
