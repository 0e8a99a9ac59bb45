"""Whether two checkpoints, of whatever formats, are the same model: tensors, configuration and logits."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..configuration_dcformer import DCFormerConfig
from .detect import open_checkpoint
from .streamed_forward import NotFiniteError, streamed_logits
from .verification import LogitDifference, logit_difference


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
class Comparison:
    """
    Attributes:
        verdict (`str`): `"identical"`, `"same up to rounding"` (equal in the coarser of the two dtypes) or
            `"different"`.
        missing, shapes: Names that only one has; names whose shapes differ.
        tensors: Largest absolute difference of every tensor that is not equal.
        config: Configuration fields that change what is computed and differ.
        logits: How far the logits are apart on the same tokens; None if they could not be compared.
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
    plans = [open_checkpoint(path, train_config=train_config, config=config) for path in (a, b)]
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
    if "sliding_attention" not in (config.layer_types or ()):
        values["sliding_window"] = None
    if not config.composes_heads:
        values = {key: value for key, value in values.items() if not key.startswith("compose_")}
    if not config.qk_norm:
        del values["qk_norm_eps"]
    return values
