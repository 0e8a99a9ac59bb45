"""What cannot be served is refused in one sentence; no road to vLLM leaves the composition out."""

import json
import subprocess
import sys

import pytest
import torch
from tiny_models import tiny_model


pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-serving")

import vllm
from vllm import ModelRegistry, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm_engines import (
    as_inputs,
    engine,
    greedy,
    greedy_of_generate,
    log_probabilities_of_model,
    prompt_log_probabilities,
    prompts_of,
)

from dcformer.vllm import registration


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 does not divide the heads .* compose_groups=1 "),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8' would also quantise the factors"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
            "Speculative decoding has not been tested",
        ),
        ({"attention_backend": "CPU_ATTN"}, "attention_backend='CPU_ATTN' cannot compose attention heads"),
        ({"model_impl": "transformers"}, "attn_implementation='vllm' cannot compose attention heads"),
        ({"enable_lora": True}, "DCFormerForCausalLM does not support LoRA yet"),
        ({"pipeline_parallel_size": 2}, "Pipeline parallelism is not supported for this model"),
        ({"hf_overrides": {"is_causal": False}}, "is_causal=False makes an encoder of this model"),
        ({"hf_overrides": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}}, "rope_type='dynamic' turns"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_served_is_refused(options, message, folder):
    with pytest.raises((ValueError, NotImplementedError), match=message), engine(folder, **options):
        pass


def test_groups_that_do_not_divide_are_refused(tmp_path):
    tiny_model("grouped", num_attention_heads=6, head_dim=8, compose_groups=3).save_pretrained(tmp_path)
    with (
        pytest.raises(ValueError, match=r"tensor_parallel_size=2 does not divide .* compose_groups=3"),
        engine(tmp_path, tensor_parallel_size=2),
    ):
        pass


_WITHOUT_PLUGIN = """
import sys
from vllm import LLM
if __name__ == "__main__":
    LLM(sys.argv[1], trust_remote_code=sys.argv[2] == "code", enforce_eager=True, skip_tokenizer_init=True)
"""


@pytest.mark.parametrize(
    ("code", "message"),
    [(False, "does not recognize this architecture"), (True, "cannot compose attention heads")],
    ids=["without code", "with code"],
)
def test_without_the_plugin_nothing_is_served(code, message, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "")
    tiny_model().save_pretrained(tmp_path / "model", with_code=code)
    script = tmp_path / "script.py"
    script.write_text(_WITHOUT_PLUGIN)
    command = [sys.executable, str(script), str(tmp_path / "model"), "code" if code else "no code"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert result.returncode != 0
    assert message in result.stderr


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [("0.32.0", True), ("0.32.1+cpu", True), ("0.31.2", False), ("0.33.0", False), ("1.32.0", False), ("dev", False)],
)
def test_the_tested_versions_of_vllm_are_known(version, is_tested):
    reason = registration.why_not_with(version)
    assert (reason is None) == is_tested
    assert is_tested or f"tested with vLLM >=0.32,<0.33 and do not run in vLLM {version}" in reason


def test_another_version_of_vllm_refuses_these_models_and_no_others(tmp_path, monkeypatch, caplog):
    tiny_model().save_pretrained(tmp_path)
    registration.register()
    registered = dict(ModelRegistry.models)
    monkeypatch.setattr(vllm, "__version__", "0.40.0")
    try:
        registration.register()
        assert "do not run in vLLM 0.40.0" in caplog.text
        with (
            pytest.raises(ValueError, match=r"tested with vLLM >=0.32,<0.33 and do not run in vLLM 0.40.0"),
            engine(tmp_path),
        ):
            pass
        changed = {name for name, model in ModelRegistry.models.items() if model is not registered[name]}
        assert changed == {*registration.MODEL_CLASSES, *registration.AUTHORS_CLASSES}
    finally:
        ModelRegistry.models.update(registered)


def test_the_plugin_may_be_registered_again(folder):
    registration.register()
    registration.register()
    assert registration.why_not_with(vllm.__version__) is None


def test_a_token_without_an_embedding_ends_its_request_and_not_the_engine(folder):
    with engine(folder) as llm:
        with pytest.raises(VLLMValidationError, match="Token id 67 at position 1 has no row"):
            llm.generate(as_inputs([[1, 67]]), SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
        assert len(greedy(llm, [[1, 66]])[0]) > 0


def test_clamped_tokens_are_served_as_generate_takes_them(tmp_path):
    model = tiny_model(oov_policy="clamp")
    model.save_pretrained(tmp_path)
    prompts = [[5, 70, 1_000_000, 3], [66, 67]]
    with engine(tmp_path) as llm:
        assert greedy(llm, prompts) == greedy_of_generate(model, prompts)


def test_added_rows_are_as_in_transformers_and_are_never_sampled(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "oov_policy": "pad"}))
    model = type(tiny_model()).from_pretrained(tmp_path)
    assert model.config.vocab_size == 128
    prompts = [[5, 70, 127, 3], *prompts_of(128, (20,))]
    with engine(tmp_path) as llm:
        assert greedy(llm, prompts) == greedy_of_generate(model, prompts)
        torch.testing.assert_close(
            prompt_log_probabilities(llm, prompts), log_probabilities_of_model(model, prompts), atol=1e-5, rtol=0
        )
        sampling = SamplingParams(temperature=2.0, max_tokens=40, ignore_eos=True, seed=0, logprobs=5, detokenize=False)
        (output,) = llm.generate(as_inputs(prompts[1:]), sampling, use_tqdm=False)
        assert max(output.outputs[0].token_ids) < 67
        with pytest.raises(VLLMValidationError, match="Token id 128 at position 0"):
            greedy(llm, [[128]])
