"""Which records a run is to make, with the settings of each, and which of them are there already."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from . import provenance
from .data import data_fingerprint
from .engines import import_vllm
from .records import DamagedResult, Record, read_record, read_samples, record_path, samples_path
from .suites import PERPLEXITY_TASKS, PREFIX, shots_of
from .table4_tasks import tasks_folder
from .windows import PAPER_WINDOW


logger = logging.getLogger(__name__)

# What is found while a task runs.
OBSERVED = "observed"
# Which class has scored: `DCFormerLM`, the harness's own `HFLM`, or `VLLMLM`.
OUR_SCORER, STOCK_SCORER, VLLM_SCORER = "dcformer", "stock", "vllm"
_IN_WORDS = {
    OUR_SCORER: "DCFormerLM",
    STOCK_SCORER: "lm-eval's own HFLM (--stock)",
    VLLM_SCORER: "vLLM (--engine vllm)",
}
# These do not decide whether a record is reused: a commit need not concern the task, whose version does decide.
_NOT_DECISIVE = (OBSERVED, "git_revision")


@dataclass(frozen=True)
class Job:
    """One record to be made; `settings` are those that it will have."""

    model: int
    task: str
    num_fewshot: int
    settings: dict[str, Any]


def make_plan(
    models: Sequence[provenance.Model],
    policies: Sequence[str | None],
    tasks: Iterable[str],
    shots: tuple[int, ...],
    data_dir: str | os.PathLike | None,
    seed: int,
    max_length: int | None,
    common: dict[str, Any],
) -> list[Job]:
    """What is to be there at the end, with the settings of each record."""
    versions, git_revision = provenance.library_versions(), provenance.git_revision()
    if common["scorer"] == VLLM_SCORER:
        versions = {**versions, "vllm": import_vllm().__version__}
    lengths = {(model.name, task): _longest_input(model, task, max_length) for model in models for task in tasks}
    task_versions = _task_versions()
    data = {task: data_fingerprint(data_dir, task) for task in tasks}
    jobs = []
    for index, (model, policy) in enumerate(zip(models, policies)):
        settings = {
            "model": provenance.model_fingerprint(model),
            "model_type": model.config.model_type,
            "tokenizer": provenance.tokenizer_fingerprint(model.tokenizer),
            "add_bos": provenance.adds_special_tokens(model.tokenizer),
            "oov_policy": policy,
            # Settings without shared_prefixes, as those of earlier versions, say that every input was computed whole.
            **{name: value for name, value in common.items() if name != "shared_prefixes" or value},
            "seeds": dict.fromkeys(("random", "numpy", "torch", "fewshot"), seed),
            "versions": versions,
            "git_revision": git_revision,
        }
        for task in tasks:
            for number in shots_of(task, shots):
                own = {
                    "task_version": task_versions[task],
                    "data": data[task],
                    "num_fewshot": number,
                    "max_length": lengths[model.name, task],
                }
                jobs.append(Job(index, task, number, {**own, **settings}))
    return jobs


def finished(output: str | os.PathLike, model: provenance.Model, job: Job) -> Record | None:
    """
    The record of a job, if it is there with its samples, and its settings are the same.

    A damaged one is named in the log, and is to be made again.

    Raises:
        ValueError: if a file that is no result of ours, or is that of another model or scorer, is in its place.
    """
    path = record_path(output, model.name, job.task, job.num_fewshot)
    if not path.is_file():
        return None
    try:
        record = read_record(path)
        if record.model.strip("/") != model.name.strip("/"):
            raise ValueError(
                f"{str(path)!r} is a result of {record.model!r}, where that of {model.name!r} is to be written; give "
                "another output."
            )
        _check_scorer(path, record, job)
        if not _same_settings(record.settings, job.settings):
            return None
        if not samples_path(path).is_file():
            raise DamagedResult(f"There is no file {str(samples_path(path))!r} with the samples", "run the task again.")
        read_samples(output, record)
    except DamagedResult as error:
        logger.warning("%s; %s, %d-shot, is run again.", error.what, job.task, job.num_fewshot)
        return None
    return record


def _check_scorer(path: Path, record: Record, job: Job) -> None:
    theirs, ours = _decisive(record.settings)["scorer"], job.settings["scorer"]
    if theirs != ours:
        raise ValueError(
            f"{str(path)!r} was scored by {_IN_WORDS.get(theirs, theirs)}, and this run scores by "
            f"{_IN_WORDS[ours]}; give another output."
        )


def _same_settings(then: dict[str, Any], now: dict[str, Any]) -> bool:
    return _decisive(then) == _decisive(now)


def _decisive(settings: dict[str, Any]) -> dict[str, Any]:
    decisive = {name: value for name, value in settings.items() if name not in _NOT_DECISIVE}
    return {"scorer": OUR_SCORER, **decisive}  # of which records of earlier versions do not tell


def task_manager(metadata: dict | None = None):
    """lm-eval's, of our tasks alone."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=tasks_folder(), include_defaults=False, metadata=metadata)


@cache
def _task_versions() -> dict[str, float]:
    entries = task_manager().task_index.values()
    return {entry.name.removeprefix(PREFIX): entry.cfg["metadata"]["version"] for entry in entries}


def _longest_input(model: provenance.Model, task: str, max_length: int | None) -> int:
    """
    Most tokens of an input: what is asked for, else what the model takes; the window of tasks of perplexity.

    Raises:
        ValueError: if that is more than the model takes.
    """
    from lm_eval.models.utils import resolve_max_length

    longest = resolve_max_length(model.config, model.tokenizer)
    positions = resolve_max_length(model.config, None, default=0)  # 0: the configuration does not say
    if max_length is not None:
        if positions and max_length > positions:
            raise ValueError(
                f"max_length is {max_length}, and {model.name!r} has {positions} positions; give at most as many."
            )
        return max_length
    if task not in PERPLEXITY_TASKS:
        return longest
    if longest < PAPER_WINDOW:
        raise ValueError(
            f"{task} scores windows of {PAPER_WINDOW:,} tokens, and {model.name!r} takes {longest:,} at most; give "
            f"--max-length {longest} (max_length={longest}) for figures that compare with no other window, or leave "
            "the task out."
        )
    return PAPER_WINDOW
