"""`dcformer eval`, `report` and `tasks`."""

import sys
from dataclasses import fields
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from ..common.terminal import make_console, progress_bar
from .options import Debug, Device, Revision, Tokenizer
from .running import print_table, running_command


_INTERRUPTED = "Interrupted; finished tasks are kept, run the same command to resume."

Baseline = Annotated[str | None, Option(help="The model to compare the others with.")]


def eval_command(
    context: typer.Context,
    models: Annotated[list[str], Argument(metavar="MODEL...", help="Folders, Hub names or bundled models.")],
    suite: Annotated[
        str,
        Option(
            help="Suites, separated by commas: table4, head_tasks, head_tasks_authors, perplexity, wikitext2, all of "
            "these (all), or lm_eval_0_4_13, four columns of table4 with the prompts of that version."
        ),
    ] = "table4",
    tasks: Annotated[
        str | None, Option(help="Instead of --suite, as piqa,pile_ppl (see `dcformer tasks`), or tasks of lm-eval.")
    ] = None,
    include_path: Annotated[str | None, Option(help="Folder with further tasks of lm-eval, in YAML.")] = None,
    text: Annotated[
        list[str] | None,
        Option(help="Instead of --suite, the loss on a text: .txt, .jsonl, .parquet or a folder; repeatable."),
    ] = None,
    text_column: Annotated[str, Option(help="Column of --text with the documents.")] = "text",
    stride: Annotated[
        int | None, Option(help="Tokens by which windows of --text advance.", show_default="a whole window")
    ] = None,
    num_fewshot: Annotated[
        str | None,
        Option(
            help="Examples before each question, one number or several: 0,5.", show_default="0; else as lm-eval's task"
        ),
    ] = None,
    output: Annotated[str, Option(help="Folder of results; finished ones are reused.")] = "results",
    limit: Annotated[
        int | None, Option(help="Documents, windows or texts per task, evenly spread.", show_default="all")
    ] = None,
    data_dir: Annotated[str | None, Option(help="Folder of the tasks' data.", show_default="the Hub")] = None,
    data_hash: Annotated[
        list[str] | None, Option(help="Required hash of a task's data: TASK=sha256:..., or TASK=any.")
    ] = None,
    batch_size: Annotated[str, Option(help="Inputs per forward pass (vllm: at most), or auto.")] = "auto",
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        Option(
            help="Data type of the parameters.",
            show_default="bfloat16; float32 for head tasks alone; as stored for texts and lm-eval's tasks alone",
        ),
    ] = None,
    baseline: Baseline = None,
    max_length: Annotated[
        int | None, Option(help="Maximum tokens of an input or window.", show_default="as the model; windows of 2048")
    ] = None,
    device: Device = None,
    oov_policy: Annotated[
        Literal["error", "clamp"] | None,
        Option(
            help="Token ids without embedding: refuse them, or use the last.",
            show_default="clamp if all are runs of spaces; else config.json",
        ),
    ] = None,
    revision: Revision = None,
    tokenizer: Tokenizer = None,
    seed: Annotated[int, Option(help="Seed for sampling few-shot examples and for all random numbers.")] = 1234,
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Run Python code that comes with the models.")
    ] = False,
    authors: Annotated[bool, Option(help="With head_tasks: also the paper's 888 published texts.")] = True,
    engine: Annotated[Literal["transformers", "vllm"], Option(help="What runs the models.")] = "transformers",
    shared_prefixes: Annotated[bool, Option(help="Compute prefixes that prompts share only once.")] = True,
    debug: Debug = False,
) -> None:
    """Evaluate models on tasks or texts, and print the tables."""
    with running_command(debug, _INTERRUPTED):
        from ..eval import AUTHORS_TASKS, EvaluationOptions, build_report, evaluate, find_tasks

        computed = set()
        with progress_bar("Reading") as (update, say):

            def on_progress(what: str, done: int, total: int) -> None:
                computed.add(what)
                update(description=what, completed=done, total=total)
                if done == 0:
                    say(f"{what}: {total:,} requests")

            chosen: str | list[str] | None = tasks
            if not authors and (tasks is not None or not text):
                chosen = [task for task in find_tasks(suite, tasks, include_path) if task not in AUTHORS_TASKS]
            given = {field.name: context.params[field.name] for field in fields(EvaluationOptions)}
            given |= {"tasks": chosen, "text": text or (), "data_hash": _pairs("--data-hash", data_hash)}
            records = evaluate(models, output=output, on_progress=on_progress, **given)
        if records:  # empty in all processes except the first
            if reused := len(records) - len(computed):
                print(f"{reused} of {len(records)} results are of an earlier run, in {output}.", file=sys.stderr)
            baseline = baseline and records[0].model  # with its revision
            build_report(output, baseline=baseline).print(make_console())


def report_command(
    output: Annotated[str, Argument(metavar="RESULTS", help="The folder that `dcformer eval` wrote.")],
    layout: Annotated[
        Literal["terminal", "markdown", "json"], Option("--format", help="Format of the tables.")
    ] = "terminal",
    plot: Annotated[str | None, Option(help="File for a plot of every task's difference from the baseline.")] = None,
    baseline: Baseline = None,
    paper_row: Annotated[
        list[str] | None, Option(help="Row of the paper's table to compare a model with, as MODEL=ROW.")
    ] = None,
    correction: Annotated[
        Literal["none", "holm"],
        Option(help="Correction of p-values for the number of differences in a table: none, or Holm's method."),
    ] = "none",
    debug: Debug = False,
) -> None:
    """Print results of evaluations as tables of the paper."""
    with running_command(debug):
        from ..eval import build_report, plot_deltas

        rows = _pairs("--paper-row", paper_row)
        report = build_report(output, baseline=baseline, paper_rows=rows, correction=correction)
        if layout == "terminal":
            report.print(make_console())
        else:
            print(getattr(report, f"to_{layout}")().removesuffix("\n"), flush=True)
        if plot is not None:
            plot_deltas(report, plot)


def tasks_command(
    folder: Annotated[
        bool, Option("--folder", help="Print the folder of their definitions, for lm-eval's --include_path.")
    ] = False,
    debug: Debug = False,
) -> None:
    """List the evaluation tasks."""
    with running_command(debug):
        from ..eval import list_tasks, tasks_folder

        if folder:
            print(tasks_folder(), flush=True)
            return
        rows = [(t.name, t.suite, t.asks, " and ".join(map(str, t.paper_shots)) or "-") for t in list_tasks()]
        print_table("", ("task", "suite", "what it asks", "examples in the paper"), rows)
        print("Run a task with `dcformer eval MODEL --tasks TASK`, a suite with --suite.")
        print("`dcformer tasks --folder` prints the folder of the definitions, for lm-eval's --include_path.")


def lm_eval_command(context: typer.Context, debug: Debug = False) -> None:
    """Run lm-eval's own command line. It knows the models of this package: --model hf, or dcformer."""
    with running_command(debug):
        from ..eval import DCFormerLM  # noqa: F401  (registers it, or names the extra)
        from ..pretrained import pretrained_names

        for name in pretrained_names():
            if "hf" in context.args and any(f"pretrained={name}" in argument.split(",") for argument in context.args):
                raise ValueError(f"pretrained={name} is a bundled model, which --model dcformer knows and hf does not.")
        sys.argv = ["lm-eval", *context.args]
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()


def _pairs(option: str, pairs: list[str] | None) -> dict[str, str]:
    for pair in pairs or ():
        if "=" not in pair:
            raise ValueError(f"{option} must be NAME=VALUE, got {pair!r}.")
    return {name: value for name, _, value in (pair.rpartition("=") for pair in pairs or ())}
