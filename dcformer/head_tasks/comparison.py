"""Models side by side on the suite of head tasks, with intervals over documents and over training seeds."""

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

from ..common.quiet import quiet_libraries
from ..eval.bootstrap import Difference, paired_difference
from ..eval.devices import choose_device, describe_device
from ..eval.model_files import check_complete, check_path
from ..eval.provenance import find_model
from ..eval.scoring import message_of_nan
from ..eval.short_names import short_names
from ..pretrained import pretrained_names, pretrained_path, seed_results
from .intervals import seed_interval
from .labels import shots_label, transformation_label
from .references import reference_summaries
from .scoring import summarise
from .suite import BATCH_SIZE, HELD_OUT_DOCUMENTS, HELD_OUT_SEED, document_sets, score_sets


logger = logging.getLogger(__name__)

BUNDLED_MODEL, BUNDLED_BASELINE = "dcformer-tiny", "transformer-tiny"
METRICS = ("accuracy", "perplexity")

_RESAMPLES = 2_000


@dataclass
class ModelResult:
    """
    A model's scores on every set of documents.

    Attributes:
        name: As it was given.
        label: What tables call it: of a path, what tells it from the others.
        parameters: How many it has.
        summaries: Set -> [`dcformer.head_tasks.scoring.summarise`].
        samples: Set -> documents with `metrics`, each a sum and what it is over, as bootstrap.py reads them.
        seed_evaluations: Seed -> set -> summary, for all training seeds of a bundled model.
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
            summary = part_of(evaluation.get(documents), *group)
            if summary is not None:
                found[seed] = summary[metric]
        return found

    def seed_gain(self, baseline: ModelResult, documents: str, *group: str) -> float:
        """Mean gain in accuracy over a baseline, paired by training seed; `nan` without seeds that both have."""
        ours, theirs = (each.over_seeds(documents, "accuracy", *group) for each in (self, baseline))
        gains = [ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()]
        return math.fsum(gains) / len(gains) if gains else math.nan

    def best_known(self, documents: str, *group: str) -> float:
        """Accuracy of a group: the mean over training seeds where they are known, else that of this model."""
        values = self.over_seeds(documents, "accuracy", *group).values()
        part = self.part(documents, *group)
        return math.fsum(values) / len(values) if values else part["accuracy"] if part else math.nan

    def part(self, documents: str, *group: str) -> dict[str, Any] | None:
        """The scores of a group of a set's answers, `None` if there are none of it."""
        return part_of(self.summaries[documents], *group)


def part_of(summary: Mapping[str, Any] | None, *group: str) -> dict[str, Any] | None:
    """A group of a summary, such as `("by_subject", "persons", "by_shots", "0")`, `None` if it is not there."""
    for key in group:
        summary = (summary or {}).get(key)
    return None if summary is None else dict(summary)


@dataclass
class HeadTasksComparison:
    """
    Models on the same documents.

    Attributes:
        models: The baseline, if there is one, first.
        baseline: Its name.
        settings: What the figures depend on besides the models.
        references: Set -> [`dcformer.head_tasks.references.reference_summaries`] of its documents.
    """

    models: list[ModelResult]
    baseline: str | None
    settings: dict[str, Any]
    references: dict[str, dict[str, dict[str, Any]]]

    @property
    def sets(self) -> tuple[str, ...]:
        return tuple(self.models[0].summaries)

    def groups(self, name: str, grouping: str) -> dict[str, tuple[str, ...]]:
        """
        The rows of a table or plot: label -> keys of a summary, for [`ModelResult.part`].

        Patterns and transformations are in the order of the gain of the last model over the first, the largest first,
        or, of a single model, in that of its accuracy.

        Args:
            name: A set of documents, by whose scores rows are sorted.
            grouping (`"by_shots"`, `"by_pattern"`, `"by_transformation"`): `by_shots` begins with all questions, and
                its single questions are also told apart by subject.
        """
        summary = self.models[0].summaries[name]
        if grouping == "by_shots":
            rows: dict[str, tuple[str, ...]] = {"all questions": ()}
            for shots in summary["by_shots"]:
                rows[shots_label(shots)] = ("by_shots", shots)
                if shots == "0":
                    for subject in summary["by_subject"]:
                        rows[f"{shots_label(shots)}: {subject}"] = ("by_subject", subject, "by_shots", shots)
            return rows

        def gain(key: str) -> float:
            first, last = (model.best_known(name, grouping, key) for model in (self.models[0], self.models[-1]))
            return last - first if len(self.models) > 1 else last

        return {transformation_label(key): (grouping, key) for key in sorted(summary[grouping], key=gain, reverse=True)}

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
                **{key: _known(end) for key, end in vars(score_difference(model, baseline, name, metric)).items()},
            }
            for model, baseline in self.compared
            for name in self.sets
            for metric in METRICS
        ]
        return {
            "settings": self.settings,
            "baseline": self.baseline,
            "models": models,
            "differences": differences,
            "references": self.references,
        }


def score_difference(model: ModelResult, baseline: ModelResult, documents: str, metric: str) -> Difference:
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
) -> HeadTasksComparison:
    """
    Load models and evaluate them on the same documents.

    Args:
        models: Folders, names on the Hub, or names of bundled models; by default `dcformer-tiny` against its baseline
            `transformer-tiny`.
        baseline (*optional*): A further model that the others are compared with.
        data_dir, documents, seed, with_authors, most_authors: As [`dcformer.head_tasks.suite.document_sets`] takes
            them.
        batch_size (defaults to 32): Documents in a forward pass.
        device (*optional*): As [`dcformer.eval.devices.choose_device`] takes it.
        dtype (defaults to `"float32"`): Data type of the parameters.
        revision, tokenizer, trust_remote_code: As [`dcformer.eval.provenance.find_model`] takes them.
        on_progress (*optional*): Called with what is running, and the numbers of documents done and in all.

    Raises:
        FileNotFoundError: if a model, its tokenizer or the authors' texts are not there or cannot be reached.
        ValueError: if a model cannot be used, or this machine has no such device.
    """
    device = choose_device(device)
    names = list(models)
    if not names:
        names, baseline = [BUNDLED_MODEL], baseline or BUNDLED_BASELINE
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
        scores = score_sets(network, model.tokenizer, sets, batch_size, named)
        _check_numbers(scores, name)
        # Only the name of a bundled model stands for another path.
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
    references = {name: reference_summaries(rows) for name, rows in sets.items()}
    return HeadTasksComparison(results, baseline, settings, references)


def _located(name: str) -> str:
    """Where a model is; a folder of the user's is preferred to a bundled model of the same name."""
    if Path(name).is_dir():
        return name
    return pretrained_path(name) if name in (BUNDLED_MODEL, BUNDLED_BASELINE, *pretrained_names()) else name


def _load(model, dtype: str):
    options = {
        "revision": model.revision,
        "trust_remote_code": model.trust_remote_code,
        "local_files_only": model.local_files_only,
    }
    try:
        with quiet_libraries(messages=False):
            network, info = AutoModelForCausalLM.from_pretrained(
                model.name, dtype=getattr(torch, dtype), output_loading_info=True, **options
            )
        check_complete(network, info, model.name)
        return network
    except (ValueError, OSError) as error:
        raise type(error)(f"{model.name!r} cannot be loaded: {error}") from error


def _check_numbers(scores: Mapping[str, Sequence[Mapping]], name: str) -> None:
    for which, answers in scores.items():
        for score in answers:
            if math.isnan(score["log_likelihood"]):
                where = f"an answer in document {score['document']} of {which} with {name!r}"
                raise ValueError(message_of_nan(where))


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
    return paired_difference(samples, baseline, metric, task="head_tasks", resamples=_RESAMPLES)


def _plain_interval(values: Mapping[int, float]) -> dict[str, Any] | None:
    if not values:
        return None
    mean, half_width = seed_interval(list(values.values()))
    return {"seeds": sorted(values), "mean": mean, "half_width": _known(half_width)}


def _known(value: float | None) -> float | None:
    """`None` for what is not known; JSON has no `nan`."""
    return None if value is None or math.isnan(value) else value
