"""Lengths that disagree: ids, embeddings, positions, masks, labels and cache. Refused, or equal to the right answer.

The right answer to a call that has a cache, a mask or embeddings too many or too few is that of one forward over the
whole row; a mask that is narrower than the input must never shift keys against queries.
"""

import itertools
import logging

import pytest
import torch
from tiny_models import random_tokens, tiny_model
from transformers import DynamicCache, StaticCache

import dcformer.input_checks


MODELS = ["dcformer", "dcpythia", "plain_gated_transformer", "plain_transformer_with_learned_positions"]
PAST, LENGTH = 5, 8


def reference(model, tokens, padding=None, dense=None):
    """One forward over the whole rows without a cache, where nothing can disagree."""
    mask = padding if dense is None else dense
    return model(tokens, attention_mask=mask, use_cache=False).logits


def filled_cache(kind, model, tokens, padding=None):
    if kind == "dynamic":
        cache = DynamicCache(config=model.config)
    elif kind == "dynamic_without_config":
        cache = DynamicCache()
    else:
        cache = StaticCache(config=model.config, max_cache_len=PAST + LENGTH + 3)
    mask = None if padding is None else padding[:, :PAST]
    model(tokens[:, :PAST], past_key_values=cache, attention_mask=mask)
    return cache


def causal_mask(batch, length, window=None):
    age = torch.arange(length)[:, None] - torch.arange(length)
    seen = (age >= 0) if window is None else (age >= 0) & (age < window)
    return seen.expand(batch, 1, -1, -1)


def assert_refused_or_right(call, right):
    """`call` raises ValueError with one readable sentence, or gives the logits of the last positions of `right`."""
    try:
        logits = call()
    except ValueError as error:
        message = str(error)
        assert any(
            word in message for word in ("attention_mask", "position_ids", "labels", "past_key_values", "inputs_embeds")
        )
        return "refused"
    assert logits.shape[1] == LENGTH
    torch.testing.assert_close(logits, right[:, -LENGTH:], atol=2e-5, rtol=0)
    return "right"


@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("cache", ["none", "dynamic", "dynamic_without_config", "static"])
def test_a_flat_mask_covers_all_tokens_or_is_refused(model_name, cache):
    model, tokens = tiny_model(model_name), random_tokens(2, PAST + LENGTH)
    new_tokens, seen_tokens = tokens[:, PAST:], tokens[:, PAST:] if cache == "none" else tokens
    right = reference(model, seen_tokens)
    total = seen_tokens.shape[1]
    for width in range(1, PAST + LENGTH + 6):
        arguments = {"attention_mask": torch.ones(2, width, dtype=torch.long), "use_cache": cache != "none"}
        if cache != "none":
            arguments["past_key_values"] = filled_cache(cache, model, tokens)
        outcome = assert_refused_or_right(lambda arguments=arguments: model(new_tokens, **arguments).logits, right)
        assert outcome == "right" or width != total
        assert outcome == "refused" or width >= total


@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("kind", ["ids", "embeddings"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_a_narrow_mask_never_shows_the_future(model_name, kind, training):
    """Labels leaked so: without a cache a narrow mask used to drop the first keys and slide the rest."""
    model, tokens = tiny_model(model_name).train(training), random_tokens(2, 13)
    inputs = {"input_ids": tokens} if kind == "ids" else {"inputs_embeds": model.get_input_embeddings()(tokens)}
    with pytest.raises(ValueError, match="attention_mask covers 11 tokens, but cache and input hold 13; it must cover"):
        model(**inputs, attention_mask=torch.ones(2, 11, dtype=torch.long), labels=tokens, use_cache=False)


@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32], ids=["bool", "int", "float"])
@pytest.mark.parametrize("cache", ["none", "dynamic", "dynamic_without_config"])
def test_a_dense_mask_over_all_tokens_is_right_with_and_without_a_cache(model_name, dtype, cache):
    model, tokens = tiny_model(model_name, sliding_window=4), random_tokens(2, PAST + LENGTH)
    # One mask for all layers, so that of the narrowest window: every layer obeys it.
    dense = causal_mask(2, PAST + LENGTH, window=4)
    if dtype == torch.float32:
        dense = torch.zeros(dense.shape).masked_fill(~dense, torch.finfo(torch.float32).min)
    else:
        dense = dense.to(dtype)
    windows = ["sliding_attention"] * model.config.num_hidden_layers
    right_model = tiny_model(model_name, sliding_window=4, layer_types=windows)
    right = reference(right_model, tokens)
    for attention in ["eager"] if model.config.composes_heads else ["eager", "sdpa"]:
        model.set_attn_implementation(attention)
        if cache == "none":
            logits = model(tokens, attention_mask=dense, use_cache=False).logits
            torch.testing.assert_close(logits, right, atol=2e-5, rtol=0)
            continue
        past = DynamicCache(config=model.config) if cache == "dynamic" else DynamicCache()
        model(tokens[:, :PAST], attention_mask=dense[:, :, :PAST, :PAST], past_key_values=past)
        logits = model(tokens[:, PAST:], attention_mask=dense[:, :, PAST:], past_key_values=past).logits
        torch.testing.assert_close(logits, right[:, PAST:], atol=2e-5, rtol=0)


@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize(
    "shape",
    [(2, 1, LENGTH, LENGTH - 2), (2, 1, LENGTH, LENGTH + 1), (2, 1, LENGTH - 1, LENGTH), (2, 1, 1, LENGTH)]
    + [(3, 1, LENGTH, LENGTH), (2, 3, LENGTH, LENGTH), (2, LENGTH, LENGTH), (LENGTH,), (3, LENGTH), (2, 0)],
    ids=str,
)
def test_a_mask_of_another_shape_is_refused(model_name, shape):
    model, tokens = tiny_model(model_name), random_tokens(2, LENGTH)
    for use_cache in (False, True):
        with pytest.raises(ValueError, match="attention_mask"):
            model(tokens, attention_mask=torch.ones(shape, dtype=torch.bool), use_cache=use_cache)


def test_a_mask_of_one_row_is_for_all_rows():
    for model_name in MODELS:
        model, tokens = tiny_model(model_name), random_tokens(3, LENGTH)
        mask = torch.ones(1, LENGTH, dtype=torch.long)
        mask[:, :2] = 0
        right = reference(model, tokens, padding=mask.expand(3, -1))
        torch.testing.assert_close(model(tokens, attention_mask=mask).logits[:, 2:], right[:, 2:], atol=2e-5, rtol=0)


@pytest.mark.parametrize("model_name", ["dcformer", "plain_gated_transformer"])
def test_masks_by_layer_type_fit_the_keys_of_their_layers(model_name):
    model, tokens = tiny_model(model_name), random_tokens(2, LENGTH)
    masks = {
        "sliding_attention": causal_mask(2, LENGTH, model.config.sliding_window),
        "full_attention": causal_mask(2, LENGTH),
    }
    logits = model(tokens, attention_mask=masks, use_cache=False).logits
    torch.testing.assert_close(logits, reference(model, tokens), atol=2e-5, rtol=0)
    with pytest.raises(ValueError, match=r"attention_mask\['full_attention'\]"):
        model(tokens, attention_mask={**masks, "full_attention": causal_mask(2, LENGTH - 1)}, use_cache=False)
    with pytest.raises(ValueError, match="lacks 'full_attention'"):
        model(tokens, attention_mask={"sliding_attention": masks["sliding_attention"]}, use_cache=False)


@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("shape", [(13,), (2, 11), (2, 15), (3, 13), (1, 1), (2, 13, 1)], ids=str)
def test_positions_of_another_shape_are_refused(model_name, shape):
    model, tokens = tiny_model(model_name), random_tokens(2, 13)
    with pytest.raises(ValueError, match=r"position_ids must be \(batch, length\) = \(2, 13\)"):
        model(tokens, position_ids=torch.zeros(shape, dtype=torch.long), use_cache=False)


@pytest.mark.parametrize("shape", [(2, 11), (2, 15), (3, 13), (13,), (2, 13, 1)], ids=str)
@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_labels_of_another_shape_are_refused(shape, name):
    model, tokens = tiny_model(), random_tokens(2, 13)
    arguments = {"labels": tokens, name: torch.zeros(shape, dtype=torch.long)}
    with pytest.raises(ValueError, match=rf"{name} must be \(batch, length\) = \(2, 13\)"):
        model(tokens, **arguments)


def test_labels_go_with_the_logits_that_are_kept():
    model, tokens = tiny_model(), random_tokens(2, 13)
    with pytest.raises(ValueError, match="logits_to_keep"):
        model(tokens, labels=tokens, logits_to_keep=4)
    loss = model(tokens, labels=tokens[:, -4:], logits_to_keep=4).loss
    logits = model(tokens).logits[:, -4:-1]
    right = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, -3:].flatten())
    torch.testing.assert_close(loss, right, atol=1e-6, rtol=0)


@pytest.mark.parametrize("policy", ["error", "clamp"])
def test_labels_obey_the_policy_for_ids(policy):
    model, tokens = tiny_model(oov_policy=policy), random_tokens(2, 13)
    labels = tokens.clone()
    labels[0, 3], labels[1, 4] = 100, -100
    if policy == "error":
        with pytest.raises(ValueError, match=r"labels: token id 100 at position \[0, 3\]"):
            model(tokens, labels=labels)
        with pytest.raises(ValueError, match=r"labels: token id -7 at position"):
            model(tokens, labels=torch.full_like(labels, -7))
        return
    clamped = labels.clone()
    clamped[0, 3] = model.config.vocab_size - 1
    torch.testing.assert_close(model(tokens, labels=labels).loss, model(tokens, labels=clamped).loss)
    beyond = tokens.clone()
    beyond[0, 3] = 100
    assert model(beyond, labels=beyond).loss.isfinite()


@pytest.mark.parametrize(
    "inputs, words",
    [
        ({"input_ids": torch.zeros(0, 5, dtype=torch.long)}, "The input is empty"),
        ({"input_ids": torch.zeros(2, 0, dtype=torch.long)}, "The input is empty"),
        ({"input_ids": [[1, 2, 3]]}, "input_ids must be a tensor"),
        ({"inputs_embeds": torch.zeros(2, 5, 31)}, r"inputs_embeds must be \(batch, length, 32\)"),
        ({"inputs_embeds": torch.zeros(2, 5)}, r"inputs_embeds must be \(batch, length, 32\)"),
        ({"input_ids": torch.zeros(2, 5, dtype=torch.long), "past_key_values": ()}, "must be a Transformers Cache"),
        ({"input_ids": torch.zeros(2, 5, dtype=torch.long), "seq_idx": torch.zeros(2, 5)}, "give position_ids"),
    ],
    ids=["no_rows", "no_tokens", "list", "narrow_embeddings", "flat_embeddings", "tuple_cache", "seq_idx"],
)
def test_inputs_that_are_none_are_refused_in_one_sentence(inputs, words):
    with pytest.raises(ValueError, match=words):
        tiny_model()(**inputs)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32], ids=str)
def test_ids_of_any_integer_type(dtype):
    model, tokens = tiny_model(), random_tokens(2, 13)
    assert torch.equal(model(tokens.to(dtype)).logits, model(tokens).logits)


@pytest.mark.parametrize("kind", ["dynamic", "dynamic_without_config", "static"])
@pytest.mark.parametrize("model_name", ["dcformer", "plain_gated_transformer"])
def test_a_cache_of_other_rows_or_of_another_model_is_refused(kind, model_name):
    model, tokens = tiny_model(model_name), random_tokens(2, PAST + LENGTH)
    cache = filled_cache(kind, model, tokens)
    with pytest.raises(ValueError, match="past_key_values holds a batch of 2, but the input has 3 rows"):
        model(random_tokens(3, 1), past_key_values=cache)
    other = filled_cache(kind, tiny_model(model_name, num_key_value_heads=2), tokens)
    with pytest.raises(ValueError, match="past_key_values holds 2 key/value heads in layer 0, but this model has 4"):
        model(tokens[:, PAST:], past_key_values=other)
    wider = tiny_model(model_name, head_dim=10)
    if model_name == "dcformer":
        with pytest.raises(ValueError, match="past_key_values holds keys of 16 channels in layer 0; this model's have"):
            wider(tokens[:, PAST:], past_key_values=cache)


def test_a_full_static_cache_is_refused_before_it_is_overrun():
    for model_name in ("dcformer", "plain_gated_transformer"):
        model, tokens = tiny_model(model_name), random_tokens(2, PAST + LENGTH)
        cache = StaticCache(config=model.config, max_cache_len=PAST + 2)
        with pytest.raises(ValueError, match=r"has room for 7 tokens and holds 0, so 13 more do not fit"):
            model(tokens, past_key_values=cache)
        model(tokens[:, :PAST], past_key_values=cache)
        with pytest.raises(ValueError, match=r"has room for 7 tokens and holds 5, so 8 more do not fit.*max_cache_len"):
            model(tokens[:, PAST:], past_key_values=cache)
        right = reference(model, tokens[:, : PAST + 2])[:, PAST:]
        logits = model(tokens[:, PAST : PAST + 2], past_key_values=cache).logits
        torch.testing.assert_close(logits, right, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("model_name", ["dcformer", "dcpythia", "plain_gated_transformer"])
def test_every_combination_of_wrong_lengths_is_refused_or_right(kind, model_name):
    model, tokens = tiny_model(model_name), random_tokens(2, PAST + LENGTH)
    right = reference(model, tokens)
    positions = torch.arange(PAST, PAST + LENGTH).unsqueeze(0)
    outcomes = {}
    for mask_width, position_width in itertools.product(
        [None, LENGTH, PAST + LENGTH - 1, PAST + LENGTH, PAST + LENGTH + 1], [None, LENGTH - 1, LENGTH, PAST + LENGTH]
    ):
        arguments = {"past_key_values": filled_cache(kind, model, tokens)}
        if mask_width is not None:
            arguments["attention_mask"] = torch.ones(2, mask_width, dtype=torch.long)
        if position_width is not None:
            arguments["position_ids"] = positions[:, -position_width:]
            if position_width > LENGTH:
                arguments["position_ids"] = torch.arange(position_width).unsqueeze(0)
        outcomes[mask_width, position_width] = assert_refused_or_right(
            lambda arguments=arguments: model(tokens[:, PAST:], **arguments).logits, right
        )
    for mask_width in (None, PAST + LENGTH):
        for position_width in (None, LENGTH):
            assert outcomes[mask_width, position_width] == "right"


@pytest.fixture
def warnings_of_the_checks(caplog):
    dcformer.input_checks.logger.warning_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="dcformer.input_checks"):
        yield caplog


PACKED = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1]])


@pytest.mark.parametrize(
    "arguments",
    [{}, {"attention_mask": torch.ones(1, 10)}, {"attention_mask": torch.ones(1, 10), "use_cache": False}],
    ids=["default_cache", "mask_and_cache", "mask"],
)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_packed_positions_that_cannot_be_honoured_are_warned_of_once(arguments, training, warnings_of_the_checks):
    model, tokens = tiny_model().train(training), random_tokens(1, 10)
    for _ in range(2):
        model(tokens, position_ids=PACKED, **arguments)
    assert [
        record.message for record in warnings_of_the_checks.records if "see each other" in record.message
    ].__len__() == 1


def test_nothing_is_warned_of_where_positions_are_honoured_or_mean_padding(warnings_of_the_checks):
    model, tokens = tiny_model(), random_tokens(1, 10)
    model(tokens, position_ids=PACKED, use_cache=False)
    padded = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1]])
    model(tokens, position_ids=(padded.cumsum(-1) - 1).masked_fill(padded == 0, 1), attention_mask=padded)
    model.generate(tokens, attention_mask=padded, max_new_tokens=2, do_sample=False)
    assert not warnings_of_the_checks.records
