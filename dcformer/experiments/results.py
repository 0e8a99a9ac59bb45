"""The results of a sweep: the file, its metrics, and the values of each variant by seed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..head_tasks.intervals import seed_interval
from ..head_tasks.labels import variant_label


@dataclass(frozen=True)
class Metric:
    """A number of a run; `scale` brings it into the unit in which it is shown."""

    name: str
    short: str
    unit: str
    is_better_when_lower: bool
    scale: float
    digits: int

    @property
    def title(self) -> str:
        return f"{self.name} ({self.unit})"


METRICS = {
    "evaluation_loss": Metric("evaluation loss", "loss", "nats per token", True, 1, 4),
    "evaluation_accuracy": Metric("accuracy, evaluation", "accuracy", "%", False, 100, 2),
    "held_out": Metric("accuracy, held-out tasks", "held-out", "%", False, 100, 2),
    "authors": Metric("accuracy, authors' texts", "authors'", "%", False, 100, 2),
}


@dataclass(frozen=True)
class VariantSummary:
    """
    The runs of one variant.

    Attributes:
        name: Name of the variant.
        parameters: Number of parameters of its model.
        values: Metric of [`METRICS`] -> seed -> value, loss in nats per token and accuracies as fractions; metrics and
            seeds that were not measured are left out.
    """

    name: str
    parameters: int
    values: Mapping[str, Mapping[int, float]]

    @property
    def label(self) -> str:
        """Its name for people."""
        return variant_label(self.name)

    def interval(self, metric: str) -> tuple[float, float | None] | None:
        """Mean and half width of the 95 % interval over seeds, which needs two; `None` without a value."""
        return mean_interval(list(self.values.get(metric, {}).values()))


def read_results(path: str | os.PathLike) -> dict[str, Any]:
    """
    The `results.json` of a sweep.

    Raises:
        FileNotFoundError: if it is not there.
        ValueError: if the file is something else, or holds no run.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}; give the results.json that a sweep wrote.")
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
        summaries = summarise_variants(results)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(path)!r} holds no results of a sweep; give the results.json of one.") from error
    if not summaries:
        raise ValueError(f"{str(path)!r} holds no finished run yet; run the sweep first.")
    return results


def summarise_variants(results: Mapping[str, Any]) -> list[VariantSummary]:
    """The variants of which there is a run, in the order of the recipe."""
    runs: dict[str, list[Mapping]] = {}
    for run in results["runs"]:
        runs.setdefault(run["variant"], []).append(run)
    return [
        VariantSummary(name, runs[name][0]["parameters"], _values(runs[name]))
        for name in results["recipe"]["sweep"]["variants"]
        if name in runs
    ]


def mean_interval(values: list[float]) -> tuple[float, float | None] | None:
    """Mean and half width of the 95 % interval (Student's t); the width is `None` for one value, all for none."""
    if not values:
        return None
    return (values[0], None) if len(values) == 1 else seed_interval(values)


def measured(summaries: list[VariantSummary]) -> list[str]:
    """The metrics that a run has."""
    return [metric for metric in METRICS if any(item.values.get(metric) for item in summaries)]


def _values(runs: list[Mapping]) -> dict[str, dict[int, float]]:
    values: dict[str, dict[int, float]] = {}
    for run in runs:
        evaluation = run["evaluation"] or {}
        accuracies = (run.get("curve") or {}).get("accuracy") or [None]
        numbers = {"evaluation_loss": run["training"]["evaluation_loss"], "evaluation_accuracy": accuracies[-1]}
        numbers |= {name: (evaluation.get(name) or {}).get("accuracy") for name in ("held_out", "authors")}
        for name, value in numbers.items():
            if value is not None:
                values.setdefault(name, {})[run["seed"]] = value
    return values


def reference_values(results: Mapping[str, Any], metric: str) -> dict[str, float]:
    """Rule -> what it reaches in a metric without reading the question; empty where that is not known."""
    places = {"evaluation_loss": ("evaluation", "loss"), "evaluation_accuracy": ("evaluation", "accuracy")}
    place, quantity = places.get(metric, (metric, "accuracy"))
    found = (results.get("references") or {}).get(place) or {}
    return {name: values[quantity] for name, values in found.items() if quantity in values}


__all__ = [
    "METRICS",
    "Metric",
    "VariantSummary",
    "mean_interval",
    "measured",
    "read_results",
    "reference_values",
    "summarise_variants",
]
