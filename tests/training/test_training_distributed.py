"""Two processes, replicated (DDP) or sharded (FSDP2), train as one does."""

import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny_recipes import deterministic, tiny_mapping, tiny_recipe
from transformers import AutoModelForCausalLM

from dcformer.training import train
from dcformer.training.checkpoints import MARKER, checkpoint_folders, newest_checkpoint


# Each of two processes accumulates over two passes, and the last batch of the evaluation is not full.
TRAINING = {"batch_tokens": 128, "max_steps": 6, "save_steps": 4, "evaluation_steps": 3}
DATA = {"loss_on": "answers", "evaluation": {"documents": 5}}
RUNS = {"ddp": {}, "fsdp": {"fsdp": True}, "streaming": {}}


def recipe_of(folder, name):
    data = {**DATA, "streaming": True} if name == "streaming" else DATA
    return tiny_recipe(folder / name, data=data, training={**TRAINING, **RUNS[name]})


def train_in_two_processes(recipe, expected=(0, 0)):
    """As under torchrun, whose environment this is, but without importing torch twice again; ends as expected."""
    with socket.socket() as unused:
        unused.bind(("localhost", 0))
        port = unused.getsockname()[1]

    def run(rank):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="")
        train(recipe)
        torch.distributed.destroy_process_group()

    processes = [multiprocessing.get_context("fork").Process(target=run, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
    assert tuple(process.exitcode for process in processes) == expected


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of a run in one process and of runs in two."""
    folder = tmp_path_factory.mktemp("runs")
    train(tiny_recipe(folder / "single", data=DATA, training=TRAINING))
    train(tiny_recipe(folder / "single_streaming", data={**DATA, "streaming": True}, training=TRAINING))
    for name in RUNS:
        train_in_two_processes(recipe_of(folder, name))
    return folder


def log(folder):
    return deterministic([json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()])


def assert_same_losses(folder, expected):
    expected, found = log(expected), log(folder)
    assert [record["step"] for record in expected] == [2, 3, 4, 6, 6]
    assert len(found) == len(expected)
    for record, other in zip(found, expected):
        # The exponential of a loss, and so the only figure with an error many times that of the loss.
        assert record.pop("eval_perplexity", 0) == pytest.approx(other.pop("eval_perplexity", 0), rel=1e-5)
        assert record == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize("name", RUNS)
def test_losses_are_those_of_one_process(name, runs):
    assert_same_losses(runs / name, runs / ("single_streaming" if name == "streaming" else "single"))


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_stopped_run_goes_on_with_the_same_losses(name, runs):
    # As if it had been killed while writing the last checkpoint.
    (runs / name / "checkpoint-6" / MARKER).unlink()
    train_in_two_processes(recipe_of(runs, name))
    assert_same_losses(runs / name, runs / "single")


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_processes_agree_on_the_checkpoint_before_a_damaged_one(name, runs):
    files = json.loads((runs / name / "checkpoint-6" / MARKER).read_text())["files"]
    assert {"rng_state_0.pth", "rng_state_1.pth"} < set(files)
    with (runs / name / "checkpoint-6" / "rng_state_1.pth").open("ab") as damaged:
        damaged.write(b"\0")
    train_in_two_processes(recipe_of(runs, name))
    assert_same_losses(runs / name, runs / "single")
    assert newest_checkpoint(runs / name).name == "checkpoint-6"


def test_all_processes_end_if_no_checkpoint_is_sound(runs, tmp_path):
    shutil.copytree(runs / "ddp", tmp_path / "ddp")
    for checkpoint in checkpoint_folders(tmp_path / "ddp"):
        (checkpoint / "scheduler.pt").unlink()
    train_in_two_processes(recipe_of(tmp_path, "ddp"), expected=(1, 1))


def test_sharded_parameters_are_saved_as_such_for_going_on(runs):
    assert (runs / "fsdp" / "checkpoint-6" / "pytorch_model_fsdp.bin").is_file()
    assert not (runs / "ddp" / "checkpoint-6" / "pytorch_model_fsdp.bin").exists()


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_the_model_is_that_of_one_process(name, runs):
    expected = load_file(runs / "single" / "final" / "model.safetensors")
    found = AutoModelForCausalLM.from_pretrained(runs / name / "final").state_dict()
    assert found.keys() == expected.keys()
    for key, weight in expected.items():
        torch.testing.assert_close(found[key], weight, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "launcher",
    [
        ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        # --cpu would start one process; without a GPU the flag of several GPUs starts several that use gloo.
        ["accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--num_processes", "2"],
    ],
    ids=["torchrun", "accelerate"],
)
def test_launchers_start_the_command(launcher, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tiny_mapping(tmp_path / "run", training={"max_steps": 1})))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    finished = subprocess.run(
        [sys.executable, "-m", *launcher, "-m", "dcformer.training", str(recipe)],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("1 steps") == 1
    assert "Grad strides do not match" not in finished.stderr
    assert finished.stderr.count("step 1 of 1: loss") == 1
    assert (tmp_path / "run" / "checkpoint-1" / "rng_state_1.pth").is_file()


def test_sharded_parameters_need_several_processes(tmp_path):
    with pytest.raises(ValueError, match="torchrun"):
        train(tiny_recipe(tmp_path, training={"fsdp": True}))
