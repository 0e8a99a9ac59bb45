"""`dcformer bench`: how fast attention, decoding and training are on this machine, and why a form is chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..bench.options import COMMANDS, HELP, Options
from .options import Debug
from .running import running_command


def bench_command(
    what: Annotated[
        str | None, typer.Argument(metavar=f"[{'|'.join(COMMANDS)}]", help=HELP["what"], show_default=False)
    ] = None,
    device: Annotated[str | None, typer.Option(help=HELP["device"])] = None,
    dtype: Annotated[str | None, typer.Option(help=HELP["dtype"])] = None,
    quick: Annotated[bool, typer.Option("--quick", help=HELP["quick"])] = False,
    seconds: Annotated[float, typer.Option(help=HELP["seconds"])] = Options.seconds,
    json: Annotated[Path | None, typer.Option(help=HELP["json"])] = None,
    plot: Annotated[Path | None, typer.Option(help=HELP["plot"])] = None,
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help=HELP["compile"], show_default=False)
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help=HELP["explain"])] = False,
    heads: Annotated[int, typer.Option(help=HELP["heads"])] = Options.heads,
    key_value_heads: Annotated[int | None, typer.Option(help=HELP["key_value_heads"])] = None,
    channels: Annotated[int, typer.Option(help=HELP["channels"])] = Options.channels,
    queries: Annotated[int, typer.Option(help=HELP["queries"])] = Options.queries,
    keys: Annotated[int | None, typer.Option(help=HELP["keys"])] = None,
    window: Annotated[int | None, typer.Option(help=HELP["window"])] = None,
    gradient: Annotated[bool, typer.Option("--gradient", help=HELP["gradient"])] = False,
    debug: Debug = False,
) -> None:
    """Measure attention, decoding, training or a whole model, or print which form of attention is chosen and why."""
    values = {name: value for name, value in locals().items() if name != "debug"}
    with running_command(debug):
        options = Options(**values)
        from ..bench.command import run_command

        status = run_command(options)
    if status != 0:
        raise typer.Exit(status)
