"""Sweeps: their runs, what a stopped one keeps, runs that fail, and what the results say."""

import json
import math
import os
import shutil
import signal
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from command_line import call
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from scipy import stats
from tiny_recipes import tiny_mapping, tiny_recipe

import dcformer.eval
from dcformer.experiments import compare_seeds, compare_variants, finish_run, plan_sweep, seed_interval, summarise
from dcformer.experiments.runner import run_sweep
from dcformer.experiments.sweep_report import plot_sweep, print_report
from dcformer.training import Recipe
from dcformer.training.trainer import RecipeTrainer


PLAIN = {"model": {"compose_pre": False, "compose_post": False, "intermediate_size": 26}}
VARIANTS = {"plain": PLAIN, "composed": None}
TRAINING = {"max_steps": 3, "save_steps": 2, "evaluation_steps": 3, "logging_steps": 1}


def sweep_recipe(output: Path, training: dict | None = None, **values):
    values = {"seeds": [0, 1], "variants": VARIANTS, **values}
    return tiny_recipe(output, training={**TRAINING, **(training or {})}, sweep=values)


def quiet_sweep(recipe, **options):
    """Without a bar and a table, unless progress is watched."""
    return run_sweep(recipe, **{"on_progress": lambda *_: None, **options})


@pytest.fixture(autouse=True)
def without_plots(finished, monkeypatch):
    """Only the finished sweep is plotted, since that takes longer than a run."""
    monkeypatch.setattr("dcformer.experiments.runner.plot_sweep", lambda *_: None)


@pytest.fixture
def scored(monkeypatch):
    """The models that were evaluated; their accuracy depends on their name."""
    calls = []

    def evaluate(model, *, output, tasks, limit, dtype):
        calls.append(Path(model).parent.relative_to(Path(model).parents[2]))
        accuracy = 0.25 if "plain" in model else 0.75
        return [SimpleNamespace(task=task, metrics={"acc": {"value": accuracy, "stderr": 0.1}}) for task in tasks]

    monkeypatch.setattr(dcformer.eval, "evaluate", evaluate, raising=False)
    return calls


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a sweep that ran to its end."""
    output = tmp_path_factory.mktemp("sweeps") / "finished"
    quiet_sweep(sweep_recipe(output))
    return output


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "finished"))


def read(output):
    return json.loads((output / "results.json").read_text())


def timeless(results):
    return [{**run, "training": {**run["training"], "seconds": None}} for run in results["runs"]]


def test_a_run_is_the_recipe_with_the_variant_and_the_seed(tmp_path):
    both = {"model": {"compose_pre": False}, "training": {"learning_rate": 0.5}}
    training = {"compile_mode": "reduce-overhead"}
    recipe = sweep_recipe(tmp_path, training, variants={**VARIANTS, "both": both}, only=["both", "plain"])
    sweep, runs = plan_sweep(recipe)
    # Seeds are the outer loop, so that a sweep which is stopped has comparable runs.
    names = [f"{name}, seed {seed}" for seed in (0, 1) for name in ("plain", "composed", "both")]
    assert [run.name for run in runs] == names
    assert [run.variant for run in sweep.chosen(runs)] == ["plain", "both"] * 2
    for run, variant, seed in zip(runs, ("plain", "composed", "both") * 2, (0, 0, 0, 1, 1, 1)):
        change = sweep.variants[variant] or {}
        assert (run.recipe.seed, run.recipe.sweep, run.folder) == (seed, None, tmp_path / variant / f"seed-{seed}")
        assert run.recipe.model == {**recipe.model, **change.get("model", {})}
        assert run.recipe.training == replace(recipe.training, **change.get("training", {}))
        assert run.recipe.data == recipe.data and run.recipe.training.compile_mode == "reduce-overhead"


def test_results_hold_every_run_in_order(finished):
    results = read(finished)
    runs = results["runs"]
    assert [(run["variant"], run["seed"]) for run in runs] == [*product(VARIANTS, (0, 1))]
    log = [json.loads(line) for line in (finished / "composed/seed-0/log.jsonl").read_text().splitlines()]
    training = runs[2]["training"]
    assert (training["steps"], training["tokens"]) == (3, 3 * 64)
    assert training["train_loss"] == [record["loss"] for record in log if "loss" in record][-1]
    assert (training["evaluation_loss"], training["flops"]) == (log[-1]["eval_loss"], log[-1]["flops"])
    assert training["seconds"] > 0 and results["failures"] == []
    assert len({run["training"]["train_loss"] for run in runs}) == 4  # other models, other documents
    assert str(finished.parent) not in json.dumps(results)
    assert (finished / "sweep.png").stat().st_size > 1000


def test_finished_runs_are_reused_and_scored_when_tasks_come(copied, scored, monkeypatch):
    monkeypatch.setattr(RecipeTrainer, "train", lambda *_, **__: pytest.fail("trained again"))
    before = read(copied)
    assert quiet_sweep(sweep_recipe(copied, {"compile_mode": "reduce-overhead"}))["runs"] == before["runs"]
    assert quiet_sweep(sweep_recipe(copied)) == before
    results = quiet_sweep(sweep_recipe(copied, tasks=["piqa"], only=["composed"]))
    assert list(map(str, scored)) == ["composed/seed-0", "composed/seed-1"]
    assert [run["variant"] for run in results["runs"]] == ["composed", "composed"]
    results = quiet_sweep(sweep_recipe(copied, tasks=["piqa"]))
    assert len(scored) == 4
    assert [run["evaluation"]["piqa"]["acc"] for run in results["runs"]] == [0.25, 0.25, 0.75, 0.75]
    assert summarise(results).loc["composed", "piqa acc"] == 0.75


def test_results_are_written_after_every_run_and_a_run_is_started_over_when_asked_for(copied):
    before, seen = read(copied), []

    def watch(name, step, total, record):
        seen.append((name, step, len(read(copied)["runs"]), (copied / "composed/seed-0/result.json").exists()))

    sweep, runs = plan_sweep(sweep_recipe(copied))
    assert finish_run(runs[1], sweep, on_progress=watch) == before["runs"][2] and seen == []
    again = finish_run(runs[1], sweep, resume=False, on_progress=watch)
    assert timeless({"runs": [again]}) == timeless(before)[2:3]
    assert {step for _, step, *_ in seen} == {0, 1, 2, 3} and not seen[-1][-1]
    seen.clear()
    shutil.rmtree(copied / "composed")
    assert timeless(run_sweep(sweep_recipe(copied), on_progress=watch)) == timeless(before)
    started = [(name, count) for name, step, count, _ in seen if step == 0]
    assert started == [("composed, seed 0", 2), ("composed, seed 1", 3)]
    seen.clear()
    run_sweep(sweep_recipe(copied, only=["plain"], seeds=[1]), resume=False, on_progress=watch)
    assert {step for _, step, *_ in seen} == {0, 1, 2, 3}


def test_a_result_of_another_recipe_is_refused(copied):
    with pytest.raises(ValueError, match=r"learning_rate is 0.003 there and 0.1 here"):
        quiet_sweep(sweep_recipe(copied, training={"learning_rate": 0.1}))


def test_a_damaged_result_is_named_and_repeated_from_the_run(copied, monkeypatch, caplog):
    file = copied / "composed/seed-1/result.json"
    text = file.read_text()
    file.write_text(text[:-20])
    monkeypatch.setattr(RecipeTrainer, "train", lambda *_, **__: pytest.fail("trained again"))
    before = read(copied)
    assert quiet_sweep(sweep_recipe(copied)) == before
    assert json.loads(file.read_text())["run"] == json.loads(text)["run"]
    assert caplog.text.count(f"{file}' is damaged") == 1


def test_results_on_other_data_tokenizers_or_weights_are_refused(copied, tmp_path):
    base = Path(shutil.copytree(copied / "composed/seed-0/final", tmp_path / "base"))
    changed = {"data.source": "a.jsonl", "data.evaluation.source": "b.jsonl"}
    for name in changed.values():
        (base / name).write_text("".join(json.dumps({"text": f"John has {number}"}) + "\n" for number in range(40)))
    changed |= {"tokenizer": "tokenizer.json", "model.pretrained": "model.safetensors"}
    data = {"source": f"{base}/a.jsonl", "evaluation": {"source": f"{base}/b.jsonl"}}
    sections = {"tokenizer": str(base), "data": data, "training": {**TRAINING, "max_steps": 1}}
    sweep = {"seeds": [0], "variants": {"low": {"training": {"learning_rate": 1e-3}}}}
    values = tiny_mapping(tmp_path / "run", **sections, sweep=sweep)
    recipe = Recipe.from_mapping({**values, "model": {"pretrained": str(base)}})
    first = quiet_sweep(recipe)
    assert quiet_sweep(recipe) == first
    for key, name in changed.items():
        content = (base / name).read_bytes()
        (base / name).write_bytes(content.replace(b"John", b"Anne") + b" ")
        with pytest.raises(ValueError, match=f"the content of {key} has changed"):
            quiet_sweep(recipe)
        (base / name).write_bytes(content)
    shutil.rmtree(base)
    assert quiet_sweep(recipe) == first  # nothing is read


def test_a_run_that_diverges_is_recorded_and_the_others_finish(tmp_path):
    variants = {"diverging": {"training": {"learning_rate": 1e30}}, "composed": {}}
    with pytest.raises(RuntimeError, match=r"1 of 2 runs failed. diverging, seed 0: "):
        quiet_sweep(sweep_recipe(tmp_path, seeds=[0], variants=variants))
    results = read(tmp_path)
    assert [run["variant"] for run in results["runs"]] == ["composed"]
    assert [failure["variant"] for failure in results["failures"]] == ["diverging"]


def test_errors_of_the_data_stop_the_sweep(tmp_path):
    recipe = sweep_recipe(tmp_path)
    data = replace(recipe.data, source="/no/such/data", split="test")
    with pytest.raises(FileNotFoundError, match="/no/such/data"):
        quiet_sweep(replace(recipe, data=data))
    assert read(tmp_path)["failures"] == []


def test_a_signal_ends_the_command_and_the_same_command_resumes(finished, copied, tmp_path, monkeypatch):
    file = tmp_path / "sweep.yaml"
    shutil.rmtree(copied / "composed/seed-0")
    values = tiny_mapping(copied, training=TRAINING, sweep={"seeds": [0], "variants": VARIANTS})
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    compute_loss = RecipeTrainer.compute_loss

    def terminated(self, *args, **kwargs):
        if self.state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return compute_loss(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(RecipeTrainer, "compute_loss", terminated)
        result = call("train", file)
    assert result.exit_code == 143
    assert not (copied / "composed/seed-0/result.json").exists()
    assert [path.name for path in (copied / "composed/seed-0").glob("checkpoint-*")] == ["checkpoint-2"]
    result = call("train", file)
    assert result.exit_code == 0, result.output
    assert "composed, seed 0 (1 of 1)\n" in result.stderr
    assert "evaluation_loss" in result.stdout
    expected = timeless(read(finished))
    assert timeless(read(copied)) == [expected[0], expected[2]]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"seeds": [0, "a"]}, "'a'"),
        ({"seeds": [1, 1]}, r"\[1, 1\]"),
        ({"seeds": []}, "sweep.seeds"),
        ({"variants": {"../a": {}}}, "'../a'"),
        ({"variants": {"a b": {}}}, "'a b'"),
        ({"variants": {"a": {"model": {}, "data": {}}}}, "'data'"),
        ({"variants": {"a": 3}}, r"sweep.variants.a .*, got 3"),
        ({"variants": {"a": {"training": 3}}}, "training must be a mapping .*, got 3"),
        ({"variants": {"a": {"model": {"compose_rnk": 1}}}}, "compose_rnk"),
        ({"only": ["plain", "b"]}, "'b'"),
        ({"published": {"b": 1}}, "'b'"),
        ({"task": ["piqa"]}, "task"),
    ],
)
def test_a_wrong_sweep_is_refused(tmp_path, values, words):
    with pytest.raises((ValueError, OmegaConfBaseException), match=words):
        plan_sweep(sweep_recipe(tmp_path, **values))


def test_a_sweep_with_nothing_to_compare_is_refused(tmp_path):
    recipe = sweep_recipe(tmp_path)
    unseen = replace(recipe, data=replace(recipe.data, evaluation=None))
    with pytest.raises(ValueError, match=r"needs data.evaluation or sweep.tasks"):
        plan_sweep(unseen)
    plan_sweep(replace(unseen, sweep={**recipe.sweep, "tasks": ["piqa"]}))
    with pytest.raises(ValueError, match="'tiny' has no sweep"):
        plan_sweep(replace(recipe, sweep=None))


def results_of(losses, accuracies):
    """Results of variants with these evaluation losses, and accuracies in a task, by seed."""
    runs = [
        {"variant": name, "seed": seed, "training": {"evaluation_loss": loss, "evaluation_accuracy": None}}
        | {"parameters": 10, "evaluation": {"piqa": {"acc": accuracies[name][seed]}} if name in accuracies else None}
        for name, values in losses.items()
        for seed, loss in values.items()
    ]
    recipe = {"name": "made", "sweep": {"published": {"none": 11.0, "best": 10.0}}}
    return {"recipe": recipe, "runs": runs, "failures": []}


def test_intervals_and_differences_over_seeds(tmp_path, capsys):
    """One variant has a single seed in common with the first, one a metric in one run of two, one no task."""
    losses = {
        "none": {0: 2.0, 1: 2.2, 2: 2.1},
        "worse": {0: 2.1, 1: 2.2, 2: 2.2},
        "best": {0: 1.5, 1: 1.8, 2: 1.5},
        "apart": {2: 1.9, 7: 1.7},
    }
    accuracies = {"none": {0: 0.5, 1: 0.6, 2: 0.5}, "worse": {0: 0.4, 1: None, 2: 0.3}}
    accuracies |= {"best": {0: 0.7, 1: 0.9, 2: 0.8}}
    results = results_of(losses, accuracies)
    table, differences = summarise(results), compare_variants(results, "evaluation_loss")
    assert list(table.index) == [*losses] and list(table["seeds"]) == [3, 3, 3, 2]
    shown = table.loc["none", ["evaluation_loss", "evaluation_loss ±"]]
    assert tuple(shown) == pytest.approx(seed_interval([*losses["none"].values()]))
    assert table["piqa acc"].isna().to_list() == [False, True, False, True]
    assert table.loc["best", "piqa acc"] == pytest.approx(0.8)
    tested = compare_seeds(losses, [("worse", "none"), ("best", "none")])
    assert differences["difference"].to_dict() == pytest.approx({"worse": 0.2 / 3, "best": -0.5})
    assert differences["±"].to_list() == [row.half_width for row in tested]
    assert differences["p"].to_list() == [row.corrected_p for row in tested]
    of_task = compare_variants(results, "piqa acc")["difference"].to_dict()
    assert of_task == pytest.approx({"worse": -0.15, "best": 0.8 / 3})  # of the seeds that have it
    single = results_of({"none": {0: 2.0}, "best": {0: 1.6}}, {})
    for made in (results, single):
        print_report(made, Console(width=200))
    printed = capsys.readouterr().out.splitlines()
    row, single = [line for line in printed if line.startswith("│ best")]
    assert "1.6000 (one seed)" in single and "1.6000 ±" in row
    assert "4.953" in row and "10.0" in row and "1 / 1" in row  # perplexity, published, ranks
    compared = [line.partition(" = ")[0] for line in printed if " - none = " in line]
    pairs = product(("evaluation_loss", "piqa acc"), ("best", "worse"))
    assert compared == [f"{metric}: {name} - none" for metric, name in pairs]  # the better one first
    plot_sweep(results, tmp_path / "a.svg")
    assert "evaluation_loss" in (tmp_path / "a.svg").read_text()


def test_intervals_and_tests_over_seeds_are_students():
    values = {"a": {1: 0.90, 2: 0.92, 3: 0.91}, "b": {1: 0.93, 2: 0.94, 3: 0.96}, "c": {1: 0.91, 2: 0.93, 3: 0.92}}
    mean, half = seed_interval(list(values["a"].values()))
    assert (mean, half) == pytest.approx((0.91, stats.t.ppf(0.975, 2) * 0.01 / math.sqrt(3)))
    assert math.isnan(seed_interval([0.5])[1])
    b, c = compare_seeds(values)
    test = stats.ttest_rel(list(values["b"].values()), list(values["a"].values()))
    assert (b.seeds, b.difference, b.p) == pytest.approx((3, 0.1 / 3, test.pvalue))
    low, high = test.confidence_interval(0.95)
    assert b.half_width == pytest.approx((high - low) / 2)
    low, high = test.confidence_interval(1 - 0.05 / 2)  # Bonferroni's, of two
    assert b.simultaneous_half_width == pytest.approx((high - low) / 2)
    assert c.p == 0.25  # all seeds differ by the same: two signs in four
    # Holm's: the smaller of two p-values is doubled, the other is at least that.
    assert (b.p < c.p, b.corrected_p, c.corrected_p) == pytest.approx((True, 2 * b.p, max(2 * b.p, 0.25)))
    only_b, *_ = compare_seeds(values, [("b", "a")])
    assert only_b.corrected_p == only_b.p == b.p
    with pytest.raises(ValueError, match="two seeds"):
        compare_seeds({"a": {1: 0.5}, "b": {2: 0.5}})
