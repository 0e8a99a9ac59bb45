"""Recipes that nothing could run, or that YAML would read otherwise than they are meant, are refused at once."""

import re
import time

import psutil
import pytest
import yaml
from tiny_models import tiny_config
from tiny_recipes import tiny_mapping, tiny_recipe
from transformers import AutoModelForCausalLM

from dcformer.common.yaml_text import read_yaml, write_yaml
from dcformer.experiments.recipe import SweepRecipe, plan_sweep
from dcformer.training import Recipe, load_recipe, train
from dcformer.training.recipe import build_config
from dcformer.training.size import check_size, count_parameters


HUGE = 10**30


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"num_hidden_layers": 10**9}}, "model.num_hidden_layers must be at most 10,000, got 1000000000"),
        ({"model": {"sliding_window": HUGE}}, "model.sliding_window must be at most 2,147,483,647, got 1000000000000"),
        ({"model": {"hidden_size": 2**62}}, "model.hidden_size must be at most 2,147,483,647, got 4611686018427387904"),
        ({"model": {"rope_parameters": {"rope_theta": HUGE}}}, "model.rope_parameters.rope_theta must be at most"),
        ({"data": {"documents": HUGE}}, "data.documents must be at most 10,000,000, got 1000000000000"),
        ({"data": {"evaluation": {"documents": HUGE}}}, "data.evaluation.documents must be at most 10,000,000, got"),
        ({"data": {"sequence_length": HUGE}}, "data.sequence_length must be at most 16,777,216, got"),
        ({"data": {"lines": [1, HUGE]}}, "data.lines must be at most 1,000, got"),
        ({"training": {"max_steps": HUGE}}, "training.max_steps must be at most 1,000,000,000,000, got 1000000000000"),
        ({"training": {"max_steps": None, "tokens": HUGE}}, "training.tokens must be at most"),
        ({"training": {"batch_tokens": HUGE}}, "training.batch_tokens must be at most 1,000,000,000, got"),
        (
            {"training": {"max_steps": 10**12, "batch_tokens": 10**9}},
            "training.max_steps 1,000,000,000,000 x training.batch_tokens 1,000,000,000 must be at most",
        ),
        ({"training": {"save_steps": HUGE}}, "training.save_steps must be at most"),
        ({"training": {"learning_rate": 10**400}}, "training.learning_rate must be a number, got 1000"),
        ({"seed": 2**32}, "seed must be at most 4,294,967,295, got 4294967296"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"seed": 2**20_000}, "seed must be an integer, got an integer of 20,001 bits"),
    ],
)
def test_numbers_that_nothing_could_reach_are_refused_at_once(sections, message):
    started = time.monotonic()
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny_recipe("run", **sections)
    assert time.monotonic() - started < 5


def test_a_sweep_has_bounds_too(tmp_path):
    for key, value in (("evaluation_documents", HUGE), ("seeds", [2**32])):
        with pytest.raises(ValueError, match=rf"sweep.{key} must be at most"):
            SweepRecipe.from_mapping({"seeds": [0], "variants": {"a": {}}, key: value})
    variants = {"a": {"model": {"num_hidden_layers": 10**9}}}
    with pytest.raises(ValueError, match=r"sweep.variants.a: model.num_hidden_layers must be at most 10,000"):
        plan_sweep(tiny_recipe(tmp_path, sweep={"seeds": [0], "variants": variants}))


def test_a_model_that_this_machine_cannot_hold_is_refused_with_its_sizes(tmp_path):
    sizes = {"hidden_size": 2**20, "intermediate_size": 2**22, "num_hidden_layers": 1000, "num_attention_heads": 64}
    message = r"model.hidden_size 1,048,576, .* has [\d,]{15,} parameters, which take [\d,]+ GB .* machine has"
    with pytest.raises(ValueError, match=message):
        train(tiny_recipe(tmp_path, model=sizes))
    with pytest.raises(ValueError, match=r"model: hidden_size must be at least 1 and at most 134,217,728"):
        train(tiny_recipe(tmp_path, model={**sizes, "hidden_size": 2**30}))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["all_branches", "dcpythia", "plain_transformer_with_learned_positions"])
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_parameters_are_counted_without_making_a_model(name, layers):
    values = {**tiny_config(name).to_dict(), "num_hidden_layers": layers, "layer_types": None}
    config = type(tiny_config(name)).from_dict(values)
    model = AutoModelForCausalLM.from_config(config)
    assert count_parameters(config) == sum(parameter.numel() for parameter in model.parameters())


def test_models_of_the_paper_fit_where_their_weights_do(monkeypatch):
    config = build_config({"preset": "dcformer-405m"})
    memory = type("Memory", (), {"total": count_parameters(config) * 4})
    monkeypatch.setattr(psutil, "swap_memory", lambda: type("Swap", (), {"total": 0}))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    check_size(config)
    memory.total -= 1
    with pytest.raises(ValueError, match="parameters, which take 2 GB in float32, and this machine has 2 GB"):
        check_size(config)


@pytest.fixture
def write(tmp_path):
    def write(text, name="a.yaml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def bomb(levels, base="[x, x]"):
    lines = [f"a0: &a0 {base}"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


def merging_bomb(levels):
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nname: a\nseed: 2\n", r"a.yaml' gives 'seed' twice \(lines 1 and 3\); remove one"),
        ("training: {tokens: 1, tokens: 2}", r"a.yaml' gives 'tokens' twice \(line 1\)"),
        ("[" * 10_000, "a.yaml' nests more than 50 levels"),
        ("[" * 100 + "]" * 100, "a.yaml' nests more than 50 levels"),
        ("a: &a [*a]", "a.yaml' nests more than 50 levels"),
        (bomb(12), r"a.yaml' holds more than 100,000 values, aliases written out"),
        (merging_bomb(12), "a.yaml' holds more than 100,000 values"),
        ("", "a.yaml' is empty; a recipe is a mapping"),
        ("# nothing\n", "a.yaml' is empty"),
        ("a\x00b", "a.yaml' is no YAML"),
        (b"\xff\xfe", "a.yaml' is no text in UTF-8"),
        ("a: b\n---\nc: d", r"a.yaml' is no YAML \(line 2: "),
        ("a: !!python/object/apply:os.system [true]", r"a.yaml' is no YAML \(line 1: could not determine"),
        ("seed: " + "9" * 5000, r"a.yaml' holds a value that cannot be read \(line 1: Exceeds"),
        ("name: 2024-13-45", r"a.yaml' holds a value that cannot be read \(line 1: month must be"),
        ("? [a, b]\n: c", r"a.yaml' is no YAML \(line 1: "),
        ("extends: [a]", r"extends must name one recipe, got \['a'\] in '.*a.yaml'"),
        ("x" * 2**18, r"a.yaml' has 262,144 bytes, too many for a recipe"),
        ("- " + "x" * 10_000, r"must hold a mapping of keys to values, got \['x+\.\.\.x+'\]"),
        ("model: {hidden_act: " + "x" * 5000 + "}", r"Recipe '.*a.yaml': "),
    ],
    ids=lambda value: "",
)
def test_a_text_that_is_no_recipe_is_refused_at_once_and_named(text, message, write):
    file = write(text)
    started = time.monotonic()
    with pytest.raises(ValueError, match=message) as raised:
        load_recipe(file)
    assert time.monotonic() - started < 60
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("overrides", [["a={b: 1, b: 2}"], ["a=" + "[" * 60 + "]" * 60]], ids=["twice", "deep"])
def test_values_of_the_command_line_are_read_with_the_same_care(overrides, write):
    with pytest.raises(ValueError, match=r"the value of a (gives 'b' twice|nests more)"):
        load_recipe("dcformer-tiny", overrides)


def test_a_file_that_cannot_be_read_is_named(write, monkeypatch):
    file = write("seed: 1")

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_text", denied)
    with pytest.raises(OSError, match=r"a.yaml' cannot be read: Permission denied; correct its permissions"):
        load_recipe(file)


def test_a_folder_is_no_recipe(tmp_path):
    with pytest.raises(FileNotFoundError, match="is a folder; name the YAML file"):
        load_recipe(tmp_path)


def test_errors_of_values_name_the_recipe(tmp_path, write):
    file = write(yaml.safe_dump(tiny_mapping(tmp_path)))
    with pytest.raises(ValueError, match=r"Recipe '.*a.yaml': training.max_steps must be at least 1, got 0"):
        load_recipe(file, ["training.max_steps=0"])
    with pytest.raises(ValueError, match=r"Recipe '.*a.yaml': model: num_attention_heads must divide"):
        load_recipe(file, ["model.num_attention_heads=3"])


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "+1e-3", "1.e-3", "0.1e-2", ".1e-2", "1.0e-3"])
def test_numbers_with_an_exponent_are_numbers_everywhere(text, tmp_path, write):
    mapping = yaml.safe_dump(tiny_mapping(tmp_path, training={"learning_rate": "LR"}, model={"norm_eps": "LR"}))
    recipe = load_recipe(write(mapping.replace("LR", text)))
    assert recipe.training.learning_rate == recipe.model["norm_eps"] == 1e-3
    assert read_yaml(f"[{text}, {{a: {text}}}]", "it") == [1e-3, {"a": 1e-3}]


@pytest.mark.parametrize("text", ["1e3", "e3", "1e", "abc", "1:30", "true", "~", "1e-3x", "7"])
def test_text_stays_text_when_it_is_written(text):
    assert read_yaml(write_yaml({"name": text}), "it") == {"name": text}


def test_aliases_and_merged_mappings_may_be_used(tmp_path):
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: *a\n"
    assert read_yaml(text, "it") == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": {"x": 1, "y": 2}}


def test_every_recipe_is_written_as_it_is_read(tmp_path):
    recipe = tiny_recipe(tmp_path, name="1e3")
    assert Recipe.from_mapping(read_yaml(write_yaml(recipe.to_mapping()), "it")) == recipe
