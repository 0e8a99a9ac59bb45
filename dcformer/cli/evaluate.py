"""`dcformer eval`, `report` and `tasks`; `python -m dcformer.eval` is the first of them alone."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..common.renamed import refuse_old_name
from ..common.terminal import leaving_process_group, make_console, progress_bar
from .options import Debug
from .running import is_first_process, running_command


if TYPE_CHECKING:
    from rich.console import Console

    from ..eval.report_tables import Report

_HANDED_ON_APART = ("models", "num_fewshot", "dtype", "authors", "data_hash", "debug")
_TOLD_ON_STDERR = ("dcformer.eval", "dcformer.head_tasks")
_INTERRUPTED = "Interrupted; finished tasks are kept, run the same command to resume."
_INTERRUPTED_HEAD_TASKS = "Interrupted; nothing was written, run the same command to start again."

Baseline = Annotated[str | None, typer.Option(help="The model, as a folder or Hub name, to compare the others with.")]


def eval_command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL...",
            help="Folders or Hub names of the models to evaluate; for head_tasks also names of bundled models.",
        ),
    ] = None,
    suite: Annotated[
        str,
        typer.Option(
            help="The suites to run, separated by commas: table4, head_tasks_authors, perplexity, wikitext2, or all, "
            "which is these four; lm_eval_0_4_13 asks four columns of table4 in the words of that version. The suite "
            "head_tasks is not part of all and runs alone."
        ),
    ] = "table4",
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Tasks or suites to run instead of --suite, separated by commas, such as piqa,pile_ppl; "
            "`dcformer tasks` lists them."
        ),
    ] = None,
    num_fewshot: Annotated[
        str,
        typer.Option(help="The number of examples shown before each question, or several separated by commas: 0,5."),
    ] = "0",
    output: Annotated[
        str, typer.Option(help="The folder to write results to; finished results in it are reused.")
    ] = "results",
    limit: Annotated[
        int | None,
        typer.Option(
            help="The number of documents to take from each task, spread evenly over it, or windows of running text; "
            "all unless given."
        ),
    ] = None,
    data_dir: Annotated[
        str | None, typer.Option(help="A folder that holds the data of the tasks; the Hub unless given.")
    ] = None,
    data_hash: Annotated[
        list[str] | None,
        typer.Option(
            help="The hash that the documents of a task must have, as TASK=sha256:..., or TASK=any to take what is "
            "found; may be given several times."
        ),
    ] = None,
    batch_size: Annotated[
        str,
        typer.Option(
            help="The number of inputs in one forward pass (with vllm the largest number), or auto to choose what fits."
        ),
    ] = "auto",
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="Number type of the parameters; bfloat16 unless given, float32 for head_tasks."),
    ] = None,
    baseline: Baseline = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="The largest number of tokens in an input, and the length of the windows of perplexity tasks; "
            "unless given, what the model takes, and windows of 2048."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="The device to run on, such as cuda:0, mps or cpu; a CUDA GPU if there is one, else the CPU, unless "
            "given or if auto."
        ),
    ] = None,
    oov_policy: Annotated[
        Literal["error", "clamp", "pad"] | None,
        typer.Option(
            help="What to do with token ids for which a model has no embedding: stop with an error, use the last "
            "embedding, or add embeddings; what the model's configuration says unless given."
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="The branch, tag or commit of the models on the Hub; main unless given.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="A tokenizer folder, tokenizer.json file or Hub name to use for all models."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed for sampling few-shot examples and for all random numbers.")] = 1234,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the models.")
    ] = False,
    authors: Annotated[
        bool,
        typer.Option("--authors/--no-authors", help="For head_tasks: evaluate on the paper's 888 published texts too."),
    ] = True,
    stock: Annotated[
        bool,
        typer.Option("--stock", help="Score with the HFLM class of lm-eval as it is, to compare with our scorer."),
    ] = False,
    engine: Annotated[
        Literal["transformers", "vllm"],
        typer.Option(
            help="What computes: transformers, or vllm, which takes many inputs at once and computes shared beginnings "
            "of prompts once."
        ),
    ] = "transformers",
    shared_prefixes: Annotated[
        bool,
        typer.Option(
            "--shared-prefixes/--no-shared-prefixes",
            help="Compute once what several prompts begin with, such as the choices of a question, where a model can.",
        ),
    ] = True,
    debug: Debug = False,
) -> None:
    """Evaluate models on the tasks of the paper, and print its tables."""
    options = {name: value for name, value in locals().items() if name not in _HANDED_ON_APART}
    is_first = is_first_process()
    is_head_tasks = suite.strip() == "head_tasks"
    interrupted = _INTERRUPTED_HEAD_TASKS if is_head_tasks else _INTERRUPTED
    with running_command(debug, interrupted, is_first), leaving_process_group(), _log_on_stderr():
        shots = _numbers(num_fewshot)
        refuse_old_name("suite", suite.strip())
        hashes = _pairs("--data-hash", data_hash or [], "TASK=HASH, such as pile_ppl=sha256:...")
        if is_head_tasks:
            if hashes:
                raise ValueError(f"--data-hash has no meaning for --suite {suite}; leave it out.")
            if is_first:
                _compare_on_head_tasks(models or [], shots, authors, dtype or "float32", **options)
            return
        if not models:
            raise ValueError("No model is named; give a folder or a Hub id, or --suite head_tasks.")
        if not authors:
            raise ValueError("--no-authors is for --suite head_tasks only; leave it out.")
        from ..eval.runner import evaluate

        with _progress() as on_progress:
            evaluate(
                models,
                num_fewshot=shots,
                dtype=dtype or "bfloat16",
                data_hash=hashes,
                on_progress=on_progress,
                **options,
            )
        if is_first:
            _print_report(output, baseline)


def report_command(
    output: Annotated[str, typer.Argument(metavar="RESULTS", help="The folder that `dcformer eval` wrote.")],
    layout: Annotated[
        Literal["terminal", "markdown", "csv", "json", "html"],
        typer.Option("--format", help="The format in which to print the tables."),
    ] = "terminal",
    plot: Annotated[
        str | None,
        typer.Option(help="An image file to write, with each task's difference from the baseline."),
    ] = None,
    baseline: Baseline = None,
    paper_row: Annotated[
        list[str] | None,
        typer.Option(
            help="The row of the paper's table to compare a model with, as MODEL=ROW; may be given several times."
        ),
    ] = None,
    correction: Annotated[
        Literal["none", "holm"],
        typer.Option(
            help="How to correct p-values for the number of differences in a table: not at all, or by Holm's rule, so "
            "that models which do not differ show any difference in at most 5 % of tables."
        ),
    ] = "none",
    debug: Debug = False,
) -> None:
    """Print the results of evaluations as tables, laid out as in the paper."""
    with running_command(debug, loads_models=False):
        report = _build_report(output, baseline, _paper_rows(paper_row or []), correction)
        if layout == "terminal":
            report.print(_console())
        else:
            write = {
                "markdown": report.to_markdown,
                "csv": report.to_csv,
                "json": report.to_json,
                "html": report.to_html,
            }[layout]
            text = write()
            typer.echo(text, nl=not text.endswith("\n"))
        if plot is not None:
            from ..eval.plot import plot_deltas

            plot_deltas(report, plot)


def tasks_command(
    folder: Annotated[
        bool,
        typer.Option("--folder", help="Print the folder of the task definitions, for lm-eval's --include_path."),
    ] = False,
    debug: Debug = False,
) -> None:
    """List the tasks that models can be evaluated on."""
    with running_command(debug, loads_models=False):
        if folder:
            from ..eval.table4_tasks import tasks_folder

            typer.echo(tasks_folder())
            return
        from rich.table import Table

        from ..eval.suites import list_tasks

        table = Table()
        for column in ("task", "suite", "what it asks", "examples in the paper"):
            table.add_column(column, overflow="fold")
        for task in list_tasks():
            shots = " and ".join(map(str, task.paper_shots)) or "-"
            table.add_row(task.name, task.suite, task.asks, shots)
        _console().print(table)
        typer.echo(
            "A task is run by `dcformer eval MODEL --tasks TASK`, a suite by --suite. The suite all is every task of "
            "table4, head_tasks_authors, perplexity and wikitext2, not of lm_eval_0_4_13; head_tasks is no part of it "
            "and runs alone."
        )
        typer.echo("`dcformer tasks --folder` prints the folder of the definitions, for lm-eval's --include_path.")


def _compare_on_head_tasks(
    models: list[str],
    shots: tuple[int, ...],
    authors: bool,
    dtype: str,
    *,
    suite: str,
    tasks: str | None,
    output: str,
    limit: int | None,
    batch_size: str,
    max_length: int | None,
    oov_policy: str | None,
    stock: bool,
    engine: str,
    seed: int,
    shared_prefixes: bool,
    **options: Any,
) -> None:
    """The suite head_tasks, which needs no lm-eval."""
    meaningless = {
        "--tasks": tasks is not None,
        "--num-fewshot": shots != (0,),
        "--oov-policy": oov_policy is not None,
        "--max-length": max_length is not None,
        "--stock": stock,
        "--engine": engine != "transformers",
        "--no-shared-prefixes": not shared_prefixes,
    }
    for name, is_given in meaningless.items():
        if is_given:
            raise ValueError(f"{name} has no meaning for --suite {suite}; leave it out.")
    from ..eval.options import check_options
    from ..head_tasks.comparison import compare_models
    from ..head_tasks.report import print_comparison, reserved_output, write_comparison
    from ..head_tasks.suite import BATCH_SIZE, HELD_OUT_DOCUMENTS

    check_options(limit=limit, batch_size=batch_size, dtype=dtype, seed=seed)
    with reserved_output(output):
        with _progress("documents") as on_progress:
            comparison = compare_models(
                models,
                documents=limit or HELD_OUT_DOCUMENTS,
                most_authors=limit,
                with_authors=authors,
                batch_size=BATCH_SIZE if batch_size == "auto" else int(batch_size),
                seed=seed,
                dtype=dtype,
                on_progress=on_progress,
                **options,
            )
        print_comparison(comparison, _console())
        for line in write_comparison(comparison, output):
            _console().print(line, soft_wrap=True)


def _print_report(output: str, baseline: str | None) -> None:
    """The tables of all results in the folder, of which earlier ones may have been damaged since."""
    try:
        report = _build_report(output, baseline, {})
    except ValueError as error:
        raise ValueError(f"The evaluation is finished and kept, but no table can be printed: {error}") from error
    report.print(_console())


def _build_report(output: str, baseline: str | None, paper_rows: dict[str, str], correction: str = "none") -> Report:
    from ..eval.report import build_report

    return build_report(output, baseline=baseline, paper_rows=paper_rows, correction=correction)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--num-fewshot must be numbers separated by commas, such as 0,5; got {text!r}.") from None


def _paper_rows(pairs: list[str]) -> dict[str, str]:
    return _pairs("--paper-row", pairs, "MODEL=ROW, such as my/folder=DCFormer++2.8B")


def _pairs(option: str, pairs: list[str], form: str) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(f"{option} must be {form}; got {pair!r}.")
    return {name: value for name, _, value in (pair.rpartition("=") for pair in pairs)}


class _OnStderr(logging.Handler):
    """Lines above the bar; the stream is looked up each time, as the bar puts another in its place."""

    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(record.getMessage(), err=True)


@contextlib.contextmanager
def _log_on_stderr() -> Iterator[None]:
    """What the evaluation tells besides its progress: the device it has chosen, results that are run again."""
    loggers = [logging.getLogger(name) for name in _TOLD_ON_STDERR]
    handler, before = _OnStderr(), [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (level, propagates) in zip(loggers, before):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagates


@contextlib.contextmanager
def _progress(unit: str = "requests") -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr; where that is no terminal, a line for every task that begins."""
    from rich.progress import MofNCompleteColumn, TimeRemainingColumn

    with progress_bar(MofNCompleteColumn(), TimeRemainingColumn()) as (bar, console):
        row = bar.add_task("Reading", total=None)

        def update(what: str, done: int, total: int) -> None:
            if done == 0 and console is not None:
                console.print(f"{what}: {total} {unit}", soft_wrap=True)
            if done == 0:
                bar.reset(row, description=what, total=total)
            bar.update(row, completed=done)

        yield update


def _console() -> Console:
    return make_console(pipe_width=200)  # the eleven columns of Table 4 side by side


def main() -> None:
    """Entry point of `python -m dcformer.eval`."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(eval_command)
    app(prog_name="python -m dcformer.eval")
