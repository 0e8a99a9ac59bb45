"""Standard errors, and paired bootstrap intervals of the difference between two models on the same documents.

Every metric is a function of two sums over documents: of what was measured, and of what it is measured per. An accuracy
is hits per document, the logarithm of a perplexity is minus the log-likelihood per token, and bits per byte are the
same per byte. A resample therefore needs only the sums of what it drew.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


RESAMPLES = 10_000
_DRAWN_AT_ONCE = 1 << 17  # documents in one block of resamples: 1 MiB, which stays in the cache
_FEW_VALUES = 16  # so many different documents are counted with one multinomial draw per resample


@dataclass(frozen=True)
class Difference:
    """
    Model minus baseline, with the ends of the 95 % interval, which a single document does not have (`nan`).

    Perplexities are compared by their natural logarithm.
    """

    value: float
    low: float
    high: float


def is_perplexity(metric: str) -> bool:
    """Whether a metric is an exponential of a mean, so that its logarithm is compared."""
    return metric.endswith("perplexity")


def as_pair(value: float | Sequence[float]) -> tuple[float, float]:
    """A sample's metric as what was measured and per what: a plain number is per document."""
    return tuple(value) if isinstance(value, list | tuple) else (value, 1)


def accuracy_stderr(accuracy: float, count: int) -> float:
    """Standard error of the mean of `count` zeros and ones, as lm-eval computes it; `nan` for a single document."""
    return math.sqrt(max(accuracy * (1 - accuracy), 0.0) / (count - 1)) if count > 1 else math.nan


def mean_stderr(stderrs: Sequence[float]) -> float:
    """Standard error of the unweighted mean of independent values."""
    return math.sqrt(sum(stderr**2 for stderr in stderrs)) / len(stderrs)


def have_same_documents(samples: Sequence[Mapping], baseline: Sequence[Mapping]) -> bool:
    """Whether two models were scored on the same documents, in whatever order."""
    return set(_keys(samples)) == set(_keys(baseline))


def paired_difference(
    samples: Sequence[Mapping],
    baseline: Sequence[Mapping],
    metric: str,
    *,
    task: str,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Difference:
    """
    Difference of a metric between two models, with the percentile interval of resampled documents.

    Args:
        samples: Lines of a record's samples (see records.py). The metric of a line is a number, or for perplexities and
            `bits_per_byte` the pair of a log-likelihood (nats) and the number of tokens or bytes.
        baseline: The same of the baseline; its lines may be in another order.
        task (`str`): For errors.
        seed (`int`, defaults to 0): Seed of the bootstrap.
        resamples (`int`, defaults to 10,000): Number of its resamples.

    Raises:
        ValueError: if the two have different documents, or a line lacks the metric.
    """
    return paired_mean_difference({task: (samples, baseline)}, metric, seed=seed, resamples=resamples)


def paired_mean_difference(
    tasks: Mapping[str, tuple[Sequence[Mapping], Sequence[Mapping]]],
    metric: str,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Difference:
    """
    As `paired_difference`, of the unweighted mean of tasks; the documents of each are resampled on their own.

    Args:
        tasks: Task -> samples of the model and of the baseline.
    """
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    # A stream of its own for every task: a task's interval does not depend on which others are there.
    point, resampled, is_single = 0.0, np.zeros(resamples), False
    for task, (samples, baseline) in tasks.items():
        pairs = _paired_sums(samples, baseline, metric, task)  # (documents, 4)
        is_single |= len(pairs) == 1
        generator = np.random.default_rng([seed, *task.encode()])
        point += float(_difference(pairs.sum(axis=0))) / len(tasks)
        resampled += _difference(_resampled_sums(pairs, resamples, generator)) / len(tasks)
    low, high = (math.nan, math.nan) if is_single else np.percentile(resampled, [2.5, 97.5])
    return Difference(point, float(low), float(high))


def metric_and_stderr(samples: Sequence[Mapping], metric: str, *, task: str) -> tuple[float, float]:
    """
    A metric over all samples with its standard error, by linearising the ratio of sums; `nan` for a single document.

    Raises:
        ValueError: if a line lacks the metric.
    """
    sums = _sums_by_document(samples, metric, task)
    measured, per = np.array(list(sums.values())).T
    rate = measured.sum() / per.sum()
    count = len(measured)
    residual = ((measured - rate * per) ** 2).sum() * count / (count - 1) if count > 1 else math.nan
    stderr = math.sqrt(residual) / per.sum()
    if is_perplexity(metric):
        value = math.exp(rate)
        return value, stderr * value  # delta method
    return float(rate), stderr


def _keys(samples: Sequence[Mapping]) -> list[tuple[str, int]]:
    """(hash, occurrence) of every document in the order of their numbers; data sets hold some documents twice."""
    seen: Counter[str] = Counter()
    keys = []
    for sample in _in_order(samples):
        seen[sample["doc_hash"]] += 1
        keys.append((sample["doc_hash"], seen[sample["doc_hash"]]))
    return keys


def _in_order(samples: Sequence[Mapping]) -> list[Mapping]:
    return sorted(samples, key=lambda sample: sample["doc_id"])


def _sums_by_document(samples: Sequence[Mapping], metric: str, task: str) -> dict[tuple[str, int], tuple[float, float]]:
    """Key -> what was measured, and per what."""
    if not samples:
        raise ValueError(f"Task {task!r} has no samples; run it again.")
    if any(metric not in sample["metrics"] for sample in samples):
        raise ValueError(f"Samples of {task!r} lack the metric {metric!r}; run the task again.")
    return {
        key: _two_sums(sample["metrics"][metric], metric) for key, sample in zip(_keys(samples), _in_order(samples))
    }


def _two_sums(value: float | Sequence[float], metric: str) -> tuple[float, float]:
    measured, per = as_pair(value)
    if is_perplexity(metric):
        return -measured, per
    return (-measured / math.log(2), per) if metric == "bits_per_byte" else (measured, per)


def _paired_sums(samples: Sequence[Mapping], baseline: Sequence[Mapping], metric: str, task: str) -> np.ndarray:
    """Rows of four sums, `(documents, 4)`: the model's two, the baseline's two."""
    first, second = (_sums_by_document(lines, metric, task) for lines in (samples, baseline))
    if first.keys() != second.keys():
        raise ValueError(
            f"Task {task!r} was scored on different documents of model and baseline ({len(first)} and {len(second)}, "
            f"{len(first.keys() & second.keys())} in both); run both with the same data and limit."
        )
    return np.array([(*first[key], *second[key]) for key in first], dtype=np.float64)


def _difference(sums: np.ndarray) -> np.ndarray:
    return sums[..., 0] / sums[..., 1] - sums[..., 2] / sums[..., 3]


def _resampled_sums(rows: np.ndarray, resamples: int, generator: np.random.Generator) -> np.ndarray:
    """Sums of as many rows as there are, drawn with replacement, `(resamples, columns)`."""
    values, counts = np.unique(rows, axis=0, return_counts=True)
    if len(values) <= _FEW_VALUES:
        # Accuracies: documents that are alike for both models need not be told apart, only counted.
        return generator.multinomial(len(rows), counts / len(rows), size=resamples) @ values
    at_once = min(resamples, max(1, _DRAWN_AT_ONCE // len(rows)))
    # Counting how often every document was drawn, in numbers of its own for each resample, is cheaper than fetching it.
    first_numbers = len(rows) * np.arange(at_once)[:, None]
    sums = []
    for start in range(0, resamples, at_once):
        block = min(at_once, resamples - start)
        drawn = generator.integers(len(rows), size=(block, len(rows))) + first_numbers[:block]
        times = np.bincount(drawn.ravel(), minlength=drawn.size).reshape(drawn.shape)
        sums.append(times.astype(np.float64) @ rows)
    return np.concatenate(sums)
