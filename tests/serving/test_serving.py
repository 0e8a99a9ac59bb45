"""Which server is used, and how it is started."""

import io
import os
import runpy
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock, call

import command_line
import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from jinja2 import TemplateError
from transformers import GenerationConfig
from transformers.cli.serving import server
from transformers.cli.serving.utils import GenerateManager

import dcformer
from dcformer.loading import find_model
from dcformer.serving import choose_engine, serve
from dcformer.serving.limits import refuse_what_does_not_fit


BUNDLED = dcformer.pretrained_path("dcformer-tiny")
ADDRESS = ["--host", "127.0.0.1", "--port", "8000"]


@pytest.fixture
def started(monkeypatch):
    """Commands and environments that a process becomes."""
    calls = []
    monkeypatch.setattr("os.execve", lambda program, command, environment: calls.append((command, environment)))
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)
    return calls


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """A package of that name, which nobody imports."""
    (tmp_path / "vllm").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "vllm" / "__init__.py"


def test_vllm_is_used_where_it_is_installed(vllm, monkeypatch):
    for name in ("fastapi", "openai", "pydantic", "uvicorn"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__spec__=True))
    assert choose_engine("auto") == "transformers"  # a folder without code
    with pytest.raises(ImportError, match="pip install"):
        choose_engine("vllm")
    vllm.touch()
    assert choose_engine("auto") == choose_engine("vllm") == "vllm" and choose_engine("transformers") == "transformers"


def test_vllm_gets_the_model_and_all_further_options(vllm, started, monkeypatch):
    vllm.touch()
    find = Mock(return_value=replace(find_model("dcformer-tiny"), revision="v1"))
    monkeypatch.setattr("dcformer.loading.find_model", find)
    words = ["serve", "dcformer-tiny", "--dtype", "float16", "-tp", "1", "--host", "0.0.0.0", "--port", "9"]
    words += ["--tokenizer", "transformer-tiny", "--revision", "v1", "--trust-remote-code", "--", "--max-num-seqs=4"]
    done = command_line.call(*words)
    assert done.exit_code == 0 and "http://0.0.0.0:9/v1" in done.stdout, done.output
    tokenizer = dcformer.pretrained_path("transformer-tiny")
    assert find.call_args == call("dcformer-tiny", tokenizer=tokenizer, revision="v1", trust_remote_code=True)
    ((command, environment),) = started
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    options = [*words[6:10], "--dtype", "float16", "--served-model-name", "dcformer-tiny", "--model", BUNDLED]
    options += ["--revision", "v1", "--tokenizer", tokenizer]
    assert command[3:] == [BUNDLED, *options, "-tp", "1", "--trust-remote-code", "--max-num-seqs=4"]
    assert {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "4"}.items() <= environment.items()


def test_vllm_keeps_float32_and_what_the_environment_says(started, monkeypatch):
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "0")
    model = find_model("dcformer-tiny")
    model.config.dtype = torch.float32
    serve(model, "vllm", arguments=["--gpu-memory-utilization", "0.5"])
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    serve(model, "vllm", dtype="bfloat16")
    dtypes = [command[command.index("--dtype") + 1] for command, _ in started]
    assert dtypes == ["float32", "bfloat16"] and "--revision" not in started[0][0]
    assert [environment.get("VLLM_CPU_KVCACHE_SPACE") for _, environment in started] == [None, "1"]
    assert started[0][1]["VLLM_NO_USAGE_STATS"] == "0"


def test_transformers_finds_a_bundled_model_by_its_name(started, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))
    print("Starting", end="")
    serve(find_model("dcformer-tiny"), "transformers", arguments=["--device", "cpu"])
    assert sys.stdout.buffer.getvalue() == b"Starting"  # nothing is lost when the process is replaced
    serve(find_model(BUNDLED), "transformers")
    serve(replace(find_model(BUNDLED), name="acme/model", path="acme/model", revision="v1"), "transformers")
    (bundled, _), (folder, _), (hub, _) = started
    module = [sys.executable, "-m", "dcformer.serving"]
    assert bundled == [*module, os.path.dirname(BUNDLED), "serve", "dcformer-tiny", *ADDRESS, "--device", "cpu"]
    assert folder == [*module, ".", "serve", BUNDLED, *ADDRESS]
    assert hub == [*module, ".", "serve", "acme/model@v1", *ADDRESS]


def test_transformers_server_starts_in_the_folder_of_the_model_with_what_it_lacks(tmp_path, monkeypatch):
    done = Mock()
    done.app.side_effect = lambda prog_name: done.started(prog_name, os.getcwd(), sys.argv)
    monkeypatch.setattr("transformers.cli.transformers.app", done.app)
    monkeypatch.setattr("dcformer.integrations.name_models_for_server", done.name)
    monkeypatch.setattr("dcformer.serving.limits.refuse_what_does_not_fit", done.refuse)
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path), "serve", "dcformer-tiny"])
    monkeypatch.chdir(".")
    runpy.run_module("dcformer.serving", run_name="__main__", alter_sys=False)
    started = call.started("transformers", str(tmp_path), ["", "serve", "dcformer-tiny"])
    assert done.mock_calls == [call.name(), call.refuse(), call.app(prog_name="transformers"), started]


def test_what_would_be_ignored_is_refused(started):
    with pytest.raises(ValueError, match="tokenizer="):
        serve(find_model("dcformer-tiny"), "transformers", tokenizer=BUNDLED)
    for another in (["--model", "transformer-tiny"], ["-tp", "1", "--model=transformer-tiny"]):
        with pytest.raises(ValueError, match="MODEL already names the model"):
            serve(find_model("dcformer-tiny"), "vllm", arguments=another)
    assert command_line.call("serve", "--max-model-len", "512").exit_code == 2
    assert command_line.call("serve", "no/such/folder").exit_code == 1 and not started


def test_a_port_that_does_not_exist_is_refused(started):
    done = command_line.call("serve", "dcformer-tiny", "--port", "70000")
    assert done.exit_code == 2 and "65535" in done.stderr and not started


def test_without_its_packages_transformers_server_is_not_started_and_they_are_named(started, monkeypatch):
    for name in ("openai", "uvicorn"):
        monkeypatch.setitem(sys.modules, name, None)
    done = command_line.call("serve", "dcformer-tiny", "--engine", "transformers")
    assert done.exit_code == 1 and done.stdout == "" and not started
    assert done.stderr.startswith("Error: Transformers' server needs openai and uvicorn: pip install")


def test_transformers_server_refuses_what_does_not_fit_and_ends_texts_with_the_context(monkeypatch):
    """Its handlers, which need `openai`, are replaced by what they call."""
    manager, model = object.__new__(GenerateManager), find_model("dcformer-tiny")

    async def generate(self, model, processor, inputs, config, request_id):
        return config.max_new_tokens

    monkeypatch.setattr(server, "build_server", FastAPI)
    monkeypatch.setattr(GenerateManager, "generate_non_streaming", generate)
    monkeypatch.setattr(
        GenerateManager, "generate_streaming", lambda *arguments, request_id: arguments[4].max_new_tokens
    )
    refuse_what_does_not_fit()
    built = server.build_server()

    @built.get("/{tokens}/{new}")
    async def answer(tokens: int, new: int):
        if tokens < 0:
            raise (TemplateError if tokens == -1 else TypeError)("roles must alternate")
        config = GenerationConfig()
        config.max_new_tokens = new if new >= 0 else None
        given = model, None, {"input_ids": torch.zeros(1, tokens)}, config
        limits = await manager.generate_non_streaming(*given, request_id="x")
        return [limits, manager.generate_streaming(*given, request_id="x")]

    client = TestClient(built)
    for tokens, new, limit in ((250, 1024, 6), (255, 9, 1), (250, 3, 3), (250, 0, 0), (250, -1, 6)):
        assert client.get(f"/{tokens}/{new}").json() == [limit, limit]
    for tokens, words in (
        (256, "256 tokens, and the context of 256"),
        (16000, "16,000"),
        (0, "no token"),
        (-1, "roles"),
        (-2, "roles"),
    ):
        refused = client.get(f"/{tokens}/8")
        assert refused.status_code == 400 and words in refused.json()["error"]["message"]
