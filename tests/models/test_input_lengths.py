"""Lengths that disagree: ids, embeddings, positions, masks, labels and cache. Refused, or equal to the right answer.

The right answer to a call that has a cache, a mask or embeddings too many or too few is that of one forward over the
whole row; a mask that is narrower than the input must never shift keys against queries.
"""

import logging

import pytest
import torch
from test_cached_forward import CACHES
from tiny_models import random_tokens, tiny_model
from transformers import DynamicCache

from dcformer import inputs_dcformer


MODELS = ["dcformer", "plain_gated_transformer"]
PAST, LENGTH = 5, 8


def reference(model, tokens, padding=None):
    """One forward over the whole rows without a cache, where nothing can disagree."""
    return model(tokens, attention_mask=padding, use_cache=False).logits


def filled_cache(kind, model, tokens):
    cache = CACHES[kind](model.config)
    model(tokens[:, :PAST], cache=cache)
    return cache


def causal_mask(batch, length, window=None):
    age = torch.arange(length)[:, None] - torch.arange(length)
    seen = (age >= 0) if window is None else (age >= 0) & (age < window)
    return seen.expand(batch, 1, -1, -1)


@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("cache", ["none", "dynamic", "dynamic_without_config", "static"])
def test_a_flat_mask_covers_all_tokens_or_is_refused(model_name, cache):
    model, tokens = tiny_model(model_name), random_tokens(2, PAST + LENGTH)
    new_tokens, seen_tokens = tokens[:, PAST:], tokens[:, PAST:] if cache == "none" else tokens
    right = reference(model, seen_tokens)
    total = seen_tokens.shape[1]
    for width in (1, LENGTH - 1, LENGTH, LENGTH + 1, total - 1, total, total + 1, total + 5):
        arguments = {"attention_mask": torch.ones(2, width, dtype=torch.long), "use_cache": cache != "none"}
        if cache != "none":
            arguments["cache"] = filled_cache(cache, model, tokens)
        try:
            logits = model(new_tokens, **arguments).logits
        except ValueError as error:
            assert "attention_mask" in str(error) and width != total
        else:
            assert width >= total
            torch.testing.assert_close(logits, right[:, -LENGTH:], atol=2e-5, rtol=0)
    for_all = (torch.arange(total) > 2).long()[None]
    right = reference(model, seen_tokens, for_all.expand(2, -1))
    torch.testing.assert_close(reference(model, seen_tokens, for_all), right, atol=2e-5, rtol=0)


@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32], ids=str)
def test_a_dense_mask_over_all_tokens_is_right_with_and_without_a_cache(model_name, dtype):
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
        logits = model(tokens, attention_mask=dense, use_cache=False).logits
        torch.testing.assert_close(logits, right, atol=2e-5, rtol=0)
        for past in (DynamicCache(config=model.config), DynamicCache()):
            model(tokens[:, :PAST], attention_mask=dense[:, :, :PAST, :PAST], cache=past)
            logits = model(tokens[:, PAST:], attention_mask=dense[:, :, PAST:], cache=past).logits
            torch.testing.assert_close(logits, right[:, PAST:], atol=2e-5, rtol=0)


@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize(
    "shape",
    [(2, 1, LENGTH, LENGTH - 2), (2, 1, LENGTH - 1, LENGTH), (3, 1, LENGTH, LENGTH), (2, LENGTH, LENGTH), (3, LENGTH)],
    ids=str,
)
def test_a_mask_of_another_shape_is_refused(model_name, shape):
    model, tokens = tiny_model(model_name), random_tokens(2, LENGTH)
    for use_cache in (False, True):
        with pytest.raises(ValueError, match="attention_mask"):
            model(tokens, attention_mask=torch.ones(shape, dtype=torch.bool), use_cache=use_cache)


@pytest.mark.parametrize("model_name", MODELS)
def test_masks_by_layer_type_fit_the_keys_of_their_layers(model_name):
    model, tokens = tiny_model(model_name), random_tokens(2, LENGTH)
    masks = {
        "sliding_attention": causal_mask(2, LENGTH, model.config.sliding_window),
        "full_attention": causal_mask(2, LENGTH),
    }
    logits = model(tokens, attention_mask=masks, use_cache=False).logits
    torch.testing.assert_close(logits, reference(model, tokens), atol=2e-5, rtol=0)
    with pytest.raises((ValueError, RuntimeError)):
        model(tokens, attention_mask={**masks, "full_attention": causal_mask(2, LENGTH - 1)}, use_cache=False)
    with pytest.raises(KeyError, match="full_attention"):
        model(tokens, attention_mask={"sliding_attention": masks["sliding_attention"]}, use_cache=False)


@pytest.mark.parametrize("shape", [(13,), (2, 11), (2, 15), (3, 13), (2, 13, 1)], ids=str)
def test_positions_and_labels_of_another_shape_are_refused(shape):
    model, tokens = tiny_model(), random_tokens(2, 13)
    for name in ("position_ids", "labels"):
        with pytest.raises(ValueError, match=rf"{name} must be \(batch, length\) = \(2, 13\)"):
            model(tokens, **{name: torch.zeros(shape, dtype=torch.long)}, use_cache=False)
    with pytest.raises(ValueError, match="give position_ids"):
        model(tokens, seq_idx=torch.zeros(shape))


def test_labels_go_with_the_logits_that_are_kept():
    model, tokens = tiny_model(), random_tokens(2, 13)
    with pytest.raises(ValueError, match="logits_to_keep"):
        model(tokens, labels=tokens, logits_to_keep=4)
    loss = model(tokens, labels=tokens[:, -4:], logits_to_keep=4).loss
    logits = model(tokens).logits
    torch.testing.assert_close(model(tokens, logits_to_keep=torch.tensor([0, 7, 11])).logits, logits[:, [0, 7, 11]])
    logits = logits[:, -4:-1]
    right = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, -3:].flatten())
    torch.testing.assert_close(loss, right, atol=1e-6, rtol=0)


def test_labels_are_clamped_as_the_ids():
    model, tokens = tiny_model(oov_policy="clamp"), random_tokens(2, 13)
    labels = tokens.clone()
    labels[0, 3], labels[1, 4] = 100, -100
    clamped = labels.clone()
    clamped[0, 3] = model.config.vocab_size - 1
    loss = tiny_model()(tokens, labels=clamped).loss
    torch.testing.assert_close(model(tokens, labels=labels).loss, loss)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    torch.testing.assert_close(model(tokens, labels=labels, shift_labels=shifted).loss, loss)
    with pytest.raises(IndexError, match="100"):  # by torch itself
        tiny_model()(tokens, labels=labels)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_of_another_model_is_refused(kind):
    model, tokens = tiny_model(), random_tokens(2, PAST + LENGTH)
    for other in (tiny_model(head_dim=10), tiny_model(compose_rank=4)):
        cache = filled_cache(kind, other, tokens)
        with pytest.raises(ValueError, match=r"The cache holds keys of \d+ channels, but this model's have 16"):
            model(tokens[:, PAST:], cache=cache)
    with pytest.raises((ValueError, RuntimeError)):  # of another batch, by torch itself
        model(random_tokens(3, 1), cache=filled_cache(kind, model, tokens))


@pytest.fixture
def warnings(caplog):
    inputs_dcformer.logger.warning_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger=inputs_dcformer.__name__):
        yield caplog


PACKED = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1]])


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"attention_mask": torch.ones(1, 10)},
        {"attention_mask": torch.ones(1, 10), "use_cache": False},
        {"position_ids": torch.zeros(1, 10).long()},
    ],
    ids=["default_cache", "mask_and_cache", "mask", "documents_of_one_token"],
)
def test_packed_positions_that_cannot_be_honoured_are_warned_of_once(arguments, warnings):
    model, tokens = tiny_model(), random_tokens(1, 10)
    arguments = {"position_ids": PACKED, **arguments}
    together = [model(tokens, **arguments).logits for _ in range(2)]
    assert ["see each other" in record.message for record in warnings.records] == [True]
    apart = model(tokens, position_ids=arguments["position_ids"], use_cache=False).logits
    assert torch.equal(*together) and (together[0] - apart).abs().max() > 0.1


def test_nothing_is_warned_of_where_positions_are_honoured_or_mean_padding(warnings):
    model, tokens = tiny_model(), random_tokens(1, 10)
    model(tokens, position_ids=PACKED, use_cache=False)
    padded = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1]])
    for mask in (padded, padded.flip(1)):
        model(tokens, position_ids=(mask.cumsum(-1) - 1).masked_fill(mask == 0, 1), attention_mask=mask)
    model.generate(tokens, attention_mask=padded, max_new_tokens=2, do_sample=False)
    between = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0, 1, 1]])
    cache = filled_cache("dynamic", model, tokens)
    model(tokens[:, PAST:], attention_mask=between, position_ids=torch.tensor([[1, 1, 1, 5, 6]]), cache=cache)
    assert not warnings.records
