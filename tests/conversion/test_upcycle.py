"""Models of other families become DCFormers that compute the same and learn a composition."""

import dataclasses
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from command_line import call
from damage import contents, interrupted
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import random_tokens
from tiny_recipes import tiny_mapping
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from dcformer.conversion import arrays, upcycle
from dcformer.hub_dcformer import COMPOSITION
from dcformer.training import Recipe, train


upcycle_module = sys.modules["dcformer.conversion.upcycle"]  # of the same name as its function
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
SHAPE |= {"vocab_size": 67, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None}
TOKENS = random_tokens(2, 24)
GROUPED = {**SHAPE, "num_key_value_heads": 2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
SOURCES = {
    "llama with biases": {**GROUPED, "attention_bias": True, "mlp_bias": True},
    "llama tied and scaled": {**SHAPE, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    "mistral with a window": {**GROUPED, "sliding_window": 5, "head_dim": 24},
    "mistral without": {**GROUPED, "sliding_window": None},
    "qwen2 with windows": {**GROUPED, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3 with yarn": {**GROUPED, "head_dim": 32, "rms_norm_eps": 1e-3, "rope_parameters": YARN},
    "smollm3 with rope everywhere": {**GROUPED, "no_rope_layers": [1, 1, 1], "pad_token_id": None},
    "gpt_neox": SHAPE,
    "gpt_neox in series": {**SHAPE, "use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0},
}


def make_source(folder, model_type="llama", **values):
    """A model with weights of ordinary size, saved in a folder."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values)).eval()
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
    model = make_source(folder / "source", **GROUPED, tie_word_embeddings=True)
    upcycle(folder / "source", folder / "model")
    return model, folder / "source", folder / "model"


@pytest.mark.parametrize("name", SOURCES)
def test_logits_and_greedy_text_are_those_of_the_source(name, tmp_path):
    source = make_source(tmp_path / "source", name.split()[0], **SOURCES[name])
    report = upcycle(tmp_path / "source", tmp_path / "model", groups=2, layers=[2, 0])
    assert report.verification["logits of the source"].endswith("top-1 agreement 100 %")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert [layer.self_attn.compose and layer.self_attn.compose.groups for layer in model.model.layers] == [2, None, 2]
    assert (model(TOKENS).logits - source(TOKENS).logits).abs().max() < 1e-4
    greedy = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(TOKENS, **greedy), source.generate(TOKENS, **greedy))


@pytest.mark.parametrize(
    "model_type, embedding, head",
    [("llama", "model.embed_tokens", "lm_head"), ("gpt_neox", "gpt_neox.embed_in", "embed_out")],
)
@pytest.mark.parametrize("difference", [0.0, 0.5])
def test_an_output_layer_that_differs_from_the_embedding_is_not_tied(tmp_path, model_type, embedding, head, difference):
    """The file holds both, under a configuration that ties them."""
    make_source(tmp_path / "source", model_type, **SHAPE, tie_word_embeddings=True)
    tensors = load_file(file := tmp_path / "source" / "model.safetensors")
    tensors[f"{head}.weight"] = tensors[f"{embedding}.weight"] + difference
    if model_type == "gpt_neox":
        file.unlink()
        torch.save(tensors, file.with_name("pytorch_model.bin"))
    else:
        save_file(tensors, file, metadata={"format": "pt"})
    upcycle(tmp_path / "source", tmp_path / "model")
    source, model = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("source", "model"))
    assert (model(TOKENS).logits - source(TOKENS).logits).abs().max() < 1e-4
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert is_tied == model.config.tie_word_embeddings == (difference == 0)


def test_the_check_reads_the_source_as_transformers_does(llama, tmp_path, monkeypatch):
    """A fault that reading the source by the converter's code cannot show: it reads one weight wrongly."""
    read = arrays.open_weights

    def wrong(folder):
        opened, name = read(folder), "model.layers.1.mlp.up_proj.weight"
        if Path(folder) == llama[1]:
            load = opened[name].load
            opened[name] = dataclasses.replace(opened[name], load=lambda slices: load(slices) * 1.001)
        return opened

    monkeypatch.setattr(upcycle_module, "open_weights", wrong)
    with pytest.raises(ValueError, match="The logits differ from those of the source"):
        upcycle(llama[1], tmp_path / "model")


def train_step(model) -> set[str]:
    """A step of what is trained; the names of the parameters with a gradient that is not zero."""
    model(TOKENS, labels=TOKENS).loss.backward()
    moved = {name for name, weight in model.named_parameters() if weight.grad is not None and weight.grad.any()}
    torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.5).step()
    model.zero_grad()
    return moved


def test_a_composition_starts_as_identity_and_all_of_it_learns(llama):
    model = AutoModelForCausalLM.from_pretrained(llama[2])
    model.freeze_all_but_composition()
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained.keys() == {name for name in model.state_dict() if COMPOSITION.search(name)}
    # w2 and gates are zero: they learn at once, what makes w1 from the second step on.
    assert train_step(model) == {name for name in trained if not name.endswith("hidden_weight")}
    first = {name: weight.clone() for name, weight in trained.items()}
    assert train_step(model) == trained.keys()
    for name, weight in trained.items():
        changed = weight != first[name]
        assert all(part.any() for part in (changed.split(2, dim=-2) if "low_rank" in name else [changed]))  # w1, w2


def test_a_recipe_trains_a_composition_whose_file_fits_the_source(llama, tmp_path):
    source = make_source(tmp_path / "source", **{**GROUPED, "vocab_size": 512})
    upcycle(tmp_path / "source", tmp_path / "model", rank=3)
    values = tiny_mapping(tmp_path / "run", training={"trainable": "compose", "max_steps": 3})
    train(Recipe.from_mapping(values | {"model": {"pretrained": str(tmp_path / "model")}}))
    file, final = tmp_path / "run" / "composition.safetensors", tmp_path / "run" / "final"
    os.umask(mask := os.umask(0))
    written = [path for path in (tmp_path / "run").rglob("*.*") if path.is_file()]
    assert len(written) > 20 and {path.stat().st_mode & 0o777 for path in written} == {0o666 & ~mask}
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", final))
    assert load_file(file).keys() == {name for name in after if not torch.equal(after[name], before[name])}

    command = ["convert", "upcycle", tmp_path / "source", tmp_path / "again", "--composition", file]
    assert call(*command).exit_code == 0
    logits = [AutoModelForCausalLM.from_pretrained(path)(TOKENS).logits for path in (tmp_path / "again", final)]
    assert torch.equal(*logits) and not torch.allclose(logits[0], source(TOKENS).logits, atol=1e-4)
    make_source(tmp_path / "narrow", **{**GROUPED, "hidden_size": 32})
    for words, folder, options in (
        ("leave out .'compose_rank'", tmp_path / "source", {"composition": file, "rank": 1}),
        ("hidden_size=64, got None", tmp_path / "source", {"composition": final / "model.safetensors"}),
        ("hidden_size=32, got 64", tmp_path / "narrow", {"composition": file}),
    ):
        with pytest.raises(ValueError, match=words):
            upcycle(folder, tmp_path / "other", **options)


def test_lora_trains_beside_it(llama, tmp_path):
    source, _, upcycled = llama
    options = {"target_modules": ["qkv_proj", "o_proj"], "modules_to_save": ["compose"], "task_type": "CAUSAL_LM"}
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(upcycled), LoraConfig(**options))
    assert (model(TOKENS).logits - source(TOKENS).logits).abs().max() < 1e-4
    train_step(model)
    moved = train_step(model)
    assert moved == {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert {name.split(".")[-3] for name in moved} == {"lora_A", "lora_B", "modules_to_save"}
    with pytest.raises(ValueError, match="merge_and_unload"):
        model.save_composition(tmp_path / "composition.safetensors")
    model.merge_and_unload().save_composition(tmp_path / "composition.safetensors")
    assert len(load_file(tmp_path / "composition.safetensors")) == 9


def test_an_interrupted_conversion_ends_with_the_same_bytes(llama, tmp_path):
    options = {"max_shard_size": "100KB", "seed": 7}
    upcycle(llama[1], tmp_path / "whole", **options)
    with interrupted(after=3):
        upcycle(llama[1], tmp_path / "model", **options)
    assert upcycle(llama[1], tmp_path / "model", **options).resumed_shards == 3
    whole, resumed = contents(tmp_path / "whole"), contents(tmp_path / "model")
    differing = [name for name in whole if whole[name] != resumed[name]]
    assert sorted(differing) == ["README.md", "conversion_report.json"]  # the card names its folder


def test_generation_settings_dtype_and_code_come_along_and_logits_are_compared(llama, tmp_path):
    source = AutoModelForCausalLM.from_pretrained(llama[1], dtype=torch.bfloat16)
    source.generation_config = GenerationConfig(eos_token_id=[3, 5])
    source.save_pretrained(tmp_path / "source")
    upcycle(tmp_path / "source", tmp_path / "model", with_code=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert model.generation_config.eos_token_id == [3, 5] and (tmp_path / "model" / "modeling_dcformer.py").is_file()
    upcycle(llama[1], tmp_path / "rounded", dtype="bfloat16")  # compared with the rounded source
    with pytest.raises(ValueError, match="The logits differ from those of the source"):
        upcycle(llama[1], tmp_path / "strict", tolerance=0.0)


def test_wrong_paths_and_layers_are_refused_in_a_sentence(llama, tmp_path):
    for source, words in (("none", "no folder '.*none'"), ("none/weights.gguf", "there is no weights.gguf in it")):
        with pytest.raises(FileNotFoundError, match=words):
            upcycle(tmp_path / source, tmp_path / "model")
    command = ["convert", "upcycle", llama[1], tmp_path / "model", "--layers"]
    wrong = call(*command, "0,x")
    assert wrong.exit_code == 2 and "--layers" in wrong.stderr and "'x'" in wrong.stderr
    assert call(*command, "0,1-2", catch_exceptions=False).exit_code == 0
    assert AutoConfig.from_pretrained(tmp_path / "model").compose_layers == [0, 1, 2]


REFUSED = {
    "model_type='gemma2', attn_logit_softcapping=50.0, final_logit_softcapping=30.0": {},
    "model_type='granite', embedding_multiplier=12.0": {"embedding_multiplier": 12.0},
    "model_type='olmo2'": {},
    "model_type='mixtral', num_experts=8": {},
    "smollm3 no_rope_layers=[1, 1, 1, 0,": {},
    "gpt_neox hidden_dropout=0.1": {"hidden_dropout": 0.1},
    "qwen2 num_hidden_layers": {},
    "llama quantization_config=": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_has_no_exact_counterpart_is_refused_by_its_name(words, tmp_path):
    model_type = re.match(r"(?:model_type=')?(\w+)", words)[1]
    AutoConfig.for_model(model_type, **REFUSED[words]).save_pretrained(tmp_path / "source")
    if "num_hidden_layers" in words:  # of which Transformers would make a list
        path = tmp_path / "source" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 10**30, "layer_types": None}))
    with pytest.raises(ValueError, match=re.escape(words.removeprefix(f"{model_type} "))):
        upcycle(tmp_path / "source", tmp_path / "model")
