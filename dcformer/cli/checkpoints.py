"""The commands on checkpoints: `dcformer convert`, `inspect`, `verify` and `card`."""

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from .options import QUICK_HELP, Debug, Json, PaxConfig, Revision, Step, TrainConfig
from .running import byte_progress, print_line, print_table, running_quietly, status


convert_app = typer.Typer(
    help="Convert a checkpoint into another format.", no_args_is_help=True, context_settings=QUICK_HELP
)

_INTERRUPTED = "Interrupted; finished shards or arrays are kept, run the same command to resume."
_CHECKPOINT = "The checkpoint: a bundled model, a local path, or a bucket or Hub name."


@dataclass(frozen=True, kw_only=True)
class _Conversion:
    """The options of all conversions; each dataclass below is the signature of a command."""

    source: Annotated[str, Argument(metavar="SRC", help=_CHECKPOINT)]
    destination: Annotated[str, Argument(metavar="DST", help="The folder to create.")]
    force: Annotated[bool, Option("--force", help="Replace DST if it holds only a converted model.")] = False
    debug: Debug = False


@dataclass(frozen=True, kw_only=True)
class _ToTransformers(_Conversion):
    dtype: Annotated[
        Literal["keep", "float32", "bfloat16", "float16"],
        Option(metavar="TYPE", help="Of the parameters: keep (as in SRC), float32, bfloat16 or float16."),
    ] = "keep"
    tokenizer: Annotated[str | None, Option(help="Tokenizer folder or tokenizer.json to save with the model.")] = None
    with_code: Annotated[bool, Option("--with-code", help="Also write the model's code, for trust_remote_code.")] = (
        False
    )
    max_shard_size: Annotated[
        str, Option(help="Largest size of a weights file, such as 4GB; memory grows with it.")
    ] = "2GB"


@dataclass(frozen=True, kw_only=True)
class _OfTheAuthors(_ToTransformers):
    verify: Annotated[bool, Option(help="Refuse NaN and infinity, and run a short forward pass.")] = True
    reference_logits: Annotated[
        str | None, Option(help="An .npz file with tokens and logits, which the model must reproduce in float32.")
    ] = None
    tolerance: Annotated[float, Option(help="Largest absolute difference from the reference logits.")] = 2e-4


@dataclass(frozen=True, kw_only=True)
class _MaxText(_OfTheAuthors):
    """Convert a checkpoint of MaxText (orbax) for Transformers."""

    step: Step = None
    train_config: TrainConfig = None


@dataclass(frozen=True, kw_only=True)
class _Pax(_OfTheAuthors):
    """Convert PAX weights (.npz, .npy or zarr) for Transformers."""

    config: Annotated[str, Option(help="The model's config.json, with the authors' keys or those of this package.")]
    step: Step = None


@dataclass(frozen=True, kw_only=True)
class _Torch(_OfTheAuthors):
    """Convert the authors' torch files (a folder or on the Hub)."""

    revision: Revision = None


def _numbers(text: str) -> list[int]:
    """Read 0,2-5 as 0, 2, 3, 4, 5; for anything else ValueError, which typer turns into a sentence."""
    ends = [part.partition("-") for part in text.split(",")]
    return [number for first, _, last in ends for number in range(int(first), int(last or first) + 1)]


@dataclass(frozen=True, kw_only=True)
class _Upcycle(_ToTransformers):
    """
    Add composition to a pretrained model, for training.

    Llama, Mistral, Qwen, SmolLM and GPT-NeoX models are taken, also as .gguf.
    """

    rank: Annotated[int | None, Option(help="Rank of composition.", show_default="2")] = None
    groups: Annotated[int | None, Option(help="Groups of heads that compose.", show_default="1")] = None
    layers: Annotated[
        Any, Option(parser=_numbers, metavar="0,2-5", help="Layers that compose.", show_default="all")
    ] = None
    composition: Annotated[str | None, Option(help="File of a trained composition, from save_composition.")] = None
    seed: Annotated[int, Option(help="Seed of the new parameters.")] = 0
    verify: Annotated[bool, Option(help="Refuse NaN and infinity, and compare logits with SRC's.")] = True
    tolerance: Annotated[float, Option(help="Largest difference of logits, relative to the largest logit.")] = 1e-5
    revision: Revision = None


@dataclass(frozen=True, kw_only=True)
class _ToMaxText(_Conversion):
    """Convert a Transformers folder for MaxText (orbax)."""

    step: Annotated[int | None, Option(help="Step to write.", show_default="the source's, or 0")] = None
    scan_layers: Annotated[bool, Option(help="Stack the layers in one array per parameter.")] = True
    layers_per_block: Annotated[int | None, Option(help="Layers in a block.", show_default="as in SRC")] = None
    param_dtype: Annotated[
        Literal["keep", "float32", "bfloat16"],
        Option(metavar="TYPE", help="Of the arrays: keep (as in SRC), float32 or bfloat16."),
    ] = "keep"
    fused_qkv: Annotated[bool, Option("--fused-qkv", help="Write one array for query, key and value.")] = False
    fused_mlp: Annotated[bool, Option("--fused-mlp", help="Write one array for gate and up.")] = False
    approximate: Annotated[bool, Option("--approximate", help="Accept slightly different logits.")] = False
    verify: Annotated[bool, Option(help="Refuse NaN and infinity.")] = True
    revision: Revision = None


def _add_command(name: str, function: str, options: type[_Conversion], show: Callable[[Any], None]) -> None:
    """Add a command that passes the options of a dataclass on to a function of `dcformer.conversion`."""

    @functools.wraps(options, updated=())  # typer reads the signature
    def run(**given: Any) -> None:
        arguments = vars(options(**given))
        with running_quietly(arguments.pop("debug"), _INTERRUPTED), byte_progress("Converting") as progress:
            from .. import conversion
            from ..loading import find_folder

            arguments["source"] = find_folder(arguments["source"])
            report = getattr(conversion, function)(**arguments, progress=progress)
        show(report)

    convert_app.command(name)(run)


def _show_arrays(report: Any) -> None:
    _print_end(report, f", step {report.step}: {len(report.arrays)} arrays, ")


def _show_model(report: Any) -> None:
    source = report.source
    _print_location(source["format"], source["location"], source["step"], source.get("skipped_steps", {}))
    _print_origins("Configuration", report.origins)
    if report.ignored:
        print_table("Arrays not converted", ("reason", "count"), Counter(report.ignored.values()).most_common())
    print_table("Verification", ("check", "result"), report.verification.items())
    _print_end(report, f": {report.resumed_shards} shards resumed, ")


def _print_end(report: Any, what: str) -> None:
    if report.was_complete:
        print_line(f"{report.destination} is complete: an earlier run wrote it, and ended before it removed its notes")
        return
    nbytes, seconds = report.source_bytes, report.seconds
    speed = f"{nbytes / 1e9:.3g} GB in {seconds:.1f} s ({nbytes / 1e6 / max(seconds, 1e-9):.1f} MB/s)"
    print_line(f"{report.destination}{what}{speed}")


_add_command("maxtext", "convert_maxtext", _MaxText, _show_model)
_add_command("pax", "convert_pax", _Pax, _show_model)
_add_command("torch", "convert_torch", _Torch, _show_model)
_add_command("upcycle", "upcycle", _Upcycle, _show_model)
_add_command("to-maxtext", "convert_to_maxtext", _ToMaxText, _show_arrays)


def inspect_command(
    path: Annotated[str, Argument(metavar="PATH", help=_CHECKPOINT)],
    step: Step = None,
    train_config: TrainConfig = None,
    config: PaxConfig = None,
    revision: Revision = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a checkpoint holds, without reading its weights."""
    with running_quietly(debug):
        from ..common.dtypes import dtype_name
        from ..conversion import inspect_checkpoint
        from ..loading import find_folder

        given: Any = {"step": step, "train_config": train_config, "config": config, "revision": revision}
        inspection = inspect_checkpoint(find_folder(path), **given)
    if as_json:
        print(json.dumps(inspection.to_dict(), indent=2, default=str), flush=True)
        return
    _print_location(inspection.format, inspection.location, inspection.step, inspection.skipped_steps)
    rows = [
        (array.name, _shape(array.shape), dtype_name(array.dtype), _shape(array.chunk_shape), f"{array.nbytes:,}")
        for array in inspection.tensors
    ]
    print_table("Arrays", ("name", "shape", "dtype", "chunk", "bytes"), rows)
    if inspection.architecture:
        _print_origins("Architecture", inspection.architecture)
    else:
        print_line(f"Architecture unknown: {inspection.note}")
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in inspection.dtypes.items())
    print_line(f"{inspection.total_parameters:,} parameters, {inspection.total_bytes:,} bytes, arrays: {dtypes}")
    if inspection.optimizer_arrays:
        print_line(f"{inspection.optimizer_arrays} arrays of the optimizer, not opened")


def _print_location(format: str, location: str, step: int | None, skipped_steps: Mapping[str, str]) -> None:
    print_line(f"{format}, {location}" + ("" if step is None else f", step {step}"))
    for number, reason in skipped_steps.items():
        print_line(f"Step {number} was skipped: {reason}")


def _print_origins(title: str, origins: Iterable[Any]) -> None:
    rows = [(o.field, _short(o.value), "default" if o.is_default else "", o.origin) for o in origins]
    print_table(title, ("field", "value", "", "from"), rows)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _shape(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def verify_command(
    a: Annotated[str, Argument(metavar="A", help="A checkpoint of any format; alone, a converted folder.")],
    b: Annotated[str | None, Argument(metavar="B", help="The checkpoint to compare A with.")] = None,
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
    with running_quietly(debug):
        from ..conversion import compare, verify_hashes
        from ..loading import find_folder

        if b is None:
            with byte_progress("Checking") as progress:
                result = verify_hashes(find_folder(a), progress=progress)
        else:
            with status("Comparing"):
                result = compare(find_folder(a), find_folder(b), train_config=train_config, config=config)
    if as_json:
        print(json.dumps({**asdict(result), "same": result.same}, indent=2, default=str), flush=True)
    elif b is None:
        _print_first("Not as in conversion_report.json", ("file", "problem"), list(result.problems.items()))
        summary = f"{len(result.problems)} wrong" if result.problems else "all as in conversion_report.json"
        print_line(f"{result.folder}: SHA-256 of {result.checked} files, {result.nbytes:,} bytes: {summary}")
    else:
        rows = [(name, f"missing in {where}") for name, where in result.missing.items()]
        rows += [(name, f"shapes {_shape(left)} and {_shape(right)}") for name, (left, right) in result.shapes.items()]
        largest = sorted(result.tensors.items(), key=lambda item: -item[1])
        rows += [(name, f"max abs {difference:.3g}") for name, difference in largest]
        _print_first("Tensors that differ", ("tensor", "difference"), rows)
        changes = [(key, _short(left), _short(right)) for key, (left, right) in result.config.items()]
        _print_first("Configuration values that differ", ("field", "A", "B"), changes)
        print_line(f"Logits: {result.logits or f'not compared; {result.note}'}")
        every = result.compared + len(result.missing) + len(result.shapes)
        print_line(f"{result.compared} of {every} tensors compared: {result.result}")
    if not result.same:
        raise typer.Exit(1)


def _print_first(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print a table of the first 20 rows, and how many more there are; nothing without rows."""
    if rows:
        print_table(title, columns, rows[:20])
    if len(rows) > 20:
        print_line(f"and {len(rows) - 20} more")


def card_command(
    model: Annotated[Path, Argument(metavar="MODEL", help="Folder of the model; its README.md is the card.")],
    results: Annotated[Path, Option(help="Folder with results of `dcformer eval`.")] = Path("results"),
    evaluated_as: Annotated[
        str | None, Option(help="Name of the model in the results.", show_default="any, with the weights in MODEL")
    ] = None,
    paper_row: Annotated[
        str | None, Option(help="Row of Table 4 to add: DCFormer++2.8B, or none.", show_default="by MODEL's name")
    ] = None,
    debug: Debug = False,
) -> None:
    """
    Write the scores of `dcformer eval` into a model card.

    They go into the card's metadata (model-index), a table in its text, and .eval_results/*.yaml for the Hub. Other
    text stays, and repeating the command changes nothing.
    """
    with running_quietly(debug):
        from ..cards import update_card
        from ..loading import refuse_without_model

        refuse_without_model(str(model.absolute()))
        for line in update_card(str(model), str(results), evaluated_as=evaluated_as, paper_row=paper_row):
            print_line(line)
