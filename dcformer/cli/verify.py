"""`dcformer verify`: whether a converted folder is unchanged, or two checkpoints are the same model."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from .options import Debug, Json, PaxConfig, TrainConfig
from .printing import byte_progress, checkpoint_console, print_table, shape_text, short, status
from .running import running_on_checkpoints


_MOST_ROWS = 20


def verify_command(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint of any format; alone, a converted folder.")],
    b: Annotated[str | None, typer.Argument(metavar="B", help="The checkpoint to compare A with.")] = None,
    train_config: TrainConfig = None,
    config: PaxConfig = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """
    Check a converted folder's hashes, or compare two checkpoints.

    With A alone, every file is checked against the SHA-256 in its conversion_report.json. With A and B, of any
    formats, tensors and logits are compared. The exit status is 0 if everything matches, and 1 otherwise.
    """
    result: Any
    if b is None:
        with running_on_checkpoints(debug), byte_progress("Checking") as progress:
            from ..conversion import verify_hashes

            result = verify_hashes(a, progress=progress)
    else:
        with running_on_checkpoints(debug), status("Comparing"):
            from ..conversion import compare

            result = compare(a, b, train_config=train_config, config=config)
    if as_json:
        typer.echo(json.dumps({**asdict(result), "same": result.same}, indent=2, default=str))
    elif b is None:
        _print_hash_check(result)
    else:
        _print_comparison(result)
    if not result.same:
        raise typer.Exit(1)


def _print_comparison(result: Any) -> None:
    rows = [(name, f"missing in {where}") for name, where in result.missing.items()]
    rows += [(name, f"shapes {shape_text(a)} and {shape_text(b)}") for name, (a, b) in result.shapes.items()]
    largest = sorted(result.tensors.items(), key=lambda item: -item[1])
    rows += [(name, f"max abs {difference:.3g}") for name, difference in largest]
    _print_first("Tensors that differ", ("tensor", "difference"), rows)
    if result.config:
        changes = [(key, short(a), short(b)) for key, (a, b) in result.config.items()]
        print_table("Configuration values that differ", ("field", "A", "B"), changes)
    console = checkpoint_console()
    console.print(f"Logits: {result.logits or f'not compared; {result.note}'}", soft_wrap=True)
    console.print(f"{result.compared} tensors compared: {result.result}")


def _print_first(title: str, columns: tuple[str, ...], rows: Sequence[Iterable[object]]) -> None:
    """A table of the first rows, and how many there are besides; nothing without rows."""
    if rows:
        print_table(title, columns, rows[:_MOST_ROWS])
    if len(rows) > _MOST_ROWS:
        checkpoint_console().print(f"and {len(rows) - _MOST_ROWS} more")


def _print_hash_check(result: Any) -> None:
    _print_first("Not as in conversion_report.json", ("file", "problem"), list(result.problems.items()))
    what = f"{result.folder}: SHA-256 of {result.checked} files checked, {result.nbytes:,} bytes"
    summary = f"{len(result.problems)} wrong" if result.problems else "all as in conversion_report.json"
    checkpoint_console().print(f"{what}: {summary}", soft_wrap=True)
