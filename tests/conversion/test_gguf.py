"""GGUF files that are upcycled: the function of the source, or a refusal that names what Transformers does not read."""

import re

import numpy as np
import pytest
import torch
from gguf_writer import write_gguf
from test_upcycle import GROUPED, TOKENS, make_source
from transformers import AutoModelForCausalLM

from dcformer.conversion import upcycle


pytest.importorskip("gguf")
ONES = np.ones(8, np.float32)
GOOD = {
    "llama": {},
    "llama with neutral settings": {"rope.scaling.type": "none", "rope.scaling.factor": 1.0, "expert_count": 0},
    "qwen2 with sizes of heads": {"rope.dimension_count": 16, "attention.key_length": 16, "attention.value_length": 16},
    "qwen3": {},
}
STATED = {
    "rope.scaling.type='linear', llama.rope.scaling.factor=4.0": {
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 4.0,
    },
    "rope.scaling.type='yarn'": {"rope.scaling.type": "yarn"},
    "rope.scaling.attn_factor=1.5": {"rope.scaling.attn_factor": 1.5},
    "rope.scale_linear=2.0": {"rope.scale_linear": 2.0},
    "rope.dimension_count=8": {"rope.dimension_count": 8},
    "attention.key_length=32": {"attention.key_length": 32},
    "attention.sliding_window=4": {"attention.sliding_window": 4},
    "attention.scale=0.5": {"attention.scale": 0.5},
    "logit_scale=2.0": {"logit_scale": 2.0},
    "final_logit_softcapping=30.0": {"final_logit_softcapping": 30.0},
    "expert_count=8": {"expert_count": 8},
}


def source(folder, model_type="llama", **values):
    values = {**GROUPED, **({"head_dim": 128} if model_type == "qwen3" else {}), **values}
    return make_source(folder / "source", model_type, **values)


@pytest.mark.parametrize("name", GOOD)
def test_logits_are_those_of_the_model_that_was_written(name, tmp_path):
    model = source(tmp_path, name.split()[0])
    write_gguf(tmp_path / "tiny.gguf", model, GOOD[name])
    upcycle(tmp_path / "tiny.gguf", tmp_path / "model")
    upcycled = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert (upcycled(TOKENS).logits - model(TOKENS).logits).abs().max() < 1e-4


@pytest.mark.parametrize("words", STATED)
def test_settings_that_transformers_does_not_read_are_refused(words, tmp_path):
    model = source(tmp_path, "qwen2" if "dimension" in words else "llama")
    write_gguf(tmp_path / "tiny.gguf", model, STATED[words])
    with pytest.raises(ValueError, match=re.escape(f"does not read {model.config.model_type}.{words}")):
        upcycle(tmp_path / "tiny.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    "name", ["rope_freqs.weight", "rope_factors_long.weight", "blk.0.attn_q.bias", "blk.2.attn_rot_embd"]
)
def test_tensors_that_transformers_does_not_read_are_refused(name, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", source(tmp_path), tensors={name: ONES})
    with pytest.raises(ValueError, match=f"does not read {name} of"):
        upcycle(tmp_path / "tiny.gguf", tmp_path / "model")


def test_lost_tensors_are_refused(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", source(tmp_path), without=["model.layers.1.mlp.up_proj.weight"])
    with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        upcycle(tmp_path / "tiny.gguf", tmp_path / "model")


def test_the_rotary_base_of_the_format_is_taken_where_none_is_stated(tmp_path):
    model = source(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    write_gguf(tmp_path / "tiny.gguf", model, without=["rope.freq_base"])
    upcycle(tmp_path / "tiny.gguf", tmp_path / "model")
    upcycled = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.allclose(upcycled(TOKENS).logits, model(TOKENS).logits, atol=1e-4)


@pytest.mark.parametrize("content", [b"", b"garbage", b"GGUF", None], ids=repr)
def test_a_damaged_file_is_refused_by_its_name(content, tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, source(tmp_path))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 20] if content is None else content)
    with pytest.raises(ValueError, match=r"tiny\.gguf' cannot be read: "):
        upcycle(path, tmp_path / "model")
