"""Gradients of composed attention on GPUs, in Triton's interpreter, against autograd of the float64 reference."""

import math
from typing import NamedTuple

import pytest
import torch
from operator_calls import composition_of, mask_of, poisoned_memory
from operator_inputs import BRANCHES, Inputs, make_inputs, value_and_gradients

from dcformer.dcmha import composed_attention_reference
from dcformer.dcmha_mask import Visibility
from dcformer.dcmha_reference import hidden_pairs, reference_compose


pytest.importorskip("triton")

from dcformer.ops.arguments import Composition, Mask
from dcformer.ops.backward import _bytes_per_column, _Workspace, composed_backward
from dcformer.ops.config import BACKWARD, TileConfig
from dcformer.ops.forward import composed_forward
from dcformer.ops.plan import Problem, plan_chunks


SMALL_TILES = BACKWARD._replace(block_rows=32, block_keys=32, compose_rows=16)
QUERY_WISE, KEY_WISE = ("query_low_rank", "query_gate"), ("key_low_rank", "key_gate")
DYNAMIC = QUERY_WISE + KEY_WISE


class Case(NamedTuple):
    """Sizes of inputs, options of their mask, and of the call."""

    shape: dict
    mask: dict = {}
    options: dict = {}


def padding(*hidden: int, keys: int) -> torch.Tensor:
    """(batch, key), with so many keys of each row hidden on the left."""
    return torch.arange(keys) >= torch.tensor(hidden)[:, None]


def dense(queries: int, keys: int) -> torch.Tensor:
    return torch.rand(1, 1, queries, keys, generator=torch.Generator().manual_seed(3)) > 0.4


CASES = {
    "B1-T63-H2-D24-tiles-of-64": Case(
        {"queries": 63, "channels": 24, "rank": 1, "pre": ("static", "query_low_rank"), "post": KEY_WISE},
        options={"config": None},
    ),
    "B2-T17-H3-D16-left-padding": Case(
        {"batch": 2, "heads": 3, "channels": 16, "rank": 1, "pre": DYNAMIC, "post": QUERY_WISE},
        {"padding": padding(0, 5, keys=17)},
    ),
    "B1-T40-H2-D20-win9-one-key-head-two-chunks": Case(
        {"queries": 40, "key_value_heads": 1, "channels": 20, "rank": 1, "pre": DYNAMIC, "post": DYNAMIC},
        {"sliding_window": 9},
        {"workspace_bytes": 1},
    ),
    "B2-T33-H2-D16-chunk-by-chunk": Case(
        {"batch": 2, "queries": 33, "channels": 16, "pre": ("query_gate",), "post": ("static", "key_gate")},
        options={"workspace_bytes": 1},
    ),
    "B1-T17-S70-H2-D16-win20": Case(
        {"queries": 17, "keys": 70, "channels": 16, "pre": KEY_WISE, "post": KEY_WISE}, {"sliding_window": 20}
    ),
    "B1-T31-S21-H2-D16-visible": Case({"queries": 31, "keys": 21, "channels": 16}, {"dense": dense(31, 21)}),
    "B1-T35-S40-H2-D16-win6-bidirectional": Case(
        {"queries": 35, "keys": 40, "channels": 16, "rank": 1, "pre": KEY_WISE, "post": DYNAMIC},
        {"sliding_window": 6, "is_causal": False},
    ),
    "B1-T63-H2-D16-packed-with-a-document-that-comes-back": Case(
        {"queries": 63, "channels": 16, "rank": 1, "pre": DYNAMIC, "post": KEY_WISE},
        {"sequence_ids": torch.tensor([[0] * 20 + [1] * 13 + [0] * 5 + [2] * 25])},
    ),
    "B1-T17-H6-D16-V8-groups2-rank1": Case(
        {
            "heads": 6,
            "key_value_heads": 3,
            "groups": 2,
            "rank": 1,
            "channels": 16,
            "value_channels": 8,
            "pre": ("static", *KEY_WISE),
            "post": ("static", "query_low_rank"),
        }
    ),
    "B1-T17-H9-D16-query-wise": Case({"heads": 9, "channels": 16, "pre": QUERY_WISE, "post": ("query_gate",)}),
    "rank3-before-only": Case({"rank": 3, "post": None}),
    "rank4-after-only": Case({"rank": 4, "pre": None, "post": DYNAMIC}),
    "neither": Case({"pre": None, "post": None}),
    "no-branches-before-static-after": Case({"pre": (), "post": ("static",)}),
    "static-before-query-gate-after": Case({"pre": ("static",), "post": ("query_gate",)}),
    "query-low-rank-before-key-gate-after": Case({"pre": ("query_low_rank",), "post": ("key_gate",)}),
    "key-low-rank-and-gates": Case({"pre": ("key_low_rank", "query_gate"), "post": ("key_gate", "query_gate")}),
}


def setting(case: Case) -> tuple[Inputs, Visibility]:
    inputs = make_inputs(**{"batch": 1, "heads": 2, "queries": 17, **case.shape})
    mask = {"is_causal": True, "sliding_window": None, **case.mask}
    return inputs, Visibility(inputs.query.shape[2], inputs.key.shape[2], **mask)


def log_sums_of(inputs: Inputs, seen: Visibility) -> torch.Tensor:
    """What the forward pass returns beside its output, from the float64 reference."""
    keys = inputs.key.repeat_interleave(inputs.query.shape[1] // inputs.key.shape[1], dim=1)
    scores = reference_compose(inputs.query @ keys.mT * inputs.query.shape[3] ** -0.5, inputs.pre)
    sums = scores.masked_fill(hidden_pairs(seen, scores.device), -torch.inf).logsumexp(-1) / math.log(2)
    return sums.masked_fill(sums == -torch.inf, torch.inf).float()


def output_gradient_of(inputs: Inputs) -> torch.Tensor:
    """As `value_and_gradients` draws it."""
    shape = (*inputs.query.shape[:3], inputs.value.shape[3])
    return torch.randn(shape, generator=torch.Generator().manual_seed(9)).to(inputs.query.dtype)


def gradients_of(inputs: Inputs, seen: Visibility, log_sums: torch.Tensor, **options) -> dict[str, torch.Tensor]:
    """Gradients by the names of `Inputs.tensors`."""
    options = {"workspace_bytes": 2**28, "config": SMALL_TILES, **options}
    with poisoned_memory():
        query, key, value, *compositions = composed_backward(
            output_gradient_of(inputs),
            *inputs[:3],
            composition_of(inputs.pre),
            composition_of(inputs.post),
            log_sums,
            scaling=inputs.query.shape[3] ** -0.5,
            mask=mask_of(seen),
            **options,
        )
    named = {"query": query, "key": key, "value": value}
    for name, gradients in zip(("pre", "post"), compositions):
        assert (gradients is None) == (getattr(inputs, name) is None)
        if gradients is not None:
            parts = {"static": gradients.static, "query": gradients.query, "key": gradients.key}
            named.update({f"{name}.{part}": tensor for part, tensor in parts.items()})
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def largest_errors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Of every gradient, relative to its largest entry."""
    assert found.keys() == expected.keys()
    return {
        name: ((found[name].double() - expected[name]).abs().max() / expected[name].abs().max()).item()
        for name in expected
    }


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_equal_autograd_of_the_reference(case):
    inputs, seen = setting(case)
    _, expected = value_and_gradients(
        composed_attention_reference, inputs, scaling=inputs.query.shape[3] ** -0.5, attention_mask=seen
    )
    log_sums = log_sums_of(inputs, seen)
    found = gradients_of(inputs.to(torch.float32), seen, log_sums, **case.options)
    errors = largest_errors(found, expected)
    # Rounding of float32 sums, of which a static map's add up 2000 products that nearly cancel.
    assert max(errors.values()) <= 5e-6, errors


def test_half_precision_gradients_keep_their_type_and_are_close():
    inputs, seen = setting(Case({"channels": 16}))
    inputs = inputs.to(torch.float16).to(torch.float64)
    _, expected = value_and_gradients(
        composed_attention_reference, inputs, scaling=inputs.query.shape[3] ** -0.5, attention_mask=seen
    )
    half = inputs.to(torch.float16)
    _, log_sums = composed_forward(
        *half[:3],
        composition_of(half.pre),
        composition_of(half.post),
        scaling=half.query.shape[3] ** -0.5,
        mask=mask_of(seen),
        workspace_bytes=2**28,
        config=TileConfig(block_rows=32, block_keys=32, compose_rows=16),
    )
    found = gradients_of(half, seen, log_sums)
    assert all(tensor.dtype == torch.float16 for tensor in found.values())
    errors = largest_errors(found, expected)
    # Scores, weights and their gradients are rounded to 11 bits, 5e-4 each, and differences of them are taken.
    assert max(errors.values()) <= 5e-3, errors


def test_two_runs_give_the_same_bits():
    inputs, seen = setting(Case({"queries": 33, "channels": 16, "pre": ("key_gate",), "post": None}))
    log_sums = log_sums_of(inputs, seen)
    first, second = (gradients_of(inputs.to(torch.float32), seen, log_sums, workspace_bytes=1) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("window", [None, 256], ids=["global", "win256"])
@pytest.mark.parametrize("branches", [DYNAMIC, BRANCHES], ids=["dynamic", "static"])
def test_the_workspace_stays_within_its_bound(branches, window):
    def meta(*shape):
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    heads, length = 32, 4096
    static = meta(1, heads, heads) if "static" in branches else None
    weights = Composition(meta(2, heads, length, 5), meta(2, heads, length, 5), static)
    query, mask, config, bound = meta(2, heads, length, 128), Mask(sliding_window=window), BACKWARD, 2**28
    problem = Problem.of(query, query, weights, weights, mask, query)
    chunks = list(
        plan_chunks(
            2,
            length,
            length,
            mask,
            heads=heads,
            bytes_per_column=_bytes_per_column(problem, config, torch.float16, torch.bfloat16),
            maps=4,
            workspace_bytes=bound,
            block_rows=config.block_rows,
            block_keys=config.block_keys,
        )
    )
    for chunk in chunks:
        workspace = _Workspace.of(problem, chunk, config, query, torch.float16)
        # What lies in the place of something else counts once.
        tensors = {id(tensor): tensor for tensor in workspace}.values()
        assert sum(tensor.numel() * tensor.itemsize for tensor in tensors) <= bound
    assert len(chunks) > 1
