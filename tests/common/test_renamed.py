"""Old names of recipes, suites and data are refused with the new one; runs that were written under them are resumed."""

import json

import pytest
from tiny_recipes import tiny_mapping, tiny_recipe
from typer.testing import CliRunner

from dcformer.cli import app
from dcformer.common.renamed import with_current_names
from dcformer.eval.records import Record, read_record, write_record
from dcformer.eval.suites import SUITES, find_tasks
from dcformer.experiments import plan_sweep
from dcformer.training import Recipe, load_recipe, packaged_recipes, train
from dcformer.training.checkpoints import mark_complete, newest_checkpoint, read_marker


def tiny_sweep(output):
    return tiny_mapping(output, sweep={"seeds": [0], "variants": {"a": {}}, "evaluation": "composition"})


@pytest.mark.parametrize(
    ("old", "new"),
    [("composition-ablation", "head-tasks-ablation"), ("composition-seeds", "head-tasks-seeds")],
    ids=["ablation", "seeds"],
)
def test_old_recipes_are_refused_with_the_new_name(old, new, tmp_path):
    assert new in packaged_recipes()
    with pytest.raises(ValueError, match=f"^The recipe '{old}' is called '{new}' now; give that name.$"):
        load_recipe(old)
    extending = tmp_path / "mine.yaml"
    extending.write_text(f"extends: {old}.yaml\n")
    with pytest.raises(ValueError, match=f"The recipe '{old}' is called '{new}' now"):
        load_recipe(extending)


def test_a_file_of_an_old_name_is_the_users_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "composition-seeds").write_text("extends: dcformer-tiny\nname: mine\n")
    assert load_recipe("composition-seeds").name == "mine"


@pytest.mark.parametrize(
    ("option", "old", "new"),
    [
        ("suite", "composition", "head_tasks"),
        ("suite", "table4,synthetic", "head_tasks_authors"),
        ("tasks", "composition", "head_tasks"),
        ("tasks", "piqa,synthetic", "head_tasks_authors"),
        ("tasks", "synthetic_k7", "head_tasks_authors_k7"),
        ("tasks", "dcformer_synthetic_k2", "head_tasks_authors_k2"),
    ],
    ids=["suite", "suite_of_the_authors", "task", "suite_as_task", "task_of_the_authors", "task_with_prefix"],
)
def test_old_suites_and_tasks_are_refused_with_the_new_name(option, old, new):
    name = old.split(",")[-1].removeprefix("dcformer_")
    with pytest.raises(ValueError, match=f"^The {option.removesuffix('s')} '{name}' is called '{new}' now; give that"):
        find_tasks(**{option: old})
    assert new in (*SUITES, *SUITES["head_tasks_authors"], "head_tasks")


def test_the_command_refuses_an_old_suite_in_one_line():
    for old, *models in (("composition",), ("composition", "model"), ("synthetic", "model")):
        failed = CliRunner().invoke(app, ["eval", "--suite", old, *models])
        assert failed.exit_code == 1 and failed.stderr.count("\n") == 1
        assert failed.stderr.startswith(f"Error: The suite {old!r} is called 'head_tasks")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"tokenizer": "composition"}, "^The tokenizer 'composition' is called 'head_tasks' now; give that name.$"),
        (
            {"data": {"source": "composition"}},
            "^data.source 'composition' is called 'head_tasks' now; give that name.$",
        ),
        (
            {"data": {"evaluation": {"source": "composition"}}},
            "^data.evaluation.source 'composition' is called 'head_tasks' now; give that name.$",
        ),
    ],
    ids=["tokenizer", "source", "evaluation_source"],
)
def test_old_data_and_tokenizers_are_refused_with_the_new_name(sections, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        tiny_recipe(tmp_path, **sections)


def test_the_old_evaluation_of_a_sweep_is_refused_with_the_new_name(tmp_path):
    with pytest.raises(ValueError, match=r"sweep.evaluation must be 'head_tasks' or null, got 'composition'"):
        plan_sweep(Recipe.from_mapping(tiny_sweep(tmp_path)))


def test_a_recipe_that_an_earlier_version_wrote_is_read_by_todays_names(tmp_path):
    current = tiny_recipe(tmp_path).to_mapping()
    old = json.loads(json.dumps(current).replace('"head_tasks"', '"composition"'))
    assert old["tokenizer"] == old["data"]["source"] == old["data"]["evaluation"]["source"] == "composition"
    assert with_current_names(old) == current
    assert with_current_names(tiny_sweep(tmp_path))["sweep"]["evaluation"] == "head_tasks"
    other = {"name": "composition", "output": "synthetic", "data": {"source": "mine.jsonl"}, "seed": 0}
    assert with_current_names(other) == other


def test_a_run_of_an_earlier_version_is_resumed(tmp_path):
    recipe = tiny_recipe(tmp_path / "run", training={"max_steps": 3, "evaluation_steps": 3})
    trained = train(recipe)
    checkpoint = newest_checkpoint(tmp_path / "run")
    marker = json.loads(json.dumps(read_marker(checkpoint)).replace('"head_tasks"', '"composition"'))
    assert marker["recipe"]["tokenizer"] == "composition"
    mark_complete(checkpoint, marker)
    again = train(recipe)
    assert again["resumed_from"] == 3 and again["loss"] == trained["loss"]


def test_a_result_of_an_old_task_is_refused_with_the_new_name(tmp_path):
    metrics = {"acc": {"value": 0.5, "stderr": 0.1}}
    path = write_record(tmp_path, Record("model", "synthetic_k2", 0, metrics, 1, 1), [{"doc_id": 0}])
    with pytest.raises(
        ValueError, match=r"synthetic_k2-0shot\.json' is a result of 'synthetic_k2', which is called 'head_tasks_a"
    ):
        read_record(path)
    failed = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert failed.exit_code == 1 and "which is called 'head_tasks_authors_k2' now" in failed.stderr
