"""`dcformer generate` answers by vLLM as by Transformers."""

import functools
import json
import shutil

import pytest
from typer.testing import CliRunner


pytest.importorskip("vllm", reason="vLLM needs a separate environment: make test-serving")

import vllm
from tiny_models import ANSWERS

from dcformer.cli import app


RECORDS = [
    {"id": "question", "prompt": "There are Paris, Paris, Mumbai. Which is different? The city in"},
    {"id": "ids", "prompt": [9, 7, 9, 20]},
    {"id": "long", "prompt": "Ruth likes Paris. " * 12},
]


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setattr(vllm, "LLM", functools.partial(vllm.LLM, enforce_eager=True))


def test_both_engines_print_the_same_text():
    arguments = ["generate", ANSWERS, RECORDS[0]["prompt"], "--max-new-tokens", "20", "--dtype", "float32", "--engine"]
    by_transformers, by_vllm = (CliRunner().invoke(app, [*arguments, name]) for name in ("transformers", "vllm"))
    assert by_vllm.exit_code == 0 and by_vllm.stdout == by_transformers.stdout == "India\n", by_vllm.output


def test_what_a_model_asks_for_is_obeyed_or_refused(tmp_path):
    model = shutil.copytree(ANSWERS, tmp_path / "model")
    config = json.loads((model / "generation_config.json").read_text())
    arguments = ["generate", str(model), RECORDS[2]["prompt"], "--dtype", "float32", "--engine"]
    (model / "generation_config.json").write_text(json.dumps({**config, "max_length": 70}))
    by_transformers, by_vllm = (CliRunner().invoke(app, [*arguments, name]) for name in ("transformers", "vllm"))
    assert by_vllm.stdout == by_transformers.stdout and by_vllm.exit_code == 0, by_vllm.output
    (model / "generation_config.json").write_text(json.dumps({**config, "no_repeat_ngram_size": 2}))
    refused = CliRunner().invoke(app, [*arguments, "vllm"])
    assert refused.exit_code == 1 and "no_repeat_ngram_size=2, which --engine vllm" in refused.output


@pytest.mark.parametrize("options", [(), ("--stop", "Paris")], ids=["whole", "stopped"])
def test_both_engines_write_the_same_file(tmp_path, options):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    for engine in ("transformers", "vllm"):
        arguments = ["generate", ANSWERS, "--prompts", str(prompts), "--engine", engine]
        arguments += ["--output", str(tmp_path / engine), "--max-new-tokens", "20", "--dtype", "float32", *options]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
    assert (tmp_path / "vllm").read_text() == (tmp_path / "transformers").read_text()
