"""What the benchmarks compute: the decoder that computes as the authors do, cases, ratios and bounds."""

import json
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from reference import composed_attention_reference
from tiny_models import random_tokens, tiny_model
from transformers import DynamicCache

from benchmarks import cpu, quantization, serving
from benchmarks.authors_decoder import AuthorsDecoder
from dcformer.bench import operands, roofline


CPU = torch.device("cpu")
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("variant, prompt", [("dcformer", 1), ("rank_1", 5), ("all_global", 24), ("dcformer", 24)])
def test_the_authors_decoder_has_our_logits_before_and_after_the_window_is_full(variant, prompt):
    model, token_ids = tiny_model(variant), random_tokens(2, 24)
    decoder = AuthorsDecoder(model, 24)
    cache = decoder.new_cache(batch=2)
    pieces = [token_ids[:, :prompt], *token_ids[:, prompt:].split(1, dim=1)]
    logits = torch.cat([decoder(piece, cache) for piece in pieces if piece.shape[1] > 0], dim=1)
    with torch.no_grad():
        torch.testing.assert_close(logits, model(token_ids).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("window", [None, 9], ids=["causal", "window"])
def test_what_is_compared_composes_alike_and_sdpa_does_not(window):
    of = operands.prompt_operands(4, 8, 140, CPU, torch.float32)  # more than a chunk of the authors' formulation
    expected = composed_attention_reference(*of[:5], sliding_window=window)
    outputs = {name: entry.make(of, window, None)() for name, entry in cpu.composing_and_plain(window).items()}
    for name in ("composed", "authors"):
        torch.testing.assert_close(outputs[name], expected, atol=1e-5, rtol=0)
    assert (outputs["sdpa"] - expected).abs().max() > 0.1  # the factors compose strongly enough to tell


def test_a_row_has_our_time_as_a_multiple_of_its_time_beside_bound_and_target(monkeypatch, tmp_path, capsys):
    def section(run, threads):
        cases = {name: partial(time.sleep, seconds) for name, seconds in (("ours", 0.03), ("plain", 0.01))}
        added = lambda rates: {"reading": 0.01 * rates.flops}  # noqa: E731
        cpu.compare(run, threads, "decode", cases, ours="ours", plain="plain", added=added, targets={"plain": 1.2})

    monkeypatch.setattr(roofline, "rate_probes", lambda *_: {"a probe": lambda: None})
    monkeypatch.setattr(
        roofline, "measured_rates", lambda seconds, _: roofline.Rates(float("a probe" in seconds), 1, 1)
    )
    monkeypatch.setattr(cpu, "SECTIONS", {"decode": section})
    file = tmp_path / "cpu.json"
    cpu.main(["--quick", "--seconds", "0.01", "--threads", "1", "--json", str(file)])
    measured = capsys.readouterr().out
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows["plain"]["group"] == "decode, 1 threads" and rows["plain"]["timing"]["minimum"] >= 0.01
    assert rows["plain"]["figures"]["ours / this"] == pytest.approx(3, rel=0.2)
    assert rows["plain"]["figures"]["bound reading"] == pytest.approx(2, rel=0.2)
    assert not rows["ours"]["figures"] and not rows["a probe"]["figures"]
    cpu.main(["--show", str(file)])
    assert capsys.readouterr().out == measured and "0 of 1 targets are reached." in measured
    cpu.main(["--show", str(ROOT / "benchmarks" / "results" / "cpu.json")])
    assert "18 of 30 targets are reached." in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_decoding_case_starts_after_the_prompt_every_time(kind, monkeypatch):
    monkeypatch.setattr(cpu, "PROMPT", 12)
    monkeypatch.setattr(cpu, "STEPS", 3)
    monkeypatch.setattr(cpu, "VOCABULARY", 50)
    case = cpu.decode_case(tiny_model("dcformer"), kind)
    first, second = case.prepare(), case.prepare()
    case.call(first)
    assert [int(cache.get_seq_length(1)) for cache in (first, second)] == [15, 12]


TOKENS = [random_tokens(1, length, seed=length)[0].tolist() for length in (140, 9, 140, 2)]
ROWS = [quantization.Row(row, [True] * len(row)) for row in TOKENS]


def test_losses_are_summed_by_row_and_read_through_a_cache_alike():
    model = tiny_model("all_global", max_position_embeddings=256).double()
    losses, counts = quantization.row_losses(model, ROWS)
    assert counts.tolist() == [139, 8, 139, 1]
    for row, loss, count in zip(ROWS, losses, counts):
        tokens = torch.tensor([row.token_ids])
        expected = model(tokens, labels=tokens).loss.detach()
        torch.testing.assert_close((loss / count).float(), expected, atol=1e-5, rtol=0)
    cached, _ = quantization.row_losses(model, ROWS, lambda: DynamicCache(config=model.config))
    torch.testing.assert_close(cached, losses, atol=1e-4, rtol=0)  # float32 in the loss


def test_a_change_is_weighted_by_tokens_with_the_interval_of_its_rows():
    counts = torch.tensor([10.0, 30.0]).double()
    change = quantization.compare(torch.tensor([12.0, 33.0]).double(), torch.tensor([10.0, 30.0]).double(), counts)
    assert change.loss == pytest.approx(45 / 40) and change.change == pytest.approx(5 / 40)
    # Rows of 1/4 and 3/4 of the tokens, 0.2 and 0.1 above, are 0.075 and 0.025 from the mean.
    assert change.interval == pytest.approx(1.96 * 0.01875 * 2**0.5)


def test_a_method_is_measured_against_float32(tmp_path, monkeypatch):
    method = "torchao int8, weights"
    monkeypatch.setattr(quantization, "WEIGHTS", {method: quantization.WEIGHTS[method]})
    tiny_model("dcformer", max_position_embeddings=256).save_pretrained(tmp_path)  # of windows: no cache is quantised
    float32, *others = (results := quantization.measure(tmp_path, ROWS[::2], CPU)).values()
    assert list(results) == ["float32", "bfloat16", method]
    assert float32.change == 0 and all(result.change != 0 for result in others)


def test_the_page_shows_the_recorded_figures_of_quantisation():
    file = ROOT / "benchmarks" / "results" / "quantization.json"
    recorded = json.loads(file.read_text(encoding="utf-8"))["figures"]
    page = (ROOT / "docs" / "quantization.md").read_text(encoding="utf-8")
    for method in recorded["DCFormer++"].keys() - {"float32"}:
        rows = [recorded[model][method] for model in ("DCFormer++", "Transformer++")]
        cells = [f"{row['change']:+.4f} ± {row['interval']:.4f}" for row in rows]
        assert f"| {method} | {' | '.join(cells)} |" in page


REQUESTS = [serving.Request(random_tokens(1, length, seed=length)[0].tolist(), length % 5 + 2) for length in (3, 9, 5)]


def test_padded_batches_write_what_single_prompts_get_and_other_tokens_are_not_timed(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    args = serving.parse_arguments(["--threads", "1", "--concurrency", "3"])
    single, padded = (
        serving.make_engine(kind, str(tmp_path), args)(REQUESTS) for kind in (serving.ONE_BY_ONE, serving.PADDED)
    )
    assert padded == single and [len(answer) for answer in single] == [request.answer for request in REQUESTS]
    expected = serving.greedy_steps(str(tmp_path), [REQUESTS[0].prompt], args)
    assert [step.token for step in expected[0]][: REQUESTS[0].answer] == single[0]
    serving.check_tokens("vLLM", [[step.token for step in expected[0]]], expected, 1e-3)
    with pytest.raises(RuntimeError, match="nothing was timed"):
        serving.check_tokens("vLLM", [[step.second for step in expected[0]]], expected, 0.0)


def test_texts_may_part_only_where_two_tokens_are_equally_likely():
    for tokens, margin, position in ([4, 5], 0.5, None), ([4, 6], 0.5, 1), ([4, 6], 1e-4, None), ([4, 7], 1e-4, 1):
        steps = [serving.Step(4, 9, 0.5), serving.Step(5, 6, margin)]
        assert serving.first_difference(steps, tokens, 1e-3) == position
