"""The packaged recipes of Table 3: each is complete, and builds a model of the size it is named for."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from dcformer.training.recipe import build_config, load_recipe, packaged_recipes


pytest.importorskip("yaml")

# Table 3 of the paper: layers, width, heads, learning rate, tokens; and the sizes that give the models their names.
SIZES = {
    "405m": (24, 1024, 16, 3e-4, 7e9, 405e6),
    "834m": (24, 1536, 24, 2.5e-4, 15e9, 834e6),
    "1.4b": (24, 2048, 32, 2e-4, 26e9, 1.4e9),
}
ARCHITECTURES = ("dcformer", "dcformer++", "transformer", "transformer++")
NAMES = [f"{architecture}-{size}" for size in SIZES for architecture in ARCHITECTURES]


def meta_model(name: str):
    config = build_config(load_recipe(name).model)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", NAMES)
def test_recipe_is_of_the_size_that_table_3_says(name):
    layers, hidden, heads, learning_rate, tokens, parameters = SIZES[name.rpartition("-")[2]]
    recipe = load_recipe(name)
    model = meta_model(name)
    config = model.config

    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (layers, hidden, heads)
    assert config.head_dim == 64
    assert model.num_parameters() == pytest.approx(parameters, rel=0.055)
    assert not config.tie_word_embeddings
    assert recipe.training.learning_rate == learning_rate
    assert recipe.training.tokens == tokens
    assert recipe.training.batch_tokens == 2**19
    assert recipe.data.sequence_length == config.max_position_embeddings == 2048
    assert recipe.name == name
    assert recipe.output == f"runs/{name}"


@pytest.mark.parametrize("name", NAMES)
def test_recipe_trains_as_appendix_c_says(name):
    training = load_recipe(name).training

    assert (training.adam_beta1, training.adam_beta2, training.weight_decay) == (0.9, 0.95, 0.1)
    assert (training.warmup_ratio, training.final_learning_rate_ratio, training.max_grad_norm) == (0.01, 0.1, 1.0)
    for processes in (1, 2, 8, 64):
        assert training.accumulation_steps(2048, processes) == 64 // processes


@pytest.mark.parametrize("name", NAMES)
def test_recipe_has_the_architecture_of_its_name(name):
    config = build_config(load_recipe(name).model)
    is_improved, composes = "++" in name, name.startswith("dcformer")

    assert config.mlp_type == ("gated" if is_improved else "plain")
    assert config.norm_type == ("rms_norm" if is_improved else "layer_norm")
    assert config.position_embedding_type == ("rope" if is_improved else "learned")
    assert config.attention_bias == config.mlp_bias == (not is_improved)
    assert is_improved or config.intermediate_size == 4 * config.hidden_size
    assert config.composes_heads == composes
    # Baselines of the paper have no windows (its footnote 7).
    alternating = ["sliding_attention", "full_attention"] * 12
    assert config.layer_types == (alternating if composes else ["full_attention"] * 24)
    assert config.sliding_window == (256 if composes else None)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("plus", ["", "++"])
def test_composition_adds_few_parameters_and_nothing_else(size, plus):
    composing, plain = meta_model(f"dcformer{plus}-{size}"), meta_model(f"transformer{plus}-{size}")
    added = {name: p.numel() for name, p in composing.named_parameters() if ".compose." in name}

    assert {name for name, _ in composing.named_parameters()} - set(added) == {n for n, _ in plain.named_parameters()}
    assert composing.num_parameters() - plain.num_parameters() == sum(added.values())
    assert sum(added.values()) < 0.03 * plain.num_parameters()


@pytest.mark.parametrize("name", NAMES)
def test_tokenizer_fits_and_data_are_the_pile(name):
    recipe = load_recipe(name)

    assert recipe.tokenizer == "EleutherAI/pythia-6.9b"
    assert build_config(recipe.model).vocab_size >= 50277  # ids of that tokenizer
    assert recipe.data.streaming
    assert recipe.data.evaluation.split == "validation"


def test_all_of_them_are_packaged():
    assert set(NAMES) <= set(packaged_recipes())
