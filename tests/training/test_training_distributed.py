"""Two processes, replicated (DDP) or sharded (FSDP2), train as one does."""

import json
from pathlib import Path

import killable
import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny_recipes import deterministic, tiny_recipe
from transformers import AutoModelForCausalLM

from dcformer.cli import app
from dcformer.training import run, train
from dcformer.training.run_files import MARKER


# Each of two processes accumulates over two passes, and the last batch of the evaluation is not full.
TRAINING = {"batch_tokens": 128, "max_steps": 4, "save_steps": 2, "evaluation_steps": 3}
DATA = {"loss_on": "answers", "evaluation": {"documents": 5}}
# Runs of two processes -> the same run in one; the sharded one streams its data.
RUNS = {"ddp": "single", "fsdp": "single_streaming"}


def recipe_of(folder, name, **values):
    """With every part of the composition; two processes also compute layers again in the backward pass."""
    model = {"compose_static": True, "compose_groups": 2, "num_attention_heads": 4}
    data = {**DATA, "streaming": name in ("fsdp", "single_streaming")}
    training = {**TRAINING, "fsdp": name == "fsdp", "gradient_checkpointing": name in RUNS}
    return tiny_recipe(folder / name, model=model, data=data, training=training, **values)


def train_as_one_of_two(rank, file):
    run.plot_losses = lambda *_: None  # in this process, which the fixture `without_curves` does not reach
    app(["train", str(file)])


def train_in_two_processes(recipe):
    """Run the command in the environment of torchrun, but without the time of two imports of torch."""
    file = Path(recipe.output).with_suffix(".yaml")
    file.write_text(yaml.safe_dump(recipe.to_mapping()))
    return killable.run_two(train_as_one_of_two, file, seconds=120)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of runs in one process and in two, the latter stopped and resumed."""
    folder = tmp_path_factory.mktemp("runs")
    for name, single in RUNS.items():
        train(recipe_of(folder, single))
        assert train_in_two_processes(recipe_of(folder, name)) == [0, 0]
    return folder


def assert_same_losses(folder, expected):
    expected, records = (
        deterministic([json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()])
        for path in (expected, folder)
    )
    assert [record["step"] for record in expected] == [2, 3, 4, 4]
    assert len(records) == len(expected) and 0 <= expected[-1]["eval_accuracy"] < 0.5
    for record, other in zip(records, expected):
        # The exponential of a loss, and so the only figure with an error many times that of the loss.
        assert record.pop("eval_perplexity", 0) == pytest.approx(other.pop("eval_perplexity", 0), rel=1e-5)
        assert record == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize("name", RUNS)
def test_losses_and_the_model_are_those_of_one_process_also_after_a_stop(name, runs):
    expected = runs / RUNS[name]
    assert_same_losses(runs / name, expected)
    # As if it had been killed while writing the last checkpoint, or if the disk had lost a file of it.
    (runs / name / "checkpoint-4" / {"ddp": "rng_state_1.pth", "fsdp": MARKER}[name]).unlink()
    assert train_in_two_processes(recipe_of(runs, name)) == [0, 0]
    assert_same_losses(runs / name, expected)
    expected = load_file(expected / "final" / "model.safetensors")
    weights = AutoModelForCausalLM.from_pretrained(runs / name / "final").state_dict()
    assert weights.keys() == expected.keys()
    for key, weight in expected.items():
        torch.testing.assert_close(weights[key], weight, rtol=0, atol=1e-5)
    assert (runs / name / "checkpoint-4" / "pytorch_model_fsdp.bin").exists() == (name == "fsdp")
    assert (runs / name / "checkpoint-4" / "rng_state_1.pth").exists()


def test_all_processes_end_with_the_error_of_the_first(runs):
    assert train_in_two_processes(recipe_of(runs, "ddp", seed=1)) == [1, 1]


def test_sharded_parameters_need_several_processes(tmp_path):
    with pytest.raises(ValueError, match="torchrun"):
        train(tiny_recipe(tmp_path, training={"fsdp": True}))
