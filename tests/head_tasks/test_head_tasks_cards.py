"""Packing a sweep: weights, results and card say the same, and the command in the card gives its scores."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from dcformer.head_tasks import build_tokenizer
from dcformer.head_tasks.card_scores import BEGIN, END, with_scores
from dcformer.head_tasks.intervals import further_share_interval
from dcformer.head_tasks.suite import evaluate_head_tasks


SCRIPT = Path(__file__).parents[2] / "scripts" / "pack_pretrained.py"
NAMES = {"dcformer-tiny": "dcformer", "transformer-tiny": "plain_gated_transformer"}


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("pack_pretrained", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_card_has_the_scores_of_the_packed_weights(script, tmp_path, monkeypatch):
    tokenizer = build_tokenizer()
    sweep, folder, runs = tmp_path / "sweep", tmp_path / "box", []
    for name, variant in NAMES.items():
        model = tiny_model(variant, vocab_size=len(tokenizer), max_position_embeddings=512)
        final = sweep / name / "seed-3" / "final"
        model.save_pretrained(final)
        tokenizer.save_pretrained(final)
        (folder / name).mkdir(parents=True)
        marks = f"{BEGIN}\nold 99.9 %\n{END}" if name == "dcformer-tiny" else "See the other."
        (folder / name / "README.md").write_text(f"# {name}\n\n{marks}\n\nlast line\n")
        for seed, accuracy in ((3, 0.5), (4, 0.6)):
            evaluation = {"held_out": {"accuracy": accuracy, "answers": 48}, "authors": None}
            runs.append(
                {
                    "variant": name,
                    "seed": seed,
                    "parameters": 1,
                    "training": {"evaluation_loss": None},
                    "evaluation": evaluation,
                }
            )
    results = {"recipe": {"sweep": {"variants": {name: {} for name in NAMES}}}, "runs": runs, "failures": []}
    (sweep / "results.json").write_text(json.dumps(results))
    sets = script.document_sets(None, 6, with_authors=False)
    monkeypatch.setattr(script, "document_sets", lambda *_: sets)
    script.pack_sweep(sweep, 3, folder, documents=6)

    card = (folder / "dcformer-tiny" / "README.md").read_text()
    written = json.loads((folder / "seeds.json").read_text())
    assert written["runs"] == runs and written["packed"]["seed"] == 3
    assert "99.9" not in card and card.endswith("last line\n") and "## " not in card
    assert "| held-out tasks, none to seven examples | 55.0 % (0.0 to 100.0) | 55.0 % (0.0 to 100.0) |" in card
    low, high = (f"{100 * end:.1f} %" for end in further_share_interval([0.5, 0.6], 48))
    expected = f"between {low} and {high} for dcformer-tiny, between {low} and {high} for transformer-tiny (held-out"
    assert f"A single run with another seed is expected {expected} tasks" in card
    assert (
        folder / "transformer-tiny" / "README.md"
    ).read_text() == "# transformer-tiny\n\nSee the other.\n\nlast line\n"
    cells = r"([\d.]+) % \| ([\d.]+) % \| 3\d\.\d % \| [\d.]+ % \|"
    row = re.search(rf"\| held-out tasks, none to seven examples \| {cells}", card)
    for name, cell in zip(NAMES, row.groups()):
        packed = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()
        words = AutoTokenizer.from_pretrained(folder / name)
        found = evaluate_head_tasks(packed, words, documents=6, with_authors=False)["held_out"]
        assert written["packed"]["evaluation"][name]["held_out"] == found
        assert cell == f"{100 * found['accuracy']:.1f}"


def test_a_card_without_a_place_for_scores_is_refused():
    with pytest.raises(ValueError, match="The card does not say where its scores stand; put '<!-- scores"):
        with_scores("# card", "scores")
