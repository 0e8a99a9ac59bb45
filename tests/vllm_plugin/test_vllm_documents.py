"""docs/serving.md: its examples for vLLM and for a server run and print what the page says."""

import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest


pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-serving")

import dcformer


# One process has the engine that these tests share.
pytestmark = pytest.mark.xdist_group("documents")

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.S | re.M)


@pytest.fixture(scope="module")
def port():
    """Of a server with the bundled model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    model = dcformer.pretrained_path("dcformer-tiny")
    options = ["--model", model, "--port", str(number), "--enforce-eager", "--dtype", "float32"]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while True:
        assert process.poll() is None and time.monotonic() < deadline
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{number}/health", timeout=5):
                break
        except OSError:
            time.sleep(0.5)
    yield number
    process.terminate()
    process.wait(timeout=60)


def test_the_example_of_vllm_prints_what_the_page_says(capsys):
    (code,), (expected,) = blocks("python vllm"), blocks("text vllm")
    namespace = {}
    exec(compile(code, "serving.md", "exec"), namespace)
    namespace["llm"].llm_engine.engine_core.shutdown()
    assert capsys.readouterr().out.endswith(expected)


def test_the_client_of_the_page_is_answered(port, capsys):
    (code,) = blocks("python server")
    assert code.count("127.0.0.1:8000") == 1
    exec(compile(code.replace(":8000", f":{port}"), "serving.md", "exec"), {})
    assert capsys.readouterr().out.strip() == "India"
