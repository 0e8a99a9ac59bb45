"""Standard errors, and intervals and p-values of differences between models.

Every metric is a function of two sums over documents: of what was measured, and of what it is measured per. An accuracy
is hits per document, the logarithm of a perplexity is minus the log-likelihood per token, and bits per byte are the
same per byte. A resample therefore needs only the sums of what it drew. What is only right or wrong is also put to the
exact sign test over the documents that are right for one of the two models alone (McNemar's test).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .task_data import import_extra


RESAMPLES = 10_000
SIGNIFICANCE = 0.05
_FEW_VALUES = 16  # up to so many different rows are counted by one multinomial sample per resample
_NOTHING = 1e-12  # sums of the same numbers in another order differ by less than this


@dataclass(frozen=True)
class Difference:
    """Model minus baseline, with the 95 % interval; perplexities are compared by their natural logarithm."""

    value: float
    low: float  #: `nan` for a single document, as `high`
    high: float
    #: Probability of a difference at least as large if the models did not differ, two-sided. For one task with answers
    #: that are right or wrong it is of the exact sign test, otherwise from the share of resamples beyond zero (`nan`
    #: for a single document), and no less than that of as many documents of one sign.
    p_value: float = math.nan
    wins: int | None = None  #: documents that only the model has right; `None` for other metrics than accuracies
    losses: int | None = None  #: documents that only the baseline has right
    documents: int = 0

    @property
    def excludes_zero(self) -> bool:
        """True if the interval neither contains zero nor ends there."""
        return self.low > _NOTHING or self.high < -_NOTHING


def is_perplexity(metric: str) -> bool:
    """True if a metric is an exponential of a mean, so that its logarithm is compared."""
    return metric.partition(",")[0].endswith("perplexity")  # after a comma the filter of answers


def accuracy_stderr(accuracy: float, count: int) -> float:
    """Standard error of the mean of `count` zeros and ones, as lm-eval computes it; `nan` for a single document."""
    return math.sqrt(max(accuracy * (1 - accuracy), 0.0) / (count - 1)) if count > 1 else math.nan


def paired_difference(
    tasks: Mapping[str, tuple[Sequence[Mapping], Sequence[Mapping]]],
    metric: str,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Difference:
    """
    Difference of a metric, or of its unweighted mean over several tasks, between two models, with the percentile
    interval of resampled documents, and its p-value; the documents of every task are resampled separately.

    Args:
        tasks: Task -> samples (see [`read_samples`]) of the model and of the baseline, in any order. The metric of a
            sample is a number, or for perplexities, `nats_per_token` and `bits_per_byte` the pair of a log-likelihood
            (nats) and the number of tokens or bytes.
        seed (defaults to 0): Seed of the bootstrap.
        resamples (defaults to 10,000): Number of its resamples.

    Raises:
        ValueError: if the two have different documents.
    """
    # The task's name seeds its generator, so that its interval does not depend on the other tasks.
    values, of_tasks = np.zeros(1 + resamples), []  # of all documents, and of every resample
    for task, (samples, baseline) in tasks.items():
        of_tasks.append(pairs := _paired_sums(samples, baseline, metric, task))
        generator = np.random.default_rng([seed, *task.encode()])
        sums = np.vstack([pairs.sum(axis=0), _resampled_sums(pairs, resamples, generator)])
        values += (sums[:, 0] / sums[:, 1] - sums[:, 2] / sums[:, 3]) / len(tasks)
    wins, losses = _right_only_once(np.concatenate(of_tasks))
    value, resampled = float(values[0]), values[1:]
    documents, is_single = sum(map(len, of_tasks)), min(map(len, of_tasks)) == 1
    low, high = (math.nan if is_single else float(np.percentile(resampled, share)) for share in (2.5, 97.5))
    if wins is not None and losses is not None and len(tasks) == 1:
        p_value = sign_test(wins, losses)
    elif is_single:
        p_value = math.nan
    else:
        # Twice the share of resamples beyond zero; one is added so that no p-value is 0.
        beyond = min((resampled <= _NOTHING).sum(), (resampled >= -_NOTHING).sum())
        p_value = min(1.0, max(2 * (beyond + 1) / (resamples + 1), 2.0 ** (1 - documents)))
    return Difference(value, low, high, float(p_value), wins, losses, documents)


def sign_test(wins: int, losses: int) -> float:
    """
    Two-sided p-value of the exact sign test (McNemar's): the probability that documents which only one of two models
    has right are divided at least this unevenly, if either model is equally likely; 1 without such documents.
    """
    discordant = wins + losses
    return float(import_extra("scipy.stats").binomtest(wins, discordant).pvalue) if discordant else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """
    P-values corrected for their number by Holm's step-down rule (1979): if nothing differs, the probability that any of
    them is at most 5 % is itself at most 5 %, whatever their dependence.
    """
    order = np.argsort(p_values)
    corrected = np.empty(len(order))
    corrected[order] = np.maximum.accumulate(np.minimum(np.array(p_values)[order] * range(len(order), 0, -1), 1.0))
    return corrected.tolist()


def metric_and_stderr(samples: Sequence[Mapping], metric: str) -> tuple[float, float]:
    """A metric over all samples with its standard error, by linearising the ratio of sums; `nan` for one document."""
    measured, per = np.array(list(_sums_by_document(samples, metric).values())).T
    rate = measured.sum() / per.sum()
    count = len(measured)
    residual = ((measured - rate * per) ** 2).sum() * count / (count - 1) if count > 1 else math.nan
    stderr = math.sqrt(residual) / per.sum()
    if is_perplexity(metric):
        value = math.exp(rate)
        return value, stderr * value  # delta method
    return float(rate), stderr


def _sums_by_document(samples: Sequence[Mapping], metric: str) -> dict[Any, tuple[float, float]]:
    """
    Document, in the order of `doc_id` -> `(measured, per)`; a plain number is per document.

    A document is its hash and occurrence, since data sets hold some twice; all questions of a text are one document.
    """
    is_loss = is_perplexity(metric) or metric == "nats_per_token"
    scale = -1.0 if is_loss else -1 / math.log(2) if metric == "bits_per_byte" else 1.0
    occurrences: Counter[str] = Counter()
    sums: dict[Any, tuple[float, float]] = {}
    for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
        occurrences[sample["doc_hash"]] += 1
        key, value = (sample["doc_hash"], occurrences[sample["doc_hash"]]), sample["metrics"][metric]
        document = sample["fields"]["document"] if "fields" in sample else key
        measured, per = value if isinstance(value, list | tuple) else (value, 1)
        before = sums.get(document, (0.0, 0))
        sums[document] = (before[0] + scale * measured, before[1] + per)
    return sums


def _paired_sums(samples: Sequence[Mapping], baseline: Sequence[Mapping], metric: str, task: str) -> np.ndarray:
    """`(documents, 4)`: `measured` and `per` of the model and of the baseline."""
    first, second = _sums_by_document(samples, metric), _sums_by_document(baseline, metric)
    if first.keys() != second.keys():
        raise ValueError(
            f"Task {task!r} was scored on different documents of model and baseline ({len(first)} and {len(second)}, "
            f"{len(first.keys() & second.keys())} in both); run both with the same data and limit."
        )
    return np.array([(*first[key], *second[key]) for key in first], dtype=np.float64)


def _right_only_once(pairs: np.ndarray) -> tuple[int, int] | tuple[None, None]:
    """Numbers of documents that only the first, and only the second, has right; `None` for other metrics."""
    measured, per = pairs[:, ::2], pairs[:, 1::2]
    if not (per == 1).all() or not np.isin(measured, (0, 1)).all():
        return None, None
    first, second = measured.T
    return int((first > second).sum()), int((second > first).sum())


def _resampled_sums(rows: np.ndarray, resamples: int, generator: np.random.Generator) -> np.ndarray:
    """Sums of `len(rows)` rows sampled with replacement, `(resamples, columns)`."""
    values, counts = np.unique(rows, axis=0, return_counts=True)
    if len(values) <= _FEW_VALUES:
        # Accuracies: equal rows need only be counted.
        return generator.multinomial(len(rows), counts / len(rows), size=resamples) @ values
    # Counting how often a document was sampled is cheaper than fetching it.
    count = len(rows)
    sampled = (generator.integers(count, size=count) for _ in range(resamples))
    return np.array([np.bincount(indices, minlength=count) @ rows for indices in sampled])
