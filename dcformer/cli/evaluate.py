"""`dcformer eval`, `report` and `tasks`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..common.terminal import leaving_process_group, make_console, progress_bar
from .options import Debug
from .running import is_first_process, running_command


if TYPE_CHECKING:
    from rich.console import Console

    from ..eval import Report

_INTERRUPTED = "Interrupted; finished tasks are kept, run the same command to resume."

Baseline = Annotated[str | None, typer.Option(help="The model to compare the others with.")]


def eval_command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL...",
            help="Folders, Hub names or bundled models. [default for head tasks: dcformer-tiny and transformer-tiny]",
        ),
    ] = None,
    suite: Annotated[
        str,
        typer.Option(
            help="Suites, separated by commas: table4, head_tasks, head_tasks_authors, perplexity, wikitext2, all of "
            "these (all), or lm_eval_0_4_13, four columns of table4 in the words of that version."
        ),
    ] = "table4",
    tasks: Annotated[
        str | None,
        typer.Option(help="Tasks or suites to run instead of --suite, such as piqa,pile_ppl; see `dcformer tasks`."),
    ] = None,
    num_fewshot: Annotated[str, typer.Option(help="Examples before each question, one number or several: 0,5.")] = "0",
    output: Annotated[str, typer.Option(help="Folder of results; finished ones in it are reused.")] = "results",
    limit: Annotated[
        int | None,
        typer.Option(
            help="Documents per task, spread evenly over it (windows of running text, texts of head tasks).",
            show_default="all",
        ),
    ] = None,
    data_dir: Annotated[
        str | None, typer.Option(help="A folder that holds the data of the tasks.", show_default="the Hub")
    ] = None,
    data_hash: Annotated[
        list[str] | None,
        typer.Option(help="The hash that the documents of a task must have, as TASK=sha256:..., or TASK=any."),
    ] = None,
    batch_size: Annotated[
        str, typer.Option(help="Inputs in one forward pass (with vllm the largest number), or auto.")
    ] = "auto",
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        typer.Option(help="Number type of the parameters.", show_default="bfloat16; float32 for head tasks alone"),
    ] = None,
    baseline: Baseline = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="The most tokens of an input, and the length of the windows of perplexity tasks.",
            show_default="what the model takes; windows of 2048",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device: cuda, cuda:1, mps or cpu.", show_default="the first GPU, else cpu")
    ] = None,
    oov_policy: Annotated[
        Literal["error", "clamp", "pad"] | None,
        typer.Option(
            help="Token ids without an embedding: an error, the last embedding, or added embeddings.",
            show_default="what the model's configuration says",
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of the models on the Hub.", show_default="main")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizer folder, tokenizer.json file or Hub name to use for all models.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed for sampling few-shot examples and for all random numbers.")] = 1234,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the models.")
    ] = False,
    authors: Annotated[
        bool, typer.Option("--authors/--no-authors", help="With head_tasks: the paper's 888 published texts too.")
    ] = True,
    engine: Annotated[
        Literal["transformers", "vllm"], typer.Option(help="What computes: transformers or vllm.")
    ] = "transformers",
    shared_prefixes: Annotated[
        bool,
        typer.Option(
            "--shared-prefixes/--no-shared-prefixes", help="Compute once what several prompts begin with, if possible."
        ),
    ] = True,
    debug: Debug = False,
) -> None:
    """Evaluate models on the tasks of the paper, and print its tables."""
    options: dict[str, Any] = {**locals()}
    is_first = is_first_process()
    with running_command(options.pop("debug"), _INTERRUPTED, is_first), leaving_process_group():
        from ..eval import AUTHORS_TASKS, evaluate, find_tasks

        if not options.pop("authors"):
            options["tasks"] = [task for task in find_tasks(suite, tasks) if task not in AUTHORS_TASKS]
        options["num_fewshot"] = [int(part) for part in num_fewshot.split(",")]
        options["data_hash"] = _pairs("--data-hash", data_hash or [])
        with _progress() as on_progress:
            records = evaluate(**options, on_progress=on_progress)
        if is_first:
            # That of the bundled models is chosen by `evaluate`.
            is_bundled = not models and baseline is None
            _build_report(output, records[0].model if is_bundled else baseline, {}).print(_console())


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
        typer.Option(help="The row of the paper's table to compare a model with, as MODEL=ROW."),
    ] = None,
    correction: Annotated[
        Literal["none", "holm"],
        typer.Option(help="How to correct p-values for the number of differences in a table: not, or by Holm's rule."),
    ] = "none",
    debug: Debug = False,
) -> None:
    """Print the results of evaluations as tables, laid out as in the paper."""
    with running_command(debug, loads_models=False):
        report = _build_report(output, baseline, _pairs("--paper-row", paper_row or []), correction)
        if layout == "terminal":
            report.print(_console())
        else:
            text = getattr(report, f"to_{layout}")()
            typer.echo(text, nl=not text.endswith("\n"))
        if plot is not None:
            from ..eval import plot_deltas

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
        from rich.table import Table

        from ..eval import list_tasks, tasks_folder

        if folder:
            typer.echo(tasks_folder())
            return
        table = Table()
        for column in ("task", "suite", "what it asks", "examples in the paper"):
            table.add_column(column, overflow="fold")
        for task in list_tasks():
            table.add_row(task.name, task.suite, task.asks, " and ".join(map(str, task.paper_shots)) or "-")
        _console().print(table)
        typer.echo("Run a task by `dcformer eval MODEL --tasks TASK`, a suite by --suite.")
        typer.echo("`dcformer tasks --folder` prints the folder of the definitions, for lm-eval's --include_path.")


def _build_report(output: str, baseline: str | None, paper_rows: dict[str, str], correction: str = "none") -> Report:
    from ..eval import build_report

    return build_report(output, baseline=baseline, paper_rows=paper_rows, correction=correction)


def _pairs(option: str, pairs: list[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(f"{option} must be NAME=VALUE, got {pair!r}.")
    return {name: value for name, _, value in (pair.rpartition("=") for pair in pairs)}


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr; where that is no terminal, a line for every task that begins."""
    from rich.progress import MofNCompleteColumn, TimeRemainingColumn

    with progress_bar(MofNCompleteColumn(), TimeRemainingColumn()) as (bar, console):
        row = bar.add_task("Reading", total=None)

        def update(what: str, done: int, total: int) -> None:
            bar.update(row, description=what, completed=done, total=total)
            if done == 0 and console is not None:
                console.print(f"{what}: {total:,} requests", soft_wrap=True)

        yield update


def _console() -> Console:
    return make_console(200)
