"""What a conversion did, for programs (`conversion_report.json`) and for people (the model card)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..common.digests import file_digest
from ..model_card import CARD_FILE, bullet_list, table, write_card
from .pieces import dtype_name
from .plan import Origin, Plan
from .report_file import REPORT_FILE
from .shard_writer import Written


_TRAINING_SETTINGS = (
    "run_name",
    "dataset_type",
    "dataset_path",
    "learning_rate",
    "learning_rate_schedule_steps",
    "warmup_steps_fraction",
    "per_device_batch_size",
    "max_target_length",
    "opt_type",
    "adam_b1",
    "adam_b2",
    "adam_weight_decay",
    "gradient_clipping_threshold",
    "dtype",
)
_LIMITS = (
    "The conversion says nothing about what the model was trained on or how well it does; evaluate it before relying "
    "on it."
)


@dataclass
class ConversionReport:
    """
    Attributes:
        source: Format, location and step.
        origins: Where every configuration value comes from.
        tensors: Per parameter: shape, dtype, file, sha256 of its bytes, source arrays with what was done to them, and
            the largest absolute rounding error of a cast.
        ignored: Source arrays that were not converted, with the reason.
        verification: What was checked after writing, with figures.
        files: The SHA-256 of every file of the folder; null for weights, whose tensors have theirs, and the report.
        destination (`str`), seconds (`float`), source_bytes (`int`), resumed_shards (`int`): What this
            run did; not in the file, which is the same however often the run was interrupted.
    """

    source: dict[str, Any]
    origins: list[Origin]
    tensors: list[dict[str, Any]]
    ignored: dict[str, str]
    verification: dict[str, Any]
    versions: dict[str, str]
    files: dict[str, str | None] = field(default_factory=dict)
    destination: str = field(default="", compare=False)
    seconds: float = field(default=0.0, compare=False)
    source_bytes: int = field(default=0, compare=False)
    resumed_shards: int = field(default=0, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """What the file holds."""
        values = asdict(self)
        for name in ("destination", "seconds", "source_bytes", "resumed_shards"):
            del values[name]
        return values

    def save(self, folder: Path) -> None:
        """Write the report, after all other files."""
        (folder / REPORT_FILE).unlink(missing_ok=True)  # of a run that ended before the renaming
        others = sorted(path for path in folder.iterdir() if path.suffix != ".safetensors")
        self.files = dict.fromkeys(sorted({*(path.name for path in folder.iterdir()), REPORT_FILE}))
        self.files |= {path.name: file_digest(path) for path in others}
        text = json.dumps(self.to_dict(), indent=2, default=str) + "\n"
        (folder / REPORT_FILE).write_text(text, encoding="utf-8")


def tensor_records(plan: Plan, written: dict[str, Written]) -> list[dict[str, Any]]:
    """The report's entry of every parameter."""
    by_parameter = plan.by_parameter()
    records = []
    for name, spec in plan.parameters.items():
        sources = [
            {
                "leaf": piece.leaf,
                "box": [list(interval) for interval in piece.box],
                "transform": piece.transform,
                "dtype": dtype_name(plan.leaves[piece.leaf].dtype),
            }
            for piece in by_parameter[name]
        ]
        records.append(
            {
                "parameter": name,
                "shape": list(spec.shape),
                "dtype": dtype_name(spec.dtype),
                "file": written[name].file,
                "sha256": written[name].sha256,
                "max_rounding_error": written[name].rounding_error,
                "sources": sources,
            }
        )
    return records


def write_model_card(folder: Path, name: str, plan: Plan, report: ConversionReport) -> None:
    """README.md with where the weights come from and what was checked."""
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
    training = {key: plan.training[key] for key in _TRAINING_SETTINGS if plan.training.get(key) not in (None, "")}
    origins = [(o.field, o.value, o.origin) for o in report.origins if o.field != "layer_types"]
    sections = [
        ("Where the weights come from", weights),
        ("Training", table(("setting", "value"), training.items()) if training else ""),
        ("Where the configuration comes from", table(("field", "value", "from"), origins) if origins else ""),
        ("Checks after the conversion", bullet_list(report.verification)),
    ]
    # As config.json has it, with the code if that was written.
    config = type(plan.config).from_pretrained(folder)
    text = write_card(
        name,
        config,
        class_name=(plan.config.architectures or [""])[0],
        parameters=sum(spec.size for spec in plan.parameters.values() if spec.file is None),
        dtype=str(plan.config.dtype).removeprefix("torch."),
        licence=source.get("licence"),
        base_model=source.get("base_model"),
        sections=[(heading, body) for heading, body in sections if body],
        limits=_LIMITS,
    )
    (folder / CARD_FILE).write_text(text, encoding="utf-8")
