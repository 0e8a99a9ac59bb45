"""Models by a bundled name, a folder or the authors' files; what would compute something else is refused."""

import json
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dcformer import DCFormerForCausalLM, pretrained_path
from dcformer.head_tasks import build_tokenizer
from dcformer.loading import choose_device, find_model, load_model, load_tokenizer, looks_like_path


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(pretrained_path("dcformer-tiny"), tmp_path / "dcformer-tiny")


def test_a_folder_takes_precedence_over_the_bundled_model_of_its_name(tmp_path, monkeypatch):
    tiny_model(vocab_size=len(build_tokenizer())).save_pretrained(tmp_path / "dcformer-tiny")
    build_tokenizer().save_pretrained(tmp_path / "dcformer-tiny")
    loaded = load_model("dcformer-tiny", device="cpu", dtype="float32")
    assert isinstance(loaded.model, DCFormerForCausalLM) and not loaded.model.training
    monkeypatch.chdir(tmp_path)
    assert load_model("dcformer-tiny").model.config.hidden_size != loaded.model.config.hidden_size


def test_missing_unexpected_and_cut_weights_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    fewer = config | {"num_hidden_layers": 2, "layer_types": config["layer_types"][:2]}
    (folder / "config.json").write_text(json.dumps(fewer))
    with pytest.raises(ValueError, match=r"hold, unlike config\.json, model\.layers\.2\."):
        load_model(folder)
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "compose" in name)
    del weights[name]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"lack {name} \(1 in all\)"):
        load_model(folder)
    os.truncate(folder / "model.safetensors", 100_000)
    with pytest.raises(ValueError, match=f"The weights of {re.escape(repr(str(folder)))} are damaged"):
        load_model(folder)


def test_only_causal_language_models_are_loaded(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere/at/all"):
        find_model("nowhere/at/all")
    AutoConfig.for_model("vit").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="vit"):
        find_model(tmp_path)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"oov_policy='clamp' is for .* is a llama model"):
        load_model(tmp_path, tokenizer="dcformer-tiny", oov_policy="clamp")


def test_an_adapter_is_named_as_one(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="is an adapter of PEFT"):
        load_model(tmp_path)


def test_a_tokenizer_is_loaded_from_folders_and_files_of_any_name(folder):
    vocabulary = load_tokenizer(folder).get_vocab()
    tokenizer = (folder / "tokenizer.json").rename(folder / "20B_tokenizer.json")
    (folder / "model.safetensors.index.json").write_text('{"metadata": {}, "weight_map": {}}')
    (folder / "tokens.json").write_text('["a", "b"]')
    assert load_tokenizer(tokenizer).eos_token == "<|endoftext|>"
    for with_config in (True, False):
        assert load_tokenizer(folder).get_vocab() == load_tokenizer(tokenizer).get_vocab() == vocabulary
        if with_config:
            (folder / "tokenizer_config.json").unlink()
    shutil.copy(tokenizer, folder / "copy.json")
    with pytest.raises(FileNotFoundError, match=r"holds 20B_tokenizer\.json, copy\.json"):
        load_tokenizer(folder)
    (folder / "copy.json").write_text('{"model": ')
    with pytest.raises(ValueError, match=r"copy\.json' is not JSON"):
        load_tokenizer(folder)
    for file in (tokenizer, folder / "copy.json"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match="dcformer-tiny' holds none"):
        load_model(folder)
    with pytest.raises(ValueError, match=r"generation_config\.json' holds no tokenizer"):
        load_model(folder, tokenizer=str(folder / "generation_config.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPTNeoXTokenizer"}')
    with pytest.raises(FileNotFoundError, match="dcformer-tiny' has no words"):
        load_model(folder)


def test_a_missing_device_is_not_replaced():
    assert choose_device("cpu") == torch.device("cpu") and choose_device() == choose_device("auto")
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError)):
            choose_device("cuda")


def test_names_of_the_hub_are_distinguished_from_paths(tmp_path):
    assert all(map(looks_like_path, ("/a", "./a", "~/a", "a/b/c", tmp_path, str(tmp_path))))
    assert not any(map(looks_like_path, ("no-such-model", "organisation/no-such-model")))


def test_a_folder_has_no_revision(folder):
    for name in (folder, "dcformer-tiny"):
        with pytest.raises(ValueError, match=r"revision='v1' .* is a folder"):
            load_model(name, revision="v1")


TEXTS = [" def f(x):\n    return x\t\t1\n\n\n" + " " * 60, "e\u0301 = é, 日本語, 🎉<|endoftext|>document<|padding|> "]


@pytest.mark.parametrize("tokenizer_class", [None, "GPTNeoXTokenizerFast"], ids=str)
@pytest.mark.parametrize("model_type", ["dcformer", "dcpythia"])
def test_gpt_neox_tokenizer_through_auto_tokenizer(model_type, tokenizer_class, fixtures, tmp_path):
    file = shutil.copy(fixtures / "benchdata" / "tokenizer" / "20B_tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    if tokenizer_class is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class}))
    tokenizer, reference = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_file(str(file))
    assert (len(tokenizer), tokenizer.eos_token, tokenizer.eos_token_id) == (50277, "<|endoftext|>", 0)
    for text in TEXTS:
        ids = reference.encode(text).ids
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=False)
