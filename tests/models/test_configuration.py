"""Values that the configuration derives, translates, refuses and saves."""

import copy
import json
import re

import pytest
import torch
from tiny_models import TINY, tiny_config, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from dcformer import DCFormerConfig, DCFormerForCausalLM, DCPythiaConfig, DCPythiaForCausalLM
from dcformer.configuration_dcformer import AUTHORS_KEYS


AUTHORS_FILE = {"architectures": ["DCFormer"], "model_type": "dcformer", "vocab_size": 50257, "torch_dtype": "float16"}
AUTHORS_FILE |= {"auto_map": {"AutoConfig": "configuration_dcformer.DCFormerConfig"}, "n_layer": 8, "n_head": 4}
AUTHORS_FILE |= {"bos_token_id": 1, "eos_token_id": 2, "dim": 64, "head_dim": 16, "n_local_heads": 4}
AUTHORS_FILE |= {"block_size": 2048, "window_size": 256, "window_type": None, "q_chunk_size": 128, "rope_base": 10000}
AUTHORS_FILE |= {"norm_eps": 1e-6, "use_qk_norm": True, "query_wise": False, "use_dcmha": True, "is_training": False}
AUTHORS_FILE |= {"intermediate_size": 96, "use_gradient_checkpointing": False}


LAYER_TYPES = {"L": "sliding_attention", "G": "full_attention"}


def test_authors_keys_are_translated_and_only_ours_are_saved(tmp_path):
    config = DCFormerConfig.from_dict(AUTHORS_FILE)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (64, 8, 4)
    assert (config.max_position_embeddings, config.qk_norm, config.dtype) == (2048, True, torch.float16)
    assert config.dim == 64  # the authors' names stay readable
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {"dim", "n_layer", "n_head", "block_size", "window_type", "auto_map", "rope_base"}.isdisjoint(saved)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert {**loaded.to_dict(), "_name_or_path": ""} == {**config.to_dict(), "_name_or_path": ""}


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
        ({"mgate": True, "intermediate_size": 88}, "mlp_gate_dim", 44),
        ({"intermediate_size": None, "dim": 96}, "intermediate_size", 256),
        ({"intermediate_size": None, "dim": 100}, "intermediate_size", 512),
        ({"intermediate_size": None, "dim": 96, "mlp_type": "plain"}, "intermediate_size", 384),
        ({}, "eos_token_id", 0),
        ({"vocab_size": 152064}, "eos_token_id", 2),
        ({"bos_token_id": 0}, "eos_token_id", 2),
        ({}, "sliding_window", 256),
        ({"window_type": None}, "layer_types", [LAYER_TYPES[letter] for letter in "LGLGLGLG"]),
        ({"window_type": "LG"}, "layer_types", [LAYER_TYPES[letter] for letter in "LGLGLGLG"]),
        ({"window_type": "LGLL"}, "layer_types", [LAYER_TYPES[letter] for letter in "LGLLLGLL"]),
        ({"window_type": "LGL6", "n_layer": 10}, "layer_types", [LAYER_TYPES[letter] for letter in "LGLLLLLLLG"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_each_key_of_the_authors(change, field, expected):
    assert getattr(DCFormerConfig.from_dict({**AUTHORS_FILE, **change}), field) == expected


def test_keys_that_an_authors_file_leaves_out_take_the_authors_defaults():
    file = {key: value for key, value in AUTHORS_FILE.items() if key not in ("use_qk_norm", "rope_base")}
    config = DCFormerConfig.from_dict(file)
    assert config.qk_norm is False
    assert config.rope_parameters["rope_theta"] == 10000
    for newer in ({"mgate": False}, {"prefill_pad": True}):
        assert DCFormerConfig.from_dict({**file, **newer}).rope_parameters["rope_theta"] == 500000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sliding_window": 1}, ["sliding_window", "at least 2", "got 1"]),
        ({"sliding_window": None, "layer_types": ["sliding_attention"] * 2}, ["layer_types", "sliding_window=None"]),
        ({"compose_groups": 3}, ["compose_groups", "num_attention_heads (4)", "got 3"]),
        ({"compose_layers": [2]}, ["compose_layers", "from 0 to 1", "got [2]"]),
        ({"compose_layers": []}, ["compose_layers", "got []"]),
        ({"compose_rank": 0}, ["compose_rank", "at least 1", "got 0"]),
        ({"layer_types": ["full_attention", "chunked"]}, ["layer_types", "sliding_attention", "'chunked'"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "2 layers"]),
        ({"head_dim": 7}, ["even", "got 7", "head_dim 7"]),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, ["partial_rotary_factor", "(0, 1]", "got 1.5"]),
        ({"rope_parameters": {"partial_rotary_factor": 0}}, ["(0, 1]", "got 0"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.1}}, ["at least 2", "got 0"]),
        ({"rope_base": "abc"}, ["rope_theta", "number", "'abc'"]),
        ({"rope_base": 1}, ["rope_theta", "above 1", "got 1"]),
        ({"rope_base": float("inf")}, ["rope_theta", "inf"]),
        ({"window_type": "GG"}, ["window_type", "LGLL", "'GG'"]),
        ({"num_attention_heads": 5}, ["num_attention_heads", "hidden_size (32)", "got 5"]),
        ({"num_attention_heads": 0}, ["num_attention_heads", "at least 1", "got 0"]),
        ({"num_key_value_heads": 0}, ["num_key_value_heads", "at least 1", "got 0"]),
        ({"hidden_size": -8, "head_dim": 8}, ["hidden_size", "got -8"]),
        ({"mlp_gate_dim": 7}, ["mlp_gate_dim", "intermediate_size (48)", "got 7"]),
        ({"mlp_type": "moe"}, ["mlp_type", "gated, plain", "'moe'"]),
        ({"norm_eps": -1e-6}, ["norm_eps", "-1e-06"]),
        ({"compose_norm_eps": float("nan")}, ["compose_norm_eps", "got nan"]),
        ({"attention_dropout": 1.0}, ["attention_dropout", "[0, 1)", "got 1.0"]),
        ({"query_wise": "False"}, ["query_wise", "'False'"]),
        ({"dim": 64, "hidden_size": 48}, ["dim=64", "hidden_size=48"]),
        ({"sliding_window": 10**30}, ["sliding_window", "at most 2147483647"]),
        ({"num_hidden_layers": 10**9, "layer_types": None}, ["num_hidden_layers", "at most 4000", "got 1000000000"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_wrong_values_are_refused_by_name_and_value(change, words):
    with pytest.raises(ValueError) as error:
        DCFormerConfig.from_dict({**TINY, **change})
    for word in words:
        assert word in str(error.value)


LINEAR = {"rope_type": "linear", "factor": 2.0}
CONTRADICTIONS = [
    ({"dim": 64}, {"hidden_size": 2560}),  # the default, but given
    ({"use_qk_norm": False}, {"qk_norm": True}),
    ({"n_local_heads": -1}, {"num_key_value_heads": 2}),
    ({"rope_base": 10000}, {"rope_theta": 77}),
    ({"rope_base": 10000}, {"rope_parameters": {"rope_theta": 77}}),
    ({"rope_theta": 10000}, {"rope_parameters": {"rope_theta": 77}}),
    ({"rotary_pct": 0.5}, {"partial_rotary_factor": 1}),
    ({"rotary_pct": 0.5}, {"rope_parameters": {"partial_rotary_factor": 1.0}}),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_parameters": {"rope_type": "default"}}),
    ({"rope_scaling": LINEAR}, {"rope_parameters": {**LINEAR, "factor": 4.0}}),
    ({"query_wise": True}, {"compose_key": True}),
    ({"query_wise": False}, {"compose_key": False}),
    ({"use_dcmha": False}, {"compose_post": True}),
    ({"use_dcmha": True}, {"compose_pre": False, "compose_post": False}),
    ({"use_linear_bias": True}, {"mlp_bias": False}),
    ({"mgate": True, "mgate_dim": 16}, {"mlp_gate_dim": 8}),
    ({"mgate": False}, {"mlp_gate_dim": 8}),
    ({"window_type": "LG"}, {"layer_types": ["full_attention"] * 32}),
]


@pytest.mark.parametrize(("theirs", "ours"), CONTRADICTIONS, ids=str)
def test_a_key_of_the_authors_that_contradicts_ours_is_refused(theirs, ours):
    with pytest.raises(ValueError, match="disagree; give one of them"):
        DCFormerConfig.from_dict({**theirs, **ours})
    DCFormerConfig.from_dict(theirs)
    DCFormerConfig(**ours)


@pytest.mark.parametrize(
    "values",
    [
        {"dim": 2560, "hidden_size": 2560},
        {"rope_base": 77, "rope_theta": 77, "rope_parameters": {"rope_theta": 77}},
        {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "linear", "rope_theta": 77}},
        {"query_wise": True, "compose_key": False},
        {"use_dcmha": True, "compose_pre": False},
        {"window_type": "LGLL", "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
        {"window_size": None, "window_type": "LG", "layer_types": ["full_attention"] * 32},
        {"n_local_heads": 8, "num_key_value_heads": None},
        {"dim": 64, "n_head": 4, "qk_norm": True},  # their defaults are others
        {"dim": 64, "n_head": 4, "prefill_pad": True, "rope_parameters": {"rope_theta": 77}},
    ],
    ids=str,
)
def test_keys_of_the_authors_may_say_the_same_as_ours(values):
    config = DCFormerConfig.from_dict(values)
    given = {name: value for name, value in values.items() if value is not None and name in config.to_dict()}
    assert {**given.pop("rope_parameters", {})}.items() <= config.rope_parameters.items()
    assert given.items() <= config.to_dict().items()
    assert copy.deepcopy(config).to_dict() == DCFormerConfig(**config.to_dict()).to_dict() == config.to_dict()


@pytest.mark.parametrize("key", sorted(AUTHORS_KEYS))
def test_the_constructor_takes_fields_only(key):
    with pytest.raises(ValueError, match=f"{key}=64 is a key of the authors' files, for from_dict"):
        DCPythiaConfig(**{key: 64})


# Layers, width and heads: Table 3 of the paper, those of Pythia and LLaMA of the same sizes, and the authors' 8B model.
PAPER_SHAPES = {
    "dcformer-405m": (24, 1024, 16),
    "dcformer-834m": (24, 1536, 24),
    "dcformer-1.4b": (24, 2048, 32),
    "dcformer-13b": (40, 5120, 40),
    "dcformer-33b": (60, 6656, 52),
    "dcformer-8b": (48, 4096, 32),
    **{f"{family}-2.8b": (32, 2560, 32) for family in ("dcformer", "dcpythia")},
    **{f"{family}-6.9b": (32, 4096, 32) for family in ("dcformer", "dcpythia")},
}


def test_presets_have_the_published_shapes_and_the_compose_parameters_of_equation_10():
    """Equation 10: 4 (2 R H) D_m for W_1, 4 (2 R H)^2 for W_2 and 4 H D_m for the gates, in every layer."""
    shapes = {}
    for config_class, model_class in ((DCFormerConfig, DCFormerForCausalLM), (DCPythiaConfig, DCPythiaForCausalLM)):
        for name in config_class.presets():
            config = config_class.from_preset(name)
            hidden, heads, inner = config.hidden_size, config.num_attention_heads, 2 * 2 * config.num_attention_heads
            shapes[name] = (config.num_hidden_layers, hidden, heads)
            details = (config.norm_eps, config.qk_norm_eps, config.compose_activation)
            is_of_jax = name in ("dcformer-405m", "dcformer-834m", "dcformer-1.4b")
            assert (details == (1e-5, 1e-5, "gelu_pytorch_tanh")) == is_of_jax
            with torch.device("meta"):
                parameters = model_class(
                    config_class.from_preset(name, num_hidden_layers=1, layer_types=None)
                ).named_parameters()
            number = sum(parameter.numel() for name, parameter in parameters if "compose" in name)
            assert number == 4 * hidden * inner + 4 * inner**2 + 4 * hidden * heads
            config.layer_types.clear()
            assert config_class.from_preset(name, intermediate_size=88).intermediate_size == 88
    assert shapes == PAPER_SHAPES


def test_which_models_compose_and_what_their_rows_add():
    channels = {"dcformer": (8, 8), "three_to_one": (16, 16), "pre_only": (8, 0), "post_only": (0, 8)}
    channels |= {"query_wise": (0, 0), "talking_heads": (0, 0), "rank_4": (16, 16)}  # multiples of 8
    for variant, expected in channels.items():
        config = tiny_config(variant)
        assert config.composes_heads and config.compose_cache_channels == expected, variant
    assert tiny_config("three_to_one", compose_gate=False, compose_rank=3).compose_cache_channels == (24, 24)
    assert not tiny_config("gates_only", compose_gate=False).composes_heads
    assert tiny_config("talking_heads", compose_gate=False, compose_low_rank=False).composes_heads


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


@pytest.mark.parametrize("variant", ["dcformer", "dcpythia", "mlp_gate_and_one_global_in_four"])
def test_the_tensor_parallel_plan_names_modules_that_are_there(variant):
    model = tiny_model(variant).model
    names = {re.sub(r"\d+", "*", name) for name, _ in model.named_modules()}
    assert set(model.config.base_model_tp_plan) <= names
    assert "base_model_tp_plan" not in model.config.to_dict()
