"""Checks: bytes against the hashes of a report, two checkpoints against each other, logits against a reference."""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..common.files import find_damage
from ..configuration_dcformer import DCFormerConfig
from .arrays import open_npz, open_weights
from .authors_torch import local_folder, read_config
from .conversion_report import REPORT_FILE, read_report
from .inspection import open_source
from .plan import Plan, UnfitWeightsError, make_plan, meta_model
from .stores import is_remote, refuse_no_folder


# Called with the number of bytes to read; returns the function that is called with every part done.
Progress = Callable[[int], Callable[[int], object]]

LOGIT_TOLERANCE = 2e-4
_WEIGHTS = (".safetensors", ".bin", ".index.json")
# Configuration fields that do not change what the model computes.
_NO_BEHAVIOUR = {"dtype", "architectures", "transformers_version", "auto_map", "_name_or_path", "initializer_range"}
_NO_BEHAVIOUR |= {"use_cache", "attention_dropout", "oov_policy"}
_NO_BEHAVIOUR |= {"bos_token_id", "eos_token_id", "pad_token_id"}


@dataclass
class HashCheck:
    """The files of a folder against the hashes of its report."""

    folder: str
    checked: int = 0  #: how many files the report lists
    nbytes: int = 0  #: of them
    problems: dict[str, str] = field(default_factory=dict)  #: by file what is not as in the report, as a sentence

    @property
    def same(self) -> bool:
        return not self.problems


def verify_hashes(folder: str | os.PathLike, *, progress: Progress = lambda total: lambda nbytes: None) -> HashCheck:
    """
    Check the files of a converted folder against the SHA-256 in its `conversion_report.json`: all that differs, is
    missing, or is not in the report.

    Args:
        folder: A converted Transformers folder, a name on the Hub that is one, or a folder that
            [`convert_to_maxtext`] wrote.
        progress (*optional*): Called with the number of bytes to read; returns a function that is called with every
            part done.

    Raises:
        FileNotFoundError: if there is no report in the folder.
    """
    given = str(folder)
    if is_remote(given):
        raise ValueError(f"Hashes are checked in local folders, got {given!r}; copy it, or give a second checkpoint.")
    folder = local_folder(folder)
    refuse_no_folder(folder)
    report = read_report(folder)
    if report is None:
        raise FileNotFoundError(
            f"{given!r} has no {REPORT_FILE}: dcformer did not convert it. Give a second checkpoint to compare it with."
        )
    expected = report["files"]
    nbytes = sum(entry["size"] for entry in expected.values())
    advance = progress(nbytes)
    problems = {}
    for name, entry in expected.items():
        if damage := find_damage(folder, {name: entry}):
            problems[name] = damage
        advance(entry["size"])
    steps = {Path(name).parts[0] for name in expected if len(Path(name).parts) > 1}
    unlisted = [path for path in folder.iterdir() if path.name.endswith(_WEIGHTS)]
    unlisted += [path for step in steps for path in (folder / step).rglob("*") if path.is_file()]
    names = {path.relative_to(folder).as_posix() for path in unlisted} - expected.keys()
    problems |= {name: f"{str(folder / name)!r} is not in {REPORT_FILE}." for name in names}
    return HashCheck(str(folder), len(expected), nbytes, dict(sorted(problems.items())))


def refuse_changed(folder: Path, item: str = "") -> None:
    """Raise ValueError if the weights of a folder are not those of the report in it, if there is one."""
    if not (folder / REPORT_FILE).is_file():
        return
    for file, problem in verify_hashes(folder).problems.items():
        if file.startswith(f"{item}/") or file.endswith(_WEIGHTS):
            raise ValueError(
                f"{problem} It was damaged, or changed after the conversion: copy it again, or remove {REPORT_FILE} if "
                "it was changed on purpose."
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
    """The tokens (batch, length) and logits (batch, length, vocabulary) of an .npz file."""
    arrays = open_npz(Path(path))
    tokens, logits = (arrays[name].read() if name in arrays else torch.empty(0) for name in ("tokens", "logits"))
    if tokens.ndim != 2 or not tokens.numel() or logits.shape != (*tokens.shape, vocab_size):
        raise ValueError(
            f"{str(path)!r} has tokens {tuple(tokens.shape)} and logits {tuple(logits.shape)}; they must be (batch, "
            f"length) and (batch, length, {vocab_size})."
        )
    return tokens.long(), logits.float()


def verify_folder(
    folder: Path, reference: tuple[Tensor, Tensor] | None = None, tolerance: float = LOGIT_TOLERANCE
) -> dict[str, str]:
    """Check a converted folder: a finite forward, and the reference tokens and logits."""
    config = read_config(folder / "config.json")
    folder_logits(folder, spread_tokens(config.vocab_size, 16))
    checks = {"forward": "finite logits for 16 tokens"}
    if reference is None:
        return checks
    tokens, expected = reference
    difference = logit_difference(expected, folder_logits(folder, tokens))
    if difference.max_abs <= tolerance:
        return checks | {"reference logits": str(difference)}
    hint = ""
    if config.sliding_window is not None:
        # The authors' torch prefill sees one key more than their JAX code.
        wider = config.sliding_window + 1
        other = logit_difference(expected, folder_logits(folder, tokens, sliding_window=wider))
        if other.max_abs <= tolerance:
            hint = f" With a window of {wider} they agree ({other}); set it if you want that."
    raise ValueError(f"The logits differ from the reference: {difference}; allowed is {tolerance:g}.{hint}")


def spread_tokens(vocab_size: int, length: int) -> Tensor:
    """Token ids (1, length) from all of the vocabulary."""
    return torch.linspace(0, vocab_size - 1, length).long().unsqueeze(0)


def folder_logits(folder: Path, tokens: Tensor, **changes: Any) -> Tensor:
    """Logits in float32 of a folder of ours, with changed fields of its configuration."""
    config, weights = read_config(folder / "config.json"), open_weights(folder)
    changed = type(config).from_dict({**config.to_dict(), **changes})
    return streamed_logits(changed, lambda name: weights[name].read(), tokens)


class NotFiniteError(UnfitWeightsError):
    """A model that computes NaN or infinity; `reason` says where, without advice for a conversion."""

    def __init__(self, what: str):
        self.reason = f"{what} is not finite"
        super().__init__(f"{self.reason}; pass --no-verify to convert the weights all the same.")


def streamed_logits(config: DCFormerConfig, read: Callable[[str], Tensor], tokens: Tensor) -> Tensor:
    """Logits in float32 of a model of ours that never holds more than one weight."""
    model = meta_model(config)
    if model.model.rotary_emb is not None:
        model.model.rotary_emb.to_empty(device="cpu")
    tied = model.all_tied_weights_keys if config.tie_word_embeddings else {}
    return run_streamed(model, lambda name: read(tied.get(name, name)), tokens)


@torch.no_grad()
def run_streamed(model: PreTrainedModel, read: Callable[[str], Tensor], tokens: Tensor) -> Tensor:
    """Logits in float32 of any language model; `read` returns one weight at a time, by its name in the model."""
    for prefix, module in model.named_modules():
        if list(module.parameters(recurse=False)):
            module.register_forward_pre_hook(functools.partial(_load, read, prefix))
            module.register_forward_hook(_free)
    for index, layer in enumerate(model.base_model.layers):
        layer.register_forward_hook(_finite_check(f"The output of layer {index}"))
    model.get_output_embeddings().register_forward_hook(_finite_check("A logit"))
    return model(tokens, use_cache=False).logits


def _load(read: Callable[[str], Tensor], prefix: str, module: nn.Module, arguments: Any) -> None:
    """Load the parameters of a module before its forward."""
    for name, _ in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(read(f"{prefix}.{name}").float(), requires_grad=False))


def _free(module: nn.Module, arguments: Any, output: Any) -> None:
    for name, values in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(values.to("meta"), requires_grad=False))


def _finite_check(what: str) -> Callable[[nn.Module, Any, Tensor], None]:
    def check(module: nn.Module, arguments: Any, output: Tensor) -> None:
        if not output.isfinite().all():
            raise NotFiniteError(what)

    return check


@dataclass
class Comparison:
    """Two checkpoints, and whether they are the same model."""

    a: str
    b: str
    #: `"identical"`, `"same up to rounding"` (equal in the coarser of the two dtypes) or `"different"`.
    result: str = "identical"
    compared: int = 0  #: how many tensors both have, in the same shape
    missing: dict[str, str] = field(default_factory=dict)  #: by tensor the checkpoint that lacks it
    shapes: dict[str, list] = field(default_factory=dict)  #: by tensor the two shapes, if they differ
    tensors: dict[str, float] = field(default_factory=dict)  #: largest absolute difference of those that are not equal
    config: dict[str, list] = field(default_factory=dict)  #: fields that change the computation and differ
    logits: LogitDifference | None = None  #: for the same tokens; `None` if they could not be compared
    note: str = ""  #: why not

    @property
    def same(self) -> bool:
        return self.result != "different"


def compare(
    a: str | os.PathLike,
    b: str | os.PathLike,
    *,
    train_config: str | os.PathLike | None = None,
    config: str | os.PathLike | None = None,
    tokens: Tensor | None = None,
) -> Comparison:
    """
    Compare two checkpoints, whatever their formats, and tell if they are the same model.

    Args:
        a, b: Converted folders, the authors' folders, MaxText or PAX checkpoints.
        train_config, config (*optional*): For a MaxText checkpoint its YAML, for a PAX one its `config.json`.
        tokens (*optional*): (batch, length) to compare logits on; `None`: 2 x 32 random ones with a fixed seed.

    Raises:
        FileNotFoundError, ValueError: if one of them cannot be read.
    """
    opened = [open_source(path, None, train_config, config) for path in (a, b)]
    plans = [make_plan(read_model()) for _, read_model in opened]
    result = Comparison(str(a), str(b))
    first, second = (_behaviour(plan.config) for plan in plans)
    keys = sorted({*first, *second})
    result.config = {key: [first.get(key), second.get(key)] for key in keys if first.get(key) != second.get(key)}
    ours, theirs = (plan.model_parameters for plan in plans)
    for name in sorted({*ours, *theirs}):
        if name not in ours or name not in theirs:
            result.missing[name] = result.b if name in ours else result.a
        elif ours[name].shape != theirs[name].shape:
            result.shapes[name] = [tuple(ours[name].shape), tuple(theirs[name].shape)]
        else:
            result.compared += 1
            _compare_tensors(result, name, *(plan.read_one(name) for plan in plans))
    if result.config:
        result.result = "different"
    if result.missing or result.shapes:
        result.result, result.note = "different", "the tensors are not the same"
        return result
    if tokens is None:
        tokens = torch.randint(plans[0].config.vocab_size, (2, 32), generator=torch.Generator().manual_seed(0))
    _compare_logits(result, plans, tokens)
    return result


def _compare_tensors(result: Comparison, name: str, first: Tensor, second: Tensor) -> None:
    coarser = min(first.dtype, second.dtype, key=lambda dtype: (dtype.itemsize, dtype == torch.float16))
    exact = first.double(), second.double()
    if torch.allclose(*exact, rtol=0, atol=0, equal_nan=True):
        return
    # Infinities are equal, though their difference is not a number.
    result.tensors[name] = (exact[0] - exact[1]).abs()[exact[0] != exact[1]].max().item()
    if first.dtype == second.dtype or not torch.equal(first.to(coarser), second.to(coarser)):
        result.result = "different"
    elif result.same:
        result.result = "same up to rounding"


def _compare_logits(result: Comparison, plans: list[Plan], tokens: Tensor) -> None:
    logits, notes = [], []
    for plan, path in zip(plans, (result.a, result.b)):
        try:
            logits.append(streamed_logits(plan.config, plan.read_one, tokens))
        except NotFiniteError as error:
            notes.append(f"{path}: {error.reason}")
    result.note = "; ".join(notes)
    if len(notes) == 1:  # one model works and the other does not
        result.result = "different"
    if not notes:
        result.logits = logit_difference(*logits)


def _behaviour(config: DCFormerConfig) -> dict[str, Any]:
    values = {key: value for key, value in config.to_dict().items() if key not in _NO_BEHAVIOUR}
    # A window that no layer has, and settings of a composition that is off, change nothing.
    if "sliding_attention" not in (config.layer_types or ()):
        values["sliding_window"] = None
    if not config.composes_heads:
        values = {key: value for key, value in values.items() if not key.startswith("compose_")}
    if not config.qk_norm:
        del values["qk_norm_eps"]
    return values
