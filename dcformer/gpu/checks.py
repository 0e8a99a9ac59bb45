"""The check behind a verdict: a Triton form against the reference in float64, and its time against the torch form's."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dcmha_factors import ComposeSide, ComposeWeights, map_tensors
from ..dcmha_mask import Visibility
from ..dcmha_reference import reference_attention
from .cases import DECODE, TRAINING, Case, StageSwitches
from .verdicts import Correctness, Times


Form = Callable[..., Tensor]
# Milliseconds that a call takes on the current device.
Timer = Callable[[Callable[[], Any]], float]

# Errors of a row of channels, relative to rows of usual size. 16 bits round inputs of the matrix products, scores and
# outputs, each by 2e-3 in bfloat16; where torch takes float32 products down to TF32, so may the kernels.
_ALLOWED = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}
_ALLOWED_IN_TF32 = 5e-3
# Gradients pass through twice as many products.
_MORE_FOR_GRADIENTS = 2.5


class Trial(NamedTuple):
    """Lengths and mask of one call. Without `keys`, as many as queries."""

    queries: int
    keys: int | None = None
    window: int | None = None
    is_padded: bool = False
    is_packed: bool = False
    is_dense: bool = False


class Examination:
    """
    How a form is checked and timed.

    Args:
        form (`Callable`): The Triton form, as the operator's table calls it.
        other_form (`Callable`): The torch form that would be chosen otherwise.
        timer (`Callable`, *optional*): None: Triton's own, by the clock of the device.
        device (`str`, defaults to "cuda"): Where.
    """

    def __init__(self, form: Form, other_form: Form, timer: Timer | None = None, device: str = "cuda"):
        self._form = form
        self._other_form = other_form
        self._timer = timer or device_time
        self._device = device

    def check(self, case: Case) -> Correctness:
        """
        The largest error over outputs, and gradients in training, of a few short calls.

        Raises:
            ValueError: if two runs differ.
        """
        errors = [0.0]
        for number, trial in enumerate(_trials(case)):
            inputs, mask = self._inputs(case, trial, seed=number)
            found, again = (_results(self._form, inputs, mask, case) for _ in range(2))
            expected = _results(_reference, inputs.double(), mask, case)
            is_steady = all(torch.equal(one, other) for one, other in zip(found, again))
            # NaN is unequal to itself, and an error of its own.
            if not is_steady and not any(bool(result.isnan().any()) for result in found):
                raise ValueError("two runs on the same inputs give different results")
            errors += [largest_error(one, other) for one, other in zip(found, expected, strict=True)]
        allowed = _ALLOWED[case.dtype]
        if case.dtype == "float32" and torch.get_float32_matmul_precision() != "highest":
            allowed = _ALLOWED_IN_TF32
        if case.kind == TRAINING:
            allowed *= _MORE_FOR_GRADIENTS
        # As max(), but NaN wins.
        return Correctness(float(torch.tensor(errors).max()), allowed)

    def measure(self, case: Case) -> Times:
        """Times of a call of usual length, with its backward pass in training."""
        trial = Trial(1, 2048) if case.kind == DECODE else Trial(2048, window=256 if case.has_window else None)
        inputs, mask = self._inputs(case, trial, seed=0, batch=1)
        forms = (self._form, self._other_form)
        return Times(*(self._timer(functools.partial(_results, form, inputs, mask, case)) for form in forms))

    def _inputs(self, case: Case, trial: Trial, seed: int, batch: int = 2) -> tuple["Inputs", Visibility]:
        generator = torch.Generator(self._device).manual_seed(seed)
        dtype = getattr(torch, case.dtype)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=self._device).to(dtype)

        queries, keys = trial.queries, trial.keys or trial.queries
        inputs = Inputs(
            normal(batch, case.heads, queries, case.channels),
            normal(batch, case.key_value_heads, keys, case.channels),
            normal(batch, case.key_value_heads, keys, case.value_channels),
            *(_weights(stage, case, batch, queries, keys, normal) for stage in (case.pre, case.post)),
        )
        if case.kind == TRAINING:
            inputs = inputs.map(Tensor.requires_grad_)
        return inputs, _mask(case, trial, batch, queries, keys, self._device)


class Inputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    pre: ComposeWeights | None
    post: ComposeWeights | None

    def map(self, function: Callable[[Tensor], Tensor]) -> "Inputs":
        """The same with `function` applied to every tensor."""
        pre, post = (map_tensors(stage, lambda tensor, _: function(tensor)) for stage in (self.pre, self.post))
        return Inputs(function(self.query), function(self.key), function(self.value), pre, post)

    def double(self) -> "Inputs":
        """Copies in float64 that ask for gradients where these do."""
        return self.map(lambda tensor: tensor.detach().double().requires_grad_(tensor.requires_grad))

    def tensors(self) -> list[Tensor]:
        found = [self.query, self.key, self.value]
        for stage in (self.pre, self.post):
            if stage is not None:
                sides = (None if side is None else side.factors for side in (stage.query, stage.key))
                found += [tensor for tensor in (*sides, stage.static) if tensor is not None]
        return found


def device_time(function: Callable[[], Any]) -> float:
    """Milliseconds of a call by the device's own clock, with cold caches: the median of as many as 50 ms hold."""
    from triton.testing import do_bench

    return do_bench(function, warmup=10, rep=50, return_mode="median")


def largest_error(found: Tensor, expected: Tensor) -> float:
    """
    The largest error of any row of channels, relative to its size or that of usual rows, whichever is larger.

    Raises:
        ValueError: if the shapes differ.
    """
    if found.shape != expected.shape:
        raise ValueError(f"the result has shape {tuple(found.shape)} instead of {tuple(expected.shape)}")
    sizes = expected.norm(dim=-1)
    usual = sizes.square().mean().sqrt()
    return float(((found.double() - expected).norm(dim=-1) / sizes.maximum(usual).clamp(min=1e-30)).max())


def _trials(case: Case) -> list[Trial]:
    """Lengths that no tile divides; together they pass through every part of a mask."""
    if case.kind == DECODE:
        return [Trial(1, 700), Trial(3, 333, window=70, is_padded=True), Trial(2, 90, is_dense=True)]
    window = 40 if case.has_window else None
    packed = Trial(150, window=window, is_padded=True, is_packed=True)
    if case.kind == TRAINING:
        return [Trial(150, window=window), packed]
    return [Trial(75, 150, window=window), packed, Trial(77, 90, window=window, is_dense=True)]


def _weights(
    stage: StageSwitches, case: Case, batch: int, queries: int, keys: int, normal: Callable[..., Tensor]
) -> ComposeWeights | None:
    """Weights of the size that projections start with or grow to, so that no composition drowns another."""
    if not any(stage):
        return None

    def side(length: int, rank: int, has_gate: bool) -> ComposeSide | None:
        if rank == 0 and not has_gate:
            return None
        factors = normal(batch, case.heads, length, 2 * rank + has_gate)
        return ComposeSide(factors=factors / math.sqrt(case.heads // case.groups) if rank > 0 else factors / 2)

    per_group = case.heads // case.groups
    static = normal(case.groups, per_group, per_group) / (2 * math.sqrt(per_group)) if stage.static else None
    query_side = side(queries, stage.query_rank, stage.query_gate)
    return ComposeWeights(query_side, side(keys, stage.key_rank, stage.key_gate), static, case.groups)


def _mask(case: Case, trial: Trial, batch: int, queries: int, keys: int, device: str) -> Visibility:
    positions = torch.arange(keys, device=device)
    padding = sequence_ids = dense = None
    if trial.is_padded:
        # The first row of the batch begins with a fifth of padding, so some queries see nothing.
        padding = (positions >= keys // 5).expand(batch, -1).clone()
        padding[1:] = True
    if trial.is_packed:
        sequence_ids = (positions * 3 // keys).expand(batch, -1)
    if trial.is_dense:
        dense = (positions[None, :] * 7 + positions[:queries, None] * 3) % 5 > 0
        dense = dense[None, None]  # (1, 1, query, key)
    return Visibility(
        queries,
        keys,
        is_causal=case.is_causal,
        sliding_window=trial.window,
        padding=padding,
        sequence_ids=sequence_ids,
        dense=dense,
    )


def _results(form: Form, inputs: Inputs, mask: Visibility, case: Case) -> list[Tensor]:
    """The output, and in training all gradients for one output gradient."""
    scaling = 1.0 / math.sqrt(case.channels)
    with torch.set_grad_enabled(case.kind == TRAINING):
        output = form(*inputs, scaling=scaling, mask=mask)
    if case.kind != TRAINING:
        return [output]
    # Any will do that is the same for all forms and has no pattern along an axis.
    output_gradient = torch.sin(torch.arange(output.numel(), device=output.device, dtype=torch.float32) * 0.7)
    output_gradient = output_gradient.view(output.shape).to(getattr(torch, case.dtype)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, inputs.tensors(), output_gradient)]


def _reference(*arguments: Any, **options: Any) -> Tensor:
    return reference_attention(*arguments, **options)[0]
