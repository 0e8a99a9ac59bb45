"""Factors ride in vLLM's blocks: as many bytes as in ours, freed behind a window, none lost under load."""

import random
import resource

import pytest
import torch
from tiny_models import tiny_config, tiny_model

from dcformer import cache_bytes_per_token, pretrained_path


pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-serving")

from transformers import AutoModelForCausalLM
from vllm_engines import engine, greedy_of_generate, greedy_sampling, prompts_of, scheduler_of

from dcformer.vllm.backend import batches_of_similar_length


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "variant", ["dcformer", "grouped_query_attention", "query_wise", "rank_4", "pre_only", "wide_heads"]
)
def test_a_token_takes_the_bytes_that_it_takes_in_transformers(variant, dtype, tmp_path):
    tiny_model(variant).to(dtype).save_pretrained(tmp_path)
    with engine(tmp_path, dtype=dtype) as llm:
        groups = scheduler_of(llm).kv_cache_config.kv_cache_groups
    per_token = {group.kv_cache_spec.page_size_bytes / group.kv_cache_spec.block_size for group in groups}
    assert per_token == {cache_bytes_per_token(tiny_config(variant), dtype)}


def test_blocks_behind_a_window_are_freed():
    with engine(pretrained_path("dcformer-tiny")) as llm:
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


def test_many_requests_with_cancellations_lose_neither_tokens_nor_blocks():
    folder = pretrained_path("dcformer-tiny")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chance = random.Random(0)
    lengths = [chance.randint(1, 120) for _ in range(200)]
    prompts = prompts_of(model.config.vocab_size, lengths)
    new_tokens = [chance.randint(1, 24) for _ in prompts]
    cancelled_after = {i: chance.randint(1, 40) for i in chance.sample(range(200), 70)}  # steps
    with engine(folder, max_num_seqs=64, max_num_batched_tokens=256, num_gpu_blocks_override=400) as llm:
        pool = scheduler_of(llm).kv_cache_manager.block_pool
        free_blocks, peaks = pool.get_num_free_blocks(), []
        for _ in range(3):
            answers = _run(llm.llm_engine, prompts, new_tokens, cancelled_after)
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # KiB
            assert pool.get_num_free_blocks() == free_blocks
            assert not scheduler_of(llm).requests
    finished = [i for i in range(200) if i not in cancelled_after]
    assert set(finished) <= set(answers)
    for i, tokens in answers.items():
        assert tokens == greedy_of_generate(model, [prompts[i]], new_tokens[i])[0], f"request {i}"
    assert peaks[2] - peaks[1] < 8 * 1024, "memory grows from round to round"


def _run(llm_engine, prompts, new_tokens, cancelled_after):
    """The tokens of every request that was finished before it was cancelled, by its number."""
    names = {}
    for i, prompt in enumerate(prompts):
        names[llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, greedy_sampling(new_tokens[i]))] = i
    by_number = {i: name for name, i in names.items()}
    answers, step = {}, 0
    while llm_engine.has_unfinished_requests():
        step += 1
        for output in llm_engine.step():
            if output.finished:
                answers[int(output.request_id)] = list(output.outputs[0].token_ids)
        llm_engine.abort_request(
            [by_number[i] for i, last in cancelled_after.items() if last == step and i not in answers], internal=True
        )
    return answers


def test_sequences_are_padded_only_to_similar_ones():
    assert batches_of_similar_length([1] * 8, [100] * 8) == [list(range(8))]
    # A long prompt beside short continuations would make each of them as long.
    assert batches_of_similar_length([1, 1, 2000, 1], [500, 510, 2000, 505]) == [[2], [0, 1, 3]]
    assert batches_of_similar_length([1, 0, 1], [20_000, 70, 10]) == [[0, 2]]
    assert batches_of_similar_length([1, 0, 1], [90_000, 70, 10]) == [[0], [2]]
    assert batches_of_similar_length([0, 0], [5, 5]) == []
