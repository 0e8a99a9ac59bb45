"""`compose` against explicit heads x heads maps, and both forms of `composed_attention` against the reference."""

import functools
import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from operator_inputs import (
    BRANCHES,
    FORMS,
    MASKED_CASES,
    ONE_QUERY_CASES,
    SHAPED_CASES,
    VECTORISED_CASES,
    Case,
    Inputs,
    attend,
    boolean_mask,
    boolean_mask_per_head,
    choice_of,
    explicit_attention,
    explicit_compose,
    float_mask,
    left_padding,
    make_inputs,
    make_weights,
    right_padding,
    shared_boolean_mask,
    sixteen_bit_attention,
    value_and_gradients,
    visible_keys,
)
from tiny_models import random_tokens, tiny_model
from torch.testing import assert_close
from transformers import StaticCache

from dcformer.dcmha import (
    ComposeSide,
    ComposeWeights,
    compose,
    composed_attention,
    composed_attention_reference,
    explain_choice,
    implementations,
    register_implementation,
)
from dcformer.dcmha_cache import pack, unpack
from dcformer.dcmha_mask import Visibility
from dcformer.dcmha_reference import reference_attention, reference_compose


# float64 against float64: sums of some hundred terms of order 1 to 10 in another order.
EXACT = {"rtol": 1e-12, "atol": 1e-12}
# The same, times the further sums over queries and keys in a gradient.
EXACT_GRADIENT = {"rtol": 1e-11, "atol": 1e-11}

both_forms = pytest.mark.parametrize("form", FORMS)


def by_name(cases: dict[str, Case]):
    return pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in cases.items()])


@pytest.mark.parametrize("rank", [1, 2, 4], ids="rank_{}".format)
@pytest.mark.parametrize("groups", [1, 2, 4], ids="{}_groups".format)
def test_compose_equals_one_explicit_map_per_query_and_key(groups, rank):
    weights = make_weights(queries=5, keys=6, rank=rank, groups=groups)
    attention = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    for form in (compose, reference_compose):
        assert_close(form(attention, weights), explicit_compose(attention, weights), **EXACT)
    one_query = attention[:, :, :1]
    weights = make_weights(queries=1, keys=6, rank=rank, groups=groups)
    assert_close(compose(one_query, weights), explicit_compose(one_query, weights), **EXACT)


@pytest.mark.parametrize(
    "branches",
    [*[(branch,) for branch in BRANCHES], *itertools.combinations(BRANCHES, 2)],
    ids="_and_".join,
)
def test_compose_with_some_branches_equals_explicit_maps(branches):
    weights = make_weights(queries=4, keys=5, groups=2, branches=branches)
    attention = torch.randn(2, 4, 4, 5, dtype=torch.float64)
    assert_close(compose(attention, weights), explicit_compose(attention, weights), **EXACT)


@pytest.mark.parametrize(
    "weights",
    [None, ComposeWeights(), ComposeWeights(None, None, groups=2)],
    ids=["none", "no_sides", "empty_sides"],
)
def test_compose_without_branches_is_the_identity(weights):
    attention = torch.randn(2, 4, 5, 5)
    assert torch.equal(compose(attention, weights), attention)


@pytest.mark.parametrize("groups", [2, 4], ids="{}_groups".format)
def test_groups_do_not_see_each_other(groups):
    weights = make_weights(queries=5, groups=groups)
    attention = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    changed = attention.clone()
    changed[:, : 4 // groups] += 1.0  # the first group
    difference = (compose(changed, weights) - compose(attention, weights)).abs().amax((0, 2, 3))
    assert (difference > 0).tolist() == [head < 4 // groups for head in range(4)]


@by_name(
    {
        "causal": Case({"queries": 7}),
        "bidirectional": Case({"queries": 7}, {"is_causal": False}),
        "window_3": Case({"queries": 7}, {"sliding_window": 3}),
        "bidirectional_window_3": Case({"queries": 7}, {"is_causal": False, "sliding_window": 3}),
        "fewer_queries_than_keys": Case({"queries": 3, "keys": 8}, {"sliding_window": 4}),
        "more_queries_than_keys": Case({"queries": 8, "keys": 5}),
        "grouped_query_and_groups": Case({"queries": 6, "key_value_heads": 2, "groups": 2, "value_channels": 2}),
    }
)
def test_reference_equals_the_explicit_equations(case):
    inputs, options = case.build()
    band = {"is_causal": True, "sliding_window": None, **options}
    visible = visible_keys(inputs.query.shape[2], inputs.key.shape[2], **band)
    assert_close(composed_attention_reference(*inputs, **options), explicit_attention(inputs, visible), **EXACT)


@pytest.mark.parametrize("pad", [left_padding, right_padding], ids=["left", "right"])
def test_reference_obeys_padding(pad):
    inputs, padding = make_inputs(queries=7), pad(2, 4, 7, 7)
    visible = visible_keys(7, 7, is_causal=True, sliding_window=None) & padding[:, None, None].bool()
    output = composed_attention_reference(*inputs, attention_mask=padding)
    assert_close(output, explicit_attention(inputs, visible), **EXACT)


def test_reference_obeys_a_boolean_mask_per_head():
    inputs, mask = make_inputs(queries=7), boolean_mask_per_head(2, 4, 7, 7)
    output = composed_attention_reference(*inputs, attention_mask=mask, is_causal=False)
    assert_close(output, explicit_attention(inputs, mask), **EXACT)


def test_reference_adds_a_float_mask_to_the_composed_scores():
    inputs, mask = make_inputs(queries=7), float_mask(2, 4, 7, 7)
    visible = mask > torch.finfo(torch.float32).min
    output = composed_attention_reference(*inputs, attention_mask=mask, is_causal=False)
    assert_close(output, explicit_attention(inputs, visible, torch.where(visible, mask, 0.0)), **EXACT)


def test_weights_sum_to_one_without_post_composition():
    _, weights = composed_attention_reference(*make_inputs(post=None), return_weights=True)
    assert_close(weights.sum(-1), torch.ones(2, 4, 20, dtype=torch.float64), **EXACT)


def test_post_composition_does_not_renormalise():
    gate = torch.rand(2, 4, 20, dtype=torch.float64)
    inputs = make_inputs(post=None)._replace(post=ComposeWeights(query=ComposeSide(gate=gate)))
    _, weights = composed_attention_reference(*inputs, return_weights=True)
    assert_close(weights.sum(-1), 1 + gate, **EXACT)


def test_masked_weights_of_the_reference_are_exactly_zero():
    padding = left_padding(2, 4, 9, 9)
    _, weights = composed_attention_reference(
        *make_inputs(queries=9), sliding_window=4, attention_mask=padding, return_weights=True
    )
    visible = visible_keys(9, 9, is_causal=True, sliding_window=4) & padding[:, None, None].bool()
    assert torch.equal(weights != 0, visible.expand_as(weights))


def with_identity_values(inputs):
    """Inputs whose output is the composed weights themselves."""
    batch, heads, keys = *inputs.query.shape[:2], inputs.key.shape[2]
    return inputs._replace(value=torch.eye(keys, dtype=inputs.query.dtype).expand(batch, heads, -1, -1))


@both_forms
def test_masked_weights_of_both_forms_are_exactly_zero(form):
    padding = left_padding(2, 4, 20, 20)
    inputs = with_identity_values(make_inputs())
    weights = attend(form, *inputs, sliding_window=5, attention_mask=padding, chunk_size=8)
    visible = visible_keys(20, 20, is_causal=True, sliding_window=5) & padding[:, None, None].bool()
    assert torch.equal(weights != 0, visible.expand_as(weights))


def assert_value_and_gradients_equal_the_reference(function, case):
    inputs, options = case.build()
    output, gradients = value_and_gradients(function, inputs, **options)
    options.pop("chunk_size", None)
    expected, expected_gradients = value_and_gradients(composed_attention_reference, inputs, **options)
    assert_close(output, expected, **EXACT)
    assert_close(gradients, expected_gradients, **EXACT_GRADIENT)


@both_forms
@by_name({**MASKED_CASES, **SHAPED_CASES})
def test_output_and_gradients_equal_the_reference(case, form):
    assert_value_and_gradients_equal_the_reference(functools.partial(attend, form), case)


@by_name(VECTORISED_CASES)
def test_short_or_per_head_problems_take_the_chunked_form_and_equal_the_reference(case):
    assert choice_of(case) == "chunked"
    assert_value_and_gradients_equal_the_reference(composed_attention, case)


@pytest.mark.parametrize("form", ["one_query", "chunked"])
@by_name(ONE_QUERY_CASES)
def test_one_query_equals_the_reference(case, form):
    assert choice_of(case) == "one_query"
    assert_value_and_gradients_equal_the_reference(functools.partial(attend, form), case)


def test_one_query_over_the_rows_of_a_cache_equals_the_reference():
    inputs = make_inputs(queries=1, keys=9, channels=8)
    (key, pre), (value, post) = (
        unpack(pack(states, stage.key), 8, stage.key, heads=4)
        for states, stage in ((inputs.key, inputs.pre), (inputs.value, inputs.post))
    )
    cached = Inputs(inputs.query, key, value, inputs.pre._replace(key=pre), inputs.post._replace(key=post))
    assert not cached.key.is_contiguous()
    assert_close(composed_attention(*cached), composed_attention_reference(*inputs), **EXACT)


def test_sixteen_queries_on_a_cpu_take_its_form():
    assert choice_of(Case()) == "cpu"
    assert composed_attention(*make_inputs(queries=16)).isfinite().all()


@st.composite
def problems(draw):
    """A form, and random shapes and options that fit together and that the form accepts."""
    form = draw(st.sampled_from(FORMS))
    groups, per_group = draw(st.sampled_from([(1, 1), (1, 4), (2, 2), (2, 3), (3, 1)]))
    heads = groups * per_group
    queries = draw(st.integers(16 if form == "cpu" else 1, 40))
    branches = st.none() | st.lists(st.sampled_from(BRANCHES), unique=True).map(tuple)
    shape = {
        "heads": heads,
        "key_value_heads": draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0])),
        "queries": queries,
        "keys": draw(st.just(queries) | st.integers(1, 40)),
        "value_channels": draw(st.integers(1, 4)),
        "rank": draw(st.integers(1, 3)),
        "groups": groups,
        "pre": draw(branches),
        "post": draw(branches),
    }
    options = {
        "is_causal": draw(st.booleans()),
        "sliding_window": draw(st.none() | st.integers(1, 12)),
        "chunk_size": draw(st.none() | st.integers(1, 45)),
    }
    masks = (left_padding, right_padding, boolean_mask, shared_boolean_mask, float_mask)
    return form, Case(shape, options, draw(st.none() | st.sampled_from(masks)))


@given(problem=problems())
@settings(derandomize=True, deadline=None, max_examples=300)
def test_any_problem_equals_the_reference(problem):
    form, case = problem
    assert_value_and_gradients_equal_the_reference(functools.partial(attend, form), case)


@both_forms
@pytest.mark.parametrize("queries", [20, 17], ids=["square", "fewer_queries"])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "bidirectional"])
def test_a_key_reaches_exactly_the_queries_whose_window_holds_it(is_causal, queries, form):
    window, position, offset = 5, 9, 20 - queries
    inputs = make_inputs(queries=queries, keys=20)

    def disturbed(tensor):
        """Everything that belongs to key `position` changed: its states and its compose weights."""
        tensor = tensor.clone()
        tensor[:, :, position] += 1.0
        return tensor

    pre, post = (
        stage._replace(key=ComposeSide(factors=disturbed(stage.key.factors))) for stage in (inputs.pre, inputs.post)
    )
    changed = inputs._replace(key=disturbed(inputs.key), value=disturbed(inputs.value), pre=pre, post=post)
    options = {"is_causal": is_causal, "sliding_window": window, "chunk_size": 8}
    difference = (attend(form, *changed, **options) - attend(form, *inputs, **options)).abs().amax((0, 1, 3))
    positions = range(offset, 20)
    first = position if is_causal else position - window + 1
    assert (difference > 0).tolist() == [first <= t < position + window for t in positions]


BLIND = {
    "left_padding": Case(mask=left_padding),
    "more_queries_than_keys": Case({"queries": 24, "keys": 20}),
    "boolean_mask": Case(mask=lambda *shape: torch.arange(20).ge(4)[None, None, :, None].expand(2, 1, -1, 20)),
    "float_mask_of_minus_infinity": Case(
        mask=lambda *shape: torch.zeros(2, 1, 20, 20).index_fill(2, torch.arange(4), -torch.inf)
    ),
    "float_mask_of_the_smallest_number": Case(
        mask=lambda *shape: torch.zeros(2, 1, 20, 20).index_fill(2, torch.arange(4), torch.finfo(torch.float32).min)
    ),
    "float16_mask_of_the_smallest_number": Case(
        mask=lambda *shape: torch.zeros(2, 1, 20, 20).index_fill(2, torch.arange(4), -65504.0).half()
    ),
}


@both_forms
@by_name(BLIND)
def test_a_query_that_sees_no_key_gets_exact_zeros_and_no_gradient(case, form):
    inputs, options = case.build()
    output, gradients = value_and_gradients(functools.partial(attend, form), inputs, **options)
    assert output[0, :, :4].eq(0).all() and output[0, :, 4:].ne(0).all()
    assert gradients["query"][0, :, :4].eq(0).all() and gradients["query"][0, :, 5:].ne(0).all()
    assert all(gradient.isfinite().all() for gradient in gradients.values())


@both_forms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_output_and_gradients_have_the_dtype_of_the_inputs(dtype, form):
    output, gradients = value_and_gradients(functools.partial(attend, form), make_inputs().to(dtype))
    assert {output.dtype, *(gradient.dtype for gradient in gradients.values())} == {dtype}


def root_mean_square(tensor):
    return tensor.double().pow(2).mean().sqrt()


@both_forms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bit_error_is_at_most_twice_that_of_plain_eager_attention(dtype, form):
    inputs = make_inputs(queries=64, channels=16).to(dtype)
    visible = visible_keys(64, 64, is_causal=True, sliding_window=None)
    exact = composed_attention_reference(*inputs.to(torch.float64))
    error = root_mean_square(attend(form, *inputs) - exact)
    assert error <= 2 * root_mean_square(sixteen_bit_attention(inputs, visible) - exact)


@both_forms
def test_compositions_of_sixteen_bit_inputs_run_in_float32(form):
    # Whole numbers make the scores exact in bfloat16 and identity values show the weights, so that all that is left to
    # round is the weights themselves: half a unit of 2^-8. Composing in 16 bit is off by a few percent.
    inputs = with_identity_values(make_inputs())
    inputs = inputs._replace(query=inputs.query.round(), key=inputs.key.round()).to(torch.bfloat16)
    exact = composed_attention_reference(*inputs.to(torch.float64), scaling=0.25)
    assert_close(attend(form, *inputs, scaling=0.25).double(), exact, rtol=2**-8, atol=1e-5)


def test_dropout_drops_composed_weights_and_scales_up_the_rest():
    inputs = with_identity_values(make_inputs())
    weights = composed_attention(*inputs)
    dropped = composed_attention(*inputs, dropout=0.5)
    kept = dropped != 0
    assert_close(dropped, torch.where(kept, 2 * weights, 0.0), **EXACT)
    # 1680 visible weights: half of them within four standard deviations of a binomial.
    assert abs(int(kept.sum()) - 840) < 4 * 1680**0.5 / 2


def test_dropout_preserves_the_expectation():
    copies, per_row = 400, BRANCHES[1:]  # all branches but the static one have a batch axis
    inputs = make_inputs(batch=1, queries=16, pre=per_row, post=per_row)
    draws = composed_attention(*inputs.map(lambda tensor: tensor.expand(copies, *tensor.shape[1:])), dropout=0.5)
    deviation = draws.std(0)
    # 192 means of 400 draws each: five standard errors.
    assert ((draws.mean(0) - composed_attention(*inputs)[0]).abs() <= 5 * deviation / copies**0.5).all()
    assert (deviation > 0).all()


@both_forms
def test_inputs_are_not_modified(form):
    inputs = make_inputs(key_value_heads=2, groups=2)
    leaves = inputs.leaves()
    attend(form, *leaves, sliding_window=5, attention_mask=float_mask(2, 4, 20, 20), chunk_size=8).sum().backward()
    for name, tensor in leaves.tensors().items():
        assert torch.equal(tensor, inputs.tensors()[name]), name


@both_forms
def test_strided_inputs_equal_contiguous_ones(form):
    inputs = make_inputs()
    strided = inputs.map(lambda tensor: tensor.mT.contiguous().mT)
    assert_close(attend(form, *strided), attend(form, *inputs), **EXACT)


@both_forms
@pytest.mark.parametrize("name", make_inputs().tensors())
def test_one_input_alone_gets_its_gradient(name, form):
    inputs = make_inputs()
    _, expected = value_and_gradients(composed_attention_reference, inputs)
    leaf = inputs.tensors()[name].clone().requires_grad_()
    arguments = inputs.map(lambda tensor: leaf if tensor is inputs.tensors()[name] else tensor)
    output = attend(form, *arguments)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output.dtype)
    assert_close(torch.autograd.grad(output, leaf, cotangent)[0], expected[name], **EXACT_GRADIENT)


def test_scores_are_scaled_before_they_can_leave_the_range_of_float16():
    inputs = make_inputs(queries=16, channels=64, pre=None, post=None)
    query, key = (
        60 * inputs.query.sign(),
        60 * inputs.key.sign(),
    )  # products of up to 230,400, a thirty-second of it scaled
    query, key, value = (tensor.to(torch.float16) for tensor in (query, key, inputs.value[..., :3]))
    outputs = {form: attend(form, query, key, value, None, None, scaling=1 / 32) for form in FORMS}
    for output in outputs.values():
        assert torch.isfinite(output).all()
    assert_close(outputs["chunked"], outputs["cpu"], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    ("shape", "output_shape"),
    [
        ({"batch": 0}, (0, 4, 20, 3)),
        ({"queries": 20, "keys": 0}, (2, 4, 20, 3)),
        ({"queries": 0, "keys": 4}, (2, 4, 0, 3)),
    ],
    ids=["no_rows", "no_keys", "no_queries"],
)
def test_empty_inputs_give_zeros_of_the_right_shape(shape, output_shape):
    inputs = make_inputs(**shape)
    for attention in (composed_attention, composed_attention_reference):
        assert_close(attention(*inputs), torch.zeros(output_shape, dtype=torch.float64))


@pytest.mark.parametrize("queries", [8, 20], ids=["chunked", "cpu"])
def test_mixed_types_are_computed_in_the_wider_one(queries):
    inputs = make_inputs(queries=queries)
    narrow = inputs.query.to(torch.bfloat16)
    output = composed_attention(narrow, *inputs[1:])
    assert output.dtype == torch.bfloat16
    exact = composed_attention_reference(narrow.double(), *inputs[1:])
    assert_close(output, exact.to(torch.bfloat16))


def test_a_learned_bias_gets_its_gradient():
    inputs = make_inputs()
    bias = torch.zeros(2, 1, 20, 20, dtype=torch.float64, requires_grad=True)
    for attention in (composed_attention, composed_attention_reference):
        (gradient,) = torch.autograd.grad(attention(*inputs, attention_mask=bias).square().sum(), bias)
        assert gradient.abs().max() > 0


def test_second_derivatives_of_the_closed_form_are_refused():
    leaves = make_inputs().leaves()
    with pytest.raises(ValueError, match="Second derivatives"):
        torch.autograd.grad(composed_attention(*leaves).sum(), leaves.query, create_graph=True)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (Visibility(20, 10), "for 20 queries and 10 keys, but there are 20 and 20"),
        (Visibility(10, 20), "for 10 queries and 20 keys"),
        (torch.ones(3, 20), "for a batch of 3, but there are 2 rows"),
        (torch.ones(3, 1, 20, 20, dtype=torch.bool), "for a batch of 3"),
        (torch.ones(1, 3, 20, 20, dtype=torch.bool), "for 3 heads, but there are 4"),
    ],
    ids=["keys", "queries", "padding_rows", "mask_rows", "mask_heads"],
)
def test_a_mask_of_another_size_is_refused(mask, message):
    inputs = make_inputs()
    for attention in (composed_attention, composed_attention_reference):
        with pytest.raises(ValueError, match=message):
            attention(*inputs, attention_mask=mask)


@pytest.mark.parametrize("chunk_size", [0, -1])
def test_a_chunk_size_below_1_is_refused(chunk_size):
    with pytest.raises(ValueError, match=f"chunk_size must be at least 1, got {chunk_size}"):
        composed_attention(*make_inputs(), chunk_size=chunk_size)


def doubled(*arguments, chunk_size=None, **options):
    """An implementation from outside: twice what is right, so that its use shows."""
    return 2 * reference_attention(*arguments, **options)[0]


def not_beyond_30_keys(query, key, value, pre, post, *, mask, dropout):
    return None if key.shape[2] <= 30 else f"it takes 30 keys at most, and there are {key.shape[2]}"


def test_an_implementation_from_outside_is_chosen_by_name_in_the_operator_and_in_models():
    register_implementation("doubled", doubled, not_beyond_30_keys, "to be seen")
    inputs = make_inputs(queries=20)
    expected = composed_attention(*inputs)
    assert_close(composed_attention(*inputs, implementation="doubled"), 2 * expected, atol=1e-6, rtol=0)
    assert_close(composed_attention(*inputs), expected, atol=0, rtol=0)  # it is not automatic
    model, tokens = tiny_model(), random_tokens(2, 20)
    as_always = model(tokens).logits
    model.set_attn_implementation("dcmha_doubled")
    assert not torch.allclose(model(tokens).logits, as_always, atol=1e-2)
    named = tiny_model(attn_implementation="dcmha_doubled")
    assert torch.equal(named(tokens).logits, model(tokens).logits)
    static = StaticCache(config=named.config, max_cache_len=24)  # its mask is a tensor, by Transformers' mask interface
    assert_close(named(tokens, past_key_values=static).logits, named(tokens).logits, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match=r"'doubled' cannot run here: it takes 30 keys at most, and there are 31"):
        named(random_tokens(2, 31))


def test_an_unknown_implementation_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"implementation must be one of reference, chunked, cpu.*got 'gpu'"):
        composed_attention(*make_inputs(queries=4), implementation="gpu")
    with pytest.raises(ValueError, match=r"'cpu' cannot run here: it pays from 16 queries on, and there are 4"):
        composed_attention(*make_inputs(queries=4), implementation="cpu")


def test_the_choice_is_explained():
    short, long = (explain_choice(*make_inputs(queries=queries)) for queries in (4, 20))
    assert short == [
        ("one_query", "it takes a single query, and there are more"),
        ("cpu", "it pays from 16 queries on, and there are 4"),
        ("chunked", implementations()["chunked"].purpose),
    ]
    assert [name for name, _ in long] == ["one_query", "cpu"]
