"""Trainers of Transformers and TRL work with these models as with others, given as a model or a path."""

import math

import pytest
import torch
from datasets import Dataset
from tiny_models import ANSWERS, random_tokens, tiny_model
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, DataCollatorWithFlattening, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

from dcformer.head_tasks import generate_documents


DOCUMENTS = generate_documents(4, seed=0, lines=(2, 4))
LINES = [document["text"].rstrip("\n").rpartition("\n") for document in DOCUMENTS]
PROMPTS, COMPLETIONS = [f"{lines[0]}\n" for lines in LINES], [lines[2] for lines in LINES]
ROWS = [random_tokens(1, length, seed=length)[0].tolist() for length in (13, 5, 9, 17)]


@pytest.fixture
def fit(tmp_path):
    """Trains for two steps and returns the losses; options go to the configuration."""
    brief = {"output_dir": str(tmp_path), "max_steps": 2, "logging_steps": 1, "save_strategy": "no", "report_to": []}
    brief |= {"use_cpu": True, "disable_tqdm": True, "bf16": False}

    def train(trainer_class, config_class, model, dataset, *, arguments=None, **options):
        values = {"per_device_train_batch_size": 2, "learning_rate": 1e-3, **brief}
        trainer = trainer_class(
            model=model,
            args=config_class(**{**values, **options}),
            train_dataset=Dataset.from_dict(dataset),
            processing_class=AutoTokenizer.from_pretrained(ANSWERS),
            **(arguments or {}),
        )
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    return train


pad = DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(ANSWERS, padding_side="right"))


@pytest.mark.parametrize(
    ("collate", "options"),
    [
        (pad, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}),
        (pad, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}),
        (pad, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}),
        (DataCollatorWithFlattening(), {}),
    ],
    ids=["accumulated", "checkpointed", "checkpointed_reentrant", "one_row_without_padding"],
)
def test_no_way_of_saving_memory_changes_a_step(collate, options, fit):
    before, plain, other = tiny_model(), tiny_model(), tiny_model()
    sgd = {"per_device_train_batch_size": 4, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0}
    sgd |= {"lr_scheduler_type": "constant"}
    losses, other_losses = (
        fit(Trainer, TrainingArguments, model, {"input_ids": ROWS, "labels": ROWS}, arguments=collator, **sgd | changed)
        for model, collator, changed in (
            (plain, {"data_collator": pad}, {}),
            (other, {"data_collator": collate}, options),
        )
    )
    weights, others = dict(plain.named_parameters()), dict(other.named_parameters())
    assert max((weights[name] - weight).abs().max() for name, weight in before.named_parameters()) > 0.05
    # Two steps of SGD in float32 move parameters by up to 0.3; sums over documents run in another order.
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], atol=2e-4, rtol=0, msg=lambda text, n=name: f"{n}: {text}")
    assert losses == pytest.approx(other_losses, abs=1e-4)


def test_preferences_train_a_model_of_a_path(fit):
    """Without a reference model TRL loads one from the path by the name of the class in config.json."""
    preferences = {"prompt": PROMPTS, "chosen": COMPLETIONS, "rejected": COMPLETIONS[::-1]}
    first, second = fit(DPOTrainer, DPOConfig, ANSWERS, preferences, gradient_checkpointing=True)
    assert first == pytest.approx(math.log(2), abs=1e-5)  # the model is still its own reference
    assert second != first


def test_group_relative_training_runs(fit):
    rewards = {"reward_funcs": lambda completions, **rest: [float(len(text)) for text in completions]}
    options = {"num_generations": 2, "max_completion_length": 5, "max_steps": 1}
    assert math.isfinite(*fit(GRPOTrainer, GRPOConfig, ANSWERS, {"prompt": PROMPTS}, arguments=rewards, **options))
