"""Engines in processes of their own, which share the groups of heads of a model."""

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
    with engine(sys.argv[1], tensor_parallel_size=2) as llm:
        print("tokens:", json.dumps(greedy(llm, json.loads(sys.argv[2]))))
"""


def test_groups_of_heads_are_shared_by_two_processes(tmp_path, monkeypatch):
    shape = {"compose_groups": 4, "num_key_value_heads": 2, "compose_static": True, "mlp_gate_dim": 4}
    model = tiny_model(**shape, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    prompts = prompts_of(model.config.vocab_size)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{root}:{root / 'tests'}")
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    command = [sys.executable, str(script), str(tmp_path), json.dumps(prompts)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stderr[-4000:]
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("tokens:"))
    assert json.loads(line.removeprefix("tokens:")) == greedy_of_generate(model, prompts)
