"""`dcformer convert`: checkpoints into other formats."""

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer

from .options import QUICK_HELP, Debug, Step, TrainConfig
from .printing import byte_progress, checkpoint_console, print_location, print_origins, print_table, speed
from .running import running_on_checkpoints


convert_app = typer.Typer(
    help="Convert a checkpoint into another format.", no_args_is_help=True, context_settings=QUICK_HELP
)

_INTERRUPTED = "Interrupted; finished shards are kept, run the same command to resume."
_INTERRUPTED_MAXTEXT = "Interrupted; finished chunks are kept, run the same command to resume."

Source = Annotated[
    str, typer.Argument(metavar="SRC", help="The checkpoint to read: a local path, or a bucket or Hub name.")
]
Destination = Annotated[
    str, typer.Argument(metavar="DST", help="The folder to create, in which the result is written.")
]
Dtype = Annotated[
    Literal["keep", "float32", "bfloat16", "float16"],
    typer.Option(help="Number type of the parameters to write; keep leaves each as it is in the source."),
]
Tokenizer = Annotated[
    str | None, typer.Option(help="A tokenizer folder or tokenizer.json file to save beside the model.")
]
WithCode = Annotated[
    bool,
    typer.Option(
        "--with-code",
        help="Write the Python files of the model too, for use with trust_remote_code where dcformer is not installed.",
    ),
]
ShardSize = Annotated[str, typer.Option(help="The largest size of one weights file, such as 4GB or 500MB.")]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify/--no-verify",
        help="Refuse weights that are NaN or infinite, and check the folder after it has been written.",
    ),
]
Reference = Annotated[
    str | None,
    typer.Option(help="An .npz file with arrays tokens and logits; the converted model must reproduce the logits."),
]
Tolerance = Annotated[
    float, typer.Option(help="The largest absolute difference from the reference logits that is accepted.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace DST if it holds a converted model and nothing else.")]


def _options_of_a_folder(
    tokenizer: Tokenizer = None,
    with_code: WithCode = False,
    max_shard_size: ShardSize = "4GB",
    verify: Verify = True,
    reference_logits: Reference = None,
    tolerance: Tolerance = 2e-4,
    force: Force = False,
    debug: Debug = False,
) -> None:
    """The options of every command that writes a Transformers folder."""


def _writes_a_folder(command: Callable[..., None]) -> Callable[..., None]:
    """Add these options, which a command takes as keyword arguments, to its own."""
    own = inspect.signature(command)
    shared = inspect.signature(_options_of_a_folder).parameters.values()
    named = [parameter for parameter in own.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    command.__signature__ = own.replace(parameters=[*named, *shared])  # type: ignore[attr-defined]
    return command


@convert_app.command("maxtext")
@_writes_a_folder
def convert_maxtext(
    source: Source,
    destination: Destination,
    step: Step = None,
    train_config: TrainConfig = None,
    dtype: Dtype = "keep",
    **options: Any,
) -> None:
    """Convert a MaxText (orbax) checkpoint into a Transformers folder."""
    _convert("convert_maxtext", source, destination, step=step, train_config=train_config, dtype=dtype, **options)


@convert_app.command("pax")
@_writes_a_folder
def convert_pax(
    source: Source,
    destination: Destination,
    config: Annotated[
        str, typer.Option(help="The config.json of the model, in the authors' keys or in those of this package.")
    ],
    step: Step = None,
    dtype: Dtype = "keep",
    **options: Any,
) -> None:
    """Convert PAX weights (.npz, .npy files or zarr arrays) into a Transformers folder."""
    _convert("convert_pax", source, destination, config=config, step=step, dtype=dtype, **options)


@convert_app.command("torch")
@_writes_a_folder
def convert_torch(source: Source, destination: Destination, dtype: Dtype = "keep", **options: Any) -> None:
    """Convert the authors' torch files, in a folder or on the Hub, into a Transformers folder in our layout."""
    _convert("convert_torch", source, destination, dtype=dtype, **options)


@convert_app.command("hub", hidden=True)
@functools.wraps(convert_torch)
def convert_hub(**options: Any) -> None:
    typer.echo("`dcformer convert hub` is now called `dcformer convert torch`.", err=True)
    convert_torch(**options)


@convert_app.command("to-maxtext")
def convert_to_maxtext(
    source: Source,
    destination: Destination,
    step: Annotated[
        int | None, typer.Option(help="The step number under which to write; that of the source unless given.")
    ] = None,
    scan_layers: Annotated[
        bool,
        typer.Option("--scan-layers/--no-scan-layers", help="Write the layers stacked in one array per parameter."),
    ] = True,
    layers_per_block: Annotated[
        int | None, typer.Option(help="The number of layers in a block; that of the source unless given.")
    ] = None,
    param_dtype: Annotated[
        Literal["keep", "float32", "bfloat16"],
        typer.Option(help="Number type of the arrays to write; keep leaves each as it is in the source."),
    ] = "keep",
    fused_qkv: Annotated[bool, typer.Option("--fused-qkv", help="Write one array for query, key and value.")] = False,
    fused_mlp: Annotated[
        bool, typer.Option("--fused-mlp", help="Write one array for the gate and up projections.")
    ] = False,
    approximate: Annotated[
        bool,
        typer.Option("--approximate", help="Convert also what MaxText computes slightly differently."),
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Refuse weights that are NaN or infinite.")
    ] = True,
    force: Force = False,
    debug: Debug = False,
) -> None:
    """Convert a Transformers folder into a MaxText (orbax) checkpoint."""
    options = {name: value for name, value in locals().items() if name not in ("source", "destination", "debug")}
    with running_on_checkpoints(debug, _INTERRUPTED_MAXTEXT), byte_progress("Converting") as progress:
        from ..conversion import convert_to_maxtext as convert

        result = convert(source, destination, progress=progress, **options)
    where = f"{result.destination}, step {result.step}: {len(result.leaves)} arrays"
    checkpoint_console().print(f"{where}, {speed(result.source_bytes, result.seconds)}", soft_wrap=True)


def _convert(function: str, location: str, destination: str, debug: bool, **options: Any) -> None:
    with running_on_checkpoints(debug, _INTERRUPTED), byte_progress("Converting") as progress:
        from .. import conversion

        report = getattr(conversion, function)(location, destination, progress=progress, **options)
    source = report.source
    print_location(source["format"], source["location"], source["step"], source.get("skipped_steps", {}))
    print_origins("Configuration", report.origins)
    ignored = Counter(report.ignored.values())
    if ignored:
        rows = [(str(count), reason) for reason, count in ignored.most_common()]
        print_table("Arrays not converted", ("count", "reason"), rows)
    print_table("Verification", ("check", "result"), report.verification.items())
    resumed = report.resumed_shards
    shards = f"{resumed} shard{'' if resumed == 1 else 's'} resumed"
    summary = f"{report.destination}: {speed(report.source_bytes, report.seconds)}, {shards}"
    checkpoint_console().print(summary, soft_wrap=True)
