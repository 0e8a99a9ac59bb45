"""Engines of vLLM for tests, and what `generate` answers to the same prompts; without vLLM their tests are skipped."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel


pytest.importorskip("vllm", reason="vLLM needs a separate environment: make test-serving")

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory


# Crosses the windows of the tiny models, several blocks, and a chunk of 16 tokens.
LENGTHS = (1, 5, 17, 33, 48)
NEW_TOKENS = 12


@contextmanager
def engine(folder: Path | str, **options: Any) -> Iterator[LLM]:
    """An engine in float32 with blocks of 16 tokens, shut down at the end."""
    defaults: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True}
    try:
        llm = LLM(str(folder), **{**defaults, "block_size": 16, "seed": 0, **options})
        try:
            yield llm
        finally:
            # Of a failed test too: one that is left to the garbage collector would end while the next one starts, and
            # take its process groups with it.
            llm.llm_engine.engine_core.shutdown()
    finally:
        cleanup_dist_env_and_memory()


def scheduler_of(llm: LLM) -> Any:
    """The scheduler of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def prompts_of(vocab_size: int, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def as_inputs(prompts: list[list[int]]) -> list[Any]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def greedy_sampling(new_tokens: int = NEW_TOKENS, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, **options)


def greedy(llm: LLM, prompts: list[list[int]], new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """The tokens that an engine appends to every prompt."""
    outputs = llm.generate(as_inputs(prompts), greedy_sampling(new_tokens), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def greedy_of_generate(
    model: PreTrainedModel, prompts: list[list[int]], new_tokens: int = NEW_TOKENS
) -> list[list[int]]:
    """The tokens that `generate` appends, one prompt at a time."""
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None}
    inputs = [torch.tensor([prompt]) for prompt in prompts]
    outputs = [model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options) for ids in inputs]
    return [output[0, len(prompt) :].tolist() for prompt, output in zip(prompts, outputs)]


def prompt_log_probabilities(llm: LLM, prompts: list[list[int]]) -> torch.Tensor:
    """(tokens,) log-probability of every token of a prompt except the first, one prompt after another."""
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate(as_inputs(prompts), sampling, use_tqdm=False)
    return torch.tensor(
        [
            position[token].logprob
            for prompt, output in zip(prompts, outputs)
            for token, position in zip(prompt[1:], output.prompt_logprobs[1:])
        ]
    )


@torch.no_grad()
def log_probabilities_of_model(model: PreTrainedModel, prompts: list[list[int]]) -> torch.Tensor:
    """The same from the Transformers model, in its dtype."""
    inputs = [torch.tensor([prompt]) for prompt in prompts]
    return torch.cat([model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0] for ids in inputs])
