"""Sweeps: which runs they are of, what a stopped one keeps, runs that fail, and what the results say."""

import json
import os
import shutil
import signal
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from tiny_recipes import tiny_mapping, tiny_recipe
from typer.testing import CliRunner

from dcformer import DCFormerConfig, DCFormerForCausalLM
from dcformer.cli import app
from dcformer.experiments import runner
from dcformer.experiments.curves import Curve
from dcformer.experiments.plot import plot_sweep
from dcformer.experiments.recipe import plan_sweep
from dcformer.experiments.report import agreement, best_rates, differences, print_report, sorted_by_gain
from dcformer.experiments.results import read_results, summarise_variants
from dcformer.experiments.runner import run_sweep
from dcformer.head_tasks import build_tokenizer, suite
from dcformer.head_tasks.labels import variant_label
from dcformer.training import load_recipe
from dcformer.training.recipe import build_config
from dcformer.training.trainer import RecipeTrainer


PLAIN = {"model": {"compose_pre": False, "compose_post": False, "intermediate_size": 26}}
VARIANTS = {"plain": PLAIN, "composed": None}
TRAINING = {"max_steps": 3, "save_steps": 2, "evaluation_steps": 3, "logging_steps": 1}


def sweep_recipe(output: Path, training: dict | None = None, **values):
    values = {"seeds": [0, 1], "variants": VARIANTS, **values}
    return tiny_recipe(output, training={**TRAINING, **(training or {})}, sweep=values)


def ignore(*_):
    """No bar and no table."""


@pytest.fixture
def offline(monkeypatch):
    def unreachable(data_dir=None):
        raise FileNotFoundError("There is no network.")

    monkeypatch.setattr(suite, "authors_documents", unreachable)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a sweep that was scored."""
    output = tmp_path_factory.mktemp("sweeps") / "finished"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite, "authors_documents", lambda data_dir=None: [])
        patch.setattr(suite, "evaluate_head_tasks", _count_parameters)
        run_sweep(sweep_recipe(output, evaluation="head_tasks", evaluation_documents=7), on_progress=ignore)
    return output


def _count_parameters(model, tokenizer, documents, **_):
    return {
        "held_out": {"accuracy": model.num_parameters() / 1e6, "documents": documents},
        "authors": {"accuracy": 0.5},
    }


def test_seeds_are_the_outer_loop(tmp_path):
    _, runs = plan_sweep(sweep_recipe(tmp_path))
    assert [(run.variant, run.seed) for run in runs] == [
        ("plain", 0),
        ("composed", 0),
        ("plain", 1),
        ("composed", 1),
    ]


def test_a_run_is_the_recipe_with_the_variant_and_the_seed(tmp_path):
    recipe = sweep_recipe(tmp_path)
    _, runs = plan_sweep(recipe)
    run = runs[2].recipe
    assert run.model == {**recipe.model, **PLAIN["model"]}
    assert (run.seed, run.sweep, run.output) == (1, None, str(tmp_path / "plain" / "seed-1"))
    assert (run.data, run.training) == (recipe.data, recipe.training)


def test_results_hold_every_run_in_order(finished):
    text = (finished / "results.json").read_text()
    assert len(text.splitlines()) == 9  # recipe, references, four runs between two brackets, failures
    results = json.loads(text)
    assert [(run["variant"], run["seed"]) for run in results["runs"]] == [
        ("plain", 0),
        ("plain", 1),
        ("composed", 0),
        ("composed", 1),
    ]
    run = results["runs"][2]
    records = [json.loads(line) for line in (finished / "composed/seed-0/log.jsonl").read_text().splitlines()]
    assert run["training"]["steps"] == 3 and run["training"]["tokens"] == 3 * 64
    assert run["training"]["train_loss"] == [r["loss"] for r in records if "loss" in r][-1]
    assert run["training"]["evaluation_loss"] == [r["eval_loss"] for r in records if "eval_loss" in r][-1]
    assert run["training"]["seconds"] > 0
    assert run["curve"]["step"] == [3] and run["curve"]["tokens"] == [192]
    assert run["curve"]["loss"] == [pytest.approx(run["training"]["evaluation_loss"], abs=1e-5)]
    assert run["curve"]["flops"] == [pytest.approx(run["training"]["flops"], rel=1e-5)]
    assert run["curve"]["seconds"][0] > 0 and run["curve"]["accuracy"] == [None]  # the loss is on all tokens
    assert results["references"]["held_out"]["blind_choice"]["accuracy"] == pytest.approx(1 / 3, abs=0.02)
    assert run["evaluation"]["held_out"] == {"accuracy": run["parameters"] / 1e6, "documents": 7}
    assert results["failures"] == []
    assert str(finished.parent) not in json.dumps(results)


def test_seeds_train_other_models_on_other_documents(finished):
    losses = [run["training"]["train_loss"] for run in json.loads((finished / "results.json").read_text())["runs"]]
    assert len(set(losses)) == 4


def test_finished_runs_are_reused(finished, tmp_path, monkeypatch):
    output = tmp_path / "finished"
    shutil.copytree(finished, output)
    (output / "composed/seed-1/result.json").unlink()
    before = json.loads((output / "results.json").read_text())
    trained = []
    monkeypatch.setattr(runner, "_train_and_score", lambda run, *_: trained.append(run.name) or before["runs"][3])
    monkeypatch.setattr(suite, "authors_documents", lambda data_dir=None: [])
    recipe = sweep_recipe(output, evaluation="head_tasks", evaluation_documents=7)
    assert run_sweep(recipe, on_progress=ignore) == before
    assert trained == ["composed, seed 1"]


def test_references_of_texts_that_are_out_of_reach_now_are_kept_with_their_scores(finished, tmp_path, offline):
    output = tmp_path / "finished"
    shutil.copytree(finished, output)
    known = {"blind_choice": {"accuracy": 0.3}}
    results = json.loads((output / "results.json").read_text())
    results["references"] |= {"authors": known, "others": known}
    (output / "results.json").write_text(json.dumps(results))
    for file in output.glob("*/seed-*/result.json"):
        result = json.loads(file.read_text())
        result["run"]["evaluation"]["authors"] = {"accuracy": 0.5, "documents": 7}
        file.write_text(json.dumps(result))
    recipe = sweep_recipe(output, evaluation="head_tasks", evaluation_documents=7)
    references = run_sweep(recipe, on_progress=ignore)["references"]
    assert references["authors"] == known and "others" not in references and "held_out" in references


def test_other_settings_of_the_evaluation_score_without_training(finished, tmp_path, offline, monkeypatch):
    output = tmp_path / "finished"
    shutil.copytree(finished, output)
    monkeypatch.setattr(suite, "evaluate_head_tasks", _count_parameters)
    monkeypatch.setattr("dcformer.training.trainer.RecipeTrainer.train", lambda *_, **__: pytest.fail("trained again"))
    before = json.loads((output / "results.json").read_text())["runs"]
    recipe = sweep_recipe(output, evaluation="head_tasks", evaluation_documents=9, seeds=[0])
    runs = run_sweep(recipe, on_progress=ignore)["runs"]
    assert [run["evaluation"]["held_out"]["documents"] for run in runs] == [9, 7, 9, 7]
    assert [run["training"] for run in runs] == [run["training"] for run in before]


def test_results_without_a_curve_get_one_without_training(finished, tmp_path, monkeypatch):
    output = tmp_path / "finished"
    shutil.copytree(finished, output)
    monkeypatch.setattr("dcformer.training.trainer.RecipeTrainer.train", lambda *_, **__: pytest.fail("trained again"))
    file = output / "plain/seed-0/result.json"
    result = json.loads(file.read_text())
    curve = result["run"].pop("curve")
    file.write_text(json.dumps(result))
    assert run_sweep(sweep_recipe(output, seeds=[0]), on_progress=ignore)["runs"][0]["curve"] == curve


def test_without_an_evaluation_scores_that_are_there_are_kept(finished, tmp_path):
    output = tmp_path / "finished"
    shutil.copytree(finished, output)
    runs = run_sweep(sweep_recipe(output), on_progress=ignore)["runs"]
    assert all(run["evaluation"]["held_out"]["documents"] == 7 for run in runs)


def test_a_result_of_another_recipe_is_refused(finished, tmp_path):
    output = tmp_path / "finished"
    shutil.copytree(finished, output)
    with pytest.raises(ValueError, match=r"another recipe: training.learning_rate is 0.003 there and 0.1 here"):
        run_sweep(sweep_recipe(output, training={"learning_rate": 0.1}), on_progress=ignore)


def test_a_damaged_result_is_named(finished, tmp_path):
    output = tmp_path / "finished"
    shutil.copytree(finished, output)
    (output / "plain/seed-0/result.json").write_text("{")
    with pytest.raises(ValueError, match=r"plain/seed-0/result.json' is no result of a sweep"):
        run_sweep(sweep_recipe(output), on_progress=ignore)


def test_a_sweep_of_some_runs_keeps_the_others(finished, tmp_path):
    output = tmp_path / "finished"
    shutil.copytree(finished, output)
    shutil.rmtree(output / "composed")
    results = run_sweep(sweep_recipe(output, seeds=[0], only=["composed"]), on_progress=ignore)
    assert [(run["variant"], run["seed"]) for run in results["runs"]] == [("plain", 0), ("plain", 1), ("composed", 0)]
    assert results["recipe"]["sweep"]["seeds"] == [0, 1] and "only" not in results["recipe"]["sweep"]


def test_authors_texts_that_cannot_be_reached_are_left_out(tmp_path, offline, caplog):
    recipe = sweep_recipe(
        tmp_path, seeds=[0], variants={"composed": {}}, evaluation="head_tasks", evaluation_documents=2
    )
    run = run_sweep(recipe, on_progress=ignore)["runs"][0]
    assert run["evaluation"]["authors"] is None and run["evaluation"]["held_out"]["answers"] == 16
    assert "authors' texts are left out: There is no network." in caplog.text
    with pytest.raises(FileNotFoundError, match="no network"):
        run_sweep(recipe, data_dir="there", on_progress=ignore)


def test_a_run_that_fails_is_recorded_and_the_others_finish(tmp_path, capsys):
    variants = {"diverging": {"training": {"learning_rate": 1e30}}, "composed": {}}
    with pytest.raises(RuntimeError, match=r"1 of 2 runs failed. diverging, seed 0: The .* became nan"):
        run_sweep(sweep_recipe(tmp_path, seeds=[0], variants=variants))
    results = json.loads((tmp_path / "results.json").read_text())
    assert [run["variant"] for run in results["runs"]] == ["composed"]
    assert [failure["variant"] for failure in results["failures"]] == ["diverging"]
    assert "FAILED diverging, seed 0: The" in capsys.readouterr().out
    assert not (tmp_path / "diverging/seed-0/result.json").exists()


def test_errors_of_the_data_stop_the_sweep(tmp_path):
    recipe = sweep_recipe(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        run_sweep(replace(recipe, data=replace(recipe.data, source="nowhere.jsonl")), on_progress=ignore)
    assert json.loads((tmp_path / "results.json").read_text())["failures"] == []


def test_a_stopped_sweep_is_resumed_where_it_was(finished, tmp_path):
    recipe = sweep_recipe(tmp_path, seeds=[0])

    def interrupt(name, step, total, record):
        if (name, step) == ("composed, seed 0", 3):  # after the checkpoint at step 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(recipe, on_progress=interrupt)
    assert [run["variant"] for run in json.loads((tmp_path / "results.json").read_text())["runs"]] == ["plain"]
    steps = []
    runs = run_sweep(recipe, on_progress=lambda name, step, *_: steps.append((name, step)))["runs"]
    assert set(steps) == {("composed, seed 0", 0), ("composed, seed 0", 3)}
    for run, uninterrupted in zip(runs, json.loads((finished / "results.json").read_text())["runs"][::2]):
        for key in ("train_loss", "evaluation_loss"):
            assert run["training"][key] == uninterrupted["training"][key]
    assert (tmp_path / "sweep.png").stat().st_size > 0


def test_a_signal_ends_the_command_and_the_same_command_resumes(finished, tmp_path, monkeypatch):
    output, file = tmp_path / "finished", tmp_path / "sweep.yaml"
    shutil.copytree(finished, output)
    shutil.rmtree(output / "composed/seed-0")
    values = tiny_mapping(output, training=TRAINING, sweep={"seeds": [0], "variants": VARIANTS})
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    compute_loss = RecipeTrainer.compute_loss

    def terminated(self, *args, **kwargs):
        if self.state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return compute_loss(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(RecipeTrainer, "compute_loss", terminated)
        result = CliRunner().invoke(app, ["train", str(file)])
    assert result.exit_code == 143
    assert result.stderr.splitlines()[-1].startswith("Interrupted; checkpoints are kept, run the same command to ")
    assert not (output / "composed/seed-0/result.json").exists()
    assert [path.name for path in (output / "composed/seed-0").glob("checkpoint-*")] == ["checkpoint-2"]
    result = CliRunner().invoke(app, ["train", str(file)])
    assert result.exit_code == 0, result.output
    assert result.stderr == "composed, seed 0 (1 of 1)\n"
    expected = json.loads((finished / "results.json").read_text())["runs"][2]["training"]
    run = json.loads((output / "results.json").read_text())["runs"][2]
    assert run["training"] | {"seconds": 0} == expected | {"seconds": 0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seeds": 3}, r"sweep.seeds must be a list such as \[0, 1, 2\], got 3"),
        ({"seeds": [0, "a"]}, "sweep.seeds must hold integers of at least 0, got 'a'"),
        ({"seeds": [1, 1]}, r"sweep.seeds must differ from each other, got \[1, 1\]"),
        ({"seeds": []}, "sweep.seeds must not be empty"),
        ({"variants": {}}, "sweep.variants must not be empty"),
        ({"variants": {"../a": {}}}, "sweep.variants holds '../a'"),
        ({"variants": {"a": 3}}, "sweep.variants.a must be a mapping of what it changes, got 3"),
        ({"variants": {"a": {"data": {}}}}, "'sweep.variants.a.data' is no key of a recipe; did you mean model or"),
        ({"variants": {"a": {"model": {"compose_rnk": 1}}}}, "sweep.variants.a: 'model.compose_rnk' is no key"),
        ({"variants": {"a": {"model": {"num_attention_heads": 3}}}}, "sweep.variants.a: model: num_attention_heads"),
        ({"only": ["b"]}, "sweep.only names 'b'; the variants are plain, composed"),
        ({"pairs": [["plain"]]}, r"sweep.pairs must hold pairs such as \[model, baseline\], got \['plain'\]"),
        ({"pairs": [["plain", "b"]]}, "sweep.pairs names 'b'; the variants are plain, composed"),
        ({"published": {"b": 1}}, "sweep.published names 'b'"),
        ({"published": {"plain": "low"}}, "sweep.published.plain must be a number, got 'low'"),
        ({"processes": 2}, "sweep.processes is no longer a key of a recipe, got 2; remove it"),
        ({"evaluation": "table4"}, "sweep.evaluation must be 'head_tasks' or null, got 'table4'"),
        ({"repeats": 3}, "'sweep.repeats' is no key of a recipe"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_sweep_is_told_in_a_sentence(tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        run_sweep(sweep_recipe(tmp_path / "never", **values), on_progress=ignore)
    assert not (tmp_path / "never").exists()


def test_a_sweep_without_any_evaluation_is_refused(tmp_path):
    recipe = sweep_recipe(tmp_path)
    with pytest.raises(ValueError, match=r"needs data\.evaluation or sweep\.evaluation"):
        run_sweep(replace(recipe, data=replace(recipe.data, evaluation=None)), on_progress=ignore)
    with pytest.raises(ValueError, match="The recipe 'tiny' has no sweep"):
        run_sweep(replace(recipe, sweep=None), on_progress=ignore)


def test_sweeps_are_not_started_by_torchrun(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="run it without torchrun"):
        run_sweep(sweep_recipe(tmp_path), on_progress=ignore)


def results_of(losses: dict[str, list[float]], **published) -> dict:
    """Results with these evaluation losses by seed, and accuracies that mirror them."""
    runs = [
        {
            "variant": variant,
            "seed": seed,
            "parameters": 1000,
            "training": {"evaluation_loss": loss},
            "evaluation": {"held_out": {"accuracy": 1 - loss / 10}, "authors": None},
        }
        for variant, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    recipe = {"name": "made up", "sweep": {"variants": dict.fromkeys(losses), "published": published}}
    return {"recipe": recipe, "runs": runs}


def test_intervals_and_paired_differences_over_seeds():
    first, second = summarise_variants(results_of({"a": [1.0, 2.0, 3.0], "b": [0.5, 1.6, 2.4]}))
    mean, half = first.interval("evaluation_loss")
    assert mean == pytest.approx(2) and half == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    # The differences are -0.5, -0.4, -0.6: their spread is a tenth of the seeds' own.
    found = differences([first, second], "evaluation_loss")["b"]
    assert (found.difference, found.seeds) == (pytest.approx(-0.5), 3)
    assert found.half_width == pytest.approx(0.1 * 4.303 / 3**0.5, rel=1e-3)


def test_only_common_seeds_are_compared():
    first, second = summarise_variants(results_of({"a": [1.0, 9.0], "b": [0.5]}))
    assert differences([first, second], "evaluation_loss") == {}
    assert first.interval("authors") is None


def test_agreement_counts_pairs_in_the_published_order():
    losses = {"a": [3.0, 3.1], "b": [2.0, 2.11], "c": [1.0, 1.13], "unpublished": [9.0, 9.0]}
    summaries = summarise_variants(results_of(losses))
    same = agreement(summaries, "evaluation_loss", {"a": 12, "b": 11, "c": 10})
    assert (same.pairs, same.agreeing, same.apart, same.apart_agreeing, same.tau) == (3, 3, 3, 3, 1.0)
    one_swapped = agreement(summaries, "held_out", {"a": 12, "b": 10, "c": 11})
    assert (one_swapped.agreeing, one_swapped.tau) == (2, pytest.approx(1 / 3))
    reversed_order = agreement(summaries, "held_out", {"a": 10, "b": 11, "c": 12})
    assert (reversed_order.agreeing, reversed_order.apart_agreeing, reversed_order.tau) == (0, 0, -1.0)
    assert agreement(summaries, "authors", {"a": 12, "b": 11}) is None


def test_pairs_within_the_noise_of_the_seeds_are_not_apart():
    summaries = summarise_variants(results_of({"a": [3.0, 2.0, 2.5], "b": [2.0, 3.0, 2.4]}))
    found = agreement(summaries, "evaluation_loss", {"a": 12, "b": 11})
    assert (found.pairs, found.agreeing, found.apart) == (1, 1, 0)


def test_apart_is_said_after_a_correction_for_all_pairs():
    losses = {"a": [3.0, 3.1, 3.2], "b": [2.9, 3.03, 3.08], "c": [2.5, 3.5, 3.0], "d": [2.6, 3.4, 3.1]}
    summaries = summarise_variants(results_of(losses))
    alone = agreement(summaries[:2], "evaluation_loss", {"a": 12, "b": 11})
    among_six = agreement(summaries, "evaluation_loss", {"a": 12, "b": 11, "c": 10, "d": 9})
    assert (alone.apart, among_six.apart, among_six.pairs) == (1, 0, 6)  # p 0.022 alone


def test_the_table_tells_means_differences_and_ranks(capsys):
    results = results_of({"a": [1.0, 2.0, 3.0], "b": [0.5, 1.6, 2.4], "c": [9.0]}, a=11, b=12)
    results["references"] = {"evaluation": {"blind_choice": {"loss": 1.5, "accuracy": 0.3}}}
    print_report(results, Console(width=250))
    main, differing = capsys.readouterr().out.split("Differences to a")
    rows = {line.strip("│").split("│")[0].strip(): line for line in main.splitlines() if line.startswith("│")}
    assert "2.0000 ± 2.4" in rows["a"] and "7.389" in rows["a"]
    assert "1.5000" in rows["blind choice"]
    ranks = {name: rows[name].split("│")[-2].strip() for name in "abc"}
    assert ranks == {"a": "2 / 2 / 1", "b": "1 / 1 / 2", "c": "3 / 3 / -"}
    (row,) = [line for line in differing.splitlines() if line.startswith("│ b")]
    assert "+5.00 ± 2.48 (p 0.013)" in row  # of 0.05, 0.04 and 0.06 in accuracy
    assert "Order by evaluation loss: 0 of 1 pairs as published (Kendall's tau -1.00)" in differing


def test_rows_of_plots_and_differences_are_sorted_by_gain():
    summaries = summarise_variants(results_of({"a": [1.0, 2.0], "b": [3.0, 3.0], "c": [0.5, 0.5], "d": [2.0, 2.0]}))
    assert [item.name for item in sorted_by_gain(summaries, "evaluation_loss")] == ["a", "c", "d", "b"]
    assert [item.name for item in sorted_by_gain(summaries, "held_out")] == ["a", "c", "d", "b"]


def test_the_best_learning_rate_of_every_model_is_named(capsys):
    results = results_of({"one_low": [1.0], "one_mid": [0.8], "one_high": [0.9], "two_low": [0.5], "two_mid": [0.6]})
    rates = {"low": 0.001, "mid": 0.002, "high": 0.004}
    results["recipe"]["sweep"]["variants"] = {
        run["variant"]: {
            "model": {"hidden_size": len(run["variant"].split("_")[0])},
            "training": {"learning_rate": rates[run["variant"].split("_")[1]]},
        }
        for run in results["runs"]
    }
    for run in results["runs"]:
        if run["variant"].startswith("two"):
            results["recipe"]["sweep"]["variants"][run["variant"]]["model"] = {"hidden_size": 9}
    found = best_rates(results)
    assert [(item.variant, item.training["learning_rate"], item.at_end) for item in found] == [
        ("one_mid", 0.002, []),
        ("two_low", 0.001, ["learning_rate"]),
    ]
    print_report(results, Console(width=160))
    assert (
        "two low (learning_rate 0.001; learning_rate at an end of the range, so try rates beyond it)"
        in capsys.readouterr().out
    )


def test_the_report_is_made_again_from_the_file(finished, tmp_path, capsys):
    results = read_results(finished / "results.json")
    print_report(results, Console(width=160))
    assert "composed" in capsys.readouterr().out
    image = tmp_path / "again.png"
    plot_sweep(results, image)
    assert image.read_bytes() == (finished / "sweep.png").read_bytes()
    with pytest.raises(FileNotFoundError, match="There is no file"):
        read_results(tmp_path / "missing.json")


@pytest.mark.parametrize("text", ["[", "{}", '{"runs": [{}], "recipe": {"sweep": {"variants": {}}}}', "[]"])
def test_other_files_are_no_results(tmp_path, text):
    file = tmp_path / "results.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="holds no results of a sweep"):
        read_results(file)


def test_no_run_gives_no_report(tmp_path):
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"recipe": {"sweep": {"variants": {"a": {}}}}, "runs": []}))
    with pytest.raises(ValueError, match="holds no finished run yet"):
        read_results(file)


def test_plots_need_an_evaluation_and_a_known_ending(tmp_path):
    results = results_of({"a": [1.0]})
    with pytest.raises(ValueError, match=r"must end in .png"):
        plot_sweep(results, tmp_path / "plot.jpg")
    results["runs"][0] |= {"evaluation": None, "training": {"evaluation_loss": None}}
    with pytest.raises(ValueError, match="nothing to plot"):
        plot_sweep(results, tmp_path / "plot.png")


def test_the_command_runs_the_sweep_of_a_recipe(finished, tmp_path):
    output, file = tmp_path / "finished", tmp_path / "sweep.yaml"
    shutil.copytree(finished, output)
    values = tiny_mapping("x", training=TRAINING, sweep={"seeds": [0], "variants": VARIANTS})
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    result = CliRunner().invoke(app, ["train", str(file), "--output", str(output)])
    assert result.exit_code == 0, result.output
    rows = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("│")]
    assert rows == ["plain", "composed", "composed"] and "published" not in result.stdout  # means, differences
    result = CliRunner().invoke(app, ["train", str(file), "--output", str(output), "--set", "sweep.seeds=[x]"])
    assert result.exit_code == 1 and "sweep.seeds must hold integers" in result.output


@cache
def packaged_sweep(name: str):
    """The sweep of a packaged recipe, and its runs with the first seed by variant."""
    sweep, runs = plan_sweep(load_recipe(name, ["sweep.seeds=[0]"]))
    return sweep, {run.variant: run for run in runs}


@cache
def vocabulary_size() -> int:
    return len(build_tokenizer())


def count_parameters(run, **overrides) -> int:
    with torch.device("meta"):
        config = build_config({**run.recipe.model, "vocab_size": vocabulary_size(), **overrides})
        return sum(parameter.numel() for parameter in DCFormerForCausalLM(config).parameters())


def width_for(run, expected: int) -> str | None:
    """The width of the MLP that gives a run's model so many parameters, unless it has them to within 1 %."""
    width = run.recipe.model["intermediate_size"]
    found = count_parameters(run)
    if abs(found / expected - 1) <= 0.01:
        return None
    per_unit = count_parameters(run, intermediate_size=width + 1) - found
    return f"intermediate_size {width + round((expected - found) / per_unit)}"


def test_the_ablation_has_equal_parameters():
    """Table 9's rows differ by what composes, not by size; only the width of the MLP makes up for it."""
    _, runs = packaged_sweep("head-tasks-ablation")
    expected = count_parameters(runs["none"])
    advice = {name: width_for(run, expected) for name, run in runs.items()}
    assert {name: width for name, width in advice.items() if width} == {}


def test_the_claim_compares_models_of_equal_parameters_at_three_widths():
    sweep, runs = packaged_sweep("head-tasks-claim")
    assert list(dict.fromkeys(name for pair in sweep.pairs for name in pair)) == list(sweep.variants)
    assert load_recipe("head-tasks-claim").sweep["seeds"] == [0, 1, 2, 3]
    for model, baseline in sweep.pairs:
        assert width_for(runs[model], count_parameters(runs[baseline])) is None
        configs = [build_config(runs[name].recipe.model) for name in (model, baseline)]
        assert [config.composes_heads for config in configs] == [True, False]
        assert configs[0].hidden_size == configs[1].hidden_size == int(model.split("_")[1])
        assert baseline.startswith(f"transformer_{configs[1].hidden_size}_rate_")
    assert len(sweep.pairs) == 2 * 3


def test_the_claim_has_rates_of_the_sweep_of_rates_and_other_seeds():
    claim, rates = (load_recipe(name) for name in ("head-tasks-claim", "head-tasks-rates"))
    assert not set(rates.sweep["seeds"]) & set(claim.sweep["seeds"])
    assert (rates.data, rates.training, rates.model) == (claim.data, claim.training, claim.model)
    for name, variant in claim.sweep["variants"].items():
        model, width = name.split("_")[:2]
        middle = claim.sweep["variants"][name.replace(width, "48")]
        tried = [trial for key, trial in rates.sweep["variants"].items() if key.startswith(f"{model}_48_")]
        assert all(trial["model"] == middle["model"] for trial in tried)
        assert len({trial["training"]["muon_learning_rate"] for trial in tried}) == 4
        assert variant["training"] in [trial["training"] for trial in tried]
        assert variant["model"]["hidden_size"] == int(width)
    names = [variant_label(name) for recipe in (rates, claim) for name in recipe.sweep["variants"]]
    assert all("width" in name and "_" not in name for name in names)


def test_the_bundled_models_and_two_rows_of_the_ablation_are_models_of_the_claim():
    claim, seeds, ablation = (packaged_sweep(f"head-tasks-{name}")[1] for name in ("claim", "seeds", "ablation"))

    def same(recipe, run):
        rates = recipe.training
        if not build_config(recipe.model).composes_heads:  # no weights have this rate
            rates = replace(rates, compose_learning_rate=run.recipe.training.compose_learning_rate)
        return (build_config(recipe.model), recipe.data, rates) == (
            build_config(run.recipe.model),
            run.recipe.data,
            run.recipe.training,
        )

    for name, row, suffix in (("dcformer", "rank_2", ""), ("transformer", "none", "_rate_4e-2")):
        assert same(load_recipe(f"{name}-tiny"), claim[f"{name}_64{suffix}"])
        assert same(seeds[f"{name}-tiny"].recipe, claim[f"{name}_64{suffix}"])
        assert same(ablation[row].recipe, claim[f"{name}_48{suffix}"])


def test_the_ablation_has_the_rows_of_table_9():
    plan, runs = packaged_sweep("head-tasks-ablation")
    names = ("query", "key", "low_rank", "gate", "static", "pre", "post")
    active = {}
    for run in runs.values():
        config = build_config(run.recipe.model)
        active[run.variant] = {name for name in names if getattr(config, f"compose_{name}")}, config.compose_rank
        assert config.composes_heads == (run.variant != "none")
    dynamic = {"query", "key", "low_rank", "gate", "pre", "post"}
    assert active == {
        "none": (dynamic - {"pre", "post"}, 2),
        "static": (dynamic - {"query", "key"} | {"static"}, 2),
        "low_rank": (dynamic - {"gate"}, 2),
        "gate": (dynamic - {"low_rank"}, 2),
        "query_wise": (dynamic - {"key"}, 2),
        "key_wise": (dynamic - {"query"}, 2),
        "pre": (dynamic - {"post"}, 2),
        "post": (dynamic - {"pre"}, 2),
        "rank_1": (dynamic, 1),
        "rank_2": (dynamic, 2),
        "rank_4": (dynamic, 4),
        "all": (dynamic | {"static"}, 2),
    }
    assert set(plan.published) == set(plan.variants)
    assert isinstance(build_config(runs["none"].recipe.model), DCFormerConfig)


@pytest.mark.parametrize("name", ["rates", "claim", "ablation"])
def test_committed_results_are_whole_and_of_the_packaged_recipe(name):
    """Files of `make claim`, as far as they are committed."""
    file = Path(__file__).parents[2] / "benchmarks" / "results" / "head_tasks" / f"{name}.json"
    recipe = load_recipe(f"head-tasks-{name}")
    if file.exists():
        check_results(read_results(file), recipe)


def check_results(results, recipe):
    expected = recipe.to_mapping()
    del expected["output"]
    assert results["recipe"] == expected and results["failures"] == []
    runs = [(run["variant"], run["seed"]) for run in results["runs"]]
    assert runs == [(name, seed) for name in expected["sweep"]["variants"] for seed in expected["sweep"]["seeds"]]
    assert all(Curve.of(run) is not None for run in results["runs"])
