"""The bundled models: they load offline, and differ in composition alone."""

import runpy
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import dcformer
from dcformer.pretrained import pretrained_names
from dcformer.training import load_recipe


ROOT = Path(__file__).parents[2]
NAMES = ("dcformer-tiny", "transformer-tiny")


@pytest.fixture(scope="module")
def models():
    return {
        name: AutoModelForCausalLM.from_pretrained(dcformer.pretrained_path(name), dtype="float32").eval()
        for name in NAMES
    }


def test_both_are_there_and_small():
    assert pretrained_names() == NAMES
    for name in NAMES:
        weights = Path(dcformer.pretrained_path(name)) / "model.safetensors"
        assert weights.stat().st_size <= 8e6


def test_they_are_what_the_recipe_of_the_study_describes(models):
    recipe = load_recipe(str(ROOT / "research/language_modelling/recipes/code.yaml"))
    variants = runpy.run_path(str(ROOT / "scripts/pack_pretrained.py"))["VARIANTS"]
    for name in NAMES:
        change = recipe.sweep["variants"][variants[name]].get("model", {})
        described = dcformer.DCFormerConfig(**recipe.model | change)
        for key in recipe.model | change:
            assert getattr(models[name].config, key) == getattr(described, key), key
    composing, plain = (models[name].config.to_dict() for name in NAMES)
    different = {key for key in composing if composing[key] != plain.get(key)}
    assert different - {"_name_or_path"} == {"compose_pre", "compose_post"}


def test_packing_keeps_the_weights_and_a_card(tmp_path, models):
    (tmp_path / "README.md").write_text("card")
    pack_model = runpy.run_path(str(ROOT / "scripts/pack_pretrained.py"))["pack_model"]
    pack_model(dcformer.pretrained_path("dcformer-tiny"), tmp_path)
    packed = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32")
    for name, parameter in models["dcformer-tiny"].named_parameters():
        assert packed.get_parameter(name).equal(parameter), name
    assert packed.generation_config.eos_token_id == models["dcformer-tiny"].generation_config.eos_token_id
    assert (tmp_path / "README.md").read_text() == "card"
