"""Packing compose weights beside cached states, the size of real caches, and operations on them between forwards."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tiny_models import TINY, random_tokens, tiny_config, tiny_model
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache

from dcformer import DCFormerConfig
from dcformer.cache_size import cache_bytes_per_token
from dcformer.compose_dcformer import make_compose, pack, unpack
from dcformer.dcmha import ComposeSide


any_case = settings(derandomize=True, deadline=None, max_examples=50)


@st.composite
def configs(draw):
    """Small models with every combination of what decides the layout of the cache."""
    key_value_heads, key_value_groups = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    heads = key_value_heads * key_value_groups
    switches = [f"compose_{name}" for name in ("pre", "post", "query", "key", "low_rank", "gate", "static")]
    values = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 1}
    values |= {"num_attention_heads": heads, "num_key_value_heads": key_value_heads}
    values |= {"head_dim": 2 * draw(st.integers(1, 6)), "compose_rank": draw(st.integers(1, 4))}
    values["compose_groups"] = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    return DCFormerConfig(**values, **{name: draw(st.booleans()) for name in switches})


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


@given(configs(), st.integers(1, 4), st.integers(1, 4))
@any_case
def test_rows_packed_at_different_times_unpack_together(config, past, new):
    """The weights given to `unpack` are those of the new keys alone, as in decoding."""
    states = torch.randn(2, config.num_key_value_heads, past + new, config.head_dim)
    for side, extra in zip(key_sides(config, 2, past + new), config.compose_cache_channels):
        first, last = (
            None if side is None else ComposeSide(factors=side.factors[:, :, part])
            for part in (slice(past), slice(past, None))
        )
        assert extra % 8 == 0 and pack(states, side).shape[3] == config.head_dim + extra
        cached = torch.cat([pack(states[:, :, :past], first), pack(states[:, :, past:], last)], dim=2)
        unpacked, weights = unpack(cached, config.head_dim, last, config.num_attention_heads)
        assert torch.equal(unpacked, states)
        assert weights is side is None or torch.equal(weights.factors, side.factors)


@pytest.mark.parametrize(("channels", "expected"), [(5, ["cat"]), (1, ["new_zeros", "cat"])])
def test_padding_takes_no_kernel_where_factors_are_enough(channels, expected):
    """Zeros would be one more launch for keys and one for values, in every layer of a decoding step."""
    states, side = torch.randn(2, 3, 1, 8), ComposeSide(factors=torch.randn(2, 3, 1, channels))
    launched = []

    class Launches(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if not operator.is_view:
                launched.append(operator.overloadpacket.__name__)
            return operator(*args, **(kwargs or {}))

    with Launches():
        packed = pack(states, side)
    assert launched == expected
    assert packed.shape == (2, 3, 1, 16) and packed.isfinite().all()
    assert torch.equal(packed[..., : 8 + channels], torch.cat((states, side.factors), dim=-1))


CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=20),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("variant", ["dcformer", "grouped_query_attention", "query_wise", "pre_only", "rank_4"])
def test_cache_bytes_per_token_equals_the_bytes_of_a_filled_cache(variant, cache):
    model = tiny_model(variant).to(torch.bfloat16)
    cache = CACHES[cache](model.config)
    with torch.no_grad():
        model(random_tokens(3, 11), cache=cache, use_cache=True)
    for layer in cache.layers:
        tokens = layer.keys.shape[0] * layer.keys.shape[2]
        assert (layer.keys.nbytes + layer.values.nbytes) / tokens == cache_bytes_per_token(model.config)
    if variant == "query_wise":
        assert cache_bytes_per_token(model.config) == cache_bytes_per_token(tiny_config("plain_gated_transformer"))


# Two orders of the same float64 sums, through two layers whose weights are of order 1.
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
PAST = 2 * TINY["sliding_window"] + 1
OPERATED = ["dcformer", "grouped_query_attention", "pre_only"]


def recording_cache(config):
    cache = DynamicCache(config=config)
    cache.activate_past_recording()
    return cache


# A cache, what is done to it between two forwards, and what it then has seen of (row, token).
OPERATIONS = {
    "rows_repeated": (
        CACHES["dynamic"],
        lambda cache: cache.batch_repeat_interleave(2),
        lambda past: past.repeat_interleave(2, dim=0),
    ),
    "static_rows_reordered": (
        CACHES["static"],
        lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])),
        lambda past: past[[1, 1, 0]],
    ),
    "cropped": (recording_cache, lambda cache: cache.crop(-5), lambda past: past[:, :-5]),
    # A dynamic cache keeps rows of zeros in Transformers 5.17, whatever the model.
    "static_reset": (CACHES["static"], lambda cache: cache.reset(), lambda past: past[:, :0]),
}


@torch.no_grad()
@pytest.mark.parametrize(("make_cache", "change", "seen"), OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("variant", OPERATED)
def test_a_cache_that_was_changed_between_forwards_continues_rightly(variant, make_cache, change, seen):
    model, past = tiny_model(variant).double(), random_tokens(3, PAST)
    cache, kept = make_cache(model.config), seen(past)
    new = random_tokens(len(kept), 4, seed=2)
    model(past, cache=cache, use_cache=True)
    change(cache)
    logits = model(new, cache=cache, use_cache=True).logits
    expected = model(torch.cat([kept, new], dim=1), use_cache=False).logits[:, kept.shape[1] :]
    assert_close(logits, expected, **CLOSE)
