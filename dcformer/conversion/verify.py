"""Checks: bytes against the hashes of a report, two checkpoints against each other, logits against a reference."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..common.files import file_digest
from ..configuration_dcformer import DCFormerConfig
from .arrays import open_weights
from .authors_torch import local_folder, read_config
from .destination import REPORT_FILE
from .plan import meta_model
from .report import read_report


LOGIT_TOLERANCE = 2e-4
_WEIGHTS = (".safetensors", ".bin", ".index.json")


@dataclass(frozen=True)
class HashProblem:
    """A file that is not as in the report, and what is wrong with it."""

    file: str
    problem: str


@dataclass
class HashCheck:
    """
    Attributes:
        folder: The folder that was checked.
        checked, nbytes: How many files were hashed, and their bytes.
        problems: All deviations from the report.
    """

    folder: str
    checked: int = 0
    nbytes: int = 0
    problems: list[HashProblem] = field(default_factory=list)

    @property
    def same(self) -> bool:
        return not self.problems


def verify_hashes(
    folder: str | os.PathLike,
    *,
    progress: Callable[[int], Callable[[int], object]] = lambda total: lambda nbytes: None,
    below: str = "",
) -> HashCheck:
    """
    Check the files of a converted folder against the SHA-256 in its `conversion_report.json`.

    Args:
        folder: A converted Transformers folder, a name on the Hub that is one, or a folder that
            [`convert_to_maxtext`] wrote.
        progress (*optional*): Called with the number of bytes to read; returns a function that is called with every
            part done.
        below (*optional*): Check only files whose path in the folder begins so.

    Returns:
        [`HashCheck`] with everything that differs, is missing, or is not in the report.

    Raises:
        FileNotFoundError: if there is no report in the folder.
    """
    folder = local_folder(folder)
    report = read_report(folder)
    if report is None:
        raise FileNotFoundError(
            f"{str(folder)!r} has no {REPORT_FILE}: dcformer did not convert it. Give a second checkpoint to compare "
            "it with."
        )
    expected = {name: digest for name, digest in report["files"].items() if name.startswith(below)}
    there = {name: folder / name for name in expected if (folder / name).is_file()}
    sizes = {name: path.stat().st_size for name, path in there.items()}
    advance = progress(sum(sizes.values()))
    problems = [HashProblem(name, "is missing") for name in expected if name not in there]
    for name, path in there.items():
        if file_digest(path, advance) != expected[name]:
            problems.append(HashProblem(name, f"has another SHA-256 than in {REPORT_FILE}"))
    steps = {Path(name).parts[0] for name in expected if len(Path(name).parts) > 1}
    unlisted = [path for path in folder.iterdir() if path.name.endswith(_WEIGHTS) and not below]
    unlisted += [path for step in steps for path in (folder / step).rglob("*") if path.is_file()]
    names = {path.relative_to(folder).as_posix() for path in unlisted} - {*expected, REPORT_FILE}
    problems += [HashProblem(name, f"is not in {REPORT_FILE}") for name in names if name.startswith(below)]
    problems.sort(key=lambda problem: problem.file)
    return HashCheck(str(folder), len(there), sum(sizes.values()), problems)


def refuse_changed(folder: Path, below: str = "") -> None:
    """
    Raise if the files of a folder are not those of the report in it.

    Raises:
        ValueError: naming the first that differs.
    """
    if not (folder / REPORT_FILE).is_file():
        return
    for problem in verify_hashes(folder, below=below).problems:
        raise ValueError(
            f"{folder / problem.file} {problem.problem}: it was damaged, or changed after the conversion. Copy it "
            f"again, or remove {REPORT_FILE} if it was changed on purpose."
        )


@dataclass
class LogitDifference:
    """Distance of two sets of logits (batch, length, vocabulary); KL divergence in nats per token."""

    max_abs: float
    mean_kl: float
    top1_agreement: float

    def __str__(self) -> str:
        agreement = f"top-1 agreement {100 * self.top1_agreement:.4g} %"
        return f"max abs {self.max_abs:.3g}, mean KL {self.mean_kl:.3g} nats, {agreement}"


def logit_difference(expected: Tensor, actual: Tensor) -> LogitDifference:
    """Largest absolute difference, mean KL divergence, and how often the best token is the same."""
    expected, actual = expected.double(), actual.double()
    log_p, log_q = expected.log_softmax(-1), actual.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()
    agreement = (expected.argmax(-1) == actual.argmax(-1)).double().mean().item()
    return LogitDifference((expected - actual).abs().max().item(), max(kl, 0.0), agreement)


def load_reference(path: str | os.PathLike, vocab_size: int) -> tuple[Tensor, Tensor]:
    """
    The tokens (batch, length) and logits (batch, length, vocabulary) of an .npz file.

    Raises:
        ValueError: if they have other shapes.
    """
    with np.load(path, allow_pickle=False) as arrays:
        tokens, logits = torch.from_numpy(arrays["tokens"]).long(), torch.from_numpy(arrays["logits"]).float()
    if tokens.ndim != 2 or not tokens.numel() or logits.shape != (*tokens.shape, vocab_size):
        raise ValueError(
            f"{str(path)!r} has tokens {tuple(tokens.shape)} and logits {tuple(logits.shape)}; they must be (batch, "
            f"length) and (batch, length, {vocab_size})."
        )
    return tokens, logits


def verify_folder(
    folder: Path, reference: tuple[Tensor, Tensor] | None = None, tolerance: float = LOGIT_TOLERANCE
) -> dict[str, str]:
    """
    Check a converted folder: a finite forward, and the reference tokens and logits.

    Raises:
        NotFiniteError, ValueError: if a check fails.
    """
    config, weights = read_config(folder / "config.json"), open_weights(folder)

    def logits(config: DCFormerConfig, tokens: Tensor) -> Tensor:
        return streamed_logits(config, lambda name: weights[name].read(), tokens)

    logits(config, torch.linspace(0, config.vocab_size - 1, 16).long().unsqueeze(0))
    checks = {"forward": "finite logits for 16 tokens"}
    if reference is None:
        return checks
    tokens, expected = reference
    difference = logit_difference(expected, logits(config, tokens))
    if difference.max_abs <= tolerance:
        return checks | {"reference logits": str(difference)}
    hint = ""
    if config.sliding_window is not None:
        # The authors' torch prefill sees one key more than their JAX code.
        wider = type(config).from_dict({**config.to_dict(), "sliding_window": config.sliding_window + 1})
        other = logit_difference(expected, logits(wider, tokens))
        if other.max_abs <= tolerance:
            hint = f" With a window of {config.sliding_window + 1} they agree ({other}); set it if you want that."
    raise ValueError(f"The logits differ from the reference: {difference}; allowed is {tolerance:g}.{hint}")


class NotFiniteError(ValueError):
    """A model that computes NaN or infinity."""


@torch.no_grad()
def streamed_logits(config: DCFormerConfig, read: Callable[[str], Tensor], tokens: Tensor) -> Tensor:
    """
    Logits in float32 of a model that never holds more than one weight.

    Args:
        config: The model's configuration.
        read: Returns the values of a parameter, given its name.
        tokens: (batch, length) token ids.

    Returns:
        (batch, length, vocabulary) logits.

    Raises:
        NotFiniteError: if the output of a layer, or a logit, is not finite; the message names the layer.
    """
    model = meta_model(config)
    if model.model.rotary_emb is not None:
        model.model.rotary_emb.to_empty(device="cpu")
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}
    for prefix, module in model.named_modules():
        names = [name for name, _ in module.named_parameters(recurse=False)]
        if names:
            _stream(module, {name: tied.get(f"{prefix}.{name}", f"{prefix}.{name}") for name in names}, read)
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(_finite_check(f"The output of layer {index}"))
    model.lm_head.register_forward_hook(_finite_check("A logit"))
    return model(tokens, use_cache=False).logits


def _stream(module: nn.Module, names: dict[str, str], read: Callable[[str], Tensor]) -> None:
    """Give a module its own parameters for the time of its forward."""

    def load(module: nn.Module, arguments: Any) -> None:
        for name, full in names.items():
            setattr(module, name, nn.Parameter(read(full).float(), requires_grad=False))

    def free(module: nn.Module, arguments: Any, output: Any) -> None:
        for name in names:
            setattr(module, name, nn.Parameter(getattr(module, name).to("meta"), requires_grad=False))

    module.register_forward_pre_hook(load)
    module.register_forward_hook(free)


def _finite_check(what: str) -> Callable[[nn.Module, Any, Tensor], None]:
    def check(module: nn.Module, arguments: Any, output: Tensor) -> None:
        if not output.isfinite().all():
            raise NotFiniteError(f"{what} is not finite; pass --no-verify to convert the weights all the same.")

    return check
