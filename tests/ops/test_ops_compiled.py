"""The compiled form: one graph for all lengths, chunks that read no more keys than they see, little memory kept."""

import functools

import pytest
import torch
from operator_inputs import BRANCHES, make_inputs, sixteen_bit_attention, value_and_gradients, visible_keys
from torch._dynamo.utils import counters
from torch.testing import assert_close

from dcformer.dcmha import composed_attention_reference
from dcformer.ops import chunks as chunks_module
from dcformer.ops import compiled as compiled_module
from dcformer.ops.arguments import Composition, Mask
from dcformer.ops.chunks import split_into_chunks
from dcformer.ops.compiled import compiled_attention


# float64 against float64: sums of some hundred terms of order 1 to 10 in another order, and those of gradients.
EXACT = {"rtol": 1e-11, "atol": 1e-11}
# What sums of float32 in another order are off by, of outputs of order 1 and of gradients that sum over 50 positions.
FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}
FLOAT32_GRADIENT = {"rtol": 1e-4, "atol": 1e-4}
CHUNK = 7


@pytest.fixture
def not_compiled(monkeypatch):
    """The same functions, run by torch operation by operation."""
    monkeypatch.setattr(compiled_module, "compiled", lambda function: function)


def composition(weights):
    if weights is None:
        return None
    query, key = (None if side is None else side.factors for side in (weights.query, weights.key))
    return Composition(query, key, weights.static, weights.groups)


def attend(query, key, value, pre, post, *, chunk_size=CHUNK, sliding_window=None, is_causal=True, **options):
    padding, sequence_ids = options.pop("padding", None), options.pop("sequence_ids", None)
    mask = Mask(is_causal, sliding_window, key.shape[2] - query.shape[2], padding, sequence_ids)
    arguments = (query, key, value, composition(pre), composition(post))
    return compiled_attention(
        *arguments, scaling=int(query.shape[-1]) ** -0.5, mask=mask, chunk_size=chunk_size, **options
    )


def test_one_graph_each_way_serves_all_lengths_batches_and_windows():
    torch._dynamo.reset()
    counters.clear()
    branches = {"pre": ("query_low_rank", "key_gate"), "post": ("query_gate", "key_low_rank"), "rank": 1}
    # The first chunk of the first sees as many keys as it has queries, and in the last one chunk is all there is.
    for batch, queries, keys, window in ((2, 21, 21, None), (3, 50, 50, None), (2, 15, 33, 5), (2, 7, 7, None)):
        inputs = make_inputs(batch=batch, queries=queries, keys=keys, channels=8, **branches)
        options = {"sliding_window": window}
        exact, exact_gradients = value_and_gradients(composed_attention_reference, inputs, **options)
        output, gradients = value_and_gradients(attend, inputs.to(torch.float32), **options)
        assert_close(output.double(), exact, **FLOAT32)
        for name, gradient in gradients.items():
            assert_close(gradient.double(), exact_gradients[name], msg=name, **FLOAT32_GRADIENT)
        assert counters["stats"]["unique_graphs"] == 2  # forward and backward


@pytest.mark.parametrize("window", [None, 5], ids=["global", "win5"])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("kind", ["band", "documents", "dense"])
def test_chunks_hold_every_key_in_sight_and_few_others(kind, is_causal, window):
    length = 150
    ids = torch.tensor([[0] * 40 + [1] * 70 + [2] * 40, [0] * 30 + [1] * 90 + [2] * 30])
    visible = visible_keys(length, length, is_causal=is_causal, sliding_window=window)
    mask = Mask(is_causal, window)
    if kind == "documents":
        mask = mask._replace(sequence_ids=ids)
        visible = visible & (ids[:, :, None] == ids[:, None, :]).any(0)
    elif kind == "dense":
        dense = (torch.arange(length)[:, None] // 30 == torch.arange(length) // 30)[None, None]
        mask = mask._replace(visible=dense)
        visible = visible & dense[0, 0]
    for chunk in split_into_chunks(mask, length, length, 20):
        seen = visible[chunk.start : chunk.stop].any(0).nonzero()
        assert int(seen[0]) - 15 <= chunk.first <= int(seen[0])
        assert int(seen[-1]) < chunk.last <= int(seen[-1]) + 16


def test_a_last_query_that_would_be_alone_joins_the_chunk_before():
    assert [chunk[:2] for chunk in split_into_chunks(Mask(), 9, 9, 4)] == [(0, 4), (4, 9)]
    assert [chunk[:2] for chunk in split_into_chunks(Mask(), 1, 9, 4)] == [(0, 1)]


def test_where_documents_begin_is_read_once_for_all_layers_and_again_when_it_changes(monkeypatch):
    reads = []
    read = chunks_module._seen_by_documents
    monkeypatch.setattr(chunks_module, "_seen_by_documents", lambda *given: reads.append(1) or read(*given))
    ids = torch.tensor([[0] * 32 + [1] * 32])
    first_keys = [[chunk.first for chunk in split_into_chunks(Mask(sequence_ids=ids), 64, 64, 16)] for _ in range(3)]
    assert first_keys == [[0, 0, 32, 32]] * 3 and len(reads) == 1
    ids[:, 16:] = 1
    assert [chunk.first for chunk in split_into_chunks(Mask(sequence_ids=ids), 64, 64, 16)] == [0, 16, 16, 16]


def test_keys_outside_the_band_and_the_document_are_not_touched(not_compiled):
    inputs = make_inputs(batch=1, queries=96, heads=4)
    ids = torch.tensor([[0] * 48 + [1] * 48])
    for options in ({"sliding_window": 5}, {"sequence_ids": ids}):
        expected = attend(*inputs, **options, chunk_size=16)
        unseen = inputs.map(lambda tensor: tensor.clone())
        for tensor in (unseen.key, unseen.value, unseen.pre.key.factors, unseen.post.key.factors):
            tensor[:, :, :48] = (
                torch.nan
            )  # the last two chunks see from 60 on in the window, from 48 on in the document
        assert_close(attend(*unseen, **options, chunk_size=16)[:, :, 64:], expected[:, :, 64:], rtol=0, atol=0)


def test_what_is_kept_for_the_gradient_is_no_larger_than_the_inputs(not_compiled):
    inputs = make_inputs(queries=64).leaves()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda x: x):
        attend(*inputs, chunk_size=16)
    # A chunk's scores are 2 x 4 x 16 x 64.
    assert len(kept) == len(inputs.tensors()) and max(shape.numel() for shape in kept) < 2 * 4 * 16 * 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bit_error_is_at_most_twice_that_of_plain_eager_attention(dtype, not_compiled):
    inputs = make_inputs(queries=64, channels=16).to(dtype)
    visible = visible_keys(64, 64, is_causal=True, sliding_window=None)
    exact = composed_attention_reference(*inputs.to(torch.float64))
    error, plain = (
        (output.double() - exact).square().mean().sqrt()
        for output in (attend(*inputs, chunk_size=16), sixteen_bit_attention(inputs, visible))
    )
    assert error <= 2 * plain


def test_dropout_drops_the_same_weights_in_the_gradient(not_compiled):
    # Identity values show the weights, and their gradient sums the weights over queries.
    inputs = make_inputs(value_channels=20)
    value = torch.eye(20, dtype=torch.float64).expand(2, 4, 20, 20).clone().requires_grad_()
    inputs = inputs._replace(value=value)
    weights = attend(*inputs)
    dropped = attend(*inputs, dropout=0.5)
    kept = dropped != 0
    assert_close(dropped, torch.where(kept, 2 * weights, 0.0), **EXACT)
    # 1680 visible weights: half of them within four standard deviations of a binomial.
    assert abs(int(kept.sum()) - 840) < 4 * 1680**0.5 / 2
    (gradient,) = torch.autograd.grad(dropped.sum(), value)
    assert_close(gradient, dropped.sum(2)[..., None].expand_as(gradient).detach(), **EXACT)


def test_a_bias_alone_can_have_the_gradient(not_compiled):
    inputs = make_inputs()
    bias = torch.randn(1, 4, 20, 20, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(inputs.query.shape, dtype=torch.float64)
    gradients = [
        torch.autograd.grad(attention(*inputs, **{name: bias}), bias, cotangent)[0]
        for attention, name in ((attend, "bias"), (composed_attention_reference, "attention_mask"))
    ]
    assert_close(gradients[0], gradients[1], **EXACT)


def test_second_derivatives_are_refused(not_compiled):
    leaves = make_inputs().leaves()
    with pytest.raises(ValueError, match="Second derivatives"):
        torch.autograd.grad(attend(*leaves).sum(), leaves.query, create_graph=True)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_tracers_and_transformations_see_plain_operations():
    inputs = make_inputs(batch=1, heads=2)
    expected = composed_attention_reference(*inputs)
    function = functools.partial(attend, pre=inputs.pre, post=inputs.post)
    traced = torch.jit.trace(lambda *given: function(*given), inputs[:3], check_trace=False)
    assert_close(traced(*inputs[:3]), expected, **EXACT)
    output, _ = torch.func.jvp(lambda query: function(query, *inputs[1:3]), (inputs.query,), (inputs.query,))
    assert_close(output, expected, **EXACT)
    meta = make_inputs(pre=BRANCHES).map(lambda tensor: tensor.to("meta"))
    assert attend(*meta).shape == (2, 4, 20, 3)
