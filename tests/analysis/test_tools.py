"""TransformerLens, nnsight, circuitsvis and BertViz read the maps and change them, as docs/inside.md shows."""

import json
import linecache
import logging
import re
from pathlib import Path

import pytest
import torch
from tiny_models import random_tokens, tiny_model

from dcformer.analysis import record
from dcformer.modeling_dcformer import ATTENTION_MAPS


PAGE = (Path(__file__).parents[2] / "docs" / "inside.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def same_logging():
    """TransformerLens silences the warnings of Transformers, which other tests check."""
    logger = logging.getLogger("transformers")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def run_example(capsys):
    """A function that runs the page's example of a package, after the page's first, and returns all its names."""

    def run(package):
        pytest.importorskip(package, reason=f"{package} is not installed")
        names = {}
        exec(re.search(r"^```python\n(.*?)^```", PAGE, re.S | re.M).group(1), names)
        examples = re.findall(r"^```python tools\n(.*?)^```\n(?:\n```text tools\n(.*?)^```)?", PAGE, re.S | re.M)
        ((code, expected),) = (example for example in examples if f"from {package}" in example[0])
        linecache.cache[package] = (len(code), None, code.splitlines(True), package)  # nnsight reads it there
        capsys.readouterr()
        exec(compile(code, package, "exec"), names)
        assert capsys.readouterr().out == expected
        return names

    return run


def bridge_of(model):
    sources = pytest.importorskip("transformer_lens.model_bridge.sources", reason="TransformerLens is not installed")
    return sources.build_bridge_from_module(model, type(model).__name__, hf_config=model.config)


@pytest.mark.parametrize("variant", ["dcformer", "dcpythia", "plain_transformer_with_learned_positions"])
@torch.no_grad()
def test_the_bridge_of_transformer_lens_computes_the_same_and_caches_the_maps(variant):
    model, ids = tiny_model(variant), random_tokens(2, 21)
    expected, maps, bridge = model(ids).logits, record(model, ids), bridge_of(model)
    torch.testing.assert_close(bridge(ids), expected, atol=1e-5, rtol=0)
    logits, cache = bridge.run_with_cache(ids)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    for layer in (0, 1):
        for name in ATTENTION_MAPS:
            torch.testing.assert_close(cache[f"blocks.{layer}.attn.hook_{name}"], maps[name][layer])
        assert torch.equal(cache["pattern", layer], cache[f"blocks.{layer}.attn.hook_composed_weights"])
    biases = [block.attn.b_O for block in bridge.blocks if block.attn.b_O is not None]
    by_head = cache.stack_head_results(2).sum(0) + sum(biases)
    torch.testing.assert_close(by_head, cache["attn_out", 0] + cache["attn_out", 1])
    assert ("blocks.0.hook_resid_mid" in cache) == (variant != "dcpythia")  # parallel attention and MLP


@torch.no_grad()
def test_the_bridge_computes_a_map_for_its_hook_alone_and_lets_it_change():
    ids, bridge = random_tokens(1, 21), bridge_of(tiny_model())
    before, computed = bridge(ids), []
    for name in ATTENTION_MAPS:
        point = getattr(bridge.blocks[1].attn, f"hook_{name}")
        point.forward = lambda attention, name=name: computed.append(name) or attention
    name = "blocks.0.attn.hook_weights"
    _, cache = bridge.run_with_cache(ids, names_filter=[name, "blocks.1.attn.hook_z"], pos_slice=-1)
    assert computed == [] and cache[name].shape == (1, 4, 1, 21)  # of the last query
    for name in ATTENTION_MAPS:
        hooks = [(f"blocks.1.attn.hook_{name}", lambda attention, hook: 1.5 * attention)]
        assert (bridge.run_with_hooks(ids, fwd_hooks=hooks) - before).abs().max() > 1e-2
        assert name in computed
    assert torch.equal(bridge(ids), before)


def test_transformer_lens_boots_a_folder(run_example):
    names = run_example("transformer_lens")
    ids = names["tokenizer"](names["text"], return_tensors="pt")["input_ids"]
    expected = names["model"].float()(ids).logits
    torch.testing.assert_close(names["logits"], expected, atol=1e-5, rtol=1e-6)  # maps are computed by other sums
    assert torch.equal(names["bridge"](ids), expected)  # to the last bit while no map is computed


def test_nnsight_reads_the_maps_and_changes_them(run_example):
    names = run_example("nnsight")
    model, traced, text, maps = names["model"], names["traced"], names["text"], {}
    expected = record(model, text, tokenizer=names["tokenizer"])
    with names["watch"](model, lambda layer, name, value: None):
        with traced.trace(text):
            for name in ATTENTION_MAPS:
                maps[name] = getattr(traced.model.layers[1].self_attn, name).output.save()
            before = traced.output.logits.save()
        with traced.trace(text):
            traced.model.layers[1].self_attn.composed_weights.output *= 2
            after = traced.output.logits.save()
    for name in ATTENTION_MAPS:
        torch.testing.assert_close(maps[name], expected[name][1])
    assert not names["composed"].allclose(expected["composed_weights"][1], atol=0.01)
    assert (after - before).abs().max() > 0.1


def test_circuitsvis_is_given_signed_weights_on_a_symmetric_scale(run_example):
    names = run_example("circuitsvis")
    given = json.loads(re.search(r"AttentionHeads,\s+({.*})\s+\)", names["page"].local_src).group(1))
    weights = names["recording"]["composed_weights"][1][0]
    torch.testing.assert_close(torch.tensor(given["attention"], dtype=weights.dtype), weights)
    assert given["maxValue"] == -given["minValue"] == weights.abs().max() and weights.min() < 0
    assert given["tokens"] == names["recording"].tokens[0]


def test_bertviz_is_given_opacities(run_example):
    names = run_example("bertviz")
    start = names["page"].data.index('{"attention"')
    (given,) = json.JSONDecoder().raw_decode(names["page"].data, start)[0]["attention"]
    shown, weights = torch.tensor(given["attn"]), torch.cat(list(names["layers"]))
    torch.testing.assert_close(shown, -weights.clamp(max=0).float() / weights.abs().max())  # what is taken away
    assert 0 < shown.max() <= 1
