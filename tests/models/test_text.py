"""The GPT-NeoX tokenizer through AutoTokenizer; test_pretrained.py generates text in batches."""

import json
import shutil

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import dcformer  # noqa: F401, which registers the tokenizer


TEXTS = [
    "def f(x):\n    return x\t\t1\n\n\n",
    " leading and trailing ",
    "runs of spaces:" + " " * 2 + "|" + " " * 24 + "|" + " " * 60 + "|",
    "e\u0301 = é, 日本語, 🎉<|endoftext|>document<|padding|>",
]


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
    _, padded = tokenizer(TEXTS[:2], padding=True, padding_side="left")["attention_mask"]
    assert sorted(padded) == padded and set(padded) == {0, 1}  # zeros first
