"""The command `train`; `python -m dcformer.training` is the same, for several processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn

from ..terminal import leaving_process_group, make_console, one_line_errors, progress_bar


_GO_ON = "Interrupted; checkpoints are kept, run the same command to go on."


def train_command(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="YAML file, or the name of a packaged recipe.")],
    output: Annotated[str | None, typer.Option(help="Folder of the run, instead of the recipe's.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Replace a value: training.max_steps=20; may be repeated."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on from the last checkpoint, or remove all and start over.")
    ] = True,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Train a model by a recipe, or go on with a run that was stopped."""
    is_first = os.environ.get("RANK", "0") == "0"
    with one_line_errors(debug, _GO_ON, is_first), leaving_process_group():
        from .recipe import load_recipe

        loaded = load_recipe(recipe, overrides or ())
        if output is not None:
            loaded = replace(loaded, output=output)
        if loaded.sweep is not None:
            from ..experiments.runner import run_sweep

            run_sweep(loaded, resume=resume)
            return
        from .run import train

        with without_other_bars(), _progress(loaded.name, is_first) as on_progress:
            result = train(loaded, resume=resume, on_progress=on_progress)
        if is_first:
            _console().print(_summary(result), soft_wrap=True)


def _summary(result: dict) -> str:
    parts = [f"{result['steps']} steps", f"loss {result['loss']:.4f}"]
    if result["evaluation_loss"] is not None:
        parts.append(f"evaluation loss {result['evaluation_loss']:.4f} (perplexity {result['perplexity']:.2f})")
    parts.append(f"{result['seconds']:.0f} s")
    if result["resumed_from"] > 0:
        parts.append(f"resumed from step {result['resumed_from']}")
    return f"{result['folder']}: {', '.join(parts)}"


@contextlib.contextmanager
def without_other_bars() -> Iterator[None]:
    """Without the progress bars of Transformers and datasets, which would tear ours."""
    import datasets
    from transformers.utils import logging

    had_bars = logging.is_progress_bar_enabled(), datasets.are_progress_bars_disabled() is False
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        for had, enable in zip(had_bars, (logging.enable_progress_bar, datasets.enable_progress_bars)):
            if had:
                enable()


@contextlib.contextmanager
def _progress(name: str, is_first: bool) -> Iterator[Callable[[int, int, dict], None]]:
    """A bar on stderr; where that is no terminal, a line for every record of the log."""
    counters = (MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with progress_bar(*counters, is_first=is_first) as (bar, console):
        row = bar.add_task(name, total=None)
        printed: dict[str, float] = {}

        def update(step: int, total: int, record: dict[str, float]) -> None:
            nonlocal printed
            text = _record(record)
            bar.update(row, completed=step, total=total, description=f"{name} {text}".rstrip())
            if console is not None and record is not printed and record:
                printed = record  # a step may have a record of its loss and one of an evaluation
                console.print(f"step {record['step']} of {total}: {text}", soft_wrap=True)

        yield update


def _record(record: dict[str, float]) -> str:
    """The figures of a record that a person watches."""
    parts = []
    for key, name, layout in (
        ("loss", "loss", ".4f"),
        ("eval_loss", "evaluation loss", ".4f"),
        ("tokens_per_second", "tokens/s", ",.0f"),
        ("mfu", "MFU", ".1%"),
    ):
        if record.get(key) is not None:
            parts.append(f"{name} {record[key]:{layout}}")
    return ", ".join(parts)


def _console() -> Console:
    return make_console(pipe_width=160)


def main() -> None:
    """Entry point of `python -m dcformer.training`."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(train_command)
    app(prog_name="python -m dcformer.training")
