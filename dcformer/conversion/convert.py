"""The conversions to Transformers folders, from the plan to the finished folder."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from decimal import Decimal
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypedDict

from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils.hub import convert_file_size_to_int
from typing_extensions import Unpack

from ..common import tokenizers
from ..model_card import known_origin
from .destination import Destination, with_number
from .formats.authors_torch import plan_torch
from .formats.maxtext import plan_maxtext
from .formats.pax import plan_pax
from .formats.transformers_folder import local_folder
from .hash_check import check_run_files, check_while_reading
from .plan import Origin, Plan, listed, model_class
from .report import ConversionReport, tensor_records, write_model_card
from .report_file import remembered_source
from .shard_writer import INDEX_FILE, ShardWriter, Written
from .stores import is_remote
from .verification import LOGIT_TOLERANCE, load_reference, verify_folder


# Called with the number of bytes to read; returns the function that is called with every part done.
Progress = Callable[[int], Callable[[int], None]]
# Sizes that Transformers' function has no unit for.
_MORE_UNITS = {"": 1, "B": 1, "TB": 10**12}
# Room that everything but the weights needs.
_SMALL_FILES_BYTES = 32 * 2**20
# More than any disk holds.
_LARGEST_SIZE = 2**62


class WriteOptions(TypedDict, total=False):
    """
    Options of every conversion to a Transformers folder.

    Args:
        max_shard_size (`str` or `int`, defaults to `"4GB"`): Largest size of a weights file.
        tokenizer (*optional*): Folder or `tokenizer.json` to save with the model.
        with_code (`bool`, defaults to `False`): Write the Python files of the model too, so that the folder loads with
            `trust_remote_code=True` where dcformer is not installed. A source that holds them passes them on.
        verify (`bool`, defaults to `True`): Refuse weights that hold NaN or infinity, check names and shapes, and run a
            short forward, one weight at a time.
        reference_logits (*optional*): `.npz` with `tokens` and `logits`, which the model must reproduce in float32.
        tolerance (`float`, defaults to 2e-4): Largest absolute difference allowed there.
        force (`bool`, defaults to `False`): Replace a converted model at the destination, which stays until the new one
            is complete; refused if files lie in it that no conversion wrote.
        progress: Called with the number of bytes to read; returns a function that is called with every part done.
        workers (`int`, *optional*): Number of chunks in flight; together they stay below 512 MiB unless one is larger.
            None: as many as there are cores, at most 4.
    """

    max_shard_size: str | int
    tokenizer: str | os.PathLike | None
    with_code: bool
    verify: bool
    reference_logits: str | os.PathLike | None
    tolerance: float
    force: bool
    progress: Progress
    workers: int | None


def convert_maxtext(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    *,
    step: int | None = None,
    train_config: str | os.PathLike | None = None,
    dtype: str = "keep",
    **options: Unpack[WriteOptions],
) -> ConversionReport:
    """
    Convert a checkpoint of the authors' MaxText fork (orbax) into a Transformers folder.

    Args:
        source: Run, step or item folder; local, `gs://` or `s3://`.
        destination: Folder to create.
        step (`int`, *optional*): Step of a run folder. None: the latest.
        train_config (*optional*): The run's training YAML, for windows, epsilon and what else the arrays cannot tell.
        dtype (`str`, defaults to `"keep"`): `"float32"`, `"bfloat16"`, `"float16"`, or `"keep"` for that of each array.
        options: Those of [`WriteOptions`].

    Returns:
        [`ConversionReport`], also written as `conversion_report.json`.

    Raises:
        FileNotFoundError: if source, step or YAML do not exist.
        FileExistsError: if the destination exists and `force` is not given.
        ValueError: if the checkpoint is damaged or incomplete, contradicts its YAML, or fails the verification.
        OSError: if the disk is too small.
    """
    target = _checked_destination(source, destination, options)
    plan = plan_maxtext(source, step=step, train_config=train_config, dtype=dtype)
    if not is_remote(source):
        check_run_files(Path(plan.source["location"]))
    return _write_plan(plan, target, options)


def convert_pax(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    *,
    config: str | os.PathLike,
    step: int | None = None,
    dtype: str = "keep",
    **options: Unpack[WriteOptions],
) -> ConversionReport:
    """
    Convert PAX weights (flat `.npz`, folder of `.npy` files, checkpoint of zarr arrays) into a Transformers folder.

    Args:
        config: `config.json` in the authors' keys or ours.
        source, destination, step, dtype, options, returns, raises: As [`convert_maxtext`].
    """
    target = _checked_destination(source, destination, options)
    return _write_plan(plan_pax(source, config, step=step, dtype=dtype), target, options)


def convert_torch(
    source: str | os.PathLike, destination: str | os.PathLike, *, dtype: str = "keep", **options: Unpack[WriteOptions]
) -> ConversionReport:
    """
    Rewrite a folder of the authors' torch files (or a name on the Hub) in this package's layout.

    Args:
        source: Folder with `config.json` and safetensors or torch weights. Its tokenizer files come along. If it was
            converted, the hashes in its `conversion_report.json` must be those of the weights.
        destination, dtype, options, returns, raises: As [`convert_maxtext`].
    """
    target = _checked_destination(source, destination, options)
    folder = local_folder(source)
    target.check_apart_from(folder)
    plan = plan_torch(folder, dtype=dtype)
    check_while_reading(plan, folder)
    plan.source |= remembered_source(folder)
    known = dict(zip(("licence", "base_model"), known_origin(str(source), target.path.name)))
    plan.source |= {name: value for name, value in known.items() if value is not None}
    if options.get("tokenizer") is None and any(folder.glob("tokenizer*")):
        options["tokenizer"] = folder
    return _write_plan(plan, target, options)


def _checked_destination(
    source: str | os.PathLike, destination: str | os.PathLike, options: WriteOptions
) -> Destination:
    """The destination; what can be told to be wrong before the source is read is an error."""
    if unknown := sorted(set(options) - WriteOptions.__annotations__.keys()):
        known = ", ".join(WriteOptions.__annotations__)
        raise TypeError(f"{unknown[0]!r} is no option of a conversion; choose from {known}.")
    target = Destination(destination, source, options.get("force", False))
    parse_size(options.get("max_shard_size", "4GB"))
    return target


def _write_plan(plan: Plan, target: Destination, options: WriteOptions) -> ConversionReport:
    """
    Write a plan as a Transformers folder: sharded safetensors, configuration, tokenizer, model card and report.

    The folder is built beside the destination and renamed at the end. After an interruption, the same call resumes
    from the finished shards, whose hashes it checks, and ends with the same bytes. Any failure but an interruption, a
    full disk or a server that fails leaves nothing behind.
    """
    started = time.monotonic()
    refuse_quantised(plan)
    shard_bytes = parse_size(options.get("max_shard_size", "4GB"))
    verify, tokenizer_path = options.get("verify", True), options.get("tokenizer")
    tokenizer = None
    if tokenizer_path is not None:
        tokenizer = load_tokenizer(tokenizer_path)
        _take_special_tokens(plan, tokenizer, tokenizer_path)
    reference_path = options.get("reference_logits")
    reference = None if reference_path is None else load_reference(reference_path, plan.config.vocab_size)
    plan.config.architectures = [model_class(plan.config).__name__]
    total = sum(leaf.nbytes for leaf in plan.leaves.values())
    workers = options.get("workers") or min(4, os.cpu_count() or 1)
    fingerprint = {**plan.fingerprint(), "shard_bytes": shard_bytes}
    with target.open(fingerprint, lambda: any(target.progress.glob("*.json"))) as folder:
        # Here, where the destination is locked: a progress bar is not begun for a conversion that must not run.
        advance = options["progress"](total) if "progress" in options else lambda nbytes: None
        writer = ShardWriter(plan, folder, target.progress, shard_bytes, advance, workers, only_finite=verify)
        resumed = writer.resume()
        check_room(target, writer.missing_bytes())
        written = writer.run()
        checksum = writer.note_source()

        report = ConversionReport(
            {**plan.source, "sha256": checksum},
            plan.origins,
            tensor_records(plan, written),
            plan.ignored,
            {"checksums": f"{len(written)} tensors, read back from the files", "values": _values_words(written)},
            {**_versions()},
            destination=str(target.path),
            source_bytes=total,
            resumed_shards=resumed,
        )
        _write_small_files(folder, plan, writer, tokenizer, options.get("with_code", False))
        if verify or reference is not None:
            tolerance = options.get("tolerance", LOGIT_TOLERANCE)
            report.verification |= verify_folder(folder, plan, reference, tolerance)
        write_model_card(folder, target.path.name, plan, report)
        report.save(folder)
    report.seconds = time.monotonic() - started
    return report


def _write_small_files(
    folder: Path, plan: Plan, writer: ShardWriter, tokenizer: PreTrainedTokenizerBase | None, with_code: bool
) -> None:
    plan.config.save_pretrained(folder, with_code=True if with_code else None)
    GenerationConfig.from_model_config(plan.config).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if (index := writer.index()) is not None:
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def refuse_quantised(plan: Plan) -> None:
    """Raise ValueError for a configuration of quantised weights, which plain weights would contradict."""
    if getattr(plan.config, "quantization_config", None):
        raise ValueError(
            f"The configuration of {plan.source['location']} has a quantization_config, and the weights are not "
            "quantised; convert the model that was quantised, or remove quantization_config if this is that model."
        )


def load_tokenizer(path: str | os.PathLike) -> PreTrainedTokenizerBase:
    """
    A tokenizer from a folder or a `tokenizer.json`.

    Raises:
        FileNotFoundError: if there is nothing there.
        ValueError: if it is no tokenizer.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"There is no tokenizer {str(path)!r}; check --tokenizer.")
    try:
        return tokenizers.load_tokenizer(path, ends_text=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{str(path)!r} is no tokenizer that Transformers reads ({' '.join(str(error).split())[:200]})."
        ) from error


def _take_special_tokens(plan: Plan, tokenizer: PreTrainedTokenizerBase, path: str | os.PathLike) -> None:
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(tokenizer, name)
        if value is not None and value < plan.config.vocab_size and value != getattr(plan.config, name):
            setattr(plan.config, name, value)
            plan.origins.append(Origin(name, value, f"tokenizer {Path(path).name}"))


def parse_size(size: str | int) -> int:
    """
    Bytes of a size such as `"4GB"`, `"500MB"` or `"2GiB"`.

    Raises:
        ValueError: if it is none, or not positive.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", str(size).strip().upper(), re.ASCII)
    nbytes = Decimal(0)
    if match is not None:
        with contextlib.suppress(ValueError):  # of a unit that there is not
            unit = _MORE_UNITS.get(match[2]) or convert_file_size_to_int(f"1{match[2]}")
            # Not a float, to which a long row of digits is infinity.
            nbytes = min(Decimal(match[1]), Decimal(_LARGEST_SIZE)) * unit
    if nbytes < 1:
        raise ValueError(f"max_shard_size must be a size such as 4GB or 500MB, got {size!r}.")
    return int(nbytes)


def check_room(target: Destination, nbytes: int) -> None:
    """Raise OSError if the destination's disk has no room for so many bytes of weights."""
    free = shutil.disk_usage(target.partial).free
    if nbytes + _SMALL_FILES_BYTES > free:
        words = (
            f"The disk of {str(target.path.parent)!r} has {free / 1e9:.2f} GB free and the conversion needs "
            f"{(nbytes + _SMALL_FILES_BYTES) / 1e9:.2f} GB; free some or choose another destination."
        )
        raise with_number(OSError(words), errno.ENOSPC)


def _values_words(written: dict[str, Written]) -> str:
    bad = [name for name, record in written.items() if not record.is_finite]
    return f"NaN or infinity in {listed(bad)}" if bad else f"{len(written)} tensors, all finite"


@functools.cache  # looking them up takes longer than to write a small model
def _versions() -> dict[str, str]:
    found = {}
    for name in ("dcformer", "torch", "transformers", "safetensors", "tensorstore"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
