"""Runs write a model, a log and curves, and train every parameter as the paper does."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
import yaml
from command_line import call
from huggingface_hub import ModelCard
from tiny_models import tiny_model
from tiny_recipes import tiny_mapping, tiny_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator, pipeline

from dcformer import pretrained_path
from dcformer.training import Recipe, fingerprint_inputs, flops_per_token, load_recipe, train
from dcformer.training.data import build_datasets
from dcformer.training.optimizer import build_optimizer
from dcformer.training.trainer import count_answers


DRAWS_CURVES = True
RUN = {"max_steps": 15, "logging_steps": 5, "evaluation_steps": 15, "save_steps": 15, "learning_rate": 1e-2}
MUON = {"optimizer": "muon", "muon_learning_rate": 0.02}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run: its recipe, its folder and what it returned."""
    folder = tmp_path_factory.mktemp("run")
    recipe = tiny_recipe(folder, training={**RUN, "report_to": "tensorboard"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # of accelerate's configuration; the recipe says fp32
        return recipe, folder, train(recipe)


def records(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_the_loss_falls_and_the_log_has_its_cost(run):
    recipe, folder, result = run
    training = [record for record in records(folder) if "loss" in record]
    (evaluation,) = [record for record in records(folder) if "eval_loss" in record]
    assert [record["step"] for record in training] == [5, 10, 15] and evaluation["step"] == 15
    assert training[0]["loss"] > 5.5  # near the logarithm of the vocabulary
    assert training[2]["loss"] < training[0]["loss"] - 0.3
    assert result["loss"] == training[2]["loss"]
    config = AutoModelForCausalLM.from_pretrained(result["folder"]).config
    per_step = flops_per_token(config, 16) * recipe.training.batch_tokens
    assert [record["flops"] / per_step for record in [*training, evaluation]] == [5, 10, 15, 15]
    assert 0 < training[0]["seconds"] < training[1]["seconds"] < training[2]["seconds"] <= evaluation["seconds"]
    assert all(record["grad_norm"] > 0 and record["tokens_per_second"] > 0 for record in training)
    # Steps 4, 9 and 14, counted from 0, of 15 without a rise.
    shares = [0.1 + 0.9 * math.cos(math.pi / 2 * step / 15) ** 2 for step in (4, 9, 14)]
    rates = [recipe.training.learning_rate * share for share in shares]
    assert [record["learning_rate"] for record in training] == pytest.approx(rates)
    assert (folder / "losses.png").stat().st_size > 1000
    assert list((folder / "tensorboard").iterdir())
    assert load_recipe(folder / "recipe.yaml") == recipe


def test_the_final_folder_is_a_model_with_the_loss_that_was_logged(run):
    recipe, _, result = run
    model = AutoModelForCausalLM.from_pretrained(result["folder"])
    tokenizer = AutoTokenizer.from_pretrained(result["folder"])
    assert model.config.use_cache and model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.eos_token_id in (tokenizer.eos_token_id, [tokenizer.eos_token_id])
    with torch.no_grad():
        loss = model(**default_data_collator(build_datasets(recipe.data, tokenizer)[1]), use_cache=False).loss.item()
    assert loss == pytest.approx(result["evaluation_loss"], abs=1e-5)
    assert math.exp(loss) == pytest.approx(result["perplexity"], rel=1e-4)
    text = pipeline("text-generation", model=result["folder"])("John has an apple", max_new_tokens=3, do_sample=False)
    assert text[0]["generated_text"].startswith("John has an apple")
    card = Path(result["folder"], "README.md").read_text()
    for row in ("| started from | random weights |", "| data | head_tasks |", "| steps | 15 |", "| seed | 0 |"):
        assert row in card


def test_bf16_keeps_float32_parameters_and_plain_models_run_through_sdpa(tmp_path):
    plain = {"compose_pre": False, "compose_post": False}
    training = {"max_steps": 1, "precision": "bf16"}
    result = train(tiny_recipe(tmp_path, model=plain, data={"evaluation": None}, training=training))
    model = AutoModelForCausalLM.from_pretrained(result["folder"], dtype="auto")
    assert model.dtype == torch.float32 and model.config._attn_implementation == "sdpa"
    assert result["evaluation_loss"] is None


def start_from(output, tokenizer, pretrained):
    values = tiny_mapping(output, tokenizer=tokenizer, training={"max_steps": 1, "learning_rate": 1e-9})
    return Recipe.from_mapping({**values, "model": {"pretrained": pretrained}})


def test_a_run_can_start_from_a_bundled_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = start_from("run", "dcformer-tiny", "dcformer-tiny")
    result = train(recipe)
    model, bundled = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        for folder in (result["folder"], pretrained_path("dcformer-tiny"))
    )
    for name, weight in bundled.items():
        torch.testing.assert_close(model[name], weight, rtol=0, atol=1e-6, msg=name)
    card = ModelCard.load(Path(result["folder"], "README.md"))
    assert "| started from | dcformer-tiny |" in card.text
    folder = pretrained_path("dcformer-tiny")
    assert card.data.license == ModelCard.load(Path(folder, "README.md")).data.license is not None
    assert fingerprint_inputs(start_from("run", folder, folder)) == result["fingerprints"]
    assert fingerprint_inputs(recipe, local_only=True) == result["fingerprints"]
    for names in (("dcformer-tiny", "dcformer-tny"), ("dcformer-tny", "dcformer-tiny")):
        with pytest.raises(FileNotFoundError, match="no bundled model 'dcformer-tny'"):
            train(start_from("misspelt", *names))


@pytest.mark.parametrize("optimizer", [{}, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("variant", ["all_branches", "dcpythia", "plain_transformer_with_learned_positions"])
def test_only_norms_and_biases_do_not_decay_and_rates_are_of_muon_adamw_or_composition(variant, optimizer):
    model = tiny_model(variant)
    training = tiny_recipe("run", training={**optimizer, "compose_learning_rate": 4e-5}).training
    groups = {
        id(parameter): group for group in build_optimizer(model, training).param_groups for parameter in group["params"]
    }
    for name, parameter in model.named_parameters():
        is_dynamic = ".compose." in name and not name.endswith("static_weight")
        uses_muon = optimizer and parameter.dim() == 2 and "embed" not in name and "lm_head" not in name
        group = groups[id(parameter)]
        assert group["weight_decay"] == (0.0 if "norm" in name or name.endswith("bias") else 0.1), name
        assert group["lr"] == (4e-5 if is_dynamic else 0.02 if uses_muon else 3e-3), name
        assert uses_muon or (group["betas"], group["eps"]) == ((0.9, 0.95), 1e-8), name


def test_an_answer_is_right_if_all_of_its_tokens_are():
    labels = torch.tensor([[-100, 5, 6, -100, 7, -100], [8, -100, -100, 9, 9, 9]])
    predicted = torch.tensor([[0, 5, 6, 0, 0, 0], [8, 8, 0, 9, 0, 9]])
    assert [count.item() for count in count_answers(predicted, labels)] == [4, 2]


def test_the_command_trains_and_prints_the_folder_of_the_model(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tiny_mapping("elsewhere")))
    arguments = ["train", recipe, "--output", tmp_path / "run", "--set", "training.max_steps=2"]
    first, again, anew = (call(*arguments, *more) for more in ((), (), ("--no-resume",)))
    assert first.exit_code == 0, first.output
    words = re.escape(str(tmp_path / "run" / "final"))
    words += r": 2 steps, loss 6\.\d+, evaluation loss 6\.\d+ \(perplexity \d+\.\d+\), \d\d? s"
    assert re.fullmatch(f"{words}\n", first.stdout) and re.fullmatch(f"{words}\n", anew.stdout)
    assert re.fullmatch(f"{words}, resumed from step 2\n", again.stdout)
    for figure in ("loss", "evaluation loss"):
        assert first.stderr.count(f"step 2 of 2: {figure} 6.") == 1
    result = call(*arguments[:-1], "training.max_stps=2")
    assert result.exit_code == 1 and "max_stps" in result.stderr and len(result.stderr.splitlines()) == 1
