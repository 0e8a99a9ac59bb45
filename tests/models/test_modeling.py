"""The model as a Transformers user meets it: losses, inputs, precisions, initialisation, baselines."""

import copy
import math
import re

import pytest
import torch
from reference import reference_attention
from tiny_models import TINY, VARIANTS, Wrapper, random_tokens, tiny_config, tiny_model, wrap
from torch import nn
from torch.func import functional_call, grad, vmap

from dcformer import DCFormerForCausalLM, register_implementation
from dcformer.inputs_dcformer import CACHE_NAME


PLAIN = [name for name in VARIANTS if not tiny_config(name).composes_heads]


@torch.no_grad()
def test_loss_is_the_mean_cross_entropy_of_the_next_token():
    model, tokens = tiny_model(), random_tokens(2, 15)
    labels = tokens.clone()
    labels[0, :4] = -100
    outputs = model(tokens, labels=labels)
    expected = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(outputs.loss, expected)
    counted = model(tokens, labels=labels, num_items_in_batch=100).loss
    torch.testing.assert_close(counted, expected * (labels[:, 1:] != -100).sum() / 100)


@torch.no_grad()
@pytest.mark.parametrize("variant", ["dcformer", "grouped_query_attention", "post_only"])
def test_attentions_are_the_composed_weights(variant):
    model, tokens = tiny_model(variant).double(), random_tokens(2, 17)
    outputs = model(tokens, output_attentions=True)
    torch.testing.assert_close(outputs.logits, model(tokens).logits, atol=1e-10, rtol=0)
    assert len(outputs.attentions) == TINY["num_hidden_layers"]
    weights = outputs.attentions[0]
    assert weights.shape == (2, 4, 17, 17)
    assert (weights.triu(1) == 0).all()
    assert (weights.tril(-TINY["sliding_window"]) == 0).all()
    assert not torch.allclose(weights.sum(-1), torch.ones(()).double(), atol=1e-3)  # composed, not renormalised


HOOKS = ["register_forward_pre_hook", "register_full_backward_hook", "register_full_backward_pre_hook"]


@pytest.mark.parametrize("register", HOOKS)
def test_hooks_see_an_attention_map_or_its_gradient(register):
    model, tokens, shapes = tiny_model(), random_tokens(1, 9), []
    weights = model.model.layers[0].self_attn.composed_weights
    getattr(weights, register)(lambda module, *gradients: shapes.append(gradients[-1][0].shape))
    model(tokens, labels=tokens).loss.backward()
    assert shapes == [(1, 4, 9, 9)]


@pytest.mark.parametrize("variant", ["dcpythia", "all_branches", "grouped_query_attention", "grouped", "gates_only"])
def test_gradients_equal_those_of_the_reference(variant):
    register_implementation(
        "reference", lambda *states, scaling, mask, **_: reference_attention(*states, scaling=scaling, mask=mask)[0]
    )
    tokens = random_tokens(2, 23)

    def gradients(implementation):
        model = tiny_model(variant, attn_implementation=implementation).double().train()
        model(tokens, labels=tokens).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    ours = gradients("eager")
    for name, expected in gradients("dcmha_reference").items():
        torch.testing.assert_close(ours[name], expected, atol=1e-10, rtol=1e-8, msg=lambda text, n=name: f"{n}: {text}")


@torch.no_grad()
@pytest.mark.parametrize("qk_norm", [True, False])
def test_operands_of_attention_are_of_one_type_under_autocast(qk_norm):
    """Norms and rotary positions give float32 there, and no kernel takes queries and values of two types."""
    seen = []
    register_implementation("types", lambda *states, **_: seen.append({x.dtype for x in states[:3]}) or states[2])
    model = tiny_model(qk_norm=qk_norm)
    model.set_attn_implementation("dcmha_types")
    with torch.autocast("cpu", torch.bfloat16):
        model(random_tokens(1, 9))
        model(random_tokens(1, 1))  # projected by a kernel for few tokens
    assert len(seen) == 4 and all(types == {torch.bfloat16} for types in seen)


def from_meta(model):
    with torch.device("meta"):
        empty = DCFormerForCausalLM(model.config)
        # On the meta device Transformers before 5.24 does not compute with it.
        if model.config.rope_parameters["rope_type"] == "longrope" and CACHE_NAME == "cache":
            empty(random_tokens(1, 9).to("meta"))
    empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    return empty.eval()


SCALED = {"rope_theta": 10000.0, "factor": 2.0}
OF_LENGTHS = {"original_max_position_embeddings": 32, "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 2.5, 3.0]}


@torch.no_grad()
@pytest.mark.parametrize("kind, others", [("default", {}), ("dynamic", {}), ("yarn", {}), ("longrope", OF_LENGTHS)])
def test_frequencies_are_those_of_a_fresh_model_after_conversions(kind, others):
    for convert in (from_meta, lambda model: model.half().float(), lambda model: copy.deepcopy(model.double()).float()):
        model, fresh = (tiny_model(rope_parameters={"rope_type": kind, **SCALED, **others}) for _ in range(2))
        model(random_tokens(1, 100))
        model = convert(model)
        fresh.load_state_dict(model.state_dict())
        for length in (80, 20, 100):  # of 64 positions
            tokens = random_tokens(1, length)
            assert torch.equal(model(tokens).logits, fresh(tokens).logits), length


@pytest.mark.parametrize("groups", [1, 4])
def test_composition_starts_as_section_4_of_the_paper_says(groups):
    hidden, heads, rank = 256, 16 // groups, 2
    shape = {"hidden_size": hidden, "num_attention_heads": 16, "num_hidden_layers": 8, "initializer_range": 0.1}
    model = DCFormerForCausalLM(tiny_config(compose_groups=groups, compose_static=True, **shape))
    expected = {
        "low_rank_weight": 0.02 / (math.sqrt(2 * heads * rank) * (heads + rank)),
        "gate_weight": 0.05 * math.sqrt(2) / (hidden + heads),
        "hidden_weight": math.sqrt(2 / (hidden + 2 * heads * rank)),
        "static_weight": math.sqrt(2 / (heads + heads)),
    }
    for name, deviation in expected.items():
        drawn = torch.cat([p.flatten() for n, p in model.named_parameters() if n.endswith(name)])
        # The relative error of a deviation estimated from n numbers is about 1 / sqrt(2 n).
        assert drawn.std().item() == pytest.approx(deviation, rel=4 / math.sqrt(2 * drawn.numel()))
        assert abs(drawn.mean().item()) < 4 * deviation / math.sqrt(drawn.numel())


@torch.no_grad()
@pytest.mark.parametrize("variant", PLAIN)
def test_plain_models_run_through_sdpa_and_equal_eager(variant):
    model, tokens = tiny_model(variant), random_tokens(2, 20)
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    assert model.config._attn_implementation == "sdpa"
    windows = {"sliding_attention": TINY["sliding_window"], "full_attention": None}  # which FlashAttention asks for
    layers = zip(model.model.layers, model.config.layer_types)
    assert all(layer.self_attn.sliding_window == windows[kind] for layer, kind in layers)
    fast = model(tokens, attention_mask=mask).logits
    model.set_attn_implementation("eager")
    eager = model(tokens, attention_mask=mask, output_attentions=True)
    torch.testing.assert_close(fast[mask == 1], eager.logits[mask == 1], atol=1e-5, rtol=1e-5)
    for weights in eager.attentions:  # (batch, heads, query, key)
        sums = weights.sum(-1).transpose(1, 2)[mask == 1]
        torch.testing.assert_close(sums, torch.ones_like(sums))


@pytest.mark.parametrize("name", ["sdpa", "flash_attention_2", "flex_attention", "paged|eager", "sdpaa"])
def test_attention_that_cannot_mix_heads_is_refused(name):
    model, hub_model = tiny_model(), tiny_model()
    hub_model.config._attn_implementation = name  # as a kernel of the Hub is set
    for call in (
        lambda: DCFormerForCausalLM(tiny_config(attn_implementation=name)),
        lambda: model.set_attn_implementation(name),
        lambda: hub_model(random_tokens(1, 5)),
    ):
        with pytest.raises(ValueError, match=re.escape(f"attn_implementation={name!r}")):
            call()
    with pytest.raises(ValueError, match="cannot compose attention heads"):
        model.generate_batch([[1, 2, 3]], max_new_tokens=2)


@pytest.mark.parametrize("variant", ["dcformer", "plain_gated_transformer"])
def test_attention_weights_are_dropped_in_training_alone(variant):
    model, tokens = tiny_model(variant, attention_dropout=0.5), random_tokens(2, 13)
    expected = tiny_model(variant)(tokens).logits
    assert torch.equal(model(tokens).logits, expected)
    assert (model.train()(tokens).logits - expected).abs().max() > 0.1


@torch.no_grad()
def test_not_causal_when_the_configuration_says_so():
    model, tokens = tiny_model(), random_tokens(1, 20)
    model.config.is_causal = False
    other = tokens.clone()
    other[0, -1] = (tokens[0, -1] + 1) % TINY["vocab_size"]
    assert not torch.equal(model(tokens).logits[:, 0], model(other).logits[:, 0])


@torch.no_grad()
@pytest.mark.parametrize("policy", ["error", "clamp"])
def test_any_module_can_be_the_embedding(policy):
    model, tokens = tiny_model(oov_policy=policy), random_tokens(2, 13)
    embedding, expected = model.get_input_embeddings(), model(tokens).logits
    none_of_torch = Wrapper(embedding.weight.__getitem__)
    for other in (embedding, nn.Sequential(embedding, nn.Dropout(0.1).eval()), none_of_torch):
        model.set_input_embeddings(other)
        assert torch.equal(model(tokens).logits, expected)
        assert torch.equal(model(tokens, use_cache=False).logits, expected)
        assert model.generate(tokens, max_new_tokens=2).shape == (2, 15)
        if policy == "error":
            with pytest.raises(ValueError, match=r"Token id 67 .* which has 67"):
                model(torch.tensor([[67]]))
        else:
            assert torch.equal(model(torch.tensor([[67, -5]])).logits, model(torch.tensor([[66, 0]])).logits)
    model.set_input_embeddings(nn.Sequential(nn.Embedding(90, 32)))  # with more rows than the configuration says
    assert not torch.equal(model(torch.tensor([[89]])).logits, model(torch.tensor([[66]])).logits)


# Modules of the decoder that are wrapped at once.
WRAPPED = {
    "all layers": ["layers.0", "layers.1", "layers.2"],
    "the first layer": ["layers.0"],
    "the others": ["layers.1", "layers.2"],
    "parts": [f"layers.{layer}.{part}" for layer in range(3) for part in ("input_layernorm", "self_attn", "mlp")],
    "of attention": [f"layers.1.self_attn.{part}" for part in ("qkv_proj", "q_norm", "compose", "weights", "o_proj")],
    "ends": ["embed_tokens", "norm"],
}


@pytest.fixture(scope="module", params=["dcformer", "plain_transformer_with_learned_positions"])
def bare(request):
    """A model of three layers, what it is asked, and its answers."""
    model, tokens = tiny_model(request.param, num_hidden_layers=3).double(), random_tokens(2, 20)
    mask = torch.ones_like(tokens)
    mask[1, :9] = 0
    asked = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    options = asked, {**asked, "cache_implementation": "static", "prefill_chunk_size": 6}
    texts = [model.generate(tokens, **each) for each in options]
    with torch.no_grad():
        return model, tokens, options, texts, model(tokens, attention_mask=mask, output_hidden_states=True)


@torch.no_grad()
@pytest.mark.parametrize("parts", [*WRAPPED, "decoder and head"])
def test_any_module_can_be_wrapped(bare, parts):
    model, tokens, options, texts, expected = bare
    names, wrapped = [f"model.{name}" for name in WRAPPED.get(parts, ())] or ["model", "lm_head"], copy.deepcopy(model)
    wrap(wrapped, sorted(dict(model.named_modules()).keys() & {*names}))
    for asked, text in zip(options, texts):
        assert torch.equal(wrapped.generate(tokens, **asked), text)
    asked = {"attention_mask": options[0]["attention_mask"], "output_hidden_states": True, "use_cache": False}
    outputs = expected, wrapped(inputs_embeds=model.model.embed_tokens(tokens), **asked)
    torch.testing.assert_close(*[(each.logits, each.hidden_states) for each in outputs], atol=1e-10, rtol=0)


# What the three samples come with besides their ids.
BATCHES = {
    "ids alone": {},
    "left padding": {"attention_mask": (torch.arange(9) >= torch.tensor([[3], [0], [1]])).long()},
    "packed": {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5], [*range(9)], [0, 1, 0, 1, 0, 1, 0, 1, 0]])},
    "padding and positions": {"attention_mask": torch.ones(3, 9).long(), "position_ids": torch.arange(9).repeat(3, 1)},
}


@pytest.mark.parametrize(
    ("variant", "batch"),
    [*(("dcformer", batch) for batch in BATCHES), ("dcpythia", "packed"), ("grouped_query_attention", "left padding")],
)
def test_gradients_of_single_samples_are_those_of_samples_alone(variant, batch):
    model, tokens = tiny_model(variant).double(), random_tokens(3, 9)
    parameters = dict(model.named_parameters())

    def loss(parameters, sample):
        inputs = {name: rows[None] for name, rows in sample.items()}
        return functional_call(model, parameters, (), {**inputs, "use_cache": False}).loss

    samples = {"input_ids": tokens, "labels": tokens, **BATCHES[batch]}
    gradients = vmap(grad(loss), in_dims=(None, 0))(parameters, samples)
    for number in range(3):
        alone = model(use_cache=False, **{name: rows[number : number + 1] for name, rows in samples.items()}).loss
        expected = torch.autograd.grad(alone, list(parameters.values()))
        for name, gradient in zip(parameters, expected):
            torch.testing.assert_close(gradients[name][number], gradient, atol=1e-9, rtol=1e-9, msg=name)
    with pytest.raises(IndexError):  # no id is clamped without a word
        vmap(grad(loss), in_dims=(None, 0))(parameters, {**samples, "input_ids": tokens + 67})


@pytest.mark.parametrize("variant", ["dcformer", "dcpythia"])
def test_checkpointed_layers_under_autocast_give_the_same_gradients(variant):
    gradients = []
    for is_checkpointed in (False, True):
        model, tokens = tiny_model(variant).train(), random_tokens(2, 13)
        if is_checkpointed:
            model.gradient_checkpointing_enable()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients))
