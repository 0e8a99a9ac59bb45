"""One loader finds tokenizers in folders and files, and says where there is none."""

import shutil
from pathlib import Path

import pytest

from dcformer.common.paths import is_path
from dcformer.common.tokenizers import load_tokenizer
from dcformer.head_tasks import build_tokenizer


@pytest.fixture
def folder(tmp_path):
    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_a_folder_a_file_and_a_file_under_another_name_are_the_same_tokenizer(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(folder / "tokenizer.json", other / "words.json")
    vocabularies = [load_tokenizer(source).get_vocab() for source in (folder, str(folder / "tokenizer.json"), other)]
    assert vocabularies == [build_tokenizer().get_vocab()] * 3


@pytest.mark.parametrize("files", [(), ("config.json",), ("config.json", "model.safetensors.index.json")], ids=len)
def test_a_folder_without_a_tokenizer_is_refused(tmp_path, files):
    for file in files:
        (tmp_path / file).write_text('{"model_type": "dcformer"}')
    with pytest.raises(FileNotFoundError, match=f"There is no tokenizer in '{tmp_path}'"):
        load_tokenizer(tmp_path)


def test_a_path_that_is_not_there_is_refused_without_asking_the_hub(monkeypatch):
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(FileNotFoundError, match=r"There is no tokenizer in './nowhere'"):
        load_tokenizer("./nowhere")


def test_a_damaged_file_is_refused_with_the_reason(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read: "):
        load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("/a", True), ("./a", True), ("~/a", True), ("a/b/c", True), (Path("a"), True), ("a", False), ("a/b", False)],
    ids=str,
)
def test_names_that_can_only_be_paths(name, expected):
    assert is_path(name) is expected
