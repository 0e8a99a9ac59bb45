"""
Sweeps: a run of `train` for every variant of a recipe with every seed; a stopped sweep keeps its results.

    <output>/<variant>/seed-<seed>/               as `train` leaves it
    <output>/<variant>/seed-<seed>/evaluation/    records of the tasks
    <output>/<variant>/seed-<seed>/result.json    figures of the run, written last
    <output>/results.json                         all of these, replaced after every run
    <output>/sweep.png                            means and intervals over the seeds

Runs are trained one after another in this process.
"""

import contextlib
import functools
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import TaskProgressColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import AutoConfig, AutoModelForCausalLM

from ..common.files import file_lock, read_sealed, seal, write_atomically
from ..common.processes import count_processes
from ..common.quiet import quiet_libraries
from ..common.terminal import make_console, progress_bar
from ..training import Recipe, fingerprint_inputs, first_difference, resolve_precision, train
from .sweep_recipe import Run, SweepRecipe, plan_sweep
from .sweep_report import plot_sweep, print_report


RESULT, RESULTS, PLOT = "result.json", "results.json", "sweep.png"
# Beginnings of keys of a recipe that no result depends on, except by rounding for implementations and compiling.
MOVES_NO_RESULT = (
    *("name", "output", "sweep", "model.attn_implementation", "training.tokens", "training.max_steps"),
    *("training.compile", "training.save_steps", "training.keep_checkpoints", "training.report_to"),
)

OnProgress = Callable[[str, int, int, dict[str, float]], None]

logger = logging.getLogger(__name__)


def run_sweep(recipe: Recipe, resume: bool = True, on_progress: OnProgress | None = None) -> dict[str, Any]:
    """
    Train and score every variant with every seed, or resume a sweep that was stopped. Without `on_progress`, a bar is
    shown on stderr and a table printed at the end.

    Args:
        recipe: A recipe with a `sweep` mapping, see [`SweepRecipe`].
        resume: `False` starts all the runs over.
        on_progress: Called with the name of a run, steps done, all steps and the last record of its log.

    Returns:
        The content of `results.json`: `recipe`; `runs`, a list of `variant`, `seed`, `parameters`, `training` (`steps`,
        `tokens`, `flops`, `seconds`, `train_loss`, `evaluation_loss` and `evaluation_accuracy`, `device`) and
        `evaluation` (task -> metric -> value); `failures`, a list of `variant`, `seed`, `error`.

    Raises:
        ValueError: for a wrong recipe, a folder with runs of another recipe, or one that another process is writing.
        RuntimeError: if runs diverged; all others are finished first.
    """
    if count_processes() > 1:
        raise ValueError("The runs of a sweep are trained one after another in one process; run it without torchrun.")
    sweep, runs = plan_sweep(recipe)
    output, chosen = Path(recipe.output), sweep.chosen(runs)
    failures: list[dict[str, Any]] = []
    with file_lock(output / ".lock"), contextlib.ExitStack() as stack:
        rows = {run.name: _finished(run, sweep) for run in runs}
        waiting = [run for run in chosen if not resume or rows[run.name] is None]
        report = on_progress or stack.enter_context(_progress(len(waiting)))
        results = _write_results(recipe, runs, rows, failures)
        for run in waiting:
            try:
                rows[run.name] = _finish(run, sweep, resume, report)
            except FloatingPointError as error:
                rows[run.name] = None
                failures.append({"variant": run.variant, "seed": run.seed, "error": str(error)})
            results = _write_results(recipe, runs, rows, failures)
    if results["runs"]:
        try:
            plot_sweep(results, output / PLOT)
        except ImportError as error:
            logger.warning(f"The results are not plotted: {error}")
        if on_progress is None:
            print_report(results, make_console(pipe_width=160))
    if failures:
        sentences = " ".join(f"{item['variant']}, seed {item['seed']}: {item['error']}" for item in failures)
        raise RuntimeError(f"{len(failures)} of {len(chosen)} runs failed. {sentences}")
    return results


def _finished(run: Run, sweep: SweepRecipe) -> dict[str, Any] | None:
    """The results of a finished run; `None` if it must be trained or scored."""
    file = run.folder / RESULT
    if not file.is_file():
        return None
    try:
        result = read_sealed(file)
    except ValueError as error:
        logger.warning(f"{error} The run {run.name!r} counts as not finished.")
        return None
    differs = first_difference(Recipe.from_mapping(result["recipe"]), run.recipe, MOVES_NO_RESULT)
    for key, fingerprint in fingerprint_inputs(run.recipe, local_only=True).items():
        if fingerprint != result["fingerprints"].get(key):
            differs = differs or f"the content of {key} has changed"
    if differs:
        raise ValueError(
            f"{str(file)!r} is of another recipe: {differs}; give another output, or remove {str(file.parent)!r}."
        )
    is_scored = not sweep.tasks or (result["tasks"], result["limit"]) == (sweep.tasks, sweep.limit)
    return result["run"] if is_scored else None


def finish_run(
    run: Run, sweep: SweepRecipe, resume: bool = True, on_progress: OnProgress | None = None
) -> dict[str, Any]:
    """
    Train and score one run from `plan_sweep`, unless it is finished, without a bar; arguments and errors as of
    `run_sweep`, and FloatingPointError if the run diverged. Several processes may call this for different runs of a
    sweep; `run_sweep` then reuses their results, which are the items of its `runs`.
    """
    row = _finished(run, sweep) if resume else None
    return _finish(run, sweep, resume, on_progress or (lambda *_: None)) if row is None else row


def _finish(run: Run, sweep: SweepRecipe, resume: bool, on_progress: OnProgress) -> dict[str, Any]:
    recipe = run.recipe
    report = functools.partial(on_progress, run.name)
    report(0, recipe.training.steps, {})
    if not resume:
        (run.folder / RESULT).unlink(missing_ok=True)
    with quiet_libraries(messages=False, datasets=True):
        trained = train(recipe, resume=resume, on_progress=report)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(trained["folder"]))
        scores: dict[str, dict[str, float]] | None = None
        if sweep.tasks:
            from ..eval import evaluate

            options = {"tasks": sweep.tasks, "limit": sweep.limit, "dtype": "float32"}
            records = evaluate(trained["folder"], output=run.folder / "evaluation", **options)
            scores = {r.task: {name: metric["value"] for name, metric in r.metrics.items()} for r in records}
    log = map(json.loads, (run.folder / "log.jsonl").read_text(encoding="utf-8").splitlines())
    last = {key: value for record in log for key, value in record.items()}
    row = {
        "variant": run.variant,
        "seed": run.seed,
        "parameters": model.num_parameters(),
        "training": {
            "steps": trained["steps"],
            "tokens": trained["steps"] * recipe.training.batch_tokens,
            "flops": last["flops"],
            "seconds": last["seconds"],
            "train_loss": trained["loss"],
            "evaluation_loss": trained["evaluation_loss"],
            "evaluation_accuracy": last.get("eval_accuracy"),
            "precision": resolve_precision(recipe.training.precision),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        },
        "evaluation": scores,
    }
    result = {"recipe": recipe.to_mapping(), "tasks": sweep.tasks, "limit": sweep.limit, "run": row}
    write_atomically(run.folder / RESULT, seal(result | {"fingerprints": trained["fingerprints"]}))
    return row


def _write_results(
    recipe: Recipe, runs: list[Run], rows: dict[str, dict[str, Any] | None], failures: list[dict[str, Any]]
) -> dict[str, Any]:
    values = recipe.to_mapping()
    del values["output"]
    variants = [*values["sweep"]["variants"]]
    done = [rows[run.name] for run in sorted(runs, key=lambda run: variants.index(run.variant)) if rows[run.name]]
    results = {"recipe": values, "runs": done, "failures": failures}
    write_atomically(Path(recipe.output) / RESULTS, json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    return results


@contextlib.contextmanager
def _progress(runs: int) -> Iterator[OnProgress]:
    """One bar on stderr for all runs; if that is no terminal, a line for every run that starts."""
    with progress_bar("Sweep", TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn()) as (update, say):
        update(total=runs)
        done: dict[str, float] = {}

        def on_progress(name: str, step: int, total: int, record: dict[str, float]) -> None:
            if name not in done:
                say(f"{name} ({len(done) + 1} of {runs})")
            done[name] = step / total
            loss = f", loss {record['loss']:.4f}" if "loss" in record else ""
            update(completed=sum(done.values()), description=f"{name} ({len(done)} of {runs}){loss}")

        yield on_progress
