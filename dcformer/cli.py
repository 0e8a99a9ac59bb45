"""The `dcformer` command: converting, inspecting, verifying, training and evaluating checkpoints."""

import contextlib
import functools
import inspect
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from . import __version__
from .eval.command import eval_command, report_command, tasks_command
from .terminal import make_console, one_line_errors, progress_bar
from .training.command import train_command


app = typer.Typer(
    help="Convert, inspect, verify, train and evaluate DCFormer checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
convert_app = typer.Typer(help="Convert a checkpoint into another format.", no_args_is_help=True)
app.add_typer(convert_app, name="convert")
app.command("eval")(eval_command)
app.command("report")(report_command)
app.command("tasks")(tasks_command)
app.command("train")(train_command)

_GO_ON = "Interrupted; finished shards are kept, run the same command to resume."
_GO_ON_MAXTEXT = "Interrupted; finished chunks are kept, run the same command to resume."
_MOST_TENSORS = 20
_LONGEST_VALUE = 60

Source = Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint to read.")]
Destination = Annotated[str, typer.Argument(metavar="DST", help="The folder to create.")]
Step = Annotated[int | None, typer.Option(help="The step to read from a run folder; the latest one if not given.")]
TrainConfig = Annotated[str | None, typer.Option(help="The training YAML of a MaxText run.")]
Config = Annotated[str | None, typer.Option(help="The config.json of a PAX checkpoint.")]
Dtype = Annotated[
    Literal["keep", "float32", "bfloat16", "float16"],
    typer.Option(help="The dtype of the parameters to write; keep: as in the source."),
]
Tokenizer = Annotated[str | None, typer.Option(help="A tokenizer folder or tokenizer.json to save with the model.")]
ShardSize = Annotated[str, typer.Option(help="The largest size of a weights file, such as 4GB or 500MB.")]
Verify = Annotated[
    bool,
    typer.Option("--verify/--no-verify", help="Refuse NaN and infinity in the weights; check the folder written."),
]
Reference = Annotated[str | None, typer.Option(help="An .npz with tokens and logits that the model must reproduce.")]
Tolerance = Annotated[float, typer.Option(help="The largest absolute difference allowed from the reference logits.")]
Force = Annotated[bool, typer.Option("--force", help="Replace a converted model at DST that holds nothing else.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dcformer {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def _options_of_a_folder(
    tokenizer: Tokenizer = None,
    max_shard_size: ShardSize = "4GB",
    verify: Verify = True,
    reference_logits: Reference = None,
    tolerance: Tolerance = 2e-4,
    force: Force = False,
    debug: Debug = False,
) -> None:
    """The options of every command that writes a Transformers folder."""


def _writes_a_folder(command: Callable) -> Callable:
    """Add these options, which a command takes as keyword arguments, to its own."""
    own = inspect.signature(command)
    shared = inspect.signature(_options_of_a_folder).parameters.values()
    named = [parameter for parameter in own.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    command.__signature__ = own.replace(parameters=[*named, *shared])
    return command


@convert_app.command("maxtext")
@_writes_a_folder
def convert_maxtext(
    source: Source,
    destination: Destination,
    step: Step = None,
    train_config: TrainConfig = None,
    dtype: Dtype = "keep",
    **options,
) -> None:
    """Convert a MaxText (orbax) checkpoint into a Transformers folder."""
    _convert("convert_maxtext", source, destination, step=step, train_config=train_config, dtype=dtype, **options)


@convert_app.command("pax")
@_writes_a_folder
def convert_pax(
    source: Source,
    destination: Destination,
    config: Annotated[str, typer.Option(help="config.json of the model, in the authors' keys or in ours.")],
    step: Step = None,
    dtype: Dtype = "keep",
    **options,
) -> None:
    """Convert PAX weights (.npz, .npy files or zarr arrays) into a Transformers folder."""
    _convert("convert_pax", source, destination, config=config, step=step, dtype=dtype, **options)


@convert_app.command("torch")
@_writes_a_folder
def convert_torch(source: Source, destination: Destination, dtype: Dtype = "keep", **options) -> None:
    """Convert the authors' torch files, in a folder or on the Hub, into a Transformers folder in our layout."""
    _convert("convert_torch", source, destination, dtype=dtype, **options)


@convert_app.command("hub", hidden=True)
@functools.wraps(convert_torch)
def convert_hub(**options) -> None:
    typer.echo("`dcformer convert hub` is now called `dcformer convert torch`.", err=True)
    convert_torch(**options)


@convert_app.command("to-maxtext")
def convert_to_maxtext(
    source: Source,
    destination: Destination,
    step: Annotated[int | None, typer.Option(help="The step number to write; the source's if not given.")] = None,
    scan_layers: Annotated[
        bool,
        typer.Option("--scan-layers/--no-scan-layers", help="Stack the layers along an axis."),
    ] = True,
    layers_per_block: Annotated[
        int | None, typer.Option(help="Number of layers in a block; the source's if not given.")
    ] = None,
    param_dtype: Annotated[
        Literal["keep", "float32", "bfloat16"],
        typer.Option(help="The dtype of the arrays to write."),
    ] = "keep",
    fused_qkv: Annotated[bool, typer.Option("--fused-qkv", help="Write one array for query, key and value.")] = False,
    fused_mlp: Annotated[bool, typer.Option("--fused-mlp", help="Write one array for gate and up projection.")] = False,
    approximate: Annotated[
        bool,
        typer.Option("--approximate", help="Accept what MaxText computes slightly differently."),
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Refuse NaN and infinity in the weights.")
    ] = True,
    force: Force = False,
    debug: Debug = False,
) -> None:
    """Convert a Transformers folder into a MaxText (orbax) checkpoint."""
    options = {name: value for name, value in locals().items() if name not in ("source", "destination", "debug")}
    with one_line_errors(debug, _GO_ON_MAXTEXT), _quiet(), _byte_progress("Converting") as progress:
        from .conversion import convert_to_maxtext as convert

        result = convert(source, destination, progress=progress, **options)
    where = f"{result.destination}, step {result.step}: {len(result.leaves)} arrays"
    _console().print(f"{where}, {_speed(result.source_bytes, result.seconds)}", soft_wrap=True)


@app.command("inspect")
def inspect_command(
    path: Annotated[str, typer.Argument(metavar="PATH", help="The checkpoint, of any format.")],
    step: Step = None,
    train_config: TrainConfig = None,
    config: Config = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show a checkpoint's format, arrays and architecture."""
    with one_line_errors(debug), _quiet():
        from .conversion.inspection import inspect_checkpoint

        found = inspect_checkpoint(path, step=step, train_config=train_config, config=config)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2, default=str))
        return
    console = _console()
    _print_location(found.format, found.location, found.step, found.skipped_steps)
    rows = [(t.name, _size(t.shape), t.dtype, _size(t.chunk_shape), f"{t.nbytes:,}") for t in found.tensors]
    _print_table("Arrays", ("name", "shape", "dtype", "chunk", "bytes"), rows)
    if found.architecture:
        _print_origins("Architecture", found.architecture)
    else:
        console.print(f"Architecture unknown: {found.note}", soft_wrap=True)
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in found.dtypes.items())
    console.print(f"{found.total_parameters:,} parameters, {found.total_bytes:,} bytes, arrays: {dtypes}")
    if found.optimizer_arrays:
        console.print(f"{found.optimizer_arrays} arrays of the optimizer, not opened")


@app.command()
def verify(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint of any format; without B, a converted folder.")],
    b: Annotated[str | None, typer.Argument(metavar="B", help="The checkpoint to compare it with.")] = None,
    train_config: TrainConfig = None,
    config: Config = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """
    Check a converted folder's hashes, or compare two checkpoints.

    With A alone, every tensor is checked against the SHA-256 in its conversion_report.json. With A and B, of any
    formats, tensors and logits are compared. The exit status is 0 if all is as it should be, or the same model.
    """
    if b is None:
        with one_line_errors(debug), _quiet(), _byte_progress("Checking") as progress:
            from .conversion import verify_hashes

            if train_config is not None or config is not None:
                raise ValueError("--train-config and --config are for comparing two checkpoints; give B too.")
            result = verify_hashes(a, progress=progress)
    else:
        with one_line_errors(debug), _quiet(), Console(stderr=True).status("Comparing"):
            from .conversion import compare

            result = compare(a, b, train_config=train_config, config=config)
    if as_json:
        typer.echo(json.dumps({**asdict(result), "same": result.same}, indent=2, default=str))
    elif b is None:
        _print_hash_check(result)
    else:
        _print_comparison(result)
    if not result.same:
        raise typer.Exit(1)


def _convert(function: str, source: str, destination: str, debug: bool, **options) -> None:
    with one_line_errors(debug, _GO_ON), _quiet(), _byte_progress("Converting") as progress:
        from . import conversion

        report = getattr(conversion, function)(source, destination, progress=progress, **options)
    source = report.source
    _print_location(source["format"], source["location"], source["step"], source.get("skipped_steps", {}))
    _print_origins("Configuration", report.origins)
    ignored = Counter(report.ignored.values())
    if ignored:
        rows = [(str(count), reason) for reason, count in ignored.most_common()]
        _print_table("Arrays not converted", ("count", "reason"), rows)
    _print_table("Verification", ("check", "result"), report.verification.items())
    resumed = report.resumed_shards
    shards = f"{resumed} shard{'' if resumed == 1 else 's'} resumed"
    _console().print(f"{report.destination}: {_speed(report.source_bytes, report.seconds)}, {shards}", soft_wrap=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the logging and progress bars of Transformers and the Hub, which would be torn by ours."""
    import huggingface_hub.utils as hub
    from transformers.utils import logging

    verbosity, hub_verbosity = logging.get_verbosity(), hub.logging.get_verbosity()
    bars, hub_bars = logging.is_progress_bar_enabled(), not hub.are_progress_bars_disabled()
    logging.set_verbosity_error()
    hub.logging.set_verbosity_error()
    logging.disable_progress_bar()
    hub.disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        hub.logging.set_verbosity(hub_verbosity)
        if bars:
            logging.enable_progress_bar()
        if hub_bars:
            hub.enable_progress_bars()


@contextlib.contextmanager
def _byte_progress(task: str) -> Iterator[Callable[[int], Callable[[int], None]]]:
    """A progress bar on stderr, as the conversions take it; nothing where stderr is no terminal."""
    with progress_bar(DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as (bar, _):

        def start(total: int) -> Callable[[int], None]:
            number = bar.add_task(task, total=total)
            return lambda nbytes: bar.advance(number, nbytes)

        yield start


def _console() -> Console:
    return make_console(pipe_width=160)


def _print_location(form: str, location: str, step: int | None, skipped_steps: dict[str, str]) -> None:
    console = _console()
    console.print(f"{form}, {location}" + ("" if step is None else f", step {step}"), soft_wrap=True)
    for number, reason in skipped_steps.items():
        console.print(f"Step {number} was passed over: {reason}", soft_wrap=True)


def _print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable]) -> None:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    _console().print(table)


def _print_origins(title: str, origins: list) -> None:
    rows = [(o.field, _short(o.value), "default" if o.is_default else "", o.origin) for o in origins]
    _print_table(title, ("field", "value", "", "from"), rows)


def _print_comparison(result) -> None:
    rows = [(name, f"missing in {where}") for name, where in result.missing.items()]
    rows += [(name, f"shapes {_size(first)} and {_size(second)}") for name, (first, second) in result.shapes.items()]
    # What is no number first.
    largest = sorted(result.tensors.items(), key=lambda item: -math.inf if math.isnan(item[1]) else -item[1])
    rows += [(name, f"max abs {difference:.3g}") for name, difference in largest]
    console = _console()
    if rows:
        _print_table("Tensors that differ", ("tensor", "difference"), rows[:_MOST_TENSORS])
    if len(rows) > _MOST_TENSORS:
        console.print(f"and {len(rows) - _MOST_TENSORS} more")
    if result.config:
        changes = [(key, _short(first), _short(second)) for key, (first, second) in result.config.items()]
        _print_table("Configuration values that differ", ("field", "A", "B"), changes)
    console.print(f"Logits: {result.logits or f'not compared; {result.note}'}", soft_wrap=True)
    console.print(f"{result.compared} tensors compared: {result.verdict}")


def _print_hash_check(result) -> None:
    console = _console()
    if result.problems:
        rows = [(found.file, found.tensor, found.problem) for found in result.problems]
        _print_table("Not as in conversion_report.json", ("file", "tensor", "problem"), rows[:_MOST_TENSORS])
    if len(result.problems) > _MOST_TENSORS:
        console.print(f"and {len(result.problems) - _MOST_TENSORS} more")
    what = f"{result.folder}: SHA-256 of {result.checked} {result.unit} checked, {result.nbytes:,} bytes"
    verdict = f"{len(result.problems)} wrong" if result.problems else "all as in conversion_report.json"
    console.print(f"{what}: {verdict}", soft_wrap=True)


def _short(value) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def _size(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _speed(nbytes: int, seconds: float) -> str:
    return f"{nbytes / 1e9:.3g} GB in {seconds:.1f} s ({nbytes / 1e6 / max(seconds, 1e-9):.1f} MB/s)"


def main() -> None:
    """Entry point of the `dcformer` command."""
    app(prog_name="dcformer")


if __name__ == "__main__":
    main()
