"""vLLM quantises the large matrices; what composes the heads stays as it is."""

import json

import torch
from tiny_models import tiny_model
from torch import nn
from torchao.core.config import config_to_dict
from torchao.quantization import Int8Tensor, Int8WeightOnlyConfig, quantize_
from vllm_engines import engine, log_probabilities_of_model, prompt_log_probabilities, prompts_of


def test_linear_layers_of_8_bits_serve_as_in_transformers(tmp_path):
    model = tiny_model(hidden_size=64, intermediate_size=128, mlp_gate_dim=4)
    model.save_pretrained(tmp_path)
    prompts = prompts_of(model.config.vocab_size)
    options = {"quantization_config_dict_json": json.dumps(config_to_dict(Int8WeightOnlyConfig()))}
    with engine(tmp_path, quantization="torchao", hf_overrides=options) as llm:
        loaded = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
        quantised = {name for name, weight in loaded.named_parameters() if isinstance(weight.data, Int8Tensor)}
        log_probabilities = prompt_log_probabilities(llm, prompts)
    layer = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert quantised >= {f"model.layers.{i}.{name}.weight" for i in (0, 1) for name in layer}
    assert not {name for name in quantised if "compose" in name or "gate_mix" in name or "norm" in name}

    def is_quantised(module: nn.Module, name: str) -> bool:
        path, _, last = name.rpartition(".")
        merged = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}.get(last, last)
        return isinstance(module, nn.Linear) and f"{path}.{merged}.weight" in quantised

    quantize_(model, Int8WeightOnlyConfig(), filter_fn=is_quantised)
    expected = log_probabilities_of_model(model, prompts)
    torch.testing.assert_close(log_probabilities, expected, atol=1e-4, rtol=0)
