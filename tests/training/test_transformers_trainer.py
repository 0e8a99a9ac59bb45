"""Transformers' own Trainer on these models: the same step by every way of making batches and gradients."""

import pytest
import torch
from datasets import Dataset
from tiny_models import random_tokens, tiny_model
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments


LENGTHS = [13, 5, 9, 17]
PADDING = 66  # no document holds it


def documents() -> list[dict[str, list[int]]]:
    rows = [random_tokens(1, length, vocab_size=PADDING, seed=length)[0].tolist() for length in LENGTHS]
    return [{"input_ids": row, "labels": row} for row in rows]


def pad(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    missing = [width - len(row["input_ids"]) for row in rows]
    return {
        "input_ids": torch.tensor([row["input_ids"] + [PADDING] * n for row, n in zip(rows, missing)]),
        "labels": torch.tensor([row["labels"] + [-100] * n for row, n in zip(rows, missing)]),
        "attention_mask": torch.tensor([[1] * len(row["input_ids"]) + [0] * n for row, n in zip(rows, missing)]),
    }


@pytest.fixture
def steps(brief):
    """Parameters after training on the documents, and the losses; options go to `TrainingArguments`."""

    def train(model, collate=pad, **options):
        values = {"per_device_train_batch_size": 4, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0}
        values |= {"lr_scheduler_type": "constant", **brief}
        trainer = Trainer(
            model=model,
            args=TrainingArguments(**{**values, **options}),
            train_dataset=Dataset.from_list(documents()),
            data_collator=collate,
        )
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return {name: weight.detach().clone() for name, weight in model.named_parameters()}, losses

    return train


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
def test_no_way_of_saving_memory_changes_a_step(collate, options, steps):
    before = dict(tiny_model().named_parameters())
    (weights, losses), (others, other_losses) = steps(tiny_model()), steps(tiny_model(), collate, **options)
    assert max((weights[name] - weight).abs().max() for name, weight in before.items()) > 0.05
    # Two steps of SGD in float32 move parameters by up to 0.3; sums over documents run in another order.
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], atol=2e-4, rtol=0, msg=lambda text, n=name: f"{n}: {text}")
    assert losses == pytest.approx(other_losses, abs=1e-4)
