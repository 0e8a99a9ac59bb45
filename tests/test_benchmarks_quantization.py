"""The benchmark of quantisation: what it compares is the same text, read in the same way."""

import json
from pathlib import Path

import pytest
import torch
from tiny_models import random_tokens, tiny_model
from transformers import AutoTokenizer, DynamicCache

from benchmarks import quantization, small_text_model
from dcformer import pretrained_path
from dcformer.head_tasks.suite import held_out_documents


ROOT = Path(__file__).parents[1]


def rows() -> list[quantization.Row]:
    tokens = [random_tokens(1, length, seed=length)[0].tolist() for length in (140, 9, 140, 2)]
    return [quantization.Row(row, [True] * len(row)) for row in tokens]


def test_losses_are_summed_by_row_and_read_through_a_cache_alike():
    model = tiny_model("all_global", max_position_embeddings=256).double()
    losses, counts = quantization.row_losses(model, rows())
    assert counts.tolist() == [139, 8, 139, 1]
    for row, loss, count in zip(rows(), losses, counts):
        tokens = torch.tensor([row.token_ids])
        torch.testing.assert_close(
            (loss / count).float(), model(tokens, labels=tokens).loss.detach(), atol=1e-5, rtol=0
        )
    cached, _ = quantization.row_losses(model, rows(), lambda: DynamicCache(config=model.config))
    torch.testing.assert_close(cached, losses, atol=1e-4, rtol=0)  # float32 in the loss


def test_a_change_is_weighted_by_tokens_with_the_interval_of_its_rows():
    counts = torch.tensor([10.0, 30.0]).double()
    found = quantization.compare(torch.tensor([12.0, 33.0]).double(), torch.tensor([10.0, 30.0]).double(), counts)
    assert found.loss == pytest.approx(45 / 40)
    assert found.change == pytest.approx(5 / 40)
    assert found.interval > 0
    same = quantization.compare(counts, counts, counts)
    assert (same.change, same.interval) == (0, 0)


def test_windows_are_whole_and_a_short_text_is_refused():
    found = quantization.text_rows(list(range(10)), 4, 5)
    assert [row.token_ids for row in found] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert all(all(row.counts) for row in found)
    with pytest.raises(ValueError, match="The text has 3 tokens"):
        quantization.text_rows([1, 2, 3], 4, 5)


def test_of_head_tasks_the_answers_count(monkeypatch):
    monkeypatch.setattr(quantization, "_DOCUMENTS", 3)
    folder = pretrained_path("dcformer-tiny")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for row, document in zip(quantization.head_task_rows(folder), held_out_documents(3), strict=True):
        words = [token for token, counts in zip(row.token_ids, row.counts) if counts]
        answers = [document["text"][start:end] for start, end in document["answers"]]
        assert tokenizer.decode(words).split() == " ".join(answers).split()


def test_layers_that_a_method_cannot_group_are_named():
    model = tiny_model(hidden_size=64, intermediate_size=160)
    assert quantization.uneven_layers(model, "bitsandbytes nf4") == ["down_proj"]
    assert quantization.uneven_layers(model, "torchao int4, groups of 32") == []


def test_a_method_is_measured_against_float32(tmp_path, monkeypatch):
    monkeypatch.setattr(quantization, "WEIGHTS", {"quanto int4": quantization.WEIGHTS["quanto int4"]})
    tiny_model("all_global", hidden_size=128, head_dim=16, max_position_embeddings=256).save_pretrained(tmp_path)
    found = quantization.measure(tmp_path, rows()[::2], torch.device("cpu"))
    assert list(found) == ["float32", *quantization.CACHES, "bfloat16", "quanto int4"]
    assert found["float32"].change == 0
    assert all(found[name].change != 0 for name in found if name != "float32")


def test_training_of_the_small_models_repeats_itself(monkeypatch):
    monkeypatch.setattr(small_text_model, "_SHAPE", {**small_text_model._SHAPE, "hidden_size": 32})
    monkeypatch.setattr(small_text_model, "_LENGTH", 32)
    text = bytes(range(256)) * 4
    first, second = (small_text_model.train(text, {}, steps=2).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(ValueError, match="has 5 bytes"):
        small_text_model.train(b"short", {})


def test_the_page_shows_the_recorded_figures():
    """And what it says of them: 8 bits cost nothing, 4 bits little, and a cache by channels as without composition."""
    recorded = json.loads((ROOT / "benchmarks" / "results" / "quantization.json").read_text(encoding="utf-8"))[
        "figures"
    ]
    page = (ROOT / "docs" / "quantization.md").read_text(encoding="utf-8")
    composed, plain = recorded["DCFormer++"], recorded["Transformer++"]
    for method in composed:
        cells = []
        for row in (composed[method], plain[method]):
            base = composed if row is composed[method] else plain
            percent = round(100 * (row["perplexity"] / base["float32"]["perplexity"] - 1), 1) + 0.0  # no minus zero
            cells += [f"{row['change']:+.4f} ± {row['interval']:.4f}", f"{percent:+.1f} %"]
        if method == "float32":
            assert f"perplexity is {composed[method]['perplexity']:.2f} with composition and" in page
            assert f"{plain[method]['perplexity']:.2f}\nwithout" in page
        else:
            assert f"| {method} | {' | '.join(cells)} |" in page
    for row in (*composed.items(), *plain.items()):
        if "int8" in row[0]:
            assert abs(row[1]["change"]) < 0.001
        elif "int4" in row[0] or "nf4" in row[0]:
            assert abs(row[1]["change"]) < 0.006
    rows, channels = (f"cache of 2 bits, groups in {place}" for place in ("rows", "channels"))
    assert composed[channels]["change"] < 1.2 * plain[rows]["change"] < 0.2 * composed[rows]["change"]


def test_the_page_says_what_was_recorded_of_the_bundled_models():
    file = ROOT / "benchmarks" / "results" / "quantization_bundled.json"
    page = " ".join((ROOT / "docs" / "quantization.md").read_text(encoding="utf-8").split())
    recorded = json.loads(file.read_text(encoding="utf-8"))["figures"]
    raised: dict[int, list[float]] = {4: [], 8: []}
    for methods in recorded.values():
        for method, row in methods.items():
            own = 100 * (row["perplexity"] / methods["float32"]["perplexity"] - 1)
            if "int8" in method:
                raised[8].append(own)
            elif "int4" in method or "nf4" in method:
                raised[4].append(own)
    whole = [f"{recorded[name]['float32']['perplexity']:.2f}" for name in ("dcformer-tiny", "transformer-tiny")]
    assert f"by {min(raised[4]):.1f} to {max(raised[4]):.1f} %, from {' and '.join(whole)}; 8 bits by" in page
    assert f"8 bits by {max(map(abs, raised[8])):.1f} % at most" in page
