"""The first lines of a run and `--dry-run` say what a run does, and change nothing."""

import re
from dataclasses import replace

import killable
import pytest
import torch
import yaml
from rich.filesize import decimal
from tiny_recipes import tiny_mapping, tiny_recipe
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from dcformer import pretrained_path
from dcformer.cli import app
from dcformer.training import Recipe, flops_per_token, load_recipe, plan, plan_run, train
from dcformer.training.throughput import TrainingClock
from dcformer.training.trainer import RecipeTrainer


MUON = {"optimizer": "muon", "muon_learning_rate": 0.02}
KINDS = {"adamw": {}, "muon": {"training": MUON}, "compose": {"training": {"trainable": "compose"}}}
KINDS |= {"plain": {"model": {"compose_pre": False, "compose_post": False}}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_counts_the_parameters_and_the_numbers_that_a_checkpoint_holds(kind, tmp_path):
    recipe = tiny_recipe(tmp_path, **KINDS[kind])
    described, model = plan_run(recipe), AutoModelForCausalLM.from_pretrained(train(recipe)["folder"])
    weights = {name: weight.numel() for name, weight in model.named_parameters()}
    composition = sum(numbers for name, numbers in weights.items() if ".compose." in name)
    assert (described.parameters, described.compose_parameters) == (sum(weights.values()), composition)
    trained = composition if kind == "compose" else sum(weights.values())
    saved = torch.load(tmp_path / "checkpoint-6" / "optimizer.pt")
    states = [state for part in saved.get("parts", [saved]) for state in part["state"].values()]
    numbers = sum(each.numel() for state in states for name, each in state.items() if name != "step")
    assert described.trained_parameters == trained
    assert described.memory_bytes == 4 * (sum(weights.values()) + trained + numbers)
    assert (described.attention == "sdpa") == (kind == "plain")
    assert described.flops == 6 * 64 * flops_per_token(model.config, 16)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dry_run_multiplies_what_it_measures_and_leaves_the_folder_as_it_is(streaming, tmp_path, monkeypatch):
    data = {"streaming": streaming, "packing": "none"}
    recipe = tiny_recipe(tmp_path / "run", data=data, training={"max_steps": 9, "report_to": "tensorboard"})
    train(tiny_recipe(tmp_path / "run", training={"max_steps": 3}))
    before, evaluate = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}, RecipeTrainer.evaluate
    # A pass takes a second, a row of an evaluation a quarter.
    monkeypatch.setattr(TrainingClock, "lap", lambda clock: setattr(clock, "seconds", clock.seconds + 1))
    slow = lambda self, rows: evaluate(self, rows) | {"eval_runtime": len(rows) / 4}  # noqa: E731
    monkeypatch.setattr(RecipeTrainer, "evaluate", slow)
    monkeypatch.setattr(plan, "_MEASURED_FLOPS", 0.0)  # three steps
    lines: list[str] = []
    measured = train(recipe, dry_run=True, on_message=lines.append)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    # Four rows a step are two passes; evaluations, whose last batch is filled, follow steps 4, 8 and 9.
    assert (measured["step_seconds"], measured["evaluation_rows"] % 2) == (2.0, 1)
    assert measured["evaluation_seconds"] == (measured["evaluation_rows"] + 1) / 4
    assert measured["seconds"] == 9 * 2.0 + 3 * measured["evaluation_seconds"]
    assert 1e8 < measured["peak_memory_bytes"] < 1e11 and (measured["rows"] is None) == streaming
    assert [line.split()[0] for line in "\n".join(filter(None, lines)).splitlines()] == [
        *("Model:", "Training:", "Device:", "Memory", "Reading", *([] if streaming else ["Data:"])),
        *("Evaluation:", "Taking", "Time:"),
    ]


def dry_run_as_one_of_two(rank, file, output):
    with open(f"{output}-{rank}", "w") as written:
        written.write(CliRunner().invoke(app, ["train", str(file), "--dry-run"]).output)


def test_commands_print_it_once_and_of_every_variant_of_a_sweep(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(tiny_mapping(tmp_path / "run", data={"packing": "none"})))
    assert killable.run_two(dry_run_as_one_of_two, file, tmp_path / "printed", seconds=120) == [0, 0]
    printed, other = ((tmp_path / f"printed-{rank}").read_text() for rank in range(2))
    assert re.search(r"processes: 2, fp32.*\n.*\nReading.*\nData: 253 rows of 16 tokens, 4,048 with", printed), printed
    assert "Time: about 0:00:" in printed and "Model" not in other
    variants = {"a": None, "b": {"model": {"compose_rank": 1}}, "c": {"model": {"compose_gate": False}}}
    sweep = {"variants": variants, "seeds": [3, 4], "only": ["a", "c"]}
    file.write_text(yaml.safe_dump(tiny_mapping(tmp_path / "run", sweep=sweep)))
    result = CliRunner().invoke(app, ["train", str(file), "--dry-run"])
    assert result.exit_code == 0 and result.stdout.count("Model: ") == result.stdout.count("Time: ") == 2
    assert not (tmp_path / "run").exists()
    file.write_text(yaml.safe_dump(tiny_mapping(tmp_path / "run")))
    result = CliRunner().invoke(app, ["train", str(file)])
    assert re.search(r"^Reading .*\nModel.*\nTraining.*\nDevice.*\nMemory.*\nReading and tok.*\nData", result.stderr)


def test_a_plan_of_the_paper_needs_no_data_and_a_pretrained_model_no_weights(monkeypatch):
    described = plan_run(load_recipe("dcformer++-405m"))
    assert (described.parameters, described.memory_bytes) == (419_614_720, 16 * 419_614_720)
    # By the rule of six FLOPs for a parameter, and a peak of 989.5 Tflop/s.
    hours = 6 * 419_614_720 * 7e9 / 989.5e12 / 3600
    least, most = map(float, re.search(r"FLOPs: (\S+) to (\S+) hours on 1 x H100", str(described)).groups())
    assert least == pytest.approx(hours / 0.4, rel=0.1) and most == pytest.approx(hours / 0.1, rel=0.1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    on_gpus = str(replace(described, device="NVIDIA H200", processes=8))
    assert f"FLOPs: {least / 8:.2g} to " in on_gpus and "8 x NVIDIA H200" in on_gpus
    assert decimal(described.memory_bytes) in on_gpus
    folder = pretrained_path("dcformer-tiny")
    values = {**tiny_mapping("run", tokenizer="nothing"), "model": {"pretrained": folder}}
    assert (
        plan_run(Recipe.from_mapping(values)).parameters
        == AutoModelForCausalLM.from_pretrained(folder).num_parameters()
    )
