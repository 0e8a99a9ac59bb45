"""`dcformer inspect`: what a checkpoint is."""

import json
from typing import Annotated

import typer

from .options import Debug, Json, PaxConfig, Step, TrainConfig
from .printing import checkpoint_console, print_location, print_origins, print_table, shape_text
from .running import running_on_checkpoints


def inspect_command(
    path: Annotated[str, typer.Argument(metavar="PATH", help="The checkpoint: a local path, or a bucket or Hub name.")],
    step: Step = None,
    train_config: TrainConfig = None,
    config: PaxConfig = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the format, arrays and architecture of a checkpoint, without reading its weights."""
    with running_on_checkpoints(debug):
        from ..conversion import dtype_name, inspect_checkpoint

        found = inspect_checkpoint(path, step=step, train_config=train_config, config=config)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2, default=str))
        return
    console = checkpoint_console()
    print_location(found.format, found.location, found.step, found.skipped_steps)
    rows = [
        (each.name, shape_text(each.shape), dtype_name(each.dtype), shape_text(each.chunk_shape), f"{each.nbytes:,}")
        for each in found.tensors
    ]
    print_table("Arrays", ("name", "shape", "dtype", "chunk", "bytes"), rows)
    if found.architecture:
        print_origins("Architecture", found.architecture)
    else:
        console.print(f"Architecture unknown: {found.note}", soft_wrap=True)
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in found.dtypes.items())
    console.print(f"{found.total_parameters:,} parameters, {found.total_bytes:,} bytes, arrays: {dtypes}")
    if found.optimizer_arrays:
        console.print(f"{found.optimizer_arrays} arrays of the optimizer, not opened")
