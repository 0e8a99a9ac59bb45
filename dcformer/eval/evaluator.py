"""Scores models on tasks with lm-eval, and writes a record for every model, task and number of shots as it finishes.

A run first reads every configuration, tokenizer and data file. Then it reuses records with the settings of this run and
computes the others. Under `accelerate launch` or `torchrun` every process scores its share of the documents, and the
first process decides and writes.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import os
import platform
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..common.files import file_lock
from ..common.processes import count_processes, in_first_process, is_first_process
from ..common.quiet import quiet_libraries
from ..loading import FoundModel, choose_device, find_model, fingerprint_tokenizer
from . import records
from .head_task_answers import FIELDS, by_text
from .perplexity import PAPER_WINDOW
from .records import Record
from .stats import metric_and_stderr
from .suites import HEAD_TASKS, PERPLEXITY_TASKS, PREFIX, find_tasks, shots_of, task_manager
from .task_data import data_fingerprint, import_extra, source_of, spread_indices


if TYPE_CHECKING:
    from .lm_eval_model import LogLikelihoods

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Job:
    """A record to be made, and its settings."""

    model: FoundModel
    task: str
    num_fewshot: int
    settings: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.model.full_name}, {self.task}, {self.num_fewshot}-shot"

    @property
    def data(self) -> tuple:
        """The key of a job's task object, which jobs share; running text is packed by tokenizer and length."""
        depends = self.task in (*HEAD_TASKS, *PERPLEXITY_TASKS)
        return (self.task, self.settings["tokenizer"], self.settings["max_length"]) if depends else (self.task,)


def evaluate(
    models: str | os.PathLike | Sequence[str | os.PathLike],
    *,
    output: str | os.PathLike,
    suite: str | Sequence[str] = "table4",
    tasks: str | Iterable[str] | None = None,
    num_fewshot: int | Iterable[int] = 0,
    limit: int | None = None,
    data_dir: str | os.PathLike | None = None,
    batch_size: int | str = "auto",
    dtype: str | None = None,
    max_length: int | None = None,
    baseline: str | None = None,
    device: str | torch.device | None = None,
    oov_policy: str | None = None,
    engine: str = "transformers",
    shared_prefixes: bool = True,
    seed: int = 1234,
    revision: str | None = None,
    tokenizer: str | None = None,
    trust_remote_code: bool = False,
    data_hash: Mapping[str, str] | None = None,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> list[Record]:
    """
    Evaluate models, or resume an evaluation that was stopped.

    Args:
        models: One name or several, as for [`dcformer.loading.find_model`].
        output: Folder of the records; records in it with the same settings are reused.
        suite, tasks: What to run, see [`dcformer.eval.find_tasks`].
        num_fewshot (defaults to 0): Examples before a question, one number or several, for columns of Table 4.
        limit (*optional*): Documents per task, windows of packed text, or texts of head tasks, spread evenly over all.
        data_dir (*optional*): Folder with the data; `None`: they are fetched.
        batch_size (`int` or `"auto"`): Most inputs in a forward pass, halved if they do not fit into a GPU's memory;
            "auto" is 16 on a CPU and 64 on a GPU. With vLLM the most inputs in one step.
        dtype (*optional*): Data type of the parameters; `None`: bfloat16, or float32 for head tasks alone.
        max_length (*optional*): Most tokens of an input, and the length of the windows of running text; `None`: the
            model's context length, and windows of 2,048 tokens.
        baseline (*optional*): A further model, run first.
        device (*optional*): As in [`dcformer.loading.choose_device`].
        oov_policy (*optional*): For ids without an embedding row, as in [`dcformer.eval.DCFormerLM`]; `None` in records
            of models that have a row for every id.
        engine (defaults to `"transformers"`): "transformers" or "vllm". vLLM starts another process, so a script needs
            `if __name__ == "__main__":` around the call.
        shared_prefixes (defaults to `True`): As in [`dcformer.eval.DCFormerLM`]; vLLM always shares prefixes.
        seed (defaults to 1234): Seed of the few-shot examples, and of all generators.
        revision, tokenizer, trust_remote_code: For all models, as in `find_model`.
        data_hash (*optional*): Task -> required hash of its documents, `"sha256:..."` as in a record, or `"any"`.
            `None`: fetched data must have the known hash, and files of `data_dir` may have any.
        on_progress (*optional*): Called in the first process with a description, and the numbers of requests done and
            in all.

    Returns:
        All records, the baseline's first; an empty list in processes other than the first.

    Raises:
        OSError: if a model, a tokenizer or data are missing or cannot be reached.
        ValueError: for a wrong option, an output that another evaluation is writing, or an id without an embedding row;
            finished records are kept.
    """
    chosen = find_tasks(suite, tasks)
    given = [*([baseline] if baseline else []), *([models] if isinstance(models, str | os.PathLike) else models)]
    names = list(dict.fromkeys(name.rstrip("/") or name for name in map(os.fspath, given)))
    shots = (num_fewshot,) if isinstance(num_fewshot, int) else tuple(num_fewshot)
    if not names:
        raise ValueError("models must name at least one, got none.")
    if others := set(data_hash or ()) - set(chosen):
        raise ValueError(f"data_hash must be of tasks that are run, got {', '.join(sorted(others))}.")
    target = _join_processes(choose_device(device))
    _check_options(limit, max_length, engine, target)
    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet_harness())
        hub = {"revision": revision, "tokenizer": tokenizer, "trust_remote_code": trust_remote_code}
        loaded = [find_model(name, **hub) for name in names]
        # Only one process may lock the folders, and it must do so before it reads them.
        in_first_process(lambda: _lock(stack, output, [model.full_name for model in loaded]))
        common = {
            "dtype": dtype or ("float32" if set(chosen) <= set(HEAD_TASKS) else "bfloat16"),
            "batch_size": batch_size if batch_size == "auto" else int(batch_size),
            "limit": limit,
            "engine": engine,
            "shared_prefixes": shared_prefixes or engine == "vllm",
            "seed": seed,
            "versions": records.library_versions(engine),
            "git_revision": records.git_revision(),
        }
        settings = in_first_process(
            lambda: [_settings(model, chosen, shots, data_dir, max_length, oov_policy, common) for model in loaded]
        )
        jobs = [_Job(model, *job) for model, of_model in zip(loaded, settings) for job in of_model]
        is_left = in_first_process(lambda: [_finished(output, job) is None for job in jobs])
        left = list(itertools.compress(jobs, is_left))
        task_objects = _load_tasks(left, data_dir, limit, data_hash or {})
        for _, of_model in itertools.groupby(left, key=lambda job: job.model.full_name):
            _run_jobs(list(of_model), task_objects, target, output, on_progress)
        return [record for job in jobs if (record := _finished(output, job))] if is_first_process() else []


def _join_processes(device: torch.device) -> torch.device:
    """Connect the processes of `accelerate launch` or `torchrun`, and return the device of this one."""
    if count_processes() == 1:
        return device
    # One process may need hours more than another. Without `cpu`, accelerate does not connect processes on CPUs.
    return import_extra("accelerate").PartialState(cpu=device.type == "cpu", timeout=timedelta(weeks=52)).device


def _lock(stack: contextlib.ExitStack, output: str | os.PathLike, models: Iterable[str]) -> None:
    for folder, sharing in itertools.groupby(sorted(models, key=records.model_folder), key=records.model_folder):
        if len(names := [*sharing]) > 1:
            raise ValueError(f"Results of {names[0]!r} and {names[1]!r} would have one folder; use two outputs.")
        stack.enter_context(file_lock(Path(output, folder, ".lock")))


def _check_options(limit: int | None, max_length: int | None, engine: str, device: torch.device) -> None:
    processes = count_processes()
    if limit is not None and limit < processes:
        raise ValueError(f"limit must be at least 1, and one per process ({processes}), got {limit}.")
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}.")
    if engine not in ("transformers", "vllm"):
        raise ValueError(f"engine must be transformers or vllm, got {engine!r}.")
    if engine == "vllm":
        from .vllm_model import check_device_of_vllm

        check_device_of_vllm(device)
        if processes > 1:
            raise ValueError(f"engine='vllm' scores in one process, got {processes}; start one.")


def _settings(
    model: FoundModel,
    tasks: Iterable[str],
    shots: tuple[int, ...],
    data_dir: str | os.PathLike | None,
    max_length: int | None,
    oov_policy: str | None,
    common: dict[str, Any],
) -> list[tuple[str, int, dict[str, Any]]]:
    """Task, number of shots and settings of all records of a model."""
    from .lm_eval_model import policy_in_force

    policy = policy_in_force(model.config, model.tokenizer, oov_policy)
    of_model = {
        "model": records.model_fingerprint(model.path, model.commit or "main"),
        "model_type": model.config.model_type,
        "tokenizer": fingerprint_tokenizer(model.tokenizer),
        "oov_policy": policy if model.has_ids_without_embedding else None,
        **common,
    }
    settings, versions = [], _task_versions()
    for task in tasks:
        of_task = {
            "max_length": _longest_input(model, task, max_length),
            "task_version": versions[task],
            "data": data_fingerprint(data_dir, task),
        }
        settings += [(task, n, {**of_task, "num_fewshot": n, **of_model}) for n in shots_of(task, shots)]
    return settings


def _task_versions() -> dict[str, float | None]:
    entries = task_manager().task_index.values()
    return {entry.name.removeprefix(PREFIX): (entry.cfg.get("metadata") or {}).get("version") for entry in entries}


def _longest_input(model: FoundModel, task: str, max_length: int | None) -> int:
    """Most tokens of an input: `max_length`, else the window of perplexity tasks, else the model's context length."""
    from lm_eval.models.utils import resolve_max_length

    positions = resolve_max_length(model.config, None, default=0)  # 0: not in the configuration
    if max_length is not None and positions and max_length > positions:
        raise ValueError(f"max_length must be at most {positions}, the positions of {model.name!r}, got {max_length}.")
    longest = max_length or resolve_max_length(model.config, model.tokenizer)
    if task not in PERPLEXITY_TASKS or max_length is not None:
        return longest
    if longest < PAPER_WINDOW:
        raise ValueError(
            f"{task} scores windows of {PAPER_WINDOW:,} tokens, and {model.name!r} takes {longest:,} at most; give "
            f"--max-length {longest} for figures that compare with no other window, or leave the task out."
        )
    return PAPER_WINDOW


def _finished(output: str | os.PathLike, job: _Job) -> Record | None:
    """The record of a job, if it exists with its samples, both undamaged, and its settings are the same."""
    path = records.record_path(output, job.model.full_name, job.task, job.num_fewshot)
    if not path.is_file():
        return None
    try:
        record = records.read_record(path)
        if record.model.rstrip("/") != (name := job.model.full_name):
            raise ValueError(f"{str(path)!r} is a result of {record.model!r}, not {name!r}; give another output.")
        if record.has_settings(job.settings):
            records.check_samples(path, record)
            return record
    except records.DamagedRecordError as error:
        logger.warning(str(error))
    return None


def _load_tasks(
    jobs: list[_Job], data_dir: str | os.PathLike | None, limit: int | None, hashes: Mapping[str, str]
) -> dict[tuple, Any]:
    """`_Job.data` -> lm-eval's task object with its documents."""
    loaded: dict[tuple, Any] = {}
    for job in jobs:
        if job.data not in loaded:
            length = job.settings["max_length"]
            metadata = {
                "data_dir": None if data_dir is None else os.fspath(data_dir),
                "pretrained": job.model.path,
                "tokenizer": job.model.tokenizer,
                "max_length": length,
                **({"window": length} if job.task in PERPLEXITY_TASKS else {}),
                "windows": limit,  # of packed text, or texts of head tasks, which have several questions
                "data_hash": hashes.get(job.task),
            }
            task = task_manager(metadata).load([PREFIX + job.task])["tasks"][PREFIX + job.task]
            task.config.metadata.pop("tokenizer")  # lm-eval copies the metadata into every result
            loaded[job.data] = task
        if job.num_fewshot and job.num_fewshot >= (count := len(loaded[job.data].fewshot_docs())):
            raise ValueError(
                f"num_fewshot must be below {count:,}, the documents of {job.task}, got {job.num_fewshot}."
            )
    return loaded


def _run_jobs(
    jobs: list[_Job],
    task_objects: Mapping[tuple, Any],
    device: torch.device,
    output: str | os.PathLike,
    on_progress: Callable[[str, int, int], None] | None,
) -> None:
    """Load the model of the jobs, and write their records."""
    scorer = _build_scorer(jobs, device)
    with contextlib.closing(scorer):
        for job in jobs:
            report = on_progress if on_progress and is_first_process() else (lambda *_: None)
            result = _score(scorer, task_objects[job.data], job, functools.partial(report, str(job)))
            if result is not None:
                records.write_record(output, *result)
    del scorer  # before the next model is loaded
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _build_scorer(jobs: list[_Job], device: torch.device) -> LogLikelihoods:
    """The scorer of the jobs' model; its inputs have at most the length of the longest job."""
    model, settings = jobs[0].model, jobs[0].settings
    options: dict[str, Any] = {
        "dtype": settings["dtype"],
        "batch_size": settings["batch_size"],
        "max_length": max(job.settings["max_length"] for job in jobs),
        "oov_policy": settings["oov_policy"],
    }
    if settings["engine"] == "vllm":
        from .vllm_model import VLLMLM

        return VLLMLM(model, **options)
    from .lm_eval_model import DCFormerLM

    return DCFormerLM(model, device=device, shared_prefixes=settings["shared_prefixes"], **options)


def _score(
    scorer: LogLikelihoods, task: Any, job: _Job, on_progress: Callable[[int, int], None]
) -> tuple[Record, list[dict]] | None:
    """The record and samples of a job; `None` in other processes than the first."""
    # `simple_evaluate` calls it too, but also takes two seconds per task to describe the machine.
    from lm_eval.evaluator import evaluate as run_harness

    seed, limit, name = job.settings["seed"], job.settings["limit"], PREFIX + job.task
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    task.set_config(key="num_fewshot", value=job.num_fewshot)
    task.set_fewshot_seed(seed=seed)
    scorer.set_max_length(job.settings["max_length"])
    scorer.start_counting(on_progress)
    start = time.perf_counter()
    is_limited = job.task in (*HEAD_TASKS, *PERPLEXITY_TASKS) and job.task != "flan_ppl"  # since it was loaded
    chosen = None if limit is None or is_limited else {name: spread_indices(len(task.eval_docs), limit)}
    is_rolling = task.OUTPUT_TYPE == "loglikelihood_rolling"
    with scorer.whole_documents() if is_rolling else contextlib.nullcontext():
        # bootstrap_iters=0: lm-eval would take 100,000 bootstrap samples for a perplexity.
        results = run_harness(
            scorer, {"tasks": {name: task}, "groups": {}, "group_map": {}}, samples=chosen, bootstrap_iters=0
        )
    counted = scorer.gather_object(scorer.counts())
    if scorer.rank != 0:
        return None
    samples = sorted(map(_as_sample, results["samples"][name]), key=lambda sample: sample["doc_id"])
    metrics = {}
    for metric in samples[0]["metrics"]:
        _, stderr = metric_and_stderr(by_text(samples), metric)
        value = float(results["results"][name][f"{metric},none"])
        metrics[metric] = {"value": value, "stderr": stderr if np.isfinite(stderr) else None}
    totals = {key: sum(counts[key] for counts in counted) for key in ("requests", "input_tokens", "cached_tokens")}
    first = task.eval_docs[0]
    observed = {
        **{f"{key}_documents": len(set().union(*(counts[key] for counts in counted))) for key in ("oov", "truncated")},
        "documents": task.dataset.get("origin") or {"source": str(source_of(job.task)), "hash": None, "as_known": None},
        **({"artificial_ends": first["n_artificial_ends"]} if "n_artificial_ends" in first else {}),
    }
    hardware = f"{platform.machine()}, {os.cpu_count()} cores"
    if scorer.device.type == "cuda":
        hardware = torch.cuda.get_device_name(scorer.device)
    seconds = round(time.perf_counter() - start, 3)
    timings = {"seconds": seconds, **totals, "processes": scorer.world_size, "hardware": hardware}
    record = Record(
        job.model.full_name,
        job.task,
        job.num_fewshot,
        metrics,
        num_samples=len(samples),
        num_documents=results["n-samples"][name]["original"] + first.get("n_unscored", 0),
        limit=limit,
        settings=job.settings,
        observed=observed,
        timings=timings,
    )
    return record, samples


def _as_sample(sample: dict) -> dict:
    requests = []
    for arguments, answer in zip(sample["arguments"], sample["filtered_resps"]):
        log_likelihood, is_greedy = answer if isinstance(answer, tuple | list) else (answer, None)
        context, continuation = arguments if len(arguments) == 2 else ("", arguments[0])
        request = {"context": context, "continuation": continuation}
        requests.append({**request, "log_likelihood": float(log_likelihood), "is_greedy": is_greedy})
    values = {name: sample[name] for name in sample["metrics"]}
    metrics = {name: [*map(float, v)] if isinstance(v, tuple | list) else float(v) for name, v in values.items()}
    fields = {name: sample["doc"][name] for name in FIELDS if name in sample["doc"]}
    kept = {"doc_id": sample["doc_id"], "doc_hash": sample["doc_hash"], "metrics": metrics, "requests": requests}
    return {**kept, "fields": fields} if fields else kept


@contextlib.contextmanager
def quiet_harness() -> Iterator[None]:
    """Silence lm-eval's log and the progress bars of the libraries that it uses; warnings of this package remain."""
    from tqdm import tqdm

    harness_task = import_extra("lm_eval.api.task")
    harness = logging.getLogger("lm_eval")
    level = harness.level
    harness.setLevel(logging.ERROR)
    # lm-eval has no option to hide its bar while it builds prompts.
    harness_task.tqdm = functools.partial(tqdm, disable=True)
    try:
        with quiet_libraries(datasets=True):
            yield
    finally:
        harness_task.tqdm = tqdm
        harness.setLevel(level)
