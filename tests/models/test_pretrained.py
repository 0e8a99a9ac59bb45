"""The bundled models: they load offline, differ in composition alone, and answer."""

import importlib.util
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, pipeline

import dcformer
from dcformer.pretrained import pretrained_names
from dcformer.training import load_recipe


SCRIPT = Path(__file__).parents[2] / "scripts" / "pack_pretrained.py"
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
        assert weights.stat().st_size <= 4e6


def test_they_differ_in_composition_and_the_width_of_the_mlp_alone(models):
    composing, plain = (models[name].config.to_dict() for name in NAMES)
    different = {key for key in composing if composing[key] != plain.get(key)}
    assert different - {"_name_or_path"} == {"compose_pre", "compose_post", "intermediate_size"}
    counts = [models[name].num_parameters() for name in NAMES]
    assert abs(counts[0] - counts[1]) <= 0.01 * counts[1]


@pytest.mark.parametrize("name", NAMES)
def test_they_are_what_their_recipes_describe(name, models):
    for key, value in load_recipe(name).model.items():
        assert getattr(models[name].config, key) == value, key


def test_answers_come_in_batches_and_end_with_the_line():
    generator = pipeline("text-generation", model=dcformer.pretrained_path("dcformer-tiny"), dtype="float32")
    prompts = [
        "There are Paris, Paris, Mumbai. Which is different? The city in",
        "< Ruth has a violin. Carol has a beetle. Ronald has blueberries. >. Ruth has a kind of",
    ]
    together = generator(prompts, batch_size=2, return_full_text=False, max_new_tokens=20)
    alone = [generator(prompt, return_full_text=False, max_new_tokens=20) for prompt in prompts]
    assert [answer for (answer,) in together] == [answer for (answer,) in alone]
    assert [answer["generated_text"] for (answer,) in together] == ["India\n", "musical instrument\n"]


@pytest.fixture
def pack_model():
    spec = importlib.util.spec_from_file_location("pack_pretrained", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.pack_model


def test_packing_keeps_the_weights_and_a_card(pack_model, tmp_path, models):
    (tmp_path / "README.md").write_text("card")
    pack_model(dcformer.pretrained_path("dcformer-tiny"), tmp_path)
    packed = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32")
    for name, parameter in models["dcformer-tiny"].named_parameters():
        assert packed.get_parameter(name).equal(parameter), name
    assert packed.generation_config.eos_token_id == models["dcformer-tiny"].generation_config.eos_token_id
    assert (tmp_path / "README.md").read_text() == "card"
