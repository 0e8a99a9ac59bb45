"""Options that are not supported are refused, and vLLM never leaves the composition out."""

import subprocess
import sys

import pytest
from tiny_models import ANSWERS, tiny_model


pytest.importorskip("vllm", reason="vLLM needs a separate environment: make test-serving")

import vllm
from vllm import ModelRegistry, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm_engines import as_inputs, engine, greedy, greedy_of_generate

from dcformer.vllm import registration


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    return folder


NGRAMS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
MEDUSA = {"method": "medusa", "model": ANSWERS, "num_speculative_tokens": 2}
OTHER_VOCABULARY = {"method": "draft_model", "model": ANSWERS, "num_speculative_tokens": 2}
DYNAMIC_ROPE = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}
REFUSED = {
    "kv_cache_dtype": ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8'"),
    "speculative": ({"speculative_config": MEDUSA}, "speculative_config with method='medusa'"),
    "other_vocabulary": ({"speculative_config": OTHER_VOCABULARY}, "should have the same vocabulary size"),
    "speculative_stages": ({"speculative_config": NGRAMS, "pipeline_parallel_size": 2}, "leave out one of them"),
    "attention_backend": ({"attention_backend": "CPU_ATTN"}, "attention_backend"),
    "model_impl": ({"model_impl": "transformers"}, "is not a registered model in the Transformers library"),
    "lora_stages": ({"enable_lora": True, "pipeline_parallel_size": 2}, "enable_lora is not supported with"),
    "empty_stage": ({"pipeline_parallel_size": 3}, "pipeline_parallel_size=3 leaves a stage without layers"),
    "is_causal": ({"hf_overrides": {"is_causal": False}}, "is_causal=False"),
    "rope_type": ({"hf_overrides": DYNAMIC_ROPE}, "rope_type='dynamic'"),
}


@pytest.mark.parametrize("options, message", REFUSED.values(), ids=REFUSED)
def test_what_is_not_supported_is_refused(options, message, folder):
    with pytest.raises((ValueError, NotImplementedError), match=message), engine(folder, **options):
        pass


_WITHOUT_PLUGIN = """
import sys
from vllm import LLM
if __name__ == "__main__":
    for trusts in (False, True):
        try:
            LLM(sys.argv[1], trust_remote_code=trusts, enforce_eager=True, skip_tokenizer_init=True)
        except Exception as error:
            print("refused:", error)
"""


def test_without_the_plugin_nothing_is_served(tmp_path, monkeypatch):
    """Neither by the models that vLLM has, nor by code in the folder."""
    model = tiny_model()
    monkeypatch.setattr(type(model.config), "_auto_class", "AutoConfig")
    monkeypatch.setattr(type(model), "_auto_class", "AutoModelForCausalLM")
    model.save_pretrained(tmp_path / "model")
    monkeypatch.setenv("VLLM_PLUGINS", "")
    script = tmp_path / "script.py"
    script.write_text(_WITHOUT_PLUGIN)
    command = [sys.executable, str(script), str(tmp_path / "model")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.count("refused:") == 2


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [("0.32.1+cpu", True), ("0.33.0", True), ("0.31.2", False), ("0.34.0", False), ("1.32.0", False), ("dev", False)],
)
def test_an_untested_version_of_vllm_gets_no_models_and_a_warning(version, is_tested, monkeypatch, caplog):
    registration.register()
    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setattr(ModelRegistry, "register_model", None)
    registration.register()
    warning = f"need vLLM >=0.32,<0.34 and are not registered in vLLM {version}"
    assert (warning in caplog.text) == (not is_tested)


def test_a_token_without_an_embedding_ends_its_request_and_not_the_engine(folder):
    registration.register()  # may be called again
    with engine(folder) as llm:
        with pytest.raises(VLLMValidationError, match="Token id 67 at position 1"):
            llm.generate(as_inputs([[1, 67]]), SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
        assert len(greedy(llm, [[1, 66]])[0]) > 0


def test_clamped_tokens_are_served_as_generate_takes_them(tmp_path):
    model = tiny_model(oov_policy="clamp")
    model.save_pretrained(tmp_path)
    prompts = [[5, 70, 1_000_000, 3], [66, 67]]
    with engine(tmp_path) as llm:
        assert greedy(llm, prompts) == greedy_of_generate(model, prompts)
