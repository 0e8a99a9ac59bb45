"""One engine with the bundled model: windows crossed, prefixes shared, blocks freed, none lost under load."""

import random
import resource

import pytest
import torch
from tiny_models import ANSWERS
from transformers import AutoModelForCausalLM
from vllm_engines import as_inputs, engine, greedy, greedy_of_generate, greedy_sampling, prompts_of, scheduler_of

from dcformer.vllm.attention_backend import batches_of_similar_length


REQUESTS, BLOCKS = 120, 400


@pytest.fixture(scope="module")
def llm():
    options = {"max_num_seqs": 64, "max_num_batched_tokens": 256, "num_gpu_blocks_override": BLOCKS}
    with engine(ANSWERS, **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(ANSWERS, dtype=torch.float32)


def test_prompts_around_and_past_the_window_serve_as_generate(llm, model):
    prompts = prompts_of(model.config.vocab_size, (3, 30, 31, 32, 33, 100, 300))
    assert greedy(llm, prompts) == greedy_of_generate(model, prompts)


def test_a_common_prefix_is_computed_once(llm, model):
    prefix, *endings = prompts_of(model.config.vocab_size, (100, 5, 20, 40), seed=1)
    prompts = [prefix + ending for ending in endings]
    llm.generate(as_inputs([prefix]), greedy_sampling(1), use_tqdm=False)
    outputs = llm.generate(as_inputs(prompts), greedy_sampling(), use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [96, 96, 96]  # whole blocks of 16
    assert [list(output.outputs[0].token_ids) for output in outputs] == greedy_of_generate(model, prompts)


def test_blocks_behind_a_window_are_freed(llm):
    manager = scheduler_of(llm).kv_cache_manager
    llm.llm_engine.add_request("0", {"prompt_token_ids": [5] * 300}, greedy_sampling(20))
    for _ in range(10):
        llm.llm_engine.step()
    (request,) = scheduler_of(llm).requests
    held = [sum(not block.is_null for block in blocks) for blocks in manager.get_blocks(request).blocks]
    llm.llm_engine.abort_request([request])
    window_blocks, all_blocks = sorted(held)
    assert window_blocks <= 4  # a window of 32 and the tokens of a step, in blocks of 16
    assert all_blocks == 20


def test_many_requests_with_cancellations_lose_neither_tokens_nor_blocks(llm, model):
    chance = random.Random(0)
    lengths = [chance.randint(1, 120) for _ in range(REQUESTS)]
    prompts = prompts_of(model.config.vocab_size, lengths)
    new_tokens = [chance.randint(1, 16) for _ in prompts]
    cancelled_after = {i: chance.randint(1, 30) for i in chance.sample(range(REQUESTS), REQUESTS // 3)}  # steps
    pool = scheduler_of(llm).kv_cache_manager.block_pool
    peaks = []
    for _ in range(5):
        answers = _run(llm.llm_engine, prompts, new_tokens, cancelled_after)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # KiB
        assert pool.get_num_free_blocks() == BLOCKS - 1  # vLLM keeps one back
        assert not scheduler_of(llm).requests
    assert set(range(REQUESTS)) - set(cancelled_after) <= set(answers)
    for i, tokens in answers.items():
        assert tokens == greedy_of_generate(model, [prompts[i]], new_tokens[i])[0], f"request {i}"
    # Over three rounds, since a single jump of the allocator has been as large as the growth that one round may have.
    assert peaks[4] - peaks[1] < 3 * 8 * 1024, "memory grows from round to round"


def _run(llm_engine, prompts, new_tokens, cancelled_after):
    """The tokens of every request that was finished before it was cancelled, by its number."""
    names = [
        llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, greedy_sampling(new_tokens[i]))
        for i, prompt in enumerate(prompts)
    ]
    answers, step = {}, 0
    while llm_engine.has_unfinished_requests():
        step += 1
        for output in llm_engine.step():
            if output.finished:
                answers[int(output.request_id)] = list(output.outputs[0].token_ids)
        cancelled = [names[i] for i, last in cancelled_after.items() if last == step and i not in answers]
        llm_engine.abort_request(cancelled, internal=True)
    return answers


def test_sequences_are_padded_only_to_similar_ones():
    assert batches_of_similar_length([1] * 8, [100] * 8) == [list(range(8))]
    # A long prompt beside short continuations would make all of them as long.
    assert batches_of_similar_length([1, 1, 2000, 1], [500, 510, 2000, 505]) == [[2], [0, 1, 3]]
    assert batches_of_similar_length([1, 0, 1], [90_000, 70, 10]) == [[0], [2]]
