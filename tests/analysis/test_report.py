"""`dcformer analyse`: the page, its pictures and its tables."""

import re
import xml.etree.ElementTree as ElementTree

import pandas
import pytest
from tiny_models import ANSWERS
from typer.testing import CliRunner

from dcformer.cli import app


PROMPT = "There are Paris, Paris, Mumbai. Which is different? The city in"


@pytest.mark.parametrize("composes", [True, False], ids=["dcformer", "transformer"])
def test_the_command_writes_a_page_with_pictures_and_tables(composes, tmp_path):
    model = ANSWERS if composes else ANSWERS.replace("dcformer", "transformer")
    folder = tmp_path / "created"
    options = ["--text", PROMPT + " <b>", "--layer", "-1", "--output", str(folder)]
    done = CliRunner().invoke(app, ["analyse", model, *options], catch_exceptions=False)
    assert done.stdout.strip() == str(folder / "report.html")
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "<b>" not in page and re.findall(r"(?:src|href)=.https?:|<script", page) == []
    drawings = [ElementTree.fromstring(drawing) for drawing in re.findall("<svg.*?</svg>", page)]
    assert len(drawings) == (1 + 2 + 4 * 2 if composes else 4)
    assert any("Mumbai / Paris: 0." in (title.text or "") for title in drawings[-1].iter("title"))
    names = {"attention_layer3", "diversity", *(["shares", "lending", "lending_graph"] if composes else [])}
    for ending in ("png", "svg"):
        assert {path.stem for path in folder.glob(f"*.{ending}")} == names
    if composes:
        assert set(pandas.read_csv(folder / "what_matters.csv").layer) == {0, 1, 2, 3}


def test_a_file_is_read_in_windows_and_nothing_or_both_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("dcformer.analysis.report._drawn", lambda *_: "")  # the test above looks at the pictures
    (tmp_path / "text.txt").write_text(PROMPT * 3)
    options = ["--data", str(tmp_path / "text.txt"), "--length", "20", "--windows", "2", "--output", str(tmp_path)]
    CliRunner().invoke(app, ["analyse", ANSWERS, *options], catch_exceptions=False)
    assert ", 40 tokens" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert pandas.read_csv(tmp_path / "what_matters.csv").standard_error.gt(0).all()
    assert CliRunner().invoke(app, ["analyse", ANSWERS]).exit_code == 2
