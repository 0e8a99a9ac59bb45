"""Prefill and training in Triton against the reference in float64, in Triton's interpreter where there is no GPU."""

import functools
from typing import Any, NamedTuple

import pytest
import torch
from operator_inputs import Inputs, attend, make_inputs, value_and_gradients
from reference import composed_attention_reference

from dcformer import Visibility, set_workspace_bytes
from dcformer.kernels import plan


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QUERY_WISE, KEY_WISE = ("query_low_rank", "query_gate"), ("key_low_rank", "key_gate")
DYNAMIC = QUERY_WISE + KEY_WISE
# Relative to the largest number; the first of sums in another order, the second of scores and weights of 11 bits.
TOLERANCES = {torch.float32: (2e-6, 3e-6), torch.float16: (3e-3, 6e-3)}


class Case(NamedTuple):
    """Sizes of the inputs beside batch 1 and 2 heads of 16 channels, the mask, and the memory that there is."""

    shape: dict[str, Any]
    mask: dict[str, Any] = {}
    workspace_bytes: int | None = None


def padding(*hidden: int, keys: int) -> torch.Tensor:
    """(batch, key), with so many keys of each row hidden, on the left or, below 0, on the right."""
    keys_of_row = torch.arange(keys)
    rows = [keys_of_row >= number if number >= 0 else keys_of_row < keys + number for number in hidden]
    return torch.stack(rows)


def dense(rows: int, queries: int, keys: int, adds: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    shown = torch.rand(rows, 1, queries, keys, generator=generator) > 0.4
    if not adds:
        return shown
    added = torch.randn(shown.shape, generator=generator)
    return torch.where(shown, added, torch.finfo(torch.float32).min)


def documents(*lengths: int, numbers: list[int] | None = None) -> torch.Tensor:
    numbers = numbers or list(range(len(lengths)))
    return torch.tensor(numbers).repeat_interleave(torch.tensor(lengths))[None]


CASES = {
    "T63": Case({"queries": 63}),
    "T1": Case({"queries": 1}),
    "T70-one-query-at-a-time": Case({"queries": 70, "rank": 1, "pre": DYNAMIC, "post": DYNAMIC}),
    "T111-D80-win20": Case({"queries": 111, "channels": 80, "rank": 1}, {"sliding_window": 20}),
    "T80-win1": Case({"queries": 80}, {"sliding_window": 1}),
    "T40-win64": Case({"queries": 40}, {"sliding_window": 64}),
    "T17-S90-win40": Case({"queries": 17, "keys": 90, "pre": KEY_WISE, "post": KEY_WISE}, {"sliding_window": 40}),
    "T90-S31": Case({"queries": 90, "keys": 31, "pre": DYNAMIC}),
    "T33-S70-bidirectional": Case({"queries": 33, "keys": 70}, {"is_causal": False}),
    "T95-win6-bidirectional": Case({"queries": 95, "post": DYNAMIC}, {"sliding_window": 6, "is_causal": False}),
    "B2-T40-left-and-right-padding": Case({"batch": 2, "queries": 40}, {"padding": padding(13, -9, keys=40)}),
    "B2-T70-padding-for-both-win30": Case(
        {"batch": 2, "queries": 70}, {"padding": padding(20, keys=70), "sliding_window": 30}
    ),
    "T70-packed": Case({"queries": 70}, {"sequence_ids": documents(30, 1, 39)}),
    "B2-T70-packed-win10-a-document-comes-back": Case(
        {"batch": 2, "queries": 70},
        {"sequence_ids": documents(20, 13, 12, 25, numbers=[0, 1, 0, 2]), "sliding_window": 10},
    ),
    "T31-S21-boolean": Case({"queries": 31, "keys": 21}, {"dense": dense(1, 31, 21)}),
    "B2-T21-S31-added": Case({"batch": 2, "queries": 21, "keys": 31}, {"dense": dense(2, 21, 31, adds=True)}),
    "T70-chunks": Case({"queries": 150, "pre": DYNAMIC}, {"sliding_window": 30}, workspace_bytes=1),
    "B2-T70-chunks": Case({"batch": 2, "queries": 70, "rank": 1}, workspace_bytes=1),
    "H6-kv3-groups2-V8-rank1": Case(
        {"heads": 6, "key_value_heads": 3, "groups": 2, "rank": 1, "queries": 40, "value_channels": 8}
    ),
    "H2-groups2": Case({"queries": 20, "groups": 2, "pre": DYNAMIC, "post": DYNAMIC}),
    "H9-query-wise": Case({"heads": 9, "queries": 40, "pre": QUERY_WISE, "post": QUERY_WISE}),
    "H4-kv1": Case({"heads": 4, "key_value_heads": 1, "queries": 40, "pre": KEY_WISE, "post": DYNAMIC}),
    "H20-D20-win9": Case(
        {"heads": 20, "queries": 70, "channels": 20, "pre": DYNAMIC, "post": DYNAMIC}, {"sliding_window": 9}
    ),
    "rank3-before": Case({"queries": 20, "rank": 3, "post": None}),
    "rank4-after": Case({"queries": 20, "rank": 4, "pre": None}),
    "neither": Case({"queries": 20, "pre": None, "post": None}),
    "no-branches-and-static": Case({"queries": 20, "pre": (), "post": ("static",)}),
    "static-and-query-gate": Case({"queries": 20, "pre": ("static",), "post": ("query_gate",), "groups": 2}),
    "query-low-rank-and-key-gate": Case({"queries": 20, "pre": ("query_low_rank",), "post": ("key_gate",)}),
    "key-low-rank-and-gates": Case({"queries": 20, "pre": ("key_low_rank", "query_gate"), "post": ("key_gate",)}),
}
IN_SIXTEEN_BITS = ("T63", "T111-D80-win20", "T70-packed", "H6-kv3-groups2-V8-rank1", "rank4-after")


def inputs_of(case: Case, dtype: torch.dtype) -> tuple[Inputs, Visibility]:
    shape = {"batch": 1, "heads": 2, "channels": 16, **case.shape}
    inputs = make_inputs(**shape).map(lambda tensor: tensor.to(DEVICE, dtype))
    return inputs, Visibility(inputs.query.shape[2], inputs.key.shape[2], **case.mask).to(DEVICE)


def compare(inputs: Inputs, mask: Visibility) -> None:
    """Hold output and all gradients to the reference, which sees the same rounded inputs."""
    dtype = inputs.query.dtype
    found, gradients = value_and_gradients(functools.partial(attend, "triton"), inputs, attention_mask=mask)
    expected, expected_gradients = value_and_gradients(
        composed_attention_reference, inputs.to(torch.float64), attention_mask=mask
    )
    assert {found.dtype, *(gradient.dtype for gradient in gradients.values())} == {dtype}
    of_output, of_gradients = TOLERANCES[dtype]
    assert (found - expected).abs().max() <= of_output * expected.abs().max()
    errors = {name: (gradients[name] - expected_gradients[name]).abs().max() for name in gradients}
    largest = {name: of_gradients * gradient.abs().max() for name, gradient in expected_gradients.items()}
    assert all(errors[name] <= largest[name] for name in errors), errors


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in CASES] + [(name, torch.float16) for name in IN_SIXTEEN_BITS],
    ids=str,
)
def test_output_and_gradients_equal_the_reference(name, dtype, monkeypatch):
    case = CASES[name]
    if name.endswith("one-query-at-a-time"):
        monkeypatch.setattr(plan, "QUERIES_AT_ONCE", 1)
    try:
        set_workspace_bytes(case.workspace_bytes)
        compare(*inputs_of(case, dtype))
    finally:
        set_workspace_bytes(None)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("window", [None, 260])
def test_large_tiles_equal_the_reference(window):
    case = Case({"queries": 300, "rank": 1, "pre": DYNAMIC, "post": DYNAMIC}, {"sliding_window": window})
    inputs, mask = inputs_of(case, torch.float16)
    compare(inputs, mask)


def test_queries_that_see_no_key_get_zeros_and_no_gradient():
    inputs, mask = inputs_of(Case({"queries": 20}, {"padding": padding(9, keys=20)}), torch.float32)
    output, gradients = value_and_gradients(functools.partial(attend, "triton"), inputs, attention_mask=mask)
    assert (output[:, :, :9] == 0).all() and (gradients["query"][:, :, :9] == 0).all()
    assert (gradients["key"][:, :, :9] == 0).all() and (gradients["post.query"][:, :, :9] == 0).all()


def test_two_runs_give_the_same_bits():
    inputs, mask = inputs_of(Case({"queries": 70}), torch.float32)
    runs = [value_and_gradients(functools.partial(attend, "triton"), inputs, attention_mask=mask) for _ in range(2)]
    assert torch.equal(runs[0][0], runs[1][0])
    assert all(torch.equal(gradient, runs[1][1][name]) for name, gradient in runs[0][1].items())


def test_any_strides_give_the_same():
    inputs, mask = inputs_of(Case({"queries": 20}), torch.float32)
    strided = inputs.map(lambda tensor: tensor.mT.contiguous().mT)
    assert torch.equal(attend("triton", *inputs, attention_mask=mask), attend("triton", *strided, attention_mask=mask))


def test_the_workspace_is_bounded():
    with pytest.raises(ValueError, match="at least 1 byte, got 0"):
        set_workspace_bytes(0)
    inputs, mask = inputs_of(Case({"batch": 3, "queries": 4096, "heads": 4}), torch.float32)
    call = plan.Call.of(*inputs, mask, 1.0)
    sizes, bytes_per_column = plan.Sizes.of(call), 4 * 4
    chunks = list(plan.plan_chunks(call, sizes, bytes_per_column, 2**24))
    assert max(chunk.number * chunk.rows * chunk.columns * bytes_per_column for chunk in chunks) <= 2**24
    covered = {(row, chunk.start) for chunk in chunks for row in range(chunk.batch, chunk.batch + chunk.number)}
    assert {row for row, _ in covered} == {0, 1, 2} and min(start for _, start in covered) == 0
