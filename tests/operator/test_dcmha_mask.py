"""`Visibility` against the mask of the reference, pair by pair; and the errors of malformed calls of the operator."""

import dataclasses
import runpy

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from operator_inputs import make_inputs, make_weights
from reference import hidden_pairs

from dcformer import visibility_dcformer
from dcformer.dcmha import ComposeSide, Visibility, composed_attention


exhaustive = settings(derandomize=True, deadline=None, max_examples=80)
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
    return dataclasses.replace(band, padding=padding, dense=dense, sequence_ids=sequence_ids)


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
def test_blocks_and_key_ranges_equal_the_definition(case):
    visibility, (start, stop, first, last) = case
    hidden = visibility.to("cpu").hidden(start, stop, first, last)
    visible = definition(visibility)[:, :, start:stop].clone()
    hidden = torch.tensor(False) if hidden is None else hidden
    assert torch.equal(hidden.expand(visible[..., first:last].shape), ~visible[..., first:last])
    first, last = visibility.key_range(start, stop)
    visible[..., first:last] = False
    assert 0 <= first < last <= visibility.key_length and not visible.any()


@given(blocks(bands()))
@exhaustive
def test_key_range_of_a_band_is_the_smallest(case):
    visibility, (start, stop, _, _) = case
    seen = definition(visibility)[0, 0, start:stop].any(0).nonzero().flatten().tolist()
    first, last = visibility.key_range(start, stop)
    assert (first, last) == (seen[0], seen[-1] + 1) if seen else last == first + 1


def test_key_ranges_leave_out_other_documents_and_what_a_dense_mask_hides():
    documents = torch.tensor([[0] * 5 + [1] * 7 + [2] * 8, [0] * 3 + [1] * 10 + [2] * 7])
    visibility = Visibility(20, 20, sequence_ids=documents)
    assert visibility.key_range(14, 18) == (12, 18)
    assert visibility.key_range(12, 16) == (3, 16)
    assert Visibility(20, 20, is_causal=False, sequence_ids=documents[:1]).key_range(6, 9) == (5, 12)
    dense = torch.zeros(1, 1, 4, 9, dtype=torch.bool)
    dense[..., 3:5] = True
    assert Visibility(4, 9, is_causal=False, dense=dense).key_range(0, 4) == (3, 5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_float_mask_hides_at_half_the_smallest_number_of_its_dtype(dtype):
    half = torch.finfo(dtype).min / 2
    dense = torch.tensor([-torch.inf, 2 * half, half, 0.9 * half, 0.0], dtype=dtype).view(1, 1, 1, 5)
    assert Visibility(1, 5, dense=dense).hidden(0, 1, 0, 5).flatten().tolist() == [True, True, True, False, False]


INPUTS = make_inputs(queries=5, keys=6)  # batch 2, 4 heads, 3 channels
W = torch.zeros(2, 4, 5, 2)


@pytest.mark.parametrize("missing", [(), ("gate",), ("w1", "w2")], ids=["all", "no_gate", "gate_only"])
def test_a_side_hands_its_parts_back(missing):
    parts = {"w1": torch.rand(2, 4, 5, 3), "w2": torch.rand(2, 4, 5, 3), "gate": torch.rand(2, 4, 5)}
    parts = {name: None if name in missing else part for name, part in parts.items()}
    side = ComposeSide(**parts)
    for name, part in parts.items():
        assert getattr(side, name) is None if part is None else torch.equal(getattr(side, name), part)
    assert side.rank == (0 if parts["w1"] is None else 3)


@pytest.mark.parametrize(
    "parts",
    [{}, {"w1": W}, {"w1": W, "w2": W[..., :1]}, {"factors": W[0]}, {"factors": W, "gate": W[..., 0]}],
    ids=["nothing", "w1_alone", "two_ranks", "three_axes", "factors_and_a_part"],
)
def test_sides_whose_parts_do_not_fit_are_refused(parts):
    with pytest.raises(ValueError, match=r"ComposeSide takes|same shape|factors must be"):
        ComposeSide(**parts)


def with_field(stage: str, **fields):
    return INPUTS._replace(**{stage: getattr(INPUTS, stage)._replace(**fields)})


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (INPUTS._replace(query=INPUTS.query[0]), r"\(4, 5, 3\)"),
        (INPUTS._replace(key=INPUTS.key[:1]), r"\(1, 4, 6, 3\)"),
        (INPUTS._replace(value=INPUTS.value[:, :, :4]), r"\(2, 4, 4, 3\)"),
        (INPUTS._replace(key=INPUTS.key[:, :3], value=INPUTS.value[:, :3]), "3 key/value heads must divide the 4"),
        (with_field("pre", groups=3), "pre.groups must divide the 4 heads, got 3"),
        (with_field("post", groups=2), r"post.static .* = \(2, 2, 2\), got \(1, 4, 4\)"),
        (with_field("pre", query=make_weights(queries=6).query), r"pre.query .*got \(2, 4, 6, 5\)"),
        (with_field("post", key=make_weights(queries=5).key), r"post.key .*got \(2, 4, 5, 5\)"),
        ({"sliding_window": 0}, "at least 1, got 0"),
        ({"attention_mask": torch.ones(2, 5)}, "covers 5 keys, but there are 6"),
        ({"attention_mask": torch.ones(2, 1, 6, 6)}, r"= \(5, 6\), got \(2, 1, 6, 6\)"),
        ({"attention_mask": torch.ones(2, 5, 6)}, r"got shape \(2, 5, 6\)"),
        ({"attention_mask": Visibility(5, 10)}, "5 queries and 10 keys"),
        ({"attention_mask": torch.ones(3, 6)}, r"2 rows.*\(3, 6\)"),
        ({"attention_mask": torch.ones(1, 3, 5, 6)}, r"4 heads.*\(1, 3, 5, 6\)"),
        ({"chunk_size": 0}, "at least 1, got 0"),
    ],
)
def test_tensors_masks_and_options_that_do_not_fit_are_refused(given, got):
    inputs, options = (INPUTS, given) if isinstance(given, dict) else (given, {})
    with pytest.raises(ValueError, match=got):
        composed_attention(*inputs, **options)
    with pytest.raises(ValueError, match="got 5 queries, 5 keys and 4 numbers"):
        Visibility(5, 5, sequence_ids=torch.zeros(1, 4, dtype=torch.long))


def test_masks_of_a_copy_of_the_code_are_taken():
    """The code that comes with a checkpoint is such a copy; the attention functions of Transformers are shared."""
    inputs, copy = make_inputs(batch=1, heads=2, queries=7), runpy.run_path(visibility_dcformer.__file__)
    actual = composed_attention(*inputs, attention_mask=copy["Visibility"](7, 7, sliding_window=3))
    torch.testing.assert_close(actual, composed_attention(*inputs, sliding_window=3))
