"""Classification heads: Transformers' generic ones on the decoder, with their Auto classes and pipelines."""

import pytest
import torch
from tiny_models import random_tokens, tiny_config, tiny_model
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from dcformer import DCFormerConfig, DCFormerForTokenClassification, DCFormerModel


FAMILIES = ["dcformer", "dcpythia"]
HEADS = {
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
    "question": AutoModelForQuestionAnswering,
}


def make(head: str, family: str, **values):
    torch.manual_seed(0)
    return HEADS[head].from_config(tiny_config(family, pad_token_id=0, num_labels=3, **values)).eval()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head", HEADS)
def test_auto_classes_make_save_and_load_every_head_and_its_loss_reaches_every_parameter(head, family, tmp_path):
    model, tokens = make(head, family), random_tokens(2, 9).clamp(min=1)
    assert type(model).__name__.startswith("DCPythiaFor" if family == "dcpythia" else "DCFormerFor")
    model.save_pretrained(tmp_path)
    loaded, info = HEADS[head].from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    with torch.no_grad():
        for ours, again in zip(model(tokens).values(), loaded(tokens).values()):
            if isinstance(ours, torch.Tensor):
                assert torch.equal(ours, again)
    labels = {
        "sequence": {"labels": torch.tensor([0, 2])},
        "token": {"labels": torch.randint(3, (2, 9))},
        "question": {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 8])},
    }[head]
    model.train()(tokens, **labels).loss.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_a_head_needs_no_registered_configuration():
    """A checkpoint that brings its code along may have a second copy of the configuration's class."""
    config = type("Copy", (DCFormerConfig,), {}).from_dict(tiny_config(classifier_dropout=0.0).to_dict())
    head = DCFormerForTokenClassification(config)
    assert type(head.model) is DCFormerModel and head.dropout.p == 0 and type(config) not in AutoModel._model_mapping


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_is_classified_as_it_is_alone(side):
    model = make("sequence", "dcformer")
    tokens, length = random_tokens(2, 9).clamp(min=1), 5
    mask = torch.ones_like(tokens)
    hidden = slice(0, -length) if side == "left" else slice(length, None)
    kept = slice(-length, None) if side == "left" else slice(0, length)
    tokens[1, hidden] = mask[1, hidden] = 0
    together = model(tokens, attention_mask=mask).logits
    alone = torch.cat([model(tokens[:1]).logits, model(tokens[1:, kept]).logits])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_a_head_is_drawn_on_a_language_model_and_its_decoder_kept(tmp_path):
    language_model = tiny_model()
    language_model.save_pretrained(tmp_path)
    model, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {"score.weight"} and info["unexpected_keys"] == {"lm_head.weight"}
    for name, parameter in language_model.model.named_parameters():
        assert torch.equal(model.model.get_parameter(name), parameter), name
