"""Tools that get a path find the class that its config.json names, as they do for models of Transformers."""

import re

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from tiny_models import random_tokens, tiny_config, tiny_model
from transformers import PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments
from transformers.cli.serving.model_manager import ModelManager
from transformers.modelcard import TASK_MAPPING

import dcformer
from dcformer import DCFormerForCausalLM, DCFormerForTokenClassification, DCPythiaConfig, pretrained_path


def test_all_public_models_and_configurations_are_found_by_name():
    public = [getattr(dcformer, name) for name in dcformer.__all__]
    classes = [value for value in public if isinstance(value, type)]
    registered = [value for value in classes if issubclass(value, PreTrainedConfig | PreTrainedModel)]
    assert DCFormerForCausalLM in registered and DCPythiaConfig in registered
    assert all(getattr(transformers, value.__name__) is value for value in registered)


MODELS = [name for name in dcformer.__all__ if re.search("Model$|For[A-Z]", name)]
# Ending of a class -> the task that the Hub has for it.
TASKS = {
    "ForCausalLM": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForImageClassification": "image-classification",
}


@pytest.mark.parametrize("name", MODELS)
def test_the_auto_class_and_the_table_of_its_task_have_every_public_model(name):
    """Trainer's model cards, pipelines and lm-eval read the table."""
    family, ending = re.fullmatch("(DCFormer|DCPythia|DCViT)(Model|For.+)", name).groups()
    auto_class = getattr(transformers, f"AutoModel{ending.removeprefix('Model')}")
    assert auto_class._model_mapping[getattr(dcformer, f"{family}Config")] is getattr(dcformer, name)
    tasks = [task for task, table in TASK_MAPPING.items() if name in table.values()]
    assert tasks == ([] if ending == "Model" else [TASKS[ending]])


def smoothed_loss(model, tokens, labels, folder):
    """What Trainer optimises with `label_smoothing_factor=0.1`."""
    arguments = TrainingArguments(folder, label_smoothing_factor=0.1, report_to=[], use_cpu=True)
    return Trainer(model, arguments).compute_loss(model.eval(), {"input_ids": tokens, "labels": labels.clone()})


def smoothed(logits, labels):
    """Szegedy et al. (2016): a tenth of the probability of the target goes to all classes alike."""
    shares = 0.9 * torch.nn.functional.one_hot(labels, logits.shape[-1]) + 0.1 / logits.shape[-1]
    return -(shares * logits.log_softmax(-1)).sum(-1).mean()


@torch.no_grad()
@pytest.mark.parametrize("variant", ["dcformer", "dcpythia", "plain_gated_transformer"])
def test_label_smoothing_predicts_the_next_token(variant, tmp_path):
    model, tokens = tiny_model(variant), random_tokens(2, 12)
    expected = smoothed(model(tokens).logits[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(smoothed_loss(model, tokens, tokens, tmp_path), expected)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM"))  # starts with the same outputs
    torch.testing.assert_close(smoothed_loss(adapted, tokens, tokens, tmp_path), expected)


@torch.no_grad()
def test_label_smoothing_leaves_the_labels_of_a_classifier_where_they_are(tmp_path):
    model, tokens = DCFormerForTokenClassification(tiny_config(num_labels=5)).eval(), random_tokens(2, 12)
    expected = smoothed(model(tokens).logits, tokens % 5)
    torch.testing.assert_close(smoothed_loss(model, tokens, tokens % 5, tmp_path), expected)


def test_the_server_of_transformers_loads_a_model():
    manager = ModelManager(device="cpu", dtype="float32")
    model, _ = manager.load_model_and_processor(manager.process_model_name(pretrained_path("dcformer-tiny")))
    assert isinstance(model, DCFormerForCausalLM)
    manager.shutdown()
