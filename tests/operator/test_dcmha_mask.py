"""`Visibility` against the mask of the reference, pair by pair; and what malformed calls of the operator are told."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from operator_inputs import make_inputs, make_weights
from reference import hidden_pairs

from dcformer.dcmha import ComposeSide, composed_attention
from dcformer.dcmha_mask import Visibility


exhaustive = settings(derandomize=True, deadline=None, max_examples=300)
HEADS = 2


def bits(*shape):
    """Boolean tensors of this shape."""
    size = torch.Size(shape).numel()
    return st.lists(st.booleans(), min_size=size, max_size=size).map(lambda values: torch.tensor(values).view(shape))


@st.composite
def bands(draw):
    """Causality, window and offset alone."""
    return Visibility(
        draw(st.integers(1, 8)),
        draw(st.integers(1, 9)),
        is_causal=draw(st.booleans()),
        sliding_window=draw(st.none() | st.integers(1, 10)),
        query_offset=draw(st.none() | st.integers(-6, 12)),
    )


@st.composite
def visibilities(draw):
    """Any combination of causality, window, offset, padding, a dense mask and packed sequences."""
    band = draw(bands())
    queries, keys, batch = band.query_length, band.key_length, draw(st.integers(1, 2))
    padding = draw(st.none() | bits(batch, keys))
    if padding is not None:
        padding = padding.to(draw(st.sampled_from([torch.bool, torch.int64, torch.float32])))
    dense = draw(st.none() | st.tuples(st.sampled_from([1, batch]), st.sampled_from([1, HEADS])))
    if dense is not None:
        dense = draw(bits(*dense, queries, keys))
        hidden_number = draw(st.sampled_from([None, -torch.inf, torch.finfo(torch.float32).min]))
        if hidden_number is not None:
            dense = torch.zeros(dense.shape).masked_fill(~dense, hidden_number)
    sequence_ids = None
    if queries == keys:
        sequence_ids = draw(st.none() | bits(batch, keys).map(lambda changes: changes.long().cumsum(1)))
    return Visibility(
        queries,
        keys,
        is_causal=band.is_causal,
        sliding_window=band.sliding_window,
        query_offset=band.query_offset,
        padding=padding,
        dense=dense,
        sequence_ids=sequence_ids,
    )


def definition(visibility: Visibility) -> torch.Tensor:
    """(batch, heads, query, key) boolean, True for visible."""
    shape = (2, HEADS, visibility.query_length, visibility.key_length)
    return ~hidden_pairs(visibility, torch.device("cpu")).expand(shape)


@st.composite
def blocks(draw, strategy):
    """A visibility, and (start, stop, first, last) of a block of it."""
    visibility = draw(strategy)
    start = draw(st.integers(0, visibility.query_length - 1))
    first = draw(st.integers(0, visibility.key_length - 1))
    stop = draw(st.integers(start + 1, visibility.query_length))
    return visibility, (start, stop, first, draw(st.integers(first + 1, visibility.key_length)))


@given(blocks(visibilities()))
@exhaustive
def test_hidden_equals_the_definition_in_every_block(case):
    visibility, (start, stop, first, last) = case
    hidden = visibility.hidden(start, stop, first, last)
    expected = ~definition(visibility)[:, :, start:stop, first:last]
    hidden = torch.tensor(False) if hidden is None else hidden
    assert torch.equal(hidden.expand(expected.shape), expected)


@given(blocks(visibilities()))
@exhaustive
def test_key_range_holds_every_visible_key(case):
    visibility, (start, stop, _, _) = case
    first, last = visibility.key_range(start, stop)
    outside = definition(visibility)[:, :, start:stop].clone()
    outside[..., first:last] = False
    assert 0 <= first < last <= visibility.key_length and not outside.any()


@given(blocks(bands()))
@exhaustive
def test_key_range_of_a_band_is_the_smallest(case):
    visibility, (start, stop, _, _) = case
    seen = definition(visibility)[0, 0, start:stop].any(0).nonzero().flatten().tolist()
    first, last = visibility.key_range(start, stop)
    assert (first, last) == (seen[0], seen[-1] + 1) if seen else last == first + 1


def test_key_range_of_packed_documents_leaves_out_the_others():
    documents = torch.tensor([[0] * 5 + [1] * 7 + [2] * 8, [0] * 3 + [1] * 10 + [2] * 7])
    visibility = Visibility(20, 20, sequence_ids=documents)
    assert visibility.key_range(14, 18) == (12, 18)
    assert visibility.key_range(12, 16) == (3, 16)
    only_first_row = Visibility(20, 20, sequence_ids=documents[:1])
    assert only_first_row.key_range(6, 9) == (5, 9)
    assert only_first_row.key_range(3, 7) == (0, 7)
    both_ways = Visibility(20, 20, is_causal=False, sequence_ids=documents[:1])
    assert both_ways.key_range(6, 9) == (5, 12)


def test_key_range_of_a_dense_mask_leaves_out_what_nobody_sees():
    dense = torch.zeros(1, 1, 4, 9, dtype=torch.bool)
    dense[..., 3:5] = True
    assert Visibility(4, 9, is_causal=False, dense=dense).key_range(0, 4) == (3, 5)


@given(visibilities())
@exhaustive
def test_a_copy_hides_the_same(visibility):
    copy = visibility.to("cpu")
    assert torch.equal(definition(copy), definition(visibility))
    assert copy.same_for_all_heads == visibility.same_for_all_heads
    moved = visibility.to("meta")
    assert all(tensor is None or tensor.is_meta for tensor in (moved.padding, moved.dense, moved.sequence_ids))


@pytest.mark.parametrize(("mask_heads", "same"), [(1, True), (HEADS, False)], ids=["one", "per_head"])
def test_a_mask_with_a_head_axis_is_not_the_same_for_all_heads(mask_heads, same):
    dense = torch.ones(1, mask_heads, 3, 3, dtype=torch.bool)
    assert Visibility(3, 3, dense=dense).same_for_all_heads is same


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_float_mask_hides_at_half_the_smallest_number_of_its_dtype(dtype):
    half = torch.finfo(dtype).min / 2
    dense = torch.tensor([-torch.inf, 2 * half, half, 0.9 * half, 0.0], dtype=dtype).view(1, 1, 1, 5)
    assert Visibility(1, 5, dense=dense).hidden(0, 1, 0, 5).flatten().tolist() == [True, True, True, False, False]


INPUTS = make_inputs(queries=5, keys=6)  # batch 2, 4 heads, 3 channels


def with_field(stage: str, **fields):
    return INPUTS._replace(**{stage: getattr(INPUTS, stage)._replace(**fields)})


MALFORMED = {
    "three_axes": (INPUTS._replace(query=INPUTS.query[0]), r"\(batch, heads, length, channels\).*\(4, 5, 3\)"),
    "batch_of_the_keys": (INPUTS._replace(key=INPUTS.key[:1]), r"query's batch.*key \(1, 4, 6, 3\)"),
    "channels_of_the_keys": (INPUTS._replace(key=INPUTS.key[..., :2]), r"channels.*key \(2, 4, 6, 2\)"),
    "length_of_the_values": (INPUTS._replace(value=INPUTS.value[:, :, :4]), r"length.*value \(2, 4, 4, 3\)"),
    "heads_of_the_values": (INPUTS._replace(value=INPUTS.value[:, :2]), r"heads.*value \(2, 2, 6, 3\)"),
    "heads_that_do_not_divide": (
        INPUTS._replace(key=INPUTS.key[:, :3], value=INPUTS.value[:, :3]),
        "The 3 key/value heads must divide the 4 query heads",
    ),
    "groups_that_do_not_divide": (with_field("pre", groups=3), "pre.groups must divide the 4 heads, got 3"),
    "no_groups": (with_field("post", groups=0), "post.groups must divide the 4 heads, got 0"),
    "static_of_other_groups": (
        with_field("post", groups=2),
        r"post.static must be .* = \(2, 2, 2\), got \(1, 4, 4\)",
    ),
    "query_weights_as_long_as_the_keys": (
        with_field("pre", query=make_weights(queries=6).query),
        r"pre.query .* = \(2, 4, 5\), got \(2, 4, 6, 5\)",
    ),
    "key_weights_as_long_as_the_queries": (
        with_field("post", key=make_weights(queries=5).key),
        r"post.key .* = \(2, 4, 6\), got \(2, 4, 5, 5\)",
    ),
    "gate_of_another_batch": (
        with_field("post", query=ComposeSide(gate=torch.zeros(1, 4, 5))),
        r"post.query .* = \(2, 4, 5\), got \(1, 4, 5, 1\)",
    ),
    "gate_of_fewer_heads": (
        with_field("pre", key=ComposeSide(gate=torch.zeros(2, 2, 6))),
        r"pre.key .* = \(2, 4, 6\), got \(2, 2, 6, 1\)",
    ),
}

W = torch.zeros(2, 4, 5, 2)
MALFORMED_SIDES = {
    "w1_without_w2": ({"w1": W}, "needs both w1 and w2, or neither"),
    "w2_without_w1": ({"w2": W, "gate": torch.zeros(2, 4, 5)}, "needs both w1 and w2, or neither"),
    "nothing": ({}, "needs w1 and w2, a gate, or all three"),
    "ranks_that_differ": ({"w1": W, "w2": torch.zeros(2, 4, 5, 3)}, r"w1 \(2, 4, 5, 2\) and w2 \(2, 4, 5, 3\)"),
    "three_axes": ({"w1": W[0], "w2": W[0]}, r"w1 must be \(batch, heads, length, rank\).* \(4, 5, 2\)"),
    "gate_of_another_length": (
        {"w1": W, "w2": W, "gate": torch.zeros(2, 4, 6)},
        r"gate must be \(batch, heads, length\).* \(2, 4, 6\) for w1 \(2, 4, 5, 2\)",
    ),
    "factors_of_three_axes": ({"factors": W[0]}, r"factors must be \(batch, heads, length, channels\).* \(4, 5, 2\)"),
    "factors_and_parts": ({"factors": W, "gate": torch.zeros(2, 4, 5)}, "either factors or the parts"),
}


@pytest.mark.parametrize(("parts", "message"), MALFORMED_SIDES.values(), ids=MALFORMED_SIDES)
def test_sides_whose_parts_do_not_fit_are_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        ComposeSide(**parts)


@pytest.mark.parametrize("missing", [(), ("gate",), ("w1", "w2")], ids=["all", "no_gate", "gate_only"])
def test_a_side_hands_its_parts_back(missing):
    parts = {"w1": torch.rand(2, 4, 5, 3), "w2": torch.rand(2, 4, 5, 3), "gate": torch.rand(2, 4, 5)}
    parts = {name: None if name in missing else part for name, part in parts.items()}
    side = ComposeSide(**parts)
    for name, part in parts.items():
        assert getattr(side, name) is None if part is None else torch.equal(getattr(side, name), part)
    assert side.rank == (0 if parts["w1"] is None else 3)


@pytest.mark.parametrize(("inputs", "message"), MALFORMED.values(), ids=MALFORMED)
def test_shapes_that_do_not_fit_are_refused(inputs, message):
    with pytest.raises(ValueError, match=message):
        composed_attention(*inputs)


MALFORMED_OPTIONS = {
    "window_of_0": ({"sliding_window": 0}, "sliding_window must be at least 1, got 0; use None"),
    "padding_of_another_length": (
        {"attention_mask": torch.ones(2, 5)},
        "padding mask covers 5 keys, but there are 6",
    ),
    "mask_of_another_length": (
        {"attention_mask": torch.ones(2, 1, 6, 6)},
        r"must end in \(query, key\) = \(5, 6\), got \(2, 1, 6, 6\)",
    ),
    "mask_of_three_axes": ({"attention_mask": torch.ones(2, 5, 6)}, r"attention_mask must be .* got shape \(2, 5, 6\)"),
    "mask_of_other_keys": ({"attention_mask": Visibility(5, 10)}, "for 5 queries and 10 keys, but there are 5 and 6"),
    "mask_of_other_queries": ({"attention_mask": Visibility(10, 6)}, "for 10 queries and 6 keys"),
    "padding_of_other_rows": ({"attention_mask": torch.ones(3, 6)}, "for a batch of 3, but there are 2 rows"),
    "mask_of_other_rows": ({"attention_mask": torch.ones(3, 1, 5, 6)}, "for a batch of 3"),
    "mask_of_other_heads": ({"attention_mask": torch.ones(1, 3, 5, 6)}, "for 3 heads, but there are 4"),
    "chunks_of_0": ({"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
    "chunks_of_minus_1": ({"chunk_size": -1}, "chunk_size must be at least 1, got -1"),
}


@pytest.mark.parametrize(("options", "message"), MALFORMED_OPTIONS.values(), ids=MALFORMED_OPTIONS)
def test_masks_and_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        composed_attention(*INPUTS, **options)


@pytest.mark.parametrize(
    ("queries", "keys", "numbers"),
    [(3, 5, 5), (5, 5, 4)],
    ids=["fewer_queries_than_keys", "too_few_numbers"],
)
def test_packed_sequences_need_a_number_for_each_token(queries, keys, numbers):
    with pytest.raises(ValueError, match=f"as many queries as keys and one number for each, got {queries} queries"):
        Visibility(queries, keys, sequence_ids=torch.zeros(1, numbers, dtype=torch.long))
