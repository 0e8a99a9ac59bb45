"""Greedy tokens and log-probabilities of vLLM are those of `generate`, whatever the configuration and the schedule."""

import copy
import json
import shutil

import pytest
import torch
from tiny_models import VARIANTS, tiny_model
from transformers import AutoModelForCausalLM

from dcformer import pretrained_path


pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-serving")

from vllm_engines import (
    as_inputs,
    engine,
    greedy,
    greedy_of_generate,
    greedy_sampling,
    log_probabilities_of_model,
    prompt_log_probabilities,
    prompts_of,
    scheduler_of,
)


# vLLM's own attention, which models without composition run through, takes heads of few sizes on CPUs.
HEADS_OF_32 = {"hidden_size": 128, "head_dim": 32}
# Weights of ordinary size in eight layers lose three digits of float32 more than those of a trained model.
ROUNDING = 1e-5


def assert_serves_as_generate(llm, model, prompts):
    assert greedy(llm, prompts) == greedy_of_generate(model, prompts)
    assert_prompts_score_as_in_transformers(llm, model, prompts)


def assert_prompts_score_as_in_transformers(llm, model, prompts):
    expected, exact = (
        log_probabilities_of_model(own, prompts).double() for own in (model, copy.deepcopy(model).double())
    )
    own_error = (expected - exact).abs()
    error = (prompt_log_probabilities(llm, prompts).double() - exact).abs()
    # By the mean: which of a hundred rounding errors is the largest, and how large, is chance and depends on the CPU.
    assert error.mean() <= max(ROUNDING, 2 * own_error.mean())
    assert error.max() <= max(ROUNDING, 4 * own_error.max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_serves_as_generate_in_pieces_of_16_tokens(variant, tmp_path):
    model = tiny_model(variant, **(HEADS_OF_32 if "plain" in variant else {}))
    model.save_pretrained(tmp_path)
    # Pieces of prompts beside sequences that are being continued.
    with engine(tmp_path, max_num_batched_tokens=16, max_num_seqs=4) as llm:
        assert_serves_as_generate(llm, model, prompts_of(model.config.vocab_size))


@pytest.mark.parametrize(
    "overrides",
    [
        {"tie_word_embeddings": True},
        {"layer_types": ["full_attention", "full_attention"]},
        {"layer_types": ["sliding_attention", "sliding_attention"]},
        {"num_key_value_heads": 2, "compose_groups": 2, "compose_rank": 1, "compose_static": True},
        {"num_key_value_heads": 1, "compose_key": False},
        {"num_attention_heads": 6, "head_dim": 10, "num_key_value_heads": 3, "compose_rank": 3},
        {"position_embedding_type": "learned"},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"hidden_act": "relu", "mlp_gate_dim": 6, "parallel_residual": True},
    ],
    ids=lambda overrides: "-".join(overrides),
)
def test_switches_together_serve_as_generate(overrides, tmp_path):
    model = tiny_model(**overrides)
    model.save_pretrained(tmp_path)
    with engine(tmp_path) as llm:
        assert_serves_as_generate(llm, model, prompts_of(model.config.vocab_size))


@pytest.mark.parametrize("name", ["dcformer-tiny", "transformer-tiny"])
def test_bundled_models_serve_as_generate_past_their_windows(name):
    folder = pretrained_path(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with engine(folder) as llm:
        assert_serves_as_generate(llm, model, prompts_of(model.config.vocab_size, (3, 30, 31, 32, 33, 100, 300)))


def test_bfloat16_is_as_close_to_float32_as_the_transformers_model_is():
    folder = pretrained_path("dcformer-tiny")
    exact, rounded = (AutoModelForCausalLM.from_pretrained(folder, dtype=t) for t in (torch.float32, torch.bfloat16))
    prompts = prompts_of(exact.config.vocab_size, (40, 100))
    expected = log_probabilities_of_model(exact, prompts)
    error_of_transformers = (log_probabilities_of_model(rounded, prompts).float() - expected).abs().mean()
    with engine(folder, dtype="bfloat16") as llm:
        error = (prompt_log_probabilities(llm, prompts) - expected).abs().mean()
    assert 0 < error <= 2 * error_of_transformers


@pytest.mark.parametrize("family", ["dcformer", "dcpythia"])
def test_files_of_the_authors_serve_as_they_are(family, tmp_path):
    model = tiny_model(family)
    model.save_pretrained(tmp_path, save_original_format=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = [{"dcformer": "DCFormer", "dcpythia": "DCPythia"}[family]]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with engine(tmp_path) as llm:
        assert_serves_as_generate(llm, model, prompts_of(model.config.vocab_size))


def test_a_folder_with_code_is_served_by_the_installed_package(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path, with_code=True)
    with engine(tmp_path, trust_remote_code=True) as llm:
        assert_serves_as_generate(llm, model, prompts_of(model.config.vocab_size))


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("name", ["B1_dcformer_9769ae6", "B2_dcpythia", "B3_dcformer_head"])
def test_models_of_the_authors_own_code_serve_as_generate(name, file, fixtures, tmp_path):
    golden = fixtures / "golden" / "B_torch" / name
    for part in ("config.json", file):
        shutil.copy(golden / part, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    longest = model.config.max_position_embeddings - 1
    prompts = prompts_of(model.config.vocab_size, (1, min(17, longest), longest))
    with engine(tmp_path) as llm:
        assert_prompts_score_as_in_transformers(llm, model, prompts)


def test_a_common_beginning_is_computed_once():
    folder = pretrained_path("dcformer-tiny")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    beginning, *endings = prompts_of(model.config.vocab_size, (100, 5, 20, 40))
    prompts = [beginning + ending for ending in endings]
    with engine(folder) as llm:
        llm.generate(as_inputs([beginning]), greedy_sampling(1), use_tqdm=False)
        outputs = llm.generate(as_inputs(prompts), greedy_sampling(), use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [96, 96, 96]  # whole blocks of 16
    assert [list(output.outputs[0].token_ids) for output in outputs] == greedy_of_generate(model, prompts)


def test_sequences_that_are_preempted_go_on_where_they_were():
    folder = pretrained_path("dcformer-tiny")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = prompts_of(model.config.vocab_size, (20, 30, 40, 50, 60, 70))
    with engine(folder, num_gpu_blocks_override=26, max_model_len=128, disable_log_stats=False) as llm:
        assert greedy(llm, prompts, 40) == greedy_of_generate(model, prompts, 40)
        counts = {metric.name: metric for metric in llm.get_metrics()}
        assert counts["vllm:num_preemptions"].value > 0
        assert scheduler_of(llm).kv_cache_manager.block_pool.get_num_free_blocks() == 25  # one is never lent


def test_compiled_steps_serve_as_generate(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    # What `torch.compile` traces, without the minutes that generating code for it takes.
    with engine(tmp_path, enforce_eager=False, compilation_config={"backend": "eager"}) as llm:
        assert_serves_as_generate(llm, model, prompts_of(model.config.vocab_size))
