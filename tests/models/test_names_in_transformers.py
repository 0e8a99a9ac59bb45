"""Tools that get a path find the class that its config.json names, and Auto classes every head on the decoder."""

import re
import sys
import types

import pytest
import torch
import transformers
from tiny_models import random_tokens, tiny_config
from transformers.cli.serving import model_manager
from transformers.cli.serving.model_manager import ModelManager
from transformers.modelcard import TASK_MAPPING

import dcformer
from dcformer import DCFormerConfig, DCFormerForCausalLM, DCFormerForTokenClassification, DCFormerModel, pretrained_path
from dcformer.integrations import name_models_for_server


def test_importing_the_package_changes_neither_transformers_nor_how_modules_are_found():
    assert not any(hasattr(transformers, name) for name in dcformer.__all__)
    assert not any(type(finder).__module__.startswith("dcformer.") for finder in sys.meta_path)


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
    """Trainer (label smoothing, model cards), pipelines and lm-eval read the table."""
    family, ending = re.fullmatch("(DCFormer|DCPythia|DCViT)(Model|For.+)", name).groups()
    auto_class = getattr(transformers, f"AutoModel{ending.removeprefix('Model')}")
    assert auto_class._model_mapping[getattr(dcformer, f"{family}Config")] is getattr(dcformer, name)
    tasks = [task for task, table in TASK_MAPPING.items() if name in table.values()]
    assert tasks == ([] if ending == "Model" else [TASKS[ending]])


HEADS = {
    "sequence": transformers.AutoModelForSequenceClassification,
    "token": transformers.AutoModelForTokenClassification,
    "question": transformers.AutoModelForQuestionAnswering,
}


def make(head: str, family: str):
    return HEADS[head].from_config(tiny_config(family, pad_token_id=0, num_labels=3)).eval()


@pytest.mark.parametrize("family", ["dcformer", "dcpythia"])
@pytest.mark.parametrize("head", HEADS)
def test_auto_classes_make_save_and_load_every_head_and_its_loss_reaches_every_parameter(head, family, tmp_path):
    model, tokens = make(head, family), random_tokens(2, 9).clamp(min=1)
    assert type(model).__name__.startswith("DCPythiaFor" if family == "dcpythia" else "DCFormerFor")
    model.save_pretrained(tmp_path)
    loaded, info = HEADS[head].from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    with torch.no_grad():
        for ours, again in zip(model(tokens).values(), loaded(tokens).values()):
            if isinstance(ours, torch.Tensor):
                assert torch.equal(ours, again)
    labels = {
        "sequence": {"labels": torch.tensor([0, 2])},
        "token": {"labels": torch.randint(3, (2, 9))},
        "question": {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 8])},
    }[head]
    model.train()(tokens, **labels).loss.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_a_head_needs_no_registered_configuration():
    """A checkpoint that brings its code along may have a second copy of the configuration's class."""
    config = type("Copy", (DCFormerConfig,), {}).from_dict(tiny_config(classifier_dropout=0.0).to_dict())
    head = DCFormerForTokenClassification(config)
    assert type(head.model) is DCFormerModel and head.dropout.p == 0
    assert type(config) not in transformers.AutoModel._model_mapping


def test_the_server_of_transformers_loads_a_model(monkeypatch):
    monkeypatch.setattr(model_manager, "transformers", types.ModuleType("transformers"))
    name_models_for_server()
    manager = ModelManager(device="cpu", dtype="float32")
    model, _ = manager.load_model_and_processor(manager.process_model_name(pretrained_path("dcformer-tiny")))
    assert isinstance(model, DCFormerForCausalLM)
    manager.shutdown()
