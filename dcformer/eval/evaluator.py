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
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from .head_task_answers import FIELDS
from .perplexity import PAPER_WINDOW
from .records import Record, Settings
from .stats import is_perplexity, metric_and_stderr
from .suites import HEAD_TASKS, OTHER_PROMPTS, PERPLEXITY_TASKS, TABLE4_COLUMNS, find_entries, harness_name, is_ours
from .task_data import data_fingerprint, files_fingerprint, import_extra, source_of, spread_indices
from .texts import TEXT, WINDOW, read_documents, score_text, text_files


if TYPE_CHECKING:
    from .lm_eval_model import LogLikelihoods

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationOptions:
    """Tasks that [`evaluate`] runs, and how it runs them."""

    suite: str | Sequence[str] = "table4"  #: see [`dcformer.eval.find_tasks`]
    tasks: str | Iterable[str] | None = None  #: run instead of `suite`
    include_path: str | os.PathLike | None = None  #: folder with further tasks of lm-eval, in YAML
    #: Texts to compute the loss on, without `tasks` alone: a file (.txt, .jsonl, .json, .parquet, .csv, .tsv, also
    #: compressed) or a folder of these, or several.
    text: str | os.PathLike | Sequence[str | os.PathLike] = ()
    text_column: str = "text"  #: that holds the documents of a text
    #: Tokens by which windows of a text advance, the others of a window are context; `None`: a whole window.
    stride: int | None = None
    #: Examples before a question, also `"0,5"`; `None`: none, or as many as the task of lm-eval says.
    num_fewshot: int | str | Iterable[int] | None = None
    #: Documents per task, windows of packed text, texts of head tasks, or pieces of a text, spread evenly.
    limit: int | None = None
    data_dir: str | os.PathLike | None = None  #: folder with the data; `None`: they are fetched
    #: Task -> required hash of its documents, as in a record, or "any". Without it fetched data must have the known
    #: hash, and files of `data_dir` may have any.
    data_hash: Mapping[str, str] | None = None
    batch_size: int | str = "auto"  #: as in [`dcformer.eval.DCFormerLM`]; with vLLM the most inputs in one step
    #: Of the parameters; `None`: bfloat16, or float32 for head tasks alone, as stored without a task of this package.
    dtype: str | None = None
    #: Most tokens of an input, and the length of the windows of running text; `None`: the model's context length, and
    #: windows of 2,048 tokens, of a text as many as the model has at most.
    max_length: int | None = None
    baseline: str | None = None  #: a further model, run first
    device: str | torch.device | None = None  #: as in [`dcformer.loading.choose_device`]
    oov_policy: str | None = None  #: for ids without an embedding row, as in [`dcformer.eval.DCFormerLM`]
    #: "transformers" or "vllm", which starts another process: a script needs `if __name__ == "__main__":` around.
    engine: str = "transformers"
    shared_prefixes: bool = True  #: as in [`dcformer.eval.DCFormerLM`]; vLLM always shares prefixes
    seed: int = 1234  #: of the few-shot examples, and of all generators
    revision: str | None = None  #: of all models, as in [`dcformer.loading.find_model`]; so are the next two
    tokenizer: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class _Job:
    """A record to be made."""

    model: FoundModel
    task: str
    settings: Settings

    @property
    def data(self) -> tuple:
        """The key of a job's documents, which jobs share; running text of tasks is packed by tokenizer and length."""
        is_read_once = self.settings.stride or self.task in (*TABLE4_COLUMNS, *OTHER_PROMPTS)
        return (self.task,) if is_read_once else (self.task, self.settings.tokenizer, self.settings.max_length)


def evaluate(
    models: str | os.PathLike | Sequence[str | os.PathLike],
    *,
    output: str | os.PathLike,
    options: EvaluationOptions | None = None,
    on_progress: Callable[[str, int, int], None] | None = None,
    **changes: Any,
) -> list[Record]:
    """
    Evaluate models, or resume an evaluation that was stopped.

    Args:
        models: One name or several, as for [`dcformer.loading.find_model`].
        output: Folder of the records; records in it with the same settings are reused.
        options (*optional*): [`EvaluationOptions`]; `None`: their defaults.
        on_progress (*optional*): Called in the first process with a description, and the numbers of requests done and
            in all.
        changes: Fields of `options` with other values: `evaluate("dcformer-tiny", output="results", tasks="piqa")`.

    Returns:
        All records, the baseline's first; an empty list in processes other than the first.

    Raises:
        OSError: if a model, a tokenizer or data are missing or cannot be reached.
        ValueError: for a wrong option, an output that another evaluation is writing, or an id without an embedding row;
            finished records are kept.
    """
    options = replace(options or EvaluationOptions(), **changes)
    texts = [str(Path(each)) for each in _listed(options.text)]
    is_text_alone = texts and options.tasks is None
    entries = {} if is_text_alone else find_entries(options.suite, options.tasks, options.include_path)
    paths = [os.fspath(name) for name in (*filter(None, [options.baseline]), *_listed(models))]
    names = list(dict.fromkeys(path.rstrip("/") or path for path in paths))
    if not names:
        raise ValueError("models must name at least one, got none.")
    if others := set(options.data_hash or ()) - entries.keys():
        raise ValueError(f"data_hash must be of tasks that are run, got {', '.join(sorted(others))}.")
    shots = None if options.num_fewshot is None else _numbers(options.num_fewshot)
    device = choose_device(options.device)
    if count_processes() > 1:
        # One process may need hours more than another. Without `cpu`, accelerate does not connect processes on CPUs.
        is_cpu, patience = device.type == "cpu", timedelta(weeks=52)
        device = import_extra("accelerate").PartialState(cpu=is_cpu, timeout=patience).device
    _check(options, device)
    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet_harness())
        hub: dict[str, Any] = {key: getattr(options, key) for key in ("revision", "tokenizer", "trust_remote_code")}
        found = [find_model(name, **hub) for name in names]
        # Only one process may lock the folders, and it must do so before it reads them.
        in_first_process(lambda: _lock(stack, output, [model.full_name for model in found]))
        planned = in_first_process(lambda: [[*_plan(model, entries, texts, shots, options)] for model in found])
        jobs = [_Job(model, *job) for model, of_model in zip(found, planned) for job in of_model]
        is_left = in_first_process(lambda: [_finished(output, job) is None for job in jobs])
        left = list(itertools.compress(jobs, is_left))
        task_objects = _load_tasks(left, entries, options)
        for _, of_model in itertools.groupby(left, key=lambda job: job.model.full_name):
            _run_jobs(list(of_model), task_objects, device, output, on_progress)
        return [record for job in jobs if (record := _finished(output, job))] if is_first_process() else []


def _listed(names: Any) -> list[Any]:
    """One name as a list of it, or several."""
    return [names] if isinstance(names, str | os.PathLike) else list(names)


def _numbers(num_fewshot: int | str | Iterable[int]) -> tuple[int, ...]:
    if isinstance(num_fewshot, str):
        if not re.fullmatch(r"\d+(,\d+)*", num_fewshot):
            raise ValueError(f"num_fewshot must be numbers such as 0,5, got {num_fewshot!r}.")
        num_fewshot = map(int, num_fewshot.split(","))
    return (num_fewshot,) if isinstance(num_fewshot, int) else tuple(dict.fromkeys(num_fewshot))


def _check(options: EvaluationOptions, device: torch.device) -> None:
    processes = count_processes()
    if options.limit is not None and options.limit < processes:
        raise ValueError(f"limit must be at least 1, and one per process ({processes}), got {options.limit}.")
    if options.max_length is not None and options.max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {options.max_length}.")
    if not re.fullmatch("auto|0*[1-9][0-9]*", str(options.batch_size)):
        raise ValueError(f"batch_size must be a positive number or auto, got {options.batch_size!r}.")
    if options.stride is not None and not options.text:
        raise ValueError(f"stride is of a text, got {options.stride} without one; give --text.")
    if options.engine not in ("transformers", "vllm"):
        raise ValueError(f"engine must be transformers or vllm, got {options.engine!r}.")
    if options.engine == "vllm":
        from .vllm_model import check_device_of_vllm

        check_device_of_vllm(device)
        if processes > 1:
            raise ValueError(f"engine='vllm' scores in one process, got {processes}; start one.")


def _lock(stack: contextlib.ExitStack, output: str | os.PathLike, models: Iterable[str]) -> None:
    for folder, sharing in itertools.groupby(sorted(models, key=records.model_folder), key=records.model_folder):
        if len(names := [*sharing]) > 1:
            raise ValueError(f"Results of {names[0]!r} and {names[1]!r} would have one folder; use two outputs.")
        stack.enter_context(file_lock(Path(output, folder, ".lock")))


def _plan(
    model: FoundModel,
    entries: Mapping[str, Any],
    texts: Sequence[str],
    shots: tuple[int, ...] | None,
    options: EvaluationOptions,
) -> Iterator[tuple[str, Settings]]:
    """Task and settings of all records of a model."""
    from .lm_eval_model import policy_in_force

    policy = policy_in_force(model.config, model.tokenizer, options.oov_policy)
    of_model = Settings(
        model=records.model_fingerprint(model.path, model.commit or "main"),
        model_type=model.config.model_type,
        tokenizer=fingerprint_tokenizer(model.tokenizer),
        oov_policy=policy if model.has_ids_without_embedding else None,
        dtype=options.dtype or _default_dtype(model, entries),
        batch_size=options.batch_size if options.batch_size == "auto" else int(options.batch_size),
        limit=options.limit,
        engine=options.engine,
        shared_prefixes=options.shared_prefixes or options.engine == "vllm",
        seed=options.seed,
        versions=records.library_versions(options.engine),
        git_revision=records.git_revision(),
    )
    for text in texts:
        yield TEXT + text, _settings_of_text(model, text, of_model, options)
    for task, entry in entries.items():
        metadata, numbers, own = entry.cfg.get("metadata"), shots or (0,), entry.cfg.get("num_fewshot")
        if task in (*HEAD_TASKS, *PERPLEXITY_TASKS):  # without examples
            numbers = (0,)
        elif not is_ours(task) and (shots is None or own == 0):
            numbers = (own or 0,)  # as lm-eval: a task that says 0 has its examples in its prompt
        of_task = replace(
            of_model,
            max_length=_longest_input(model, task, options.max_length),
            task_version=metadata.get("version") if isinstance(metadata, dict) else None,
            data=data_fingerprint(options.data_dir, task, entry.yaml_path),
        )
        for number in numbers:
            yield task, replace(of_task, num_fewshot=number)


def _default_dtype(model: FoundModel, tasks: Iterable[str]) -> str:
    if not (ours := set(filter(is_ours, tasks))):
        return str(model.config.dtype or "auto").removeprefix("torch.")
    return "float32" if ours <= {*HEAD_TASKS} else "bfloat16"


def _settings_of_text(model: FoundModel, text: str, settings: Settings, options: EvaluationOptions) -> Settings:
    tokenizer, longest = model.tokenizer, _longest_input(model, text, options.max_length)
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise ValueError(f"The tokenizer of {model.name!r} has no token that begins or ends a text; give it one.")
    window = longest if options.max_length is not None else min(longest, WINDOW)
    stride = window if options.stride is None else options.stride
    if not 1 <= stride <= window:
        raise ValueError(f"stride must be from 1 to {window}, the tokens of a window, got {stride}.")
    data = f"{files_fingerprint(text_files(text))} {options.text_column}"
    return replace(settings, max_length=window, stride=stride, data=data)


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
    path = records.record_path(output, job.model.full_name, job.task, job.settings.num_fewshot)
    if not path.is_file():
        return None
    try:
        record = records.read_record(path)
        if record.model.rstrip("/") != (name := job.model.full_name):
            raise ValueError(f"{str(path)!r} is a result of {record.model!r}, not {name!r}; give another output.")
        if record.settings == job.settings:
            records.check_samples(path, record)
            return record
    except records.DamagedRecordError as error:
        logger.warning(str(error))
    return None


def _load_tasks(jobs: list[_Job], entries: Mapping[str, Any], options: EvaluationOptions) -> dict[tuple, Any]:
    """`_Job.data` -> lm-eval's task object with its documents, or the documents of a text."""
    loaded: dict[tuple, Any] = {}
    for job in jobs:
        if job.data not in loaded and job.settings.stride:
            loaded[job.data] = read_documents(job.task.removeprefix(TEXT), options.text_column)
        elif job.data not in loaded:
            loaded[job.data] = _load_task(job, entries[job.task], options)
        shots = job.settings.num_fewshot
        if shots and shots >= (count := len(loaded[job.data].fewshot_docs()) + (not is_ours(job.task))):
            raise ValueError(f"num_fewshot must be below {count:,}, the documents of {job.task}, got {shots}.")
    return loaded


def _load_task(job: _Job, entry: Any, options: EvaluationOptions) -> Any:
    metadata: dict[str, Any] = {"pretrained": job.model.path}
    if is_ours(job.task):
        metadata |= {
            "data_dir": None if options.data_dir is None else os.fspath(options.data_dir),
            "tokenizer": job.model.tokenizer,
            "max_length": job.settings.max_length,
            "window": job.settings.max_length,
            "windows": options.limit,  # of packed text, or texts of head tasks, which have several questions
            "data_hash": (options.data_hash or {}).get(job.task),
        }
    # By its path, without an index: that of lm-eval's own tasks takes many seconds.
    manager = import_extra("lm_eval.tasks").TaskManager(include_defaults=False, metadata=metadata)
    try:
        (task,) = manager.load([str(entry.yaml_path)])["tasks"].values()
    except Exception as error:
        if is_ours(job.task):
            raise
        # Of the YAML, its Python or its data, which are not ours.
        raise ValueError(f"{job.task} ({entry.yaml_path}): {type(error).__name__}: {error}") from error
    task.config.metadata.pop("tokenizer", None)  # lm-eval copies the metadata into every result
    return task


def _run_jobs(
    jobs: list[_Job],
    task_objects: Mapping[tuple, Any],
    device: torch.device,
    output: str | os.PathLike,
    on_progress: Callable[[str, int, int], None] | None,
) -> None:
    """Load the model of the jobs, and write their records."""
    model, settings = jobs[0].model, jobs[0].settings
    options: dict[str, Any] = {name: getattr(settings, name) for name in ("dtype", "batch_size", "oov_policy")}
    options["max_length"] = max(job.settings.max_length for job in jobs)
    scorer: LogLikelihoods
    if settings.engine == "vllm":
        from .vllm_model import VLLMLM

        scorer = VLLMLM(model, **options)
    else:
        from .lm_eval_model import DCFormerLM

        scorer = DCFormerLM(model, device=device, shared_prefixes=settings.shared_prefixes, **options)
    with contextlib.closing(scorer):
        for job in jobs:
            report = on_progress if on_progress and is_first_process() else (lambda *_: None)
            name = f"{model.full_name}, {job.task}, {job.settings.num_fewshot}-shot"
            _score(scorer, task_objects[job.data], job, functools.partial(report, name), output)
    del scorer  # before the next model is loaded
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _score(
    scorer: LogLikelihoods, task: Any, job: _Job, on_progress: Callable[[int, int], None], output: str | os.PathLike
) -> None:
    """Score a job in all processes, and write its record in the first."""
    settings = job.settings
    import_extra("accelerate.utils").set_seed(settings.seed)
    scorer.max_length = settings.max_length
    scorer.start_counting(on_progress)
    start = time.perf_counter()
    measured = score_text(scorer, job.task, task, settings) if settings.stride else _run_harness(scorer, task, job)
    counted = scorer.gather_object(scorer.counts())
    if scorer.rank != 0 or measured is None:
        return
    samples, values, n_documents, observed = measured
    metrics = {}
    for metric, value in values.items():
        is_resampled = all(metric in sample["metrics"] for sample in samples)
        here, stderr = metric_and_stderr(samples, metric) if is_resampled else (value, np.nan)
        value = float(here if value is None else value)
        metrics[metric] = {"value": value, "stderr": stderr if np.isfinite(stderr) else None}
    observed |= {f"{key}_documents": len(set().union(*(c[key] for c in counted))) for key in ("oov", "truncated")}
    is_cuda, cores = scorer.device.type == "cuda", f"{platform.machine()}, {os.cpu_count()} cores"
    timings: dict[str, Any] = {"seconds": round(time.perf_counter() - start, 3)}
    timings |= {key: sum(counts[key] for counts in counted) for key in ("requests", "input_tokens", "cached_tokens")}
    hardware = torch.cuda.get_device_name(scorer.device) if is_cuda else cores
    timings |= {"processes": scorer.world_size, "hardware": hardware}
    made = (job.model.full_name, job.task, settings.num_fewshot, metrics, len(samples), n_documents)
    records.write_record(output, Record(*made, settings, observed, timings), samples)


def _run_harness(scorer: LogLikelihoods, task: Any, job: _Job) -> tuple | None:
    """Samples of a task, its metrics with their values, the number of its documents, and what was observed."""
    # `simple_evaluate` calls it too, but also takes two seconds per task to describe the machine.
    from lm_eval.evaluator import evaluate as run_harness

    settings, name = job.settings, harness_name(job.task)
    task.set_config(key="num_fewshot", value=settings.num_fewshot)
    task.set_fewshot_seed(seed=settings.seed)
    is_limited = job.task in (*HEAD_TASKS, *PERPLEXITY_TASKS) and job.task != "flan_ppl"  # since it was loaded
    chosen = None
    if settings.limit is not None and not is_limited:
        chosen = {name: spread_indices(len(task.eval_docs), settings.limit)}
    is_rolling = task.OUTPUT_TYPE == "loglikelihood_rolling"
    with scorer.whole_documents() if is_rolling else contextlib.nullcontext():
        # bootstrap_iters=0: lm-eval would take 100,000 bootstrap samples for a perplexity.
        results = run_harness(scorer, {"tasks": {name: task}}, samples=chosen, bootstrap_iters=0)
    if results is None:
        return None
    by_document: dict[int, dict] = {}
    for sample in map(_as_sample, results["samples"][name]):  # one for every filter of answers
        by_document.setdefault(sample["doc_id"], sample)["metrics"].update(sample["metrics"])
    samples = [by_document[doc_id] for doc_id in sorted(by_document)]
    values = {
        key.removesuffix(",none"): value
        for key, value in results["results"][name].items()
        if "," in key and "_stderr," not in key and isinstance(value, int | float | np.number)
    }
    for metric in {name for sample in samples for name in sample["metrics"]}:
        if not _is_of_sums(metric, task.aggregation().get(metric.partition(",")[0])):
            for sample in samples:
                sample["metrics"].pop(metric, None)
    n_documents = results["n-samples"][name]["original"]
    source = str(source_of(job.task) if is_ours(job.task) else task.config.dataset_path or job.task)
    observed = {"documents": {"source": source, "hash": None, "as_known": None}}
    if is_ours(job.task):
        first = task.eval_docs[0]
        n_documents += first.get("n_unscored", 0)
        observed["documents"] = task.dataset.get("origin") or observed["documents"]
        if "n_artificial_ends" in first:
            observed["artificial_ends"] = first["n_artificial_ends"]
    return samples, values, n_documents, observed


def _is_of_sums(metric: str, aggregation: Any) -> bool:
    """True if lm-eval makes a metric of the values of documents by the function that `stats` takes its name for."""
    from lm_eval.api import metrics as known

    if is_perplexity(metric):
        return aggregation in (known.perplexity, known.weighted_perplexity)
    return aggregation in ((known.bits_per_byte,) if metric == "bits_per_byte" else (known.mean, None))  # its default


def _as_sample(sample: dict) -> dict:
    requests = []
    for arguments, answers in zip(sample["arguments"], sample["resps"]):
        if isinstance(arguments[-1], dict):  # settings of a generation
            requests.append({"context": arguments[0], "settings": arguments[1], "generated": answers})
            continue
        log_likelihood, is_greedy = answers[0] if isinstance(answers[0], tuple | list) else (answers[0], None)
        context, continuation = arguments if len(arguments) == 2 else ("", arguments[0])
        request = {"context": context, "continuation": continuation}
        requests.append({**request, "log_likelihood": float(log_likelihood), "is_greedy": is_greedy})
    metrics, ending = {}, "" if sample["filter"] == "none" else f",{sample['filter']}"
    for name in sample["metrics"]:
        values = sample[name] if isinstance(sample[name], tuple | list) else [sample[name]]
        if len(values) <= 2 and all(isinstance(value, int | float | np.number | np.bool_) for value in values):
            metrics[name + ending] = [*map(float, values)] if len(values) == 2 else float(values[0])
    kept = {"doc_id": sample["doc_id"], "doc_hash": sample["doc_hash"], "metrics": metrics, "requests": requests}
    document = sample["doc"]
    if isinstance(document, dict) and document.keys() >= {*FIELDS}:  # of a head task
        kept["fields"] = {name: document[name] for name in FIELDS}
    return kept


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
