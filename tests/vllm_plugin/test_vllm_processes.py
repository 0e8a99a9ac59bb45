"""Engines in processes of their own, and models that several processes share."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import tiny_model


pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-serving")

from vllm_engines import greedy_of_generate, prompts_of


_SCRIPT = """
import json, sys

if __name__ == "__main__":
    from vllm_engines import engine, greedy
    folder, prompts, options = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    with engine(folder, **options) as llm:
        print("tokens:", json.dumps(greedy(llm, prompts)))
"""


def tokens_of_processes(tmp_path, monkeypatch, prompts, **options):
    """
    Greedy tokens of an engine that is started as vLLM does by default, from the model in `tmp_path`, and what it has
    logged.
    """
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{root}:{root / 'tests'}")
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    command = [sys.executable, str(script), str(tmp_path), json.dumps(prompts), json.dumps(options)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stderr[-4000:]
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("tokens:"))
    return json.loads(line.removeprefix("tokens:")), result.stdout + result.stderr


def test_an_engine_in_its_own_process_finds_the_plugin(tmp_path, monkeypatch):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    prompts = prompts_of(model.config.vocab_size)
    tokens, log = tokens_of_processes(tmp_path, monkeypatch, prompts)
    assert tokens == greedy_of_generate(model, prompts)
    assert "composed by torch operators on rows gathered from the paged cache" in log
    assert "all else is computed eagerly." in log


@pytest.mark.parametrize(
    "overrides",
    [
        {"compose_groups": 2, "compose_static": True, "mlp_gate_dim": 4, "tie_word_embeddings": True},
        {"model_type": "dcpythia", "compose_groups": 4, "num_key_value_heads": 2},
    ],
    ids=lambda overrides: "-".join(overrides),
)
def test_groups_of_heads_are_shared_by_two_processes(overrides, tmp_path, monkeypatch):
    model = tiny_model(**overrides)
    model.save_pretrained(tmp_path)
    prompts = prompts_of(model.config.vocab_size)
    shared, _ = tokens_of_processes(tmp_path, monkeypatch, prompts, tensor_parallel_size=2)
    assert shared == greedy_of_generate(model, prompts)
