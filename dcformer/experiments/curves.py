"""Evaluation curves: loss and accuracy of a run by steps, operations and seconds, and when they reach a level."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from ..training.trainer import LOG_FILE


Axis = Literal["steps", "flops", "seconds"]
Quantity = Literal["loss", "accuracy"]
_DIGITS = 6  # significant ones


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The records that `train` wrote of a run."""
    return [json.loads(line) for line in (folder / LOG_FILE).read_text(encoding="utf-8").splitlines()]


def evaluation_curve(records: Iterable[Mapping[str, Any]], batch_tokens: int, flops_per_token: int) -> dict[str, list]:
    """
    What the evaluations of a run found, and what had been spent by then.

    Args:
        records: Of the run's log.
        batch_tokens (`int`): Tokens of a step.
        flops_per_token (`int`): Of [`dcformer.training.throughput.flops_per_token`].

    Returns:
        Lists with a value per evaluation, rounded: `step`, `tokens`, `flops`, `seconds` of training (by the throughput
        in the log, evaluating and saving left out), `loss` (nats per token) and `accuracy`, whose values are `None`
        where it was not measured.
    """
    records = list(records)
    clock = _clock(records, batch_tokens)
    curve: dict[str, list] = {key: [] for key in ("step", "tokens", "flops", "seconds", "loss", "accuracy")}
    for record in records:
        if "eval_loss" not in record:
            continue
        tokens, accuracy = record["step"] * batch_tokens, record.get("eval_accuracy")
        curve["step"].append(record["step"])
        curve["tokens"].append(tokens)
        curve["flops"].append(float(f"{tokens * flops_per_token:.{_DIGITS}g}"))
        curve["seconds"].append(float(f"{_seconds_at(record['step'], clock):.{_DIGITS}g}"))
        curve["loss"].append(round(record["eval_loss"], 5))
        curve["accuracy"].append(None if accuracy is None else round(accuracy, 5))
    return curve


def training_seconds(records: Iterable[Mapping[str, Any]], batch_tokens: int) -> float:
    """Seconds of all steps, by the throughput in the log: stops, evaluations and saving are left out."""
    return _clock(records, batch_tokens)[-1][1]


def _clock(records: Iterable[Mapping[str, Any]], batch_tokens: int) -> list[tuple[int, float]]:
    """Steps and the seconds spent on them and all before."""
    clock = [(0, 0.0)]
    for record in records:
        if record.get("tokens_per_second"):
            step, seconds = clock[-1]
            spent = (record["step"] - step) * batch_tokens / record["tokens_per_second"]
            clock.append((record["step"], seconds + spent))
    return clock


def _seconds_at(step: int, clock: Sequence[tuple[int, float]]) -> float:
    for (before, since), (after, until) in pairwise(clock):
        if step <= after:
            return since + (until - since) * (step - before) / (after - before)
    return clock[-1][1]


@dataclass(frozen=True)
class Curve:
    """
    The evaluation curve of a run, a value per evaluation.

    Attributes:
        steps, flops, seconds: What had been spent.
        loss: Nats per token.
        accuracy: Shares of right answers; empty if not measured.
    """

    steps: Sequence[float]
    flops: Sequence[float]
    seconds: Sequence[float]
    loss: Sequence[float]
    accuracy: Sequence[float]

    @classmethod
    def of(cls, run: Mapping[str, Any]) -> Curve | None:
        """That of a run in `results.json`; `None` if it has none, as those of older versions."""
        values = run.get("curve")
        if not values or not values["step"]:
            return None
        accuracy = [] if None in values["accuracy"] else values["accuracy"]
        return cls(values["step"], values["flops"], values["seconds"], values["loss"], accuracy)

    def reaches(self, quantity: Quantity, level: float, axis: Axis) -> float | None:
        """
        What is spent until the loss falls to a level, or the accuracy rises to it, for good.

        For good: all later evaluations are there too. A model that waits at a blind choice crosses its loss by chance
        now and then, which is no take-off. Between evaluations the curve is a straight line; before the first one
        nothing is known, and its place is the answer if the level was reached by then.

        Returns:
            `None` if the last evaluation is not at the level.
        """
        sign = -1 if quantity == "loss" else 1
        gaps = [sign * (value - level) for value in getattr(self, quantity)]  # negative: not there yet
        if not gaps or not gaps[-1] >= 0:
            return None
        spent = getattr(self, axis)
        first = max((place + 1 for place, gap in enumerate(gaps) if not gap >= 0), default=0)
        if first == 0:
            return spent[0]
        before, after = gaps[first - 1], gaps[first]
        share = before / (before - after)
        # A loss that had run out of numbers says nothing about the way from there.
        share = share if math.isfinite(share) else 1.0
        return spent[first - 1] + share * (spent[first] - spent[first - 1])


__all__ = ["Curve", "evaluation_curve", "read_log", "training_seconds"]
