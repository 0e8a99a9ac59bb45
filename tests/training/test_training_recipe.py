"""Recipes: reading, extending, overriding, checking; and the learning rates of one."""

import math

import pytest
import torch
import yaml
from omegaconf.errors import OmegaConfBaseException
from tiny_recipes import tiny_mapping, tiny_recipe
from transformers import get_scheduler

from dcformer.training import Recipe, TrainingRecipe, load_recipe, merge_recipes
from dcformer.training.trainer import training_arguments


TEXT = {"tokenizer": {"train": 300}, "data": {"source": "a.txt", "documents": None, "evaluation": None}}


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
    assert (recipe.model["hidden_size"], recipe.model["compose_rank"]) == (16, 1)
    assert recipe.training.max_steps is None  # keys that exclude each other
    assert recipe.training.steps == 10
    merged = merge_recipes({"model": {"pretrained": "a/b", "compose_rank": 1}}, {"model": {"preset": "dcformer-405m"}})
    assert merged["model"] == {"preset": "dcformer-405m", "compose_rank": 1}


@pytest.mark.parametrize("given, read", [(None, None), ("wandb", ["wandb"]), (["a", "b"], ["a", "b"]), ([], [])])
def test_trackers_are_a_name_or_names_and_older_recipes_say_whether_tensorboard_is_one(given, read):
    for older, expected in (
        ({}, read),
        ({"tensorboard": True}, read),
        ({"tensorboard": False}, read if given is not None else ["none"]),
    ):
        assert tiny_recipe("run", training={"report_to": given, **older}).training.report_to == expected


def test_overrides_replace_values_of_any_depth_and_values_may_refer_to_others(tmp_path, write):
    mapping = tiny_mapping(tmp_path, data={"sequence_length": "${training.per_device_batch_size}"})
    del mapping["output"]
    overrides = ["training.max_steps=20", "training.learning_rate=3e-4", "data.evaluation=null", "seed=7"]
    recipe = load_recipe(write("a.yaml", mapping), [*overrides, "name=x=${model.hidden_size}"])
    assert (recipe.training.max_steps, recipe.training.learning_rate) == (20, 3e-4)
    assert (recipe.data.evaluation, recipe.seed, recipe.name) == (None, 7, "x=16")
    assert (recipe.data.sequence_length, recipe.output) == (2, "runs/x=16")
    with pytest.raises(ValueError, match="'seed'"):
        load_recipe("dcformer-tiny", ["seed"])


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"modle": {}}, "modle"),
        ({"model": {"hiden_size": 8}}, "hiden_size"),
        ({"model": {"preset": "dcformer-1b"}}, "dcformer-1b"),
        ({"model": {"preset": "dcformer-405m", "pretrained": "a/b"}}, "not both"),
        ({"model": {"model_type": "llama"}}, "llama"),
        ({"model": {"num_hidden_layers": 1_000_000_000}}, "num_hidden_layers must be at most 10,000, got 1,000,000,0"),
        ({"model": {"pretrained": "a/b", "output_initializer_range": 0.1}}, "output_initializer_range"),
        ({"output": ""}, "output must name a folder, got ''"),
        ({"data": {"sequence_length": 1}}, "data.sequence_length"),
        ({"data": {"documents": None}}, "data.documents"),
        ({"data": {"source": "a", "split": "train[:9]", "streaming": True}}, r"'train\[:9\]' is a slice"),
        ({"data": {"sample_by": "paragraph"}}, "paragraph"),
        ({"data": {"source": "a", "lines": [1, 2]}}, "data.lines"),
        ({"data": {"source": "a", "stages": [{"documents": 1, "questions": 1}]}}, "data.stages"),
        ({"data": {"source": "a", "evaluation": {"documents": 5}}}, "would read the training data"),
        ({"data": {"evaluation": 5}}, r"data.evaluation must be a mapping with keys such as .*\.source, got 5"),
        ({"training": {"max_steps": 0}}, "max_steps must be at least 1, got 0"),
        ({"training": {"max_steps": None}}, "exactly one of .*None and None"),
        ({"training": {"max_steps": 1, "tokens": 1}}, "exactly one of .*1 and 1"),
        ({"training": {"warmup_ratio": 1.5}}, "warmup_ratio.*1.5"),
        ({"training": {"max_grad_norm": 0.0}}, "max_grad_norm"),
        ({"training": {"optimizer": "muon"}}, "muon_learning_rate"),
        ({"training": {"optimizer": "muon", "muon_learning_rate": 0.02, "fsdp": True}}, "fsdp"),
        ({"model": {"attn_implementation": "flash_attention_2"}}, "flash_attention_2.* 2"),  # rows of a batch
        ({"training": {"report_to": 3}}, "training.report_to"),
        ({"tokenizer": 3}, "tokenizer must be a name, a folder or a mapping .*, got 3"),
        ({"tokenizer": {"train": 300}}, "set tokenizer=head_tasks"),
        ({"tokenizer": {"trian": 300}}, "tokenizer.trian"),
        ({"tokenizer": {"train": 256}}, "tokenizer.train must be at least 257, got 256"),
        ({"tokenizer": {"train": 300, "documents": 0}}, "tokenizer.documents must be at least 1, got 0"),
        ({"tokenizer": {"train": 300, "kind": "unigram"}}, r"tokenizer.kind.*'unigram'.*\['bpe'\]"),
        ({**TEXT, "model": {"vocab_size": 299}}, "vocab_size must be at least tokenizer.train, 300, got 299"),
        ({**TEXT, "model": {"pretrained": "a/b"}}, "pretrained 'a/b' do not know"),
        ({**TEXT, "data": {**TEXT["data"], "streaming": True}}, "tokenizer.documents is missing"),
        *(({name: 3}, f"{name} must be a mapping .*, got 3") for name in ("model", "data", "training", "sweep")),
    ],
)
def test_a_wrong_key_or_value_is_named(sections, words):
    with pytest.raises((ValueError, OmegaConfBaseException), match=words):
        tiny_recipe(**{"output": "run", **sections})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("max_steps=10", r"max_steps.*training\.max_steps\?$"),
        ("learning_rates=1", r"learning_rates.*training\.learning_rate\?$"),
        ("training.sequence_length=8", r"sequence_length.*data\.sequence_length\?$"),
        ("model.max_steps=10", r"max_steps.*training\.max_steps\?$"),
        ('sweep="a"', r"sweep must be a mapping .*, got 'a'"),
    ],
)
def test_a_wrong_override_is_named_with_the_key_of_another_part_that_was_meant(given, words):
    with pytest.raises((ValueError, OmegaConfBaseException), match=words):
        load_recipe("dcformer++-405m", [given])


@pytest.mark.parametrize("content", ["- 1", "some secret text", "secret:x:0\nroot:x:1", "[]", "secret: 1"])
def test_a_file_that_is_no_recipe_is_named_and_not_printed(content, write):
    for file in (write("a.yaml", content), write("b.yaml", "extends: a.yaml")):
        with pytest.raises(ValueError, match=r"a\.yaml' is no recipe") as caught:
            load_recipe(file)
        assert "secret" not in str(caught.value)


def test_a_recipe_extends_one_other_that_exists_and_not_in_a_circle(write):
    write("a.yaml", "extends: b.yaml")
    with pytest.raises(ValueError, match="circle"):
        load_recipe(write("b.yaml", "extends: a.yaml"))
    with pytest.raises(ValueError, match="extends must name one recipe, got 3"):
        load_recipe(write("a.yaml", "extends: 3"))
    with pytest.raises(FileNotFoundError, match=r"dcformer-404m.*dcformer\+\+-405m"):
        load_recipe("dcformer-404m")


def test_accumulation_follows_from_the_batch():
    training = TrainingRecipe(batch_tokens=4096, max_steps=1, per_device_batch_size=2)
    assert training.accumulation_steps(sequence_length=64, processes=1) == 32
    assert training.accumulation_steps(sequence_length=64, processes=4) == 8
    with pytest.raises(ValueError, match=r"multiple of 384 .*got 4096"):
        training.accumulation_steps(sequence_length=64, processes=3)


def test_the_rates_of_the_authors_405m_run():
    # dcformer_pp_405m.yml: learning_rate_schedule_steps 13500, warmup_steps_fraction 0.01, final fraction 0.1.
    arguments = training_arguments(tiny_recipe("run", training={"max_steps": 13500}))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    options = {"scheduler_specific_kwargs": arguments.lr_scheduler_kwargs}
    schedule = get_scheduler(
        arguments.lr_scheduler_type, optimizer, arguments.get_warmup_steps(13500), 13500, **options
    )
    # A rise of 135 steps from 0, then the cosine at its beginning, a third, two thirds, and its last step and end.
    expected = {0: 0.0, 27: 0.2, 134: 134 / 135, 135: 1.0, 4590: 0.775, 9045: 0.325}
    expected |= {13499: 0.1 + 0.9 * math.sin(math.pi / 2 / 13365) ** 2, 13500: 0.1}
    assert {step: schedule.lr_lambdas[0](step) for step in expected} == pytest.approx(expected, abs=1e-12)
