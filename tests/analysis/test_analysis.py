"""Recordings, head maps, diversity, branches and ablations against slow formulas."""

import copy
import itertools
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import random_tokens, tiny_model, wrap
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM, StaticCache

from dcformer import analysis
from dcformer.analysis import ablated, record
from dcformer.analysis.diversity import projections
from dcformer.analysis.recording import attention_layers


LENGTH = 21
SHAPE = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
OTHERS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=2, attn_implementation="eager")),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE, attn_implementation="eager")),
}
FAMILIES = ["dcformer", "grouped_query_attention", *OTHERS]


def some_model(family):
    return OTHERS[family]().eval() if family in OTHERS else tiny_model(family)


def assert_equal_sums(sums, expected):
    """Equal but for another order of sums in float64."""
    torch.testing.assert_close(sums, expected, atol=1e-12, rtol=1e-10)


def test_a_recording_holds_the_chosen_layers_and_heads():
    model, ids = tiny_model(), random_tokens(2, LENGTH)
    whole = record(model, ids)
    assert list(whole.maps) == ["scores", "composed_scores", "weights", "composed_weights"]
    part = record(model, ids, ["weights"], layers=[-1, 1], heads=[3, 0])
    assert list(part["weights"]) == [1] and part.heads == [3, 0]
    torch.testing.assert_close(part["weights"][1], whole["weights"][1][:, [3, 0]])
    assert part.tokens[1][2] == str(int(ids[1, 2]))
    for layer, weights in enumerate(model(ids, output_attentions=True, use_cache=False).attentions):
        torch.testing.assert_close(whole["composed_weights"][layer], weights)
    assert not any(layer.self_attn.has_observers() for layer in model.model.layers)


@pytest.mark.parametrize("family", OTHERS)
def test_other_models_show_their_weights(family):
    model, ids = some_model(family), random_tokens(2, LENGTH)
    recording = record(model, ids)
    for layer, weights in enumerate(model(ids, output_attentions=True).attentions):
        torch.testing.assert_close(recording["weights"][layer], weights)
    with pytest.raises(ValueError, match="weights alone, not 'composed_weights'"):
        record(model, ids, ["composed_weights"])
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="eager"):
        record(model, ids)


def test_what_cannot_be_recorded_is_refused():
    model, plain, ids = tiny_model(), tiny_model("plain_gated_transformer"), random_tokens(1, 5)
    flex = tiny_model("plain_gated_transformer")
    flex.set_attn_implementation("flex_attention")
    for refused, inputs, arguments, message in (
        (model, ids, {"layers": 2}, "between -2 and 1, got 2"),
        (model, ids, {"heads": [-5]}, "between -4 and 3, got -5"),
        (model, ids, {"maps": ["attention"]}, "got 'attention'"),
        (model, "text", {}, "needs a tokenizer"),
        (model, [[1, 2], [3]], {}, "got 2"),
        (model, [], {}, "at least one"),
        (plain, ids, {"maps": ["factors"]}, "composes no heads"),
        (flex, ids, {}, "'flex_attention'; use sdpa"),
    ):
        with pytest.raises(ValueError, match=message):
            record(refused, inputs, **arguments)
    with pytest.raises(ValueError, match="was not recorded"):
        record(model, ids, ["weights"])["scores"]


@pytest.mark.parametrize("variant", ["all_branches", "grouped", "gates_only", "talking_heads", "key_wise"])
def test_a_head_map_composes_its_pair(variant):
    model, ids = tiny_model(variant, compose_static=True).double(), random_tokens(2, LENGTH)
    recording = record(model, ids, ["weights", "composed_weights", "factors"])
    (_, factors), weights, composed = (recording[name][1] for name in ("factors", "weights", "composed_weights"))
    query, key = torch.tensor([20, 7, 9]), torch.tensor([3, 7, 0])
    maps = analysis.head_maps(factors, query, key, batch=1)
    assert_equal_sums(torch.einsum("hp,phn->np", weights[1, :, query, key], maps), composed[1, :, query, key])
    assert torch.equal(maps[0], analysis.head_maps(factors, 20, 3, 1))


def test_statistics_of_head_maps_are_means_over_pairs():
    model, ids = tiny_model().double(), random_tokens(1, LENGTH)
    pre, _ = record(model, ids, ["factors"])["factors"][1]
    pairs = [(t, s) for t in range(LENGTH) for s in range(t + 1)]
    maps = [analysis.head_maps(pre, *pair) for pair in pairs]
    statistics = analysis.head_map_statistics(model, ids)[1, "scores"]
    assert statistics.pairs == len(pairs)
    shares = sum(matrix.abs() / matrix.abs().sum(0) for matrix in maps) / len(pairs)
    torch.testing.assert_close(statistics.lending, shares)
    torch.testing.assert_close(statistics.borrowed, shares.fill_diagonal_(0).sum(0))
    values, added = ([torch.linalg.svdvals(matrix - part) for matrix in maps] for part in (0, torch.eye(4)))
    torch.testing.assert_close(statistics.singular_values, sum(values) / len(pairs))
    for rank, spectra in ((statistics.effective_rank, values), (statistics.added_rank, added)):
        ranks = [math.exp(-sum(p * math.log(p) for p in (s / s.sum()).tolist() if p)) for s in spectra]
        assert rank == pytest.approx(sum(ranks) / len(pairs))
    in_16_bits = tiny_model("all_branches").bfloat16()
    assert analysis.head_map_statistics(in_16_bits, ids, pairs=9)[0, "weights"].pairs == 9
    assert analysis.effective_rank(torch.tensor([[1.0] * 4, [1.0, 0, 0, 0]])).tolist() == pytest.approx([4, 1])


@pytest.mark.parametrize("family", ["dcpythia", *FAMILIES])
def test_diversity_is_the_variance_of_summed_circuits(family):
    model = some_model(family)
    curves = analysis.head_diversity(model)
    for layer, attention in enumerate(attention_layers(model)):
        query, key, value, output = projections(attention)
        for name, circuit in (
            ("query_key", sum(query[h].T @ key[h] for h in range(4))),
            ("value_output", sum(output[h] @ value[h] for h in range(4))),
        ):
            squares = torch.linalg.eigvalsh(circuit.double().T @ circuit.double()).flip(0)
            expected = squares.cumsum(0) / squares.sum()
            torch.testing.assert_close(curves[name][layer].double(), expected, atol=1e-5, rtol=0)  # float32 products
    assert curves["query_key"].shape == (2, 32)


def test_modules_that_are_wrapped_or_adapted_are_seen():
    """An adapter that is merged shows what it did before it was, in every table."""
    options = {"target_modules": ["qkv_proj", "o_proj"], "modules_to_save": ["compose"], "init_lora_weights": False}
    model, ids = get_peft_model(tiny_model("dcpythia"), LoraConfig(**options)).eval(), random_tokens(1, LENGTH)
    with torch.no_grad():
        model.base_model.model.model.layers[1].self_attn.compose.gate_weight.mul_(2)
    tables = []
    for each in (model, copy.deepcopy(model).merge_and_unload()):
        if each is not model:
            wrap(each, [f"model.layers.{n}.self_attn.{part}" for n in (0, 1) for part in ("compose", "qkv_proj")])
        measured = [*analysis.head_diversity(each).values(), analysis.what_matters(each, ids).loss]
        measured += [analysis.branch_shares(each, ids).share, analysis.map_diversity(each, ids).effective_heads]
        tables.append([torch.as_tensor(numbers).float() for numbers in measured])
    torch.testing.assert_close(*tables, atol=1e-4, rtol=0)  # float32 sums in another order


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_projections_of_heads_make_the_output_of_a_layer(family):
    model, ids, seen = some_model(family), random_tokens(1, 7), []
    attention, name = attention_layers(model)[0], "weights" if family in OTHERS else "composed_weights"
    attention.register_forward_hook(
        lambda module, args, given, output: seen.append((*args, *given.values(), output[0])), with_kwargs=True
    )
    weights, (_, _, value, output) = record(model, ids, [name])[name][0], projections(attention)
    expected = torch.einsum("bhts,bsi,hci,hoc->bto", weights, seen[0][0], value, output)  # biases are zero
    torch.testing.assert_close(seen[0][-1], expected, atol=1e-5, rtol=1e-4)


def test_effective_heads_count_different_heads():
    maps = torch.eye(4)[None, :, None]  # (batch, heads, query, key)
    assert analysis.effective_heads(maps) == pytest.approx(4)
    assert analysis.effective_heads(-2 * maps[:, [0, 0, 1, 1]] + 0.0) == pytest.approx(2)
    assert analysis.effective_heads(maps[:, :1].expand(1, 4, 1, 4)) == pytest.approx(1)
    assert analysis.effective_heads(torch.zeros(1, 4, 1, 3)).isnan()
    table = analysis.map_diversity(tiny_model(), random_tokens(1, LENGTH)).set_index(["layer", "map"])
    expected = analysis.effective_heads(record(tiny_model(), random_tokens(1, LENGTH))["composed_weights"][1]).mean()
    assert table.effective_heads[1, "composed_weights"] == pytest.approx(float(expected))
    assert set(analysis.map_diversity(some_model("llama"), random_tokens(1, 5))["map"]) == {"weights"}


@pytest.mark.parametrize("variant", ["all_branches", "grouped", "grouped_query_attention"])
def test_terms_add_up_to_the_composed_map(variant):
    model, ids = tiny_model(variant).double(), random_tokens(2, LENGTH)
    recording = record(model, ids, ["scores", "composed_scores", "weights", "composed_weights", "factors"])
    pre, post = recording["factors"][1]
    for name, weights in (("scores", pre), ("weights", post)):
        terms = analysis.branch_terms(recording[name][1], weights)
        assert_equal_sums(sum(terms.values()), recording[f"composed_{name}"][1])
    # The last term of equation 7.
    assert_equal_sums(terms["key_gate"], recording["weights"][1] * post.key.gate[:, :, None])
    table = analysis.branch_shares(model, list(ids)).set_index(["layer", "map", "head", "branch"]).share
    sums = {name: term[:, 2].abs().sum().item() for name, term in terms.items()}
    for branch, total in sums.items():
        assert table[1, "weights", 2, branch] == pytest.approx(total / sum(sums.values()))
    assert table.groupby(["layer", "map", "head"]).sum().round(9).eq(1).all()


@pytest.mark.parametrize("branch", [*analysis.BRANCHES, "query", "key", "pre", "post", "all"])
def test_an_ablated_model_is_one_without_the_branch(branch):
    model, ids = tiny_model("all_branches"), random_tokens(2, LENGTH)
    before = model(ids).logits
    with ablated(model, branch=branch):
        logits = model(ids, use_cache=False).logits
        cache, steps = StaticCache(config=model.config, max_cache_len=LENGTH), []
        for start, stop in ((0, 9), (9, 10), (10, LENGTH)):
            steps.append(model(ids[:, start:stop], cache=cache, use_cache=True).logits)
        generated = model.generate(ids, max_new_tokens=3, do_sample=False)
    torch.testing.assert_close(torch.cat(steps, dim=1), logits, atol=1e-4, rtol=1e-4)  # float32, another order of sums
    expected = without_parameters(tiny_model("all_branches"), branch)
    torch.testing.assert_close(logits, expected(ids).logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(generated, expected.generate(ids, max_new_tokens=3, do_sample=False))
    assert (logits - before).abs().max() > 1e-2 and torch.equal(model(ids).logits, before)


@torch.no_grad()
def without_parameters(model, branch):
    """The model with the parameters at zero that make a branch."""
    for module in (layer.self_attn.compose for layer in model.model.layers):
        for slot, (stage, token) in enumerate(itertools.product(("pre", "post"), ("query", "key"))):
            if branch.startswith(token) or branch in (stage, "all"):
                if not branch.endswith("gate"):
                    module.low_rank_weight[:, slot, :, module.rank :] = 0  # w2
                if not branch.endswith("low_rank"):
                    module.gate_weight[:, :, slot * module.heads : (slot + 1) * module.heads] = 0
            if branch in ("static", stage, "all"):
                module.static_weight[slot // 2] = 0
    return model


def test_ablation_ends_with_an_exception_and_refuses_what_is_not_there():
    model, ids = tiny_model(), random_tokens(1, LENGTH)
    before = model(ids).logits
    with pytest.raises(RuntimeError), ablated(model):
        raise RuntimeError
    for wrong, arguments, message in (
        (model, {"branch": "static"}, "no branch 'static'"),
        (model, {"branch": "gate"}, "got 'gate'"),
        (tiny_model("query_wise"), {"branch": "key_gate"}, "no branch 'key_gate'"),
        (tiny_model("post_only"), {"branch": "pre"}, "no branch 'pre'"),
        (tiny_model("plain_gated_transformer"), {}, "must compose"),
        (some_model("llama"), {}, "must compose"),
    ):
        with pytest.raises(ValueError, match=message), ablated(wrong, **arguments):
            pass
    assert torch.equal(model(ids).logits, before)


def test_ablation_reaches_compiled_models():
    model, ids = tiny_model(), random_tokens(1, LENGTH)
    compiled = torch.compile(model, backend="eager")
    before = compiled(ids, use_cache=False).logits
    with ablated(model):
        expected = model(ids, use_cache=False).logits
        assert torch.equal(compiled(ids, use_cache=False).logits, expected)
    assert torch.equal(compiled(ids, use_cache=False).logits, before) and not torch.equal(before, expected)


@torch.no_grad()
def mean_loss(model, texts):
    return sum(float(model(ids, labels=ids).loss) for ids in texts) / len(texts)  # of one length


def test_the_table_of_what_matters_holds_losses_without_a_branch():
    model, texts = tiny_model(), [random_tokens(1, 9, seed=seed) for seed in range(3)]
    table = analysis.what_matters(model, texts).set_index(["layer", "branch"])
    assert len(table) == 2 * 4
    loss, difference, error = table.loc[1, "key_gate"]
    before = mean_loss(model, texts)
    with ablated(model, 1, "key_gate"):
        assert loss == pytest.approx(mean_loss(model, texts), rel=1e-5)
    assert difference == pytest.approx(loss - before, abs=1e-5) and error > 0
    padded = {"input_ids": torch.cat((texts[0].new_zeros(1, 4), texts[0]), dim=1)}
    padded["attention_mask"] = (torch.arange(13) >= 4).long()[None]
    with pytest.raises(ValueError, match="longer texts"):
        analysis.what_matters(model, [5])
    losses = [analysis.what_matters(model, inputs, 0, ["all"]).loss.item() for inputs in (padded, texts[0])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
