"""Tools that are given a path find the class that its config.json names, as they do for models of Transformers."""

import re

import pytest
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cli.serving.model_manager import ModelManager

import dcformer
from dcformer import DCFormerForCausalLM, DCPythiaConfig, pretrained_path


def test_all_public_models_and_configurations_are_found_by_name():
    public = [getattr(dcformer, name) for name in dcformer.__all__]
    classes = [value for value in public if isinstance(value, type)]
    found = [value for value in classes if issubclass(value, PreTrainedConfig | PreTrainedModel)]
    assert DCFormerForCausalLM in found and DCPythiaConfig in found
    assert all(getattr(transformers, value.__name__) is value for value in found)


@pytest.mark.parametrize("name", [name for name in dcformer.__all__ if re.search("Model$|For[A-Z]", name)])
def test_the_auto_class_of_its_task_gives_every_public_model(name):
    family, ending = re.fullmatch("(DCFormer|DCPythia|DCViT)(Model|For.+)", name).groups()
    auto_class = getattr(transformers, f"AutoModel{ending.removeprefix('Model')}")
    config_class = getattr(dcformer, f"{family}Config")
    assert auto_class._model_mapping[config_class] is getattr(dcformer, name)


def test_the_server_of_transformers_loads_a_model():
    manager = ModelManager(device="cpu", dtype="float32")
    model, _ = manager.load_model_and_processor(manager.process_model_name(pretrained_path("dcformer-tiny")))
    assert isinstance(model, DCFormerForCausalLM)
    manager.shutdown()
