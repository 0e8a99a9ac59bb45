"""The conversions to Transformers folders: source, model, plan, and the finished folder."""

import copy
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils.hub import convert_file_size_to_int

from ..configuration_dcformer import DCFormerConfig
from ..model_card import known_origin
from .authors_torch import local_folder, open_torch, read_torch
from .beside import find_files, remembered_source, save_files
from .conversion_report import ConversionReport, read_report, write_model_card, write_report
from .destination import Destination
from .maxtext import open_maxtext, read_maxtext
from .pax import open_pax, read_pax
from .plan import Origin, Plan, listed, make_plan, meta_model
from .stores import is_remote
from .verify import LOGIT_TOLERANCE, Progress, load_reference, refuse_changed, verify_folder
from .writer import source_digest, write_shards


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


def write_model(
    plan: Plan,
    target: Destination,
    *,
    max_shard_size: str | int = "2GB",
    with_code: bool = False,
    verify: bool = True,
    reference_logits: str | os.PathLike | None = None,
    tolerance: float = LOGIT_TOLERANCE,
    check: Callable[[Path], dict[str, str]] = lambda folder: {},
    progress: Progress = lambda total: lambda nbytes: None,
) -> ConversionReport:
    """
    Write what a plan says as a Transformers folder: sharded safetensors, configuration, tokenizer, model card, report.

    The folder is built beside the destination and renamed at the end. After an interruption, the same call checks the
    hashes of the finished shards, writes the others, and ends with the same bytes.

    Args:
        plan: From [`make_plan`].
        target: Where to write.
        max_shard_size (defaults to `"2GB"`): Largest size of a weights file; memory grows with it.
        with_code (defaults to `False`): Write the Python files of the model too, so that the folder loads with
            `trust_remote_code=True` where dcformer is not installed.
        verify (defaults to `True`): Refuse weights that hold NaN or infinity, and run a short forward.
        reference_logits (*optional*): `.npz` with `tokens` (batch, length) and `logits` (batch, length, vocabulary),
            which the model must reproduce in float32.
        tolerance (defaults to 2e-4): Largest absolute difference allowed there.
        check (*optional*): Called with the finished folder if `verify` is set; returns results by name, raises
            ValueError if the folder is wrong.
        progress (*optional*): Called with the number of bytes to read; returns a function that is called with every
            part done.

    Raises:
        ValueError: if the weights are not finite, or the model does not reproduce the reference logits.
    """
    started = time.monotonic()
    shard_bytes = convert_file_size_to_int(max_shard_size)
    reference = None if reference_logits is None else load_reference(reference_logits, plan.config.vocab_size)
    total = plan.source_bytes(plan.parameters)
    with target.open({**plan.fingerprint, "shard_bytes": shard_bytes, "verify": verify}) as folder:
        if target.report is not None:
            origins = [Origin(**origin) for origin in target.report["origins"]]
            found = {**target.report, "origins": origins, "destination": str(target.path)}
            return ConversionReport(**found, was_complete=True)
        resumed = len(target.finished)
        # Here, where the destination is locked: no progress bar starts for a conversion that must not run.
        records = write_shards(plan, target, shard_bytes, verify, progress(total))
        bad = [record["parameter"] for record in records if not record["finite"]]
        values = f"NaN or infinity in {listed(bad)}" if bad else f"{len(records)} tensors, all finite"
        report = ConversionReport(
            {**plan.source.record, "sha256": source_digest(records, plan)},
            list(plan.origins),
            records,
            dict(plan.layout.ignored),
            {"values": values},
            destination=str(target.path),
            source_bytes=total,
            resumed_shards=resumed,
        )
        config = _save_configuration(plan, folder, with_code)
        save_files(plan.files, config, folder)
        if verify or reference is not None:
            report.verification |= verify_folder(folder, reference, tolerance)
        if verify:
            report.verification |= check(folder)
        write_model_card(folder, target.path.name, plan, config, report)
        report.files = write_report(folder, report.to_dict())
    report.seconds = time.monotonic() - started
    return report


def _save_configuration(plan: Plan, folder: Path, with_code: bool) -> DCFormerConfig:
    """Write the configuration and the Python files of the classes; return it as it was written."""
    config: Any = copy.deepcopy(plan.config)
    if with_code:  # as `register_for_auto_class` does, but for these objects alone
        config._auto_class = "AutoConfig"
        causal_lm: Any = meta_model(config)
        for model, auto_class in ((causal_lm.model, "AutoModel"), (causal_lm, "AutoModelForCausalLM")):
            model._auto_class = auto_class
            custom_object_save(model, folder, config)
    config.save_pretrained(folder)
    return config
