"""Checks after a conversion, and the comparison of any two checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..configuration_dcformer import DCFormerConfig
from .hub import local_folder, plan_hub
from .maxtext import plan_maxtext
from .pax import plan_pax
from .plan import Plan, parameter_shapes
from .stores import Store, is_remote
from .streamed_forward import NotFiniteError, streamed_logits
from .weights_folder import open_weights


LOGIT_TOLERANCE = 2e-4
# Configuration fields that do not change what the model computes.
_NO_BEHAVIOUR = {
    "dtype",
    "architectures",
    "transformers_version",
    "initializer_range",
    "use_cache",
    "max_position_embeddings",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "oov_policy",
    "_name_or_path",
}


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


def _check_reference(config, read, read_rows, reference: ReferenceLogits, tolerance: float) -> LogitDifference:
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


def _readers(weights: dict) -> tuple[Callable[[str], Tensor], Callable[[str, int, int], Tensor]]:
    def read(name: str) -> Tensor:
        return weights[name].read(weights[name].whole())

    def read_rows(name: str, start: int, stop: int) -> Tensor:
        return weights[name].read(((start, stop), *weights[name].whole()[1:]))

    return read, read_rows


@dataclass
class Comparison:
    """
    Attributes:
        verdict (`str`): `"identical"`, `"same up to rounding"` (equal in the coarser of the two dtypes) or
            `"different"`.
        missing, shapes: Names that only one has; names whose shapes differ.
        tensors: Largest absolute difference of every tensor that is not equal.
        config: Configuration fields that change what is computed and differ.
        logits: Of the two, on the same tokens; None if they could not be compared.
        note (`str`): Why not.
    """

    a: str
    b: str
    verdict: str = "identical"
    compared: int = 0
    missing: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, list] = field(default_factory=dict)
    tensors: dict[str, float] = field(default_factory=dict)
    config: dict[str, list] = field(default_factory=dict)
    logits: LogitDifference | None = None
    note: str = ""

    @property
    def same(self) -> bool:
        return self.verdict != "different"


def compare(
    a: str | os.PathLike,
    b: str | os.PathLike,
    *,
    train_config: str | os.PathLike | None = None,
    config: str | os.PathLike | None = None,
    tokens: Tensor | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Comparison:
    """
    Whether two checkpoints are the same model, whatever their formats.

    Args:
        a, b: Converted folders, the authors' folders, MaxText or PAX checkpoints.
        train_config, config: For a MaxText checkpoint its YAML, for a PAX one its `config.json`.
        tokens (`Tensor`, *optional*): (batch, length) to compare logits on. None: 2 x 32 drawn with a fixed seed.
        advance: Called with 1 after every tensor.

    Raises:
        FileNotFoundError, ValueError: if one of them cannot be read.
    """
    plans = [open_any(path, train_config=train_config, config=config) for path in (a, b)]
    result = Comparison(str(a), str(b))
    values = [_behaviour(plan.config) for plan in plans]
    result.config = {
        key: [values[0].get(key), values[1].get(key)]
        for key in sorted({*values[0], *values[1]})
        if values[0].get(key) != values[1].get(key)
    }
    specs = [{name: spec for name, spec in plan.parameters.items() if spec.file is None} for plan in plans]
    for name in sorted({*specs[0], *specs[1]}):
        if name not in specs[0] or name not in specs[1]:
            result.missing[name] = result.b if name not in specs[1] else result.a
        elif specs[0][name].shape != specs[1][name].shape:
            result.shapes[name] = [specs[0][name].shape, specs[1][name].shape]
    rounded = False
    for name in specs[0]:
        if name in result.missing or name in result.shapes:
            continue
        first, second = (plan.read(name) for plan in plans)
        result.compared += 1
        advance(1)
        coarser = min(first.dtype, second.dtype, key=lambda dtype: (dtype.itemsize, dtype == torch.float16))
        first_exact, second_exact = first.double(), second.double()
        if torch.allclose(first_exact, second_exact, rtol=0, atol=0, equal_nan=True):
            continue
        # Infinities are equal, though their difference is no number.
        result.tensors[name] = (first_exact - second_exact).abs()[first_exact != second_exact].max().item()
        if first.dtype == second.dtype or not torch.equal(first.to(coarser), second.to(coarser)):
            result.verdict = "different"
        rounded = True
    if rounded and result.verdict != "different":
        result.verdict = "same up to rounding"
    if result.missing or result.shapes or result.config:
        result.verdict = "different"
    if result.missing or result.shapes:
        result.note = "the tensors are not the same"
        return result
    if tokens is None:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(plans[0].config.vocab_size, (2, 32), generator=generator)
    logits, notes = [], []
    for plan, where in zip(plans, (result.a, result.b)):
        try:
            logits.append(streamed_logits(plan.config, plan.read, tokens))
        except NotFiniteError as error:
            notes.append(f"{where}: {error}")
    result.note = "; ".join(notes)
    if len(notes) == 1:  # one model works and the other does not
        result.verdict = "different"
    if not notes:
        result.logits = logit_difference(*logits)
    return result


def _behaviour(config: DCFormerConfig) -> dict:
    values = {key: value for key, value in config.to_dict().items() if key not in _NO_BEHAVIOUR}
    # A window that no layer has, and settings of a composition that is off, change nothing.
    if "sliding_attention" not in config.layer_types:
        values["sliding_window"] = None
    if not config.composes_heads:
        values = {key: value for key, value in values.items() if not key.startswith("compose_")}
    if not config.qk_norm:
        del values["qk_norm_eps"]
    return values


def open_any(
    path: str | os.PathLike,
    *,
    step: int | None = None,
    train_config: str | os.PathLike | None = None,
    config: str | os.PathLike | None = None,
) -> Plan:
    """
    The plan of any checkpoint that this package reads, told by what is there.

    Raises:
        FileNotFoundError, ValueError: if it is none.
    """
    kind = kind_of(path)
    if kind == "torch":
        return plan_hub(path)
    if kind == "pax":
        if config is None:
            raise ValueError(f"{str(path)!r} is a PAX checkpoint, which needs its configuration: pass --config.")
        return plan_pax(path, config, step=step)
    return plan_maxtext(path, step=step, train_config=train_config)


def kind_of(path: str | os.PathLike) -> str:
    """`"torch"`, `"pax"` or `"maxtext"`."""
    if is_remote(path):
        return "pax" if any("mdl_vars.params.lm" in name for name in Store(path).names()) else "maxtext"
    local = Path(path)
    if not local.exists():
        local = local_folder(path)
    if local.is_file():
        if local.suffix == ".npz":
            return "pax"
        raise ValueError(f"{str(path)!r} is a file; give the folder of a checkpoint, or a PAX .npz file.")
    if (local / "config.json").is_file():
        return "torch"
    if any(local.glob("*.npy")) or any(local.rglob("*mdl_vars.params.lm*")):
        return "pax"
    return "maxtext"
