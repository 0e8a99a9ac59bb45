"""examples/demo.py from end to end, on random models in place of the bundled ones."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from tiny_models import tiny_model

from dcformer import pretrained
from dcformer.head_tasks import build_tokenizer


DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.fixture
def demo(tmp_path, monkeypatch):
    tokenizer = build_tokenizer()
    for name, variant in (("dcformer-tiny", "dcformer"), ("transformer-tiny", "plain_gated_transformer")):
        tiny_model(variant, vocab_size=len(tokenizer), max_position_embeddings=512).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    monkeypatch.setattr(pretrained, "_FOLDER", tmp_path)
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "DOCUMENTS", 4)
    monkeypatch.setattr(module, "NEW_TOKENS", 4)
    return module


def run(demo, monkeypatch, capsys, *arguments) -> str:
    monkeypatch.setattr(sys, "argv", ["demo.py", *map(str, arguments)])
    demo.main()
    return capsys.readouterr().out


def test_the_bundled_model_answers_and_is_compared_in_three_lines(demo, monkeypatch, capsys, tmp_path):
    out = run(demo, monkeypatch, capsys)
    assert "DCFormerForCausalLM" in out and out.count("  -> ") == 6 == out.count("(right: ")
    assert out.count(demo.ask_questions()[0][0]) == 2  # in the batch, and streamed
    composed, plain, last = out.split("What to look at:\n\n")[1].splitlines()
    results, plot = (tmp_path / re.search(rf"results/demo/\S+\.{ending}", last).group() for ending in ("json", "png"))
    assert plot.is_file()
    accuracies = {
        model["name"]: model["evaluation"]["held_out"]["accuracy"]
        for model in json.loads(results.read_text())["models"]
    }
    for line, name, what in (
        (composed, "dcformer-tiny", "heads composed"),
        (plain, "transformer-tiny", "plain attention"),
    ):
        right = f"{100 * accuracies[name]:.1f} % of 32 answers right (held-out tasks)"
        assert [part.strip() for part in line.split(":")] == [f"{name} ({what})", right]


def test_with_the_authors_texts(demo, monkeypatch, capsys, data_dir):
    out = run(demo, monkeypatch, capsys, "--data-dir", data_dir)
    assert out.count("answers right (held-out tasks), ") == 2 == out.count("answers right (authors' texts)")


def test_a_folder_and_prompts_of_ones_own(demo, monkeypatch, capsys, tmp_path):
    out = run(demo, monkeypatch, capsys, tmp_path / "transformer-tiny", "Ruth has", "Who likes Paris?")
    assert out.count("  -> ") == 2 and "Who likes Paris?" in out and "right:" not in out and "Guessing" not in out


def test_a_missing_folder_is_one_line(demo, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="There is no model folder 'nowhere/at/all'; give the path of a downloaded"):
        run(demo, monkeypatch, capsys, "nowhere/at/all")


def test_questions_are_held_out_and_have_one_line_or_more(demo):
    questions = demo.ask_questions()
    assert len(questions) == 6
    assert [prompt.count("\n") for prompt, _ in questions] == [lines - 1 for lines in demo.QUESTIONS.values()]
    assert all(answer and not prompt.endswith(" ") for prompt, answer in questions)
