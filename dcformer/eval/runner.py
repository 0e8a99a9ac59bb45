"""Runs models through tasks with lm-eval, and writes one record per model, task and number of shots as it finishes.

A run first reads every configuration, tokenizer and data file, so that what is wrong there is said before anything is
computed. Then it takes over the records whose settings are those of this run, and computes the others. Under
`accelerate launch` every process scores its share of the documents, and the first decides and writes.
"""

import contextlib
import functools
import logging
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from . import provenance
from .bootstrap import metric_and_stderr
from .data import data_fingerprint
from .perplexity import PAPER_WINDOW
from .records import Record, read_record, record_path, samples_path, write_record
from .suites import PERPLEXITY_TASKS, PREFIX, depends_on_tokenizer, find_tasks, shots_of
from .table4_tasks import tasks_folder


DTYPES = ("bfloat16", "float16", "float32")
# What is found while a task runs.
_OBSERVED = "observed"
# These do not decide whether a record is taken over: a commit need not concern the task, whose version does decide.
_NOT_DECISIVE = (_OBSERVED, "git_revision")


@dataclass(frozen=True)
class _Job:
    """One record to be made; `settings` are those that it will have."""

    model: int
    task: str
    num_fewshot: int
    settings: dict[str, Any]


def evaluate(
    models: str | Sequence[str],
    *,
    output: str | os.PathLike,
    suite: str | Sequence[str] = "table4",
    tasks: str | Iterable[str] | None = None,
    num_fewshot: int | Iterable[int] = (0,),
    limit: int | None = None,
    data_dir: str | os.PathLike | None = None,
    batch_size: int | str = "auto",
    dtype: str = "bfloat16",
    baseline: str | None = None,
    device: str | None = None,
    oov_policy: str | None = None,
    seed: int = 1234,
    revision: str | None = None,
    tokenizer: str | None = None,
    trust_remote_code: bool = False,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> list[Record]:
    """
    Evaluate models, or go on with an evaluation that was stopped.

    Args:
        models (`str` or list): Folders or Hub ids.
        output: Folder of the records; those in it are taken over if their settings are the same.
        suite, tasks: What to run, see `suites.find_tasks`; by default the eleven columns of Table 4.
        num_fewshot (`int` or list, defaults to 0): Examples before a question, in Table 4. Others have their own form.
        limit (`int`, *optional*): Documents per task, or windows of packed text, the first ones.
        data_dir (*optional*): Folder with the data; None: the Hub.
        batch_size (`int` or `"auto"`): Inputs in a forward pass; "auto" is 16 on a CPU and what fits on a GPU.
        dtype (`str`, defaults to `"bfloat16"`): Of the parameters: one of `DTYPES`.
        baseline (`str`, *optional*): A further model, run first.
        device (`str`, *optional*): Such as `"cuda:0"` or `"cpu"`; None: a GPU if there is one.
        oov_policy (`str`, *optional*): "error", "clamp" or "pad", for ids without an embedding row; it is recorded as
            None for models that have a row for every id.
        seed (`int`, defaults to 1234): Of the choice of few-shot examples, and of all generators.
        revision (`str`, *optional*): Of the models on the Hub.
        tokenizer (`str`, *optional*): Folder, `tokenizer.json` or Hub id, instead of every model's own.
        trust_remote_code (`bool`, defaults to `False`): Run code that comes with a model.
        on_progress (`Callable`, *optional*): Called in the first process with what is running, and the numbers of
            requests done and in all.

    Returns:
        All records, the baseline's first; in other processes than the first, none.

    Raises:
        FileNotFoundError: if a model, a tokenizer or data are not there or cannot be reached.
        ValueError: for a wrong option, a wrong file, or an id without an embedding row; what was finished is kept.
        RuntimeError: if a task fails otherwise.
    """
    names = [models] if isinstance(models, str) else list(models)
    names = list(dict.fromkeys([baseline, *names] if baseline else names))
    chosen = find_tasks(suite, tasks)
    shots = (num_fewshot,) if isinstance(num_fewshot, int) else tuple(num_fewshot)
    _check_options(names, shots, limit, dtype, batch_size)
    with _quiet_harness():
        group = _Processes()
        group.check_limit(limit)
        found = [
            provenance.find_model(name, revision=revision, tokenizer=tokenizer, trust_remote_code=trust_remote_code)
            for name in names
        ]
        policies = [_policy(model, oov_policy) for model in found]
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        common = {"dtype": dtype, "batch_size": _batch_size(batch_size, device), "limit": limit}
        jobs = group.decided_by_first(lambda: _plan(found, policies, chosen, shots, data_dir, seed, common))
        left = group.decided_by_first(lambda: [job for job in jobs if _finished(output, found, job) is None])
        task_objects = _load_tasks(found, left, data_dir, limit)
        for index in sorted({job.model for job in left}):
            model = found[index]
            scorer = _build(model, policies[index], device, common)
            for job in left:
                if job.model != index:
                    continue
                scorer.on_progress = _named_progress(on_progress if group.is_first else None, model, job)
                with _naming_the_task(model, job):
                    result = _run(scorer, task_objects[_task_key(model, job.task)], job, limit, seed)
                    write = functools.partial(_write, output, model, job, limit, result)
                    group.decided_by_first(write)
            del scorer
            _free_memory()
        return [_finished(output, found, job) for job in jobs] if group.is_first else []


def _check_options(names: list[str], shots: tuple[int, ...], limit: int | None, dtype: str, batch_size) -> None:
    if not names:
        raise ValueError("No model is named; give a folder or a Hub id.")
    if not shots or any(number < 0 for number in shots):
        raise ValueError(f"num_fewshot must be numbers of at least 0, such as 0,5; got {shots}.")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}; leave it out for all documents.")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    if batch_size != "auto" and not (str(batch_size).isdigit() and int(batch_size) > 0):
        raise ValueError(f'batch_size must be "auto" or a number of at least 1, got {batch_size!r}.')


def _policy(model: provenance.Model, oov_policy: str | None) -> str | None:
    from .language_model import OOV_POLICIES, policy_in_force

    if oov_policy is not None and oov_policy not in OOV_POLICIES:
        raise ValueError(f"oov_policy must be one of {', '.join(OOV_POLICIES)}, got {oov_policy!r}.")
    return policy_in_force(model.config, oov_policy) if model.misses_ids else None


def _batch_size(batch_size: int | str, device: str) -> int | str:
    from .language_model import CPU_BATCH_SIZE

    if batch_size == "auto":
        return CPU_BATCH_SIZE if device == "cpu" else "auto"
    return int(batch_size)


def _plan(models, policies, tasks, shots, data_dir, seed: int, common: dict) -> list[_Job]:
    """What is to be there at the end, with the settings of each record."""
    versions, git_revision = provenance.library_versions(), provenance.git_revision()
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
            **common,
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
                    "max_length": _max_length(model, task),
                }
                jobs.append(_Job(index, task, number, {**own, **settings}))
    return jobs


def _finished(output, models, job: _Job) -> Record | None:
    """The record of a job, if it is there with its samples, and its settings are the same."""
    path = record_path(output, models[job.model].name, job.task, job.num_fewshot)
    if not path.is_file() or not samples_path(path).is_file():
        return None
    record = read_record(path)
    then, now = (
        {name: value for name, value in settings.items() if name not in _NOT_DECISIVE}
        for settings in (record.settings, job.settings)
    )
    return record if then == now else None


def _task_manager(metadata: dict | None = None):
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=tasks_folder(), include_defaults=False, metadata=metadata)


def _task_versions() -> dict[str, float]:
    entries = _task_manager().task_index.values()
    return {entry.name.removeprefix(PREFIX): entry.cfg["metadata"]["version"] for entry in entries}


def _max_length(model: provenance.Model, task: str) -> int:
    """Most tokens of an input: what the model takes, and in tasks that say the length of their windows, no more."""
    from lm_eval.models.utils import resolve_max_length

    longest = resolve_max_length(model.config, model.tokenizer)
    return min(longest, PAPER_WINDOW) if task in PERPLEXITY_TASKS else longest


def _task_key(model: provenance.Model, task: str) -> tuple:
    if not depends_on_tokenizer(task):
        return (task,)
    return task, provenance.tokenizer_fingerprint(model.tokenizer), _max_length(model, task)


def _load_tasks(models, jobs: list[_Job], data_dir, limit: int | None) -> dict[tuple, Any]:
    """The task objects of lm-eval with their documents, each loaded once."""
    loaded: dict[tuple, Any] = {}
    for job in jobs:
        model = models[job.model]
        key = _task_key(model, job.task)
        if key in loaded:
            continue
        metadata = {
            "data_dir": None if data_dir is None else os.fspath(data_dir),
            "pretrained": model.name,
            "tokenizer": model.tokenizer,
            "max_length": _max_length(model, job.task),
            # Streams of packed documents are long: of these the limit counts windows.
            "windows": limit,
        }
        with _naming_the_task(model, job):
            name = PREFIX + job.task
            task = _task_manager(metadata).load([name])["tasks"][name]
        # lm-eval copies the metadata into every result.
        task.config.metadata.pop("tokenizer")
        loaded[key] = task
    return loaded


def _build(model: provenance.Model, policy: str | None, device: str, common: dict):
    from .language_model import DCFormerLM

    try:
        return DCFormerLM(
            model.name,
            tokenizer=model.tokenizer,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
            dtype=common["dtype"],
            batch_size=common["batch_size"],
            device=device,
            oov_policy=policy,
        )
    except (ValueError, OSError) as error:
        raise type(error)(f"{model.name!r} cannot be loaded: {error}") from error


def _run(scorer, task, job: _Job, limit: int | None, seed: int) -> tuple[dict, list[dict], dict] | None:
    """Score one task: lm-eval's results, samples in our form, and what was measured beside; None if not the first."""
    # What `simple_evaluate` does before it calls this function too; afterwards it would describe the machine for two
    # seconds per task.
    from lm_eval.evaluator import evaluate as run_harness

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    task.set_config(key="num_fewshot", value=job.num_fewshot)
    task.set_fewshot_seed(seed=seed)
    scorer.forget_documents()
    scorer._max_length = job.settings["max_length"]
    start = time.perf_counter()
    name = PREFIX + job.task
    is_running_text = task.OUTPUT_TYPE == "loglikelihood_rolling"
    with scorer.whole_documents() if is_running_text else contextlib.nullcontext():
        # lm-eval would draw 100,000 bootstrap samples for a perplexity.
        results = run_harness(
            scorer, {"tasks": {name: task}, "groups": {}, "group_map": {}}, limit=limit, bootstrap_iters=0
        )
    seconds = time.perf_counter() - start
    counts = scorer.gather_object(
        (scorer.scored_requests, scorer.input_tokens, scorer.oov_documents, scorer.cut_documents)
    )
    if scorer.rank != 0:
        return None
    samples = sorted(map(_as_sample, results["samples"][name]), key=lambda sample: sample["doc_id"])
    measured = {
        "documents": results["n-samples"][name]["original"] + task.eval_docs[0].get("n_unscored", 0),
        "observed": {
            "oov_documents": len(set().union(*(documents for _, _, documents, _ in counts))),
            "truncated_documents": len(set().union(*(documents for *_, documents in counts))),
        },
        "timings": {
            "seconds": round(seconds, 3),
            "requests": sum(requests for requests, *_ in counts),
            "input_tokens": sum(tokens for _, tokens, *_ in counts),
            "processes": scorer.world_size,
            "hardware": provenance.hardware_name(scorer.device),
        },
    }
    return results["results"][name], samples, measured


def _as_sample(sample: dict) -> dict:
    requests = []
    for arguments, answer in zip(sample["arguments"], sample["filtered_resps"]):
        log_likelihood, is_greedy = answer if isinstance(answer, tuple | list) else (answer, None)
        context, continuation = arguments if len(arguments) == 2 else ("", arguments[0])
        requests.append(
            {
                "context": context,
                "continuation": continuation,
                "log_likelihood": float(log_likelihood),
                "is_greedy": is_greedy,
            }
        )
    metrics = {name: _plain(sample[name]) for name in sample["metrics"]}
    return {"doc_id": sample["doc_id"], "doc_hash": sample["doc_hash"], "metrics": metrics, "requests": requests}


def _plain(value):
    return [float(part) for part in value] if isinstance(value, tuple | list) else float(value)


def _write(output, model: provenance.Model, job: _Job, limit: int | None, result: tuple) -> None:
    results, samples, measured = result
    metrics = {}
    for name in samples[0]["metrics"]:
        _, stderr = metric_and_stderr(samples, name, task=job.task)
        metrics[name] = {"value": float(results[f"{name},none"]), "stderr": stderr if np.isfinite(stderr) else None}
    record = Record(
        model=model.name,
        task=job.task,
        num_fewshot=job.num_fewshot,
        metrics=metrics,
        num_samples=len(samples),
        num_documents=measured["documents"],
        limit=limit,
        settings={**job.settings, _OBSERVED: measured["observed"]},
        timings=measured["timings"],
    )
    write_record(output, record, samples)


class _Processes:
    """The processes of `accelerate launch`, or this one alone."""

    def __init__(self):
        self.count, self.rank = int(os.environ.get("WORLD_SIZE", "1")), 0
        if self.count > 1:
            from accelerate import PartialState

            # Waits as long as the harness does: one process may need hours more than another. Without being told,
            # accelerate takes processes on CPUs for strangers.
            state = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(weeks=52))
            self.rank, self.count = state.process_index, state.num_processes

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def check_limit(self, limit: int | None) -> None:
        if limit is not None and limit < self.count:
            raise ValueError(
                f"limit={limit} leaves some of the {self.count} processes without a document; raise it, or start fewer."
            )

    def decided_by_first(self, decide: Callable[[], Any]) -> Any:
        """What the first process finds, in all of them; an error too, or the others would wait for ever."""
        if self.count == 1:
            return decide()
        outcome: list = [None, None]
        if self.is_first:
            try:
                outcome[0] = decide()
            except Exception as error:
                outcome[1] = error
        torch.distributed.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]


@contextlib.contextmanager
def _naming_the_task(model: provenance.Model, job: _Job) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        kind = next((kind for kind in (FileNotFoundError, ValueError) if isinstance(error, kind)), RuntimeError)
        message = " ".join(str(error).split()) or type(error).__name__
        raise kind(f"{job.task}, {job.num_fewshot}-shot, with {model.name!r}: {message}") from error


@contextlib.contextmanager
def _quiet_harness() -> Iterator[None]:
    """Without the harness's log and the bars of others, which tell of their insides; our own warnings remain."""
    import lm_eval.api.task as harness_task
    from datasets.utils import logging as datasets_logging
    from tqdm import tqdm
    from transformers.utils import logging as transformers_logging

    harness = logging.getLogger("lm_eval")
    level, verbosity = harness.level, transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    datasets_bars = datasets_logging.is_progress_bar_enabled()
    harness.setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    datasets_logging.disable_progress_bar()
    # Its bar while prompts are made cannot be switched off.
    harness_task.tqdm = functools.partial(tqdm, disable=True)
    try:
        yield
    finally:
        harness_task.tqdm = tqdm
        harness.setLevel(level)
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
        if datasets_bars:
            datasets_logging.enable_progress_bar()


def _named_progress(on_progress, model: provenance.Model, job: _Job) -> Callable[[int, int], None]:
    def report(done: int, total: int) -> None:
        if on_progress is not None:
            on_progress(f"{model.name}, {job.task}, {job.num_fewshot}-shot", done, total)

    return report


def _free_memory() -> None:
    import gc

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
