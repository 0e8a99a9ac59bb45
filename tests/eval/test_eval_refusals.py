"""What an evaluation refuses in one sentence before it begins: models, the Hub, windows, numbers that are none."""

import json
import shutil
import time

import pytest


pytest.importorskip("lm_eval")

import datasets
import huggingface_hub
import torch
from safetensors.torch import load_file, save_file
from test_eval_scoring import save_model, save_tokenizer
from typer.testing import CliRunner

from dcformer.cli import app
from dcformer.eval import provenance, runner
from dcformer.eval.report import build_report
from dcformer.eval.runner import evaluate
from dcformer.head_tasks.comparison import compare_models


TENSOR = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def model(fixtures, tmp_path_factory):
    """A random model of 64 positions."""
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, "dcformer")
    save_tokenizer(folder, fixtures)
    return folder


@pytest.fixture
def copied(model, tmp_path):
    return shutil.copytree(model, tmp_path / "copied")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    goals = [{"goal": f"Goal {n}", "sol1": "one way", "sol2": "another", "label": n % 2} for n in range(3)]
    for name in ("piqa", "empty", "wikitext2"):
        (folder / name).mkdir()
    datasets.Dataset.from_list(goals).to_parquet(folder / "piqa" / "validation.parquet")
    text = " \n = Title = \n \n" + " ".join(f"word {number}" for number in range(300)) + " \n"
    (folder / "wikitext2" / "wikitext2_test.txt").write_text(text)
    return folder


@pytest.fixture
def run(model, data, tmp_path):
    def run(*names, **options):
        settings = {"tasks": "piqa", "dtype": "float32", "device": "cpu", "data_dir": data, **options}
        return evaluate([str(name) for name in names or (model,)], output=tmp_path / "out", **settings)

    return run


# Models


def halve(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def as_torch_file(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder / "pytorch_model.bin"


def index_of_shards(folder, shards):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


DAMAGES = {
    "weights cut": (lambda f: halve(f / "model.safetensors"), r"model\.safetensors' is truncated or damaged"),
    "weights empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "is truncated or damaged"),
    "torch file cut": (lambda f: halve(as_torch_file(f)), r"pytorch_model\.bin' is truncated or damaged"),
    "torch file empty": (lambda f: as_torch_file(f).write_bytes(b""), r"pytorch_model\.bin' is truncated"),
    "shard missing": (
        lambda f: index_of_shards(
            f, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        ),
        r"model-00002-of-00002\.safetensors' is missing",
    ),
    "index cut": (lambda f: index_of_shards(f, "nothing"), r"model\.safetensors\.index\.json' is damaged"),
    "configuration cut": (lambda f: halve(f / "config.json"), r"config\.json' is damaged"),
    "configuration empty": (lambda f: (f / "config.json").write_text(""), r"config\.json' is damaged"),
    "tokenizer cut": (lambda f: halve(f / "tokenizer.json"), "The tokenizer '.*' cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_is_named_before_data_are_read(damage, run, model, copied, monkeypatch):
    do, words = DAMAGES[damage]
    do(copied)
    monkeypatch.setattr(runner, "make_plan", None)
    with pytest.raises((ValueError, FileNotFoundError), match=words) as raised:
        run(model, copied)
    assert "\n" not in str(raised.value) and "Hub" not in str(raised.value)


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_model_that_lacks_weights_is_not_scored_with_random_ones(run, copied, tmp_path):
    change_weights(copied, lambda weights: weights.pop(TENSOR))
    with pytest.raises(ValueError, match=rf"The weights of '.*' lack {TENSOR}; copy or download them again"):
        run(copied)
    with pytest.raises(ValueError, match=f"lack {TENSOR}"):
        compare_models([str(copied)], documents=1, with_authors=False)
    assert not (tmp_path / "out").exists()


def test_nan_in_the_weights_is_told_and_no_result_is_written(run, copied, tmp_path, monkeypatch):
    change_weights(copied, lambda weights: weights[TENSOR].fill_(float("nan")))
    for stock in (False, True):
        with pytest.raises(ValueError, match=r"piqa, 0-shot, .* log-likelihood of document \d of .* is not a number"):
            run(copied, stock=stock)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=r"an answer in document 0 of held_out with .* is not a number"):
        compare_models([str(copied)], documents=1, with_authors=False)


@pytest.mark.parametrize("where", ["file", "nowhere/at/all", "./nowhere"])
def test_a_wrong_path_of_a_later_model_is_told_before_the_first_is_read(where, run, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr(provenance, "find_model", None)
    with pytest.raises(FileNotFoundError, match=rf"There is no model folder '{where}'|'{where}' is a file"):
        run(model, where)
    monkeypatch.setattr("dcformer.head_tasks.comparison.find_model", None)
    with pytest.raises(FileNotFoundError, match=rf"There is no model folder '{where}'|'{where}' is a file"):
        compare_models([where], str(model))


# The Hub


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """A Hub that refuses every connection at once, and an empty cache."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        huggingface_hub.constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}",
    )
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.setattr(huggingface_hub.constants, name, str(tmp_path / "cache"), raising=False)


@pytest.mark.parametrize("suite", ["table4", "head_tasks"])
@pytest.mark.parametrize(
    "options", [("somebody/model",), ("--tokenizer", "somebody/tokenizer")], ids=["model", "tokenizer"]
)
def test_a_name_on_the_hub_without_network_is_one_sentence_at_once(suite, options, no_network, model, data, tmp_path):
    models = () if options[0] == "somebody/model" else (str(model),)
    start = time.monotonic()
    arguments = [
        "eval",
        *models,
        *options,
        "--suite",
        suite,
        "--data-dir",
        str(data),
        "--output",
        str(tmp_path / "out"),
    ]
    failed = CliRunner().invoke(app, arguments)
    assert failed.exit_code == 1 and failed.stderr.count("\n") == 1, failed.output
    assert failed.stderr.startswith(("Error: There is no model 'somebody/model'", "Error: There is no tokenizer in"))
    assert time.monotonic() - start < 15  # the Hub's own retries take 24 seconds
    assert not (tmp_path / "out").exists()


def test_a_data_set_on_the_hub_without_network_is_told_at_once(no_network, run, monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    start = time.monotonic()
    with pytest.raises(FileNotFoundError, match=r"The data of piqa \(baber/piqa\) cannot be downloaded") as raised:
        run(data_dir=None)
    assert "\n" not in str(raised.value) and time.monotonic() - start < 15
    assert huggingface_hub.constants.HF_HUB_OFFLINE is False and datasets.config.HF_HUB_OFFLINE is False


# Windows


def test_a_model_of_few_positions_is_told_the_option_that_lets_it_be_scored(run, model, monkeypatch):
    monkeypatch.setattr(runner, "_load_tasks", None)
    with pytest.raises(ValueError, match=r"wikitext2_ppl scores windows of 2,048 tokens, .* takes 64") as raised:
        run(tasks="piqa,wikitext2_ppl")
    assert "give --max-length 64 (max_length=64)" in str(raised.value) and "\n" not in str(raised.value)


def test_windows_may_be_as_long_as_the_model_and_are_marked(run, model, tmp_path):
    (record,) = run(tasks="wikitext2_ppl", max_length=64)
    assert record.settings["max_length"] == 64
    (shorter,) = run(tasks="wikitext2_ppl", max_length=32)
    assert shorter.settings["max_length"] == 32
    assert shorter.metrics["token_perplexity"]["value"] != record.metrics["token_perplexity"]["value"]
    assert "Scored in windows of 32 tokens, and comparable with no other: wikitext2_ppl of" in " ".join(
        build_report(tmp_path / "out").notes
    )


def test_a_length_beyond_the_positions_is_refused(run):
    with pytest.raises(ValueError, match=r"max_length is 65, and '.*' has 64 positions; give at most as many"):
        run(max_length=65)


# Numbers and names


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": -1}, "seed must be a whole number from 0 to 4294967295, got -1"),
        ({"seed": 2**32}, "got 4294967296"),
        ({"seed": 0.5}, "got 0.5"),
        ({"limit": 0}, "limit must be at least 1, got 0; give a whole number"),
        ({"limit": -3}, "got -3"),
        ({"limit": float("nan")}, "got nan"),
        ({"limit": 0.5}, "got 0.5"),
        ({"limit": True}, "got True"),
        ({"num_fewshot": -1}, "num_fewshot must be numbers of at least 0, such as 0,5; got -1"),
        ({"num_fewshot": "0,5"}, "got '0,5'"),
        ({"num_fewshot": (0, 1.5)}, r"got \(0, 1.5\)"),
        ({"num_fewshot": ()}, r"got \(\)"),
        ({"batch_size": 0}, 'batch_size must be "auto" or a number of at least 1, got 0'),
        ({"batch_size": "-2"}, "got '-2'"),
        ({"batch_size": "²"}, "got '²'"),
        ({"batch_size": "auto:4"}, "got 'auto:4'"),
        ({"batch_size": 1.5}, "got 1.5"),
        ({"max_length": 0}, "max_length must be a whole number of at least 1, got 0"),
        ({"dtype": "float8"}, "dtype must be one of bfloat16, float16, float32, got 'float8'"),
        ({"tasks": "piqqa"}, "There is no task 'piqqa'; did you mean 'piqa'"),
        ({"tasks": "tasks.yaml"}, "There is no task 'tasks.yaml'"),
        ({"baseline": ""}, None),
    ],
    ids=lambda value: str(value)[1:-1] if isinstance(value, dict) else "",
)
def test_a_value_that_is_none_is_refused_before_anything_is_read(options, words, run, monkeypatch):
    if words is None:
        assert len(run(**options)) == 1  # as if not given
        return
    monkeypatch.setattr(provenance, "find_model", None)
    with pytest.raises(ValueError, match=words) as raised:
        run(**options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "arguments",
    [("--num-fewshot", "-1"), ("--limit", "0"), ("--seed", "-5"), ("--batch-size", "0"), ("--tasks", "piqqa")],
    ids=lambda arguments: arguments[0],
)
def test_the_command_refuses_them_in_one_line(arguments, model):
    failed = CliRunner().invoke(app, ["eval", str(model), *arguments])
    assert failed.exit_code == 1 and failed.stderr.startswith("Error: ") and failed.stderr.count("\n") == 1


def test_more_examples_than_there_are_documents_are_refused(run, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "build_scorer", None)
    with pytest.raises(
        ValueError, match="num_fewshot is 4, and piqa has 3 documents to draw examples from; give fewer"
    ):
        run(num_fewshot=(1, 4))


@pytest.mark.parametrize(
    ("folder", "task", "words"),
    [
        ("nowhere", "piqa", "There is no folder '.*nowhere'; give a --data-dir that holds a folder per task"),
        ("piqa/validation.parquet", "piqa", "There is no folder '.*validation.parquet'"),
        (".", "boolq", "There is no folder '.*boolq'; make one"),
        (".", "empty", None),
    ],
    ids=["missing", "a file", "of the task missing", "of the task empty"],
)
def test_data_that_are_not_there_are_told_before_the_model_is_loaded(
    folder, task, words, run, data, tmp_path, monkeypatch
):
    if words is None:
        shutil.copytree(data, tmp_path / "data")
        (tmp_path / "data" / "sciq").mkdir()
        folder, task, words = tmp_path / "data", "sciq", r"There is no file '.*sciq/test\.parquet'"
    monkeypatch.setattr(runner, "build_scorer", None)
    with pytest.raises(FileNotFoundError, match=words) as raised:
        run(tasks=task, data_dir=data / folder)
    assert "\n" not in str(raised.value)
