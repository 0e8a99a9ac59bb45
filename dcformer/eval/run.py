"""Runs models through tasks with lm-eval, and writes one record per model, task and number of shots as it finishes.

A run first reads every configuration, tokenizer and data file. Then it reuses the records whose settings are those of
this run, and computes the others. Under `accelerate launch` or `torchrun` every process scores its share of the
documents, and the first decides and writes.
"""

from __future__ import annotations

import contextlib
import functools
import gc
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
from ..common.quiet import quiet_libraries
from ..loading import FoundModel, choose_device, find_model, fingerprint_tokenizer
from . import records
from .data import data_fingerprint, import_extra, origin_of, spread_places
from .head_tasks import FIELDS, by_text
from .perplexity import PAPER_WINDOW
from .records import Record
from .stats import metric_and_stderr
from .suites import HEAD_TASKS, PERPLEXITY_TASKS, PREFIX, find_tasks, shots_of, task_manager


if TYPE_CHECKING:
    from .model import LogLikelihoods

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Job:
    """One record to be made; `settings` are those that it will have."""

    model: FoundModel
    task: str
    num_fewshot: int
    settings: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.model.name}, {self.task}, {self.num_fewshot}-shot"

    @property
    def data(self) -> tuple:
        """Jobs of the same value have one task object: texts are packed by the tokenizer and the length."""
        depends = self.task in (*HEAD_TASKS, *PERPLEXITY_TASKS)
        return (self.task, self.settings["tokenizer"], self.settings["max_length"]) if depends else (self.task,)


def evaluate(
    models: str | Sequence[str],
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
        models: One name or several, as [`dcformer.loading.find_model`] takes them.
        output: Folder of the records; those in it are reused if their settings are the same.
        suite, tasks: What to run, see [`dcformer.eval.find_tasks`].
        num_fewshot (defaults to 0): Examples before a question, in Table 4. Other tasks have their own form.
        limit (*optional*): Documents per task, spread evenly over all; windows of packed text; texts of head tasks.
        data_dir (*optional*): Folder with the data; `None`: they are fetched.
        batch_size (`int` or `"auto"`): Most inputs in a forward pass, halved where the memory of a GPU is not enough;
            "auto" is 16 on a CPU and 64 on a GPU. With vLLM the most inputs in one step.
        dtype (*optional*): Data type of the parameters; `None`: bfloat16, for head tasks alone float32.
        max_length (*optional*): Most tokens of an input, and the length of the windows of running text; `None`: what
            the model takes, and windows of 2,048 tokens.
        baseline (*optional*): A further model, run first.
        device (*optional*): As [`dcformer.loading.choose_device`] takes it.
        oov_policy (*optional*): For ids without an embedding row, as [`dcformer.eval.DCFormerLM`] takes it; recorded
            as `None` for models that have a row for every id.
        engine (defaults to `"transformers"`): What computes, "transformers" or "vllm". The latter works in a process of
            its own, so a script needs `if __name__ == "__main__":` around the call.
        shared_prefixes (defaults to `True`): As [`dcformer.eval.DCFormerLM`] takes it; vLLM always shares.
        seed (defaults to 1234): Seed of the choice of few-shot examples, and of all generators.
        revision, tokenizer, trust_remote_code: Of all models, as `find_model` takes them.
        data_hash (*optional*): Task -> hash that its documents must have, `"sha256:..."` as in a record, or `"any"`.
            `None`: what is fetched must have the known hash, and files of `data_dir` may have any.
        on_progress (*optional*): Called in the first process with what is running, and the numbers of requests done
            and in all.

    Returns:
        All records, the baseline's first; in other processes than the first, none.

    Raises:
        OSError: if a model, a tokenizer or data are not there or cannot be reached.
        ValueError: for a wrong option, an output that another evaluation is writing, or an id without an embedding row;
            what was finished is kept.
    """
    chosen = find_tasks(suite, tasks)
    are_head_tasks = set(chosen) <= set(HEAD_TASKS)
    names = [models] if isinstance(models, str) else list(models)
    names = list(dict.fromkeys([baseline, *names] if baseline else names))
    shots = (num_fewshot,) if isinstance(num_fewshot, int) else tuple(num_fewshot)
    if not names:
        raise ValueError("models must name at least one, got none.")
    if others := set(data_hash or ()) - set(chosen):
        raise ValueError(f"data_hash must be of tasks that are run, got {', '.join(sorted(others))}.")
    place = choose_device(device)
    group = _Processes(place)
    _check_options(limit, max_length, engine, place, group.count)
    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet_harness())
        common = {
            "dtype": dtype or ("float32" if are_head_tasks else "bfloat16"),
            "batch_size": batch_size if batch_size == "auto" else int(batch_size),
            "limit": limit,
            "engine": engine,
            "shared_prefixes": shared_prefixes or engine == "vllm",
            "seed": seed,
            "versions": records.library_versions(engine),
            "git_revision": records.git_revision(),
        }
        # Only one process may lock the folders, and it has to before it looks at what is there.
        folders = sorted({records.model_folder(name) for name in names})
        locks = [file_lock(Path(output, folder, ".lock")) for folder in folders]
        group.decided_by_first(lambda: [stack.enter_context(lock) for lock in locks])
        hub = {"revision": revision, "tokenizer": tokenizer, "trust_remote_code": trust_remote_code}
        found = [find_model(name, **hub) for name in names]
        all_settings = group.decided_by_first(
            lambda: [_settings(each, chosen, shots, data_dir, max_length, oov_policy, common) for each in found]
        )
        jobs = [_Job(model, *job) for model, own in zip(found, all_settings) for job in own]
        are_left = group.decided_by_first(lambda: [_finished(output, job) is None for job in jobs])
        left = [job for job, is_left in zip(jobs, are_left) if is_left]
        task_objects = _load_tasks(left, data_dir, limit, data_hash or {})
        for model in found:
            own = [job for job in left if job.model is model]
            if not own:
                continue
            scorer = _build_scorer(own, group.device)
            with contextlib.closing(scorer) if engine == "vllm" else contextlib.nullcontext():
                for job in own:
                    tell = on_progress if on_progress and group.is_first else (lambda *_: None)
                    result = _score(scorer, task_objects[job.data], job, functools.partial(tell, str(job)))
                    if group.is_first:
                        records.write_record(output, *result)
            del scorer  # or there would be two models in memory
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return [record for job in jobs if (record := _finished(output, job))] if group.is_first else []


def _check_options(
    limit: int | None, max_length: int | None, engine: str, device: torch.device, processes: int
) -> None:
    if limit is not None and limit < processes:
        raise ValueError(f"limit must be at least 1, and one for each of {processes} processes, got {limit}.")
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
    """Task, number of shots and settings of each record of a model."""
    from .model import policy_in_force

    policy = policy_in_force(model.config, model.tokenizer, oov_policy)
    settings = {
        "model": records.model_fingerprint(model.path, model.revision),
        "model_type": model.config.model_type,
        "tokenizer": fingerprint_tokenizer(model.tokenizer),
        "oov_policy": policy if model.has_ids_without_embedding else None,
        **common,
    }
    found = []
    for task in tasks:
        of_task = {
            "max_length": _longest_input(model, task, max_length),
            "task_version": _task_versions()[task],
            "data": data_fingerprint(data_dir, task),
        }
        found += [(task, n, {**of_task, "num_fewshot": n, **settings}) for n in shots_of(task, shots)]
    return found


@functools.cache
def _task_versions() -> dict[str, float]:
    entries = task_manager().task_index.values()
    return {entry.name.removeprefix(PREFIX): entry.cfg["metadata"]["version"] for entry in entries}


def _longest_input(model: FoundModel, task: str, max_length: int | None) -> int:
    """Most tokens of an input: what is asked for, else what the model takes; the window of tasks of perplexity."""
    from lm_eval.models.utils import resolve_max_length

    positions = resolve_max_length(model.config, None, default=0)  # 0: the configuration does not say
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
    """The record of a job, if it is there with its samples, both undamaged, and its settings are the same."""
    path = records.record_path(output, job.model.name, job.task, job.num_fewshot)
    if not path.is_file():
        return None
    try:
        record = records.read_record(path)
        if record.model.strip("/") != job.model.name.strip("/"):
            raise ValueError(
                f"{str(path)!r} is a result of {record.model!r}, not {job.model.name!r}; give another output."
            )
        if record.has_settings(job.settings):
            records.check_samples(path, record)
            return record
    except records.DamagedRecordError as error:
        logger.warning(str(error))
    return None


def _load_tasks(
    jobs: list[_Job], data_dir: str | os.PathLike | None, limit: int | None, hashes: Mapping[str, str]
) -> dict[tuple, Any]:
    """The task objects of lm-eval with their documents, each loaded once."""
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
                # Streams of packed documents are long, and texts of head tasks have several questions.
                "windows": limit,
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


def _build_scorer(jobs: list[_Job], device: torch.device) -> LogLikelihoods:
    """The scorer of a model, whose inputs are as long as the longest of its jobs."""
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
    from .model import DCFormerLM

    return DCFormerLM(model, device=device, shared_prefixes=settings["shared_prefixes"], **options)


def _score(
    scorer: LogLikelihoods, task: Any, job: _Job, on_progress: Callable[[int, int], None]
) -> tuple[Record, list[dict]] | None:
    """The record and samples of a job; `None` in other processes than the first."""
    # What `simple_evaluate` calls too; it would describe the machine for two seconds per task.
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
    is_cut = job.task in (*HEAD_TASKS, *PERPLEXITY_TASKS) and job.task != "flan_ppl"  # when it was loaded
    places = None if limit is None or is_cut else spread_places(len(task.eval_docs), limit)
    is_rolling = task.OUTPUT_TYPE == "loglikelihood_rolling"
    with scorer.whole_documents() if is_rolling else contextlib.nullcontext():
        # lm-eval would draw 100,000 bootstrap samples for a perplexity.
        results = run_harness(
            scorer,
            {"tasks": {name: task}, "groups": {}, "group_map": {}},
            samples=None if places is None else {name: places},
            bootstrap_iters=0,
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
    scored = task.eval_docs
    observed = {
        **{f"{key}_documents": len(set().union(*(counts[key] for counts in counted))) for key in ("oov", "truncated")},
        "documents": origin_of(scored),
        **({"artificial_ends": scored[0]["n_artificial_ends"]} if "n_artificial_ends" in scored.column_names else {}),
    }
    seconds = round(time.perf_counter() - start, 3)
    hardware = f"{platform.machine()}, {os.cpu_count()} cores"
    if scorer.device.type == "cuda":
        hardware = torch.cuda.get_device_name(scorer.device)
    timings = {"seconds": seconds, **totals, "processes": scorer.world_size, "hardware": hardware}
    n_documents = results["n-samples"][name]["original"] + scored[0].get("n_unscored", 0)
    own = (len(samples), n_documents, limit, job.settings, observed, timings)
    return Record(job.model.name, job.task, job.num_fewshot, metrics, *own), samples


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


class _Processes:
    """All processes of `accelerate launch` or `torchrun`, of which the first decides and writes."""

    def __init__(self, device: torch.device):
        self.count, self.is_first, self.device = int(os.environ.get("WORLD_SIZE", "1")), True, device
        if self.count > 1:
            # One process may need hours more than another. Without being told, accelerate takes processes on CPUs for
            # strangers.
            state = import_extra("accelerate").PartialState(cpu=device.type == "cpu", timeout=timedelta(weeks=52))
            self.count, self.is_first, self.device = state.num_processes, state.is_main_process, state.device

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
def quiet_harness() -> Iterator[None]:
    """Silence the log of the harness and the progress bars of the libraries below it; our own warnings remain."""
    from tqdm import tqdm

    harness_task = import_extra("lm_eval.api.task")
    harness = logging.getLogger("lm_eval")
    level = harness.level
    harness.setLevel(logging.ERROR)
    # Its bar while prompts are made cannot be switched off.
    harness_task.tqdm = functools.partial(tqdm, disable=True)
    try:
        with quiet_libraries(datasets=True):
            yield
    finally:
        harness_task.tqdm = tqdm
        harness.setLevel(level)
