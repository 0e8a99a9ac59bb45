"""Text in, text out: the GPT-NeoX tokenizer through AutoTokenizer, and the text-generation pipeline."""

import json
import shutil

import pytest
import torch
from tiny_models import tiny_model
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline


TEXTS = [
    "Attention heads work independently.",
    " leading and trailing ",
    "def f(x):\n    return x\t\t1\n\n\n",
    "runs of spaces:" + " " * 2 + "|" + " " * 24 + "|" + " " * 60 + "|",
    "e\u0301 = é, 日本語, 🎉",
    "<|endoftext|>document<|padding|>",
]


@pytest.fixture
def tokenizer_file(fixtures):
    return fixtures / "benchdata" / "tokenizer" / "20B_tokenizer.json"


def write_folder(folder, tokenizer_file, model_type, tokenizer_class):
    shutil.copy(tokenizer_file, folder / "tokenizer.json")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if tokenizer_class is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class}))


@pytest.mark.parametrize("tokenizer_class", [None, "GPTNeoXTokenizerFast"], ids=str)
@pytest.mark.parametrize("model_type", ["dcformer", "dcpythia"])
def test_gpt_neox_tokenizer_through_auto_tokenizer(model_type, tokenizer_class, tokenizer_file, tmp_path):
    write_folder(tmp_path, tokenizer_file, model_type, tokenizer_class)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    reference = Tokenizer.from_file(str(tokenizer_file))
    assert len(tokenizer) == 50277
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 0)
    for text in TEXTS:
        ids = reference.encode(text).ids
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=False)


def test_the_pipeline_continues_a_batch_past_the_window(tokenizer_file, tmp_path):
    """Each text of a left-padded batch is continued as it is alone."""
    tiny_model(vocab_size=50304).save_pretrained(tmp_path)
    shutil.copy(tokenizer_file, tmp_path / "tokenizer.json")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, padding_side="left")
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    prompts = ["Heads", "Every pair of a query and a key has its own map of the heads", "A gate, a map,"]
    arguments = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False}
    together = generator(prompts, batch_size=3, **arguments)
    alone = [generator(prompt, **arguments) for prompt in prompts]
    assert together == alone
    assert all(len(answer["generated_text"]) > 0 for (answer,) in together)
