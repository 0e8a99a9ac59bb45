"""`dcformer serve` with both real servers, asked by the `openai` client: what they answer is what `generate` writes."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest


pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-serving")

from openai import OpenAI

from dcformer.generation import TextGenerator
from dcformer.loading import load_model


# One process has the engine that these tests share.
pytestmark = pytest.mark.xdist_group("serve_command")

ROOT = Path(__file__).parents[2]
PROMPTS = (
    "static int device_open(struct device *device)\n{\n    if (!",
    "#include <stdio.h>\n\nint main(void)\n{\n    ",
    "/* Free the list. */\nvoid list_free(struct list *list)\n{\n    ",
)
NEW_TOKENS = 24
SECONDS_TO_START = 600  # a busy machine takes minutes
SECONDS_TO_END = 60
OPTIONS = {"vllm": ["--enforce-eager", "--max-model-len", "256"], "transformers": ["--device", "cpu"]}


@pytest.fixture(scope="module", params=OPTIONS)
def served(request, tmp_path_factory):
    """A server that answers, in a session of its own."""
    log = tmp_path_factory.mktemp(request.param) / "log.txt"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "dcformer.cli", "serve", "dcformer-tiny", "--engine", request.param]
    command += ["--port", str(port), "--dtype", "float32", *OPTIONS[request.param]]
    # As for users: engines are processes of their own.
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment["PYTHONPATH"] = str(ROOT)
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        until = time.monotonic() + SECONDS_TO_START
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.5)
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        yield SimpleNamespace(engine=request.param, process=process, log=log, port=port, client=client)
    finally:
        process.terminate()
        process.wait(SECONDS_TO_END)


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="module")
def loaded():
    return load_model("dcformer-tiny", dtype="float32", device="cpu")


def ask(served, prompt, **options):
    return served.client.completions.create(
        model="dcformer-tiny", prompt=prompt, max_tokens=NEW_TOKENS, temperature=0, **options
    )


def test_a_completion_is_what_generate_writes_streamed_or_not(served, loaded):
    for prompt, expected in zip(PROMPTS, TextGenerator(loaded, max_new_tokens=NEW_TOKENS).generate(PROMPTS)):
        # Servers differ in whether a text ends with the token that ends it.
        assert ask(served, prompt).choices[0].text.strip() == expected.text.strip() != ""
        pieces = [chunk.choices[0].text or "" for chunk in ask(served, prompt, stream=True) if chunk.choices]
        assert "".join(pieces).strip() == expected.text.strip()


def test_the_address_is_said_and_the_example_of_the_page_answered(served, loaded, capsys):
    assert (
        f"Starting {served.engine}: dcformer-tiny will be at http://127.0.0.1:{served.port}/v1"
        in served.log.read_text()
    )
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python server\n(.*?)^```", page, re.S | re.M)
    exec(example.replace(":8000", f":{served.port}"), {})
    (expected,) = TextGenerator(loaded, max_new_tokens=8).generate([PROMPTS[0]])
    assert capsys.readouterr().out == f"{expected.text.strip()}\n"


def test_sigterm_ends_the_server_and_leaves_no_process(served):
    """The last one: it ends what the others ask."""
    assert len(of_session(served.process.pid)) >= (2 if served.engine == "vllm" else 1)
    served.process.send_signal(signal.SIGTERM)
    served.process.wait(SECONDS_TO_END)
    until = time.monotonic() + SECONDS_TO_END
    while of_session(served.process.pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert of_session(served.process.pid) == []


def of_session(number):
    """Processes of a session that run."""
    command = ["ps", "-o", "pid=,stat=", "--sid", str(number)]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return [line for line in lines if not line.split()[1].startswith("Z")]
