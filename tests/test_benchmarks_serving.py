"""The benchmark of serving: what is asked for, what is compared, and that wrong tokens are never timed."""

import statistics

import pytest
import torch
from tiny_models import random_tokens, tiny_model

from benchmarks import serving
from benchmarks.serving_engines import GenerateEngine, Request, Settings, Step, Turn
from dcformer.bench import roofline


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(folder)
    return str(folder)


def engine(folder, rows):
    return GenerateEngine(Settings(folder, "float32", "cpu", 1, 3, 64, False, 0), rows)


REQUESTS = [Request(random_tokens(1, length, seed=length)[0].tolist(), length % 5 + 2) for length in (3, 9, 5, 12, 4)]


def test_lengths_are_ragged_have_the_means_asked_for_and_fit_the_model():
    requests = serving.draw_requests(4000, 50, 10**6, 1, (100.0, 300.0))
    assert statistics.mean(len(request.prompt) for request in requests) == pytest.approx(100, rel=0.06)
    assert statistics.mean(request.answer for request in requests) == pytest.approx(300, rel=0.06)
    assert statistics.median(request.answer for request in requests) < 0.75 * 300
    cut = serving.draw_requests(200, 50, 128, 1, (100.0, 300.0))
    assert all(len(request.prompt) + request.answer <= 128 and request.answer >= 2 for request in cut)
    assert cut == serving.draw_requests(200, 50, 128, 1, (100.0, 300.0))
    assert cut != serving.draw_requests(200, 50, 128, 2, (100.0, 300.0))


def test_padded_batches_write_what_single_prompts_get_and_each_row_ends_for_itself(folder):
    single, padded = engine(folder, 1), engine(folder, 3)
    prompts = [request.prompt for request in REQUESTS]
    assert padded.greedy(prompts, 6) == single.greedy(prompts, 6)
    assert [step.token for step in single.margins(prompts[:1], 6)[0]] == single.greedy(prompts[:1], 6)[0]

    turn = padded.serve(REQUESTS)

    assert turn.steps == sum(max(request.answer for request in REQUESTS[i : i + 3]) for i in (0, 3))
    assert single.serve(REQUESTS).steps == sum(request.answer for request in REQUESTS)


def test_a_client_sends_when_its_last_request_is_answered(folder):
    served = engine(folder, 1).serve(REQUESTS).served
    assert [times.sent for times in served] == [0.0, 0.0, 0.0, served[0].done, served[1].done]
    assert all(times.sent < times.first < times.done for times in served)


class OtherTokens:
    def __init__(self, tokens):
        self.tokens = tokens

    def call(self, method, prompts, new_tokens):
        return [self.tokens]


def test_an_engine_that_does_not_compose_is_not_timed(folder, tmp_path):
    prompts = [random_tokens(1, 20)[0].tolist()]
    expected = engine(folder, 1).margins(prompts, 8)
    plain = tiny_model("plain_gated_transformer")
    plain.load_state_dict(tiny_model().state_dict(), strict=False)
    plain.save_pretrained(tmp_path)
    without = engine(str(tmp_path), 1).greedy(prompts, 8)[0]

    serving.check_tokens("vLLM", OtherTokens([step.token for step in expected[0]]), expected, prompts, 1e-3)
    with pytest.raises(RuntimeError, match=r"vLLM writes token .* nothing was timed"):
        serving.check_tokens("vLLM", OtherTokens(without), expected, prompts, 1e-3)


@pytest.mark.parametrize(
    "tokens, margin, place",
    [([4, 5], 0.5, None), ([4, 6], 0.5, 1), ([4, 6], 1e-4, None), ([4, 7], 1e-4, 1), ([3, 5], 0.5, 0)],
    ids=["equal", "other", "tie", "no_tie_of_a_third", "first"],
)
def test_texts_may_part_only_where_two_tokens_are_equally_likely(tokens, margin, place):
    assert serving.first_difference([Step(4, 9, 0.5), Step(5, 6, margin)], tokens, 1e-3) == place


def test_bounds_count_products_or_weights_read_in_every_step():
    requests = [Request([1] * 10, 5), Request([1] * 20, 15)]
    slow_memory = roofline.Rates(flops=1e12, memory_bytes=1.0, cache_bytes=1.0, read_bytes=4e3)
    slow_products = slow_memory._replace(flops=1e3, read_bytes=1e12)
    steps = {"one by one": 20, "padded batches": 15, "vllm": 15}
    tokens = {"one by one": 50, "padded batches": 2 * 35, "vllm": 50}
    for kind in steps:
        assert serving.bound(kind, requests, 2, 1000, 4, slow_memory) == pytest.approx(steps[kind])
        assert serving.bound(kind, requests, 2, 1000, 4, slow_products) == pytest.approx(2 * tokens[kind])


def test_figures_are_of_the_quickest_turn():
    served = [(0.0, 1.0, 4.0), (0.0, 2.0, 3.0), (1.0, 1.5, 5.0)]
    turns = [Turn(served, 10.0, 3.0, 7), Turn(served, 5.0, 4.0, 6)]
    found = serving.summarize(turns, [Request([1], 10)] * 3, 2.0)
    assert (found.requests_per_second, found.tokens_per_second, found.steps) == (0.6, 6.0, 6)
    assert (found.first_token_median, found.first_token_95, found.answer_median) == (1.0, 2.0, 4.0)
    assert found.processor_per_1000_tokens == 100.0 and found.bound_tokens_per_second == 15.0


def test_the_models_that_are_compared_have_one_shape(tmp_path):
    args = serving.parse_arguments(
        ["--layers", "2", "--hidden", "32", "--heads", "2", "--intermediate", "48", "--vocabulary", "60"]
    )
    configs = serving.make_configs(args)
    counts = {name: serving.save_model(config, tmp_path / name, torch.float32) for name, config in configs.items()}
    norms = 2 * 2 * 16  # of queries and keys, which Llama has not
    assert counts[serving.PLAIN] == counts[serving.LLAMA] + norms
    assert configs[serving.DCFORMER].composes_heads and not configs[serving.PLAIN].composes_heads
