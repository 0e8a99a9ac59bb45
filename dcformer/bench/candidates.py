"""The ways to compute attention that are compared, and the gate: no time is shown of wrong values.

Candidates are our implementations, torch's attention without composition, and the formulation of the authors' training
code, which authors.py writes after the paper. Before they are timed, all of them are compared with the plain
implementation in float64 on the same inputs, at the timed heads and head dimension and a length that no tile divides.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..dcmha import Visibility, implementations
from . import authors
from .measure import Call, Run, one_line
from .operands import Operands, packed_documents, prompt_operands, step_operands, visible


SDPA, FLASH = "sdpa", "FlashAttention 2"
SDPA_WINDOW = f"{SDPA}, same window"
GATE_LENGTH, GATE_WINDOW, GATE_DOCUMENT = 193, 48, 50
# Root mean square of the error relative to that of the right values. Scores or weights in 16 bits lose up to 2 ** -6.
_OUTPUT_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
_GRADIENT_FACTOR = 3.0  # a product more, and sums of many terms that cancel

# From operands, a window and a mask of packed documents.
Make = Callable[[Operands, int | None, Visibility | None], Call]


@dataclass(frozen=True)
class Candidate:
    """One way to compute attention."""

    name: str
    make: Make
    why_not: Callable[..., str | None] = lambda *_: None  # why it cannot run on operands, a window and documents
    composes: bool = True  # otherwise only the states have gradients
    is_compiled: bool = False  # by Inductor, which takes many seconds for a shape

    def gradient_call(self, of: Operands, window: int | None, mask: Visibility | None) -> Call:
        """Make a call of forward and backward; `of` are leaves."""
        tensors = of.tensors if self.composes else of.states
        forward, upstream = self.make(of, window, mask), torch.randn_like(of.query)
        return lambda: torch.autograd.grad(forward(), tensors, upstream)

    def problem(
        self,
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
    ) -> str | None:
        """Say why it must not be timed: it cannot run, or differs from the plain implementation in float64."""
        make = step_operands if is_step else prompt_operands
        of = vary(make(heads, channels, GATE_LENGTH, device, dtype)).leaves(with_gradients)
        of = of if self.composes else of._replace(pre=None, post=None)
        window = None if window is None else min(window, GATE_WINDOW)
        mask = packed_documents(GATE_LENGTH, GATE_DOCUMENT, device) if is_packed else None
        if (reason := self.why_not(of, window, mask)) is not None:
            return f"not measured: {reason}"
        try:
            return self._wrong_values(of, window, mask, with_gradients)
        except Exception as error:  # whatever a candidate raises means that it cannot be timed
            return f"failed: {one_line(error)}"

    def _wrong_values(self, of: Operands, window: int | None, mask: Visibility | None, is_graded: bool) -> str | None:
        exact = of.leaves(is_graded, torch.float64)
        with torch.set_grad_enabled(is_graded):
            results = [self.make(of, window, mask)()]
            expected = [exact.composed(sliding_window=window, attention_mask=mask, implementation="plain")]
        if is_graded:
            upstream = torch.randn_like(results[0])
            results += torch.autograd.grad(results[0], of.tensors, upstream)
            expected += torch.autograd.grad(expected[0], exact.tensors, upstream.double())
        for index, (result, exact_result) in enumerate(zip(results, expected)):
            error = relative_error(result, exact_result)
            tolerance = _OUTPUT_TOLERANCES[of.query.dtype] * (_GRADIENT_FACTOR if index else 1)
            if not error <= tolerance:  # NaN is not below anything
                what = f"gradient {index}" if index else "output"
                return f"{what} is wrong: relative error {error:.1e}, at most {tolerance:.0e} is right"
        return None


def gate(run: Run, entry: Candidate, heads: int, channels: int, **options: Any) -> str | None:
    """Ask a candidate for its `problem`, once in a run for the same options."""
    key = (entry.name, heads, channels, *sorted(options.items()))
    if key not in run.problems:
        run.problems[key] = entry.problem(heads, channels, run.device, run.dtype, **options)
    return run.problems[key]


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, relative to that of the expected values."""
    expected = expected.detach().double()
    return float((result.detach().double() - expected).norm() / expected.norm().clamp(min=1e-30))


def our_candidates() -> list[Candidate]:
    """Every implementation of the operator's table, those first that are preferred."""
    return [_implementation(name) for name in reversed(implementations())]


def plain_candidates(device: torch.device, compiles: bool, window: int | None) -> list[Candidate]:
    """Attention without composition of the same keys, the baseline first."""
    if device.type != "cuda":
        return [Candidate(SDPA if window is None else SDPA_WINDOW, _sdpa, composes=False)]
    if window is None:
        return [Candidate(FLASH, _flash, composes=False), Candidate("cuDNN", _cudnn, composes=False)]
    windowed = [Candidate(f"{FLASH}, same window", _flash, composes=False)]
    if compiles:
        windowed.append(Candidate("FlexAttention, same window", _flex_attention, composes=False, is_compiled=True))
    return windowed


def authors_candidates(compiles: bool) -> list[Candidate]:
    """The authors' formulation in chunks of queries, eager and compiled."""
    missing = None if compiles else "torch.compile is switched off"
    compiled = functools.partial(_authors, is_compiled=True)
    return [
        Candidate("authors", _authors),
        Candidate("authors, compiled", compiled, why_not=lambda *_: missing, is_compiled=True),
    ]


def _implementation(name: str) -> Candidate:
    def make(of: Operands, window: int | None, mask: Visibility | None) -> Call:
        return functools.partial(of.composed, implementation=name, sliding_window=window, attention_mask=mask)

    def why_not(of: Operands, window: int | None, mask: Visibility | None) -> str | None:
        mask = mask or Visibility(of.query.shape[2], of.key.shape[2], sliding_window=window)
        return implementations()[name].supports(*of, mask=mask, dropout=0.0)

    return Candidate(name, make, why_not=why_not)


def flash_attention(query: Tensor, key: Tensor, value: Tensor, window: int | None, scaling: float) -> Tensor:
    """Causal attention on (batch, heads, length, head_dim) in 16 bits, by the FlashAttention 2 that torch ships."""
    is_causal = query.shape[2] > 1  # a decoding step's query sees every key that it is given, in a window too
    sizes = {"window_size_left": window - 1, "window_size_right": 0} if window is not None and is_causal else {}
    states = (tensor.transpose(1, 2) for tensor in (query, key, value))
    options = None, None, query.shape[2], key.shape[2], 0.0, is_causal, False
    return torch.ops.aten._flash_attention_forward(*states, *options, scale=scaling, **sizes)[0].transpose(1, 2)


def _flash(of: Operands, window: int | None, mask: Visibility | None) -> Call:
    return functools.partial(flash_attention, *of.states, window, of.query.shape[3] ** -0.5)


def _cudnn(of: Operands, window: int | None, mask: Visibility | None) -> Call:
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)(_sdpa(of, window, mask))


def _sdpa(of: Operands, window: int | None, mask: Visibility | None) -> Call:
    queries = of.query.shape[2]  # one, that of a decoding step, sees every key
    options = {"is_causal": queries > 1} if window is None else {"attn_mask": visible(queries, window, of.query.device)}
    return functools.partial(functional.scaled_dot_product_attention, *of.states, **options)


def _flex_attention(of: Operands, window: int | None, mask: Visibility | None) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length = of.query.shape[2]

    def shown(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < (window or length))

    blocks = create_block_mask(shown, None, None, length, length, device=of.query.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(*of.states, block_mask=blocks)


def _authors(of: Operands, window: int | None, mask: Visibility | None, is_compiled: bool = False) -> Call:
    """Documents are a mask alone, as in the authors' code: whole rows are computed."""
    shown = visible(of.query.shape[2], window, of.query.device)
    if mask is not None and mask.sequence_ids is not None:
        numbers = mask.sequence_ids[0]
        shown = shown & (numbers[:, None] == numbers)
    attend = _compiled_chunk() if is_compiled else authors.attend_chunk
    pre, post = of.pre, of.post
    if pre is None or post is None:
        raise ValueError("The authors' formulation composes before the softmax and after it.")

    def call() -> Tensor:
        factors = authors.Factors.of(pre, post)  # less than 1 % of the time
        return authors.attend_in_chunks(*of.states, factors, shown, of.query.shape[3] ** -0.5, window, attend)

    return call


@functools.cache
def _compiled_chunk() -> Call:
    return torch.compile(authors.attend_chunk, dynamic=True)
