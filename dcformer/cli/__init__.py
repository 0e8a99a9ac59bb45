"""The `dcformer` command: its subcommands call functions of the rest of the package."""

import io
import sys
from typing import Annotated

import typer
from typer import Option

from ..version_dcformer import __version__
from .analyse import analyse_command
from .chat import chat_command
from .checkpoints import card_command, convert_app, inspect_command, verify_command
from .environment import env_command
from .evaluate import eval_command, lm_eval_command, report_command, tasks_command
from .generate import generate_command
from .options import QUICK_HELP
from .serve import PASS_OPTIONS_ON, demo_command, serve_command
from .train import train_command


app = typer.Typer(
    help="Generate with, serve, train, evaluate and convert DCFormer models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # in 80 columns its boxes cut names of options
    context_settings=QUICK_HELP,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"dcformer {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


# In the order of the help.
app.command("generate")(generate_command)
app.command("chat")(chat_command)
app.command("demo")(demo_command)
app.command("serve", context_settings=PASS_OPTIONS_ON)(serve_command)
app.command("train")(train_command)
app.command("eval")(eval_command)
app.command("report")(report_command)
app.command("tasks")(tasks_command)
app.command("lm-eval", context_settings=PASS_OPTIONS_ON, add_help_option=False)(lm_eval_command)
app.command("analyse")(analyse_command)
app.add_typer(convert_app, name="convert")
app.command("inspect")(inspect_command)
app.command("verify")(verify_command)
app.command("card")(card_command)
app.command("env")(env_command)


def main() -> None:
    """Entry point of the `dcformer` command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what the encoding of a terminal or a pipe lacks becomes "?"
    app(prog_name="dcformer")


__all__ = ["app", "main"]
