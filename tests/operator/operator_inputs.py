"""Inputs, masks and cases for the tests of composed attention, and the implementations that are held to them."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from reference import as_visibility, composed_attention_reference
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dcformer.dcmha import BACKENDS, compose, composed_attention
from dcformer.kernels.cpu import build
from dcformer.kernels.cpu import cpu_backend as native
from dcformer.types_dcformer import AttentionInputs, ComposeSide, ComposeWeights, map_tensors
from dcformer.visibility_dcformer import Visibility


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Of the C++ code, those that this CPU executes; the widest comes first.
INSTRUCTION_SETS = [*itertools.dropwhile(lambda name: name != native._instruction_set(), build.instruction_sets())]
# The implementations for every device, each with the number types in which it is held to the reference: the widest
# first, in which it is asked whether it takes a case.
FORMS = {
    "plain": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "native": (torch.float32, torch.bfloat16, torch.float16),
}
# As tests are run with them, those of C++ once for each instruction set.
VARIANTS = [name for name in FORMS if name != "native"] + [f"native-{name}" for name in INSTRUCTION_SETS]
# Of outputs and of gradients, relative to the largest number: sums in another order, once more in gradients; in 16 bits
# scores and weights of 11 bits.
TOLERANCES = {torch.float64: (1e-13, 1e-12), torch.float32: (3e-6, 2e-5), torch.float16: (3e-3, 6e-3)}
BRANCHES = ("static", "query_low_rank", "query_gate", "key_low_rank", "key_gate")


class Inputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    pre: ComposeWeights | None
    post: ComposeWeights | None

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its name, such as `pre.query`."""
        named = {"query": self.query, "key": self.key, "value": self.value}
        for stage in ("pre", "post"):
            map_tensors(
                getattr(self, stage), lambda tensor, name, stage=stage: named.setdefault(f"{stage}.{name}", tensor)
            )
        return named

    def map(self, function: Callable[[Tensor], Tensor]) -> "Inputs":
        """The same structure with `function` applied to every tensor."""
        pre, post = (map_tensors(stage, lambda tensor, _: function(tensor)) for stage in (self.pre, self.post))
        return Inputs(function(self.query), function(self.key), function(self.value), pre, post)

    def to(self, dtype: torch.dtype) -> "Inputs":
        return self.map(lambda tensor: tensor.to(dtype))

    def leaves(self) -> "Inputs":
        """Copies that ask for gradients."""
        return self.map(lambda tensor: tensor.detach().clone().requires_grad_())


def make_weights(*, batch=2, heads=4, queries=20, keys=None, rank=2, groups=1, branches=BRANCHES, seed=0):
    """Random float64 weights of one composition with these branches switched on."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    sides = []
    for name, length in (("query", queries), ("key", queries if keys is None else keys)):
        w1 = w2 = gate = None
        if f"{name}_low_rank" in branches:
            w1, w2 = normal(batch, heads, length, rank), heads**-0.5 * normal(batch, heads, length, rank)
        if f"{name}_gate" in branches:
            gate = normal(batch, heads, length).tanh()
        sides.append(None if w1 is None and gate is None else ComposeSide(w1, w2, gate))
    static = 0.3 * normal(groups, heads // groups, heads // groups) if "static" in branches else None
    return ComposeWeights(*sides, static, groups)


def make_inputs(
    *, key_value_heads=None, channels=3, value_channels=None, pre=BRANCHES, post=BRANCHES, seed=0, **sizes
) -> Inputs:
    """
    Random float64 inputs; `pre` and `post` name the branches of each composition, None leaves it out; `sizes` are as of
    `make_weights`.
    """
    generator = torch.Generator().manual_seed(1000 + seed)
    sizes = {"batch": 2, "heads": 4, "queries": 20, **sizes}
    batch, heads, queries, keys = (sizes.get(name) for name in ("batch", "heads", "queries", "keys"))
    states = (batch, key_value_heads or heads, queries if keys is None else keys)
    query, key, value = (
        torch.randn(*shape, dtype=torch.float64, generator=generator)
        for shape in ((batch, heads, queries, channels), (*states, channels), (*states, value_channels or channels))
    )
    weights = (
        None if branches is None else make_weights(**sizes, branches=branches, seed=number + seed)
        for branches, number in ((pre, 2000), (post, 3000))
    )
    return Inputs(query, key, value, *weights)


def sixteen_bit_attention(inputs: Inputs, visible: Tensor) -> Tensor:
    """What a plain eager implementation computes in 16 bit, as the authors do: the softmax alone is in float32."""
    query, key, value, pre, post = inputs
    scores = compose(query @ key.mT * query.shape[-1] ** -0.5, pre)
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    weights = scores.float().softmax(-1).to(query.dtype)
    return compose(weights, post).masked_fill(~visible, 0.0) @ value


class Case(NamedTuple):
    """Shapes, options and mask of one call; the mask is made from (batch, heads, queries, keys)."""

    shape: dict = {}
    options: dict = {}
    mask: Callable[[int, int, int, int], Tensor | Visibility] | None = None

    def build(self) -> tuple[Inputs, dict]:
        inputs = make_inputs(**self.shape)
        options = dict(self.options)
        if self.mask is not None:
            options["attention_mask"] = self.mask(*inputs.query.shape[:3], inputs.key.shape[2])
        return inputs, options


def left_padding(batch: int, heads: int, queries: int, keys: int) -> Tensor:
    mask = torch.ones(batch, keys, dtype=torch.long)
    mask[0, :4] = 0
    return mask


def right_padding(*shape: int) -> Tensor:
    return left_padding(*shape).flip(1)


def boolean_mask(batch: int, heads: int, queries: int, keys: int) -> Tensor:
    """A different mask for each batch row, the same for all heads."""
    return torch.rand(batch, 1, queries, keys, generator=torch.Generator().manual_seed(5)) > 0.4


def shared_boolean_mask(batch: int, *shape: int) -> Tensor:
    return boolean_mask(1, *shape)


def float_mask(batch: int, heads: int, queries: int, keys: int) -> Tensor:
    """Finite additions, float32 minimum and -inf side by side."""
    generator = torch.Generator().manual_seed(7)
    mask = torch.randn(batch, 1, queries, keys, generator=generator)
    draw = torch.rand(batch, 1, queries, keys, generator=generator)
    return mask.masked_fill(draw < 0.2, torch.finfo(torch.float32).min).masked_fill(draw > 0.8, -torch.inf)


def per_head(mask: Callable) -> Callable:
    """The maker of a mask that differs from head to head."""
    return lambda batch, heads, *lengths: mask(batch * heads, 1, *lengths).view(batch, heads, *lengths)


def documents(batch: int, heads: int, queries: int, keys: int) -> Visibility:
    """Two documents in a row, which end elsewhere in every row."""
    ends = 4 + 3 * torch.arange(batch)[:, None]
    return Visibility(queries, keys, sequence_ids=(torch.arange(keys) >= ends).long())


def document_that_comes_back(batch: int, heads: int, queries: int, keys: int) -> Visibility:
    ids = torch.tensor([0, 1, 0, 2]).repeat_interleave(torch.tensor([20, 13, 12, keys - 45]))
    return Visibility(queries, keys, sliding_window=10, sequence_ids=ids[None])


def both(*branches: str) -> dict:
    return {"pre": branches, "post": branches}


QUERY_WISE, KEY_WISE = ("query_low_rank", "query_gate"), ("key_low_rank", "key_gate")
DYNAMIC = QUERY_WISE + KEY_WISE
# A chunk size is one of "plain"; Triton has all of these in one chunk, but for those with a workspace of one block.
CASES = {
    "causal": Case(),
    "window_1": Case(options={"sliding_window": 1}),
    "window_beyond_the_length": Case(options={"sliding_window": 50}),
    "bidirectional_window_5": Case({"post": DYNAMIC}, {"is_causal": False, "sliding_window": 5}),
    "fewer_queries_than_keys_window_5": Case({"queries": 17, "keys": 29}, {"sliding_window": 5}),
    "more_queries_than_keys": Case({"queries": 24, "keys": 15, "pre": DYNAMIC}, {"chunk_size": 7}),
    "left_padding": Case({"batch": 3}, {"sliding_window": 9}, left_padding),
    "right_padding_bidirectional": Case({"keys": 27}, {"is_causal": False}, right_padding),
    "boolean_mask": Case(options={"chunk_size": 7}, mask=boolean_mask),
    "boolean_mask_for_all_rows": Case(options={"sliding_window": 9}, mask=shared_boolean_mask),
    "boolean_mask_per_head": Case(mask=per_head(boolean_mask)),
    "float_mask": Case({"queries": 17, "keys": 29}, {"is_causal": False, "chunk_size": 7}, float_mask),
    "float_mask_per_head_window_5": Case(options={"sliding_window": 5}, mask=per_head(float_mask)),
    "documents": Case(options={"chunk_size": 7}, mask=documents),
    "document_that_comes_back_window_10": Case({"queries": 70, "post": KEY_WISE}, mask=document_that_comes_back),
    "multi_query_scaling": Case({"key_value_heads": 1, "pre": KEY_WISE}, {"sliding_window": 5, "scaling": 0.3}),
    "two_groups_grouped_query_wide_values": Case(
        {"heads": 6, "key_value_heads": 3, "groups": 2, "rank": 1, "value_channels": 8}
    ),
    "rank_3": Case({"rank": 3, "post": None}),
    "rank_4": Case({"rank": 4, "pre": None}),
    "rank_7": Case({"rank": 7, "queries": 9, "keys": 70}),
    "one_head": Case({"heads": 1}),
    "nine_heads_query_wise": Case({"heads": 9, **both(*QUERY_WISE)}),
    "twenty_heads_window_9": Case({"batch": 1, "heads": 20, "queries": 70, **both(*DYNAMIC)}, {"sliding_window": 9}),
    "groups_of_one_head": Case({"groups": 4, **both(*DYNAMIC)}),
    "neither": Case({"pre": None, "post": None}, {"sliding_window": 5}),
    "no_branches_and_static": Case({"pre": (), "post": ("static",)}),
    "static_and_query_gate": Case({"pre": ("static",), "post": ("query_gate",), "groups": 2}),
    "key_wise_only": Case(both(*KEY_WISE)),
    "query_low_rank_and_key_gate": Case({"pre": ("query_low_rank",), "post": ("key_gate",)}),
    "key_low_rank_and_gates": Case({"pre": ("key_low_rank", "query_gate"), "post": ("key_gate",)}),
    "one_key": Case({"queries": 1}),
    "one_query_left_padding": Case({"queries": 1, "keys": 29}, mask=left_padding),
    "one_query_float_mask": Case({"queries": 1, "keys": 29}, {"is_causal": False}, float_mask),
    "one_query_grouped_query": Case({"queries": 1, "keys": 29, "heads": 6, "key_value_heads": 3, "groups": 2}),
    "one_query_static_only": Case({"queries": 1, "keys": 29, **both("static")}),
    "one_query_query_wise_before_key_wise_after": Case({"queries": 1, "keys": 29, "pre": QUERY_WISE, "post": KEY_WISE}),
    "five_queries": Case({"queries": 5, "keys": 29, "key_value_heads": 2}, mask=left_padding),
    "length_63": Case({"queries": 63}, {"chunk_size": 16}),
    "length_111_channels_80_window_20": Case(
        {"batch": 1, "queries": 111, "channels": 80, "rank": 1}, {"chunk_size": 10, "sliding_window": 20}
    ),
    # Windows that end at a tile's edge, and between those of a tile for some of a block of queries.
    "length_230_window_98": Case({"batch": 1, "heads": 2, "queries": 230, "pre": DYNAMIC}, {"sliding_window": 98}),
    "length_230_bidirectional_window_98": Case(
        {"batch": 1, "heads": 2, "queries": 230, "post": ("key_gate",)}, {"sliding_window": 98, "is_causal": False}
    ),
    "chunks_of_1": Case({"queries": 16}, {"chunk_size": 1, "sliding_window": 3}),
}


@contextlib.contextmanager
def library_of(instruction_set: str) -> Iterator[str]:
    """The C++ code is that of one instruction set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_instruction_set", lambda: instruction_set)
        patch.setattr(native, "_library", functools.cache(native._library.__wrapped__))
        yield instruction_set


def supports(form: str, case: Case) -> bool:
    """Whether an implementation computes a case in the first of its number types."""
    inputs, options = case.build()
    form = form.partition("-")[0]
    dtype = FORMS.get(form, (torch.float32,))[0]
    inputs = inputs.map(lambda tensor: tensor.to(DEVICE if form == "triton" else "cpu", dtype))
    band = (options.get("is_causal", True), options.get("sliding_window"))
    mask = as_visibility(options.get("attention_mask"), inputs.query.shape[2], inputs.key.shape[2], *band)
    return BACKENDS[form].why_not(AttentionInputs(*inputs, 1.0, mask)) is None


def largest_error(actual: Tensor, expected: Tensor) -> float:
    """The largest error, relative to the largest number that is expected."""
    return float((actual.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def hold_to_the_reference(form: str, inputs: Inputs, dtype: torch.dtype, **options) -> None:
    """Compare output and all gradients for inputs that were rounded to a number type."""
    inputs = inputs.to(dtype)
    output, gradients = value_and_gradients(functools.partial(attend, form), inputs, **options)
    assert {output.dtype, *(gradient.dtype for gradient in gradients.values())} == {dtype}
    options.pop("chunk_size", None)
    exact = inputs.to(torch.float64)
    expected, expected_gradients = value_and_gradients(composed_attention_reference, exact, **options)
    of_output, of_gradients = TOLERANCES[dtype]
    assert largest_error(output, expected) <= of_output
    errors = {name: largest_error(gradients[name], expected_gradients[name]) for name in gradients}
    assert all(error <= of_gradients for error in errors.values()), errors  # `max` may pass over NaN


def hold_errors_to_those_of_pytorch(inputs: Inputs, **options) -> None:
    """Errors of the kernels' output and gradients, relative to the largest number, at most twice those of PyTorch."""
    results = {}
    for name, operands in (("exact", inputs.to(torch.float64)), ("plain", inputs), ("triton", inputs)):
        form = "triton" if name == "triton" else "plain"
        output, gradients = value_and_gradients(functools.partial(attend, form), operands, **options)
        results[name] = {"output": output, **gradients}
    for key, exact in results["exact"].items():
        errors = [largest_error(results[name][key], exact) for name in ("plain", "triton")]
        # Where PyTorch happens to be exact, one rounding of the largest number is allowed.
        assert errors[1] <= 2 * errors[0] + torch.finfo(inputs.query.dtype).eps, (key, errors)


def attend(form: str, *arguments, **options) -> Tensor:
    """`composed_attention` in one of its implementations, whatever it would choose itself."""
    return composed_attention(*arguments, implementation=form, **options)


def value_and_gradients(function, inputs: Inputs, **options) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of `function` and the gradients of all inputs for one fixed random output gradient."""
    leaves = inputs.leaves()
    output = function(*leaves, **options)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output)
    named = leaves.tensors()
    return output.detach(), dict(zip(named, torch.autograd.grad(output, list(named.values()), cotangent)))


class LargestMemory(TorchDispatchMode):
    """The most bytes that tensors made by torch's operators take at once."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for storage in {tensor.untyped_storage() for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)}:
            self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: pair for key, pair in self.alive.items() if not pair[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return result
