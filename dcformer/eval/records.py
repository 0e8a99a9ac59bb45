"""Results on disk: one JSON file per model, task and number of shots, with its samples beside it.

    results/<model>/<task>-<shots>shot.json            what was measured, and everything needed to measure it again
    results/<model>/<task>-<shots>shot.samples.jsonl   one line per document

A record is written when its task is finished, samples first, each file in one step, so that a file that is there is
whole. A record has the SHA-256 of its samples: what was damaged since, or belongs to another run, is noticed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..common.files import write_atomically
from ..common.renamed import RENAMED


RECORD_FORMAT = 2
# The first had no checksum of the samples.
_READABLE_FORMATS = (1, 2)


class DamagedResult(ValueError):
    """
    A result of ours that cannot be used, and whose task may be run again.

    Args:
        what: Which file is damaged, and how.
        advice: What to do.
    """

    def __init__(self, what: str, advice: str):
        super().__init__(what, advice)  # both, so that it can be sent to other processes
        self.what = what

    def __str__(self) -> str:
        return ": ".join(self.args)


@dataclass
class Record:
    """
    Attributes:
        model (`str`): Name of the model as it was given: a Hub id or a folder.
        task (`str`): Column of the paper's table (`"piqa"`) or another task of ours (`"head_tasks_authors_k2"`,
            `"pile_ppl"`).
        num_fewshot (`int`): Examples before every question.
        metrics: Name -> `{"value": float, "stderr": float or None}`; accuracies are fractions.
        num_samples (`int`): Documents that were scored.
        num_documents (`int`): Documents that the task has; more than `num_samples` if a limit was set.
        limit (`int`, *optional*): The limit that was set.
        settings: What decides the result: model revision and hash, tokenizer hash, task version, seeds, dtype, batch
            size, out-of-vocabulary policy, versions of libraries, git revision. A later run takes the record over only
            if all but the git revision are the same.
        timings: Seconds, requests, tokens; no part of the result.
        samples_sha256 (`str`, *optional*): SHA-256 of the file of samples; unknown in results of the first format.
        values_sha256 (`str`, *optional*): SHA-256 of what was measured and of what; unknown in results of the first
            format.
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
    samples_sha256: str | None = None
    values_sha256: str | None = None

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
    lines = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples).encode()
    whole = replace(record, samples_sha256=hashlib.sha256(lines).hexdigest())
    whole = replace(whole, values_sha256=_digest_of_values(whole))
    write_atomically(samples_path(path), lines)
    text = json.dumps({"format": RECORD_FORMAT, **asdict(whole)}, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, text.encode())
    return path


def read_record(path: Path) -> Record:
    """
    Raises:
        DamagedResult: if the file is damaged.
        ValueError: if it is another's, or of a later format than this version knows.
    """
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # of JSON or of UTF-8
        raise _damaged(path, "it is no JSON; it may have been cut") from error
    number = values.pop("format", None) if isinstance(values, dict) else None
    if type(number) is not int:
        raise ValueError(
            f"{str(path)!r} is not a result of `dcformer eval`, although named like one; move it to another folder."
        )
    if number not in _READABLE_FORMATS:
        raise ValueError(
            f"{str(path)!r} is a result in format {number}, and this version of dcformer reads up to {RECORD_FORMAT}; "
            "install a newer version, or choose another folder for results."
        )
    try:
        record = Record(**values)
        problem = _problem(record)
    except (TypeError, AttributeError, KeyError) as error:
        raise _damaged(path, "fields are missing, too many or of another kind") from error
    if not problem and number > 1 and record.values_sha256 != _digest_of_values(record):
        problem = "its values are not those that were written"
    if problem:
        raise _damaged(path, problem)
    if (new := RENAMED["task"].get(record.task)) is not None:
        raise ValueError(
            f"{str(path)!r} is a result of {record.task!r}, which is called {new!r} now; move it to another folder and "
            "run the task by its new name."
        )
    return record


def _digest_of_values(record: Record) -> str:
    """The SHA-256 of what was measured; settings are compared with those of a run anyway."""
    names = ("task", "num_fewshot", "metrics", "num_samples", "num_documents", "limit", "samples_sha256")
    values = json.dumps({name: getattr(record, name) for name in names}, sort_keys=True)
    return hashlib.sha256(values.encode()).hexdigest()


def _damaged(path: Path, problem: str) -> DamagedResult:
    return DamagedResult(f"The result {str(path)!r} is damaged ({problem})", "remove it or run its task again.")


def _problem(record: Record) -> str:
    """What is wrong with the values of a record, or nothing."""
    kinds = {"model": str, "task": str, "metrics": dict, "settings": dict, "timings": dict}
    for name, kind in kinds.items():
        if not isinstance(getattr(record, name), kind):
            return f"{name} is {getattr(record, name)!r}"
    for name, least in (("num_fewshot", 0), ("num_samples", 1), ("num_documents", 1)):
        value = getattr(record, name)
        if type(value) is not int or value < least:
            return f"{name} is {value!r}"
    if not record.metrics:
        return "metrics is empty"
    for name, measured in record.metrics.items():
        value, stderr = measured["value"], measured.get("stderr")
        if not _is_number(value) or not (stderr is None or _is_number(stderr)):
            return f"{name} is {value!r} with the standard error {stderr!r}"
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def read_records(output: str | os.PathLike) -> list[Record]:
    """
    All records below a folder, sorted by path.

    Raises:
        FileNotFoundError: if the folder is not there or holds none.
        ValueError: if a file is damaged, or not a result of this version.
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
        DamagedResult: if the file is damaged, or not that which was written with the record.
    """
    path = samples_path(record_path(output, record.model, record.task, record.num_fewshot))
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r} with the samples; run the task again.")
    content = path.read_bytes()
    try:
        samples = [json.loads(line) for line in content.split(b"\n") if line]
    except ValueError as error:
        raise _damaged_samples(path, "a line is no JSON; it may have been cut") from error
    if record.samples_sha256 is not None and hashlib.sha256(content).hexdigest() != record.samples_sha256:
        raise _damaged_samples(path, "its SHA-256 is not that in its record")
    if len(samples) != record.num_samples:
        raise _damaged_samples(path, f"it has {len(samples)} lines, and its record {record.num_samples} samples")
    return samples


def _damaged_samples(path: Path, problem: str) -> DamagedResult:
    advice = "remove them and their record, or run the task again."
    return DamagedResult(f"The samples {str(path)!r} are damaged ({problem})", advice)
