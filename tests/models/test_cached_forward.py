"""One forward, chunked prefill and token by token give the same logits, in every cache and with padding."""

import warnings

import pytest
import torch
from tiny_models import TINY, VARIANTS, random_tokens, tiny_config, tiny_model
from transformers import DynamicCache, StaticCache

from dcformer import DCFormerForCausalLM, DCFormerForSequenceClassification
from dcformer.modeling_dcformer import CACHE_NAME


# These models compose so strongly that float32 noise grows past 1e-5; in float64 the same comparison is sharper.
TOLERANCE = {"atol": 1e-9, "rtol": 1e-9}
WINDOW = TINY["sliding_window"]
CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "dynamic_without_config": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config=config, max_cache_len=40),
}


def exact_model(*args, **kwargs):
    return tiny_model(*args, **kwargs).double()


def feed(model, tokens, cache, pieces, attention_mask=None, position_ids=None):
    """Logits of `tokens` fed in pieces of the given lengths, the last of which repeats until the end."""
    logits, start, pieces = [], 0, list(pieces)
    while start < tokens.shape[1]:
        stop = start + (pieces.pop(0) if len(pieces) > 1 else pieces[0])
        masks = {} if attention_mask is None else {"attention_mask": attention_mask[:, :stop]}
        if position_ids is not None:
            masks["position_ids"] = position_ids[:, start:stop]
        logits.append(model(tokens[:, start:stop], cache=cache, **masks).logits)
        start = stop
    return torch.cat(logits, dim=1)


def padded(lengths, width, side="left"):
    """Rows of tokens of these lengths, padded to a width, their mask, and the slice of each row that is not padding."""
    tokens = torch.zeros(len(lengths), width, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    spans = [slice(width - length, width) if side == "left" else slice(0, length) for length in lengths]
    for row, span in enumerate(spans):
        tokens[row, span] = random_tokens(1, lengths[row], seed=row)[0]
        mask[row, span] = 1
    return tokens, mask, spans


def assert_rows_equal_their_unpadded_runs(logits, model, tokens, spans, **tolerance):
    for row, span in enumerate(spans):
        alone = model(tokens[row : row + 1, span]).logits
        torch.testing.assert_close(logits[row : row + 1, span], alone, **tolerance)


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_decodes_as_it_prefills(variant):
    model = exact_model(variant)
    tokens = random_tokens(2, 17)
    expected = model(tokens, use_cache=False).logits
    for cache in ("dynamic", "static"):
        logits = feed(model, tokens, CACHES[cache](model.config), [9, 6, 1])
        torch.testing.assert_close(logits, expected, **TOLERANCE)


@torch.no_grad()
def test_rows_padded_on_the_right_equal_their_unpadded_runs():
    model, (tokens, mask, spans) = exact_model(), padded([19, 5, 12, 7], 22, side="right")
    logits = model(tokens, attention_mask=mask).logits
    assert_rows_equal_their_unpadded_runs(logits, model, tokens, spans, **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("cache", CACHES)
def test_left_padded_decoding_equals_unpadded_runs_however_it_is_cut(cache):
    model, (tokens, mask, spans) = exact_model(), padded([23, 9, 16, 4], 23)
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    for pieces in ([1], [3], [WINDOW, 1], [WINDOW + 1, 2], [2, WINDOW + 3]):
        logits = feed(model, tokens, CACHES[cache](model.config), pieces, mask, position_ids)
        assert_rows_equal_their_unpadded_runs(logits, model, tokens, spans, **TOLERANCE)
    # In float32, with weights of the size that training starts from.
    model = DCFormerForCausalLM(tiny_config(hidden_size=64, num_hidden_layers=4)).eval()
    logits = feed(model, tokens, CACHES[cache](model.config), [7, 1], mask)
    assert_rows_equal_their_unpadded_runs(logits, model, tokens, spans, atol=1e-5, rtol=0)


@torch.no_grad()
def test_cached_rows_without_key_wise_weights_as_of_learned_prefixes_compose_nothing():
    model, rows, logits, widths = exact_model("one_layer"), torch.randn(1, 4, 3, 8).double(), [], []
    for channels in (0, *set(model.config.compose_cache_channels)):
        cache = DynamicCache(config=model.config)
        for layer in range(2):
            cache.update(*[torch.nn.functional.pad(rows, (0, channels))] * 2, layer)
        logits.append(model(random_tokens(1, 4), cache=cache).logits)
        widths.append([layer.keys.shape[-1] for layer in cache.layers])
    assert torch.equal(*logits) and widths[0] == [8, 16]  # of the layer that composes alone


@torch.no_grad()
def test_packed_sequences_equal_separate_ones():
    """Also where positions jump forward, and where every row is packed in another way."""
    model, tokens = exact_model(), random_tokens(2, 40)
    rows = [[(0, 17), (30, 41), (3, 15)], [(5, 13), (0, 20), (50, 62)]]  # first positions and ends of the sequences
    position_ids = torch.stack([torch.cat([torch.arange(*span) for span in spans]) for spans in rows])
    packed = model(tokens, position_ids=position_ids, use_cache=False).logits
    for row, spans in enumerate(rows):
        lengths = [end - first for first, end in spans]
        for piece, logits in zip(tokens[row].split(lengths), packed[row].split(lengths)):
            torch.testing.assert_close(logits, model(piece[None]).logits[0], **TOLERANCE)


@torch.no_grad()
def test_a_four_dimensional_mask_says_everything():
    """A prefix that sees itself in both directions, in sliding layers too, as in other Transformers models."""
    model = exact_model()
    tokens = random_tokens(1, 18)
    visible = torch.ones(18, 18, dtype=torch.bool).tril()
    visible[:9, :9] = True
    additive = torch.zeros(1, 1, 18, 18, dtype=torch.float64).masked_fill(~visible, torch.finfo(torch.float64).min)
    boolean = model(tokens, attention_mask=visible[None, None]).logits
    torch.testing.assert_close(model(tokens, attention_mask=additive).logits, boolean, **TOLERANCE)
    wide = exact_model(sliding_window=None)
    torch.testing.assert_close(wide(tokens, attention_mask=visible[None, None]).logits, boolean, **TOLERANCE)
    of_all_slots = torch.nn.functional.pad(visible, (0, 22))[None, None]
    static = wide(tokens, cache=CACHES["static"](wide.config), attention_mask=of_all_slots)
    torch.testing.assert_close(static.logits, boolean, **TOLERANCE)
    assert not torch.allclose(model(tokens).logits[:, 0], boolean[:, 0], atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("part", ["language model", "decoder", "classifier", "attention"])
def test_the_older_name_of_the_cache_works_and_warns_as_in_transformers(part):
    model, tokens = tiny_model(), random_tokens(1, 9)
    call = {
        "language model": model,
        "decoder": model.model,
        "classifier": DCFormerForSequenceClassification(tiny_config(pad_token_id=0)).eval(),
        "attention": lambda _, **cache: model.model.layers[0].self_attn(torch.ones(1, 9, 32), None, **cache),
    }[part]
    keys = {}
    for name in ("cache", "past_key_values"):
        cache = DynamicCache(config=model.config)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call(tokens, **{name: cache})
        keys[name] = cache.layers[0].keys
        is_warned = any("`past_key_values` is deprecated" in str(warning.message) for warning in caught)
        assert is_warned == (name != CACHE_NAME == "cache")
    assert torch.equal(keys["cache"], keys["past_key_values"]) and keys["cache"].shape[2] >= 5
