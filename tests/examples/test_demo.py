"""examples/demo.py lets both bundled models write, and compares them on text that neither has read."""

import re
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
from tiny_models import ANSWERS


SCRIPT = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    def run(*arguments: str, **values) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("COLUMNS", "140")
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
        namespace = runpy.run_path(str(SCRIPT))
        namespace["main"].__globals__.update(values)
        namespace["main"]()
        return capsys.readouterr().out

    return run


def test_both_models_write_and_are_compared(run, tmp_path):
    """On one of the headers; the text of all takes minutes of a busy core."""
    shutil.copy(Path(numpy.get_include(), "numpy", "ndarrayobject.h"), tmp_path)
    out = run(MAX_NEW_TOKENS=5, numpy=SimpleNamespace(get_include=lambda: tmp_path))
    for words in ("Transformer++, no composition", "DCFormer++, composed heads"):
        assert out.count(words) == 2
    rows = re.findall(r"(\w+-tiny) .*? (\d\.\d{3}) .*? ([\d.]+) %", out)
    assert [name for name, *_ in rows] == ["transformer-tiny", "dcformer-tiny"]
    gain = float(rows[0][1]) - float(rows[1][1])
    assert gain > 0 and float(rows[0][1]) < 4.5
    assert float(re.search(r"the loss is (\S+) nats", out)[1]) == pytest.approx(gain, abs=2e-3)


def test_a_model_of_ones_own_continues_ones_own_prompts(run):
    prompt = "There are Paris, Paris, Mumbai. Which is different? The city in"
    out = run(ANSWERS, prompt)
    assert prompt in out and "\nIndia\n" in out.replace(" \n", "\n") and "parameters" not in out
