"""examples/demo.py: questions, their answers, and both bundled models on the same documents."""

import importlib.util
import sys
from pathlib import Path

import pytest

import dcformer
from dcformer.eval import evaluate


@pytest.fixture
def demo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("demo", Path(__file__).parents[2] / "examples" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "DOCUMENTS", 4)
    return module


def run(demo, monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["demo.py", *map(str, arguments)])
    demo.main()
    return capsys.readouterr().out


def test_the_bundled_model_answers_and_is_compared(demo, monkeypatch, capsys):
    out = run(demo, monkeypatch, capsys)
    assert out.count("  -> ") == 6 == out.count("(right: ")
    records = {record.model: record for record in evaluate(suite="head_tasks", limit=4, output="results/demo")}
    assert len(records) == 2
    for name, record in records.items():
        assert f"{100 * record.metrics['acc']['value']:.1f} % of answers right" in out.split(f"{name}:")[1]


def test_a_folder_and_prompts_of_ones_own(demo, monkeypatch, capsys):
    out = run(demo, monkeypatch, capsys, dcformer.pretrained_path("transformer-tiny"), "Ruth has", "Who likes Paris?")
    assert out.count("  -> ") == 2 and "Who likes Paris?" in out and "right" not in out
