"""`dcformer serve` with both real servers, asked by the `openai` client: they answer what `generate` writes; and the
examples of docs/serving.md."""

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


pytest.importorskip("vllm", reason="vLLM needs a separate environment: make test-serving")

from openai import BadRequestError, OpenAI

from dcformer.generation import TextGenerator
from dcformer.loading import load_model


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
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
def server(request, tmp_path_factory):
    """A running server, the leader of a new session."""
    log = tmp_path_factory.mktemp(request.param) / "log.txt"
    port = next(filter(is_free, range(20_000 + os.getpid() % 10_000, 32_768)))
    command = [sys.executable, "-m", "dcformer.cli", "serve", "dcformer-tiny", "--engine", request.param]
    command += ["--port", str(port), "--dtype", "float32", *OPTIONS[request.param]]
    # As for users: engines are separate processes.
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


def is_free(port):
    """
    Whether nobody listens there.

    Ports from 32,768 on would not do: until the server listens, after half a minute, any process may be given one that
    asks for any port, as vLLM does.
    """
    with socket.socket() as free:
        try:
            free.bind(("127.0.0.1", port))
            return True
        except OSError:
            return False


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="module")
def loaded():
    return load_model("dcformer-tiny", dtype="float32", device="cpu")


def ask(server, prompt, **options):
    return server.client.completions.create(
        model="dcformer-tiny", prompt=prompt, max_tokens=NEW_TOKENS, temperature=0, **options
    )


def test_a_completion_is_what_generate_writes_streamed_or_not(server, loaded):
    for prompt, expected in zip(PROMPTS, TextGenerator(loaded, max_new_tokens=NEW_TOKENS).generate(PROMPTS)):
        # Servers differ in whether a text ends with the token that ends it.
        assert ask(server, prompt).choices[0].text.strip() == expected.text.strip() != ""
        pieces = [chunk.choices[0].text or "" for chunk in ask(server, prompt, stream=True) if chunk.choices]
        assert "".join(pieces).strip() == expected.text.strip()


def test_what_does_not_fit_is_refused(server):
    with pytest.raises(BadRequestError, match="256"):
        ask(server, PROMPTS[0] * 100)
    with pytest.raises(BadRequestError, match="chat template"):
        server.client.chat.completions.create(model="dcformer-tiny", messages=[{"role": "user", "content": "hello"}])


def test_the_address_is_shown_and_the_example_of_the_page_answered(server, loaded, capsys):
    assert (
        f"Starting {server.engine}: dcformer-tiny will be at http://127.0.0.1:{server.port}/v1"
        in server.log.read_text()
    )
    (example,) = re.findall(r"^```python server\n(.*?)^```", PAGE, re.S | re.M)
    exec(example.replace(":8000", f":{server.port}"), {})
    (expected,) = TextGenerator(loaded, max_new_tokens=8).generate([PROMPTS[0]])
    assert capsys.readouterr().out == f"{expected.text.strip()}\n"


def test_sigterm_ends_the_server_and_leaves_no_process(server):
    """The last test: it ends the server that the others ask."""
    assert len(of_session(server.process.pid)) >= (2 if server.engine == "vllm" else 1)
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(SECONDS_TO_END)
    until = time.monotonic() + SECONDS_TO_END
    while of_session(server.process.pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert of_session(server.process.pid) == []


def test_the_example_without_a_server_prints_what_the_page_shows(capsys):
    code, expected = re.search(r"^```python vllm\n(.*?)^```\s+^```text vllm\n(.*?)^```", PAGE, re.S | re.M).groups()
    namespace = {}
    exec(compile(code, "serving.md", "exec"), namespace)
    namespace["llm"].llm_engine.engine_core.shutdown()
    assert capsys.readouterr().out.endswith(expected)


def of_session(number):
    """Running processes of a session."""
    command = ["ps", "-o", "pid=,stat=", "--sid", str(number)]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return [line for line in lines if not line.split()[1].startswith("Z")]
