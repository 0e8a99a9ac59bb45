"""The conversions of the authors' checkpoints to Transformers folders: source, model, files, plan, writing."""

import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..model_card import known_origin
from .authors_torch import local_folder, open_torch, read_torch
from .beside import find_files, remembered_source
from .conversion_report import ConversionReport, read_report
from .destination import Destination
from .maxtext import open_maxtext, read_maxtext
from .pax import open_pax, read_pax
from .plan import make_plan
from .stores import is_remote
from .verify import refuse_changed
from .writer import write_model


def convert_maxtext(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    *,
    step: int | None = None,
    train_config: str | os.PathLike | None = None,
    dtype: str = "keep",
    tokenizer: str | os.PathLike | PreTrainedTokenizerBase | None = None,
    force: bool = False,
    **options: Any,
) -> ConversionReport:
    """
    Convert a checkpoint of the authors' MaxText fork (orbax) into a Transformers folder.

    Args:
        source: Run, step or item folder; local, `gs://` or `s3://`.
        destination: Folder to create.
        step (*optional*): Step of a run folder; `None`: the latest.
        train_config (*optional*): The run's training YAML, for windows, epsilon and what else the arrays cannot tell;
            `None`: the `train_config.yml` beside the step, if there is one.
        dtype (defaults to `"keep"`): `"float32"`, `"bfloat16"`, `"float16"`, or `"keep"` for that of each array.
        tokenizer (*optional*): Folder, `tokenizer.json` or tokenizer to save with the model, whose special tokens
            replace the source's; `None`: that of the source, if it has one.
        force (defaults to `False`): Replace a converted model at the destination, which stays until the new one is
            complete. A folder with files that no conversion wrote is refused.
        options: Those of [`write_model`].

    Returns:
        [`ConversionReport`], also written as `conversion_report.json`.

    Raises:
        FileNotFoundError: if source, step or YAML do not exist.
        FileExistsError: if the destination exists and `force` is not given.
        ValueError: if the checkpoint is incomplete, contradicts its YAML, or fails the verification.
    """
    target = Destination(destination, source, force)
    checkpoint = read_maxtext(open_maxtext(source, step), train_config)
    folder = None
    if (run := checkpoint.source.run) and not is_remote(run):
        refuse_changed(Path(run), Path(checkpoint.source.location).relative_to(run).as_posix())
        folder = Path(run) if read_report(Path(run)) is not None else None  # `convert_to_maxtext` wrote it
    files = find_files(folder, checkpoint.config, tokenizer, is_run=True)
    return write_model(make_plan(checkpoint, dtype, files), target, **options)


def convert_pax(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    *,
    config: str | os.PathLike,
    step: int | None = None,
    dtype: str = "keep",
    tokenizer: str | os.PathLike | PreTrainedTokenizerBase | None = None,
    force: bool = False,
    **options: Any,
) -> ConversionReport:
    """
    Convert PAX weights (flat `.npz`, folder of `.npy` files, checkpoint of zarr arrays) into a Transformers folder.

    Args:
        config: `config.json` in the authors' keys or ours.
        source, destination, step, dtype, tokenizer, force, options: As of [`convert_maxtext`], and so are returns and
            raises.
    """
    target = Destination(destination, source, force)
    checkpoint = read_pax(open_pax(source, step), config)
    files = find_files(None, checkpoint.config, tokenizer)
    return write_model(make_plan(checkpoint, dtype, files), target, **options)


def convert_torch(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    *,
    dtype: str = "keep",
    tokenizer: str | os.PathLike | PreTrainedTokenizerBase | None = None,
    revision: str | None = None,
    force: bool = False,
    **options: Any,
) -> ConversionReport:
    """
    Rewrite a folder of the authors' torch files (or a name on the Hub) in this package's layout.

    Args:
        source: Folder with `config.json` and safetensors or torch weights. Its tokenizer comes along. If it was
            converted, its files must be those of its `conversion_report.json`.
        revision (*optional*): Branch, tag or commit on the Hub; `None`: `main`.
        destination, dtype, tokenizer, force, options: As of [`convert_maxtext`], and so are returns and raises.
    """
    target = Destination(destination, source, force)
    folder = local_folder(source, revision)
    refuse_changed(folder)
    facts = remembered_source(folder)
    for origin in (folder, source):  # the card of a download names its licence
        facts |= known_origin(str(origin), target.path.name)
    checkpoint = read_torch(open_torch(folder, **facts))
    files = find_files(folder, checkpoint.config, tokenizer)
    return write_model(make_plan(checkpoint, dtype, files), target, **options)
