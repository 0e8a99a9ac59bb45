"""The record of a conversion, for programs (`conversion_report.json`) and for people (the model card)."""

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from ..common.dtypes import dtype_name
from ..common.files import Manifest, check_relative, make_manifest, write_atomically
from ..configuration_dcformer import DCFormerConfig
from ..model_card import CARD_FILE, bullet_list, table, write_card
from ..version_dcformer import __version__
from .plan import Origin, Plan
from .settings import read_json


REPORT_FILE = "conversion_report.json"
# Settings of a training YAML that the model card shows.
_TRAINING_SETTINGS = re.compile(
    r"run_name|dataset_(type|path)|learning_rate(_schedule_steps)?|warmup_steps_fraction|per_device_batch_size|"
    r"max_target_length|opt_type|adam_(b1|b2|weight_decay)|gradient_clipping_threshold|dtype"
)
_LIMITS = "The conversion says nothing about the training data or the quality; evaluate the model before relying on it."
_VERSIONS = {"dcformer": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
# About a run of the conversion, not about its result, which is the same however often it was interrupted.
_OF_THE_RUN = ("destination", "seconds", "source_bytes", "resumed_shards", "was_complete")


@dataclass
class ConversionReport:
    """The record of a conversion."""

    source: dict[str, Any]  #: format, location, step, and the SHA-256 of the arrays that were read
    origins: list[Origin]  #: where every value of the configuration comes from
    #: Per parameter: shape, dtype, file, SHA-256 of its bytes, largest absolute rounding error of a cast, and the
    #: regions of source arrays that it was made from, with their transforms and SHA-256.
    tensors: list[dict[str, Any]]
    ignored: dict[str, str]  #: source arrays that were not converted, with the reason
    verification: dict[str, Any]  #: checks that were made, with their results
    versions: dict[str, str] = field(default_factory=lambda: dict(_VERSIONS))  #: of the packages that took part
    files: Manifest = field(default_factory=dict)  #: size and SHA-256 of every other file of the folder, by its path
    destination: str = ""  #: this and the rest are about this run, and not in the file
    seconds: float = 0.0
    source_bytes: int = 0
    resumed_shards: int = 0
    was_complete: bool = False  #: whether an earlier run had done all but remove its notes

    def to_dict(self) -> dict[str, Any]:
        """The content of `conversion_report.json`."""
        return {name: value for name, value in asdict(self).items() if name not in _OF_THE_RUN}


def write_report(folder: Path, report: dict[str, Any]) -> Manifest:
    """Write a report with the manifest of all other files of the folder, which is returned."""
    files = make_manifest(folder, (path for path in folder.rglob("*") if path != folder / REPORT_FILE))
    write_atomically(folder / REPORT_FILE, json.dumps(report | {"files": files}, indent=2, default=str) + "\n")
    return files


def read_report(folder: Path) -> dict[str, Any] | None:
    """The report of a folder, or None; ValueError if it does not list files of the folder with size and SHA-256."""
    path = folder / REPORT_FILE
    if not path.is_file():
        return None
    report = read_json(path)
    source, files = report.get("source"), report.get("files")
    if not isinstance(source, dict) or not isinstance(files, dict) or not all(map(_is_entry, files.values())):
        raise ValueError(
            f"{str(path)!r} must state the source, and for every file its size and sha256: another version of dcformer "
            "wrote it, or it was changed. Convert the model again, or remove this file."
        )
    for name in files:
        check_relative(name)
    return report


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and {*entry} == {"size", "sha256"} and type(entry["size"]) is int


def write_model_card(folder: Path, name: str, plan: Plan, config: DCFormerConfig, report: ConversionReport) -> None:
    """README.md with where the weights come from and which checks they passed."""
    source = report.source
    origin = {"Format": source["format"], "Location": f"`{source['location']}`"}
    if source["step"] is not None:
        origin["Training step"] = source["step"]
    origin["SHA-256 of the arrays that were read"] = f"`{source['sha256']}`"
    rounding = max((record["max_rounding_error"] for record in report.tensors), default=0.0)
    origin["Largest rounding error of a weight by the conversion"] = rounding
    weights = (
        f"{bullet_list(origin)}\n\n`conversion_report.json` lists every tensor with its source and SHA-256; "
        "`dcformer verify FOLDER` checks the files against it."
    )
    training = {key: value for key, value in plan.source.training.items() if _TRAINING_SETTINGS.fullmatch(key)}
    origins = [(o.field, o.value, o.origin) for o in report.origins if o.field != "layer_types"]
    sections = [
        ("Where the weights come from", weights),
        ("Training", table(("setting", "value"), training.items()) if training else ""),
        ("Where the configuration comes from", table(("field", "value", "from"), origins) if origins else ""),
        ("Checks after the conversion", bullet_list(report.verification)),
    ]
    text = write_card(
        name,
        config,
        parameters=sum(parameter.numel() for parameter in plan.model_parameters.values()),
        dtype=dtype_name(config.dtype),
        licence=source.get("licence"),
        base_model=source.get("base_model"),
        sections=[(heading, body) for heading, body in sections if body],
        limits=_LIMITS,
    )
    (folder / CARD_FILE).write_text(text, encoding="utf-8")
