"""Runs models through tasks with lm-eval, and writes one record per model, task and number of shots as it finishes.

A run first reads every configuration, tokenizer and data file, so that what is wrong there is said before anything is
computed. Then it reuses the records whose settings are those of this run, and computes the others. Under
`accelerate launch` every process scores its share of the documents, and the first decides and writes.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from . import provenance
from .bootstrap import metric_and_stderr
from .devices import choose_device, describe_device
from .engines import TRANSFORMERS, VLLM, check_device_of_vllm, check_engine
from .harness import build_scorer, free_memory, quiet_harness, score_task
from .model_files import check_path
from .options import check_hashes, check_options, names_of_models, numbers_of_shots
from .origin import origin_of
from .output import check_places, locked_folders
from .plan import OBSERVED, OUR_SCORER, STOCK_SCORER, VLLM_SCORER, Job, finished, make_plan, task_manager
from .processes import Processes, processes_here, processes_in_all
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
    stock: bool = False,
    engine: str = TRANSFORMERS,
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
        models (`str` or list): Folders or Hub ids.
        output: Folder of the records; those in it are reused if their settings are the same.
        suite, tasks: What to run, see `suites.find_tasks`; by default the eleven columns of Table 4.
        num_fewshot (`int` or list, defaults to 0): Examples before a question, in Table 4. Others have their own form.
        limit (`int`, *optional*): Number of documents per task, or of windows of packed text, spread evenly over all
            that there are, and so over the sub-tasks of a task.
        data_dir (*optional*): Folder with the data; by default they are fetched from the Hub.
        batch_size (`int` or `"auto"`): Inputs in a forward pass; "auto" is 16 on a CPU and what fits on a GPU. With
            vLLM the most inputs in one step; "auto" is what vLLM takes.
        dtype (`str`, defaults to `"bfloat16"`): Data type of the parameters: "bfloat16", "float16" or "float32".
        max_length (`int`, *optional*): Most tokens of an input, and the length of the windows of running text; by
            default what the model takes, and windows of 2,048 tokens.
        baseline (`str`, *optional*): A further model, run first.
        device (`str`, *optional*): Device to compute on, such as `"cuda:0"`, `"mps"` or `"cpu"`; by default, or with
            "auto", a GPU of CUDA if there is one, else the CPU.
        oov_policy (`str`, *optional*): "error", "clamp" or "pad", for ids without an embedding row; it is recorded as
            None for models that have a row for every id.
        stock (`bool`, defaults to `False`): Score with lm-eval's own class `HFLM` instead of `DCFormerLM`, to compare
            the two; in one process, and without an `oov_policy`.
        engine (`str`, defaults to `"transformers"`): What computes, "transformers" or "vllm". The latter works in a
            process of its own, so a script needs `if __name__ == "__main__":` around the call.
        shared_prefixes (`bool`, defaults to `True`): Compute once what several inputs begin with, as the choices of a
            question do, where a model can; the scores are the same but for rounding. Of our own scorer with
            Transformers; vLLM always does so, and lm-eval's own class never.
        seed (`int`, defaults to 1234): Seed of the choice of few-shot examples, and of all generators.
        revision (`str`, *optional*): Git revision of the models on the Hub.
        tokenizer (`str`, *optional*): Folder, `tokenizer.json` or Hub id, instead of every model's own.
        trust_remote_code (`bool`, defaults to `False`): Run code that comes with a model.
        data_hash (mapping, *optional*): Task -> the hash that its documents must have, `"sha256:..."` as in a record,
            or `"any"` to take the first that can be fetched. By default what is fetched must have the hash that is
            known, where one is, and files of `data_dir` may have any.
        on_progress (`Callable`, *optional*): Called in the first process with what is running, and the numbers of
            requests done and in all.

    Returns:
        All records, the baseline's first; in other processes than the first, none.

    Raises:
        FileNotFoundError: if a model, a tokenizer or data are not there or cannot be reached.
        ValueError: for a wrong option, a wrong file, a device that is not there, an output that cannot be written, that
            another evaluation is writing or that holds results of another scorer, or an id without an embedding row;
            what was finished is kept.
        ImportError: if the engine is not installed.
        RuntimeError: if a task fails otherwise.
    """
    names, shots = names_of_models(models, baseline), numbers_of_shots(num_fewshot)
    chosen = find_tasks(suite, tasks)
    check_options(limit=limit, batch_size=batch_size, dtype=dtype, seed=seed, max_length=max_length)
    hashes = check_hashes(data_hash or {}, chosen)
    check_engine(engine, stock=stock, processes=processes_in_all())
    asked, device = device, choose_device(device, processes_here())
    if engine == VLLM:
        check_device_of_vllm(device, asked)
    for name in names:
        check_path(name)
    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet_harness())
        group = Processes(device)
        group.check_limit(limit)
        # Only one process may lock a folder, and it has to before it looks at what is there.
        lock = locked_folders(output, map(model_folder, names))
        group.decided_by_first(lambda: stack.enter_context(lock))
        found = [
            provenance.find_model(name, revision=revision, tokenizer=tokenizer, trust_remote_code=trust_remote_code)
            for name in names
        ]
        policies = [_policy(model, oov_policy, stock) for model in found]
        common = {
            "dtype": dtype,
            "batch_size": _batch_size(batch_size, device, engine),
            "limit": limit,
            # A limit took the first documents before; a record of these is not one of this run.
            **({} if limit is None else {"limited_to": "documents spread evenly"}),
            "scorer": VLLM_SCORER if engine == VLLM else STOCK_SCORER if stock else OUR_SCORER,
        }
        common["shared_prefixes"] = shared_prefixes and common["scorer"] == OUR_SCORER
        jobs = group.decided_by_first(
            lambda: make_plan(found, policies, chosen, shots, data_dir, seed, max_length, common)
        )
        left = group.decided_by_first(lambda: _left(output, found, jobs))
        task_objects = _load_tasks(found, left, data_dir, limit, hashes)
        if left and group.is_first:
            logger.info("Device: %s.", describe_device(device))
        # An input's length belongs to a scorer, so tasks of another length load the model again.
        scorer = None
        for index, length in dict.fromkeys((job.model, job.settings["max_length"]) for job in left):
            model = found[index]
            if scorer is not None:
                del scorer  # or there would be two models in memory
                free_memory()
            scorer = build_scorer(model, policies[index], device, common, length)
            with contextlib.closing(scorer) if engine == VLLM else contextlib.nullcontext():
                for job in left:
                    if (job.model, job.settings["max_length"]) != (index, length):
                        continue
                    progress = _named_progress(on_progress if group.is_first else None, model, job)
                    with _naming_the_task(model, job):
                        task = task_objects[_task_key(model, job)]
                        result = score_task(scorer, task, job, limit, seed, progress)
                    origins = _origins(task, job)
                    group.decided_by_first(functools.partial(_write, output, model, job, limit, result, origins))
        return [finished(output, found[job.model], job) for job in jobs] if group.is_first else []


def _left(output, models: Sequence[provenance.Model], jobs: list[Job]) -> list[Job]:
    """The jobs without a record, whose files can be put in their places."""
    for job in jobs:
        path = record_path(output, models[job.model].name, job.task, job.num_fewshot)
        check_places((path, samples_path(path)))
    return [job for job in jobs if finished(output, models[job.model], job) is None]


def _policy(model: provenance.Model, oov_policy: str | None, stock: bool) -> str | None:
    from .log_likelihoods import check_policy, policy_in_force

    if stock:
        if oov_policy is not None:
            raise ValueError(
                f"lm-eval's own class has no policy for unknown token ids, and oov_policy is {oov_policy!r}; leave out "
                "either --stock (stock=True) or --oov-policy."
            )
        return None
    check_policy(oov_policy)
    return policy_in_force(model.config, oov_policy) if model.misses_ids else None


def _batch_size(batch_size: int | str, device: str, engine: str) -> int | str:
    from .language_model import CPU_BATCH_SIZE

    if batch_size != "auto":
        return int(batch_size)
    return CPU_BATCH_SIZE if device == "cpu" and engine == TRANSFORMERS else "auto"


def _task_key(model: provenance.Model, job: Job) -> tuple:
    if not depends_on_tokenizer(job.task):
        return (job.task,)
    return job.task, provenance.tokenizer_fingerprint(model.tokenizer), job.settings["max_length"]


def _load_tasks(models, jobs: list[Job], data_dir, limit: int | None, hashes: Mapping[str, str]) -> dict[tuple, Any]:
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
            "data_hash": hashes.get(job.task),
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


def _origins(task, job: Job) -> dict[str, Any]:
    """What a record says of the documents: where they and the examples come from, and what was cut out of them."""
    scored = task.eval_docs
    found: dict[str, Any] = {"documents": origin_of(scored)}
    if job.num_fewshot:
        found["examples"] = origin_of(task.fewshot_docs())
    if "n_artificial_ends" in scored.column_names:
        found["artificial_ends"] = scored[0]["n_artificial_ends"]
    return found


def _write(
    output, model: provenance.Model, job: Job, limit: int | None, result: tuple, origins: dict[str, Any]
) -> None:
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
        settings={**job.settings, OBSERVED: {**measured["observed"], **origins}},
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


def _named_progress(on_progress, model: provenance.Model, job: Job) -> Callable[[int, int], None]:
    def report(done: int, total: int) -> None:
        if on_progress is not None:
            on_progress(f"{model.name}, {job.task}, {job.num_fewshot}-shot", done, total)

    return report
