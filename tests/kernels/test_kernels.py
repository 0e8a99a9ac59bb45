"""Prefill and training in Triton against the reference in float64, in Triton's interpreter where there is no GPU."""

import functools

import pytest
import torch
from operator_inputs import (
    CASES,
    DEVICE,
    DYNAMIC,
    KEY_WISE,
    Case,
    LargestMemory,
    attend,
    float_mask,
    hold_to_the_reference,
    largest_error,
    left_padding,
    make_inputs,
    supports,
    value_and_gradients,
)

from benchmarks import gpu_kernels
from benchmarks.measure import Run
from dcformer import ComposeSide, ComposeWeights, Visibility, set_workspace_bytes
from dcformer.dcmha import AttentionInputs
from dcformer.kernels.call import Call
from dcformer.kernels.triton import attention_forward as forward
from dcformer.kernels.triton import tuning
from dcformer.kernels.triton.attention_backward import composed_backward
from dcformer.kernels.triton.attention_forward import composed_forward
from dcformer.kernels.triton.workspace import plan_chunks


def document_around_a_block(batch: int, heads: int, queries: int, keys: int) -> Visibility:
    """The queries of a whole block see none of the keys of the block before."""
    ids = torch.tensor([0, 1, 0]).repeat_interleave(torch.tensor([64, 64, keys - 128]))
    return Visibility(queries, keys, sequence_ids=ids[None])


def keys_after_the_last_query(batch: int, heads: int, queries: int, keys: int) -> Visibility:
    """The last block of keys is all in the future, of less than a block of queries."""
    return Visibility(queries, keys, query_offset=12)


WIDE = {"batch": 1, "heads": 2, "channels": 16}
# The interpreter takes about a second for each: those that differ in what the kernels do.
NAMES = [
    "more_queries_than_keys",
    "fewer_queries_than_keys_window_5",
    "bidirectional_window_5",
    "left_padding",
    "boolean_mask_for_all_rows",
    "float_mask",
    "document_that_comes_back_window_10",
    "two_groups_grouped_query_wide_values",
    "multi_query_scaling",
    "rank_3",
    "nine_heads_query_wise",
    "no_branches_and_static",
    "static_and_query_gate",
    "key_low_rank_and_gates",
    "neither",
]
KERNEL_CASES = {name: CASES[name] for name in NAMES} | {
    "forty_heads": Case({"batch": 1, "heads": 40, "channels": 16, "queries": 10, "pre": DYNAMIC}),
    "twenty_four_heads_window_6": Case(
        {"batch": 1, "heads": 24, "channels": 16, "queries": 40, "rank": 1, "post": DYNAMIC}, {"sliding_window": 6}
    ),
    "document_that_comes_back_behind_a_block_of_another": Case(
        {**WIDE, "heads": 1, "queries": 130, "pre": ("key_gate",), "post": None}, mask=document_around_a_block
    ),
    "keys_after_the_last_query": Case(
        {**WIDE, "heads": 1, "queries": 33, "keys": 65, "rank": 1}, mask=keys_after_the_last_query
    ),
    # The last query that sees a block of 16, 32 or 64 keys begins a block of queries.
    "chunks": Case(
        {**WIDE, "heads": 1, "queries": 130, "pre": KEY_WISE, "post": ("key_gate",), "rank": 1}, {"sliding_window": 34}
    ),
    "chunks_of_rows": Case({**WIDE, "queries": 20, "channels": 80, "rank": 1}, mask=left_padding),
}
IN_SIXTEEN_BITS = ("two_groups_grouped_query_wide_values", "forty_heads", "twenty_four_heads_window_6")


def on_device(case: Case):
    """Of few queries, and of one row of the batch if its mask is the same for all: the interpreter takes as long."""
    rows = 2 if case.mask in (left_padding, float_mask) else 1
    inputs, options = case._replace(shape={"queries": 12, **case.shape, "batch": rows}).build()
    if case.mask is not None:
        options["attention_mask"] = options["attention_mask"].to(DEVICE)
    return inputs.map(lambda tensor: tensor.to(DEVICE)), options


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in KERNEL_CASES if name != "forty_heads"]
    + [(name, torch.float16) for name in IN_SIXTEEN_BITS],
    ids=str,
)
def test_output_and_gradients_equal_the_reference(name, dtype):
    try:
        set_workspace_bytes(1 if name.startswith("chunks") else None)
        inputs, options = on_device(KERNEL_CASES[name])
        hold_to_the_reference("triton", inputs, dtype, **options)
    finally:
        set_workspace_bytes(None)


@pytest.mark.usefixtures("poisoned_memory")
def test_the_tiles_of_other_gpus_than_hopper_give_the_same(monkeypatch):
    monkeypatch.setattr(tuning, "is_hopper", lambda _: False)
    inputs, options = on_device(KERNEL_CASES["twenty_four_heads_window_6"])
    hold_to_the_reference("triton", inputs, torch.float16, **options)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("name", ["nine_heads_query_wise", "key_low_rank_and_gates"])
def test_a_launch_for_each_result_gives_the_same(name, monkeypatch):
    monkeypatch.setattr(tuning, "FACTOR_REGISTERS", 0)
    inputs, options = on_device(KERNEL_CASES[name])
    hold_to_the_reference("triton", inputs, torch.float32, **options)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("registers", [0, tuning.FACTOR_REGISTERS])
def test_tiles_out_of_sight_add_nothing_where_products_read_them(registers, monkeypatch):
    monkeypatch.setattr(tuning, "FACTOR_REGISTERS", registers)
    # Of the 64 queries and 64 keys of a product, the first 16 queries see only the first of four tiles.
    monkeypatch.setattr(tuning, "COMPOSE_M", 32)
    monkeypatch.setitem(tuning.TILES, "float32", (256, 16, 4, 3))
    inputs = make_inputs(batch=1, heads=2, channels=16, queries=40, rank=1, pre=DYNAMIC, post=DYNAMIC)
    hold_to_the_reference("triton", inputs.map(lambda tensor: tensor.to(DEVICE)), torch.float32)


@pytest.mark.usefixtures("poisoned_memory")
def test_products_of_several_blocks_of_keys_in_one_program_are_right(monkeypatch):
    monkeypatch.setattr(forward, "SCORES_PROGRAMS", 1)
    inputs = make_inputs(batch=1, heads=1, channels=40, queries=6, keys=300, rank=1, pre=DYNAMIC, post=None)
    options = {"is_causal": False, "attention_mask": None}
    hold_to_the_reference("triton", inputs.map(lambda tensor: tensor.to(DEVICE)), torch.float16, **options)


@pytest.mark.parametrize("ids", [[0, 0, 2**32, 2**32, 2**32], [0.25, 0.25, 0.25, 0.75, 0.75]], ids=str)
def test_documents_of_any_numbers_do_not_see_each_other(ids):
    inputs = make_inputs(batch=1, heads=2, channels=8, queries=5).map(lambda tensor: tensor.to(DEVICE, torch.float32))
    mask = Visibility(5, 5, sequence_ids=torch.tensor([ids], device=DEVICE))
    found, expected = (attend(form, *inputs, attention_mask=mask) for form in ("triton", "plain"))
    assert largest_error(found, expected) < 1e-5


def test_a_large_mask_leaves_heads_that_only_pad_without_weight():
    inputs = make_inputs(batch=1, heads=1, channels=8, queries=3, pre=None, post=("key_gate",)).to(torch.float16)
    mask = torch.full((1, 1, 3, 3), 12.0, device=DEVICE)
    hold_to_the_reference("triton", inputs.map(lambda tensor: tensor.to(DEVICE)), torch.float16, attention_mask=mask)


@pytest.mark.parametrize("queries", [2, 12])
def test_a_row_whose_mask_is_large_and_negative_is_normalised(queries):
    inputs = make_inputs(batch=1, heads=2, channels=8, queries=queries, keys=12)
    inputs = inputs.map(lambda tensor: tensor.to(DEVICE, torch.float32))
    mask = torch.full((1, 1, queries, 12), -1e9, device=DEVICE)
    mask[:, :, 0, 3:5] = -torch.inf
    options = {"attention_mask": mask, "is_causal": False}
    # Without the number that all keys share, since in float32 it hides the scores from PyTorch too.
    expected = attend("plain", *inputs, attention_mask=mask + 1e9, is_causal=False)
    assert largest_error(attend("triton", *inputs, **options), expected) < 1e-5


def test_gradients_of_64_heads_that_agree_stay_in_the_range_of_float16():
    inputs = make_inputs(batch=1, heads=64, key_value_heads=1, channels=8, queries=2, pre=DYNAMIC, post=DYNAMIC)
    factors = torch.tensor([1, 1, 1 / 8, 1 / 8], device=DEVICE, dtype=torch.float16).expand(1, 64, 2, 4)
    side = ComposeSide(factors=factors.contiguous())
    inputs = inputs.map(lambda tensor: tensor.to(DEVICE, torch.float16))
    inputs = inputs._replace(query=0 * inputs.query, pre=ComposeWeights(side, side), post=ComposeWeights(side, side))
    upstream = (inputs.value / 1000).expand_as(inputs.query)
    found = []
    for form in ("triton", "plain"):
        leaves = inputs.leaves() if form == "triton" else inputs.to(torch.float64).leaves()
        output = attend(form, *leaves, is_causal=False)
        found.append(torch.autograd.grad(output, leaves.query, upstream.to(output.dtype))[0])
    assert largest_error(*found) < 2e-2


def test_gradients_of_a_saturated_softmax_err_no_more_than_those_of_pytorch():
    # The logarithms of the softmax's sums are rounded so far that weights do not add up to 1.
    inputs = make_inputs(batch=1, heads=2, channels=8, queries=6, rank=5, post=None).map(lambda tensor: 3 * tensor)
    inputs, found = inputs.map(lambda tensor: tensor.to(DEVICE, torch.float32)), {}
    for form, operands in (("plain", inputs.to(torch.float64)), ("plain", inputs), ("triton", inputs)):
        attends = functools.partial(attend, form, is_causal=False)
        found[form, operands.query.dtype] = value_and_gradients(attends, operands)[1]["query"]
    exact = found.pop(("plain", torch.float64))
    plain, triton = (largest_error(gradient, exact) for gradient in found.values())
    assert triton <= 2 * plain < 0.1


@pytest.mark.usefixtures("poisoned_memory")
def test_large_tiles_equal_the_reference(monkeypatch):
    monkeypatch.setattr(tuning, "LARGE", 128)
    inputs = make_inputs(batch=1, heads=1, channels=16, queries=130, pre=("key_gate",), post=("key_gate",))
    hold_to_the_reference("triton", inputs.map(lambda tensor: tensor.to(DEVICE)), torch.float16, sliding_window=129)


def test_the_benchmark_of_kernels_checks_and_times_all_of_them():
    run, case = Run(torch.device(DEVICE)), (gpu_kernels.Shape(2, 16, 8), None)
    gpu_kernels.compare(run, case)
    gpu_kernels.decode_step(run, case)
    rows = {row.name: row.figures for row in run.rows}
    assert all(rows[name]["error"] < 3e-3 for name in ("forward", "backward"))
    launched = {(name, kernel) for name in rows for kernel in rows[name] if "_kernel" in kernel}
    expected = ("forward", "weights_fwd", 1), ("backward", "compose_bwd", 2), ("decode", "decode_values", 1)
    assert {(name, f"{kernel}_kernel ({number} launches) us") for name, kernel, number in expected} <= launched
    assert len(launched) == 6 + 9 + 2


def test_every_case_is_supported_or_has_a_mask_for_each_head():
    refused = [name for name, case in CASES.items() if not supports("triton", case)]
    assert refused == ["boolean_mask_per_head", "float_mask_per_head_window_5"]


def test_queries_that_see_no_key_get_zeros_and_no_gradient_in_the_same_bits_each_time():
    inputs = make_inputs(**WIDE, queries=20).to(torch.float32).map(lambda tensor: tensor.to(DEVICE))
    run = functools.partial(value_and_gradients, functools.partial(attend, "triton"), inputs)
    output, gradients = run(attention_mask=left_padding(1, 2, 20, 20).to(DEVICE))
    assert (output[:, :, :4] == 0).all() and (gradients["query"][:, :, :4] == 0).all()
    assert (gradients["key"][:, :, :4] == 0).all() and (gradients["post.query"][:, :, :4] == 0).all()
    again, gradients_again = run(attention_mask=left_padding(1, 2, 20, 20).to(DEVICE))
    assert torch.equal(output, again)
    assert all(torch.equal(gradient, gradients_again[name]) for name, gradient in gradients.items())


def test_any_strides_give_the_same():
    inputs = make_inputs(**WIDE, queries=20).to(torch.float32).map(lambda tensor: tensor.to(DEVICE))
    strided = inputs.map(lambda tensor: tensor.mT.contiguous().mT)
    assert torch.equal(attend("triton", *inputs), attend("triton", *strided))


def test_the_workspace_is_bounded():
    for wrong in (0, 1.5):
        with pytest.raises(ValueError, match=f"at least 1, got {wrong};"):
            set_workspace_bytes(wrong)
    inputs = make_inputs(batch=3, queries=4096, heads=4, channels=16).to(torch.float32)
    call = Call.of(AttentionInputs(*inputs, 1.0, Visibility(4096, 4096)))
    sizes, bytes_per_column = tuning.Sizes.of(call, is_forward=False), 4 * 4
    chunks = list(plan_chunks(call, sizes, bytes_per_column, 2**24))
    assert max(chunk.number * chunk.rows * chunk.columns * bytes_per_column for chunk in chunks) <= 2**24
    covered = {(row, chunk.start) for chunk in chunks for row in range(chunk.batch, chunk.batch + chunk.number)}
    assert {row for row, _ in covered} == {0, 1, 2} and min(start for _, start in covered) == 0


@pytest.mark.parametrize(("batch", "queries"), [(1, 2048), (3, 512)])
def test_chunks_take_turns_in_the_workspace(batch, queries, monkeypatch):
    monkeypatch.setattr(type(forward.scores_fwd_kernel), "run", lambda *call, **options: None)
    inputs = make_inputs(batch=batch, queries=queries, heads=4, channels=16)
    inputs = inputs.map(lambda tensor: tensor.to("meta", torch.float16))
    call = Call.of(AttentionInputs(*inputs, 1.0, Visibility(queries, queries)))
    log_sums = inputs.query[..., 0].float()
    with LargestMemory() as memory:
        composed_forward(call, 2**23)
    assert memory.most <= 2**23 + inputs.query.nbytes + log_sums.nbytes
    with LargestMemory() as memory:
        gradients = composed_backward(inputs.query, call, log_sums, 2**24)
    # With sums in float32 before they are in 16 bits, and deltas, their totals and the norms.
    assert memory.most <= 2**24 + 3 * sum(each.nbytes for each in gradients if each is not None) + 3 * log_sums.nbytes


def test_nan_in_a_gradient_of_one_row_is_nan_in_all():
    """As they are scaled together; zeros in the other rows would look like gradients."""
    inputs = make_inputs(batch=2, heads=2, channels=16, queries=4).map(lambda x: x.to(DEVICE, torch.float16))
    query = inputs.query.requires_grad_()
    output = attend("triton", *inputs)
    upstream = torch.ones_like(output)
    upstream[0, 0, 0, 0] = torch.nan
    assert torch.autograd.grad(output, query, upstream)[0].isnan().all()
