"""The commands `eval`, `report` and `tasks`; `python -m dcformer.eval` is the first of them alone."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeRemainingColumn

from ..common.renamed import refuse_old_name
from ..terminal import leaving_process_group, make_console, one_line_errors, progress_bar


_HANDED_ON_APART = ("models", "num_fewshot", "dtype", "authors", "debug")
_TOLD_ON_STDERR = ("dcformer.eval", "dcformer.head_tasks")
_GO_ON = "Interrupted; finished tasks are kept, run the same command to go on."
_START_AGAIN = "Interrupted; nothing was written, run the same command to start again."

Output = Annotated[str, typer.Option(help="Folder of the results; finished ones in it are taken over.")]
Baseline = Annotated[str | None, typer.Option(help="Model that the others are compared with.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def eval_command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL...", help="Folders or names on the Hub; for head_tasks, also names of models in the box."
        ),
    ] = None,
    suite: Annotated[
        str, typer.Option(help="table4, head_tasks_authors, perplexity, wikitext2 or all; or some: a,b; or head_tasks.")
    ] = "table4",
    tasks: Annotated[
        str | None, typer.Option(help="Tasks or suites to run instead: piqa,pile_ppl,head_tasks_authors.")
    ] = None,
    num_fewshot: Annotated[str, typer.Option(help="Examples before a question, such as 0,5.")] = "0",
    output: Output = "results",
    limit: Annotated[int | None, typer.Option(help="Only so many documents of every task.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Folder with the data; the Hub if not given.")] = None,
    batch_size: Annotated[str, typer.Option(help="Inputs in a forward pass, or auto.")] = "auto",
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="Of the parameters; bfloat16 if not given, for head_tasks float32."),
    ] = None,
    baseline: Baseline = None,
    max_length: Annotated[
        int | None,
        typer.Option(help="Most tokens of an input, and the window of perplexity tasks; the model's own, and 2048."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Such as cuda:0, mps or cpu; if not given or auto, a CUDA GPU if there is one, else the CPU."
        ),
    ] = None,
    oov_policy: Annotated[
        Literal["error", "clamp", "pad"] | None, typer.Option(help="For token ids that the embedding lacks.")
    ] = None,
    stock: Annotated[
        bool, typer.Option("--stock", help="Score with lm-eval's own model class instead of ours, to compare the two.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="Of the models on the Hub.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder, tokenizer.json or Hub name, for all models.")] = None,
    seed: Annotated[int, typer.Option(help="Of the choice of examples.")] = 1234,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code of the models.")] = False,
    authors: Annotated[
        bool, typer.Option("--authors/--no-authors", help="For head_tasks: the authors' 888 texts too.")
    ] = True,
    debug: Debug = False,
) -> None:
    """Run models through the tasks of the paper's tables, and print the tables."""
    options = {name: value for name, value in locals().items() if name not in _HANDED_ON_APART}
    is_first = os.environ.get("RANK", "0") == "0"
    from .suites import HEAD_TASKS

    is_head_tasks = suite.strip() == HEAD_TASKS
    interrupted = _START_AGAIN if is_head_tasks else _GO_ON
    with one_line_errors(debug, interrupted, is_first), leaving_process_group(), _log_on_stderr():
        shots = _numbers(num_fewshot)
        refuse_old_name("suite", suite.strip())
        if is_head_tasks:
            if is_first:
                _compare_on_head_tasks(models or [], shots, authors, dtype or "float32", **options)
            return
        if not models:
            raise ValueError(f"No model is named; give a folder or a Hub id, or --suite {HEAD_TASKS}.")
        if not authors:
            raise ValueError(f"--no-authors is for --suite {HEAD_TASKS} only; leave it out.")
        from .runner import evaluate

        with _progress() as on_progress:
            evaluate(models, num_fewshot=shots, dtype=dtype or "bfloat16", on_progress=on_progress, **options)
        if is_first:
            _print_report(output, baseline)


def report_command(
    output: Annotated[str, typer.Argument(metavar="RESULTS", help="Folder that `dcformer eval` wrote.")],
    layout: Annotated[
        Literal["terminal", "markdown", "csv", "html"], typer.Option("--format", help="Of what is printed.")
    ] = "terminal",
    plot: Annotated[str | None, typer.Option(help="Image to write: differences to the baseline per task.")] = None,
    baseline: Baseline = None,
    paper_row: Annotated[
        list[str] | None,
        typer.Option(help="MODEL=ROW: row of the paper that a model is compared with; may be repeated."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Print the tables of results, as the paper lays them out."""
    with one_line_errors(debug):
        report = _build_report(output, baseline, _paper_rows(paper_row or []))
        if layout == "terminal":
            report.print(_console())
        else:
            text = {"markdown": report.to_markdown, "csv": report.to_csv, "html": report.to_html}[layout]()
            typer.echo(text, nl=not text.endswith("\n"))
        if plot is not None:
            from .plot import plot_deltas

            plot_deltas(report, plot)


def tasks_command() -> None:
    """Print the folder of the task definitions, for lm-eval's --include_path."""
    from .table4_tasks import tasks_folder

    typer.echo(tasks_folder())


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
    seed: int,
    **options,
) -> None:
    """The suite head_tasks, which needs no lm-eval."""
    meaningless = {
        "--tasks": tasks is not None,
        "--num-fewshot": shots != (0,),
        "--oov-policy": oov_policy is not None,
        "--max-length": max_length is not None,
        "--stock": stock,
    }
    for name, is_given in meaningless.items():
        if is_given:
            raise ValueError(f"{name} has no meaning for --suite {suite}; leave it out.")
    from ..head_tasks.comparison import compare_models
    from ..head_tasks.report import print_comparison, reserved_output, write_comparison
    from ..head_tasks.suite import BATCH_SIZE, HELD_OUT_DOCUMENTS
    from .options import check_options

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


def _build_report(output: str, baseline: str | None, paper_rows: dict[str, str]):
    from .report import build_report

    return build_report(output, baseline=baseline, paper_rows=paper_rows)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--num-fewshot must be numbers separated by commas, such as 0,5; got {text!r}.") from None


def _paper_rows(pairs: list[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(f"--paper-row must be MODEL=ROW, such as my/folder=DCFormer++2.8B; got {pair!r}.")
    return dict(pair.rsplit("=", 1) for pair in pairs)


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
