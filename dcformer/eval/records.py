"""Results on disk: one JSON file per model, task and number of shots, with its samples beside it.

    results/<model>/<task>-<shots>shot.json            what was measured, and everything needed to measure it again
    results/<model>/<task>-<shots>shot.samples.jsonl   one line per document

A record is written when its task is finished, samples first, each file in one step; so a file that is there is whole.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


RECORD_FORMAT = 1


@dataclass
class Record:
    """
    Attributes:
        model (`str`): Name of the model as it was given: a Hub id or a folder.
        task (`str`): Column of the paper's table (`"piqa"`) or another task of ours (`"synthetic_k2"`, `"pile_ppl"`).
        num_fewshot (`int`): Examples before every question.
        metrics: Name -> `{"value": float, "stderr": float or None}`; accuracies are fractions.
        num_samples (`int`): Documents that were scored.
        num_documents (`int`): Documents that the task has; more than `num_samples` if a limit was set.
        limit (`int`, *optional*): The limit that was set.
        settings: What decides the result: model revision and hash, tokenizer hash, task version, seeds, dtype, batch
            size, out-of-vocabulary policy, versions of libraries, git revision. A later run takes the record over only
            if all but the git revision are the same.
        timings: Seconds, requests, tokens; no part of the result.
    """

    model: str
    task: str
    num_fewshot: int
    metrics: dict[str, dict[str, float | None]]
    num_samples: int
    num_documents: int
    limit: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)

    @property
    def is_partial(self) -> bool:
        return self.num_samples < self.num_documents


def model_folder(model: str) -> str:
    """Folder of a model's records: its name without characters that mean something in paths."""
    return "".join(c if c.isalnum() or c in "-_.+" else "__" for c in model.strip("/")) or "model"


def record_path(output: str | os.PathLike, model: str, task: str, num_fewshot: int) -> Path:
    return Path(output) / model_folder(model) / f"{task}-{num_fewshot}shot.json"


def samples_path(record: Path) -> Path:
    return record.with_suffix(".samples.jsonl")


def write_record(output: str | os.PathLike, record: Record, samples: list[dict]) -> Path:
    """Write a record and its samples; returns the path of the record."""
    path = record_path(output, record.model, record.task, record.num_fewshot)
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(samples_path(path), "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples))
    _write(path, json.dumps({"format": RECORD_FORMAT, **asdict(record)}, indent=2, ensure_ascii=False) + "\n")
    return path


def _write(path: Path, text: str) -> None:
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def read_record(path: Path) -> Record:
    """
    Raises:
        ValueError: if the file is no record of this format.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.pop("format") != RECORD_FORMAT:
            raise ValueError("another format")
        return Record(**values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{str(path)!r} is not a result of `dcformer eval`: remove it or run its task again."
        ) from error


def read_records(output: str | os.PathLike) -> list[Record]:
    """
    All records below a folder, sorted by path.

    Raises:
        FileNotFoundError: if the folder is not there or holds none.
        ValueError: if a file is damaged.
    """
    folder = Path(output)
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {str(output)!r} with results; run `dcformer eval` first.")
    records = [read_record(path) for path in sorted(folder.glob("*/*shot.json"))]
    if not records:
        raise FileNotFoundError(f"{str(output)!r} holds no result of `dcformer eval`; check the path.")
    return records


def read_samples(output: str | os.PathLike, record: Record) -> list[dict]:
    """
    Lines of a record's samples: `{"doc_id": int, "doc_hash": str, "metrics": {name: value}, "requests": [{"context",
    "continuation", "log_likelihood", "is_greedy"}]}`.

    Raises:
        FileNotFoundError: if they are not there.
        ValueError: if the file is damaged.
    """
    path = samples_path(record_path(output, record.model, record.task, record.num_fewshot))
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r} with the samples; run the task again.")
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is damaged: remove it and its record, and run the task again.") from error
