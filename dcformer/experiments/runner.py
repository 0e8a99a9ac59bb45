"""Sweeps: every variant of a recipe with every seed, each a run of `train`, with results that a stopped sweep keeps.

<output>/<variant>/seed-<seed>/                as `train` leaves it
<output>/<variant>/seed-<seed>/result.json     what was measured, written last
<output>/results.json                          all of these, written anew after every run
<output>/sweep.png                             means and intervals over the seeds
<output>/curves.png, pairs.csv, take_offs.csv  of pairs: loss and accuracy by what was spent; costs of equal quality,
                                               and of reaching blind choice and 90 %

Runs follow one another in this process. Seeds are the outer loop, so that a sweep which is stopped has comparable rows
of every variant.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import TaskProgressColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..common.files import write_atomically
from ..common.quiet import quiet_libraries
from ..common.renamed import with_current_names
from ..common.terminal import make_console, progress_bar
from ..head_tasks import suite
from ..training.checkpoints import DamagedCheckpointError
from ..training.fields import first_difference
from ..training.recipe import Recipe
from ..training.run import train
from ..training.run_folder import locked_folder
from ..training.throughput import flops_per_token
from .claim import compare_pairs
from .claim_report import write_costs, write_take_offs
from .curves import evaluation_curve, read_log, training_seconds
from .plot import plot_sweep
from .plot_curves import plot_curves
from .recipe import Run, SweepRecipe, make_run, plan_sweep
from .reference_lines import evaluation_references, scored_sets, suite_references
from .report import print_report


RESULT, RESULTS, PLOT = "result.json", "results.json", "sweep.png"
CURVES, COSTS, TAKE_OFFS = "curves.png", "pairs.csv", "take_offs.csv"
# Of a recipe, what moves no number of a result.
_MOVES_NO_RESULT = (
    "name",
    "output",
    "sweep",
    "model.attn_implementation",  # this and compiling move it by rounding alone
    "training.compile",
    "training.save_steps",
    "training.keep_checkpoints",
    "training.tensorboard",
)
# Of `sweep:`, what says how it was run and not what was measured.
_NOT_MEASURED = ("only", "data_dir")
# One run may fail by these; anything else, such as data that are missing, stops the sweep.
_RUN_FAILURES = (FloatingPointError, RuntimeError, DamagedCheckpointError)

OnProgress = Callable[[str, int, int, dict[str, float]], None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Scoring:
    """How a trained model is scored: on so many held-out documents, and maybe on the authors' texts; 0: not at all."""

    documents: int
    with_authors: bool
    data_dir: str | None

    def is_done_in(self, result: dict[str, Any]) -> bool:
        """Whether a result holds these scores, and the curve that older versions left out."""
        if "curve" not in result["run"]:
            return False
        if self.documents == 0:
            return True
        evaluation = result["run"]["evaluation"]
        if evaluation is None or result["evaluation_documents"] != self.documents:
            return False
        return evaluation["authors"] is not None or not self.with_authors


def run_sweep(
    recipe: Recipe, data_dir: str | None = None, on_progress: OnProgress | None = None, resume: bool = True
) -> dict[str, Any]:
    """
    Train and score every variant with every seed, or resume a sweep that was stopped.

    Finished runs in `recipe.output` are reused and unfinished ones are resumed from their last checkpoint. Unless
    `on_progress` is given, a bar is shown on stderr and a table printed at the end.

    Args:
        recipe (`Recipe`): A recipe with a `sweep` mapping, see [`SweepRecipe`].
        data_dir (`str`, *optional*): Folder of the authors' texts, instead of the recipe's `sweep.data_dir`.
        on_progress (`Callable`, *optional*): Called with the name of a run, steps done, all steps and the last record
            of its log; with 0 steps when a run begins.
        resume (`bool`, defaults to `True`): Otherwise all the runs start over.

    Returns:
        What `results.json` holds: `recipe`; `references`, what is reached without reading the question, of the
        evaluation and of the scored sets; `runs`, a list of `variant`, `seed`, `parameters`, `training` (`steps`,
        `tokens`, `flops`, `seconds`, `train_loss` and `evaluation_loss` in nats per token, `device`), `curve` (`step`,
        `tokens`, `flops`, `seconds`, `loss` and `accuracy`, lists with a value per evaluation) and `evaluation`
        (`held_out` and `authors`, summaries of scores, or `None`), in the order of the recipe; `failures`, of runs
        that failed.

    Raises:
        ValueError: for a wrong recipe, or a folder whose runs are of another one or that another process is writing.
        FileNotFoundError: if data are missing.
        RuntimeError: if runs failed, such as by a loss that is no longer finite; all others are finished first.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError("The runs of a sweep follow one another in one process; run it without torchrun.")
    sweep, runs = plan_sweep(recipe)
    scoring = _scoring(sweep, data_dir if data_dir is not None else sweep.data_dir)
    with locked_folder(Path(recipe.output)):
        return _run_all(recipe, sweep, runs, scoring, on_progress, resume)


def _run_all(
    recipe: Recipe,
    sweep: SweepRecipe,
    runs: Sequence[Run],
    scoring: _Scoring,
    on_progress: OnProgress | None,
    resume: bool,
) -> dict[str, Any]:
    output = Path(recipe.output)
    chosen = [run for run in runs if sweep.only is None or run.variant in sweep.only]
    if not resume:
        for run in chosen:
            (run.folder / RESULT).unlink(missing_ok=True)
    found = _finished(recipe, sweep)
    waiting = [run for run in chosen if (r := found.get((run.variant, run.seed))) is None or not scoring.is_done_in(r)]
    rows = {key: result["run"] for key, result in found.items()}
    failures: list[dict[str, Any]] = []
    references = _references(recipe, scoring)
    if scoring.documents > 0 and not scoring.with_authors:
        references |= _recorded_references(output, rows)

    results = _results(recipe, references, rows, failures)
    _write_json(output / RESULTS, results)
    with contextlib.ExitStack() as stack:
        is_shown = on_progress is None
        if on_progress is None:
            on_progress = stack.enter_context(_progress(len(waiting)))
        for run in waiting:
            try:
                rows[run.variant, run.seed] = _train_and_score(run, scoring, resume, on_progress)
            except _RUN_FAILURES as error:
                failures.append({"variant": run.variant, "seed": run.seed, "error": _sentence(error)})
            results = _results(recipe, references, rows, failures)
            _write_json(output / RESULTS, results)
    if rows:
        _plot(results, output)
        if is_shown:
            print_report(results, make_console(pipe_width=160))
    if failures:
        sentences = " ".join(f"{item['variant']}, seed {item['seed']}: {item['error']}" for item in failures)
        raise RuntimeError(f"{len(failures)} of {len(chosen)} runs failed. {sentences}")
    return results


def _scoring(sweep: SweepRecipe, data_dir: str | None) -> _Scoring:
    if sweep.evaluation is None:
        return _Scoring(0, False, None)
    try:
        suite.authors_documents(data_dir)
    except OSError as error:
        if data_dir is not None:
            raise
        logger.warning(f"The authors' texts are left out: {error}")
        return _Scoring(sweep.evaluation_documents, False, None)
    return _Scoring(sweep.evaluation_documents, True, data_dir)


def _finished(recipe: Recipe, sweep: SweepRecipe) -> dict[tuple[str, int], dict[str, Any]]:
    """Results on the disk of all variants, also with seeds that are not asked for now; they must fit the recipe."""
    found = {}
    for variant in sweep.variants:
        for file in (Path(recipe.output) / variant).glob(f"seed-*/{RESULT}"):
            result = _read_result(file)
            seed = result["run"]["seed"]
            _check_same(
                file, with_current_names(result["recipe"]), make_run(recipe, sweep, variant, seed).recipe.to_mapping()
            )
            found[variant, seed] = result
    return found


def _read_result(file: Path) -> dict[str, Any]:
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        _ = result["recipe"], result["evaluation_documents"], result["run"]["seed"], result["run"]["evaluation"]
        return result
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(file)!r} is no result of a sweep; remove it, and the run is scored again.") from error


def _check_same(file: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    if differs := first_difference(found, wanted, _MOVES_NO_RESULT):
        raise ValueError(
            f"{str(file)!r} is of another recipe: {differs}; give another output, or remove {str(file.parent)!r}."
        )


def _references(recipe: Recipe, scoring: _Scoring) -> dict[str, Any]:
    """By `evaluation`, and by the name of each scored set."""
    sets = scored_sets(scoring.documents, scoring.with_authors, scoring.data_dir)
    of_evaluation = evaluation_references(recipe)
    return {**({} if of_evaluation is None else {"evaluation": of_evaluation}), **suite_references(sets)}


def _recorded_references(output: Path, rows: dict[tuple[str, int], dict]) -> dict[str, Any]:
    """Of the authors' texts, which are not within reach now, if a run has scores of them."""
    try:
        found = json.loads((output / RESULTS).read_text(encoding="utf-8"))["references"] or {}
    except (OSError, ValueError, KeyError):  # written anew
        return {}
    is_scored = any((row["evaluation"] or {}).get(suite.AUTHORS) for row in rows.values())
    return {suite.AUTHORS: found[suite.AUTHORS]} if is_scored and suite.AUTHORS in found else {}


def _results(
    recipe: Recipe, references: dict[str, Any], rows: dict[tuple[str, int], dict], failures: list[dict]
) -> dict[str, Any]:
    values = recipe.to_mapping()
    del values["output"]
    values["sweep"] = {key: value for key, value in values["sweep"].items() if key not in _NOT_MEASURED}
    values["sweep"]["seeds"] = sorted({*values["sweep"]["seeds"], *(seed for _, seed in rows)})
    order = list(values["sweep"]["variants"])
    keys = sorted(rows, key=lambda key: (order.index(key[0]), key[1]))
    runs = [rows[key] for key in keys]
    return {"recipe": values, "references": references, "runs": runs, "failures": list(failures)}


def _train_and_score(run: Run, scoring: _Scoring, resume: bool, on_progress: OnProgress) -> dict[str, Any]:
    """A row of the results, which is on the disk when this returns."""
    on_progress(run.name, 0, run.recipe.training.steps, {})
    with quiet_libraries(messages=False, datasets=True):
        trained = train(run.recipe, resume=resume, on_progress=lambda *record: on_progress(run.name, *record))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = AutoModelForCausalLM.from_pretrained(trained["folder"], dtype=torch.float32).to(device).eval()
        evaluation = None
        if scoring.documents > 0:
            evaluation = suite.evaluate_head_tasks(
                model,
                AutoTokenizer.from_pretrained(trained["folder"]),
                data_dir=scoring.data_dir,
                documents=scoring.documents,
                with_authors=scoring.with_authors,
            )
    records, batch_tokens = read_log(run.folder), run.recipe.training.batch_tokens
    flops = flops_per_token(model.config, run.recipe.data.sequence_length)
    row = {
        "variant": run.variant,
        "seed": run.seed,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "training": {
            "steps": trained["steps"],
            "tokens": trained["steps"] * batch_tokens,
            "flops": float(trained["steps"] * batch_tokens * flops),
            "seconds": round(training_seconds(records, batch_tokens), 1),
            "train_loss": trained["loss"],
            "evaluation_loss": trained["evaluation_loss"],
            "device": _device_name(),
        },
        "curve": evaluation_curve(records, batch_tokens, flops),
        "evaluation": evaluation,
    }
    recipe = run.recipe.to_mapping()
    _write_json(run.folder / RESULT, {"recipe": recipe, "evaluation_documents": scoring.documents, "run": row})
    return row


def _device_name() -> str:
    """What the seconds of a run hold for."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'' if threads == 1 else 's'}"


def _sentence(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A run a line: its scores by task are hundreds of numbers.
    members = [f"{json.dumps(key)}: {_lines(value)}" for key, value in values.items()]
    write_atomically(path, "{" + ",\n".join(members) + "}\n")


def _lines(value: Any) -> str:
    """JSON in which every item of a list has a line."""
    if not isinstance(value, list) or not value:
        return json.dumps(value, ensure_ascii=False)
    return "[\n" + ",\n".join(json.dumps(item, ensure_ascii=False) for item in value) + "\n]"


def _plot(results: dict[str, Any], output: Path) -> None:
    """The pictures of a sweep, and of its pairs a table besides."""
    has_pairs = bool(compare_pairs(results))
    if has_pairs:
        write_costs(results, output / COSTS)
        write_take_offs(results, output / TAKE_OFFS)
    try:
        plot_sweep(results, output / PLOT)
        if has_pairs:
            plot_curves(results, output / CURVES)
    except ImportError as error:
        logger.warning(f"No plot is drawn: {error}")


@contextlib.contextmanager
def _progress(runs: int) -> Iterator[OnProgress]:
    """One bar on stderr for all runs; where that is no terminal, a line for every run that begins."""
    with progress_bar(TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn()) as (bar, console):
        row = bar.add_task("Sweep", total=runs)
        done: dict[str, float] = {}

        def update(name: str, step: int, total: int, record: dict[str, float]) -> None:
            if name not in done and console is not None:
                console.print(f"{name} ({len(done) + 1} of {runs})", soft_wrap=True)
            done[name] = step / total
            loss = f", loss {record['loss']:.4f}" if "loss" in record else ""
            bar.update(row, completed=sum(done.values()), description=f"{name} ({len(done)} of {runs}){loss}")

        yield update
