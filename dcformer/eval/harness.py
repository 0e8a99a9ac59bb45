"""One model and one task through lm-evaluation-harness: loading, the run, and what is measured beside the scores."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import random
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..common.quiet import quiet_libraries
from .plan import STOCK_SCORER, VLLM_SCORER, Job
from .provenance import Model, hardware_name
from .scoring import message_of_nan
from .suites import PREFIX
from .text_files import spread_places


if TYPE_CHECKING:
    from lm_eval.api.model import TemplateLM

    from .log_likelihoods import LogLikelihoods


def build_scorer(model: Model, policy: str | None, device: str, common: dict[str, Any], max_length: int) -> TemplateLM:
    """
    Load a model for scoring.

    Args:
        model: What [`dcformer.eval.provenance.find_model`] found.
        policy: What to do with token ids without an embedding row; `None` if there are none, or for the stock scorer.
        device: What [`dcformer.eval.devices.choose_device`] has chosen.
        common: Settings of the run: `dtype`, `batch_size`, `scorer` and `shared_prefixes`.
        max_length: Most tokens of an input.

    Raises:
        ValueError, OSError: if it cannot be loaded.
    """
    from .language_model import DCFormerLM, stock_language_model

    options = {
        "tokenizer": model.tokenizer,
        "revision": model.revision,
        "trust_remote_code": model.trust_remote_code,
        "dtype": common["dtype"],
        "batch_size": common["batch_size"],
        "max_length": max_length,
    }
    if common["scorer"] == VLLM_SCORER:
        return _engine(model, policy, options)
    options["device"] = device
    if model.local_files_only:
        options["local_files_only"] = True
    try:
        if common["scorer"] == STOCK_SCORER:
            return stock_language_model(model.name, **options)
        return DCFormerLM(model.name, oov_policy=policy, shared_prefixes=common["shared_prefixes"], **options)
    except (ValueError, OSError) as error:
        raise type(error)(f"{model.name!r} cannot be loaded: {error}") from error


def _engine(model: Model, policy: str | None, options: dict[str, Any]) -> TemplateLM:
    from .vllm_model import VLLMLM

    try:
        return VLLMLM(model.name, oov_policy=policy, **options)
    except (ValueError, OSError, RuntimeError) as error:
        # Of several lines, or of a class that is made of other values than a message.
        reason = " ".join(str(error).split())
        raise ValueError(f"{model.name!r} cannot be loaded by vLLM: {reason}") from error


def score_task(
    scorer: TemplateLM, task: Any, job: Job, limit: int | None, seed: int, on_progress: Callable[[int, int], None]
) -> tuple[dict, list[dict], dict] | None:
    """
    Score one task.

    Args:
        scorer: What [`build_scorer`] returned.
        task: The task object of lm-eval.
        job: Which record is to be made.
        limit: Number of documents, spread evenly over the task; `None` for all. Of running text all is scored, since
            what there is was cut to so many windows when it was loaded.
        seed: Seed of the choice of few-shot examples, and of all generators.
        on_progress: Called with the numbers of requests done and in all.

    Returns:
        lm-eval's results, samples in the form of [`dcformer.eval.records.read_samples`], and what was measured beside;
        `None` in other processes than the first.
    """
    # What `simple_evaluate` does before it calls this function too; afterwards it would describe the machine for two
    # seconds per task.
    from lm_eval.evaluator import evaluate as run_harness

    from .log_likelihoods import LogLikelihoods

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    task.set_config(key="num_fewshot", value=job.num_fewshot)
    task.set_fewshot_seed(seed=seed)
    ours = scorer if isinstance(scorer, LogLikelihoods) else None
    if ours is not None:
        ours.forget_documents()
        ours.on_progress = on_progress
    start = time.perf_counter()
    name = PREFIX + job.task
    is_running_text = task.OUTPUT_TYPE == "loglikelihood_rolling"
    places = None if is_running_text or limit is None else _Places(spread_places(len(task.eval_docs), limit))
    with ours.whole_documents() if ours is not None and is_running_text else contextlib.nullcontext():
        # lm-eval would draw 100,000 bootstrap samples for a perplexity.
        results = run_harness(
            scorer,
            {"tasks": {name: task}, "groups": {}, "group_map": {}},
            samples=None if places is None else {name: places},
            bootstrap_iters=0,
        )
    seconds = time.perf_counter() - start
    counts = None if ours is None else _counts(ours)
    if scorer.rank != 0:
        return None
    samples = sorted(map(_as_sample, results["samples"][name]), key=lambda sample: sample["doc_id"])
    if counts is None:
        # The harness shows a bar of its own, and tells nobody of cut inputs or unknown ids.
        requests = sum(len(sample["requests"]) for sample in samples)
        _check_numbers(samples, job.task)
        unknown = ("input_tokens", "cached_tokens", "oov_documents", "truncated_documents")
        counts = {"requests": requests, **dict.fromkeys(unknown)}
        on_progress(0, requests)
        on_progress(requests, requests)
    measured = {
        "documents": results["n-samples"][name]["original"] + task.eval_docs[0].get("n_unscored", 0),
        "observed": {key: counts[key] for key in ("oov_documents", "truncated_documents")},
        "timings": {
            "seconds": round(seconds, 3),
            "requests": counts["requests"],
            "input_tokens": counts["input_tokens"],
            "cached_tokens": counts["cached_tokens"],
            **({} if ours is None else ours.sharing()),
            "processes": scorer.world_size,
            "hardware": hardware_name(scorer.device),
        },
    }
    return results["results"][name], samples, measured


class _Places(list):
    """Places of documents, in which the harness looks up every document that there is."""

    def __init__(self, places: list[int]):
        super().__init__(places)
        self._known = frozenset(places)

    def __contains__(self, place: object) -> bool:
        return place in self._known


def _check_numbers(samples: list[dict], task: str) -> None:
    """What the model classes of ours refuse themselves."""
    for sample in samples:
        if any(math.isnan(request["log_likelihood"]) for request in sample["requests"]):
            raise ValueError(message_of_nan(f"document {sample['doc_id']} of {PREFIX}{task}"))


def _counts(scorer: LogLikelihoods) -> dict[str, int | None]:
    """What all processes have counted; of use in the first one only."""
    of_all = scorer.gather_object(
        (
            scorer.scored_requests,
            scorer.input_tokens,
            scorer.cached_tokens,
            scorer.oov_documents,
            scorer.cut_documents,
        )
    )
    if scorer.rank != 0:
        return {}
    return {
        "requests": sum(requests for requests, *_ in of_all),
        "input_tokens": sum(tokens for _, tokens, *_ in of_all),
        "cached_tokens": sum(cached for _, _, cached, *_ in of_all),
        "oov_documents": len(set().union(*(documents for *_, documents, _ in of_all))),
        "truncated_documents": len(set().union(*(documents for *_, documents in of_all))),
    }


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


@contextlib.contextmanager
def quiet_harness() -> Iterator[None]:
    """Silence the log of the harness and the progress bars of the libraries below it; our own warnings remain."""
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


def free_memory() -> None:
    """Give back what a scorer that was deleted has held."""
    import gc

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
