"""Packing compose weights beside cached states, the size of real caches, and operations on them between forwards."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tiny_models import TINY, random_tokens, tiny_config, tiny_model
from torch.testing import assert_close
from transformers import DynamicCache, StaticCache

from dcformer import DCFormerConfig
from dcformer.dcmha import ComposeSide
from dcformer.dcmha_cache import cache_bytes_per_token, compose_channels, pack, unpack
from dcformer.dcmha_projection import make_compose


any_case = settings(derandomize=True, deadline=None, max_examples=100)


@st.composite
def configs(draw):
    """Small models with every combination of what decides the layout of the cache."""
    key_value_heads, served = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    heads = key_value_heads * served
    switches = ("compose_pre", "compose_post", "compose_query", "compose_key", "compose_low_rank", "compose_gate")
    return DCFormerConfig(
        vocab_size=8,
        hidden_size=4,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=draw(st.integers(1, 6)) * 2,
        compose_rank=draw(st.integers(1, 4)),
        compose_groups=draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0])),
        compose_static=draw(st.booleans()),
        **{name: draw(st.booleans()) for name in switches},
    )


def key_sides(config, batch, length):
    """What a layer of this model computes for its keys, before and after the softmax."""
    compose = make_compose(config)
    if compose is None:
        return [None, None]
    for parameter in compose.parameters():
        torch.nn.init.normal_(parameter)
    with torch.no_grad():
        stages = compose(torch.randn(batch, length, config.hidden_size))
    return [None if stage is None else stage.key for stage in stages]


def assert_sides_equal(side, expected):
    assert (side is None) == (expected is None)
    assert side is None or torch.equal(side.factors, expected.factors)


@given(configs(), st.integers(1, 3), st.integers(1, 7))
@any_case
def test_unpacking_returns_exactly_what_was_packed(config, batch, length):
    states = torch.randn(batch, config.num_key_value_heads, length, config.head_dim)
    for side in key_sides(config, batch, length):
        unpacked, weights = unpack(pack(states, side), config.head_dim, side, config.num_attention_heads)
        assert torch.equal(unpacked, states)
        assert_sides_equal(weights, side)


@given(configs())
@any_case
def test_compose_channels_is_what_packing_appends_and_a_multiple_of_8(config):
    states = torch.randn(2, config.num_key_value_heads, 3, config.head_dim)
    channels = compose_channels(config)
    for side, extra in zip(key_sides(config, 2, 3), channels):
        assert pack(states, side).shape == (*states.shape[:3], config.head_dim + extra)
    assert [extra % 8 for extra in channels] == [0, 0]


@given(configs(), st.integers(1, 4), st.integers(1, 4))
@any_case
def test_rows_packed_at_different_times_unpack_together(config, past, new):
    """The weights given to `unpack` are those of the new keys alone, as in decoding."""
    states = torch.randn(2, config.num_key_value_heads, past + new, config.head_dim)
    for side in key_sides(config, 2, past + new):
        first, last = (
            None if side is None else ComposeSide(factors=side.factors[:, :, part])
            for part in (slice(past), slice(past, None))
        )
        cached = torch.cat([pack(states[:, :, :past], first), pack(states[:, :, past:], last)], dim=2)
        unpacked, weights = unpack(cached, config.head_dim, last, config.num_attention_heads)
        assert torch.equal(unpacked, states)
        assert_sides_equal(weights, side)


def test_packing_keeps_the_dtype_of_the_states():
    states = torch.randn(1, 2, 3, 4).to(torch.bfloat16)
    side = ComposeSide(gate=torch.rand(1, 4, 3))
    packed = pack(states, side)
    assert packed.dtype == torch.bfloat16
    assert torch.equal(unpack(packed, 4, side, heads=4)[1].gate, side.gate.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("preset", "expected"),
    [("dcformer-2.8b", 32 * (2 * 80 + 2 * 8) * 2), ("dcformer-6.9b", 32 * (2 * 128 + 2 * 8) * 2)],
    ids=["ten_percent_over_80_channels", "six_percent_over_128_channels"],
)
def test_bytes_per_token_of_published_shapes(preset, expected):
    assert cache_bytes_per_token(DCFormerConfig.from_preset(preset), torch.bfloat16) == expected


CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=20),
}
LAYOUTS = [
    "dcformer",
    "grouped_query_attention",
    "query_wise",
    "pre_only",
    "post_only",
    "rank_4",
    "low_rank_only",
    "gates_only",
    "talking_heads",
    "grouped",
    "plain_gated_transformer",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("variant", LAYOUTS)
def test_cache_bytes_per_token_equals_the_bytes_of_a_filled_cache(variant, cache, dtype):
    model = tiny_model(variant).to(dtype)
    cache = CACHES[cache](model.config)
    with torch.no_grad():
        model(random_tokens(3, 11), past_key_values=cache, use_cache=True)
    for layer in cache.layers:
        tokens = layer.keys.shape[0] * layer.keys.shape[2]
        assert (layer.keys.nbytes + layer.values.nbytes) / tokens == cache_bytes_per_token(model.config, dtype)


def test_a_query_wise_model_caches_nothing_but_keys_and_values():
    config = tiny_config("query_wise")
    plain = tiny_config("plain_gated_transformer")
    assert compose_channels(config) == (0, 0)
    assert cache_bytes_per_token(config) == cache_bytes_per_token(plain)


# Two orders of the same float64 sums, through two layers whose weights are of order 1.
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
PAST = 2 * TINY["sliding_window"] + 1
OPERATED = ["dcformer", "grouped_query_attention", "query_wise", "pre_only"]


@torch.no_grad()
def logits_after(model, cache, change, past, new):
    """Logits of `new` fed to a cache that held `past` and was changed in between."""
    model(past, past_key_values=cache, use_cache=True)
    change(cache)
    return model(new, past_key_values=cache, use_cache=True).logits


@torch.no_grad()
def logits_without_cache(model, past, new):
    return model(torch.cat([past, new], dim=1), use_cache=False).logits[:, past.shape[1] :]


ROWS = {
    "batch_select_indices": (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
    "batch_repeat_interleave": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "reorder_cache": (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0]),
}


@pytest.mark.parametrize(("change", "rows"), ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("variant", OPERATED)
def test_rows_moved_in_a_dynamic_cache_continue_rightly(variant, change, rows):
    model = tiny_model(variant).double()
    past, new = random_tokens(3, PAST), random_tokens(len(rows), 4, seed=2)
    logits = logits_after(model, DynamicCache(config=model.config), change, past, new)
    assert_close(logits, logits_without_cache(model, past[rows], new), **CLOSE)


@pytest.mark.parametrize("variant", OPERATED)
def test_rows_reordered_in_a_static_cache_continue_rightly(variant):
    model = tiny_model(variant).double()
    change, rows = ROWS["reorder_cache"]
    past, new = random_tokens(3, PAST), random_tokens(3, 4, seed=2)
    logits = logits_after(model, StaticCache(config=model.config, max_cache_len=20), change, past, new)
    assert_close(logits, logits_without_cache(model, past[rows], new), **CLOSE)


@pytest.mark.parametrize("variant", OPERATED)
def test_a_cropped_cache_continues_rightly(variant):
    model = tiny_model(variant, sliding_window=None).double()
    past, new = random_tokens(2, PAST), random_tokens(2, 4, seed=2)
    logits = logits_after(model, DynamicCache(config=model.config), lambda cache: cache.crop(-5), past, new)
    assert_close(logits, logits_without_cache(model, past[:, :-5], new), **CLOSE)


@pytest.mark.parametrize("variant", OPERATED)
def test_a_sliding_cache_that_records_its_past_continues_rightly_after_cropping(variant):
    model = tiny_model(variant).double()
    past, new = random_tokens(2, PAST), random_tokens(2, 4, seed=2)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    logits = logits_after(model, cache, lambda cache: cache.crop(-5), past, new)
    assert_close(logits, logits_without_cache(model, past[:, :-5], new), **CLOSE)


@pytest.mark.parametrize("variant", OPERATED)
def test_a_static_cache_that_was_reset_forgets(variant):
    """A dynamic one keeps rows of zeros in Transformers 5.17, whatever the model."""
    model = tiny_model(variant).double()
    past, new = random_tokens(2, PAST), random_tokens(2, 9, seed=2)
    logits = logits_after(model, CACHES["static"](model.config), lambda cache: cache.reset(), past, new)
    assert_close(logits, logits_without_cache(model, past[:, :0], new), **CLOSE)
