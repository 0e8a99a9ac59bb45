"""The Triton forward pass against the reference in float64, in Triton's interpreter where there is no GPU."""

import pytest
import torch
from operator_calls import Call, composition_of, expected_output, mask_of, poisoned_memory
from operator_inputs import BRANCHES

from dcformer.ops.arguments import Mask
from dcformer.ops.config import TileConfig
from dcformer.ops.folding import can_fold, fold
from dcformer.ops.forward import composed_forward
from dcformer.ops.plan import plan_chunks


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Sums of float32 in another order, relative to the largest output.
EXACT = 2e-6
# Scores rounded to 11 bits; largest errors seen 1.2e-3.
SIXTEEN_BITS = 2e-3

QUERY_WISE = ("query_low_rank", "query_gate")
KEY_WISE = ("key_low_rank", "key_gate")
DYNAMIC = QUERY_WISE + KEY_WISE
CALLS = {
    "B2-T17-H2-D16": Call({"batch": 2, "heads": 2, "queries": 17}),
    "B2-T63-H6-D80-win32": Call({"batch": 2, "heads": 6, "queries": 63, "channels": 80}, window=32),
    "B1-T33-H9-D96": Call({"heads": 9, "queries": 33, "channels": 96}),
    "B1-T64-H5-D128-win1": Call({"heads": 5, "queries": 64, "channels": 128}, window=1),
    "B1-T17-H24-D32-groups3": Call({"heads": 24, "queries": 17, "channels": 32, "groups": 3}),
    "B1-T70-H2-D64-win40-bidirectional": Call({"heads": 2, "queries": 70, "channels": 64}, False, 40),
    "B1-T63-H7-D16-bidirectional": Call({"heads": 7, "queries": 63}, is_causal=False),
    "B2-T17-S129-H3-win40": Call({"batch": 2, "heads": 3, "queries": 17, "keys": 129}, window=40),
    "B1-T70-S29-H3": Call({"heads": 3, "queries": 70, "keys": 29}),
    "B2-T63-H4-padded40": Call({"batch": 2, "queries": 63}, padded=40),
    "B2-T63-H4-padded40-win9": Call({"batch": 2, "queries": 63}, window=9, padded=40),
    "B1-T90-H3-documents": Call({"heads": 3, "queries": 90}, documents=(5, 20, 1, 64)),
    "B2-T63-H3-documents-win9": Call({"batch": 2, "heads": 3, "queries": 63}, window=9, documents=(30, 33)),
    "B1-T33-H4-any-pairs": Call({"queries": 33}, sees_at_random=True),
    "B1-T33-H4-added-mask": Call({"queries": 33}, sees_at_random=True, adds=True),
    "B2-T70-H2-chunks-of-64": Call({"batch": 2, "heads": 2, "queries": 70, "value_channels": 24}, workspace_bytes=1),
    "B1-T63-H6-kv3-groups2": Call({"heads": 6, "key_value_heads": 3, "queries": 63, "groups": 2}, window=20),
    "B1-T33-H4-kv1-values5": Call({"key_value_heads": 1, "queries": 33, "value_channels": 5, "channels": 3}),
    "rank1": Call({"queries": 33, "rank": 1}),
    "rank4": Call({"heads": 3, "queries": 33, "rank": 4}),
    "no-pre": Call({"queries": 33, "pre": None}),
    "no-post": Call({"queries": 33, "post": None}),
    "neither": Call({"queries": 33, "pre": None, "post": None}, window=7),
    "no-static": Call({"queries": 33, "pre": DYNAMIC, "post": DYNAMIC}),
    "static-only-before": Call({"queries": 33, "pre": ("static",), "post": None}),
    "static-only-after": Call({"queries": 33, "pre": DYNAMIC, "post": ("static",), "groups": 2}),
    "query-wise": Call({"queries": 33, "pre": QUERY_WISE, "post": QUERY_WISE}),
    "key-wise": Call({"queries": 33, "pre": KEY_WISE, "post": KEY_WISE}),
    "gates": Call({"queries": 33, "pre": ("query_gate", "key_gate"), "post": ("key_gate",)}),
    "maps": Call({"queries": 33, "pre": ("query_low_rank", "key_low_rank"), "post": ("query_low_rank",)}),
    "no-branches": Call({"queries": 33, "pre": (), "post": ()}),
    "float16": Call({"heads": 8, "queries": 63, "channels": 64, "pre": DYNAMIC, "post": BRANCHES}, dtype=torch.float16),
    "float16-win20": Call({"heads": 3, "queries": 63, "channels": 80}, window=20, dtype=torch.float16),
}


def output_of(call: Call, inputs, visibility, config=None) -> torch.Tensor:
    inputs = inputs.map(lambda tensor: tensor.to(DEVICE, call.dtype))
    return composed_forward(
        *inputs[:3],
        composition_of(inputs.pre),
        composition_of(inputs.post),
        scaling=inputs.query.shape[3] ** -0.5,
        mask=mask_of(visibility.to(DEVICE)),
        workspace_bytes=call.workspace_bytes,
        config=config,
    )[0].cpu()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_output_equals_the_reference(call):
    inputs = call.inputs()
    visibility = call.visibility(inputs)
    expected = expected_output(inputs, visibility)
    with poisoned_memory():
        output = output_of(call, inputs, visibility)
    tolerance = EXACT if call.dtype == torch.float32 else SIXTEEN_BITS
    assert (output.double() - expected).abs().max() <= tolerance * expected.abs().max()


def test_queries_that_see_no_key_get_zeros():
    call = CALLS["B2-T63-H4-padded40"]
    inputs = call.inputs()
    assert (output_of(call, inputs, call.visibility(inputs))[0, :, :40] == 0).all()


def test_a_thousand_queries_in_chunks():
    call = Call({"heads": 2, "queries": 1000, "channels": 32}, window=100, workspace_bytes=2**21)
    inputs = call.inputs()
    visibility = call.visibility(inputs)
    expected = expected_output(inputs, visibility)
    # What the interpreter takes goes by the number of tiles.
    large_tiles = TileConfig(block_rows=128, block_keys=128, compose_rows=128)
    assert (
        output_of(call, inputs, visibility, large_tiles).double() - expected
    ).abs().max() <= EXACT * expected.abs().max()


def test_two_runs_are_bit_identical():
    call = Call({"key_value_heads": 2, "queries": 17}, window=9)
    inputs = call.inputs()
    visibility = call.visibility(inputs)
    assert torch.equal(*(output_of(call, inputs, visibility) for _ in range(2)))


def test_strided_inputs_equal_contiguous_ones():
    call = Call({"heads": 2, "queries": 17})
    inputs = call.inputs()
    strided = inputs._replace(
        query=inputs.query.transpose(1, 2).contiguous().transpose(1, 2),
        key=torch.cat((inputs.key, inputs.key), dim=3)[..., :16],
        value=torch.cat((inputs.value, inputs.value), dim=3)[..., 16:],
    )
    visibility = call.visibility(inputs)
    assert torch.equal(output_of(call, strided, visibility), output_of(call, inputs, visibility))


def test_keys_may_lie_more_than_two_to_the_31_elements_apart():
    # The memory between them is never touched, so that the system does not provide it.
    stride = 2**31 // 16 + 1
    inputs = Call({"heads": 2, "queries": 17, "pre": None, "post": None}).inputs().map(lambda x: x.to(torch.float16))
    far = torch.empty(stride * 17 * 2, dtype=torch.float16).as_strided((1, 2, 17, 16), (0, 16, stride, 1))
    far.copy_(inputs.key)
    call = Call(dtype=torch.float16)
    visibility = call.visibility(inputs)
    output = output_of(call, inputs._replace(key=far), visibility)
    assert torch.equal(output, output_of(call, inputs, visibility))


@pytest.mark.parametrize(
    "batch, queries, keys, window", [(1, 8192, 8192, None), (64, 8192, 8192, 256), (8, 77, 9000, None)]
)
def test_chunks_stay_within_the_workspace(batch, queries, keys, window):
    bytes_per_column = 32 * 2 + 4 * 4 + 4
    chunks = list(
        plan_chunks(
            batch,
            queries,
            keys,
            Mask(sliding_window=window, query_offset=keys - queries),
            heads=32,
            bytes_per_column=bytes_per_column,
            maps=4,
            workspace_bytes=2**28,
            block_rows=64,
            block_keys=64,
        )
    )
    sizes = [
        (chunk.batch.stop - chunk.batch.start) * (-(-(chunk.stop - chunk.start) // 64) * 64) * chunk.columns
        for chunk in chunks
    ]
    assert max(sizes) * bytes_per_column <= 2**28
    covered = sum((chunk.batch.stop - chunk.batch.start) * (chunk.stop - chunk.start) for chunk in chunks)
    assert covered == batch * queries


@pytest.mark.parametrize("branches", [(*QUERY_WISE, "static"), ("query_gate",), ("static",)], ids="+".join)
def test_folding_into_queries_and_outputs_equals_composing_scores_and_weights(branches):
    shape = {"heads": 6, "key_value_heads": 2, "groups": 2, "queries": 33, "channels": 4}
    inputs = Call({**shape, "pre": branches, "post": branches}).inputs()
    visibility = Call(window=9).visibility(inputs)
    expected = expected_output(inputs, visibility)
    pre, post = composition_of(inputs.pre), composition_of(inputs.post)
    assert all(can_fold(composition, 6, 2, 33, 4) for composition in (pre, post))
    folded = inputs._replace(query=fold(inputs.query, pre), pre=None, post=None)
    output = fold(expected_output(folded, visibility), post)
    assert (output - expected).abs().max() <= EXACT * expected.abs().max()


def test_folding_asks_for_one_key_per_group_and_nothing_key_wise():
    shape = {"heads": 6, "key_value_heads": 2, "queries": 33, "channels": 4}
    for groups, branches in ((1, QUERY_WISE), (2, DYNAMIC)):
        inputs = Call({**shape, "groups": groups, "pre": branches}).inputs()
        assert not can_fold(composition_of(inputs.pre), 6, 2, 33, 4)


def test_types_that_the_kernels_do_not_take_are_refused():
    inputs = Call({"queries": 17}).inputs()
    with pytest.raises(ValueError, match=r"float32, float16 and bfloat16, got torch\.float64"):
        output_of(Call(dtype=torch.float64), inputs, Call().visibility(inputs))
