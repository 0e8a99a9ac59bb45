"""`dcformer analyse`: the page, its pictures and its tables."""

import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from unittest.mock import Mock, call

import command_line
import pandas
import pytest
from tiny_models import ANSWERS, tiny_model

from dcformer.analysis import analyse
from dcformer.loading import load_model


PROMPT = "There are Paris, Paris, Mumbai. Which is different? The city in"


@pytest.mark.parametrize("composes", [True, False], ids=["dcformer", "transformer"])
def test_the_command_writes_a_page_with_pictures_and_tables(composes, tmp_path, monkeypatch):
    model, drawn = ANSWERS if composes else Path(ANSWERS).with_name("transformer"), set()
    if not composes:  # drawing takes long
        monkeypatch.setattr("dcformer.analysis.analysis_page._drawn", lambda _, name, *drawing: drawn.add(name) or "")
    folder = tmp_path / "created"
    options = ["--text", "Paris, Mumbai <b>", "--layer", "-1", "--output", str(folder)]
    done = command_line.call("analyse", model, *options, catch_exceptions=False)
    assert done.stdout.strip() == str(folder / "report.html")
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "<b>" not in page and "<|unknown|>" not in page and re.findall(r"(?:src|href)=.https?:|<script", page) == []
    drawings = [ElementTree.fromstring(drawing) for drawing in re.findall("<svg.*?</svg>", page)]
    assert len(drawings) == (1 + 2 + 4 * 2 if composes else 4)
    assert any("Mumbai / Paris: 0." in (title.text or "") for title in drawings[-1].iter("title"))
    names = {"attention_layer3", "diversity", *(["shares", "lending", "lending_graph"] if composes else [])}
    for ending in ("png", "svg"):
        assert drawn | {path.stem for path in folder.glob(f"*.{ending}")} == names
    if composes:
        assert set(pandas.read_csv(folder / "what_matters.csv").layer) == {0, 1, 2, 3}


def test_a_file_is_read_in_windows_and_nothing_or_both_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("dcformer.analysis.analysis_page._drawn", lambda *_: "")  # the test above looks at the pictures
    load, write = Mock(side_effect=load_model), Mock(side_effect=analyse)
    monkeypatch.setattr("dcformer.loading.load_model", load)
    monkeypatch.setattr("dcformer.analysis.analyse", write)
    (tmp_path / "text.txt").write_text(f"\ufeff{PROMPT * 40}", encoding="utf-8")
    ids = load_model(ANSWERS).tokenizer(PROMPT * 40)["input_ids"]
    read = {"dtype": "float32", "device": "cpu", "tokenizer": f"{ANSWERS}/"}
    options = [f"--{name}={value}" for name, value in read.items()]
    options += ["--data", str(tmp_path / "text.txt"), "--layer", "1", "--layer", "0", "--output", str(tmp_path)]
    for length, windows, texts in (
        (20, 2, [ids[:20], ids[20:40]]),
        (33, 99, [ids[n : n + 33] for n in range(0, 561, 33)]),
        (2048, 4, [ids[:512], ids[512:]]),
    ):
        given = ["analyse", f"{ANSWERS}/", *options, "--length", str(length), "--windows", str(windows)]
        command_line.call(*given, catch_exceptions=False)
        assert write.call_args.args[1:3] == (texts, tmp_path)
        write.side_effect = None
    assert load.call_args == call(f"{ANSWERS}/", attn_implementation="eager", **read, revision=None)
    assert (write.call_args.kwargs["name"], write.call_args.kwargs["layers"]) == ("dcformer", [1, 0])
    assert ", 40 tokens" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert pandas.read_csv(tmp_path / "what_matters.csv").standard_error.gt(0).all()
    for words in ([], ["--text", "x", *options]):
        assert command_line.call("analyse", ANSWERS, *words).exit_code == 2
    ended = command_line.call("analyse", "dcformer-tiny", "--text", "int", "--output", tmp_path)
    assert ended.exit_code == 1 and "fewer than two tokens" in ended.stderr


def test_weights_that_are_not_finite_are_refused(tmp_path):
    model = tiny_model()
    model.lm_head.weight.data[0, 1] = math.inf
    with pytest.raises(ValueError, match="the weights hold NaN or infinity"):
        analyse(model, [[1, 2, 3]], tmp_path, None)
