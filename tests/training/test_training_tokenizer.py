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
NEW = {"train": 300}


@pytest.fixture
def make(tmp_path):
    """A function that makes recipes on four documents, the second empty, whose first is as long as two pieces."""
    texts = [" ".join(random.Random(seed).choices(WORDS, k=size)) for seed, size in enumerate((400, 0, 300, 200))]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = {"source": str(tmp_path / "text.jsonl"), "documents": None, "evaluation": None}

    def make_recipe(tokenizer=NEW, **sections):
        changes = {"data": source | sections.pop("data", {}), "training": {"save_steps": 2}} | sections
        return tiny_recipe(tmp_path / "run", tokenizer=tokenizer, **changes)

    return texts, make_recipe


def test_its_tokens_are_those_of_the_library_and_give_back_every_text(make, monkeypatch):
    texts, make_recipe = make
    expected = {}
    for documents in (4, 2):
        library = ByteLevelBPETokenizer()
        special = {"special_tokens": ["<|endoftext|>"], "show_progress": False}
        library.train_from_iterator(texts[:documents], vocab_size=300, min_frequency=0, **special)
        expected[documents] = library.get_vocab()
    recipe = make_recipe()
    tokenizer = train_tokenizer(recipe.tokenizer, recipe.data)
    assert tokenizer.get_vocab() == expected[4] != expected[2] and len(tokenizer) == 300
    for change in ({"documents": 2}, {"documents": 2, "streaming": True}):
        assert train_tokenizer(recipe.tokenizer, replace(recipe.data, **change)).get_vocab() == expected[2]
    few = train_tokenizer(replace(recipe.tokenizer, documents=2), replace(recipe.data, streaming=True))
    assert few.get_vocab() == expected[2]
    for text in (*texts, "ünseen \x7f ﷽ <|endoftext|> \t\r\n ", ""):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|endoftext|>",) * 2
    offsets = tokenizer("a Rome", return_offsets_mapping=True)["offset_mapping"]
    assert all(start != 1 for start, _ in offsets)  # answers cover words without the spaces before them
    pieces = []
    monkeypatch.setattr(data, "_CHARACTERS_AT_ONCE", len(texts[0]) // 2 + 1)
    monkeypatch.setattr(data.Tokenizer, "train_from_iterator", lambda self, texts, _: pieces.extend(texts))
    train_tokenizer(recipe.tokenizer, recipe.data)
    assert "".join(pieces) == "".join(texts) and max(map(len, pieces)) == len(texts[0]) // 2 + 1


def test_it_is_saved_with_the_run_and_a_resumed_run_does_not_train_it_again(make, tmp_path, monkeypatch):
    _, make_recipe = make
    recipe = make_recipe(model={"preset": "dcformer-405m", "num_key_value_heads": 2, "head_dim": 8})
    assert plan_run(recipe).vocab_size == 300  # not that of the preset
    recipe = make_recipe()
    whole = train(recipe)
    expected = (tmp_path / "run" / "log.jsonl").read_text()
    final = AutoTokenizer.from_pretrained(whole["folder"])
    trained = train_tokenizer(recipe.tokenizer, recipe.data)
    assert whole["fingerprints"]["tokenizer"] == fingerprint_tokenizer(final) == fingerprint_tokenizer(trained)
    (tmp_path / "run" / "checkpoint-6" / "complete.json").unlink()
    monkeypatch.setattr(run, "train_tokenizer", None)
    again = train(recipe)
    assert (again["resumed_from"], again["fingerprints"]) == (4, whole["fingerprints"])
    resumed = (tmp_path / "run" / "log.jsonl").read_text()
    first, second = (deterministic([json.loads(line) for line in text.splitlines()]) for text in (expected, resumed))
    assert first == second
    for other, difference in (
        (TokenizerRecipe(301), "tokenizer.train is 300 there and 301 here"),
        (TokenizerRecipe(300, documents=3), "tokenizer.documents is None there and 3 here"),
        ("head_tasks", "tokenizer is None there and 'head_tasks' here"),
    ):
        with pytest.raises(ValueError, match=difference):
            train(replace(recipe, tokenizer=other))
