"""What a load refuses: weights that would stay random. And what saving in the authors' names keeps."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import random_tokens, tiny_model
from transformers import AutoModel, AutoModelForCausalLM

from dcformer import DCFormerForCausalLM


@pytest.fixture
def folder(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def reports(caplog):
    """What Transformers logs, which it keeps from the root logger."""
    logger = logging.getLogger("transformers")
    propagates, logger.propagate = logger.propagate, False  # other tests may have let it go on to the root logger
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.propagate = propagates


def without(folder, *parts):
    """Rewrite a folder's weights without those whose name holds one of these parts; returns the names left out."""
    weights = load_file(folder / "model.safetensors")
    lost = [name for name in weights if any(part in name for part in parts)]
    kept = {name: weight for name, weight in weights.items() if name not in lost}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return lost


@pytest.mark.parametrize(
    "variant", ["dcformer", "dcpythia", "mlp_gate_and_one_global_in_four", "query_wise", "plain_gated_transformer"]
)
def test_saving_in_the_authors_names_loses_nothing(variant, tmp_path):
    model, tokens = tiny_model(variant), random_tokens(2, 13)
    model.save_pretrained(tmp_path, save_original_format=True)
    names = list(load_file(tmp_path / "model.safetensors"))
    assert not any(set("$^\\()?") & set(name) for name in names)
    assert any(name.endswith("attention.wqkv.weight") for name in names)
    assert not any("self_attn" in name or "mlp." in name or "lm_head" in name for name in names)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize(
    "part",
    [
        "compose.hidden_weight",
        "layers.1.self_attn.compose.gate_weight",
        "q_norm",
        "mlp.up_proj",
        "model.norm",
        "lm_head",
    ],
)
def test_a_file_that_lacks_a_weight_is_refused(part, folder):
    lost = sorted(without(folder, part))
    others = f" and {len(lost) - 1} more weights" if len(lost) > 1 else ""
    with pytest.raises(ValueError, match=rf"lacks {lost[0]}{others}, for which its config\.json asks"):
        AutoModelForCausalLM.from_pretrained(folder)
    _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert sorted(info["missing_keys"]) == lost


def test_nothing_else_is_said_of_a_load_that_is_refused(folder, reports):
    without(folder, "compose")
    with pytest.raises(ValueError):
        AutoModelForCausalLM.from_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "intermediate_size": 40}))
    with pytest.raises(ValueError, match=r"down_proj\.weight has shape .* by its config\.json"):
        AutoModelForCausalLM.from_pretrained(folder)
    assert not reports.records


def test_a_head_that_the_file_never_had_is_drawn_and_reported(tmp_path, reports):
    backbone = tiny_model().model
    backbone.save_pretrained(tmp_path)
    model = DCFormerForCausalLM.from_pretrained(tmp_path)
    assert ["LOAD REPORT" in record.getMessage() for record in reports.records] == [True]
    assert torch.equal(model.model.norm.weight, backbone.norm.weight)
    lost = without(tmp_path, "up_proj")
    with pytest.raises(ValueError, match=f"lacks model.{lost[0]}"):
        DCFormerForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"lacks {lost[0]}"):
        AutoModel.from_pretrained(tmp_path)


def test_composition_can_be_switched_on_in_a_plain_model(tmp_path):
    """The file's own configuration says what it holds; what the caller adds to it is drawn and reported."""
    plain = tiny_model("plain_gated_transformer")
    plain.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, compose_pre=True, compose_post=True)
    assert model.config.composes_heads
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, plain.model.layers[0].mlp.up_proj.weight)


def test_tied_output_rows_are_not_missed(tmp_path):
    model = tiny_model(tie_word_embeddings=True)
    model.tie_weights()
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
