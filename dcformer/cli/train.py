"""`dcformer train`; for several processes `torchrun -m dcformer.cli train`."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Annotated, Any

from typer import Argument, Option

from ..common.processes import is_first_process
from ..common.quiet import quiet_libraries
from ..common.terminal import progress_bar
from .options import Debug
from .running import print_line, running_command


_INTERRUPTED = "Interrupted; checkpoints are kept, run the same command to resume."


def train_command(
    recipe: Annotated[str, Argument(metavar="RECIPE", help="YAML file of a recipe, or the name of a packaged recipe.")],
    output: Annotated[str | None, Option(help="Folder of the run.", show_default="as the recipe says")] = None,
    overrides: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="Replace a value: training.max_steps=20; repeatable."),
    ] = None,
    resume: Annotated[
        bool, Option(help="Resume from the last complete checkpoint, or remove checkpoints and start over.")
    ] = True,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Say what the run will do, and measure a step and an evaluation.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Train the model or the sweep of a recipe. The same command resumes it after a stop."""
    with running_command(debug, _INTERRUPTED):
        from ..training import load_recipe, train

        loaded = load_recipe(recipe, overrides or ())
        if output is not None:
            loaded = replace(loaded, output=output)
        runs = [loaded]
        if loaded.sweep is not None:
            from ..experiments import plan_sweep, run_sweep

            if not dry_run:
                run_sweep(loaded, resume=resume)
                return
            sweep, planned = plan_sweep(loaded)
            runs = [run.recipe for run in sweep.chosen(planned) if run.seed == sweep.seeds[0]]
        with quiet_libraries(messages=False, datasets=True):
            if dry_run:
                for run in runs:
                    train(replace(run, sweep=None), on_message=print_line, dry_run=True)
                return
            with _progress(loaded.name) as on_progress:
                result = train(loaded, resume=resume, on_progress=on_progress, on_message=_say)
        if is_first_process():
            print_line(_summary(result))


def _summary(result: dict[str, Any]) -> str:
    parts = [f"{result['steps']} steps", f"loss {result['loss']:.4f}"]
    if result["evaluation_loss"] is not None:
        parts.append(f"evaluation loss {result['evaluation_loss']:.4f} (perplexity {result['perplexity']:.2f})")
    parts.append(f"{result['seconds']:.0f} s")
    if result["resumed_from"] > 0:
        parts.append(f"resumed from step {result['resumed_from']}")
    return f"{result['folder']}: {', '.join(parts)}"


def _say(text: str) -> None:
    print(text, file=sys.stderr)  # above the bar, which takes stderr over


@contextlib.contextmanager
def _progress(name: str) -> Iterator[Callable[[int, int, dict[str, float]], None]]:
    """A bar on stderr; if that is no terminal, a line for every record of the log."""
    figures = {"loss": "loss {:.4f}", "eval_loss": "evaluation loss {:.4f}"}
    figures |= {"tokens_per_second": "tokens/s {:,.0f}", "mfu": "MFU {:.1%}"}
    with progress_bar(name) as (update, say):
        printed: dict[str, float] = {}

        def on_progress(step: int, total: int, record: dict[str, float]) -> None:
            nonlocal printed
            text = ", ".join(text.format(record[key]) for key, text in figures.items() if record.get(key) is not None)
            update(completed=step, total=total, description=f"{name} {text}".rstrip())
            if record is not printed and record:
                printed = record  # a step may have a record of its loss and one of an evaluation
                say(f"step {record['step']} of {total}: {text}")

        yield on_progress
