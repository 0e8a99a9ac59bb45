"""Whether two checkpoints, of whatever formats, are the same model: tensors, configuration and logits."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..configuration_dcformer import DCFormerConfig
from .inspection import open_checkpoint
from .verify import LogitDifference, NotFiniteError, logit_difference, streamed_logits


# Configuration fields that do not change what the model computes.
_NO_BEHAVIOUR = {
    "dtype",
    "architectures",
    "transformers_version",
    "auto_map",
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
        a, b: The two checkpoints, as they were given.
        result: `"identical"`, `"same up to rounding"` (equal in the coarser of the two dtypes) or `"different"`.
        compared: How many tensors both have, in the same shape.
        missing, shapes: Names that one lacks, with which; names whose shapes differ.
        tensors: Largest absolute difference of every tensor that is not equal.
        config: Configuration fields that change the computation and differ.
        logits: Distance of the logits for the same tokens; `None` if they could not be compared.
        note: Why not.
    """

    a: str
    b: str
    result: str = "identical"
    compared: int = 0
    missing: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, list] = field(default_factory=dict)
    tensors: dict[str, float] = field(default_factory=dict)
    config: dict[str, list] = field(default_factory=dict)
    logits: LogitDifference | None = None
    note: str = ""

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
    Whether two checkpoints are the same model, whatever their formats.

    Args:
        a, b: Converted folders, the authors' folders, MaxText or PAX checkpoints.
        train_config, config (*optional*): For a MaxText checkpoint its YAML, for a PAX one its `config.json`.
        tokens (*optional*): (batch, length) to compare logits on; `None`: 2 x 32, drawn with a fixed seed.

    Raises:
        FileNotFoundError, ValueError: if one of them cannot be read.
    """
    plans = [open_checkpoint(path, train_config=train_config, config=config) for path in (a, b)]
    result = Comparison(str(a), str(b))
    first, second = (_behaviour(plan.config) for plan in plans)
    keys = sorted({*first, *second})
    result.config = {key: [first.get(key), second.get(key)] for key in keys if first.get(key) != second.get(key)}
    ours, theirs = (plan.model_parameters() for plan in plans)
    for name in sorted({*ours, *theirs}):
        if name not in ours or name not in theirs:
            result.missing[name] = result.b if name in ours else result.a
        elif ours[name].shape != theirs[name].shape:
            result.shapes[name] = [ours[name].shape, theirs[name].shape]
        else:
            result.compared += 1
            _compare_tensors(result, name, *(plan.read_one(name) for plan in plans))
    if result.missing or result.shapes or result.config:
        result.result = "different"
    if result.missing or result.shapes:
        result.note = "the tensors are not the same"
        return result
    if tokens is None:
        tokens = torch.randint(plans[0].config.vocab_size, (2, 32), generator=torch.Generator().manual_seed(0))
    logits, notes = [], []
    for plan, where in zip(plans, (result.a, result.b)):
        try:
            logits.append(streamed_logits(plan.config, plan.read_one, tokens))
        except NotFiniteError as error:
            notes.append(f"{where}: {error}")
    result.note = "; ".join(notes)
    if len(notes) == 1:  # one model works and the other does not
        result.result = "different"
    if not notes:
        result.logits = logit_difference(*logits)
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
