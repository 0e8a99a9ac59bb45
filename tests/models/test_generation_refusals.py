"""Options of `generate()` that cannot work are refused in a sentence that says why."""

import pytest
import torch
from tiny_models import random_tokens, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import dcformer


@pytest.mark.parametrize("implementation", ["offloaded", "offloaded_static"])
@pytest.mark.parametrize("variant", ["dcformer", "plain_gated_transformer"])
def test_an_offloaded_cache_without_an_accelerator(variant, implementation, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"cache_implementation='{implementation}' .* none is available here"):
        tiny_model(variant).generate(random_tokens(1, 5), cache_implementation=implementation, max_new_tokens=2)


def test_a_quantised_cache_for_windows():
    with pytest.raises(ValueError, match="only supported for models with only full attention layers"):
        tiny_model().generate(random_tokens(1, 5), cache_implementation="quantized", max_new_tokens=2)


def test_stop_strings_with_a_tokenizer_of_whole_words():
    folder = dcformer.pretrained_path("dcformer-tiny")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    tokens = tokenizer("The city in", return_tensors="pt")
    with pytest.raises(ValueError, match=r"stop_strings=\['India'\] needs a tokenizer that can spell any text"):
        model.generate(**tokens, stop_strings=["India"], tokenizer=tokenizer, max_new_tokens=2)
    # Other faults keep their own words.
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate(**tokens, stop_strings=["India"], max_new_tokens=2)


@pytest.mark.parametrize("ask", ["generate_batch", "paged"])
def test_continuous_batching(ask):
    model = tiny_model()
    with pytest.raises(ValueError, match="none of which can compose heads"):
        if ask == "paged":
            model.generate(random_tokens(1, 5), cache_implementation="paged", max_new_tokens=2)
        else:
            model.generate_batch([[1, 2, 3]], max_new_tokens=2)
