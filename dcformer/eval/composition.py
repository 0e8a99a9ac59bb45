"""
Models on the head-composition tasks: held-out generated ones, and the authors' 888 texts.

Every answer is scored given all of the text before it, the earlier examples included, in one forward pass per batch of
documents. Accuracy and perplexity are of whole answers. lm-evaluation-harness takes no part in this: it would read a
text again for each of its answers.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from ..pretrained import pretrained_names, pretrained_path, seed_results
from ..tasks.composition import TASK_KINDS, composition_documents
from ..tasks.scoring import score_documents, summarise
from .bootstrap import Difference, paired_difference
from .devices import choose_device, describe_device
from .model_files import check_complete, check_path
from .provenance import find_model
from .report import short_names
from .synthetic import SHOTS, authors_answers


logger = logging.getLogger(__name__)

BOXED_MODEL, BOXED_BASELINE = "dcformer-tiny", "transformer-tiny"
HELD_OUT_SEED = 1234
HELD_OUT_DOCUMENTS = 1000
BATCH_SIZE = 32
METRICS = ("accuracy", "perplexity")
HELD_OUT, AUTHORS = "held_out", "authors"

_RESAMPLES = 2_000
# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom.
_T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_Z = 1.960


def held_out_documents(documents: int = HELD_OUT_DOCUMENTS, seed: int = HELD_OUT_SEED) -> list[dict[str, Any]]:
    """Generated documents of the test split, of eight examples each and of all kinds alike."""
    return composition_documents(documents, seed, split="test", lines=(8, 8))


def authors_documents(data_dir: str | os.PathLike | None = None) -> list[dict[str, Any]]:
    """
    The authors' 888 texts without their brackets, in the rows of [`dcformer.tasks.composition_documents`].

    Args:
        data_dir (*optional*): Folder with `synthetic/synthetic_dataset.jsonl`; the authors' repository if not given.

    Returns:
        Rows that have, besides, `shots`: the examples before each answer, 2 to 7, as lines 1 and 2 are not scored.

    Raises:
        FileNotFoundError: if the file is not there or cannot be reached.
        ValueError: if a text has another form or a task is not one of the 74.
    """
    rows = []
    for number, (task, answers) in enumerate(
        authors_answers(None if data_dir is None else os.fspath(data_dir)), start=1
    ):
        if task not in TASK_KINDS:
            raise ValueError(f"Text {number} of the synthetic data is of {task!r}, which is no task; use task0 to 73.")
        kind = TASK_KINDS[task]
        rows.append(
            {
                "text": "".join(answers[SHOTS[-1]]) + "\n",
                "task": task,
                "pattern": kind.pattern,
                "transformation": kind.transformation,
                "answers": [[len(context), len(context) + len(answer)] for context, answer in answers.values()],
                "shots": list(answers),
            }
        )
    return rows


def evaluate_composition(
    model,
    tokenizer,
    data_dir: str | os.PathLike | None = None,
    documents: int = HELD_OUT_DOCUMENTS,
    seed: int = HELD_OUT_SEED,
    with_authors: bool = True,
    batch_size: int = BATCH_SIZE,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, dict[str, Any] | None]:
    """
    Accuracy and perplexity of one model.

    Args:
        model, tokenizer: As [`dcformer.tasks.scoring.score_documents`] takes them.
        data_dir (*optional*): Of [`authors_documents`].
        documents (defaults to 1,000), seed (defaults to 1234): Of [`held_out_documents`].
        with_authors (defaults to `True`): Score the authors' texts too.
        batch_size (defaults to 32): Documents in a forward pass.
        on_progress (*optional*): Called with the numbers of documents done and in all.

    Returns:
        `held_out` and `authors`, each as [`dcformer.tasks.scoring.summarise`] returns it; `authors` is `None` if it
        was left out.

    Raises:
        FileNotFoundError, ValueError: as the functions named above.
    """
    sets = document_sets(data_dir, documents, seed, with_authors)
    scores = _score_sets(model, tokenizer, sets, batch_size, on_progress)
    summaries = {name: summarise(sets[name], scores[name]) for name in sets}
    return {HELD_OUT: summaries[HELD_OUT], AUTHORS: summaries.get(AUTHORS)}


def document_sets(
    data_dir: str | os.PathLike | None = None,
    documents: int = HELD_OUT_DOCUMENTS,
    seed: int = HELD_OUT_SEED,
    with_authors: bool = True,
    most_authors: int | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """
    The documents that models are scored on.

    Args:
        data_dir, documents, seed, with_authors: As [`evaluate_composition`] takes them.
        most_authors (*optional*): Take only so many of the authors' texts, spread evenly over the file.

    Returns:
        `held_out` and, unless they are left out, `authors`.

    Raises:
        FileNotFoundError, ValueError: as [`authors_documents`].
    """
    sets = {HELD_OUT: held_out_documents(documents, seed)}
    if with_authors:
        try:
            rows = authors_documents(data_dir)
        except FileNotFoundError as error:
            hint = "or leave the authors' texts out by --no-authors (with_authors=False)"
            raise FileNotFoundError(f"{str(error).rstrip('.')}, {hint}.") from error
        count = min(most_authors or len(rows), len(rows))
        sets[AUTHORS] = [rows[place * len(rows) // count] for place in range(count)]
    return sets


def seed_interval(values: Sequence[float]) -> tuple[float, float]:
    """
    Mean and half the width of its 95 % interval by Student's t, `nan` for a single value.

    Args:
        values: One per training seed.

    Raises:
        ValueError: if there are none.
    """
    count = len(values)
    if count == 0:
        raise ValueError("There are no values to average; give one per training seed.")
    mean = math.fsum(values) / count
    if count == 1:
        return mean, math.nan
    freedom = count - 1
    # Beyond the table, the first terms of the quantile's expansion in 1 / freedom; its error is below 0.003.
    quantile = _T_QUANTILES[freedom - 1] if freedom <= len(_T_QUANTILES) else _Z + (_Z**3 + _Z) / (4 * freedom)
    variance = math.fsum((value - mean) ** 2 for value in values) / freedom
    return mean, quantile * math.sqrt(variance / count)


@dataclass
class ModelResult:
    """
    A model's scores on every set of documents.

    Attributes:
        name: As it was given.
        label: What tables call it: of a path, what tells it from the others.
        parameters: How many it has.
        summaries: Set -> [`dcformer.tasks.scoring.summarise`].
        samples: Set -> documents with `metrics`, each a sum and what it is over, as bootstrap.py reads them.
        seed_evaluations: Seed -> set -> summary, for all training seeds of a model in the box.
    """

    name: str
    label: str
    parameters: int
    summaries: dict[str, dict[str, Any]]
    samples: dict[str, list[dict]]
    seed_evaluations: dict[int, dict[str, dict | None]] = field(default_factory=dict)

    def interval(self, documents: str, metric: str) -> tuple[float, float]:
        """Ends of the 95 % bootstrap interval over documents; `nan` for a single one."""
        zeros = [{**sample, "metrics": {metric: (0.0, 1)}} for sample in self.samples[documents]]
        ends = _difference(self.samples[documents], zeros, metric)
        return tuple(math.exp(end) if metric == "perplexity" else end for end in (ends.low, ends.high))

    def over_seeds(self, documents: str, metric: str, *group: str) -> dict[int, float]:
        """Training seed -> a metric of a set, or of a group of it such as `("by_pattern", "same-person")`."""
        found = {}
        for seed, evaluation in self.seed_evaluations.items():
            summary = evaluation.get(documents)
            for key in group:
                summary = (summary or {}).get(key)
            if summary is not None:
                found[seed] = summary[metric]
        return found


@dataclass
class Comparison:
    """
    Models on the same documents.

    Attributes:
        models: The baseline, if there is one, first.
        baseline: Its name.
        settings: What the figures depend on besides the models.
    """

    models: list[ModelResult]
    baseline: str | None
    settings: dict[str, Any]

    @property
    def sets(self) -> tuple[str, ...]:
        return tuple(self.models[0].summaries)

    @property
    def compared(self) -> list[tuple[ModelResult, ModelResult]]:
        """(model, baseline) of all models but the baseline."""
        if self.baseline is None:
            return []
        return [(model, self.models[0]) for model in self.models[1:]]

    def to_dict(self) -> dict[str, Any]:
        """All of it but the single documents, for JSON."""
        models = [
            {
                "name": model.name,
                "parameters": model.parameters,
                "evaluation": model.summaries,
                "intervals": {
                    name: {metric: [_known(end) for end in model.interval(name, metric)] for metric in METRICS}
                    for name in model.summaries
                },
                "seeds": {
                    name: {metric: _plain_interval(model.over_seeds(name, metric)) for metric in METRICS}
                    for name in model.summaries
                },
            }
            for model in self.models
        ]
        differences = [
            {
                "model": model.name,
                "documents": name,
                "metric": "accuracy" if metric == "accuracy" else "log perplexity",
                **{key: _known(end) for key, end in vars(difference(model, baseline, name, metric)).items()},
            }
            for model, baseline in self.compared
            for name in self.sets
            for metric in METRICS
        ]
        return {"settings": self.settings, "baseline": self.baseline, "models": models, "differences": differences}


def difference(model: ModelResult, baseline: ModelResult, documents: str, metric: str) -> Difference:
    """Model minus baseline, of perplexities their natural logarithm, by paired bootstrap over documents."""
    return _difference(model.samples[documents], baseline.samples[documents], metric)


def compare_models(
    models: Iterable[str] = (),
    baseline: str | None = None,
    *,
    data_dir: str | os.PathLike | None = None,
    documents: int = HELD_OUT_DOCUMENTS,
    seed: int = HELD_OUT_SEED,
    with_authors: bool = True,
    most_authors: int | None = None,
    batch_size: int = BATCH_SIZE,
    device: str | None = None,
    dtype: str = "float32",
    revision: str | None = None,
    tokenizer: str | None = None,
    trust_remote_code: bool = False,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Comparison:
    """
    Load models and evaluate them on the same documents.

    Args:
        models: Folders, names on the Hub, or names of models in the box; by default `dcformer-tiny` in the box against
            `transformer-tiny`.
        baseline (*optional*): A further model that the others are compared with.
        data_dir, documents, seed, with_authors, most_authors: Of [`document_sets`].
        batch_size (defaults to 32): Documents in a forward pass.
        device (*optional*): As [`dcformer.eval.devices.choose_device`] takes it.
        dtype (defaults to `"float32"`): Of the parameters.
        revision, tokenizer, trust_remote_code: Of [`dcformer.eval.provenance.find_model`].
        on_progress (*optional*): Called with what is running, and the numbers of documents done and in all.

    Raises:
        FileNotFoundError: if a model, its tokenizer or the authors' texts are not there or cannot be reached.
        ValueError: if a model cannot be used, or this machine has no such device.
    """
    device = choose_device(device)
    names = list(models)
    if not names:
        names, baseline = [BOXED_MODEL], baseline or BOXED_BASELINE
    names = list(dict.fromkeys([baseline, *names] if baseline else names))
    options = {"revision": revision, "tokenizer": tokenizer, "trust_remote_code": trust_remote_code}
    located = [_located(name) for name in names]
    for path in located:
        check_path(path)
    found = [find_model(path, **options) for path in located]
    sets = document_sets(data_dir, documents, seed, with_authors, most_authors)
    logger.info("Device: %s.", describe_device(device))
    runs, labels, results = seed_results()["runs"], short_names(names), []
    for name, model in zip(names, found):
        network = _load(model, dtype).to(device).eval()
        named = None if on_progress is None else lambda done, total, name=name: on_progress(name, done, total)
        scores = _score_sets(network, model.tokenizer, sets, batch_size, named)
        _check_numbers(scores, name)
        # Only the name of a model in the box stands for another path.
        own_runs = [run for run in runs if run["variant"] == name and model.name != name]
        results.append(
            ModelResult(
                name,
                labels[name],
                network.num_parameters(),
                {which: summarise(sets[which], scores[which]) for which in sets},
                {which: _samples(sets[which], scores[which]) for which in sets},
                {run["seed"]: run["evaluation"] for run in own_runs},
            )
        )
        del network
    counts = {name: len(rows) for name, rows in sets.items()}
    settings = {"documents": counts, "seed": seed, "dtype": dtype, "device": device, "batch_size": batch_size}
    return Comparison(results, baseline, settings)


def _located(name: str) -> str:
    """Where a model is; a folder of the user's goes before a model in the box of the same name."""
    if Path(name).is_dir():
        return name
    return pretrained_path(name) if name in (BOXED_MODEL, BOXED_BASELINE, *pretrained_names()) else name


def _load(model, dtype: str):
    options = {
        "revision": model.revision,
        "trust_remote_code": model.trust_remote_code,
        "local_files_only": model.local_files_only,
    }
    has_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # it would tear that of the command
    try:
        network, info = AutoModelForCausalLM.from_pretrained(
            model.name, dtype=getattr(torch, dtype), output_loading_info=True, **options
        )
        check_complete(network, info, model.name)
        return network
    except (ValueError, OSError) as error:
        raise type(error)(f"{model.name!r} cannot be loaded: {error}") from error
    finally:
        if has_bar:
            transformers_logging.enable_progress_bar()


def _score_sets(model, tokenizer, sets, batch_size, on_progress) -> dict[str, list[dict]]:
    """Scores of every set, with one count of documents for all of them."""
    total, done, scores = sum(map(len, sets.values())), 0, {}
    if on_progress is not None:
        on_progress(0, total)
    for name, rows in sets.items():
        counted = None if on_progress is None else lambda count, _, before=done: on_progress(before + count, total)
        scores[name] = score_documents(model, tokenizer, rows, batch_size, counted)
        done += len(rows)
    return scores


def _check_numbers(scores: Mapping[str, Sequence[Mapping]], name: str) -> None:
    for which, answers in scores.items():
        for score in answers:
            if math.isnan(score["log_likelihood"]):
                raise ValueError(
                    f"The log-likelihood of an answer in document {score['document']} of {which} with {name!r} is not "
                    "a number: the weights hold NaN or infinity, or the dtype is too narrow for them; check the "
                    "weights, or give a wider dtype."
                )


def _samples(documents: Sequence[Mapping], scores: Sequence[Mapping]) -> list[dict]:
    by_document: dict[int, list[Mapping]] = {}
    for score in scores:
        by_document.setdefault(score["document"], []).append(score)
    return [
        {
            "doc_id": index,
            "doc_hash": documents[index]["text"],
            "metrics": {
                "accuracy": (sum(score["correct"] for score in own), len(own)),
                "perplexity": (math.fsum(score["log_likelihood"] for score in own), len(own)),
            },
        }
        for index, own in by_document.items()
    ]


def _difference(samples: list[dict], baseline: list[dict], metric: str) -> Difference:
    return paired_difference(samples, baseline, metric, task="composition", resamples=_RESAMPLES)


def _plain_interval(values: Mapping[int, float]) -> dict[str, Any] | None:
    if not values:
        return None
    mean, half_width = seed_interval(list(values.values()))
    return {"seeds": sorted(values), "mean": mean, "half_width": _known(half_width)}


def _known(value: float) -> float | None:
    """`None` for what is not known; JSON has no `nan`."""
    return None if math.isnan(value) else value
