"""Recipes: reading, extending, overriding, checking."""

import itertools
import math

import numpy as np
import pytest
import torch
import yaml
from tiny_recipes import tiny_mapping, tiny_recipe

from dcformer.training import Recipe, TrainingRecipe, load_recipe, packaged_recipes
from dcformer.training import merge_recipes as merged
from dcformer.training.trainer import learning_rate_schedule


@pytest.fixture
def write(tmp_path):
    def write(name, values):
        path = tmp_path / name
        path.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
        return path

    return write


def test_a_recipe_reads_as_it_is_written(tmp_path, write):
    recipe = load_recipe(write("a.yaml", tiny_mapping(tmp_path)))
    assert recipe == tiny_recipe(tmp_path)
    assert recipe.training.adam_beta2 == 0.95
    assert Recipe.from_mapping(yaml.safe_load(yaml.safe_dump(recipe.to_mapping()))) == recipe


def test_mappings_of_an_extended_recipe_merge_and_values_replace(tmp_path, write):
    write("base.yaml", tiny_mapping(tmp_path, training={"max_steps": 3}))
    (tmp_path / "folder").mkdir()
    extending = {"extends": "../base.yaml", "model": {"compose_rank": 1}, "training": {"tokens": 640}}
    recipe = load_recipe(write("folder/a.yaml", extending))
    assert recipe.model["hidden_size"] == 16
    assert recipe.model["compose_rank"] == 1
    assert recipe.training.max_steps is None  # the other one of two that exclude each other
    assert recipe.training.steps == 10


def test_a_preset_replaces_the_weights_of_the_extended_recipe():
    base = {"model": {"pretrained": "some/model", "compose_rank": 1}}
    assert merged(base, {"model": {"preset": "dcformer-405m"}})["model"] == {
        "preset": "dcformer-405m",
        "compose_rank": 1,
    }


def test_overrides_replace_values_of_any_depth(tmp_path, write):
    overrides = ["training.max_steps=20", "training.learning_rate=3e-4", "data.evaluation=null", "seed=7", "name=x=y"]
    recipe = load_recipe(write("a.yaml", tiny_mapping(tmp_path)), overrides)
    assert (recipe.training.max_steps, recipe.training.learning_rate) == (20, 3e-4)
    assert (recipe.data.evaluation, recipe.seed, recipe.name) == (None, 7, "x=y")


def test_numbers_that_yaml_reads_otherwise_are_numbers():
    recipe = tiny_recipe("run", training={"tokens": 7e9, "max_steps": None, "learning_rate": "3e-4", "warmup_ratio": 0})
    assert recipe.training.tokens == 7_000_000_000
    assert isinstance(recipe.training.tokens, int)
    assert recipe.training.learning_rate == 3e-4


def test_packaged_recipes_are_found_by_name():
    assert "dcformer++-405m" in packaged_recipes()
    assert load_recipe("dcformer++-405m") == load_recipe("dcformer++-405m.yaml")


def test_the_output_folder_is_named_after_the_run():
    mapping = tiny_mapping("run")
    del mapping["output"]
    assert Recipe.from_mapping(mapping).output == "runs/tiny"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"modle": {}}, "'modle' is no key of a recipe; did you mean model"),
        ({"model": {"hiden_size": 8}}, "'model.hiden_size' is no key .*hidden_size"),
        ({"model": {"preset": "dcformer-1b"}}, "model.preset must be one of dcformer-1.4b, .*got 'dcformer-1b'"),
        ({"model": {"preset": "dcformer-405m", "pretrained": "a/b"}}, "not both"),
        ({"model": {"model_type": "llama"}}, "model.model_type must be dcformer or dcpythia, got 'llama'"),
        ({"model": 3}, "model must be a mapping, got 3"),
        ({"seed": "zero"}, "seed must be an integer, got 'zero'"),
        ({"training": {"max_steps": 1.5}}, "training.max_steps must be an integer or null, got 1.5"),
        ({"training": {"max_steps": True}}, "training.max_steps must be an integer or null, got True"),
        ({"training": {"max_steps": 0}}, "training.max_steps must be at least 1, got 0"),
        ({"training": {"max_steps": None}}, "exactly one of training.tokens and training.max_steps, got None and None"),
        ({"training": {"max_steps": 1, "tokens": 1}}, "exactly one of .*got 1 and 1"),
        ({"training": {"precision": "fp16"}}, "training.precision must be 'bf16' or 'fp32', got 'fp16'"),
        ({"training": {"compile": "yes"}}, "training.compile must be true or false, got 'yes'"),
        ({"training": {"learning_rate": -1}}, r"training.learning_rate must be positive and finite, got -1"),
        ({"training": {"warmup_ratio": 1.0}}, r"training.warmup_ratio must be in \[0, 1\), got 1.0"),
        ({"training": {"weight_decay": -0.1}}, "training.weight_decay must be finite and not negative"),
        ({"data": {"packing": "tight"}}, "data.packing"),
        ({"sweep": [1]}, "sweep must be a mapping or null"),
        (
            {"model": {"attn_implementation": "flash_attention_2"}, "training": {"per_device_batch_size": 2}},
            "'flash_attention_2' keeps packed documents apart only in batches of one row, got .* 2; set it to 1",
        ),
    ],
)
def test_a_wrong_key_or_value_is_named(sections, message):
    with pytest.raises(ValueError, match=message):
        tiny_recipe("run", **sections)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2", r"a.yaml' is no YAML \(line \d+: "),
        ("- a\n- b", r"must hold a mapping of keys to values, got \['a', 'b'\]"),
        ("extends: a.yaml", "extend each other in a circle: a.yaml extends a.yaml"),
        ("extends: [a, b]", "extends must name one recipe"),
        ("{}", "tokenizer is missing|data is missing|training.batch_tokens is missing"),
    ],
    ids=["no_yaml", "no_mapping", "circle", "two_bases", "empty"],
)
def test_a_wrong_file_is_named(text, message, write):
    with pytest.raises(ValueError, match=message):
        load_recipe(write("a.yaml", text))


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"a.yaml' is no text in UTF-8"):
        load_recipe(tmp_path / "a.yaml")


@pytest.mark.parametrize("name", ["missing.yaml", "../recipes/dcformer++-405m", "dcformer-404m"])
def test_a_missing_recipe_names_those_there_are(name):
    with pytest.raises(FileNotFoundError, match=r"There is no recipe .*dcformer\+\+-405m"):
        load_recipe(name)


def test_values_may_refer_to_others(tmp_path, write):
    mapping = tiny_mapping(tmp_path, data={"sequence_length": "${training.per_device_batch_size}"})
    recipe = load_recipe(write("a.yaml", mapping), ["training.per_device_batch_size=4", "name=of ${model.hidden_size}"])
    assert (recipe.data.sequence_length, recipe.name) == (4, "of 16")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("${training.steps}", r"Recipe '.*a.yaml': seed cannot be read \(.*'training.steps' not found\); correct it"),
        ("${", r"Recipe '.*a.yaml': seed cannot be read \("),
        ("???", r"Recipe '.*a.yaml': seed must be an integer, got '\?\?\?'"),
        ("2024-01-01", r"a.yaml': seed cannot be read \(Value 'date' is not a supported"),
    ],
    ids=["unknown", "unfinished", "missing", "date"],
)
def test_a_reference_that_leads_nowhere_is_named(value, message, tmp_path, write):
    with pytest.raises(ValueError, match=message):
        load_recipe(write("a.yaml", tiny_mapping(tmp_path)), [f"seed={value}"])


def test_an_override_without_a_value_is_refused(tmp_path, write):
    with pytest.raises(ValueError, match=r"--set must be key=value.*got 'seed'"):
        load_recipe(write("a.yaml", tiny_mapping(tmp_path)), ["seed"])


def test_accumulation_follows_from_the_batch():
    training = TrainingRecipe(batch_tokens=4096, max_steps=1, per_device_batch_size=2)
    assert training.accumulation_steps(sequence_length=64, processes=1) == 32
    assert training.accumulation_steps(sequence_length=64, processes=4) == 8
    with pytest.raises(ValueError, match=r"multiple of 384 .* x 3 processes\), got 4096; take 3840 or 4224"):
        training.accumulation_steps(sequence_length=64, processes=3)


def learning_rate_factor(step, total, warmup_ratio, final_ratio):
    """The rate of a step as a share of the highest."""
    ratios = {"warmup_ratio": warmup_ratio, "final_learning_rate_ratio": final_ratio}
    training = TrainingRecipe(batch_tokens=1, max_steps=total, **ratios)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return learning_rate_schedule(optimizer, training, total).lr_lambdas[0](step)


@pytest.mark.parametrize(
    ("step", "factor"),
    [
        (0, 0.0),  # the rise of 135 steps begins at rate 0
        (27, 0.2),
        (134, 134 / 135),
        (135, 1.0),  # the highest rate comes with the first step behind the rise
        (4590, 0.775),  # a third of the cosine: 0.1 + 0.9 * 3 / 4
        (9045, 0.325),  # two thirds of it: 0.1 + 0.9 * 1 / 4
        (13499, 0.1 + 0.9 * math.sin(math.pi / 2 / 13365) ** 2),  # the last step is one short of the end
        (13500, 0.1),
        (20000, 0.1),  # and past it
    ],
)
def test_the_rates_of_the_authors_405m_run(step, factor):
    # dcformer_pp_405m.yml: learning_rate_schedule_steps 13500, warmup_steps_fraction 0.01, final fraction 0.1.
    assert learning_rate_factor(step, 13500, warmup_ratio=0.01, final_ratio=0.1) == pytest.approx(factor, abs=1e-12)


def rates_piece_by_piece(total, warmup_ratio, final_ratio):
    """All rates of a run: the rise interpolated between its ends, the fall as the square of half a quarter wave."""
    rise = math.floor(total * warmup_ratio)
    rising = np.interp(np.arange(rise), [0, max(rise, 1)], [0.0, 1.0])
    falling = final_ratio + (1 - final_ratio) * np.cos(np.linspace(0, np.pi / 2, total - rise, endpoint=False)) ** 2
    return [*rising, *falling]


@pytest.mark.parametrize(
    ("total", "warmup_ratio", "final_ratio"),
    [
        (1, 0.0, 0.1),
        (1, 0.9, 0.1),
        (7, 0.9, 0.0),
        (50, 0.03, 0.1),
        (1000, 0.01, 0.1),
        (1999, 0.0299, 0.1),  # a rise of 59.77 steps is one of 59
        (64, 0.0, 1.0),
        (3, 1 - 2**-53, 0.5),
    ],
    ids=["one_step", "no_rise", "rise", "short", "paper", "fraction", "without_an_end", "nearly_all_rise"],
)
def test_every_step_has_the_rate_of_an_independent_formula(total, warmup_ratio, final_ratio):
    factors = [learning_rate_factor(step, total, warmup_ratio, final_ratio) for step in range(total)]
    # Of float64: two formulas of the same numbers, each of a few operations.
    np.testing.assert_allclose(factors, rates_piece_by_piece(total, warmup_ratio, final_ratio), rtol=0, atol=1e-14)
    assert learning_rate_factor(total + 5, total, warmup_ratio, final_ratio) == pytest.approx(final_ratio)


@pytest.mark.parametrize("total", [1, 2, 7, 99])
def test_runs_too_short_for_a_rise_begin_with_the_highest_rate(total):
    factors = [learning_rate_factor(step, total, 0.01, 0.1) for step in range(total)]
    assert factors[0] == 1
    assert all(0.1 < later < earlier for earlier, later in itertools.pairwise(factors))
