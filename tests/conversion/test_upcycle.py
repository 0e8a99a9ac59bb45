"""Models of other families become DCFormers of the same function, whose composition is then learned."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from test_resume import contents, interrupt
from tiny_models import random_tokens
from tiny_recipes import tiny_recipe
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GenerationConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)
from typer.testing import CliRunner

from dcformer.cli import app
from dcformer.conversion import upcycle
from dcformer.hub_dcformer import COMPOSITION
from dcformer.training import train


SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
SHAPE |= {"vocab_size": 67, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None}
GROUPED = {**SHAPE, "num_key_value_heads": 2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SOURCES = {
    "llama_with_biases": LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True),
    "llama_tied_and_scaled": LlamaConfig(
        **SHAPE, tie_word_embeddings=True, rope_parameters=LLAMA3 | {"original_max_position_embeddings": 16}
    ),
    "mistral_with_window": MistralConfig(**GROUPED, sliding_window=5, head_dim=24),
    "mistral_without": MistralConfig(**GROUPED, sliding_window=None),
    "qwen2_with_windows": Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": Qwen3Config(**GROUPED, head_dim=32, rms_norm_eps=1e-3),
    "smollm3_with_rope_everywhere": SmolLM3Config(**GROUPED, no_rope_layers=[1, 1, 1], pad_token_id=None),
    "pythia": GPTNeoXConfig(**SHAPE),
    "neox_in_series": GPTNeoXConfig(**SHAPE, use_parallel_residual=False, attention_bias=False, rotary_pct=1.0),
}


def make_source(config, folder):
    """A model with weights of ordinary size, saved in a folder."""
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.15) if weight.dim() > 1 else weight.add_(torch.randn_like(weight) * 0.3)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A source, its folder, and the folder that it was upcycled to."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    model = make_source(LlamaConfig(**GROUPED, tie_word_embeddings=True), folder / "source")
    upcycle(folder / "source", folder / "model")
    return model, folder / "source", folder / "model"


@torch.no_grad()
def assert_equal(model, source):
    tokens = random_tokens(2, 24)
    assert (model(tokens).logits - source(tokens).logits).abs().max() < 1e-4
    greedy = {"max_new_tokens": 16, "do_sample": False}
    assert torch.equal(model.generate(tokens, **greedy), source.generate(tokens, **greedy))


@pytest.mark.parametrize("name", SOURCES)
def test_logits_and_greedy_text_are_those_of_the_source(name, tmp_path):
    source = make_source(SOURCES[name], tmp_path / "source")
    report = upcycle(tmp_path / "source", tmp_path / "model", groups=2, layers=[2, 0])
    assert report.verification["logits of the source"].endswith("top-1 agreement 100 %")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert [layer.self_attn.compose is not None for layer in model.model.layers] == [True, False, True]
    assert model.model.layers[0].self_attn.compose.groups == 2
    assert_equal(model, source)


def train_step(model, parameters):
    tokens = random_tokens(2, 13)
    model(tokens, labels=tokens).loss.backward()
    moved = {name for name, weight in model.named_parameters() if weight.grad is not None and weight.grad.any()}
    torch.optim.SGD(parameters, lr=0.5).step()
    model.zero_grad()
    return moved


def test_it_starts_as_identity_and_every_parameter_of_the_composition_learns(llama):
    model = AutoModelForCausalLM.from_pretrained(llama[2])
    model.freeze_all_but_composition()
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert all(COMPOSITION.search(name) for name in trained) and len(trained) == 9
    zero_at_first = {name for name in trained if name.endswith(("low_rank_weight", "gate_weight"))}
    assert train_step(model, trained.values()) == zero_at_first
    before = {name: weight.clone() for name, weight in trained.items()}
    assert train_step(model, trained.values()) == set(trained)
    rank = model.config.compose_rank
    for name, weight in trained.items():
        changed = weight != before[name]
        if name.endswith("low_rank_weight"):  # w1 and w2
            assert changed[..., :rank, :].any() and changed[..., rank:, :].any()
        assert changed.any()


def test_a_trained_composition_is_a_file_that_fits_the_source(llama, tmp_path):
    _, source, upcycled = llama
    model = AutoModelForCausalLM.from_pretrained(upcycled)
    model.freeze_all_but_composition()
    for _ in range(2):
        train_step(model, [weight for weight in model.parameters() if weight.requires_grad])
    file = tmp_path / "composition.safetensors"
    model.save_composition(file)
    assert len(load_file(file)) == 9
    shared = ["convert", "upcycle", str(source), str(tmp_path / "again"), "--composition", str(file)]
    assert CliRunner().invoke(app, shared).exit_code == 0
    again, tokens = AutoModelForCausalLM.from_pretrained(tmp_path / "again"), random_tokens(2, 13)
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    with pytest.raises(ValueError, match="leave out compose_rank"):
        upcycle(source, tmp_path / "other", composition=file, rank=1)
    make_source(LlamaConfig(**{**GROUPED, "num_hidden_layers": 2}), tmp_path / "smaller")
    with pytest.raises(ValueError, match=r"num_hidden_layers=3 .* but the source has 2"):
        upcycle(tmp_path / "smaller", tmp_path / "other", composition=file)
    with pytest.raises(ValueError, match="no composition"):
        upcycle(source, tmp_path / "other", composition=source / "model.safetensors")


def test_lora_trains_beside_it(llama, tmp_path):
    source, _, upcycled = llama
    options = {"target_modules": ["qkv_proj", "o_proj"], "modules_to_save": ["compose"], "task_type": "CAUSAL_LM"}
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(upcycled), LoraConfig(**options))
    tokens = random_tokens(2, 13)
    assert (model(tokens).logits - source(tokens).logits).abs().max() < 1e-4
    for _ in range(2):
        moved = train_step(model, [weight for weight in model.parameters() if weight.requires_grad])
    assert {
        part for part in ("lora_A", "lora_B", "compose.modules_to_save") if any(part in name for name in moved)
    } == {*("lora_A", "lora_B", "compose.modules_to_save")}
    with pytest.raises(ValueError, match="merge_and_unload"):
        model.save_composition(tmp_path / "composition.safetensors")
    merged = model.merge_and_unload()
    merged.save_composition(tmp_path / "composition.safetensors")
    start = AutoModelForCausalLM.from_pretrained(upcycled).state_dict()
    for name, weight in load_file(tmp_path / "composition.safetensors").items():
        assert torch.equal(weight, merged.get_parameter(name)) and not torch.equal(weight, start[name])


def test_a_recipe_trains_and_saves_the_composition_alone(tmp_path):
    make_source(LlamaConfig(**{**GROUPED, "vocab_size": 512}), tmp_path / "source")
    upcycle(tmp_path / "source", tmp_path / "model")
    recipe = tiny_recipe(tmp_path / "run", training={"trainable": "compose", "max_steps": 3})
    recipe = type(recipe).from_mapping(recipe.to_mapping() | {"model": {"pretrained": str(tmp_path / "model")}})
    train(recipe)
    saved = load_file(tmp_path / "run" / "composition.safetensors")
    before = load_file(tmp_path / "model" / "model.safetensors")
    after = load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert saved.keys() == {name for name in after if not torch.equal(after[name], before[name])}
    assert all(COMPOSITION.search(name) and torch.equal(values, after[name]) for name, values in saved.items())


def test_an_interrupted_conversion_ends_with_the_same_bytes(llama, tmp_path, monkeypatch):
    source, options = llama[1], {"max_shard_size": "100KB", "seed": 7}
    upcycle(source, tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        interrupt(patch, 3, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            upcycle(source, tmp_path / "model", **options)
    assert upcycle(source, tmp_path / "model", **options).resumed_shards == 3
    texts = ("README.md",)  # has the name of the folder
    whole, resumed = contents(tmp_path / "whole"), contents(tmp_path / "model")
    assert [name for name in whole if whole[name] != resumed[name]] == [*texts, "conversion_report.json"]


def test_settings_of_generation_and_dtype_come_along(llama, tmp_path):
    source = AutoModelForCausalLM.from_pretrained(llama[1], dtype=torch.bfloat16)
    source.generation_config = GenerationConfig(eos_token_id=[3, 5], repetition_penalty=1.5)
    source.save_pretrained(tmp_path / "source")
    upcycle(tmp_path / "source", tmp_path / "model", with_code=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert (model.generation_config.eos_token_id, model.generation_config.repetition_penalty) == ([3, 5], 1.5)
    assert (tmp_path / "model" / "modeling_dcformer.py").is_file()
    upcycle(llama[1], tmp_path / "rounded", dtype="bfloat16")  # compared with the rounded source


REFUSED = {
    "attn_logit_softcapping=50.0, final_logit_softcapping=30.0": Gemma2Config(),
    "model_type='cohere', logit_scale=0.0625": CohereConfig(),
    "attention_multiplier=0.0078125": GraniteConfig(attention_multiplier=0.0078125, embedding_multiplier=12.0),
    "embedding_multiplier=12.0": GraniteConfig(attention_multiplier=0.0078125, embedding_multiplier=12.0),
    "model_type='olmo2'": Olmo2Config(),
    "num_local_experts=8": MixtralConfig(),
    "no_rope_layers=[1, 1, 1, 0,": SmolLM3Config(),
    "hidden_dropout=0.1": GPTNeoXConfig(hidden_dropout=0.1),
    "quantization_config=": LlamaConfig(quantization_config={"quant_method": "gptq", "bits": 4}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_has_no_exact_counterpart_is_refused_by_its_name(words, tmp_path):
    REFUSED[words].save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match="No DCFormer computes exactly") as caught:
        upcycle(tmp_path / "source", tmp_path / "model")
    assert words in str(caught.value)
    assert not (tmp_path / "model").exists()


def test_a_source_that_computes_something_else_is_found_by_its_logits(llama, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(llama[1])
    model.save_pretrained(tmp_path / "source")
    file = tmp_path / "source" / "config.json"
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}  # which Llama does not look at
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_parameters": rope}))
    assert AutoConfig.from_pretrained(tmp_path / "source").rope_parameters == rope
    with pytest.raises(ValueError, match="The logits differ from those of"):
        upcycle(tmp_path / "source", tmp_path / "model")
