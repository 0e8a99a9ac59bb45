"""Sweeps: every variant of a recipe with every seed, each a run of `train`, with results that a stopped sweep keeps.

<output>/<variant>/seed-<seed>/                as `train` leaves it
<output>/<variant>/seed-<seed>/result.json     what was measured, written last
<output>/results.json                          all of these, written anew after every run
<output>/sweep.png                             means and intervals over the seeds

Seeds are the outer loop, so that a sweep which is stopped has comparable rows of every variant.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from rich.progress import TaskProgressColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..common.quiet import quiet_libraries
from ..common.renamed import with_current_names
from ..common.signals import signals_as_interruptions, without_ctrl_c
from ..common.terminal import make_console, progress_bar
from ..training.checkpoints import DamagedCheckpointError
from ..training.recipe import Recipe, difference
from ..training.run import train
from ..training.run_folder import locked_folder
from ..training.trainer import LOG_FILE
from .recipe import Run, SweepRecipe, make_run, plan_sweep


RESULT, RESULTS, PLOT = "result.json", "results.json", "sweep.png"
# Of a recipe, what moves no number of a result.
_FREE = ("name", "output", "sweep", "training.save_steps", "training.keep_checkpoints", "training.tensorboard")
# Of `sweep:`, what says how it was run and not what was measured.
_NOT_MEASURED = ("processes", "only", "data_dir")
# One run may fail by these; anything else, such as data that are missing, stops the sweep.
_RUN_FAILURES = (FloatingPointError, RuntimeError, DamagedCheckpointError)
_SECONDS_BETWEEN_RECORDS = 0.2
_SECONDS_TO_END = 20  # of a process that is told to: a step, and leaving in good order

OnProgress = Callable[[str, int, int, dict[str, float]], None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Scoring:
    """How a trained model is scored: on so many held-out documents, and maybe on the authors' texts; 0: not at all."""

    documents: int
    with_authors: bool
    data_dir: str | None

    def is_done_in(self, result: dict[str, Any]) -> bool:
        """Whether a result holds these scores."""
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
    Train and score every variant with every seed, or go on with a sweep that was stopped.

    Finished runs in `recipe.output` are taken over and unfinished ones go on from their last checkpoint. Unless
    `on_progress` is given, a bar is shown on stderr and a table printed at the end.

    Args:
        recipe (`Recipe`): With a `sweep` mapping, see [`SweepRecipe`].
        data_dir (`str`, *optional*): Instead of the recipe's `sweep.data_dir`.
        on_progress (`Callable`, *optional*): Called with the name of a run, steps done, all steps and the last record
            of its log; with 0 steps when a run begins.
        resume (`bool`, defaults to `True`): Otherwise all the runs start over.

    Returns:
        What `results.json` holds: `recipe`; `runs`, a list of `variant`, `seed`, `parameters`, `training` (`steps`,
        `tokens`, `seconds`, `train_loss` and `evaluation_loss` in nats per token) and `evaluation` (`held_out` and
        `authors`, summaries of scores, or `None`), in the order of the recipe; `failures`, of runs that failed.

    Raises:
        ValueError: for a wrong recipe, or a folder whose runs are of another one or that another process is writing.
        FileNotFoundError: if data are missing.
        RuntimeError: if runs failed, such as by a loss that is no longer finite; all others are finished first.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError("A sweep starts its processes itself; run it without torchrun and set sweep.processes.")
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

    results = _results(recipe, rows, failures)
    _write_json(output / RESULTS, results)
    with contextlib.ExitStack() as stack:
        is_shown = on_progress is None
        if is_shown:
            on_progress = stack.enter_context(_progress(len(waiting)))
        if sweep.processes == 1:
            outcomes = _one_by_one(waiting, scoring, resume, on_progress)
        else:
            outcomes = _side_by_side(waiting, sweep.processes, scoring, resume, on_progress)
        for run, outcome in outcomes:
            if isinstance(outcome, str):
                failures.append({"variant": run.variant, "seed": run.seed, "error": outcome})
            else:
                rows[run.variant, run.seed] = outcome
            results = _results(recipe, rows, failures)
            _write_json(output / RESULTS, results)
    if rows:
        _plot(results, output / PLOT)
        if is_shown:
            from .report import print_report

            print_report(results, make_console(pipe_width=160))
    if failures:
        sentences = " ".join(f"{item['variant']}, seed {item['seed']}: {item['error']}" for item in failures)
        raise RuntimeError(f"{len(failures)} of {len(chosen)} runs failed. {sentences}")
    return results


def _scoring(sweep: SweepRecipe, data_dir: str | None) -> _Scoring:
    if sweep.evaluation is None:
        return _Scoring(0, False, None)
    from ..head_tasks.suite import authors_documents

    try:
        authors_documents(data_dir)
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
    if differs := difference(found, wanted, _FREE):
        raise ValueError(
            f"{str(file)!r} is of another recipe: {differs}; give another output, or remove {str(file.parent)!r}."
        )


def _results(recipe: Recipe, rows: dict[tuple[str, int], dict], failures: list[dict]) -> dict[str, Any]:
    values = recipe.to_mapping()
    del values["output"]
    values["sweep"] = {key: value for key, value in values["sweep"].items() if key not in _NOT_MEASURED}
    values["sweep"]["seeds"] = sorted({*values["sweep"]["seeds"], *(seed for _, seed in rows)})
    order = list(values["sweep"]["variants"])
    keys = sorted(rows, key=lambda key: (order.index(key[0]), key[1]))
    return {"recipe": values, "runs": [rows[key] for key in keys], "failures": list(failures)}


def _train_and_score(run: Run, scoring: _Scoring, resume: bool, on_progress: OnProgress) -> dict[str, Any]:
    """A row of the results, which is on the disk when this returns."""
    on_progress(run.name, 0, run.recipe.training.steps, {})
    with quiet_libraries(messages=False, datasets=True):
        trained = train(run.recipe, resume=resume, on_progress=lambda *record: on_progress(run.name, *record))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = AutoModelForCausalLM.from_pretrained(trained["folder"], dtype=torch.float32).to(device).eval()
        evaluation = None
        if scoring.documents > 0:
            from ..head_tasks.suite import evaluate_head_tasks

            evaluation = evaluate_head_tasks(
                model,
                AutoTokenizer.from_pretrained(trained["folder"]),
                data_dir=scoring.data_dir,
                documents=scoring.documents,
                with_authors=scoring.with_authors,
            )
    row = {
        "variant": run.variant,
        "seed": run.seed,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "training": {
            "steps": trained["steps"],
            "tokens": trained["steps"] * run.recipe.training.batch_tokens,
            "seconds": _training_seconds(run),
            "train_loss": trained["loss"],
            "evaluation_loss": trained["evaluation_loss"],
        },
        "evaluation": evaluation,
    }
    recipe = run.recipe.to_mapping()
    _write_json(run.folder / RESULT, {"recipe": recipe, "evaluation_documents": scoring.documents, "run": row})
    return row


def _training_seconds(run: Run) -> float:
    """By the throughput in the log, which knows the parts of a run that was stopped; evaluating and saving left out."""
    seconds, before = 0.0, 0
    for line in (run.folder / LOG_FILE).read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record.get("tokens_per_second"):
            seconds += (record["step"] - before) * run.recipe.training.batch_tokens / record["tokens_per_second"]
            before = record["step"]
    return round(seconds, 1)


def _one_by_one(
    runs: Sequence[Run], scoring: _Scoring, resume: bool, on_progress: OnProgress
) -> Iterator[tuple[Run, dict | str]]:
    """Every run and its row, or the sentence of why it failed."""
    for run in runs:
        try:
            outcome = _train_and_score(run, scoring, resume, on_progress)
        except _RUN_FAILURES as error:
            outcome = _sentence(error)
        yield run, outcome


def _side_by_side(
    runs: Sequence[Run], processes: int, scoring: _Scoring, resume: bool, on_progress: OnProgress
) -> Iterator[tuple[Run, dict | str]]:
    """As `_one_by_one`, with several runs at a time in processes of their own."""
    context = multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // processes)
    waiting = list(runs)
    live: dict[Connection, tuple[multiprocessing.Process, Run]] = {}
    try:
        while waiting or live:
            while waiting and len(live) < processes:
                run = waiting.pop(0)
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(sender, threads, run, scoring, resume))
                process.daemon = True  # Python would wait for others at its end, however that comes
                with without_ctrl_c():
                    live[receiver] = process, run
                    process.start()
                sender.close()  # so that the end of the process is the end of the pipe
            for receiver in wait(list(live)):
                process, run = live[receiver]
                try:
                    kind, value = receiver.recv()
                except EOFError:
                    process.join()
                    kind, value = "outcome", f"Its process ended with status {process.exitcode}."
                if kind == "progress":
                    on_progress(run.name, *value)
                    continue
                if kind == "error":
                    raise value
                process.join()
                del live[receiver]
                yield run, value
    finally:
        started = [process for process, _ in live.values() if process.is_alive()]
        for process in started:
            process.terminate()
        for process in started:
            process.join(_SECONDS_TO_END)
            process.kill()


def _child(sender: Connection, threads: int, run: Run, scoring: _Scoring, resume: bool) -> None:
    """Do one run and send its records and its outcome."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    sent = -_SECONDS_BETWEEN_RECORDS

    def on_progress(name: str, step: int, total: int, record: dict[str, float]) -> None:
        nonlocal sent
        if step == total or monotonic() - sent > _SECONDS_BETWEEN_RECORDS:
            sent = monotonic()
            sender.send(("progress", (step, total, record)))

    try:
        with signals_as_interruptions():
            outcome = "outcome", next(_one_by_one((run,), scoring, resume, on_progress))[1]
    except KeyboardInterrupt:  # the sweep ends
        return
    except Exception as error:
        # Other classes may not survive the way to the other process.
        is_plain = type(error).__module__ == "builtins"
        outcome = "error", error if is_plain else ValueError(f"{type(error).__name__}: {error}")
    sender.send(outcome)


def _end_with_parent() -> None:
    # A run that outlives its sweep would write into the folder of the next one.
    multiprocessing.parent_process().join()
    os._exit(1)


def _sentence(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _write_json(path: Path, values: dict[str, Any]) -> None:
    """In one step: there is never half of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    # A run a line: its scores by task are hundreds of numbers.
    members = [f"{json.dumps(key)}: {_lines(value)}" for key, value in values.items()]
    with partial.open("w", encoding="utf-8") as file:
        file.write("{" + ",\n".join(members) + "}\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _lines(value: Any) -> str:
    """JSON in which every item of a list has a line."""
    if not isinstance(value, list) or not value:
        return json.dumps(value, ensure_ascii=False)
    return "[\n" + ",\n".join(json.dumps(item, ensure_ascii=False) for item in value) + "\n]"


def _plot(results: dict[str, Any], path: Path) -> None:
    try:
        from .plot import plot_sweep

        plot_sweep(results, path)
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
