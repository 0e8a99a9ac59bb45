"""Attention before and after composition, of one layer and one forward pass."""

import pytest
import torch
from tiny_models import random_tokens, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from dcformer.analysis import attention_inputs, layer_attention


LENGTH = 21  # longer than the window of 6


@pytest.mark.parametrize(
    "variant", ["dcformer", "dcpythia", "grouped_query_attention", "pre_only", "key_wise", "plain_gated_transformer"]
)
@pytest.mark.parametrize("layer", [0, 1], ids=["sliding", "full"])
def test_composed_weights_are_those_of_the_model(variant, layer):
    model, ids = tiny_model(variant), random_tokens(1, LENGTH)
    model.set_attn_implementation("eager")
    found = layer_attention(model, ids, layer)
    expected = model(ids, output_attentions=True, use_cache=False).attentions[layer][0]
    # float32 sums of this size in another order
    torch.testing.assert_close(found.composed, expected, atol=2e-5, rtol=0)
    assert found.is_composed == (variant != "plain_gated_transformer")
    assert torch.equal(found.plain, found.composed) != found.is_composed


def test_plain_weights_are_the_softmax_of_queries_and_keys():
    model, ids = tiny_model(), random_tokens(1, LENGTH)
    inputs = attention_inputs(model, 0, input_ids=ids)
    scores = torch.einsum("bhtd,bhsd->bhts", inputs.query, inputs.key) * inputs.scaling
    age = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    scores = scores.masked_fill((age < 0) | (age >= 6), -torch.inf)
    plain = layer_attention(model, ids, 0).plain
    torch.testing.assert_close(plain, scores.softmax(-1)[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(plain.sum(-1), torch.ones(4, LENGTH))


def test_recording_changes_neither_the_logits_nor_the_model():
    model, ids = tiny_model(), random_tokens(1, LENGTH)
    before, config = model(ids).logits, model.config
    attention_inputs(model, -1, input_ids=ids)
    assert all(layer.self_attn.config is config for layer in model.model.layers)
    assert torch.equal(model(ids).logits, before)
    layer_attention(model.model, ids[0].tolist(), 0)  # a model without a head, and a list


def test_padding_stays_hidden():
    model, ids = tiny_model(), random_tokens(1, LENGTH)
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    weights = attention_inputs(model, 1, input_ids=ids, attention_mask=mask).weights()
    assert (weights[..., :3] == 0).all() and (weights[..., 3:, 3:] != 0).any()


def test_what_cannot_be_shown_is_refused():
    model, ids = tiny_model(), random_tokens(1, 5)
    with pytest.raises(ValueError, match=r"of one text, .* got shape \(2, 5\)"):
        layer_attention(model, random_tokens(2, 5), 0)
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=67, **shape))
    with pytest.raises(ValueError, match="llama"):
        layer_attention(llama, ids, 0)
