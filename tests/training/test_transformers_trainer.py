"""Transformers' own Trainer on these models: the same step by every way of making batches and gradients."""

import pytest
import torch
from datasets import Dataset
from tiny_models import TINY, random_tokens, tiny_model
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from dcformer import pretrained_path


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
def steps(tmp_path):
    """Parameters after training on the documents, and the losses; options go to `TrainingArguments`."""

    def train(model, collate=pad, **options):
        values = {
            "output_dir": str(tmp_path),
            "max_steps": 2,
            "per_device_train_batch_size": 4,
            "optim": "sgd",
            "learning_rate": 0.1,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "bf16": False,
        }
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


def assert_same(one, other):
    # Two steps of SGD in float32 move parameters by up to 0.3; sums over documents run in another order.
    for name, weight in one[0].items():
        torch.testing.assert_close(weight, other[0][name], atol=2e-4, rtol=0, msg=lambda text, n=name: f"{n}: {text}")
    assert one[1] == pytest.approx(other[1], abs=1e-4)


@pytest.fixture
def plain(steps):
    before = {name: weight.detach().clone() for name, weight in tiny_model().named_parameters()}
    after = steps(tiny_model())
    assert max((after[0][name] - weight).abs().max() for name, weight in before.items()) > 0.05
    return after


@pytest.mark.parametrize(
    "options",
    [
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ],
    ids=["accumulated", "checkpointed", "checkpointed_reentrant"],
)
def test_saving_memory_changes_no_step(options, plain, steps):
    assert_same(steps(tiny_model(), **options), plain)


def test_a_row_without_padding_trains_as_padded_rows(plain, steps):
    assert_same(steps(tiny_model(), DataCollatorWithFlattening()), plain)


@pytest.mark.parametrize("variant", ["dcformer", "dcpythia"])
def test_bfloat16_follows_float32(variant, steps):
    exact, rounded = (steps(tiny_model(variant), max_steps=1, bf16=bf16)[1] for bf16 in (False, True))
    assert rounded == pytest.approx(exact, rel=0.02)  # 8 bits of mantissa
    assert rounded != exact


def test_noise_on_embeddings_is_added_while_training_and_gone_afterwards(plain, steps):
    model = tiny_model()
    _, losses = steps(model, neftune_noise_alpha=5.0)
    assert losses != plain[1]
    embeddings = model.get_input_embeddings()
    assert not embeddings._forward_hooks
    assert torch.equal(embeddings(torch.tensor([3])), embeddings.weight[3:4])


def test_the_collator_for_language_models_makes_labels_and_padding(steps):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(pretrained_path("dcformer-tiny"))
    assert tokenizer.pad_token_id == 1
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    batch = collate([{"input_ids": row["input_ids"]} for row in documents()])
    model = tiny_model()
    loss = model(**batch).loss
    kept = batch["labels"] != -100
    assert torch.equal(kept, batch["input_ids"] != 1)
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    scored = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    torch.testing.assert_close(loss, scored)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_vocabulary_grows_and_shrinks(tied, steps, tmp_path):
    model, rows = tiny_model(tie_word_embeddings=tied), TINY["vocab_size"]
    tokens = random_tokens(2, 9)
    with torch.no_grad():
        before = model(tokens).logits
    model.resize_token_embeddings(rows + 5)
    assert model.config.vocab_size == rows + 5
    torch.testing.assert_close(model(tokens).logits[..., :rows], before, atol=1e-5, rtol=0)  # other blocks of a product
    steps(model)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    model.save_pretrained(tmp_path / "grown")
    reloaded = type(model).from_pretrained(tmp_path / "grown").eval()
    assert torch.equal(reloaded(tokens).logits, model.eval()(tokens).logits)
    model.resize_token_embeddings(rows - 7)
    assert model(tokens.clamp(max=rows - 8)).logits.shape[-1] == rows - 7
