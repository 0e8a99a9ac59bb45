"""What a run leaves behind, and that it trains every parameter as the paper does."""

import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from tiny_models import tiny_model
from tiny_recipes import tiny_mapping, tiny_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from transformers.utils import logging as transformers_logging
from typer.testing import CliRunner

from dcformer.cli import app
from dcformer.training import Recipe, load_recipe, train
from dcformer.training.checkpoints import newest_checkpoint
from dcformer.training.data import build_datasets, collate
from dcformer.training.order import EndlessStream, RowOrder, WholeBatches
from dcformer.training.run import build_tokenizer
from dcformer.training.trainer import RecipeTrainer, count_answers, training_arguments


DRAWS_CURVES = True
RUN = {"max_steps": 15, "logging_steps": 5, "evaluation_steps": 15, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run: its recipe, its folder and what it returned."""
    folder = tmp_path_factory.mktemp("run")
    recipe = tiny_recipe(folder, training=RUN)
    return recipe, folder, train(recipe)


def records(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def make_trainer(recipe, model):
    arguments = training_arguments(recipe, processes=1)
    tokenizer = build_tokenizer(recipe.tokenizer)
    rows = build_datasets(recipe.data, tokenizer, recipe.seed)
    level = transformers_logging.get_verbosity()
    try:
        return RecipeTrainer(recipe, model, arguments, tokenizer, *rows)
    finally:
        transformers_logging.set_verbosity(level)  # which a trainer changes for the whole process


def test_training_leaves_the_messages_of_transformers_as_they_were(tmp_path):
    first = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_info()
    try:
        train(tiny_recipe(tmp_path, training={"max_steps": 1}))
        assert transformers_logging.get_verbosity() == transformers_logging.INFO
    finally:
        transformers_logging.set_verbosity(first)


def test_the_loss_falls(run):
    losses = [record["loss"] for record in records(run[1]) if "loss" in record]
    assert losses[0] > 5.5  # near the logarithm of the vocabulary
    assert losses[-1] < losses[0] - 0.3


def test_a_loaded_model_has_the_loss_that_was_logged(run):
    recipe, _, result = run
    model = AutoModelForCausalLM.from_pretrained(result["folder"])
    tokenizer = AutoTokenizer.from_pretrained(result["folder"])
    _, rows = build_datasets(recipe.data, tokenizer, recipe.seed)
    batch = collate(rows)
    with torch.no_grad():
        loss = model(**batch, use_cache=False).loss.item()
    assert loss == pytest.approx(result["evaluation_loss"], abs=1e-5)
    assert math.exp(loss) == pytest.approx(result["perplexity"], rel=1e-4)


def test_the_final_folder_is_a_model_like_any_other(run):
    folder = run[2]["folder"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.use_cache
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert torch.tensor(model.generation_config.eos_token_id).flatten().tolist() == [tokenizer.eos_token_id]
    text = pipeline("text-generation", model=folder)("John has an apple", max_new_tokens=3, do_sample=False)
    assert text[0]["generated_text"].startswith("John has an apple")


def test_the_final_folder_has_a_card_that_says_how_the_model_was_trained(run):
    folder = Path(run[2]["folder"])
    text = (folder / "README.md").read_text()
    assert ModelCard(text).data.pipeline_tag == "text-generation" and "# tiny\n" in text
    for row in ("| started from | random weights |", "| data | head_tasks |", "| steps | 15 |", "| seed | 0 |"):
        assert row in text
    assert f"last evaluation loss, nats per token | {run[2]['evaluation_loss']:.4f} |" in text
    assert "[More Information" not in text


def test_the_log_tells_what_a_run_needs_to_be_judged(run):
    recipe, folder, result = run
    training = [record for record in records(folder) if "loss" in record]
    assert [record["step"] for record in training] == [5, 10, 15]
    assert all({"loss", "grad_norm", "learning_rate", "tokens_per_second", "epoch"} <= set(r) for r in training)
    evaluation = [record for record in records(folder) if "eval_loss" in record]
    assert [record["step"] for record in evaluation] == [15]
    assert result["loss"] == training[-1]["loss"]
    # Steps 4, 9 and 14, counted from 0, of 15 without a rise.
    shares = [0.1 + 0.9 * math.cos(math.pi / 2 * step / 15) ** 2 for step in (4, 9, 14)]
    rates = [recipe.training.learning_rate * share for share in shares]
    assert [record["learning_rate"] for record in training] == pytest.approx(rates)
    assert (folder / "losses.png").stat().st_size > 1000


def test_the_stored_recipe_is_the_run(run):
    recipe, folder, _ = run
    assert load_recipe(folder / "recipe.yaml") == recipe


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "gradient_checkpointing"])
def test_every_compose_parameter_gets_a_gradient_in_every_layer(checkpointing, tmp_path, monkeypatch):
    norms = {}

    def remember(self, model):
        for name, parameter in model.named_parameters():
            norms.setdefault(name, []).append(0.0 if parameter.grad is None else parameter.grad.norm().item())
        return clip(self, model)

    clip = RecipeTrainer._clip_grad_norm
    monkeypatch.setattr(RecipeTrainer, "_clip_grad_norm", remember)
    model = {"compose_static": True, "num_hidden_layers": 3}
    train(tiny_recipe(tmp_path, model=model, training={"max_steps": 2, "gradient_checkpointing": checkpointing}))
    composing = {name: values for name, values in norms.items() if ".compose." in name}
    assert len(composing) == 3 * 4
    assert all(len(values) == 2 and min(values) > 0 for values in norms.values()), norms


def test_gradient_checkpointing_trains_the_same_model(run, tmp_path):
    _, folder, _ = run
    train(tiny_recipe(tmp_path, training={**RUN, "gradient_checkpointing": True}))
    assert [r.get("loss") for r in records(tmp_path)] == pytest.approx([r.get("loss") for r in records(folder)])


def test_accumulated_passes_are_one_batch(run, tmp_path):
    _, folder, _ = run
    train(tiny_recipe(tmp_path, training={**RUN, "per_device_batch_size": 4}))
    for record, other in zip(records(tmp_path), records(folder)):
        assert record.get("loss") == pytest.approx(other.get("loss"), abs=1e-5)


def test_bf16_keeps_float32_parameters(tmp_path):
    result = train(tiny_recipe(tmp_path, data={"evaluation": None}, training={"max_steps": 1, "precision": "bf16"}))
    assert AutoModelForCausalLM.from_pretrained(result["folder"], dtype="auto").dtype == torch.float32


def test_a_plain_model_trains_through_sdpa(tmp_path):
    result = train(tiny_recipe(tmp_path, model={"compose_pre": False, "compose_post": False}))
    model = AutoModelForCausalLM.from_pretrained(result["folder"])
    assert model.config._attn_implementation == "sdpa"
    assert not any("compose" in name for name, _ in model.named_parameters())


def test_a_run_can_start_from_weights(run, tmp_path):
    _, _, result = run
    recipe = tiny_recipe(tmp_path, training={"max_steps": 1, "learning_rate": 1e-9})
    recipe = Recipe.from_mapping({**recipe.to_mapping(), "model": {"pretrained": result["folder"]}})
    assert train(recipe)["evaluation_loss"] == pytest.approx(result["evaluation_loss"], abs=1e-5)


def test_the_seed_decides_initialisation_and_order(tmp_path):
    first, again, other = (
        train(tiny_recipe(tmp_path / name, seed=seed, training={"max_steps": 1}))["loss"]
        for name, seed in (("first", 3), ("again", 3), ("other", 4))
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("variant", ["all_branches", "dcpythia", "plain_transformer_with_learned_positions"])
def test_norms_and_biases_do_not_decay_and_the_rest_does(variant, tmp_path):
    model = tiny_model(variant)
    trainer = make_trainer(tiny_recipe(tmp_path), model)
    decaying, others = trainer.create_optimizer().param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert all("norm" in names[id(p)] or names[id(p)].endswith("bias") for p in others["params"])
    assert not any("norm" in names[id(p)] or names[id(p)].endswith("bias") for p in decaying["params"])
    assert len(decaying["params"]) + len(others["params"]) == len(names)
    composing = [name for name in names.values() if ".compose." in name]
    assert set(composing) <= {names[id(p)] for p in decaying["params"]}
    assert "model.embed_tokens.weight" in {names[id(p)] for p in decaying["params"]}


def test_the_optimiser_is_that_of_the_paper(tmp_path):
    trainer = make_trainer(tiny_recipe(tmp_path), tiny_model())
    optimiser = trainer.create_optimizer()
    assert isinstance(optimiser, torch.optim.AdamW)
    assert all(group["betas"] == (0.9, 0.95) and group["eps"] == 1e-8 for group in optimiser.param_groups)
    assert trainer.args.max_grad_norm == 1.0


MUON = {"optimizer": "muon", "muon_learning_rate": 0.02}


def test_muon_trains_the_matrices_of_layers_and_adamw_all_else(tmp_path):
    model = tiny_model("all_branches")
    trainer = make_trainer(tiny_recipe(tmp_path, training=MUON), model)
    matrices, *by_adamw = trainer.create_optimizer().param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    by_muon = {names[id(p)] for p in matrices["params"]}
    assert by_muon == {
        n for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n and "lm_head" not in n
    }
    for group in by_adamw:
        assert group["lr"] == 3e-3
        assert all((parameter.dim() > 1) == (group["weight_decay"] == 0.1) for parameter in group["params"])
    assert {group["weight_decay"] for group in by_adamw} == {0.0, 0.1}
    assert sum(len(group["params"]) for group in (matrices, *by_adamw)) == len(names)


def test_the_two_rates_of_muon_and_adamw_rise_and_fall_together(tmp_path):
    trainer = make_trainer(tiny_recipe(tmp_path, training={**MUON, "max_steps": 10, "warmup_ratio": 0.3}), tiny_model())
    trainer.create_optimizer_and_scheduler(num_training_steps=10)
    rates = []
    for _ in range(10):
        rates.append([group["lr"] for group in trainer.optimizer.param_groups])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    assert rates[3] == pytest.approx([0.02, 3e-3, 3e-3])
    assert all(muon == pytest.approx(adamw * 0.02 / 3e-3) and adamw == other for muon, adamw, other in rates)
    assert rates[0] == [0, 0, 0] and rates[9][0] < rates[6][0] < rates[3][0]


@pytest.mark.parametrize("optimizer", [{}, MUON], ids=["adamw", "muon"])
def test_compose_weights_may_have_a_rate_of_their_own(tmp_path, optimizer):
    model = tiny_model("all_branches")
    trainer = make_trainer(tiny_recipe(tmp_path, training={**optimizer, "compose_learning_rate": 4e-5}), model)
    groups = trainer.create_optimizer().param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    by_rate = {group["lr"]: set() for group in groups}
    for group in groups:
        by_rate[group["lr"]] |= {names[id(parameter)] for parameter in group["params"]}
    dynamic = {name for name in names.values() if ".compose." in name and not name.endswith("static_weight")}
    assert by_rate[4e-5] == dynamic and len(dynamic) < sum(".compose." in name for name in names.values())
    assert set(by_rate) == {4e-5, 3e-3, *([0.02] if optimizer else [])}
    assert sum(len(group["params"]) for group in groups) == len(names)
    with pytest.raises(ValueError, match=r"training\.compose_learning_rate must be positive"):
        tiny_recipe(tmp_path, training={"compose_learning_rate": 0.0})


def test_a_rate_of_muon_is_of_muon_alone(tmp_path):
    for training in ({"optimizer": "muon"}, {"muon_learning_rate": 0.02}, {**MUON, "muon_learning_rate": 0.0}):
        with pytest.raises(ValueError, match=r"training\.muon_learning_rate"):
            tiny_recipe(tmp_path, training=training)


def test_muon_needs_its_torch_and_whole_matrices(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"training\.fsdp divides"):
        tiny_recipe(tmp_path, training={**MUON, "fsdp": True})
    trainer = make_trainer(tiny_recipe(tmp_path, training=MUON), tiny_model())
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ValueError, match=r"needs torch 2\.9"):
        trainer.create_optimizer()


def test_an_answer_is_right_if_all_of_its_tokens_are():
    labels = torch.tensor([[-100, 5, 6, -100, 7, -100], [8, -100, -100, 9, 9, 9]])
    predicted = torch.tensor([[1, 5, 0, 1, 7, 1], [8, 1, 1, 9, 9, 9]])
    answers, right = count_answers(predicted, labels)
    assert (int(answers), int(right)) == (4, 3)


def test_rows_of_stages_keep_their_order():
    assert list(RowOrder(rows=3, total=7, seed=None)) == [0, 1, 2, 0, 1, 2, 0]


def test_rows_are_all_read_before_any_is_read_again():
    order = list(RowOrder(rows=5, total=12, seed=0))
    assert sorted(order[:5]) == sorted(order[5:10]) == [0, 1, 2, 3, 4]
    assert order[:5] != order[5:10]
    assert len(order) == len(RowOrder(5, 12, 0)) == 12
    assert order == list(RowOrder(5, 12, 0)) != list(RowOrder(5, 12, 1))


def test_a_stream_begins_again():
    rows = iter(EndlessStream([{"number": 1}, {"number": 2}]))
    assert [next(rows)["number"] for _ in range(5)] == [1, 2, 1, 2, 1]
    with pytest.raises(ValueError, match="hold no rows"):
        next(iter(EndlessStream([])))


def test_an_evaluation_is_filled_up_with_rows_without_loss():
    rows = WholeBatches([{"labels": [number, 7]} for number in range(3)], multiple=4)
    assert [rows[number]["labels"] for number in range(len(rows))] == [[0, 7], [1, 7], [2, 7], [-100, -100]]
    assert len(WholeBatches([{"labels": [0]}] * 4, multiple=4)) == 4


def test_the_command_trains_and_says_where_the_model_is(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tiny_mapping("elsewhere")))
    arguments = ["train", str(recipe), "--output", str(tmp_path / "run"), "--set", "training.max_steps=2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert f"{tmp_path / 'run' / 'final'}: 2 steps, loss 6." in result.stdout
    assert "step 2 of 2: loss 6." in result.stderr
    assert newest_checkpoint(tmp_path / "run").name == "checkpoint-2"


def test_the_command_hands_sweeps_over(tmp_path, monkeypatch):
    sweeps = []
    monkeypatch.setattr(
        "dcformer.experiments.runner.run_sweep", lambda recipe, resume: sweeps.append((recipe.sweep, resume))
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tiny_mapping(tmp_path, sweep={"seeds": [0, 1]})))
    assert CliRunner().invoke(app, ["train", str(recipe)]).exit_code == 0
    assert CliRunner().invoke(app, ["train", str(recipe), "--no-resume"]).exit_code == 0
    assert sweeps == [({"seeds": [0, 1]}, True), ({"seeds": [0, 1]}, False)]


def test_tensorboard_is_missed_in_one_sentence(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("transformers.integrations.is_tensorboard_available", lambda: False)
    train(tiny_recipe(tmp_path, training={"max_steps": 1, "tensorboard": True}))
    assert [record.message for record in caplog.records if "TensorBoard is not installed" in record.message]
