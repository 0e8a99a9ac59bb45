"""A tokenizer that a recipe trains is that of the `tokenizers` library, belongs to the run, gives back every text."""

import json
import random
from dataclasses import replace

import pytest
from tiny_recipes import deterministic, tiny_recipe
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer

from dcformer.loading import fingerprint_tokenizer
from dcformer.training import TokenizerRecipe, data, plan_run, run, train
from dcformer.training.data import train_tokenizer


WORDS = ["Paris", "Rome", "naïve", "東京", "don't", "\n\n", "1984", "\x00", "🎉", "is in", "  x"]
TEXTS = [" ".join(random.Random(seed).choices(WORDS, k=size)) for seed, size in enumerate((400, 0, 300, 200))]


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    source = {"source": str(tmp_path / "text.jsonl"), "documents": None, "evaluation": None}
    return tiny_recipe(tmp_path / "run", tokenizer={"train": 300}, data=source, training={"save_steps": 2})


def test_its_tokens_are_those_of_the_library_and_give_back_every_text(recipe, monkeypatch):
    def of_library(documents):
        library, special = ByteLevelBPETokenizer(), {"special_tokens": ["<|endoftext|>"], "show_progress": False}
        library.train_from_iterator(TEXTS[:documents], vocab_size=300, min_frequency=0, **special)
        return library.get_vocab()

    tokenizer = train_tokenizer(recipe.tokenizer, recipe.data)
    assert tokenizer.get_vocab() == of_library(4) != of_library(2) and len(tokenizer) == 300
    for count, changes in ((None, {"documents": 2}), (2, {}), (2, {"streaming": True})):
        few = train_tokenizer(replace(recipe.tokenizer, documents=count), replace(recipe.data, **changes))
        assert few.get_vocab() == of_library(2)
    for text in (*TEXTS, "ünseen \x7f ﷽ <|endoftext|> \t\r\n ", ""):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|endoftext|>",) * 2
    with pytest.raises(ValueError, match=r"text\.jsonl', line 1: there is no 'body'; the columns are text"):
        train_tokenizer(recipe.tokenizer, replace(recipe.data, text_column="body"))
    offsets = tokenizer("a Rome", return_offsets_mapping=True)["offset_mapping"]
    assert all(start != 1 for start, _ in offsets)  # answers cover words without the spaces before them
    pieces, size = [], len(TEXTS[0]) // 3 + 1
    monkeypatch.setattr(data, "_CHARACTERS_AT_ONCE", size)
    monkeypatch.setattr(data.Tokenizer, "train_from_iterator", lambda self, texts, _: pieces.extend(texts))
    train_tokenizer(recipe.tokenizer, recipe.data)
    assert "".join(pieces) == "".join(TEXTS) and max(map(len, pieces)) == size


def test_it_is_saved_with_the_run_and_a_resumed_run_does_not_train_it_again(recipe, tmp_path, monkeypatch):
    def log():
        return deterministic([json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()])

    assert plan_run(replace(recipe, model={"preset": "dcformer-405m"})).vocab_size == 300  # not that of the preset
    whole, expected = train(recipe), log()
    final = AutoTokenizer.from_pretrained(whole["folder"])
    trained = train_tokenizer(recipe.tokenizer, recipe.data)
    assert whole["fingerprints"]["tokenizer"] == fingerprint_tokenizer(final) == fingerprint_tokenizer(trained)
    (tmp_path / "run" / "checkpoint-6" / "complete.json").unlink()
    monkeypatch.setattr(run, "train_tokenizer", None)
    again = train(recipe)
    assert (again["resumed_from"], again["fingerprints"], log()) == (4, whole["fingerprints"], expected)
    said, few = [], replace(recipe, tokenizer=TokenizerRecipe(9999))
    monkeypatch.setattr(run, "train_tokenizer", lambda *_: trained)
    train(few, dry_run=True, on_message=said.append)
    assert "The data have no more than 300 tokens, tokenizer.train is 9,999" in said
    for other, words in (
        (TokenizerRecipe(301), "tokenizer.train is 300 there and 301 here"),
        (TokenizerRecipe(300, documents=3), "tokenizer.documents is None there and 3 here"),
        ("head_tasks", "tokenizer is None there and 'head_tasks' here"),
    ):
        with pytest.raises(ValueError, match=words):
            train(replace(recipe, tokenizer=other))
