"""`dcformer convert`: checkpoints into other formats."""

from collections import Counter
from typing import Annotated, Any, Literal

import typer

from .options import QUICK_HELP, Debug, Step, TrainConfig
from .printing import byte_progress, checkpoint_console, print_location, print_origins, print_table, speed
from .running import running_on_checkpoints


convert_app = typer.Typer(
    help="Convert a checkpoint into another format.", no_args_is_help=True, context_settings=QUICK_HELP
)

_INTERRUPTED = "Interrupted; finished shards or arrays are kept, run the same command to resume."

Source = Annotated[str, typer.Argument(metavar="SRC", help="The checkpoint: a local path, or a bucket or Hub name.")]
Target = Annotated[str, typer.Argument(metavar="DST", help="The folder to create.")]
Dtype = Annotated[
    Literal["keep", "float32", "bfloat16", "float16"],
    typer.Option(help="Number type of the written parameters; keep leaves each as it is in the source."),
]
Tokenizer = Annotated[str | None, typer.Option(help="Tokenizer folder or tokenizer.json to save beside the model.")]
WithCode = Annotated[
    bool,
    typer.Option("--with-code", help="Write the model's Python files too, for trust_remote_code without dcformer."),
]
ShardSize = Annotated[str, typer.Option(help="Largest size of a weights file, such as 4GB; memory grows with it.")]
Verify = Annotated[bool, typer.Option("--verify/--no-verify", help="Refuse NaN and infinity, and run a short forward.")]
Reference = Annotated[
    str | None, typer.Option(help="An .npz file with tokens and logits, which the model must reproduce in float32.")
]
Tolerance = Annotated[float, typer.Option(help="Largest absolute difference from the reference logits.")]
Force = Annotated[bool, typer.Option("--force", help="Replace DST if it holds a converted model and nothing else.")]


@convert_app.command("maxtext")
def convert_maxtext(
    source: Source,
    destination: Target,
    step: Step = None,
    train_config: TrainConfig = None,
    dtype: Dtype = "keep",
    tokenizer: Tokenizer = None,
    with_code: WithCode = False,
    max_shard_size: ShardSize = "2GB",
    verify: Verify = True,
    reference_logits: Reference = None,
    tolerance: Tolerance = 2e-4,
    force: Force = False,
    debug: Debug = False,
) -> None:
    """Convert a MaxText (orbax) checkpoint into a Transformers folder."""
    _convert("convert_maxtext", **locals())


@convert_app.command("pax")
def convert_pax(
    source: Source,
    destination: Target,
    config: Annotated[str, typer.Option(help="The model's config.json, in the authors' keys or ours.")],
    step: Step = None,
    dtype: Dtype = "keep",
    tokenizer: Tokenizer = None,
    with_code: WithCode = False,
    max_shard_size: ShardSize = "2GB",
    verify: Verify = True,
    reference_logits: Reference = None,
    tolerance: Tolerance = 2e-4,
    force: Force = False,
    debug: Debug = False,
) -> None:
    """Convert PAX weights (.npz, .npy files or zarr arrays) into a Transformers folder."""
    _convert("convert_pax", **locals())


@convert_app.command("torch")
def convert_torch(
    source: Source,
    destination: Target,
    dtype: Dtype = "keep",
    tokenizer: Tokenizer = None,
    with_code: WithCode = False,
    max_shard_size: ShardSize = "2GB",
    verify: Verify = True,
    reference_logits: Reference = None,
    tolerance: Tolerance = 2e-4,
    force: Force = False,
    debug: Debug = False,
) -> None:
    """Convert the authors' torch files, in a folder or on the Hub, into a Transformers folder in our layout."""
    _convert("convert_torch", **locals())


@convert_app.command("to-maxtext")
def convert_to_maxtext(
    source: Source,
    destination: Target,
    step: Annotated[
        int | None, typer.Option(help="Step number to write.", show_default="that of the source, or 0")
    ] = None,
    scan_layers: Annotated[
        bool, typer.Option("--scan-layers/--no-scan-layers", help="Stack the layers in one array per parameter.")
    ] = True,
    layers_per_block: Annotated[
        int | None, typer.Option(help="Layers in a block.", show_default="as in the source")
    ] = None,
    param_dtype: Annotated[
        Literal["keep", "float32", "bfloat16"], typer.Option(help="Number type of the written arrays.")
    ] = "keep",
    fused_qkv: Annotated[bool, typer.Option("--fused-qkv", help="Write one array for query, key and value.")] = False,
    fused_mlp: Annotated[
        bool, typer.Option("--fused-mlp", help="Write one array for the gate and up projections.")
    ] = False,
    approximate: Annotated[
        bool, typer.Option("--approximate", help="Convert also models that MaxText computes slightly differently.")
    ] = False,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Refuse NaN and infinity.")] = True,
    force: Force = False,
    debug: Debug = False,
) -> None:
    """Convert a Transformers folder into a MaxText (orbax) checkpoint."""
    report = _run("convert_to_maxtext", **locals())
    where = f"{report.destination}, step {report.step}: {len(report.arrays)} arrays"
    checkpoint_console().print(f"{where}, {speed(report.source_bytes, report.seconds)}", soft_wrap=True)


def _run(function: str, debug: bool, **arguments: Any) -> Any:
    with running_on_checkpoints(debug, _INTERRUPTED), byte_progress("Converting") as progress:
        from .. import conversion

        return getattr(conversion, function)(progress=progress, **arguments)


def _convert(function: str, **arguments: Any) -> None:
    report = _run(function, **arguments)
    source = report.source
    print_location(source["format"], source["location"], source["step"], source.get("skipped_steps", {}))
    print_origins("Configuration", report.origins)
    if report.ignored:
        rows = [(str(count), reason) for reason, count in Counter(report.ignored.values()).most_common()]
        print_table("Arrays not converted", ("count", "reason"), rows)
    print_table("Verification", ("check", "result"), report.verification.items())
    shards = f"{report.resumed_shards} shard{'' if report.resumed_shards == 1 else 's'} resumed"
    summary = f"{report.destination}: {speed(report.source_bytes, report.seconds)}, {shards}"
    checkpoint_console().print(summary, soft_wrap=True)
