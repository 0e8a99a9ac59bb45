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
from typing import Any

import numpy as np
import torch

from ..common.quiet import quiet_libraries
from . import provenance
from .bootstrap import metric_and_stderr
from .devices import choose_device, describe_device
from .model_files import check_path
from .options import check_options, names_of_models, numbers_of_shots
from .output import check_places, locked_folders
from .plan import OBSERVED, Job, finished, make_plan, task_manager
from .processes import Processes, processes_here
from .records import Record, model_folder, record_path, samples_path, write_record
from .suites import PERPLEXITY_TASKS, PREFIX, depends_on_tokenizer, find_tasks


logger = logging.getLogger(__name__)


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
    max_length: int | None = None,
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
        dtype (`str`, defaults to `"bfloat16"`): Of the parameters: "bfloat16", "float16" or "float32".
        max_length (`int`, *optional*): Most tokens of an input, and the length of the windows of running text; None:
            what the model takes, and windows of 2,048 tokens.
        baseline (`str`, *optional*): A further model, run first.
        device (`str`, *optional*): Such as `"cuda:0"`, `"mps"` or `"cpu"`; None or "auto": a GPU of CUDA if there is
            one, else the CPU.
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
        ValueError: for a wrong option, a wrong file, a device that is not there, an output that cannot be written or
            that another evaluation is writing, or an id without an embedding row; what was finished is kept.
        RuntimeError: if a task fails otherwise.
    """
    names, shots = names_of_models(models, baseline), numbers_of_shots(num_fewshot)
    chosen = find_tasks(suite, tasks)
    check_options(limit=limit, batch_size=batch_size, dtype=dtype, seed=seed, max_length=max_length)
    device = choose_device(device, processes_here())
    for name in names:
        check_path(name)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_quiet_harness())
        group = Processes(device)
        group.check_limit(limit)
        # Only one process may lock a folder, and it has to before it looks at what is there.
        lock = locked_folders(output, map(model_folder, names))
        group.decided_by_first(lambda: stack.enter_context(lock))
        found = [
            provenance.find_model(name, revision=revision, tokenizer=tokenizer, trust_remote_code=trust_remote_code)
            for name in names
        ]
        policies = [_policy(model, oov_policy) for model in found]
        common = {"dtype": dtype, "batch_size": _batch_size(batch_size, device), "limit": limit}
        jobs = group.decided_by_first(
            lambda: make_plan(found, policies, chosen, shots, data_dir, seed, max_length, common)
        )
        left = group.decided_by_first(lambda: _left(output, found, jobs))
        task_objects = _load_tasks(found, left, data_dir, limit)
        if left and group.is_first:
            logger.info("Device: %s.", describe_device(device))
        for index in sorted({job.model for job in left}):
            model = found[index]
            scorer = _build(model, policies[index], device, common)
            for job in left:
                if job.model != index:
                    continue
                scorer.on_progress = _named_progress(on_progress if group.is_first else None, model, job)
                with _naming_the_task(model, job):
                    result = _run(scorer, task_objects[_task_key(model, job)], job, limit, seed)
                group.decided_by_first(functools.partial(_write, output, model, job, limit, result))
            del scorer
            _free_memory()
        return [finished(output, found[job.model], job) for job in jobs] if group.is_first else []


def _left(output, models: Sequence[provenance.Model], jobs: list[Job]) -> list[Job]:
    """The jobs without a record, whose files can be put in their places."""
    for job in jobs:
        path = record_path(output, models[job.model].name, job.task, job.num_fewshot)
        check_places((path, samples_path(path)))
    return [job for job in jobs if finished(output, models[job.model], job) is None]


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


def _task_key(model: provenance.Model, job: Job) -> tuple:
    if not depends_on_tokenizer(job.task):
        return (job.task,)
    return job.task, provenance.tokenizer_fingerprint(model.tokenizer), job.settings["max_length"]


def _load_tasks(models, jobs: list[Job], data_dir, limit: int | None) -> dict[tuple, Any]:
    """The task objects of lm-eval with their documents, each loaded once."""
    loaded: dict[tuple, Any] = {}
    for job in jobs:
        model = models[job.model]
        key = _task_key(model, job)
        if key in loaded:
            _check_examples(loaded[key], job)
            continue
        length = job.settings["max_length"]
        metadata = {
            "data_dir": None if data_dir is None else os.fspath(data_dir),
            "pretrained": model.name,
            "tokenizer": model.tokenizer,
            "max_length": length,
            **({"window": length} if job.task in PERPLEXITY_TASKS else {}),
            # Streams of packed documents are long: of these the limit counts windows.
            "windows": limit,
        }
        with _naming_the_task(model, job):
            name = PREFIX + job.task
            task = task_manager(metadata).load([name])["tasks"][name]
        # lm-eval copies the metadata into every result.
        task.config.metadata.pop("tokenizer")
        _check_examples(task, job)
        loaded[key] = task
    return loaded


def _check_examples(task, job: Job) -> None:
    if job.num_fewshot and job.num_fewshot > (count := len(task.fewshot_docs())):
        raise ValueError(
            f"num_fewshot is {job.num_fewshot}, and {job.task} has {count:,} documents to draw examples from; give "
            "fewer."
        )


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
            **({"local_files_only": True} if model.local_files_only else {}),
        )
    except (ValueError, OSError) as error:
        raise type(error)(f"{model.name!r} cannot be loaded: {error}") from error


def _run(scorer, task, job: Job, limit: int | None, seed: int) -> tuple[dict, list[dict], dict] | None:
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


def _write(output, model: provenance.Model, job: Job, limit: int | None, result: tuple) -> None:
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
        settings={**job.settings, OBSERVED: measured["observed"]},
        timings=measured["timings"],
    )
    write_record(output, record, samples)


@contextlib.contextmanager
def _naming_the_task(model: provenance.Model, job: Job) -> Iterator[None]:
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
    from tqdm import tqdm

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


def _named_progress(on_progress, model: provenance.Model, job: Job) -> Callable[[int, int], None]:
    def report(done: int, total: int) -> None:
        if on_progress is not None:
            on_progress(f"{model.name}, {job.task}, {job.num_fewshot}-shot", done, total)

    return report


def _free_memory() -> None:
    import gc

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
