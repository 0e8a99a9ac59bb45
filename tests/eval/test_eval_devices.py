"""The device of an evaluation: what is chosen, and what is refused before anything is loaded."""

import pytest
import torch
from tiny_models import tiny_model
from typer.testing import CliRunner

from dcformer.cli import app
from dcformer.eval import devices
from dcformer.eval.devices import available_devices, choose_device, describe_device
from dcformer.head_tasks.comparison import compare_models


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine with two GPUs of CUDA."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "GPU of a test")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def no_gpu(monkeypatch):
    for kind in ("cuda", "mps", "xpu"):
        monkeypatch.setattr(getattr(torch, kind), "is_available", lambda: False)


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        (None, "cpu"),
        ("auto", "cpu"),
        ("cpu", "cpu"),
        ("cpu:0", "cpu"),
        (torch.device("cpu"), "cpu"),
    ],
    ids=str,
)
def test_what_is_chosen_without_a_gpu(asked, chosen, no_gpu):
    assert choose_device(asked) == chosen


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        (None, "cuda"),
        ("auto", "cuda"),
        ("cuda", "cuda"),
        ("cuda:1", "cuda:1"),
        ("cpu", "cpu"),
        (torch.device("cuda", 0), "cuda:0"),
    ],
    ids=str,
)
def test_what_is_chosen_with_two_gpus(asked, chosen, two_gpus):
    assert choose_device(asked) == chosen


@pytest.mark.parametrize(
    "asked", ["banana", "cuda", "cuda:0", "cuda:9", "mps", "xpu:0", "cpu:1", "meta", "gpu", "", "CPU", 0, -1], ids=repr
)
def test_what_is_not_there_is_refused_and_what_is_there_named(asked, no_gpu):
    with pytest.raises(ValueError, match="on this machine") as raised:
        choose_device(asked)
    message = str(raised.value)
    assert f"no device {str(asked)!r}" in message and "only cpu" in message and "\n" not in message


@pytest.mark.parametrize("asked", ["cuda:2", "cuda:-1", "cuda:", "mps", "Cuda:1"])
def test_an_index_that_is_not_there_is_refused(asked, two_gpus):
    with pytest.raises(ValueError, match=r"PyTorch finds cpu, cuda:0, cuda:1 on this machine"):
        choose_device(asked)


def test_a_slip_is_told_from_a_wish(two_gpus, monkeypatch):
    with pytest.raises(ValueError, match=r"did you mean cuda:1\?"):
        choose_device("Cuda:1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    with pytest.raises(ValueError, match="where CUDA_VISIBLE_DEVICES is '3,4'"):
        choose_device("cuda:3")


def test_why_there_is_no_gpu_is_said(no_gpu, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(ValueError, match="as it is built without CUDA"):
        choose_device("cuda")


def test_apples_gpu_has_the_name_by_which_the_harness_finds_it(no_gpu, monkeypatch):
    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    assert available_devices() == ["cpu", "mps:0"]
    assert choose_device("mps") == choose_device("mps:0") == "mps"
    assert choose_device() == "cpu"


def test_several_processes_have_a_gpu_each(two_gpus):
    assert choose_device(None, processes=2) == choose_device("cuda", processes=2) == "cuda"
    assert choose_device("cpu", processes=8) == "cpu"
    with pytest.raises(ValueError, match="'cuda:1' is one device, and there are 2 processes"):
        choose_device("cuda:1", processes=2)
    with pytest.raises(ValueError, match="3 processes need as many GPUs, and PyTorch finds cuda:0, cuda:1 here"):
        choose_device(None, processes=3)


def test_a_device_in_words(two_gpus):
    assert describe_device("cuda:1") == "cuda:1, GPU of a test"
    assert describe_device("cpu").startswith("cpu, ") and describe_device("mps") == "mps"


@pytest.mark.parametrize("suite", ["table4", "head_tasks"])
@pytest.mark.parametrize("asked", ["banana", "cuda:9"])
def test_the_command_refuses_before_it_looks_at_the_model(suite, asked, no_gpu, tmp_path):
    if suite != "head_tasks":
        pytest.importorskip("lm_eval")
    arguments = ["eval", "/nowhere/at/all", "--baseline", "/nor/here/either", "--suite", suite, "--device", asked]
    failed = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "out")])
    assert failed.exit_code == 1 and failed.stdout == "" and failed.stderr.count("\n") == 1
    assert failed.stderr.startswith(f"Error: There is no device {asked!r}: PyTorch finds only cpu on this machine")
    assert not (tmp_path / "out").exists()


def test_the_functions_refuse_before_they_look_at_the_model(no_gpu, tmp_path):
    with pytest.raises(ValueError, match="no device 'cuda'"):
        compare_models(["/nowhere/at/all"], device="cuda")
    pytest.importorskip("lm_eval")
    from dcformer.eval.language_model import DCFormerLM
    from dcformer.eval.runner import evaluate

    with pytest.raises(ValueError, match="no device 'cuda'"):
        evaluate("/nowhere/at/all", output=tmp_path / "out", device="cuda")
    with pytest.raises(ValueError, match="no device 'cuda'"):
        DCFormerLM("/nowhere/at/all", device="cuda")


def test_a_loaded_model_stays_on_its_device(monkeypatch):
    pytest.importorskip("lm_eval")
    from dcformer.eval.language_model import _check_device_of

    model = tiny_model()
    _check_device_of(model, "cpu")
    _check_device_of(model, None)
    monkeypatch.setattr(devices, "available_devices", lambda: ["cpu", "cuda:0"])
    with pytest.raises(ValueError, match="The model is on 'cpu', and device is 'cuda'; move it"):
        _check_device_of(model, "cuda")
