"""Quantised weights and quantised caches: what is quantised, what stays, what still agrees."""

import types

import pytest
import torch
from optimum.quanto.library.extensions.cpp import ext
from tiny_models import random_tokens, tiny_model
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig
from transformers import BitsAndBytesConfig, QuantoConfig, TorchAoConfig

from dcformer import DCFormerForCausalLM


# Inputs of every linear layer are a multiple of 64, the block of bitsandbytes.
SHAPE = {"hidden_size": 128, "intermediate_size": 256}
METHODS = {
    "torchao_int8": lambda: TorchAoConfig(Int8WeightOnlyConfig()),
    "bitsandbytes_int8": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "bitsandbytes_nf4": lambda: BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    ),
    "quanto_int8": lambda: QuantoConfig(weights="int8"),
}
WRITABLE = [name for name in METHODS if not name.startswith("quanto")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model(**SHAPE).save_pretrained(folder)
    return folder


def load(folder, method=None) -> DCFormerForCausalLM:
    options = {} if method is None else {"quantization_config": METHODS[method]()}
    return DCFormerForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu", **options).eval()


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(random_tokens(2, 13)).logits


@pytest.mark.parametrize("method", METHODS)
def test_linear_layers_are_quantised_the_composition_is_not_and_text_follows_the_forward(method, folder):
    plain, model = load(folder), load(folder, method)
    layer, quantised = plain.model.layers[0], model.model.layers[0]
    for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        weight = quantised.get_submodule(name).weight
        assert type(weight) is not nn.Parameter or weight.dtype != torch.float32, name
    for name, parameter in layer.self_attn.compose.named_parameters():
        kept = quantised.self_attn.compose.get_parameter(name)
        assert type(kept) is nn.Parameter and torch.equal(kept, parameter)
    # Random weights that compose strongly: steps of 8 bits are 1/254 of the largest weight, of 4 bits 1/15.
    error = (logits(model) - logits(plain)).norm() / logits(plain).norm()
    assert 1e-4 < error < (0.1 if method.endswith("int8") else 0.6)
    arguments = {"inputs": random_tokens(1, 9), "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(**arguments), model.generate(**arguments, use_cache=False))


@pytest.mark.parametrize("method", WRITABLE)
def test_quantised_weights_are_saved_and_read_back(method, folder, tmp_path):
    model = load(folder, method)
    # Before the first inference: after it, bitsandbytes writes 4-bit weights in an order that it cannot read.
    model.save_pretrained(tmp_path)
    reloaded = DCFormerForCausalLM.from_pretrained(tmp_path, device_map="cpu").eval()
    assert torch.equal(logits(reloaded), logits(model))


@pytest.mark.newer_transformers("quantises the cache of windows too")
def test_generate_makes_a_quantised_cache_for_full_attention_only(monkeypatch):
    def unpack(packed, bits):
        """As quanto's extension in C++ does, whose compilation takes two minutes."""
        return torch.cat([packed >> shift & (2**bits - 1) for shift in range(0, 8, bits)])

    monkeypatch.setattr(ext, "_lib", types.SimpleNamespace(unpack=unpack))
    tokens = random_tokens(1, 24)
    arguments = {"cache_implementation": "quantized", "max_new_tokens": 4, "min_new_tokens": 4, "pad_token_id": 0}
    options = {"backend": "quanto", "nbits": 4, "q_group_size": 32}
    model = tiny_model("all_global", head_dim=16)
    assert model.generate(tokens, cache_config=options, **arguments).shape == (1, 28)
