"""The benchmarks' own parts: the peer that computes as the authors do, the operands, the turns and the tables."""

import dataclasses
import itertools
import json
import math

import pytest
import torch
from reference import composed_attention_reference
from tiny_models import random_tokens, tiny_model

from benchmarks import attention, common, cpu_once, model, results
from dcformer.bench import authors, operands


CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny():
    return tiny_model("dcformer")


@pytest.mark.parametrize("prompt", [1, 5, 24], ids="prompt_{}".format)
@pytest.mark.parametrize("chunk", [None, 5], ids=["whole", "chunks"])
def test_the_authors_formulation_has_our_logits_before_and_after_the_window_is_full(tiny, chunk, prompt):
    token_ids = random_tokens(2, 24)
    decoder = authors.AuthorsDecoder(tiny, 24, chunk)
    cache = decoder.new_cache(batch=2)
    pieces = [token_ids[:, :prompt], *token_ids[:, prompt:].split(1, dim=1)]

    logits = torch.cat([decoder(piece, cache) for piece in pieces if piece.shape[1] > 0], dim=1)

    with torch.no_grad():
        torch.testing.assert_close(logits, tiny(token_ids).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", ["rank_1", "all_global", "tanh_gelu"])
def test_the_authors_formulation_follows_the_configuration(variant):
    other = tiny_model(variant)
    token_ids = random_tokens(1, 20)
    decoder = authors.AuthorsDecoder(other, 20)

    with torch.no_grad():
        torch.testing.assert_close(decoder(token_ids, decoder.new_cache()), other(token_ids).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", ["all_branches", "query_wise", "grouped", "no_qk_norm_with_biases"])
def test_the_authors_formulation_refuses_what_it_cannot_compute(variant):
    with pytest.raises(ValueError, match="authors' formulation needs"):
        authors.AuthorsDecoder(tiny_model(variant), 8)


def test_the_authors_formulation_says_what_its_cache_cannot_take(tiny):
    decoder = authors.AuthorsDecoder(tiny, 8)
    cache = decoder.new_cache()
    decoder(random_tokens(1, 7), cache)
    with pytest.raises(ValueError, match="Only single tokens"):
        decoder(random_tokens(1, 2), cache)
    decoder(random_tokens(1, 1), cache)
    with pytest.raises(ValueError, match="more than the cache's 8"):
        decoder(random_tokens(1, 1), cache)


@pytest.mark.parametrize("window", [None, 9], ids=["causal", "window"])
def test_the_forms_of_the_operator_that_are_compared_agree(window):
    of = operands.prompt_operands(4, 8, 40, CPU, torch.float32)
    expected = composed_attention_reference(*of[:5], sliding_window=window)
    mask = attention.visible(40, window, CPU)

    calls = attention.forward_calls(of, window)
    calls["authors, whole"] = lambda: authors.attend_pairs(*of.states, of.peer, mask, 8**-0.5)
    calls["authors, chunks"] = lambda: authors.attend_in_chunks(*of.states, of.peer, mask, 8**-0.5, window, chunk=16)

    plain = calls.pop("sdpa")()
    for call in calls.values():
        torch.testing.assert_close(call(), expected, atol=1e-5, rtol=0)
    assert (plain - expected).abs().max() > 0.1  # the factors compose strongly enough for the comparison to mean much


def test_gradients_of_all_operands_are_timed_and_agree():
    of = operands.prompt_operands(4, 8, 40, CPU, torch.float32)
    gradients = {name: call() for name, call in attention.training_calls(of).items()}

    assert len(gradients["composed"]) == 3 + 4
    for ours, theirs in zip(gradients["composed"][:3], gradients["authors"][:3]):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_the_step_reads_factors_from_rows_of_a_cache():
    of = operands.step_operands(4, 8, 40, CPU, torch.float32)

    key_factors = [of.pre.key.factors, of.post.key.factors]
    assert {factor.untyped_storage().data_ptr() for factor in key_factors} == {
        of.key.untyped_storage().data_ptr(),
        of.value.untyped_storage().data_ptr(),
    }
    expected = composed_attention_reference(*of[:5])
    torch.testing.assert_close(attention.step_calls(of)["composed"](), expected, atol=1e-5, rtol=0)


def test_turns_alternate_at_the_threads_asked_for_and_leave_them_as_they_were():
    before, seen = torch.get_num_threads(), []
    ticks = itertools.count()

    def case(name, threads):
        def call(prepared):
            seen.append((name, torch.get_num_threads(), prepared))

        return common.Case(call, prepare=lambda: next(ticks), threads=threads, calls=4)

    timings = common.interleave({"one": case("one", 1), "two": case("two", 2)}, repeats=3, device=CPU)

    assert torch.get_num_threads() == before
    assert [name for name, *_ in seen[-6:]] == ["one", "two"] * 3
    assert {(name, threads) for name, threads, _ in seen} == {("one", 1), ("two", 2)}
    assert len({prepared for *_, prepared in seen}) == len(seen)  # each call has preparations of its own
    assert timings["one"].minimum <= timings["one"].median


def test_decoding_starts_from_the_same_cache_in_every_turn(tiny):
    shape = model.Shape(heads=2, hidden=16, intermediate=16, layers=2, prompt=12, steps=3, window=4)
    models = model.make_models(shape, CPU, torch.float32)
    token_ids = model.random_tokens(shape, CPU)

    for kind in ("dynamic", "static"):
        cases = model.decode_cases(models, shape, token_ids, kind)
        assert set(cases) == {*models, model.AUTHORS}
        for case in cases.values():
            first, second = case.prepare(), case.prepare()
            case.call(first)
            assert _tokens_in(second) == shape.prompt
            assert _tokens_in(first) == shape.prompt + shape.steps


def _tokens_in(cache) -> int:
    return cache.length if isinstance(cache, authors.Cache) else int(cache.get_seq_length(1))


def test_graphs_are_counted_per_length_or_once_for_all():
    layer = _Doubling()
    assert cpu_once.count_graphs(layer, (3, 4, 5), dynamic=None) == (2, None)
    assert cpu_once.count_graphs(layer, (3, 4, 5), dynamic=True) == (1, None)


class _Doubling(torch.nn.Module):
    def forward(self, token_ids, use_cache):
        return token_ids * 2


ROW = results.Row("decode", "shape", "time / authors", 2, 1.2, 1.3, 1.1, target=1.0, bounds={"reading": 0.9})


def test_a_target_is_met_at_most_or_at_least():
    assert ROW.is_met is False
    assert dataclasses.replace(ROW, ratio=0.9).is_met is True
    assert dataclasses.replace(ROW, more_is_better=True).is_met is True
    assert dataclasses.replace(ROW, target=None).is_met is None


def test_results_survive_json_and_become_markdown():
    timing = common.Timing(0.001, 0.002, 0.0015, 0.0025)
    rates = {"flops": 2e11, "memory_bytes": 2e10, "cache_bytes": 1e11, "read_bytes": 1e10}
    without_median = results.Row("graphs", "ten", "graphs", 0, 2, math.nan, math.nan, target=2)
    findings = results.Findings(
        [results.Time("decode", "shape", "ours", 2, timing)], [ROW, without_median], {"float32": rates}
    )

    content = json.loads(json.dumps({"environment": {"torch": "2"}, **results.to_json(findings)}))
    text = results.to_markdown(content)

    assert "| decode: shape: time / authors | 2 | 1.20 | <= 1 | no | 0.90 reading | 1.30 | 1.10 |" in text
    assert "| graphs: ten: graphs |  | 2.00 | <= 2 | yes |  |  |  |" in text
    assert "| shape | ours | 2 | 1.00 | 2.00 | 1.50 |" in text
    assert "200 Gflop/s" in text
