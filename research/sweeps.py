"""Sweeps of studies: train or resume the runs of a recipe, and record their results with their evaluation curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dcformer.experiments import run_sweep
from dcformer.training import load_recipe


def record(name: str, recipe_file: Path, results_file: Path, overrides: list[str] | None = None) -> dict[str, Any]:
    """
    Run a sweep and write its results, with the evaluation curve of every run.

    Args:
        name: Its name, for messages.
        recipe_file: The recipe.
        results_file: JSON to write; `references` of the file that is there stay, as the evaluation documents do.
        overrides: Values that replace those of the recipe, as of `dcformer train --set`.

    Returns:
        What was written: `recipe`, `runs`, `failures`, and `references` if there are any.
    """
    recipe = load_recipe(recipe_file, overrides or [])
    print(f"{name}: runs lie in {recipe.output}.", flush=True)
    results = run_sweep(recipe)
    for run in results["runs"]:
        run["curve"] = evaluation_curve(Path(recipe.output, run["variant"], f"seed-{run['seed']}", "log.jsonl"))
    if results_file.is_file():
        before = json.loads(results_file.read_text(encoding="utf-8"))
        results |= {key: before[key] for key in ("references",) if key in before}
    results_file.parent.mkdir(exist_ok=True)
    results_file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


def evaluation_curve(log: Path) -> dict[str, list[float]]:
    """
    Read a run's log: `step`, `flops`, `seconds`, `loss` (nats per token) of every evaluation, and its `accuracy` where
    answers are scored.
    """
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    keys = {"step": "step", "flops": "flops", "seconds": "seconds", "loss": "eval_loss", "accuracy": "eval_accuracy"}
    evaluations = [entry for entry in records if "eval_loss" in entry]
    return {name: [entry[key] for entry in evaluations] for name, key in keys.items() if key in evaluations[0]}
