"""Which server is used, and how it is started."""

import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import dcformer
from dcformer.cli import app
from dcformer.loading import find_model
from dcformer.serving import choose_engine, serve


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


def test_vllm_is_used_where_it_is_installed(vllm):
    assert choose_engine("auto") == "transformers"  # a folder without code
    with pytest.raises(ImportError, match="pip install"):
        choose_engine("vllm")
    vllm.touch()
    assert choose_engine("auto") == choose_engine("vllm") == "vllm" and choose_engine("transformers") == "transformers"


def test_vllm_gets_the_model_and_all_further_options(vllm, started):
    vllm.touch()
    words = ["serve", "dcformer-tiny", "--dtype", "float16", "-tp", "1", "--", "--max-num-seqs=4"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and "http://127.0.0.1:8000/v1" in done.stdout, done.output
    ((command, environment),) = started
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    options = ["--dtype", "float16", "--served-model-name", "dcformer-tiny", "--model", BUNDLED]
    assert command[3:] == [BUNDLED, *ADDRESS, *options, "-tp", "1", "--max-num-seqs=4"]
    assert {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "4"}.items() <= environment.items()


def test_vllm_keeps_float32_and_what_the_environment_says(started, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    model = find_model("dcformer-tiny")
    model.config.dtype = torch.float32
    serve(model, "vllm")
    command, environment = started[0]
    assert command[command.index("--dtype") + 1] == "float32" and environment["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_transformers_finds_a_bundled_model_by_its_name(started):
    serve(find_model("dcformer-tiny"), "transformers", arguments=["--device", "cpu"])
    serve(find_model(BUNDLED), "transformers")
    (bundled, _), (folder, _) = started
    module = [sys.executable, "-m", "dcformer.serving"]
    assert bundled == [*module, os.path.dirname(BUNDLED), "serve", "dcformer-tiny", *ADDRESS, "--device", "cpu"]
    assert folder == [*module, ".", "serve", BUNDLED, *ADDRESS]


def test_what_would_be_ignored_is_refused(started):
    with pytest.raises(ValueError, match="tokenizer="):
        serve(find_model("dcformer-tiny"), "transformers", tokenizer=BUNDLED)
    for another in (["--model", "transformer-tiny"], ["-tp", "1", "--model=transformer-tiny"]):
        with pytest.raises(ValueError, match="MODEL already names the model"):
            serve(find_model("dcformer-tiny"), "vllm", arguments=another)
    assert CliRunner().invoke(app, ["serve", "--max-model-len", "512"]).exit_code == 2
    assert CliRunner().invoke(app, ["serve", "no/such/folder"]).exit_code == 1 and not started


def test_without_its_packages_transformers_server_says_what_to_install(tmp_path):
    # A copy of Transformers' check that finds nothing, whatever is installed.
    code = "import runpy, transformers.utils.import_utils as u; u.is_serve_available = lambda: False; "
    code += "runpy.run_module('dcformer.serving', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code, ".", "serve", BUNDLED], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith("Transformers' server needs more packages: pip install"), (
        done.stderr
    )
