"""`dcformer bench`: speed of attention, decoding and training, and which implementation is chosen."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from .options import Debug, Device
from .running import running_command


def bench_command(
    what: Annotated[
        Literal["attention", "decode", "train", "model"] | None,
        typer.Argument(
            help="What to measure: the operator, decoding, training, or a model (Table 2).", show_default=False
        ),
    ] = None,
    device: Device = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float64"] | None,
        typer.Option(help="Number type to explain.", show_default="bfloat16 on a GPU, else float32"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes: shows that everything runs.")] = False,
    seconds: Annotated[float, typer.Option(help="Start no new measurement after this many seconds.", min=1)] = 300.0,
    json: Annotated[
        Path | None,
        typer.Option(help="File for all results.", show_default="WHAT-DEVICE.json, in benchmarks/results if there"),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Explain the choice for the shape below.")] = False,
    heads: Annotated[int, typer.Option(help="Query heads.", min=1)] = 32,
    key_value_heads: Annotated[
        int | None, typer.Option(help="Key/value heads.", min=1, show_default="as --heads")
    ] = None,
    channels: Annotated[int, typer.Option(help="Head dimension.", min=1)] = 128,
    queries: Annotated[int, typer.Option(help="Number of queries.", min=1)] = 4096,
    keys: Annotated[int | None, typer.Option(help="Number of keys.", min=1, show_default="as --queries")] = None,
    window: Annotated[int | None, typer.Option(help="Sliding window.", min=1, show_default="all keys")] = None,
    gradient: Annotated[bool, typer.Option("--gradient", help="Explain the choice for training.")] = False,
    debug: Debug = False,
) -> None:
    """Measure attention, decoding, training or a whole model, or print which implementation is chosen and why."""
    given = dict(locals())
    if explain == (what is not None):
        raise typer.BadParameter("Give either what to measure (attention, decode, train, model) or --explain.")
    with running_command(debug):
        from ..bench import command

        if what is None:
            shape = ("device", "dtype", "heads", "key_value_heads", "channels", "queries", "keys", "window", "gradient")
            for name, choice in command.explain(**{part: given[part] for part in shape}).items():
                print(f"{name}: {choice}", flush=True)
            return
        status = command.run_benchmark(what, device=device, quick=quick, seconds=seconds, json=json)
    if status != 0:
        raise typer.Exit(status)
