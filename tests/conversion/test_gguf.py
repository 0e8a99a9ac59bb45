"""GGUF files that are upcycled: the function of the source, or a refusal that names what Transformers does not read."""

import re

import numpy as np
import pytest
from test_upcycle import GROUPED, TOKENS, make_source
from transformers import AutoModelForCausalLM, GenerationConfig

from dcformer.conversion import upcycle
from dcformer.conversion.gguf import generation_settings


gguf = pytest.importorskip("gguf")
NEUTRAL = {"rope.scaling.type": "none", "rope.scaling.factor": 1.0, "expert_count": 0}
SIZES_OF_HEADS = dict.fromkeys(("rope.dimension_count", "attention.key_length", "attention.value_length"), 16)
# Type of the model, and what is written otherwise.
GOOD = {
    "llama with neutral settings": {"settings": NEUTRAL},
    "llama with the format's rotary base": {"without": ["rope.freq_base"]},
    "qwen2 with sizes of heads": {"settings": SIZES_OF_HEADS},
    "qwen3": {},
}
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
TYPE = "rope.scaling.type"
# What Transformers does not read of the settings, as the refusal states it.
UNREAD = {
    "rope.scaling.type='linear', llama.rope.scaling.factor=4.0": {TYPE: "linear", "rope.scaling.factor": 4.0},
    "rope.scaling.attn_factor=1.5": {"rope.scaling.attn_factor": 1.5},
    "rope.scale_linear=2.0": {"rope.scale_linear": 2.0},
    "rope.dimension_count=8": {"rope.dimension_count": 8},
    "attention.key_length=32": {"attention.key_length": 32},
    "final_logit_softcapping=30.0": {"final_logit_softcapping": 30.0},
    "expert_count=8": {"expert_count": 8},
}
UNREAD_TENSORS = ["rope_freqs.weight", "rope_factors_long.weight", "blk.0.attn_q.bias", "blk.2.attn_rot_embd"]
LOST = "model.layers.1.mlp.up_proj.weight"
REFUSED = {f"does not read llama.{words}": {"settings": settings} for words, settings in UNREAD.items()}
REFUSED |= {f"does not read {name} of": {"tensors": {name: np.ones(8, np.float32)}} for name in UNREAD_TENSORS}
REFUSED |= {f"lacks {LOST}": {"without": [LOST]}}


def source(folder, model_type="llama", **values):
    values = {**GROUPED, **({"head_dim": 128} if model_type == "qwen3" else {}), **values}
    return make_source(folder / "source", model_type, **values)


def write_gguf(path, model, settings=(), tensors=(), without=(), facts=()):
    """
    Write a Llama or Qwen model as llama.cpp's converter does.

    Args:
        settings, facts, tensors: Further settings of the architecture, others by key, and tensors by name.
        without: Parameters and settings to leave out.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    values = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        **dict(settings),
    }
    add = {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool, int: writer.add_int32}
    values = {f"{config.model_type}.{key}": value for key, value in values.items() if key not in without}
    for key, value in (values | dict(facts)).items():
        add[type(value)](key, value)
    writer.add_string("general.name", "tiny")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*"ab", "ab", "ba", *(f"token {i}" for i in range(config.vocab_size - 4))])
    writer.add_token_merges(["a b", "b a"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[config.model_type], config.num_hidden_layers)
    for name, values in model.state_dict().items():
        values = values.numpy()
        if config.model_type == "llama" and (".q_proj." in name or ".k_proj." in name):  # pairs of channels alternate
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            halves = values.reshape(heads, 2, -1, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        if name not in without:
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), values)
    for name, values in dict(tensors).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_settings_for_generate_and_the_licence_come_along(tmp_path):
    sampling = {"general.sampling.temp": 0.7, "general.sampling.top_k": -1, "general.sampling.min_p": 0.05}
    facts = {"tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.eom_token_id": 2}
    facts |= {"general.license": "apache-2.0", "tokenizer.chat_template": "{{ messages }}"}
    write_gguf(tmp_path / "tiny.gguf", source(tmp_path), facts=sampling | facts)
    upcycle(tmp_path / "tiny.gguf", tmp_path / "model")
    settings = GenerationConfig.from_pretrained(tmp_path / "model").to_diff_dict()
    expected = {"bos_token_id": 0, "eos_token_id": [1, 2, 3]}
    expected |= {"do_sample": True, "temperature": 0.7, "top_k": 0, "min_p": 0.05}
    assert settings.items() >= expected.items() and "repetition_penalty" not in settings
    assert generation_settings({"general.sampling.temp": 0.0})["do_sample"] is False
    assert (tmp_path / "model" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert "license: apache-2.0" in (tmp_path / "model" / "README.md").read_text()


@pytest.mark.parametrize("name", GOOD)
def test_logits_are_those_of_the_model_that_was_written(name, tmp_path):
    model = source(tmp_path, name.split()[0], **THETA if "rotary base" in name else {})
    write_gguf(tmp_path / "tiny.gguf", model, **GOOD[name])
    upcycle(tmp_path / "tiny.gguf", tmp_path / "model")
    upcycled = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert (upcycled(TOKENS).logits - model(TOKENS).logits).abs().max() < 1e-4


@pytest.mark.parametrize("words", REFUSED)
def test_lost_tensors_and_what_transformers_does_not_read_are_refused(words, tmp_path):
    model = source(tmp_path, "qwen2" if "dimension" in words else "llama")
    write_gguf(tmp_path / "tiny.gguf", model, **REFUSED[words])
    with pytest.raises(ValueError, match=re.escape(words.replace("llama", model.config.model_type))):
        upcycle(tmp_path / "tiny.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_damaged_file_is_refused_by_its_name(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, source(tmp_path))
    for content in (path.read_bytes()[: path.stat().st_size // 20], b"", b"garbage", b"GGUF"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"tiny\.gguf' cannot be read: "):
            upcycle(path, tmp_path / "model")
