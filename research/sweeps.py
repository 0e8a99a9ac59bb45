"""Sweeps of studies: train or resume the runs of a recipe, and record their results with their evaluation curves."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dcformer.common.files import file_digest
from dcformer.experiments import run_sweep
from dcformer.training import Recipe, first_difference, load_recipe


Measure = Callable[[Recipe, Path], Any]


def main(description: str, folder: Path, sweeps: Sequence[str], measure: Measure | None = None) -> None:
    """The command line of a study: record the sweeps of `folder/recipes` in `folder/results`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="*", default=sweeps, help=f"some of {', '.join(sweeps)} (default: all)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of dcformer train")
    parser.add_argument("--results", type=Path, default=folder / "results", help="folder to record in")
    arguments = parser.parse_args()
    for name in arguments.sweeps:
        recipe = load_recipe(str(folder / "recipes" / f"{name}.yaml"), arguments.set)
        print(f"{name}: runs lie in {recipe.output}.", flush=True)
        record(recipe, arguments.results / f"{name}.json", measure)


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
        ValueError: if the file has runs of other settings or on other text, before anything is trained.
    """
    before, source = recorded(results_file), Path(recipe.data.source)
    text = {"text_sha256": file_digest(source)} if source.is_file() else {}
    known = {run["variant"] for run in before["runs"]}
    if known:
        earlier = Recipe.from_mapping(before["recipe"])
        unknown = {*earlier.sweep["variants"], *recipe.sweep["variants"]} - known
        others = {*earlier.sweep, *recipe.sweep} - {"variants"}  # what a sweep asks for decides no run
        ignored = ("name", "output", "seed", *(f"sweep.{key}" for key in others))
        if differs := first_difference(earlier, recipe, (*ignored, *(f"sweep.variants.{name}." for name in unknown))):
            raise ValueError(
                f"The runs in {str(results_file)!r} have other settings: {differs}; move it, or give another --results."
            )
        if text and before.get("text_sha256") != text["text_sha256"]:
            raise ValueError(
                f"The runs in {str(results_file)!r} were trained on another text than {str(source)!r}; give another "
                "--results."
            )
    results = run_sweep(recipe) | text
    for run in results["runs"]:
        folder = Path(recipe.output, run["variant"], f"seed-{run['seed']}")
        run["curve"] = evaluation_curve(folder / "log.jsonl")
        if measure is not None:
            measured = folder / "test.json"
            if not measured.is_file():
                measured.write_text(json.dumps(measure(recipe, folder / "final")), encoding="utf-8")
            run["test"] = json.loads(measured.read_text(encoding="utf-8"))
    before = recorded(results_file)  # another process may have recorded runs meanwhile
    done = {(run["variant"], run["seed"]) for run in results["runs"]}
    kept = [run for run in before["runs"] if (run["variant"], run["seed"]) not in done]
    results["runs"] = kept + results["runs"]
    results |= {key: before[key] for key in ("references",) if key in before}
    results_file.parent.mkdir(parents=True, exist_ok=True)
    results_file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


def recorded(results_file: Path) -> dict[str, Any]:
    """What a file of results holds; where there is none, no runs."""
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
