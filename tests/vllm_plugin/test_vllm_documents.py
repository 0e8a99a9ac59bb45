"""docs/serving.md: its example for vLLM runs and prints what the page says."""

import re
from pathlib import Path

import pytest


pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-serving")


def test_the_example_of_vllm_prints_what_the_page_says(capsys):
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    code, expected = re.search(r"^```python vllm\n(.*?)^```\s+^```text vllm\n(.*?)^```", page, re.S | re.M).groups()
    namespace = {}
    exec(compile(code, "serving.md", "exec"), namespace)
    namespace["llm"].llm_engine.engine_core.shutdown()
    assert capsys.readouterr().out.endswith(expected)
