"""`dcformer serve` with both real servers, asked by the `openai` client: what they answer is what `generate` writes."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch


pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-serving")

from openai import OpenAI

import dcformer
from dcformer.generation import load_model


# One process has the engine that these tests share.
pytestmark = pytest.mark.xdist_group("serve_command")

PROMPTS = (
    "There are Paris, Paris, Mumbai. Which is different? The city in",
    "< William has a piano. David has a jersey. Michael has a football. >. William possesses a kind of",
    "There are a motorcycle, a mango, a motorcycle. Which is different? The",
    "There are Ruth, Paris, Mumbai, Paris. Which is different?",
)
NEW_TOKENS = 24
SECONDS_TO_START = 600  # a busy machine takes minutes
SECONDS_TO_END = 30
OPTIONS = {"vllm": ["--enforce-eager", "--max-model-len", "512"], "transformers": ["--device", "cpu"]}


@pytest.fixture(scope="module", params=OPTIONS)
def served(request, tmp_path_factory):
    """A server that has said where it is."""
    log = tmp_path_factory.mktemp(request.param) / "log.txt"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "dcformer.cli", "serve", "dcformer-tiny", "--engine", request.param]
    command += ["--port", str(port), "--dtype", "float32", *OPTIONS[request.param]]
    # As for users: engines are processes of their own.
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment["PYTHONPATH"] = str(Path(dcformer.__file__).parents[1])
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)
    try:
        until = time.monotonic() + SECONDS_TO_START
        while (line := re.search(r"^curl .+\n", log.read_text(), re.MULTILINE)) is None:
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.2)
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        yield SimpleNamespace(engine=request.param, process=process, log=log, curl=line.group(), client=client)
    finally:
        process.terminate()
        process.wait(SECONDS_TO_END)


@pytest.fixture(scope="module")
def loaded():
    return load_model("dcformer-tiny", dtype="float32", device="cpu")


def generated(loaded, prompt, **options):
    ids = torch.tensor([loaded.encode(prompt)])
    chosen = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    written = loaded.model.generate(ids, **chosen)
    return written[0, ids.shape[1] :].tolist()


def ask(served, prompt, **options):
    return served.client.completions.create(
        model="dcformer-tiny", prompt=prompt, max_tokens=NEW_TOKENS, temperature=0, **options
    )


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_completion_is_what_generate_writes(served, loaded, prompt):
    # Servers differ in whether a text begins with its space and ends with the token that ends it.
    expected = loaded.tokenizer.decode(generated(loaded, prompt), skip_special_tokens=True).strip()
    assert expected and ask(served, prompt).choices[0].text.strip() == expected


@pytest.mark.parametrize("served", ["vllm"], indirect=True)  # answers of the other hold no tokens
def test_the_tokens_of_a_long_completion_are_those_of_generate(served, loaded):
    extra = {"ignore_eos": True, "return_token_ids": True}
    for prompt in PROMPTS:
        ids = ask(served, prompt, extra_body=extra).choices[0].token_ids
        assert ids == generated(loaded, prompt, eos_token_id=None) and len(ids) == NEW_TOKENS


def test_a_streamed_completion_is_the_plain_one(served):
    for prompt in PROMPTS:
        pieces = [chunk.choices[0].text or "" for chunk in ask(served, prompt, stream=True) if chunk.choices]
        assert "".join(pieces).strip() == ask(served, prompt).choices[0].text.strip()


def test_the_printed_line_is_answered(served):
    done = subprocess.run([*shlex.split(served.curl), "--silent", "--show-error"], capture_output=True, text=True)
    assert done.returncode == 0 and "India" in done.stdout, done.stderr + done.stdout


def test_what_serves_is_said_first(served):
    first = served.log.read_text().splitlines()[0]
    says = {"vllm": "it computes many requests at once.", "transformers": "it computes one request after another."}
    assert first.startswith("Starting the server of ") and first.endswith(says[served.engine])


def test_sigterm_ends_the_server_and_leaves_no_process(served):
    """The last one: it ends what the others ask."""
    listing = subprocess.run(["ps", "-o", "pid=", "--ppid", str(served.process.pid)], capture_output=True, text=True)
    (server,) = listing.stdout.split()
    assert len(of_session(server)) >= (2 if served.engine == "vllm" else 1)
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(SECONDS_TO_END) == 143
    assert served.log.read_text().endswith("Stopped.\n")
    assert of_session(server) == []


def of_session(number):
    """Processes of a session that run."""
    command = ["ps", "-o", "pid=,stat=", "--sid", number]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return [line for line in lines if not line.split()[1].startswith("Z")]
