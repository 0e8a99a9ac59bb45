"""TRL's trainers work with these models as with those of Transformers, given as a model or a path."""

import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny_models import ANSWERS
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from dcformer.head_tasks import generate_documents


TINY = ANSWERS
TEXTS = [document["text"] for document in generate_documents(4, seed=0, lines=(2, 4))]
LINES = [text.rstrip("\n").rpartition("\n") for text in TEXTS]
PROMPTS, COMPLETIONS = [f"{lines[0]}\n" for lines in LINES], [lines[2] for lines in LINES]


@pytest.fixture
def fit(brief):
    """Trains for two steps and returns the losses; options go to the configuration."""

    def train(trainer_class, config_class, model, dataset, *, arguments=None, **options):
        values = {"per_device_train_batch_size": 2, "learning_rate": 1e-3, "bf16": False, **brief}
        trainer = trainer_class(
            model=model,
            args=config_class(**{**values, **options}),
            train_dataset=Dataset.from_dict(dataset),
            processing_class=AutoTokenizer.from_pretrained(TINY),
            **(arguments or {}),
        )
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    return train


@pytest.mark.parametrize(
    "options",
    [{"padding_free": True, "max_length": None}, {"packing": True, "max_length": 2048}],
    ids=["padding_free", "packed"],
)
def test_documents_of_one_row_have_the_loss_of_padded_rows(options, fit):
    """A trainer that is given a path loads the model itself."""
    batch = {"per_device_train_batch_size": len(TEXTS)}
    padded = fit(SFTTrainer, SFTConfig, TINY, {"text": TEXTS}, **batch)
    joined = fit(SFTTrainer, SFTConfig, TINY, {"text": TEXTS}, **batch, **options)
    assert padded[1] < padded[0]
    assert joined == pytest.approx(padded, abs=1e-4)  # losses of about 10 in float32


@pytest.mark.parametrize("source", ["path", "adapter"])
def test_preferences_train_a_model_of_a_path_or_an_adapter_alone(source, fit):
    """Without a reference model TRL loads one from the path by the name of the class in config.json."""
    preferences = {"prompt": PROMPTS, "chosen": COMPLETIONS, "rejected": COMPLETIONS[::-1]}
    model, arguments = TINY, {}
    if source == "adapter":
        model, arguments = (
            AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32),
            {"peft_config": LoraConfig(r=4)},
        )
        before = {name: weight.clone() for name, weight in model.named_parameters()}
    first, second = fit(DPOTrainer, DPOConfig, model, preferences, arguments=arguments, gradient_checkpointing=True)
    assert first == pytest.approx(math.log(2), abs=1e-5)  # the model is still its own reference
    assert second != first
    if source == "adapter":
        after = {name.replace("base_layer.", ""): weight for name, weight in model.named_parameters()}
        assert all(torch.equal(after[name], weight) for name, weight in before.items())
        adapters = {name: weight for name, weight in after.items() if "lora_B" in name}  # which begin at 0
        assert {name.split(".")[-4] for name in adapters} == {"qkv_proj"}
        assert all(weight.abs().max() > 0 for weight in adapters.values())


def test_group_relative_training_runs(fit):
    rewards = {"reward_funcs": lambda completions, **rest: [float(len(text)) for text in completions]}
    options = {"num_generations": 2, "max_completion_length": 5, "max_steps": 1}
    assert math.isfinite(*fit(GRPOTrainer, GRPOConfig, TINY, {"prompt": PROMPTS}, arguments=rewards, **options))
