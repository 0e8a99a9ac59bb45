"""Models by a bundled name, a folder or the authors' files; what would compute something else is refused."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from transformers import AutoConfig

from dcformer import DCFormerForCausalLM, pretrained_path
from dcformer.head_tasks import build_tokenizer
from dcformer.loading import choose_device, find_model, load_model, load_tokenizer, looks_like_path


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(pretrained_path("dcformer-tiny"), tmp_path / "dcformer-tiny")


def test_a_folder_goes_before_a_bundled_model_of_its_name(tmp_path, monkeypatch):
    tiny_model(vocab_size=len(build_tokenizer())).save_pretrained(tmp_path / "dcformer-tiny")
    build_tokenizer().save_pretrained(tmp_path / "dcformer-tiny")
    loaded = load_model("dcformer-tiny", device="cpu", dtype="float32")
    assert isinstance(loaded.model, DCFormerForCausalLM) and not loaded.model.training
    monkeypatch.chdir(tmp_path)
    assert load_model("dcformer-tiny").model.config.hidden_size != loaded.model.config.hidden_size


def test_missing_weights_are_refused(folder):
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "compose" in name)
    del weights[name]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=name):
        load_model(folder)


def test_what_is_no_causal_language_model_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere/at/all"):
        find_model("nowhere/at/all")
    AutoConfig.for_model("vit").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="vit"):
        find_model(tmp_path)


def test_a_tokenizer_is_found_in_folders_and_files(folder, tmp_path):
    (tmp_path / "other").mkdir()
    shutil.copy(folder / "tokenizer.json", tmp_path / "other" / "words.json")
    sources = (folder, folder / "tokenizer.json", tmp_path / "other")
    assert len({tuple(sorted(load_tokenizer(source).get_vocab())) for source in sources}) == 1
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty"):
        load_tokenizer(tmp_path / "empty")


def test_a_device_that_is_not_there_is_not_replaced():
    assert choose_device("cpu") == torch.device("cpu") and choose_device() == choose_device("auto")
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError)):
            choose_device("cuda")


def test_names_of_the_hub_are_told_from_paths(tmp_path):
    assert all(map(looks_like_path, ("/a", "./a", "~/a", "a/b/c", tmp_path, str(tmp_path))))
    assert not any(map(looks_like_path, ("no-such-model", "organisation/no-such-model")))
