"""Sweeps of studies: train or resume the runs of a recipe, and record their results with their evaluation curves."""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from dcformer.common.files import file_digest
from dcformer.experiments import Run, SweepRecipe, finish_run, plan_sweep, run_sweep
from dcformer.experiments.runner import MOVES_NO_RESULT
from dcformer.training import Recipe, first_difference, load_recipe


Measure = Callable[[Recipe, Path], Any]


def main(description: str, folder: Path, sweeps: Sequence[str], measure: Measure | None = None) -> None:
    """The command line of a study: record the sweeps of `folder/recipes` in `folder/results`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="*", default=sweeps, help=f"some of {', '.join(sweeps)} (default: all)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of dcformer train")
    parser.add_argument("--processes", type=int, default=1, help="train so many runs at a time (default: 1)")
    parser.add_argument("--results", type=Path, default=folder / "results", help="folder to record in")
    arguments = parser.parse_args()
    recipes = {}
    for name in arguments.sweeps:
        recipes[name] = load_recipe(str(folder / "recipes" / f"{name}.yaml"), arguments.set)
        print(f"{name}: runs lie in {recipes[name].output}.", flush=True)
        check_recorded(recipes[name], arguments.results / f"{name}.json")
    if arguments.processes > 1:
        finish_runs(recipes.values(), arguments.processes, measure)
    for name, recipe in recipes.items():
        record(recipe, arguments.results / f"{name}.json", measure)


def finish_runs(recipes: Iterable[Recipe], processes: int, measure: Measure | None = None) -> None:
    """
    Finish the runs of sweeps, so many at a time and the longest first, and measure them; `record` then finds them done.

    A run that diverged is left to `record`, which reports it.
    """
    jobs = []
    for recipe in recipes:
        sweep, runs = plan_sweep(recipe)
        jobs += [(run, sweep, measure) for run in sweep.chosen(runs)]
    jobs.sort(key=lambda job: job[0].recipe.training.steps, reverse=True)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(_finish, *job): job[0] for job in jobs}
        for number, future in enumerate(as_completed(futures), start=1):
            error = future.exception()
            if error is not None and not isinstance(error, FloatingPointError):
                pool.shutdown(cancel_futures=True)
                raise error
            print(f"{number} of {len(jobs)}: {error or futures[future].recipe.name}", flush=True)


def _finish(run: Run, sweep: SweepRecipe, measure: Measure | None) -> None:
    finish_run(run, sweep)
    if measure is not None:
        _measured(run.folder, run.recipe, measure)


def _measured(folder: Path, recipe: Recipe, measure: Measure) -> Any:
    """The measurements of the finished run in a folder, made now unless they are there."""
    file = folder / "test.json"
    if not file.is_file():
        file.write_text(json.dumps(measure(recipe, folder / "final")), encoding="utf-8")
    return json.loads(file.read_text(encoding="utf-8"))


def check_recorded(recipe: Recipe, results_file: Path) -> dict[str, str]:
    """
    The hash of the file that a sweep is trained on, as `text_sha256`, if it is a file.

    Raises:
        ValueError: if the results have runs of other settings or on other text.
    """
    before, source = recorded(results_file), Path(recipe.data.source)
    text = {"text_sha256": file_digest(source)} if source.is_file() else {}
    known = {run["variant"] for run in before["runs"]}
    if known:
        earlier = Recipe.from_mapping(before["recipe"])
        unknown = {*earlier.sweep["variants"], *recipe.sweep["variants"]} - known
        others = {*earlier.sweep, *recipe.sweep} - {"variants"}  # what a sweep asks for decides no run
        ignored = ("seed", *(set(MOVES_NO_RESULT) - {"sweep"}), *(f"sweep.{key}" for key in others))
        if differs := first_difference(earlier, recipe, (*ignored, *(f"sweep.variants.{name}." for name in unknown))):
            raise ValueError(
                f"The runs in {str(results_file)!r} have other settings: {differs}; move it, or give another --results."
            )
        if text and before.get("text_sha256") != text["text_sha256"]:
            raise ValueError(
                f"The runs in {str(results_file)!r} were trained on another text than {str(source)!r}; give another "
                "--results."
            )
    return text


def record(recipe: Recipe, results_file: Path, measure: Measure | None = None) -> dict[str, Any]:
    """
    Run a sweep and write its results, with the evaluation curve of every run.

    Args:
        recipe: The recipe.
        results_file: JSON to write; its other runs stay, and its `references`, as the evaluation documents do.
        measure: Called once with the recipe and the folder of a run's model; what it returns is the run's `test`.

    Returns:
        What was written: `recipe`, `runs`, `failures`, `references` if there are any, and `text_sha256`, the hash of a
        file that the runs are trained on.

    Raises:
        ValueError: as `check_recorded`, before anything is trained.
    """
    text = check_recorded(recipe, results_file)
    results = run_sweep(recipe) | text
    for run in results["runs"]:
        folder = Path(recipe.output, run["variant"], f"seed-{run['seed']}")
        run["curve"] = evaluation_curve(folder / "log.jsonl")
        if measure is not None:
            run["test"] = _measured(folder, recipe, measure)
    before = recorded(results_file)  # another process may have recorded runs meanwhile
    done = {(run["variant"], run["seed"]) for run in results["runs"]}
    kept = [run for run in before["runs"] if (run["variant"], run["seed"]) not in done]
    results["runs"] = kept + results["runs"]
    results |= {key: before[key] for key in ("references",) if key in before}
    results_file.parent.mkdir(parents=True, exist_ok=True)
    results_file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


def recorded(results_file: Path) -> dict[str, Any]:
    """The content of a file of results; without the file, no runs."""
    return json.loads(results_file.read_text(encoding="utf-8")) if results_file.is_file() else {"runs": []}


def evaluation_curve(log: Path) -> dict[str, list[float]]:
    """
    Read a run's log: `step`, `flops`, `seconds`, `loss` (nats per token) of every evaluation, and its `accuracy` where
    answers are scored.
    """
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    keys = {"step": "step", "flops": "flops", "seconds": "seconds", "loss": "eval_loss", "accuracy": "eval_accuracy"}
    evaluations = [entry for entry in records if "eval_loss" in entry]
    return {name: [entry[key] for entry in evaluations] for name, key in keys.items() if key in evaluations[0]}
