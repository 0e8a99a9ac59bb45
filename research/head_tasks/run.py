"""Train the sweeps of the study, or resume them, and record their results.

python -m research.head_tasks.run                   # all three, a night of two CPU cores
python -m research.head_tasks.run rates claim       # some
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dcformer.experiments import run_sweep
from dcformer.training import load_recipe


FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
SWEEPS = ("rates", "claim", "ablation")


def record(name: str, recipe_file: Path, results_file: Path) -> dict[str, Any]:
    """
    Run a sweep and write its results, with the evaluation curve of every run.

    Args:
        name: Its name, for messages.
        recipe_file: The recipe.
        results_file: JSON that the last run of the sweep wrote; its `references` stay, as the evaluation documents do.

    Returns:
        What was written: `recipe`, `references`, `runs` and `failures`.
    """
    recipe = load_recipe(recipe_file)
    print(f"{name}: runs lie in {recipe.output}.", flush=True)
    results = run_sweep(recipe)
    for run in results["runs"]:
        run["curve"] = evaluation_curve(Path(recipe.output, run["variant"], f"seed-{run['seed']}", "log.jsonl"))
    references = json.loads(results_file.read_text(encoding="utf-8"))["references"]
    written = {"recipe": results["recipe"], "references": references, **results}
    results_file.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return written


def evaluation_curve(log: Path) -> dict[str, list[float]]:
    """Read a run's log: `step`, `flops`, `seconds`, `loss` (nats per token) and `accuracy` of every evaluation."""
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    keys = {"step": "step", "flops": "flops", "seconds": "seconds", "loss": "eval_loss", "accuracy": "eval_accuracy"}
    evaluations = [entry for entry in records if "eval_loss" in entry]
    return {name: [entry[key] for entry in evaluations] for name, key in keys.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="*", default=SWEEPS, help=f"some of {', '.join(SWEEPS)} (default: all)")
    for name in parser.parse_args().sweeps:
        record(name, FOLDER / "recipes" / f"{name}.yaml", RESULTS / f"{name}.json")


if __name__ == "__main__":
    main()
