"""The first lines of a run and `--dry-run` say what a run does, and change nothing."""

import re
from dataclasses import replace

import killable
import pytest
import torch
import yaml
from command_line import call
from tiny_recipes import tiny_mapping, tiny_recipe
from transformers import AutoModelForCausalLM

from dcformer import pretrained_path
from dcformer.training import Recipe, flops_per_token, plan_run, run_plan, train
from dcformer.training.throughput import TrainingClock
from dcformer.training.trainer import RecipeTrainer


MUON = {"optimizer": "muon", "muon_learning_rate": 0.02}
PLAIN = {"compose_pre": False, "compose_post": False}


@pytest.mark.parametrize(
    ("kind", "model", "training"),
    [("adamw", PLAIN, {}), ("muon", {}, MUON), ("compose", {}, {"trainable": "compose"})],
)
def test_a_plan_counts_the_parameters_and_the_numbers_that_a_checkpoint_holds(kind, model, training, tmp_path):
    recipe = tiny_recipe(tmp_path, model=model, data={"evaluation": None}, training={"max_steps": 2, **training})
    described, model = plan_run(recipe), AutoModelForCausalLM.from_pretrained(train(recipe)["folder"])
    weights = sum(weight.numel() for weight in model.parameters())
    composition = sum(weight.numel() for name, weight in model.named_parameters() if ".compose." in name)
    trained = composition if kind == "compose" else weights
    saved = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt")
    states = [state for part in saved.get("parts", [saved]) for state in part["state"].values()]
    numbers = sum(each.numel() for state in states for name, each in state.items() if name != "step")
    counted = (described.parameters, described.compose_parameters, described.trained_parameters)
    assert counted == (weights, composition, trained)
    assert described.memory_bytes == 4 * (weights + trained + numbers)
    assert (described.attention == "sdpa") == (kind == "adamw")
    assert described.flops == 2 * 64 * flops_per_token(model.config, 16)
    hours = described.flops / 494.5e12 / 8 / 3600  # of TF32
    expected = f"{hours / 0.4:.2g} to {hours / 0.1:.2g} hours on 8 x NVIDIA H200 at 40% to 10%"
    assert expected in str(replace(described, device="NVIDIA H200", processes=8))


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
    monkeypatch.setattr(run_plan, "_MEASURED_FLOPS", 0.0)  # three steps
    lines: list[str] = []
    measured = train(recipe, dry_run=True, on_message=lines.append)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    # Four rows a step are two passes; evaluations, of 27 rows and one that fills a batch, follow steps 4, 8 and 9.
    assert (measured["step_seconds"], measured["evaluation_rows"], measured["evaluation_seconds"]) == (2.0, 27, 7.0)
    assert measured["seconds"] == 9 * 2.0 + 3 * 7.0 and 1e8 < measured["peak_memory_bytes"] < 1e11
    assert measured["rows"] == (None if streaming else 253)
    begun = ["Reading", "Model:", "Training:", "Device:", "Memory"]
    begun += ["Tokenising", "Data:", "Evaluation:", "Taking", "Time:"]
    said = [line.split()[0] for line in "\n".join(lines).splitlines()]
    assert said == [word for word in begun if word != "Data:" or not streaming]


def dry_run_as_one_of_two(rank, file, output):
    output.with_name(f"printed-{rank}").write_text(call("train", file, "--dry-run").output)


def test_commands_print_it_once_and_of_every_variant_of_a_sweep(tmp_path):
    file, run = tmp_path / "recipe.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump(tiny_mapping(run)))
    assert killable.run_two(dry_run_as_one_of_two, file, run, seconds=120) == [0, 0]
    printed, other = ((tmp_path / f"printed-{rank}").read_text() for rank in range(2))
    assert re.search(r"processes: 2, fp32.*\n.*\nTokenising.*\nData: \d+ rows of 16 tokens", printed), printed
    assert printed.count("Time: about 0:00:") == 1 and other == ""
    result = call("train", file)
    assert re.search(r"^Reading .*\nModel.*\nTraining.*\nDevice.*\nMemory.*\nTokenising.*\nData", result.stderr)
    variants = {"a": None, "b": {"model": {"compose_rank": 1}}, "c": {"model": {"compose_gate": False}}}
    sweep = {"variants": variants, "seeds": [3, 4], "only": ["a", "c"]}
    file.write_text(yaml.safe_dump(tiny_mapping(tmp_path / "sweep", sweep=sweep)))
    result = call("train", file, "--dry-run")
    assert result.exit_code == 0 and result.stdout.count("Model: ") == result.stdout.count("Time: ") == 2
    assert not (tmp_path / "sweep").exists()


def test_a_plan_reads_neither_the_weights_of_a_pretrained_model_nor_a_tokenizer(tmp_path):
    config = AutoModelForCausalLM.from_pretrained(pretrained_path("dcformer-tiny")).config
    config.save_pretrained(tmp_path)
    values = {**tiny_mapping("run", tokenizer="nothing"), "model": {"pretrained": str(tmp_path)}}
    assert plan_run(Recipe.from_mapping(values)).vocab_size == config.vocab_size
