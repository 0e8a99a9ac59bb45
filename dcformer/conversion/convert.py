"""The conversions to Transformers folders, from the plan to the finished folder."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.hub import convert_file_size_to_int

from ..loading import load_tokenizer
from ..model_card import known_origin
from .authors_torch import local_folder, plan_torch
from .destination import Destination
from .maxtext import plan_maxtext
from .pax import plan_pax
from .plan import Origin, Plan, listed, meta_model
from .report import ConversionReport, read_report, write_model_card, write_report
from .settings import read_json
from .verify import LOGIT_TOLERANCE, Progress, load_reference, refuse_changed, verify_folder
from .writer import source_digest, write_shards


TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Files of a tokenizer, by which Transformers or `load_tokenizer` knows that there is one.
_TOKENIZERS = ("*tokenizer*.json", "vocab.*", "*.model")
_LICENCES = ("LICEN[CS]E*", "NOTICE*")


def convert_maxtext(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    *,
    step: int | None = None,
    train_config: str | os.PathLike | None = None,
    dtype: str = "keep",
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
    plan = plan_maxtext(source, step=step, train_config=train_config, dtype=dtype)
    if (run := plan.beside) is not None:
        refuse_changed(run, Path(plan.source["location"]).relative_to(run).as_posix())
        plan.beside = None
        if read_report(run) is not None:  # `convert_to_maxtext` wrote it
            take_along(plan, run, GENERATION_CONFIG_NAME)
            settings = json.loads(plan.generation or b"{}")
            for key in plan.stated.intersection(TOKEN_IDS):
                setattr(plan.config, key, settings[key])
    return write_model(plan, target, **options)


def convert_pax(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    *,
    config: str | os.PathLike,
    step: int | None = None,
    dtype: str = "keep",
    force: bool = False,
    **options: Any,
) -> ConversionReport:
    """
    Convert PAX weights (flat `.npz`, folder of `.npy` files, checkpoint of zarr arrays) into a Transformers folder.

    Args:
        config: `config.json` in the authors' keys or ours.
        source, destination, step, dtype, force, options: As of [`convert_maxtext`], and so are returns and raises.
    """
    target = Destination(destination, source, force)
    return write_model(plan_pax(source, config, step=step, dtype=dtype), target, **options)


def convert_torch(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    *,
    dtype: str = "keep",
    force: bool = False,
    **options: Any,
) -> ConversionReport:
    """
    Rewrite a folder of the authors' torch files (or a name on the Hub) in this package's layout.

    Args:
        source: Folder with `config.json` and safetensors or torch weights. Its tokenizer comes along. If it was
            converted, its files must be those of its `conversion_report.json`.
        destination, dtype, force, options: As of [`convert_maxtext`], and so are returns and raises.
    """
    target = Destination(destination, source, force)
    folder = local_folder(source)
    refuse_changed(folder)
    plan = plan_torch(folder, dtype=dtype)
    plan.source |= remembered_source(folder)
    for origin in (folder, source):  # the card of a download names its licence
        plan.source |= known_origin(str(origin), target.path.name)
    take_along(plan, folder)
    return write_model(plan, target, **options)


def remembered_source(folder: Path) -> dict[str, Any]:
    """`step` and `layers_per_block` of the checkpoint from which a folder was converted, if known."""
    source = (read_report(folder) or {}).get("source", {})
    return {name: source[name] for name in ("step", "layers_per_block") if source.get(name) is not None}


def take_along(plan: Plan, folder: Path, config: str = "config.json") -> None:
    """Plan that a folder's tokenizer, settings for `generate` and licence come along, and note what `config` states."""
    plan.beside, path = folder, folder / GENERATION_CONFIG_NAME
    if path.is_file():
        read_json(path)  # refuses what is no JSON
        plan.generation = path.read_bytes()
    if (folder / config).is_file():
        plan.stated = {key for key, value in read_json(folder / config).items() if value is not None}


def write_model(
    plan: Plan,
    target: Destination,
    *,
    max_shard_size: str | int = "2GB",
    tokenizer: str | os.PathLike | PreTrainedTokenizerBase | None = None,
    with_code: bool = False,
    verify: bool = True,
    reference_logits: str | os.PathLike | None = None,
    tolerance: float = LOGIT_TOLERANCE,
    progress: Progress = lambda total: lambda nbytes: None,
) -> ConversionReport:
    """
    Write a complete plan as a Transformers folder: sharded safetensors, configuration, tokenizer, model card, report.

    The folder is built beside the destination and renamed at the end. After an interruption, the same call checks the
    hashes of the finished shards, writes the others, and ends with the same bytes.

    Args:
        plan: From [`complete`].
        target: Where to write.
        max_shard_size (defaults to `"2GB"`): Largest size of a weights file; memory grows with it.
        tokenizer (*optional*): Folder, `tokenizer.json` or tokenizer to save with the model, whose special tokens
            replace the source's; `None`: that of the source, if it has one.
        with_code (defaults to `False`): Write the Python files of the model too, so that the folder loads with
            `trust_remote_code=True` where dcformer is not installed.
        verify (defaults to `True`): Refuse weights that hold NaN or infinity, and run a short forward.
        reference_logits (*optional*): `.npz` with `tokens` (batch, length) and `logits` (batch, length, vocabulary),
            which the model must reproduce in float32.
        tolerance (defaults to 2e-4): Largest absolute difference allowed there.
        progress (*optional*): Called with the number of bytes to read; returns a function that is called with every
            part done.

    Returns:
        [`ConversionReport`], also written as `conversion_report.json`.

    Raises:
        ValueError: if the weights are not finite, or the model does not reproduce the reference logits.
    """
    started = time.monotonic()
    shard_bytes = convert_file_size_to_int(max_shard_size)
    reference = None if reference_logits is None else load_reference(reference_logits, plan.config.vocab_size)
    loaded = find_tokenizer(plan, tokenizer)
    plan.config.architectures = [type(meta_model(plan.config)).__name__]
    total = plan.source_bytes(plan.parameters)
    fingerprint = {**plan.fingerprint(), "shard_bytes": shard_bytes, "verify": verify}
    with target.open(fingerprint) as folder:
        if target.report is not None:
            origins = [Origin(**origin) for origin in target.report["origins"]]
            found = {**target.report, "origins": origins, "destination": str(target.path)}
            return ConversionReport(**found, was_complete=True)
        resumed = len(target.finished)
        # Here, where the destination is locked: no progress bar starts for a conversion that must not run.
        records = write_shards(plan, target, shard_bytes, verify, progress(total))
        report = ConversionReport(
            {**plan.source, "sha256": source_digest(records, plan)},
            plan.origins,
            records,
            plan.ignored,
            {"values": _values_words(records)},
            destination=str(target.path),
            source_bytes=total,
            resumed_shards=resumed,
        )
        _save_settings(plan, folder, with_code)
        save_beside(plan, folder, loaded)
        if verify or reference is not None:
            report.verification |= verify_folder(folder, reference, tolerance)
        if verify and plan.check is not None:
            report.verification |= plan.check(folder)
        write_model_card(folder, target.path.name, plan, report)
        report.files = write_report(folder, report.to_dict())
    report.seconds = time.monotonic() - started
    return report


def find_tokenizer(plan: Plan, given: str | os.PathLike | PreTrainedTokenizerBase | None = None) -> Any:
    """The tokenizer that is given or comes along; ids of its special tokens that the source lacks go into the plan."""
    source: Any = given
    if given is None and plan.beside is not None and any(any(plan.beside.glob(files)) for files in _TOKENIZERS):
        source = plan.beside
    tokenizer = load_tokenizer(source) if isinstance(source, str | os.PathLike) else source
    for key in TOKEN_IDS:
        value = getattr(tokenizer, key, None)
        if value is None or value >= plan.config.vocab_size or (given is None and key in plan.stated):
            continue
        if not _has(getattr(plan.config, key), value):
            setattr(plan.config, key, value)
            plan.origins.append(Origin(key, value, "tokenizer"))
        settings = json.loads(plan.generation or b"{}")
        if given is not None and plan.generation is not None and not _has(settings.get(key), value):
            plan.generation = json.dumps(settings | {key: value}, indent=2).encode() + b"\n"
    return tokenizer


def _has(stated: int | list[int] | None, value: int) -> bool:
    """True if a configuration states an id, which may be one of several that end a text."""
    return value in (stated if isinstance(stated, list) else [stated])


def _save_settings(plan: Plan, folder: Path, with_code: bool) -> None:
    """The configuration, and the Python files of the classes."""
    if with_code:  # as `register_for_auto_class` does, but for these objects alone
        plan.config._auto_class = "AutoConfig"
        causal_lm = meta_model(plan.config)
        for model, auto_class in ((causal_lm.model, "AutoModel"), (causal_lm, "AutoModelForCausalLM")):
            model._auto_class = auto_class
            custom_object_save(model, folder, plan.config)
    plan.config.save_pretrained(folder)


def save_beside(plan: Plan, folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Write the settings for `generate`, the tokenizer and the licence into a folder."""
    GenerationConfig.from_model_config(plan.config).save_pretrained(folder)
    if plan.generation is not None:
        (folder / GENERATION_CONFIG_NAME).write_bytes(plan.generation)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    for path in [path for files in _LICENCES if plan.beside is not None for path in plan.beside.glob(files)]:
        if path.is_file():
            shutil.copyfile(path, folder / path.name)


def _values_words(records: list[dict[str, Any]]) -> str:
    bad = [record["parameter"] for record in records if not record["finite"]]
    return f"NaN or infinity in {listed(bad)}" if bad else f"{len(records)} tensors, all finite"
