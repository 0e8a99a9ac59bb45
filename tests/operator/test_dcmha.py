"""Every implementation of composed attention against the reference, and what a call of the operator promises."""

import functools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from operator_inputs import (
    BRANCHES,
    CASES,
    FORMS,
    TOLERANCES,
    VARIANTS,
    Case,
    Inputs,
    LargestMemory,
    attend,
    boolean_mask,
    float_mask,
    hold_to_the_reference,
    left_padding,
    make_inputs,
    make_weights,
    right_padding,
    shared_boolean_mask,
    sixteen_bit_attention,
    supports,
    value_and_gradients,
)
from reference import composed_attention_reference, hidden_pairs, reference_attention, reference_compose
from tiny_models import random_tokens, tiny_model
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode
from transformers import StaticCache

from dcformer import dcmha
from dcformer.dcmha import (
    ComposeWeights,
    Visibility,
    compose,
    composed_attention,
    explain_choice,
    register_implementation,
)


# float64 against float64: sums of some hundred terms of order 1 to 10 in another order.
EXACT = {"rtol": 1e-12, "atol": 1e-12}
every_form = pytest.mark.parametrize("form", VARIANTS, indirect=True)


def forms_with(*dtypes: torch.dtype):
    """Every implementation with each of these number types in which it is held to the reference."""
    pairs = [(form, dtype) for form in VARIANTS for dtype in FORMS[form.partition("-")[0]] if dtype in dtypes]
    return pytest.mark.parametrize(("form", "dtype"), pairs, ids=str, indirect=["form"])


def forms_and(cases: dict[str, Case]):
    """Every case with every implementation that supports it."""
    pairs = [(form, name) for form in VARIANTS for name, case in cases.items() if supports(form, case)]
    parameters = [pytest.param(form, cases[name], id=f"{form}-{name}") for form, name in pairs]
    return pytest.mark.parametrize(("form", "case"), parameters, indirect=["form"])


@forms_and(CASES)
def test_output_and_gradients_equal_the_reference(form, case):
    inputs, options = case.build()
    for dtype in FORMS[form]:
        if dtype in TOLERANCES and dtype != torch.float16:
            hold_to_the_reference(form, inputs, dtype, **options)


@st.composite
def problems(draw):
    """Random shapes and options that fit together."""
    groups, per_group = draw(st.sampled_from([(1, 1), (1, 4), (2, 2), (2, 3), (3, 1)]))
    heads, queries = groups * per_group, draw(st.integers(1, 40))
    branches = st.none() | st.lists(st.sampled_from(BRANCHES), unique=True).map(tuple)
    shape = {"heads": heads, "groups": groups, "queries": queries, "keys": draw(st.just(queries) | st.integers(1, 40))}
    shape["key_value_heads"] = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    shape |= {"value_channels": draw(st.integers(1, 4)), "rank": draw(st.integers(1, 3))}
    shape |= {"pre": draw(branches), "post": draw(branches)}
    options = {"is_causal": draw(st.booleans()), "sliding_window": draw(st.none() | st.integers(1, 12))}
    options["chunk_size"] = draw(st.none() | st.integers(1, 45))
    masks = (left_padding, right_padding, boolean_mask, shared_boolean_mask, float_mask)
    return Case(shape, options, draw(st.none() | st.sampled_from(masks)))


@every_form
@given(case=problems())
@settings(derandomize=True, deadline=None, max_examples=60)
def test_any_problem_equals_the_reference(form, case):
    if supports(form, case):
        inputs, options = case.build()
        hold_to_the_reference(form, inputs, FORMS[form][0], **options)


LAYOUTS = {
    # As a cache hands them out.
    "in_wider_rows": lambda tensor: torch.nn.functional.pad(tensor, (0, 3), value=torch.nan)[..., :-3],
    "channels_before_the_length": lambda tensor: tensor.mT.contiguous().mT,
    "length_before_the_heads": lambda tensor: tensor.transpose(0, 1).contiguous().transpose(0, 1),
}


@forms_with(torch.float64, torch.float32, torch.bfloat16)
@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_strided_inputs_equal_contiguous_ones_and_stay_as_they_are(layout, queries, form, dtype):
    inputs = make_inputs(queries=queries, keys=20, key_value_heads=2).to(dtype)
    actual = value_and_gradients(lambda *leaves: attend(form, *Inputs(*leaves).map(layout)), inputs)
    expected = value_and_gradients(functools.partial(attend, form), inputs)
    assert_close(actual, expected)
    fresh = make_inputs(queries=queries, keys=20, key_value_heads=2).to(dtype)
    assert all(torch.equal(tensor, fresh.tensors()[name]) for name, tensor in inputs.tensors().items())


DRAW = torch.rand(2, 1, 210, 210, generator=torch.Generator().manual_seed(5))
MASKS = {
    "padding": DRAW[:, 0, 0] > 0.3,
    "sequence_ids": torch.arange(210) // torch.tensor([[70], [50]]),
    "boolean": DRAW > 0.4,
    "float": torch.where(DRAW < 0.3, -torch.inf, DRAW),
}


def visibility_by(name, mask, **options):
    return Visibility(210, 210, **{name if mask.dim() == 2 else "dense": mask}, **options)


@every_form
@pytest.mark.parametrize("name", MASKS)
def test_masks_of_any_strides_over_several_tiles_equal_the_reference(name, form):
    mask = torch.stack((MASKS[name], 1 - MASKS[name].float()), dim=-1).to(MASKS[name].dtype)[..., 0]
    if mask.dim() == 4:
        mask = mask.mT.contiguous().mT
    inputs = make_inputs(heads=2, queries=210, rank=1, post=None)
    hold_to_the_reference(form, inputs, FORMS[form][0], attention_mask=visibility_by(name, mask))


def minus_first_queries(*hidden_numbers, dtype=torch.float32):
    """A mask that hides all keys from the first four queries, by these numbers in turn."""
    hidden = torch.tensor(hidden_numbers).repeat(20)[:20].expand(4, 20)
    return lambda *shape: torch.cat((hidden, torch.zeros(16, 20))).to(dtype).expand(2, 1, 20, 20)


BLIND = {
    "left_padding": Case(mask=left_padding),
    "more_queries_than_keys": Case({"queries": 24, "keys": 20}),
    "boolean_mask": Case(mask=lambda *shape: torch.arange(20).ge(4)[None, None, :, None].expand(2, 1, -1, 20)),
    "float_mask_of_minus_infinity": Case(mask=minus_first_queries(-torch.inf)),
    "float_mask_of_less_than_half_the_smallest_number": Case(mask=minus_first_queries(-torch.inf, -1.71e38)),
    "float16_mask_of_the_smallest_number": Case(mask=minus_first_queries(-65504.0, dtype=torch.float16)),
}


@forms_and(BLIND)
def test_a_query_that_sees_no_key_gets_exact_zeros_and_no_gradient(form, case):
    inputs, options = case.build()
    inputs = inputs.to(FORMS[form][0])
    output, gradients = value_and_gradients(functools.partial(attend, form), inputs, **options)
    assert output[0, :, :4].eq(0).all() and output[0, :, 4:].ne(0).all()
    assert gradients["query"][0, :, :4].eq(0).all() and gradients["query"][0, :, 5:].ne(0).all()
    assert all(gradient.isfinite().all() for gradient in gradients.values())


@forms_with(torch.bfloat16, torch.float16)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 20}], ids=["all_keys", "window_20"])
@pytest.mark.parametrize("queries", [64, 1], ids=["square", "one_query"])
def test_sixteen_bit_error_is_at_most_twice_that_of_plain_eager_attention(queries, options, form, dtype):
    inputs = make_inputs(batch=3, queries=queries, keys=64, channels=16).to(dtype)
    visible = ~hidden_pairs(Visibility(queries, 64, **options), inputs.query.device)
    expected = value_and_gradients(composed_attention_reference, inputs.to(torch.float64), **options)
    actual = value_and_gradients(functools.partial(attend, form), inputs, **options)
    eager = value_and_gradients(lambda *leaves: sixteen_bit_attention(Inputs(*leaves), visible), inputs)
    named = [{"output": output, **gradients} for output, gradients in (actual, eager, expected)]
    for name in named[0]:
        tensor, of_eager, exact = (tensors[name] for tensors in named)
        assert tensor.dtype == dtype
        assert (tensor - exact).norm() <= 2 * (of_eager - exact).norm(), name


@forms_with(torch.float16)
def test_scores_are_scaled_before_they_can_leave_the_range_of_float16(form, dtype):
    # Products of up to 230,400, a thirty-second of it scaled.
    inputs = make_inputs(queries=16, channels=64, value_channels=3, pre=None, post=None)
    inputs = inputs._replace(query=60 * inputs.query.sign(), key=60 * inputs.key.sign()).to(dtype)
    exact = composed_attention_reference(*inputs.to(torch.float64), scaling=1 / 32)
    assert_close(attend(form, *inputs, scaling=1 / 32).double(), exact, atol=2e-3, rtol=2e-3)


@every_form
def test_one_input_alone_gets_its_gradient(form):
    inputs = make_inputs().to(FORMS[form][0])
    _, expected = value_and_gradients(functools.partial(attend, form), inputs)
    for name, tensor in inputs.tensors().items():
        leaf = tensor.clone().requires_grad_()
        output = attend(form, *inputs.map(lambda other, tensor=tensor, leaf=leaf: leaf if other is tensor else other))
        cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output.dtype)
        assert_close(torch.autograd.grad(output, leaf, cotangent)[0], expected[name])


@every_form
def test_autocast_changes_nothing(form):
    inputs = make_inputs().to(torch.float32)
    autocast_forward = torch.autocast("cpu", torch.bfloat16)(functools.partial(attend, form))
    actual = value_and_gradients(autocast_forward, inputs)
    assert_close(actual, value_and_gradients(functools.partial(attend, form), inputs), rtol=0, atol=0)


@pytest.mark.parametrize("queries", [8, 20])
def test_mixed_types_are_computed_in_the_wider_one(queries):
    inputs = make_inputs(queries=queries)
    narrow = inputs.query.to(torch.bfloat16)
    output = composed_attention(narrow, *inputs[1:])
    assert_close(output, composed_attention_reference(narrow.double(), *inputs[1:]).to(torch.bfloat16))


@pytest.mark.parametrize("groups", [1, 2, 4], ids="{}_groups".format)
def test_compose_equals_the_reference_and_groups_do_not_see_each_other(groups):
    weights = make_weights(queries=5, keys=6, groups=groups)
    attention = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    assert_close(compose(attention, weights), reference_compose(attention, weights), **EXACT)
    for nothing in (None, ComposeWeights(groups=groups)):
        assert torch.equal(compose(attention, nothing), attention)
    changed = attention.clone()
    changed[:, : 4 // groups] += 1.0  # the first group
    difference = (compose(changed, weights) - compose(attention, weights)).abs().amax((0, 2, 3))
    assert (difference > 0).tolist() == [head < 4 // groups for head in range(4)]


def test_weights_equal_the_reference_and_are_exactly_zero_where_hidden():
    inputs, padding = make_inputs(queries=9, key_value_heads=2), left_padding(2, 4, 9, 9)
    mask = Visibility(9, 9, sliding_window=4, padding=padding)
    output, weights = composed_attention(*inputs, sliding_window=4, attention_mask=padding, return_weights=True)
    assert_close((output, weights), reference_attention(*inputs, scaling=3**-0.5, mask=mask), **EXACT)
    assert torch.equal(weights == 0, hidden_pairs(mask, weights.device).expand_as(weights))


def test_dropout_drops_composed_weights_and_the_same_when_a_chunk_is_recomputed():
    # The output is the composed weights themselves.
    inputs = make_inputs()._replace(value=torch.eye(20, dtype=torch.float64).expand(2, 4, -1, -1))
    weights, dropped = composed_attention(*inputs), composed_attention(*inputs, dropout=0.5)
    kept = dropped != 0
    assert_close(dropped, torch.where(kept, 2 * weights, 0.0), **EXACT)
    # 1680 visible weights: half of them within four standard deviations of a binomial.
    assert abs(int(kept.sum()) - 840) < 4 * 1680**0.5 / 2
    leaves = make_inputs().leaves()
    dropped = composed_attention(*leaves, dropout=0.5, chunk_size=6)
    (gradient,) = torch.autograd.grad(dropped.sum(), leaves.value)
    assert_close((gradient * leaves.value).sum(), dropped.sum(), **EXACT)  # the output is linear in the values


@pytest.mark.parametrize("shape", [{"batch": 0}, {"queries": 20, "keys": 0}, {"queries": 0, "keys": 4}], ids=str)
def test_empty_inputs_give_zeros_of_the_right_shape(shape):
    inputs = make_inputs(**shape)
    zeros, no_weights = torch.zeros_like(inputs.query), inputs.query @ inputs.key.mT
    assert_close(composed_attention(*inputs), zeros)
    assert_close(composed_attention(*inputs, return_weights=True), (zeros, torch.zeros_like(no_weights)))


def on_tensors(inputs: Inputs, attention):
    """An attention as a function of all its tensors, and those tensors."""
    places = {id(tensor): place for place, tensor in enumerate(inputs.tensors().values())}

    def function(*tensors, **options):
        return attention(*inputs.map(lambda tensor: tensors[places[id(tensor)]]), **options)

    return function, tuple(inputs.tensors().values())


@pytest.mark.parametrize("options", [{}, {"sliding_window": 2, "chunk_size": 2}], ids=["at_once", "recomputed"])
def test_first_and_second_derivatives_equal_finite_differences(options):
    inputs = make_inputs(batch=1, heads=2, key_value_heads=1, queries=3, channels=2, rank=1).leaves()
    function, tensors = on_tensors(inputs, functools.partial(attend, "plain", **options))
    assert torch.autograd.gradcheck(function, tensors, fast_mode=bool(options))
    assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True)


@pytest.mark.parametrize("name", MASKS)
def test_torch_func_gives_every_sample_the_gradients_under_its_mask(name):
    inputs, masks = make_inputs(batch=1, heads=2, queries=210, rank=1), MASKS[name]
    function, (query, *others) = on_tensors(inputs, functools.partial(composed_attention, chunk_size=64))
    reference, _ = on_tensors(inputs, composed_attention_reference)
    queries = torch.stack([query, -query])

    def loss(function, mask, *tensors):
        return function(*tensors, attention_mask=visibility_by(name, mask[None], sliding_window=9)).square().sum()

    gradient = torch.func.grad(functools.partial(loss, function), tuple(range(1, 2 + len(others))))
    gradients = torch.func.vmap(gradient, (0, 0, *[None] * len(others)))(masks, queries, *others)
    for sample, (query, mask) in enumerate(zip(queries, masks)):
        leaves = [tensor.clone().requires_grad_() for tensor in (query, *others)]
        expected = torch.autograd.grad(loss(reference, mask, *leaves), leaves)
        assert_close([each[sample] for each in gradients], list(expected), **EXACT)


def test_a_learned_bias_gets_its_gradient():
    inputs, bias = make_inputs(), torch.zeros(2, 1, 20, 20, dtype=torch.float64, requires_grad=True)
    outputs = (each(*inputs, attention_mask=bias) for each in (composed_attention, composed_attention_reference))
    assert_close(*(torch.autograd.grad(output.square().sum(), bias)[0] for output in outputs), **EXACT)


def cost(length: int, heads: int = 2, *, backward: bool = False, **options) -> tuple[int, int]:
    """The most bytes at once, and the operations of all matrix products."""
    inputs = make_inputs(batch=1, heads=heads, queries=length, channels=16).to(torch.float32)
    inputs = inputs.leaves() if backward else inputs
    with LargestMemory() as memory, FlopCounterMode(display=False) as operations:
        output = attend("plain", *inputs, **options)
        if backward:
            torch.autograd.grad(output, list(inputs.tensors().values()), torch.ones_like(output))
    return memory.most, operations.get_total_flops()


def test_memory_of_the_plain_form_grows_linearly_with_the_length():
    for backward in (False, True):
        short, long = (cost(length, backward=backward, chunk_size=32)[0] for length in (128, 256))
        assert 1.5 < long / short < 2.5
    assert cost(1024, heads=4)[0] <= 4 * 1024 * 1024 * 4 * 2  # by default, a fraction of all scores


def test_a_window_and_packed_documents_spare_the_work_of_what_is_out_of_sight():
    all_keys, in_window = (cost(1024, chunk_size=64, sliding_window=window)[1] for window in (None, 64))
    assert 0 < in_window < all_keys / 4
    assert cost(2048, chunk_size=64, sliding_window=64)[1] < 2.2 * in_window
    ids = torch.arange(8).repeat_interleave(128)[None]
    _, packed = cost(1024, chunk_size=64, attention_mask=Visibility(1024, 1024, sequence_ids=ids))
    assert packed <= 1.3 * 8 * cost(128, chunk_size=64)[1]


def doubled(*arguments, dropout, chunk_size=None, **options):
    """An implementation from outside: twice what is right, so that its use shows."""
    return 2 * reference_attention(*arguments, **options)[0]


def not_beyond_30_keys(query, key, value, pre, post, *, mask, dropout):
    return None if key.shape[2] <= 30 else f"it takes 30 keys at most, and there are {key.shape[2]}"


@pytest.fixture(autouse=True)
def table(monkeypatch):
    """The table of implementations, as it was again afterwards."""
    monkeypatch.setattr(dcmha, "BACKENDS", dict(dcmha.BACKENDS))


def test_an_implementation_from_outside_is_chosen_by_name_in_the_operator_and_in_models():
    register_implementation("doubled", doubled, not_beyond_30_keys)
    inputs = make_inputs(queries=20)
    expected = composed_attention(*inputs)
    assert_close(composed_attention(*inputs, implementation="doubled"), 2 * expected, **EXACT)
    assert_close(composed_attention(*inputs), expected, atol=0, rtol=0)  # it is not automatic
    model, tokens = tiny_model(), random_tokens(2, 20)
    as_always = model(tokens).logits
    model.set_attn_implementation("dcmha_doubled")
    assert not torch.allclose(model(tokens).logits, as_always, atol=1e-2)
    named = tiny_model(attn_implementation="dcmha_doubled")
    assert torch.equal(named(tokens).logits, model(tokens).logits)
    static = StaticCache(config=named.config, max_cache_len=24)  # its mask is a tensor, by Transformers' mask interface
    assert_close(named(tokens, cache=static).logits, named(tokens).logits, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match=r"'doubled' cannot run here: it takes 30 keys at most, and there are 31"):
        named(random_tokens(2, 31))


def test_what_was_registered_last_is_tried_first_and_the_choice_is_explained():
    register_implementation("doubled", doubled, automatic=not_beyond_30_keys)
    few, many = (make_inputs(queries=4, keys=keys) for keys in (30, 31))
    assert explain_choice(*few) == [("doubled", None)]
    reasons = explain_choice(*many)
    assert reasons[0] == ("doubled", "it takes 30 keys at most, and there are 31")
    assert reasons[-1][1] is None and list(dict(reasons))[-1] in FORMS
    assert_close(composed_attention(*few), 2 * composed_attention_reference(*few), **EXACT)
    assert_close(composed_attention(*many), composed_attention_reference(*many), **EXACT)
    register_implementation("doubled", doubled)
    assert explain_choice(*few) == reasons[1:]
    with pytest.raises(ValueError, match=r"implementation must be one of plain, .*got 'gpu'"):
        composed_attention(*few, implementation="gpu")
