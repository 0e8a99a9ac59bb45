"""Ways into `generate()` and pasts that others made: early exit, prefix tuning, caches of plain rows."""

import pytest
import torch
from peft import PrefixTuningConfig, get_peft_model
from tiny_models import random_tokens, tiny_model
from transformers import DynamicCache


@pytest.mark.parametrize("variant", ["dcformer", "dcpythia", "plain_gated_transformer"])
def test_drafts_of_the_first_layers_change_nothing(variant):
    model, tokens = tiny_model(variant, num_hidden_layers=4), random_tokens(1, 9)
    greedy = model.generate(tokens, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    for layers in (1, 2, 3):
        drafted = model.generate(
            tokens, max_new_tokens=8, min_new_tokens=8, do_sample=False, assistant_early_exit=layers
        )
        assert torch.equal(drafted, greedy)
        assert model.config.num_hidden_layers == 4
    assert torch.equal(model.generate(tokens, max_new_tokens=8, min_new_tokens=8, do_sample=False), greedy)


def test_a_past_of_plain_rows_is_one_whose_keys_compose_nothing():
    """Keys without weights of their own: zeros in the key-wise branches, whatever the queries' side does."""
    model, tokens = tiny_model("dcformer", layer_types=["full_attention"] * 2), random_tokens(2, 9)
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randn(2, 4, 5, 8, generator=generator) for _ in range(4)]  # (batch, heads, key, channels)
    plain, padded = DynamicCache(), DynamicCache()
    for layer in range(2):
        key, value = rows[2 * layer : 2 * layer + 2]
        plain.update(key, value, layer)
        room = torch.zeros(2, 4, 5, sum(model.config.compose_cache_channels) // 2)
        padded.update(torch.cat((key, room), -1), torch.cat((value, room), -1), layer)
    mask = torch.ones(2, 14, dtype=torch.long)
    logits = [model(tokens, attention_mask=mask, past_key_values=cache).logits for cache in (plain, padded)]
    assert torch.equal(*logits)
    assert plain.layers[0].keys.shape == padded.layers[0].keys.shape


@pytest.mark.parametrize("variant", ["dcformer", "dcpythia", "query_wise", "plain_gated_transformer"])
def test_prefix_tuning_trains_and_generates(variant):
    torch.manual_seed(0)
    model = tiny_model(variant)
    model = get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5))
    tokens = random_tokens(2, 13)
    mask = torch.ones_like(tokens)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for _ in range(3):
        loss = model(tokens, attention_mask=mask, labels=tokens).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    model.eval()
    generated = model.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert generated.shape == (2, 17)
