"""PEFT: the modules it adapts by itself, adapters on disk, parameters of the composition, prompts."""

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import random_tokens, tiny_model

from dcformer.integrations.peft import fill_tables


VARIANTS = ["dcformer", "dcpythia"]
FUSED, NORMS = {"qkv_proj"}, {"input_layernorm", "post_attention_layernorm", "norm"}
# Methods that choose their modules by the type of the model, with what they need for so small a model.
METHODS = {
    **dict.fromkeys(("LoraConfig", "LoHaConfig", "LoKrConfig", "OFTConfig", "VeraConfig"), ({}, FUSED)),
    "AdaLoraConfig": ({"total_step": 10}, FUSED),
    "IA3Config": ({}, {"qkv_proj", "down_proj"}),
    "VBLoRAConfig": ({"vector_length": 8, "num_vectors": 16, "topk": 2}, FUSED),
    "FourierFTConfig": ({"n_frequency": 10}, FUSED),
    "MissConfig": ({"r": 8}, FUSED),
    "LNTuningConfig": ({}, NORMS),
}


def train(model, steps: int = 2) -> list[float]:
    """Losses of SGD on one batch, in training mode; the model is in evaluation mode afterwards."""
    tokens = random_tokens(2, 13)
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.5)
    losses = []
    for _ in range(steps):
        loss = model.train()(input_ids=tokens, labels=tokens).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return losses


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(input_ids=random_tokens(2, 13)).logits


def assert_saving_keeps_the_logits(model, folder, variant="dcformer"):
    """Saved and loaded onto the same base model, an adapter gives identical logits; returns them."""
    expected = logits(model)
    model.save_pretrained(folder)
    assert torch.equal(logits(PeftModel.from_pretrained(tiny_model(variant), folder).eval()), expected)
    return expected


@pytest.mark.parametrize("method", METHODS)
def test_methods_choose_their_modules_and_train(method):
    options, targets = METHODS[method]
    model = get_peft_model(tiny_model(), getattr(peft, method)(task_type="CAUSAL_LM", **options))
    assert model.peft_config["default"].target_modules == targets
    train(model, steps=1)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained and all(any(f".{target}." in name for target in targets) for name in trained if "bank" not in name)


def test_entries_that_are_there_stay_and_half_a_choice_is_none():
    tables = {
        "TRANSFORMERS_MODELS_TO_A": {"gpt_neox": ["query_key_value"], "dcformer": ["o_proj"]},
        "TRANSFORMERS_MODELS_TO_B": {"gpt_neox": ["query_key_value", "unknown"]},
    }
    fill_tables(tables)
    assert tables["TRANSFORMERS_MODELS_TO_A"]["dcformer"] == ["o_proj"]
    assert tables["TRANSFORMERS_MODELS_TO_A"]["dcpythia"] == ["qkv_proj"]
    assert "dcformer" not in tables["TRANSFORMERS_MODELS_TO_B"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_targets_are_found_when_peft_is_imported_after_the_model_was_made(variant, monkeypatch):
    model = tiny_model(variant)
    for name, table in vars(peft.utils.constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_"):
            monkeypatch.delitem(table, model.config.model_type, raising=False)  # as PEFT makes them
    assert get_peft_model(model, LoraConfig()).peft_config["default"].target_modules == FUSED


@pytest.mark.parametrize("method", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_learned_prompts_survive_saving(method, tmp_path):
    config = getattr(peft, method)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = get_peft_model(tiny_model(), config)
    train(model)
    assert_saving_keeps_the_logits(model, tmp_path)


# What is adapted, and the option that says so.
ROWS = {
    "two rows": {"trainable_token_indices": [5, 66], "target_modules": ["o_proj"]},
    "by a low rank": {"target_modules": ["embed_tokens"]},
    "whole": {"modules_to_save": ["embed_tokens"], "target_modules": ["o_proj"]},
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_embedding_is_adapted(variant, rows, tmp_path):
    model = get_peft_model(tiny_model(variant), LoraConfig(r=4, task_type="CAUSAL_LM", **ROWS[rows]))
    train(model, steps=3)
    expected = assert_saving_keeps_the_logits(model, tmp_path, variant)
    assert (expected - logits(tiny_model(variant))).abs().max() > 1e-3
    assert model.generate(input_ids=random_tokens(1, 5), max_new_tokens=2).shape == (1, 7)
    with pytest.raises(ValueError, match=r"Token id 67 .* which has 67"):
        model(input_ids=torch.tensor([[67]]))
    # float32: rows that were merged against rows that are added, as above
    torch.testing.assert_close(logits(model.merge_and_unload()), expected, atol=1e-4, rtol=0)
