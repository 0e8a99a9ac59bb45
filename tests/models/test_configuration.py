"""Values that the configuration derives, translates, refuses and saves."""

import json
import re

import pytest
import torch
from tiny_models import TINY, VARIANTS, tiny_config, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from dcformer import DCFormerConfig, DCFormerForCausalLM, DCPythiaConfig, DCPythiaForCausalLM


CLASSES = {"dcformer": (DCFormerConfig, DCFormerForCausalLM), "dcpythia": (DCPythiaConfig, DCPythiaForCausalLM)}
PRESETS = [(config.model_type, name) for config, _ in CLASSES.values() for name in config.presets()]

AUTHORS_FILE = {
    "architectures": ["DCFormer"],
    "auto_map": {"AutoConfig": "configuration_dcformer.DCFormerConfig"},
    "block_size": 2048,
    "bos_token_id": 1,
    "dim": 64,
    "eos_token_id": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "is_training": False,
    "model_type": "dcformer",
    "n_head": 4,
    "n_layer": 8,
    "n_local_heads": 4,
    "norm_eps": 1e-6,
    "q_chunk_size": 128,
    "query_wise": False,
    "rope_base": 10000,
    "torch_dtype": "float16",
    "use_dcmha": True,
    "use_gradient_checkpointing": False,
    "use_qk_norm": True,
    "vocab_size": 50257,
    "window_size": 256,
    "window_type": None,
}


def saved_values(config):
    return {key: value for key, value in config.to_dict().items() if key != "_name_or_path"}


def pattern(config):
    return "".join("L" if layer_type == "sliding_attention" else "G" for layer_type in config.layer_types)


def meta_model(config):
    with torch.device("meta"):
        return CLASSES[config.model_type][1](config)


def count(model, part=""):
    return sum(parameter.numel() for name, parameter in model.named_parameters() if part in name)


@pytest.mark.parametrize(
    ("window_type", "expected"),
    [(None, "LGLGLGLG"), ("LG", "LGLGLGLG"), ("LGLL", "LGLLLGLL"), ("LGL6", "LGLLLLLL")],
    ids=str,
)
def test_window_types_of_the_authors(window_type, expected):
    config = DCFormerConfig(**{**AUTHORS_FILE, "window_type": window_type})
    assert pattern(config) == expected
    assert config.sliding_window == 256


def test_authors_keys_are_translated_and_only_ours_are_saved(tmp_path):
    config = DCFormerConfig(**AUTHORS_FILE)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (64, 8, 4)
    assert (config.max_position_embeddings, config.qk_norm, config.dtype) == (2048, True, torch.float16)
    assert config.dim == 64  # the authors' names stay readable
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {"dim", "n_layer", "n_head", "block_size", "window_type", "auto_map", "rope_base"}.isdisjoint(saved)
    assert saved_values(AutoConfig.from_pretrained(tmp_path)) == saved_values(config)


@pytest.mark.parametrize(
    ("change", "field", "expected"),
    [
        ({"query_wise": True}, "compose_key", False),
        ({"use_dcmha": False}, "composes_heads", False),
        ({"n_local_heads": -1}, "num_key_value_heads", 4),
        ({"n_local_heads": 2}, "num_key_value_heads", 2),
        ({"window_size": None}, "sliding_window", None),
        ({"mgate": True, "mgate_dim": 8}, "mlp_gate_dim", 8),
        ({"mgate": False, "mgate_dim": 44}, "mlp_gate_dim", None),
        ({"use_parallel_residual": True}, "parallel_residual", True),
        ({"use_linear_bias": True}, "attention_bias", True),
        ({"use_linear_bias": True}, "mlp_bias", True),
        ({"intermediate_size": None}, "intermediate_size", 256),
        ({"intermediate_size": None, "mlp_type": "plain"}, "intermediate_size", 256),
        ({}, "eos_token_id", 0),
        ({"vocab_size": 152064}, "eos_token_id", 2),
    ],
    ids=str,
)
def test_each_key_of_the_authors(change, field, expected):
    assert getattr(DCFormerConfig(**{**AUTHORS_FILE, **change}), field) == expected


def test_keys_that_an_authors_file_leaves_out_take_the_authors_defaults():
    file = {key: value for key, value in AUTHORS_FILE.items() if key not in ("use_qk_norm", "rope_base")}
    config = DCFormerConfig(**file)
    assert config.qk_norm is False
    assert config.rope_parameters["rope_theta"] == 10000
    newer = DCFormerConfig(**file, mgate=False, prefill_pad=True)
    assert newer.rope_parameters["rope_theta"] == 500000


def test_rotary_share_of_dcpythia():
    assert DCPythiaConfig().rope_parameters["partial_rotary_factor"] == 0.25
    assert DCPythiaConfig(rotary_pct=0.5).rope_parameters["partial_rotary_factor"] == 0.5


def test_the_callers_objects_are_left_alone():
    rope, layer_types = {"rope_theta": 5.0}, ["full_attention"] * 2
    DCFormerConfig(**{**TINY, "rope_parameters": rope, "layer_types": layer_types})
    assert rope == {"rope_theta": 5.0}
    assert layer_types == ["full_attention"] * 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sliding_window": 0}, ["sliding_window", "at least 1", "got 0"]),
        ({"sliding_window": -3}, ["sliding_window", "got -3"]),
        ({"sliding_window": None, "layer_types": ["sliding_attention"] * 2}, ["sliding_window is None"]),
        ({"compose_groups": 3}, ["compose_groups", "divide", "4", "got 3"]),
        ({"compose_groups": 0}, ["compose_groups", "at least 1", "got 0"]),
        ({"compose_rank": 0}, ["compose_rank", "at least 1", "got 0"]),
        ({"layer_types": ["full_attention", "chunked"]}, ["layer_types[1]", "'sliding_attention'", "'chunked'"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "2 layers", "got 1"]),
        ({"head_dim": 7}, ["rotary size", "even", "got 7", "head_dim 7"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.4}}, ["rotary size", "even", "got 3"]),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, ["partial_rotary_factor", "(0, 1]", "got 1.5"]),
        ({"rope_parameters": {"rope_theta": 0}}, ["rope_theta", "positive", "got 0"]),
        ({"window_type": "GG"}, ["window_type", "'LGLL'", "'LGL6'", "got 'GG'"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "divide", "got 3"]),
        ({"num_attention_heads": 5}, ["num_attention_heads", "hidden_size (32)", "got 5"]),
        ({"num_attention_heads": 0}, ["num_attention_heads", "at least 1", "got 0"]),
        ({"hidden_size": -8, "head_dim": 8}, ["hidden_size", "got -8"]),
        ({"mlp_type": "moe"}, ["mlp_type", "'gated', 'plain'", "'moe'"]),
        ({"mlp_gate_dim": 7}, ["mlp_gate_dim", "intermediate_size (48)", "got 7"]),
        ({"norm_type": "none"}, ["norm_type", "'rms_norm', 'layer_norm'", "'none'"]),
        ({"position_embedding_type": "alibi"}, ["position_embedding_type", "'rope', 'learned'", "'alibi'"]),
        ({"compose_activation": "relu"}, ["compose_activation", "'gelu'", "'relu'"]),
        ({"oov_policy": "ignore"}, ["oov_policy", "'error', 'clamp', 'pad'", "'ignore'"]),
        ({"attention_dropout": 1.0}, ["attention_dropout", "[0, 1)", "got 1.0"]),
        ({"norm_eps": -1e-6}, ["norm_eps", "negative"]),
        ({"norm_eps": 1.5}, ["norm_eps", "at most 1", "got 1.5"]),
        ({"norm_eps": 10**30}, ["norm_eps", "at most 1"]),
        ({"qk_norm_eps": float("inf")}, ["qk_norm_eps", "at most 1", "got inf"]),
        ({"compose_norm_eps": float("nan")}, ["compose_norm_eps", "got nan"]),
        ({"initializer_range": float("inf")}, ["initializer_range", "finite", "got inf"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers", "at most 10,000", "got 1000000000"]),
        ({"vocab_size": 10**30}, ["vocab_size", "at most"]),
        ({"hidden_size": 2**62}, ["hidden_size", "at most"]),
        ({"intermediate_size": 2**62}, ["intermediate_size", "at most"]),
        ({"rope_base": "abc"}, ["rope_theta", "number", "'abc'"]),
        ({"rope_base": True}, ["rope_theta", "number", "True"]),
        ({"rope_base": float("inf")}, ["rope_theta", "number", "inf"]),
        ({"rope_parameters": {"rope_theta": "1e4"}}, ["rope_theta", "number", "'1e4'"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["rope_parameters", "linear", "factor"]),
        ({"rope_parameters": {"rope_type": "spiral"}}, ["rope_type", "'yarn'", "'spiral'"]),
        ({"rotary_pct": "all"}, ["partial_rotary_factor", "'all'"]),
        ({"query_wise": "False"}, ["query_wise", "true or false", "'False'"]),
        ({"window_type": ["LGLL"]}, ["window_type", "'LGLL'", "['LGLL']"]),
        ({"eos_token_id": 10**30}, ["eos_token_id", "number of a token"]),
        ({"is_encoder_decoder": True}, ["is_encoder_decoder", "false"]),
        ({"windw_size": 4}, ["'windw_size'", "did you mean 'window_size'"]),
        ({"num_hiden_layers": 4}, ["'num_hiden_layers'", "did you mean 'num_hidden_layers'"]),
        ({"compose_ranks": 4}, ["'compose_ranks'", "did you mean 'compose_rank'"]),
        ({"compose_rank": "two"}, ["compose_rank", "int", "'two'"]),
        ({"dim": 64, "hidden_size": 48}, ["dim=64", "hidden_size=48", "disagree"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_wrong_values_are_refused_by_name_and_value(change, words):
    with pytest.raises(ValueError) as error:
        DCFormerConfig(**{**TINY, **change})
    for word in words:
        assert word in str(error.value)


def test_a_value_spoilt_later_is_refused_when_saved(tmp_path):
    config = tiny_config()
    config.sliding_window = 0
    with pytest.raises(ValueError, match="sliding_window must be at least 1"):
        config.save_pretrained(tmp_path)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_survives_saving(variant, tmp_path):
    config = tiny_config(variant)
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is type(config)
    assert saved_values(again) == saved_values(config)


@pytest.mark.parametrize(
    ("variant", "composes"), [("dcformer", True), ("plain_gated_transformer", False), ("talking_heads", True)]
)
def test_composes_heads(variant, composes):
    assert tiny_config(variant).composes_heads is composes


def test_an_unknown_preset_names_those_there_are():
    with pytest.raises(ValueError, match=r"'dcformer-9b'.*'dcformer-2\.8b'"):
        DCFormerConfig.from_preset("dcformer-9b")


def test_preset_values_can_be_overridden():
    config = DCFormerConfig.from_preset("dcformer-8b", num_hidden_layers=4, layer_types=None)
    assert (config.num_hidden_layers, config.hidden_size, pattern(config)) == (4, 4096, "LGLG")


@pytest.mark.parametrize(("model_type", "name"), PRESETS, ids=lambda value: value)
def test_compose_parameters_of_a_preset_follow_equation_10(model_type, name):
    """Equation 10: 4 (2 R H) D_m for W_1, 4 (2 R H)^2 for W_2 and 4 H D_m for the gates, in every layer."""
    config = CLASSES[model_type][0].from_preset(name)
    model = meta_model(config)
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.compose_rank
    per_layer = 4 * hidden * 2 * rank * heads + 4 * (2 * rank * heads) ** 2 + 4 * hidden * heads
    assert count(model, "compose") == config.num_hidden_layers * per_layer
    # Table 2 divides by the 12 D_m^2 of a Transformer layer and leaves out W_2, the term in R^2.
    formula = (2 * rank + 1) / (3 * config.head_dim) + 4 * rank**2 / (3 * config.head_dim**2)
    assert per_layer / (12 * hidden**2) == pytest.approx(formula, rel=1e-12)
    layers = count(model, "layers") - count(model, "compose")
    narrower = layers / (config.num_hidden_layers * 12 * hidden**2)
    assert count(model, "compose") / layers == pytest.approx(formula / narrower, rel=1e-12)
    if name != "dcformer-8b":  # whose MLP is half as wide as Table 2 assumes
        assert narrower == pytest.approx(1, rel=0.03)


def test_total_of_dcformer_2_8b():
    """Embeddings 2 V D, and per layer 4 D^2 + 3 D F, two norms of D, two of D_h, and the composition."""
    config = DCFormerConfig.from_preset("dcformer-2.8b")
    vocab, hidden, inner, heads, head_dim = 50257, 2560, 6912, 32, 80
    compose = 4 * hidden * 128 + 4 * 128**2 + 4 * hidden * heads
    layer = 4 * hidden**2 + 3 * hidden * inner + 2 * hidden + 2 * head_dim + compose
    assert count(meta_model(config)) == 2 * vocab * hidden + 32 * layer + hidden == 2_849_567_232


def test_total_of_dcpythia_6_9b():
    """As above with two MLP matrices of 4 D^2, biases of 3 D + D and 4 D + D, and two vectors per LayerNorm."""
    config = DCPythiaConfig.from_preset("dcpythia-6.9b")
    vocab, hidden, heads, head_dim = 50257, 4096, 32, 128
    compose = 4 * hidden * 128 + 4 * 128**2 + 4 * hidden * heads
    layer = 12 * hidden**2 + 9 * hidden + 4 * hidden + 2 * head_dim + compose
    assert count(meta_model(config)) == 2 * vocab * hidden + 32 * layer + 2 * hidden == 6_941_859_840


def test_keys_of_others_are_kept_as_transformers_does():
    values = {"trained_by": "somebody", "num_dense_layers": 1, "mlp_only_layers": [0], "moe_layer_start_index": 1}
    config = DCFormerConfig(**TINY, **values, task_specific_params={"a": 1}, id2label={0: "no"})
    assert {name: getattr(config, name) for name in values} == values


@pytest.mark.parametrize("variant, rotary", [("dcpythia", 0.25), ("dcformer", 1.0)])
def test_scaling_the_context_of_a_folder_keeps_what_it_does_not_name(variant, rotary, tmp_path):
    model = tiny_model(variant, head_dim=16, rope_parameters={"rope_theta": 500.0, "partial_rotary_factor": rotary})
    model.save_pretrained(tmp_path)
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    scaled = AutoModelForCausalLM.from_pretrained(tmp_path, rope_parameters=scaling)
    assert scaled.config.rope_parameters["partial_rotary_factor"] == rotary
    assert scaled.config.rope_parameters["rope_theta"] == 500.0
    assert scaled.model.rotary_emb.inv_freq.numel() == 16 * rotary / 2
    full = AutoModelForCausalLM.from_pretrained(tmp_path, rope_parameters={**scaling, "partial_rotary_factor": 0.5})
    assert full.model.rotary_emb.inv_freq.numel() == 4
    with pytest.raises(ValueError, match="factor"):
        AutoModelForCausalLM.from_pretrained(tmp_path, rope_parameters={"rope_type": "linear"})


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_the_tensor_parallel_plan_names_modules_that_are_there(variant):
    model = tiny_model(variant).model
    names = {re.sub(r"\d+", "*", name) for name, _ in model.named_modules()}
    assert set(model.config.base_model_tp_plan) <= names
    assert ("layers.*.mlp.gate_proj" in model.config.base_model_tp_plan) == (model.config.mlp_type == "gated")


def test_static_caches_are_sized_by_the_rows_and_nothing_else_is():
    config = tiny_config("pre_only", num_key_value_heads=2)  # 5 numbers of each of 2 query heads, in multiples of 8
    assert {layer.head_dim for layer in config.per_layer_config} == {config.head_dim + 16}
    assert [layer.head_dim for layer in config.per_layer_config[:1]] == [config.head_dim + 16]
    assert config.per_layer_config["full_attention"].head_dim == config.head_dim == 8
    assert config.to_dict()["head_dim"] == 8
    assert {layer.head_dim for layer in tiny_config("query_wise").per_layer_config} == {8}
