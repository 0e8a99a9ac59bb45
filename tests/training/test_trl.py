"""TRL's trainers take these models as they take those of Transformers: as a model or as a path."""

import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from dcformer import pretrained_path
from dcformer.head_tasks import generate_documents


TINY = pretrained_path("dcformer-tiny")
TEXTS = [document["text"] for document in generate_documents(4, seed=0, lines=(2, 4))]
LINES = [text.rstrip("\n").rpartition("\n") for text in TEXTS]
PROMPTS, COMPLETIONS = [f"{lines[0]}\n" for lines in LINES], [lines[2] for lines in LINES]
# Marks what the assistant says, without which TRL cannot leave out the rest.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture
def model():
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)


@pytest.fixture
def fit(tokenizer, tmp_path):
    """Trains for two steps and returns the trainer; its configuration takes the options."""

    def train(trainer_class, config_class, model, dataset, *, peft_config=None, arguments=None, **options):
        values = {
            "output_dir": str(tmp_path),
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
        }
        trainer = trainer_class(
            model=model,
            args=config_class(**{**values, **options}),
            train_dataset=Dataset.from_dict(dataset),
            processing_class=tokenizer,
            peft_config=peft_config,
            **(arguments or {}),
        )
        trainer.train()
        return trainer

    return train


def losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    "options",
    [{}, {"packing": True, "max_length": 64}],
    ids=["padded", "packed"],
)
def test_supervised_training_lowers_the_loss(options, model, fit):
    trainer = fit(SFTTrainer, SFTConfig, model, {"text": [TEXTS[0]] * 4}, learning_rate=1e-2, **options)
    first, second = losses(trainer)
    assert second < first


@pytest.mark.parametrize(
    "options",
    [{"padding_free": True, "max_length": None}, {"packing": True, "max_length": 2048}],
    ids=["padding_free", "packed"],
)
def test_documents_of_one_row_have_the_loss_of_padded_rows(options, fit):
    """A trainer that is given a path loads the model itself."""
    batch = {"per_device_train_batch_size": len(TEXTS), "max_steps": 1}
    padded = fit(SFTTrainer, SFTConfig, TINY, {"text": TEXTS}, **batch)
    joined = fit(SFTTrainer, SFTConfig, TINY, {"text": TEXTS}, **batch, **options)
    assert losses(joined) == pytest.approx(losses(padded), abs=1e-4)  # losses of about 10 in float32


def test_only_an_adapter_is_trained_with_lora(model, fit):
    trainer = fit(
        SFTTrainer, SFTConfig, model, {"text": TEXTS}, peft_config=LoraConfig(r=4), gradient_checkpointing=True
    )
    trained = {name.split(".")[-4] for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    assert trained == {"qkv_proj"}
    assert all(math.isfinite(loss) for loss in losses(trainer))


def test_the_loss_can_be_that_of_the_assistants_tokens(model, tokenizer, fit):
    tokenizer.chat_template = CHAT_TEMPLATE
    chats = [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        for prompt, completion in zip(PROMPTS, COMPLETIONS)
    ]
    trainer = fit(SFTTrainer, SFTConfig, model, {"messages": chats}, assistant_only_loss=True)
    batch = next(iter(trainer.get_train_dataloader()))
    for row, labels in zip(batch["input_ids"], batch["labels"]):
        scored = tokenizer.decode(row[labels != -100])
        assert scored in tokenizer.decode(row) and scored.split() != tokenizer.decode(row).split()


PREFERENCES = {"prompt": PROMPTS, "chosen": COMPLETIONS, "rejected": COMPLETIONS[::-1]}


@pytest.mark.parametrize("road", ["path", "model", "with_a_reference", "adapter"])
def test_preferences_train_on_every_road(road, model, fit):
    """Without a reference model TRL loads one from the path by the name of the class in config.json."""
    arguments = {}
    if road == "with_a_reference":
        arguments["ref_model"] = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    trainer = fit(
        DPOTrainer,
        DPOConfig,
        TINY if road == "path" else model,
        PREFERENCES,
        peft_config=LoraConfig(r=4) if road == "adapter" else None,
        arguments=arguments,
    )
    first, second = losses(trainer)
    assert first == pytest.approx(math.log(2), abs=1e-5)  # the model is still its own reference
    assert second != first


def test_group_relative_training_runs(fit):
    trainer = fit(
        GRPOTrainer,
        GRPOConfig,
        TINY,
        {"prompt": PROMPTS},
        arguments={"reward_funcs": lambda completions, **rest: [float(len(text)) for text in completions]},
        num_generations=2,
        max_completion_length=5,
        max_steps=1,
    )
    assert all(math.isfinite(loss) for loss in losses(trainer))
