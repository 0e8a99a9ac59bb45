"""Greedy tokens and log-probabilities of vLLM are those of `generate`, whatever the configuration and the schedule."""

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import ANSWERS, tiny_model
from torch import nn
from torchao.core.config import config_to_dict
from torchao.quantization import Int8Tensor, Int8WeightOnlyConfig, quantize_
from transformers import AutoModelForCausalLM
from vllm_engines import (
    NEW_TOKENS,
    engine,
    greedy,
    greedy_of_generate,
    log_probabilities_of_model,
    prompt_log_probabilities,
    prompts_of,
    scheduler_of,
)

from dcformer import cache_bytes_per_token
from dcformer.vllm import attention_backend


# vLLM's attention, which models without composition use, takes few head dimensions on CPUs.
HEADS_OF_32 = {"hidden_size": 128, "head_dim": 32}
# Weights of ordinary size lose three digits of float32 more than those of a trained model.
ROUNDING = 1e-5

CASES = {
    "dcformer": ("dcformer", {}),
    "dcpythia": (
        "dcpythia",
        {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ),
    "mlp_gate": ("mlp_gate_and_one_global_in_four", {"tie_word_embeddings": True}),
    "plain": ("plain_transformer_with_learned_positions", HEADS_OF_32),
    "static": ("talking_heads", {"layer_types": ["full_attention", "full_attention"]}),
    "low_rank_before": ("low_rank_only", {"compose_post": False}),
    "gates_after": ("gates_only", {"compose_pre": False, "sliding_window": None}),
    "query_wise": ("query_wise", {"num_key_value_heads": 1}),
    "key_wise": ("key_wise", {"position_embedding_type": "learned"}),
    "groups": ("grouped", {"num_key_value_heads": 2, "compose_static": True}),
    "odd_sizes": ("rank_4", {"num_attention_heads": 6, "head_dim": 10, "num_key_value_heads": 3, "compose_rank": 3}),
    "biases": ("no_qk_norm_with_biases", {"hidden_act": "relu", "mlp_gate_dim": 6, "parallel_residual": True}),
}


def assert_answers_as_generate(llm, model, prompts):
    assert greedy(llm, prompts) == greedy_of_generate(model, prompts)
    assert_prompts_score_as_in_transformers(llm, model, prompts)


def assert_prompts_score_as_in_transformers(llm, model, prompts):
    expected, exact = (
        log_probabilities_of_model(copied, prompts).double() for copied in (model, copy.deepcopy(model).double())
    )
    rounding = (expected - exact).abs()
    error = (prompt_log_probabilities(llm, prompts).double() - exact).abs()
    # By the mean: which of a hundred rounding errors is the largest, and how large, is chance and depends on the CPU.
    assert error.mean() <= max(ROUNDING, 2 * rounding.mean())
    assert error.max() <= max(ROUNDING, 4 * rounding.max())


@pytest.mark.parametrize("name", CASES)
def test_every_variant_serves_as_generate_in_pieces_of_16_tokens(name, tmp_path):
    variant, overrides = CASES[name]
    model = tiny_model(variant, **overrides)
    model.save_pretrained(tmp_path)
    # Pieces of prompts beside sequences that are being continued.
    with engine(tmp_path, max_num_batched_tokens=16, max_num_seqs=4) as llm:
        assert_answers_as_generate(llm, model, prompts_of(model.config.vocab_size))
        groups = scheduler_of(llm).kv_cache_config.kv_cache_groups
    if model.config.composes_heads:
        per_token = {group.kv_cache_spec.page_size_bytes / group.kv_cache_spec.block_size for group in groups}
        assert per_token == {cache_bytes_per_token(model.config, torch.float32)}


def test_bfloat16_is_as_close_to_float32_as_the_transformers_model_is():
    exact, rounded = (AutoModelForCausalLM.from_pretrained(ANSWERS, dtype=t) for t in (torch.float32, torch.bfloat16))
    prompts = prompts_of(exact.config.vocab_size, (40, 100))
    expected = log_probabilities_of_model(exact, prompts)
    error_of_transformers = (log_probabilities_of_model(rounded, prompts).float() - expected).abs().mean()
    with engine(ANSWERS, dtype="bfloat16") as llm:
        error = (prompt_log_probabilities(llm, prompts) - expected).abs().mean()
    assert 0 < error <= 2 * error_of_transformers


def test_a_model_of_the_authors_code_serves_as_generate(golden, tmp_path):
    """The other family, in a file of safetensors, is in test_vllm_adapters.py."""
    for part in ("config.json", "pytorch_model.bin"):
        shutil.copy(golden / "B_torch" / "B2_dcpythia" / part, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    longest = model.config.max_position_embeddings - 1
    prompts = prompts_of(model.config.vocab_size, (1, min(17, longest), longest))
    with engine(tmp_path) as llm:
        assert_prompts_score_as_in_transformers(llm, model, prompts)


def test_preempted_sequences_continue_where_they_were():
    model = AutoModelForCausalLM.from_pretrained(ANSWERS, dtype=torch.float32)
    prompts = prompts_of(model.config.vocab_size, (20, 30, 40, 50, 60, 70))
    with engine(ANSWERS, num_gpu_blocks_override=26, max_model_len=128, disable_log_stats=False) as llm:
        assert greedy(llm, prompts, 40) == greedy_of_generate(model, prompts, 40)
        counts = {metric.name: metric for metric in llm.get_metrics()}
        assert counts["vllm:num_preemptions"].value > 0
        assert scheduler_of(llm).kv_cache_manager.block_pool.get_num_free_blocks() == 25  # vLLM keeps one back


def test_compiled_steps_serve_as_generate(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    # What `torch.compile` traces, without the minutes that generating code for it takes.
    with engine(tmp_path, enforce_eager=False, compilation_config={"backend": "eager"}) as llm:
        assert_answers_as_generate(llm, model, prompts_of(model.config.vocab_size))


def test_triton_kernels_of_decoding_read_keys_and_values_from_their_blocks(tmp_path, monkeypatch):
    """In Triton's interpreter."""
    calls = []

    def counted(*arguments, key_lengths, **options):
        calls.append(key_lengths.tolist())
        return decode(*arguments, key_lengths=key_lengths, **options)

    decode = attention_backend.decode_op
    monkeypatch.setattr(attention_backend, "decode_op", counted)
    # On a GPU this asks whether the operator would choose its Triton kernels.
    monkeypatch.setattr(
        attention_backend.ComposedAttentionImpl,
        "_reads_blocks",
        lambda self, query, cache, width, batch: query.shape[2] <= 8 and len(batch.real) == len(batch.tokens),
    )
    model = tiny_model(num_key_value_heads=2, compose_groups=2, compose_rank=1, compose_static=True)
    model.save_pretrained(tmp_path)
    prompts = prompts_of(model.config.vocab_size, lengths=(31, 33))
    with engine(tmp_path, max_num_seqs=4) as llm:
        assert greedy(llm, prompts, 3) == greedy_of_generate(model, prompts, 3)
    assert [32, 34] in [sorted(lengths) for lengths in calls]


def test_linear_layers_of_8_bits_serve_as_in_transformers(tmp_path):
    """The large matrices are quantised; what composes the heads stays as it is."""
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


NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def test_a_draft_model_changes_no_token_and_drafts_what_generate_would(tmp_path):
    """Of drafts that are often wrong."""
    model = tiny_model()
    draft = tiny_model(num_hidden_layers=3, layer_types=[*model.config.layer_types, "sliding_attention"])
    draft.load_state_dict(model.state_dict(), strict=False)
    for part in (draft.model.layers[2].self_attn.o_proj, draft.model.layers[2].mlp.down_proj):
        part.weight.data.mul_(0.4)
    model.save_pretrained(tmp_path / "model")
    draft.save_pretrained(tmp_path / "draft")
    prompts = prompts_of(model.config.vocab_size, (1, 5, 17, 20, 44))
    speculative = {"method": "draft_model", "model": str(tmp_path / "draft"), "num_speculative_tokens": 3}
    # So few blocks that the last is used too, where a token without a place would be put.
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "num_gpu_blocks_override": 10}
    options |= {"speculative_config": speculative, "disable_log_stats": False}
    with engine(tmp_path / "model", **options) as llm:
        assert greedy(llm, prompts) == greedy_of_generate(model, prompts)
        counts = {metric.name: metric for metric in llm.get_metrics()}
    drafted, accepted = 0, 0
    for prompt, tokens in zip(prompts, greedy_of_generate(model, prompts, NEW_TOKENS + 3)):
        written = 1
        while written < NEW_TOKENS:
            (guess,) = greedy_of_generate(draft, [prompt + tokens[:written]], 3)
            right = next((i for i in range(3) if guess[i] != tokens[written + i]), 3)
            drafted, accepted, written = drafted + 3, accepted + right, written + right + 1
    assert 0 < accepted < drafted
    assert counts["vllm:spec_decode_num_accepted_tokens"].value == accepted


TWO_PROCESSES = """
import json, sys

if __name__ == "__main__":
    from vllm_engines import engine, greedy
    with engine(sys.argv[1], disable_log_stats=False, **json.loads(sys.argv[3])) as llm:
        print("tokens:", json.dumps(greedy(llm, json.loads(sys.argv[2]))))
        (counted,) = [m.value for m in llm.get_metrics() if m.name.endswith("num_accepted_tokens")] or [None]
        print("accepted:", counted)
"""
SHARED = {
    "groups": ({"compose_groups": 4, "num_key_value_heads": 2, "compose_static": True}, {"tensor_parallel_size": 2}),
    # With what repeats in the prompt, and heads that two processes could not share.
    "one_group": (
        {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10, "attention_bias": True},
        {"tensor_parallel_size": 2, "speculative_config": NGRAMS},
    ),
    "layers": ({"num_hidden_layers": 3, "position_embedding_type": "learned"}, {"pipeline_parallel_size": 2}),
}


@pytest.mark.parametrize("name", SHARED)
def test_two_processes_share_a_model(name, tmp_path, monkeypatch):
    shape, options = SHARED[name]
    model = tiny_model(**{"mlp_gate_dim": 4, "tie_word_embeddings": True, **shape})
    model.save_pretrained(tmp_path)
    prompts = prompts_of(model.config.vocab_size)
    prompts += [prompt * 4 for prompt in prompts_of(model.config.vocab_size, (5, 7), seed=1)]
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{root}:{root / 'tests'}")
    (script := tmp_path / "script.py").write_text(TWO_PROCESSES)
    command = [sys.executable, str(script), str(tmp_path), json.dumps(prompts), json.dumps(options)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stderr[-4000:]
    assert f"tokens: {greedy_of_generate(model, prompts)}" in result.stdout.splitlines()
    assert ("accepted: None" in result.stdout) == ("speculative_config" not in options)
    assert "accepted: 0" not in result.stdout
