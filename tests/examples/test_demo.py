"""examples/demo.py answers questions and measures both bundled models."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from dcformer import pretrained_path


SCRIPT = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    def run(*arguments: str, **values) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
        namespace = runpy.run_path(str(SCRIPT))
        namespace["main"].__globals__.update(values)
        namespace["main"]()
        return capsys.readouterr().out

    return run


def test_it_answers_held_out_questions_and_compares_both_models(run):
    out = run(DOCUMENTS=9)
    right = re.findall(r"-> (.+?)   \(right: (.+)\)", out)
    assert len(right) == 6 and sum(answer == expected for answer, expected in right) >= 4
    shares = dict(re.findall(r"^(\w+-tiny): +([\d.]+) %", out, re.M))
    assert set(shares) == {"dcformer-tiny", "transformer-tiny"} and min(map(float, shares.values())) > 60


def test_a_model_of_ones_own_answers_ones_own_prompts(run):
    prompt = "There are Paris, Paris, Mumbai. Which is different? The city in"
    out = run(pretrained_path("dcformer-tiny"), prompt)
    assert f"{prompt}\n  -> India" in out and "Scored" not in out
