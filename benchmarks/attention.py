"""The operator alone, forward and backward, beside attention without composition.

    python -m benchmarks.attention                    # on a GPU, if there is one, in bfloat16 and as CUDA graphs
    python -m benchmarks.attention --device cpu --threads 1 2

Each of our implementations, attention over the same keys without composition (on a GPU FlashAttention 2 and cuDNN, else
SDPA), and "authors", our own PyTorch code after the equations of the paper. MiB is peak memory over what the operands
take, on GPUs only. Before one is timed, it is compared with the plain implementation in float64 on the same inputs, at
the timed heads and head dimension and a length that no tile divides.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache

from dcformer.compose_dcformer import update_cache
from dcformer.configuration_dcformer import DCFormerConfig
from dcformer.dcmha import composed_attention, implementations
from dcformer.modeling_dcformer import DCFormerAttention, DCFormerModel
from dcformer.types_dcformer import AttentionInputs, ComposeWeights, map_tensors
from dcformer.visibility_dcformer import Visibility

from . import authors
from .measure import Benchmark, Call, Case, Entry, Run, relative_error, run_command


GATE_LENGTH, GATE_WINDOW = 193, 48
# Root mean square of the error relative to that of the right values. Scores or weights in 16 bits lose up to 2 ** -6.
_OUTPUT_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
_GRADIENT_FACTOR = 3.0  # a product more, and sums of many terms that cancel


class Operands(NamedTuple):
    """
    Operands of one call of `composed_attention`, laid out in memory as a model's layer makes them: factors of a prompt
    as the projections leave them, key-wise ones of a decoding step as views of the cache's rows.
    """

    query: Tensor  # (batch, heads, queries, head_dim)
    key: Tensor  # (batch, heads, keys, head_dim)
    value: Tensor
    pre: ComposeWeights | None
    post: ComposeWeights | None

    def composed(self, **options: Any) -> Tensor:
        return composed_attention(*self, **options)

    @property
    def tensors(self) -> list[Tensor]:
        """The states, and all tensors of both compositions."""
        tensors = list(self[:3])
        for weights in self[3:]:
            map_tensors(weights, lambda tensor, _: tensors.append(tensor) or tensor)
        return tensors

    def leaves(self, with_gradients: bool = True, dtype: torch.dtype | None = None) -> Operands:
        """Copy the operands, laid out alike, as leaves that may require gradients, in another dtype if one is given."""

        def leaf(tensor: Tensor, _: str = "") -> Tensor:
            return tensor.detach().to(dtype or tensor.dtype).requires_grad_(with_gradients)

        return Operands(*map(leaf, self[:3]), *(map_tensors(weights, leaf) for weights in self[3:]))


@functools.lru_cache(maxsize=2)
@torch.no_grad()
def prompt_operands(
    heads: int, head_dim: int, length: int, device: torch.device, dtype: torch.dtype, batch: int = 1
) -> Operands:
    """Operands of a prompt of random hidden states, read at once."""
    attention, hidden_states, positions = _attention(heads, head_dim, batch, length, device, dtype)
    return Operands(*attention.project(hidden_states, positions))


@functools.lru_cache(maxsize=2)
@torch.no_grad()
def step_operands(heads: int, head_dim: int, keys: int, device: torch.device, dtype: torch.dtype) -> Operands:
    """Operands of a decoding step whose query sees `keys` keys in a dynamic cache, the last of them its own."""
    attention, hidden_states, (cos, sin) = _attention(heads, head_dim, 1, keys, device, dtype)
    cache = DynamicCache(config=attention.config)
    for part in (slice(None, -1), slice(-1, None)):
        query, *states = attention.project(hidden_states[:, part], (cos[:, part], sin[:, part]))
        cached = update_cache(cache, attention.layer_idx, *states)
    return Operands(query, *cached)


def _attention(
    heads: int, head_dim: int, batch: int, length: int, device: torch.device, dtype: torch.dtype
) -> tuple[DCFormerAttention, Tensor, tuple[Tensor, Tensor]]:
    """A layer whose factors are as large as in a trained one, so that errors in them show, with what it reads."""
    sizes = {"vocab_size": 1, "hidden_size": heads * head_dim, "intermediate_size": 1, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": heads, "max_position_embeddings": length, "sliding_window": None}
    torch.manual_seed(0)
    with device:
        model = DCFormerModel(DCFormerConfig(**sizes, bos_token_id=None, eos_token_id=None)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("low_rank_weight"):
            parameter.normal_(std=parameter.shape[2] ** -0.5)
        elif name.endswith("gate_weight"):
            parameter.normal_(std=0.1 * parameter.shape[0] ** -0.5)
    model = model.to(device, dtype)
    hidden_states = torch.randn(batch, length, heads * head_dim, generator=torch.Generator().manual_seed(0))
    hidden_states = hidden_states.to(device, dtype)
    positions = model.rotary_emb(hidden_states, torch.arange(length, device=device)[None])  # (1, length, rotary size)
    return model.layers[0].self_attn, hidden_states, positions


class Candidate(NamedTuple):
    """One way to compute attention."""

    name: str
    make: Callable[[Operands, int | None], Call]  # from operands and a window
    why_not: Callable[..., str | None] = lambda *_: None  # why it cannot run on operands and a window
    composes: bool = True  # otherwise only the states have gradients
    checked_in: torch.dtype | None = None  # another type than the run's, for what rounds more than ours may

    def gradient_call(self, of: Operands, window: int | None) -> Call:
        """Make a call of forward and backward; `of` are leaves."""
        tensors = of.tensors if self.composes else of[:3]
        forward, upstream = self.make(of, window), torch.randn_like(of.query)
        return lambda: torch.autograd.grad(forward(), tensors, upstream)


def gate(run: Run, candidate: Candidate, heads: int, channels: int, **options: Any) -> str | None:
    """Say why a candidate must not be timed: it cannot run, or is wrong. It is asked once in a run."""
    key = (candidate.name, heads, channels, *sorted(options.items()))
    if key not in run.problems:
        run.problems[key] = _problem(run, candidate, heads, channels, **options)
    return run.problems[key]


def _problem(
    run: Run, candidate: Candidate, *sizes: int, window: int | None = None, graded: bool = False, is_step: bool = False
) -> str | None:
    make = step_operands if is_step else prompt_operands
    dtype = candidate.checked_in or run.dtype
    of = make(*sizes, GATE_LENGTH, run.device, dtype).leaves(graded)
    of = of if candidate.composes else of._replace(pre=None, post=None)
    window = None if window is None else min(window, GATE_WINDOW)
    if (reason := candidate.why_not(of, window)) is not None:
        return f"not measured: {reason}"
    exact = of.leaves(graded, torch.float64)
    with torch.set_grad_enabled(graded):
        results = [candidate.make(of, window)()]
        expected = [exact.composed(sliding_window=window, implementation="plain")]
    if graded:
        upstream = torch.randn_like(results[0])
        results += torch.autograd.grad(results[0], of.tensors, upstream)
        expected += torch.autograd.grad(expected[0], exact.tensors, upstream.double())
    for index, pair in enumerate(zip(results, expected)):
        error, tolerance = relative_error(*pair), _OUTPUT_TOLERANCES[dtype] * (_GRADIENT_FACTOR if index else 1)
        if not error <= tolerance:  # NaN is not below anything
            what = f"gradient {index}" if index else "output"
            return f"{what} is wrong: relative error {error:.1e}, at most {tolerance:.0e} is right"
    return None


def our_candidates() -> list[Candidate]:
    """Every implementation of the operator's table, those first that are preferred."""
    return [_implementation(name) for name in reversed(implementations())]


def _implementation(name: str) -> Candidate:
    def make(of: Operands, window: int | None) -> Call:
        return functools.partial(of.composed, implementation=name, sliding_window=window)

    def why_not(of: Operands, window: int | None) -> str | None:
        mask = Visibility(of.query.shape[2], of.key.shape[2], sliding_window=window)
        return implementations()[name].why_not(AttentionInputs(*of, 1.0, mask))

    return Candidate(name, make, why_not)


def plain_candidates(device: torch.device, window: int | None) -> list[Candidate]:
    """Attention without composition of the same keys, the baseline first."""
    name, make = ("FlashAttention 2", _flash) if device.type == "cuda" else ("sdpa", _sdpa)
    base = Candidate(name if window is None else f"{name}, same window", make, composes=False)
    return [base, Candidate("cuDNN", _cudnn, composes=False)] if make is _flash and window is None else [base]


def flash_attention(query: Tensor, key: Tensor, value: Tensor, window: int | None, scaling: float) -> Tensor:
    """Causal attention on (batch, heads, length, head_dim) in 16 bits, by the FlashAttention 2 that torch ships."""
    is_causal = query.shape[2] > 1  # a decoding step's query sees every key that it is given, in a window too
    sizes = {"window_size_left": window - 1, "window_size_right": 0} if window is not None and is_causal else {}
    states = (tensor.transpose(1, 2) for tensor in (query, key, value))
    options = None, None, query.shape[2], key.shape[2], 0.0, is_causal, False
    return torch.ops.aten._flash_attention_forward(*states, *options, scale=scaling, **sizes)[0].transpose(1, 2)


def _flash(of: Operands, window: int | None) -> Call:
    return functools.partial(flash_attention, *of[:3], window, of.query.shape[3] ** -0.5)


def _cudnn(of: Operands, window: int | None) -> Call:
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)(_sdpa(of, window))


def _sdpa(of: Operands, window: int | None) -> Call:
    options: dict[str, Any] = {"is_causal": of.query.shape[2] > 1}  # a step's query sees every key
    if window is not None:
        positions = torch.arange(of.query.shape[2], device=of.query.device)
        age = positions[:, None] - positions
        options = {"attn_mask": (age >= 0) & (age < window)}
    return functools.partial(functional.scaled_dot_product_attention, *of[:3], **options)


def _authors(of: Operands, window: int | None) -> Call:
    """The authors' attention; its call also converts the factors, which is less than 1 % of the time."""
    return lambda: authors.attend_in_chunks(*of[:3], authors.Factors.of(of.pre, of.post), window)


AUTHORS = Candidate("authors", _authors, checked_in=torch.float32)  # it adds the identity to maps in 16 bits


class Shape(NamedTuple):
    """Shape of one comparison; window None for all keys."""

    heads: int
    channels: int
    length: int
    window: int | None = None
    batch: int = 1

    def __str__(self) -> str:
        mask = "global" if self.window is None else f"window {self.window}"
        return f"H {self.heads}, D {self.channels}, T {self.length}, {mask}, batch {self.batch}"


def shapes(run: Run) -> list[Shape]:
    """Shapes to compare, the most important first: on a GPU those of the 6.9B and 2.8B models, else tiny ones."""
    if run.is_quick:
        return [Shape(4, 16, 48), Shape(4, 16, 48, 16)]
    if run.device.type == "cpu":
        sizes = itertools.product((1024, 512, 2048), (None, 256), ((32, 80), (16, 64)))
        return [Shape(*heads, length, window) for length, window, heads in sizes]
    sizes = itertools.product((2048, 4096, 8192), (128, 80), (None, 256))
    single = [Shape(32, head_dim, length, window) for length, head_dim, window in sizes]
    return [*single[:8], Shape(32, 128, 2048, batch=4), Shape(32, 80, 2048, batch=4), *single[8:]]


def make_case(run: Run, shape: Shape, candidate: Candidate, way: str) -> Case | str:
    """A call of a candidate that passes the gate; on a GPU the memory of its gradients is measured too."""
    graded, figures = way == WAYS[1], {}
    problem = gate(run, candidate, shape.heads, shape.channels, window=shape.window, graded=graded)
    if problem is not None:
        return problem
    of = prompt_operands(*shape[:3], run.device, run.dtype, shape.batch)
    if not graded:
        return Case(torch.no_grad()(candidate.make(of, shape.window)))
    call = candidate.gradient_call(of.leaves(), shape.window)
    if run.device.type == "cuda":
        call()  # compiles
        torch.cuda.reset_peak_memory_stats(run.device)
        before = torch.cuda.memory_allocated(run.device)
        call()
        figures["MiB"] = (torch.cuda.max_memory_allocated(run.device) - before) / 2**20
    return Case(call, figures=figures)


def compare(run: Run, shape: Shape) -> None:
    """Time all candidates at one shape: forward, then forward and backward."""
    plain = plain_candidates(run.device, shape.window)
    for way in WAYS:
        entries = [  # torch's failures are not ours
            Entry(each.name, functools.partial(make_case, run, shape, each, way), is_ours=each.composes)
            for each in (*plain, *our_candidates(), AUTHORS)
        ]
        ratios = {name: f"/ {name}" for name in (plain[0].name, AUTHORS.name)}
        run.compare(f"{way}: {shape}", entries, ratios, in_turns=True)


WAYS = "forward", "forward and backward"
_BASE, _CHECK = "attention without composition of the same keys", "plain PyTorch in float64"
REGISTRY = (Benchmark("attention", "forward, then backward too", _BASE, _CHECK, shapes, compare),)


if __name__ == "__main__":
    sys.exit(run_command(__doc__, REGISTRY))
