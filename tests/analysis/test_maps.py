"""The maps of an attention layer, outputs of its modules: computed for hooks only, and equal to equations 3 to 8."""

import pytest
import torch
from reference import reference_compose
from tiny_models import VARIANTS, Wrapper, random_tokens, tiny_model
from transformers import StaticCache

from dcformer.modeling_dcformer import ATTENTION_MAPS, CACHE_NAME


LENGTH = 21  # longer than the window of 6


def slow_maps(model, layer, **inputs):
    """The four maps by equation 4 from the operands of a forward pass, and the visible keys (batch, 1, query, key)."""
    attention, operands = model.model.layers[layer].self_attn, []
    handle = attention.register_forward_pre_hook(
        lambda module, args, options: operands.append((*args, options["position_embeddings"])), with_kwargs=True
    )
    model(**inputs, use_cache=False)
    handle.remove()
    query, key, _, pre, post = attention.project(*operands[0])
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    age = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])
    padding = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()[:, None, None]
    visible = (age >= 0) & (age < (attention.sliding_window or 10**6)) & padding
    scores = torch.einsum("bhtd,bhsd->bhts", query, key) / query.shape[-1] ** 0.5
    composed = reference_compose(scores, pre)
    weights = composed.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)
    return dict(zip(ATTENTION_MAPS, (scores, composed, weights, reference_compose(weights, post)))), visible


def watched(model, layer):
    """By name, the maps of the forward passes to come."""
    maps = {name: [] for name in ATTENTION_MAPS}

    def keep(name):  # torch 2.10 compiles a hook that appends to a default of an argument, and forgets it
        return lambda module, args, output: maps[name].append(output)

    for name in maps:
        getattr(model.model.layers[layer].self_attn, name).register_forward_hook(keep(name))
    return maps


def assert_equal_where(visible, maps, expected):
    """The maps agree, in float64, for the keys that a query sees."""
    for name in ATTENTION_MAPS:
        given, wanted = (tensors[name].where(visible, 0.0) for tensors in (maps, expected))
        torch.testing.assert_close(given, wanted, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left_padded"])
@torch.no_grad()
def test_maps_are_those_of_the_equations(variant, padded):
    model, inputs = tiny_model(variant).double(), {"input_ids": random_tokens(2, LENGTH)}
    if padded:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][0, :4] = 0
    without = model(**inputs).logits
    for layer in (0, 1):
        expected, visible = slow_maps(model, layer, **inputs)
        maps = watched(model, layer)
        torch.testing.assert_close(model(**inputs).logits, without, atol=1e-10, rtol=1e-10)
        assert_equal_where(visible, {name: map for name, (map,) in maps.items()}, expected)


@pytest.mark.parametrize("variant", ["all_branches", "dcpythia", "grouped_query_attention", "plain_gated_transformer"])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@torch.no_grad()
def test_maps_with_a_cache_are_those_without(variant, static):
    model, ids = tiny_model(variant, sliding_window=None).double(), random_tokens(2, LENGTH)
    expected, visible = slow_maps(model, 1, input_ids=ids)
    maps = watched(model, 1)
    cache = StaticCache(config=model.config, max_cache_len=LENGTH) if static else None
    for start, stop in ((0, 9), (9, 10), (10, LENGTH)):
        cache = getattr(model(ids[:, start:stop], cache=cache, use_cache=True), CACHE_NAME)
        given = {name: outputs.pop()[..., :stop] for name, outputs in maps.items()}
        wanted = {name: map[..., start:stop, :stop] for name, map in expected.items()}
        assert_equal_where(visible[..., start:stop, :stop], given, wanted)


@pytest.mark.parametrize("name", ATTENTION_MAPS)
def test_a_changed_map_changes_the_logits_and_has_gradients(name):
    model, ids = tiny_model(), random_tokens(1, LENGTH)
    before, factor = model(ids).logits, torch.ones((), requires_grad=True)
    module = getattr(model.model.layers[0].self_attn, name)
    handle = module.register_forward_hook(lambda module, args, output: output * factor)
    logits = model(ids).logits
    torch.testing.assert_close(logits, before, atol=2e-5, rtol=0)  # float32 sums in another order
    logits.square().sum().backward()
    assert factor.grad.abs() > 1e-3
    with torch.no_grad():
        factor.mul_(1.5)
    changed = model(ids).logits
    assert (changed - before).abs().max() > 1e-2
    handle.remove()
    assert torch.equal(model(ids).logits, before)
    setattr(model.model.layers[0].self_attn, name, Wrapper(lambda attention: attention * factor))
    assert torch.equal(model(ids).logits, changed)


def test_maps_cost_nothing_in_files_and_graphs():
    model, ids = tiny_model(num_hidden_layers=1), random_tokens(1, LENGTH)
    assert not any(name in key for key in model.state_dict() for name in (".scores", ".weights", "composed_"))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    maps = watched(model, 0)
    torch._dynamo.reset()  # graphs made before do not look for hooks
    torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    assert len(maps["scores"]) == 2
