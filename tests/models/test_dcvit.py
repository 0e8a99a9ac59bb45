"""DCViT: the outputs of its ViT, and everything people do with a ViT. docs/drop_in.md has its number of parameters."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from reference import composed_attention_reference
from safetensors import safe_open
from test_loading import without
from tiny_models import strengthened
from torch.testing import assert_close
from transformers import ViTConfig, ViTForImageClassification, ViTModel

from dcformer import DCViTConfig, DCViTForImageClassification, DCViTModel


# Two orders of summation in float32, of values near 1.
CLOSE = {"rtol": 0, "atol": 1e-5}
PLAIN = {"compose_pre": False, "compose_post": False}
TINY = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 2}
TINY |= {"image_size": 16, "patch_size": 4, "num_labels": 5}


def tiny_vit(model_class=ViTForImageClassification, **options):
    return strengthened(model_class(ViTConfig(**TINY), **options))


def tiny_dcvit(model_class=DCViTForImageClassification, **values):
    return strengthened(model_class(DCViTConfig(**TINY, **values)))


def images(size=16, seed=1):
    return torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "switches", [{}, {"compose_static": True, "compose_groups": 2}, PLAIN], ids=["default", "all", "plain"]
)
def test_a_copy_of_a_vit_gives_its_outputs(switches):
    vit = tiny_vit()
    model = DCViTForImageClassification.from_vit(vit, **switches)
    asked = {"output_hidden_states": True, "output_attentions": True}
    for either in (vit, model):
        either.set_attn_implementation("eager")  # sdpa has no weights to give
    expected, outputs = vit(images(), **asked), model(images(), **asked)
    assert_close(outputs.logits, expected.logits, **CLOSE)
    assert_close(outputs.hidden_states, expected.hidden_states, **CLOSE)
    assert_close(outputs.attentions, expected.attentions, **CLOSE)
    model.config.output_attentions = True
    assert_close(model(images()).attentions, outputs.attentions)
    narrow = DCViTForImageClassification.from_vit(vit.to(torch.bfloat16).train(), **switches)
    assert (narrow.training, model.training) == (True, False) and narrow(images()).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("pooler", [True, False])
def test_a_copy_masks_patches_and_takes_larger_images_as_its_vit_does(pooler):
    vit = tiny_vit(ViTModel, add_pooling_layer=pooler, use_mask_token=True)
    masked = torch.rand(3, 36, generator=torch.Generator().manual_seed(2)) < 0.5
    given = {"bool_masked_pos": masked, "interpolate_pos_encoding": True}
    outputs, expected = DCViTModel.from_vit(vit)(images(24), **given), vit(images(24), **given)
    assert_close(outputs.last_hidden_state, expected.last_hidden_state, **CLOSE)
    assert_close(outputs.pooler_output, expected.pooler_output, **CLOSE)


def test_the_folder_of_a_vit_loads_as_it_is(tmp_path):
    vit = tiny_vit()
    vit.save_pretrained(tmp_path / "vit")  # writes names older than those of its class
    assert DCViTConfig.from_pretrained(tmp_path / "vit").architectures is None
    model = DCViTForImageClassification.from_pretrained(tmp_path / "vit")
    assert_close(model(images()).logits, vit(images()).logits, **CLOSE)
    model.save_pretrained(tmp_path / "dcvit")
    with safe_open(tmp_path / "dcvit" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(model.state_dict())
    loaded, info = DCViTForImageClassification.from_pretrained(tmp_path / "dcvit", output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(loaded(images()).logits, model(images()).logits)


def test_plain_models_are_vits_that_run_through_sdpa():
    vit = tiny_vit()
    plain = DCViTForImageClassification.from_vit(vit, **PLAIN)
    assert set(plain.state_dict()) == set(vit.state_dict())
    assert plain.config._attn_implementation == "sdpa"
    mask = torch.arange(17) < torch.tensor([[17], [9], [3]])  # (batch, class token and patches)
    assert_close(plain(images(), attention_mask=mask).logits, vit(images(), attention_mask=mask).logits, **CLOSE)


@torch.no_grad()
def test_a_layer_computes_composed_attention():
    attention, x = tiny_dcvit().vit.layers[0].attention, torch.randn(2, 17, 32)
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    operands = (projection(x).unflatten(-1, (4, 8)).transpose(1, 2) for projection in projections)
    expected = composed_attention_reference(*operands, *attention.compose(x), is_causal=False)
    assert_close(attention(x)[0], attention.o_proj(expected.transpose(1, 2).flatten(2)), rtol=0, atol=1e-4)


@pytest.mark.parametrize("switches", [{"compose_static": True}, PLAIN], ids=["composed", "plain"])
def test_losses_reach_every_parameter_and_weights_are_dropped_in_training(switches):
    model, labels = tiny_dcvit(attention_probs_dropout_prob=0.5, **switches), torch.tensor([4, 0, 2])
    outputs = model(images(), labels=labels)
    assert_close(outputs.loss, torch.nn.functional.cross_entropy(outputs.logits, labels))
    outputs.loss.backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())
    assert torch.equal(model(images()).logits, outputs.logits)
    assert not torch.equal(model.train()(images()).logits, model(images()).logits)


def test_implementations_give_the_same_and_attention_that_cannot_compose_is_refused():
    model = tiny_dcvit()
    expected = model(images()).logits
    model.set_attn_implementation("dcmha_plain")
    assert_close(model(images()).logits, expected, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="'sdpa' cannot compose"):
        model.set_attn_implementation("sdpa")
    model.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match="'sdpa' cannot compose"):
        model(images())


@pytest.mark.parametrize("switches", [{}, PLAIN], ids=["composed", "plain"])
def test_patches_that_are_masked_have_no_influence(switches):
    model = tiny_dcvit(**switches)
    mask = torch.ones(3, 17, dtype=torch.long)
    mask[:, -4:] = 0  # the bottom row of patches
    changed = images()
    changed[:, :, -4:] = 3.0
    assert_close(model(changed, attention_mask=mask).logits, model(images(), attention_mask=mask).logits, **CLOSE)
    assert not torch.allclose(model(changed).logits, model(images()).logits, atol=0.01)


def test_inputs_models_and_files_that_do_not_fit_are_refused(tmp_path):
    tiny_dcvit().save_pretrained(tmp_path)
    (name,) = without(tmp_path, "layers.1.attention.compose.gate_weight")
    with pytest.raises(ValueError, match=f"lacks {name}"):
        DCViTForImageClassification.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="16 keys, but there are 17"):
        tiny_dcvit(DCViTModel)(images(), attention_mask=torch.ones(3, 16))
    for name, value in (("num_attention_heads", 0), ("compose_groups", 3), ("compose_init", "'zero'")):
        with pytest.raises(StrictDataclassError, match=f"{name} must .*got {value}"):
            DCViTConfig(**TINY | {name: value.strip("'") if isinstance(value, str) else value})
    with pytest.raises(ValueError, match="made of a ViTForImageClassification, got a ViTModel"):
        DCViTForImageClassification.from_vit(tiny_vit(ViTModel))
