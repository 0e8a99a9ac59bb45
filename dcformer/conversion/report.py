"""What a conversion did, for programs (`conversion_report.json`) and for people (the model card)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from ..common.digests import file_digest
from .pieces import dtype_name
from .plan import Origin, Plan
from .report_file import REPORT_FILE
from .shard_writer import Written


_CARD_TEMPLATE = Path(__file__).parent.parent / "model_cards" / "converted.md"


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
    """README.md with where the weights come from, filled from `model_cards/converted.md`."""
    training = {
        key: plan.training[key]
        for key in (
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
        if plan.training.get(key) not in (None, "")
    }
    parameters = sum(spec.size for spec in plan.parameters.values() if spec.file is None)
    card = ModelCard.from_template(
        ModelCardData(library_name="transformers", pipeline_tag="text-generation", tags=[plan.config.model_type]),
        template_path=str(_CARD_TEMPLATE),
        name=name,
        parameters=f"{parameters:,}",
        dtype=str(plan.config.dtype).removeprefix("torch."),
        source=report.source,
        origins=report.origins,
        config=plan.config,
        training=training,
        largest_rounding=max((record["max_rounding_error"] for record in report.tensors), default=0.0),
        verification=report.verification,
    )
    card.save(folder / "README.md")
