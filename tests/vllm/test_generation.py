"""Greedy tokens and log-probabilities of vLLM are those of `generate`, whatever the configuration and the schedule."""

import pytest
import torch
from tiny_models import VARIANTS, tiny_model


pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-serving")

from vllm_engines import (
    engine,
    greedy,
    greedy_of_generate,
    log_probabilities_of_model,
    prompt_log_probabilities,
    prompts_of,
)


# float32 sums in another order: 1e-4 is what serving promises, and what was seen is 2e-6.
TOLERANCE = 1e-4
# vLLM's own attention, which models without composition run through, takes heads of these sizes only on CPUs.
HEADS_OF_32 = {"hidden_size": 128, "head_dim": 32}


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_and_prompt_log_probabilities_are_those_of_generate(variant, tmp_path):
    composes = "plain" not in variant
    model = tiny_model(variant, **({} if composes else HEADS_OF_32))
    model.save_pretrained(tmp_path)
    prompts = prompts_of(model.config.vocab_size)
    # Prompts in pieces of 16 tokens beside sequences that are being continued.
    with engine(tmp_path, max_num_batched_tokens=16, max_num_seqs=4) as llm:
        assert greedy(llm, prompts) == greedy_of_generate(model, prompts)
        torch.testing.assert_close(
            prompt_log_probabilities(llm, prompts),
            log_probabilities_of_model(model, prompts),
            atol=TOLERANCE,
            rtol=0,
        )
