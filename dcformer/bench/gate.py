"""Whether what is to be timed computes the right thing: no time is shown of what does not.

Each form is compared with the plain form in float64 on the very numbers that it is given, at the heads and channels
that are timed and a length that no tile divides. The operands are a model's, with factors large enough to matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..dcmha import ComposeWeights, Visibility
from ..dcmha_factors import map_tensors
from . import authors
from .operands import Operands, prompt_operands, step_operands
from .report import one_line


LENGTH = 193
WINDOW = 48
# Root mean square of the error, relative to that of the right values. Outputs: forms that keep scores or weights in 16
# bits lose up to about 2 ** -6 of them. Gradients: a product more, and sums of many terms that cancel.
_OUTPUT_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
_GRADIENT_FACTOR = 3.0

# Makes a call without arguments of operands, a window and a mask that says which documents are packed.
Maker = Callable[[Operands, int | None, Visibility | None], Callable[[], Tensor]]


class Failure(NamedTuple):
    """What is wrong with a form."""

    reason: str


def compose_tensors(operands: Operands) -> list[Tensor]:
    """Every tensor of both compositions that there is."""
    found: list[Tensor] = []

    def note(tensor: Tensor, _: str) -> Tensor:
        found.append(tensor)
        return tensor

    for stage in (operands.pre, operands.post):
        map_tensors(stage, note)
    return found


def check(
    make: Maker,
    heads: int,
    channels: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    vary: Callable[[Operands], Operands] = lambda operands: operands,
    window: int | None = None,
    is_packed: bool = False,
    with_gradients: bool = False,
    is_step: bool = False,
) -> Failure | None:
    """
    Compare a form with the plain form.

    Args:
        make (`Callable`): Of the form.
        vary (`Callable`, *optional*): Changes which branches the operands compose with.
        window (`int`, *optional*): Sliding window.
        is_packed (`bool`): Whether the row is made of documents.
        with_gradients (`bool`): Compare the gradients of all operands as well.
        is_step (`bool`): One query after a cache instead of a prompt.

    Returns:
        `Failure`: what is wrong, or None.
    """
    sizes = heads, channels, LENGTH, device, dtype
    operands = vary(step_operands(*sizes) if is_step else prompt_operands(*sizes))
    mask = packed_documents(LENGTH, 50, device) if is_packed else None
    try:
        if not with_gradients:
            with torch.no_grad():
                output = make(operands, window, mask)()
            expected, _ = _reference(operands, window, mask)
            return _compared([("output", output, expected)], _OUTPUT_TOLERANCES[dtype])
        operands = leaves(operands)._replace(peer=None)  # so that gradients reach what the peer is made of
        output = make(operands, window, mask)()
        named = _gradient_leaves(operands)
        generator = torch.Generator().manual_seed(1)
        upstream = torch.randn(output.shape, generator=generator).to(device, dtype)
        gradients = torch.autograd.grad(output, [tensor for _, tensor in named], upstream)
        expected, expected_gradients = _reference(operands, window, mask, upstream)
        wrong = _compared([("output", output, expected)], _OUTPUT_TOLERANCES[dtype])
        names = [f"gradient of {name}" for name, _ in named]
        pairs = list(zip(names, gradients, expected_gradients))
        return wrong or _compared(pairs, _GRADIENT_FACTOR * _OUTPUT_TOLERANCES[dtype])
    except Exception as error:  # whatever a form may raise means that it cannot be measured
        return Failure(one_line(error))


def packed_documents(length: int, document: int, device: torch.device) -> Visibility:
    """A row of documents of so many tokens, the last one shorter where they do not fit."""
    return Visibility(length, length, sequence_ids=(torch.arange(length, device=device) // document)[None])


def leaves(operands: Operands) -> Operands:
    """The same numbers, lying in memory alike, that ask for gradients."""

    def leaf(tensor: Tensor, _: str = "") -> Tensor:
        return tensor.detach().requires_grad_()

    query, key, value = map(leaf, operands.states)
    pre, post = (map_tensors(stage, leaf) for stage in (operands.pre, operands.post))
    peer = None if operands.peer is None else authors.Factors(*map(leaf, operands.peer))
    return Operands(query, key, value, pre, post, peer)


def _gradient_leaves(operands: Operands) -> list[tuple[str, Tensor]]:
    named = list(zip(("query", "key", "value"), operands.states))
    return named + [(f"composition {index}", tensor) for index, tensor in enumerate(compose_tensors(operands))]


def _reference(
    operands: Operands, window: int | None, mask: Visibility | None, upstream: Tensor | None = None
) -> tuple[Tensor, Sequence[Tensor]]:
    def double(tensor: Tensor, _: str = "") -> Tensor:
        return tensor.detach().double().requires_grad_(upstream is not None)

    def stage(weights: ComposeWeights | None) -> ComposeWeights | None:
        return map_tensors(weights, double)

    query, key, value = map(double, operands.states)
    exact = Operands(query, key, value, stage(operands.pre), stage(operands.post))
    output = exact.composed(sliding_window=window, attention_mask=mask, implementation="plain")
    if upstream is None:
        return output, ()
    tensors = [tensor for _, tensor in _gradient_leaves(exact)]
    return output, torch.autograd.grad(output, tensors, upstream.double())


def _compared(pairs: Sequence[tuple[str, Tensor, Tensor]], tolerance: float) -> Failure | None:
    for name, found, expected in pairs:
        if found.shape != expected.shape:
            return Failure(f"{name} has shape {tuple(found.shape)}, not {tuple(expected.shape)}")
        error = relative_error(found, expected)
        if not error <= tolerance:  # NaN is no smaller than anything
            return Failure(f"{name} is wrong: relative error {error:.1e}, at most {tolerance:.0e} is right")
    return None


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, relative to that of the expected values."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))
