"""Checks of a converted folder: its tensors, a finite forward, and the logits of another implementation."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..configuration_dcformer import DCFormerConfig
from .formats.transformers_folder import open_weights
from .leaves import Leaf
from .plan import Plan, parameter_shapes
from .streamed_forward import NotFiniteError, streamed_logits


LOGIT_TOLERANCE = 2e-4
# From a parameter's name to its values, and to those of its rows from start to stop.
_Read = Callable[[str], Tensor]
_ReadRows = Callable[[str, int, int], Tensor]


@dataclass
class LogitDifference:
    """How far two sets of logits (batch, length, vocabulary) are apart."""

    max_abs: float
    mean_kl: float
    top1_agreement: float

    def __str__(self):
        return (
            f"max abs {self.max_abs:.3g}, mean KL {self.mean_kl:.3g} nats, "
            f"top-1 agreement {100 * self.top1_agreement:.4g} %"
        )


def logit_difference(expected: Tensor, actual: Tensor) -> LogitDifference:
    """Largest absolute difference, mean KL divergence in nats per token, and how often the best token is the same."""
    expected, actual = expected.double(), actual.double()
    log_p, log_q = expected.log_softmax(-1), actual.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()
    agreement = (expected.argmax(-1) == actual.argmax(-1)).double().mean().item()
    return LogitDifference((expected - actual).abs().max().item(), max(kl, 0.0), agreement)


@dataclass
class ReferenceLogits:
    """Tokens (batch, length) and the logits (batch, length, vocabulary) that some other implementation gave."""

    path: str
    tokens: Tensor
    logits: Tensor


def load_reference(path: str | os.PathLike, vocab_size: int) -> ReferenceLogits:
    """
    Read an .npz with `tokens` and `logits`.

    Raises:
        FileNotFoundError, ValueError: if it is not there, not complete, or of another vocabulary.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file of reference logits {str(path)!r}; check --reference-logits.")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            tokens, logits = arrays["tokens"], arrays["logits"]
    except (KeyError, ValueError, OSError, EOFError) as error:
        raise ValueError(f"{str(path)!r} must be an .npz file with tokens and logits ({error}).") from error
    if tokens.dtype.kind not in "iu" or logits.dtype.kind != "f" or tokens.size == 0:
        raise ValueError(
            f"{str(path)!r} must hold integer tokens, at least one, and floating-point logits; got {tokens.dtype} "
            f"{tokens.shape} and {logits.dtype} {logits.shape}."
        )
    if tokens.ndim != 2 or logits.shape != (*tokens.shape, vocab_size):
        raise ValueError(
            f"{str(path)!r} has tokens {tokens.shape} and logits {logits.shape}; they must be (batch, length) and "
            f"(batch, length, {vocab_size})."
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(f"{str(path)!r} holds token {int(tokens.max())}; the vocabulary has {vocab_size}.")
    return ReferenceLogits(str(path), torch.from_numpy(tokens).long(), torch.from_numpy(logits).float())


def verify_folder(
    folder: Path, plan: Plan, reference: ReferenceLogits | None = None, tolerance: float = LOGIT_TOLERANCE
) -> dict[str, Any]:
    """
    Check a converted folder: names and shapes against an empty model, a finite forward, the reference logits.

    Raises:
        ValueError: if a check fails.
    """
    weights = open_weights(folder)
    expected = parameter_shapes(type(plan.config).from_pretrained(folder))
    shapes = {name: leaf.shape for name, leaf in weights.items()}
    if shapes != expected:
        wrong = sorted(name for name in {*shapes, *expected} if shapes.get(name) != expected.get(name))
        raise ValueError(
            f"The files written do not match the model in {', '.join(wrong[:4])}; this is a fault of ours."
        )
    read, read_rows = _readers(weights)
    tokens = torch.linspace(0, plan.config.vocab_size - 1, 16).long().unsqueeze(0)
    try:
        streamed_logits(plan.config, read, tokens, read_rows)
    except NotFiniteError as error:
        raise ValueError(f"{error}; pass --no-verify to convert them all the same.") from error
    checks = {
        "names and shapes": f"{len(shapes)} tensors, as the model's",
        "forward": "finite logits for 16 tokens",
    }
    if reference is not None:
        checks["reference logits"] = str(_check_reference(plan.config, read, read_rows, reference, tolerance))
    return checks


def _check_reference(
    config: DCFormerConfig, read: _Read, read_rows: _ReadRows, reference: ReferenceLogits, tolerance: float
) -> LogitDifference:
    difference = logit_difference(reference.logits, streamed_logits(config, read, reference.tokens, read_rows))
    if difference.max_abs <= tolerance:
        return difference
    hint = ""
    if config.sliding_window is not None:
        wider = type(config).from_dict({**config.to_dict(), "sliding_window": config.sliding_window + 1})
        other = logit_difference(reference.logits, streamed_logits(wider, read, reference.tokens, read_rows))
        if other.max_abs <= tolerance:
            hint = (
                f" With a window of {config.sliding_window + 1} they agree ({other}): the reference saw one key more, "
                "as the authors' torch prefill does, so set the window to that if it is what you want."
            )
    raise ValueError(
        f"The logits differ from {reference.path!r}: {difference}; allowed is {tolerance:g} (--tolerance).{hint}"
    )


def _readers(weights: dict[str, Leaf]) -> tuple[_Read, _ReadRows]:
    def read(name: str) -> Tensor:
        return weights[name].read(weights[name].whole())

    def read_rows(name: str, start: int, stop: int) -> Tensor:
        return weights[name].read(((start, stop), *weights[name].whole()[1:]))

    return read, read_rows
