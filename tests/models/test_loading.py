"""Reading and writing checkpoints: the authors' files, damaged files, vocabularies with holes, Auto classes."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_configuration import AUTHORS_FILE
from tiny_models import VARIANTS, random_tokens, tiny_config, tiny_model
from transformers import AutoModel, AutoModelForCausalLM

from dcformer import DCFormerForCausalLM, DCFormerModel
from dcformer.hub_dcformer import AUTHORS_NAMES, AUTHORS_OUTPUT_NAMES, authors_patterns


def authors_name(name: str, model_type: str = "dcformer") -> str:
    """By the package's table, which tests/conversion/test_golden.py holds to the authors' files."""
    for theirs, ours in {**AUTHORS_NAMES[model_type], **AUTHORS_OUTPUT_NAMES}.items():
        name = name.replace(ours, theirs)
    return name.removeprefix("model.")


def authors_config(config, **changes):
    """The values of a config.json as the authors' class writes it."""
    sizes = ("dim", "n_layer", "n_head", "n_local_heads", "head_dim", "intermediate_size", "block_size", "window_size")
    values = {name: getattr(config, name) for name in ("vocab_size", "norm_eps", *sizes)}
    return {**AUTHORS_FILE, **values, "use_qk_norm": config.qk_norm, "torch_dtype": "float32", **changes}


def write_authors_folder(folder, model, **changes):
    """Write the configuration, and return the state with the copies and caches that the authors' files hold."""
    config = model.config
    state = {authors_name(name): weight.clone() for name, weight in model.state_dict().items()}
    heads, head_dim, hidden = config.num_attention_heads, config.head_dim, config.hidden_size
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}.attention"
        state[f"{prefix}.dyn_w_proj.dw_m"] = torch.zeros(hidden, 20 * heads)  # stale, as in published files
        state[f"{prefix}.dyn_w_proj.qkw_m"] = torch.zeros(4, 4 * heads, 4 * heads)
        state[f"{prefix}.dyn_w_proj.sw"] = torch.eye(heads).repeat(2, 1, 1)
        state[f"{prefix}.dyn_w_proj.pre_proj.w"] = torch.eye(heads)[None].clone()
        state[f"{prefix}.dyn_w_proj.post_proj.w"] = torch.eye(heads)[None].clone()
        state[f"{prefix}.kv_cache.k_cache"] = torch.zeros(1, heads, 8, head_dim)
        state[f"{prefix}.kv_cache.v_cache"] = torch.zeros(1, heads, 8, head_dim)
        state[f"{prefix}.kv_cache.kw_cache"] = torch.zeros(1, 8, 2, heads, heads)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(authors_config(config, **changes)))
    return state


@pytest.fixture
def authors_folder(tmp_path):
    """A folder in the authors' layout and the model that it holds."""
    model = tiny_model()
    torch.save(write_authors_folder(tmp_path / "authors", model), tmp_path / "authors" / "pytorch_model.bin")
    return tmp_path / "authors", model


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_saving_and_loading_is_bit_identical(variant, tmp_path):
    model, tokens = tiny_model(variant), random_tokens(2, 13)
    logits, saved = model(tokens).logits, model
    theirs = {authors_name(name, model.config.model_type): value for name, value in model.state_dict().items()}
    for folder, expected in {"theirs": theirs, "ours": model.state_dict()}.items():
        saved.save_pretrained(tmp_path / folder, save_original_format=folder == "theirs")
        written = load_file(tmp_path / folder / "model.safetensors")
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[name], value) for name, value in expected.items())
        saved, info = AutoModelForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(info.values()), info
        assert type(saved) is type(model)
        assert {**saved.config.to_dict(), "_name_or_path": None} == {**model.config.to_dict(), "_name_or_path": None}
        assert torch.equal(saved.eval()(tokens).logits, logits)


@torch.no_grad()
def test_base_model_and_head_load_from_each_other(authors_folder, tmp_path):
    folder, model = authors_folder
    base = AutoModel.from_pretrained(folder)
    assert type(base) is DCFormerModel
    tokens = random_tokens(1, 9)
    hidden = model.model(tokens).last_hidden_state
    assert torch.equal(base.eval()(tokens).last_hidden_state, hidden)
    base.save_pretrained(tmp_path / "base")
    head = DCFormerForCausalLM.from_pretrained(tmp_path / "base").eval()  # its output layer is initialised
    assert torch.equal(head.model(tokens).last_hidden_state, hidden)
    lost = without(tmp_path / "base", "up_proj")
    with pytest.raises(ValueError, match=f"lacks model.{lost[0]}"):
        DCFormerForCausalLM.from_pretrained(tmp_path, subfolder="base")
    with pytest.raises(ValueError, match=f"lacks model.{lost[0]}"):
        DCFormerForCausalLM.from_pretrained(tmp_path / "base")


def without(folder, *parts):
    """Rewrite a folder's weights without those whose name holds one of these parts; returns the names left out."""
    weights = load_file(folder / "model.safetensors")
    lost = [name for name in weights if any(part in name for part in parts)]
    kept = {name: weight for name, weight in weights.items() if name not in lost}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return sorted(lost)


@pytest.mark.parametrize("part", ["compose", "layers.1.self_attn.compose.gate_weight", "model.norm", "lm_head"])
def test_a_file_that_lacks_a_weight_is_refused(part, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    lost = without(tmp_path, part)
    with pytest.raises(ValueError, match=rf"lacks {lost[0]} \(and {len(lost) - 1} more.* by `dcformer convert torch`"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert sorted(info["missing_keys"]) == lost


def test_composition_can_be_switched_on_in_a_plain_model(tmp_path):
    """The configuration of the file says which weights it has; those that the caller adds are initialised."""
    plain = tiny_model("plain_gated_transformer")
    plain.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, compose_pre=True, compose_post=True)
    assert model.config.composes_heads
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, plain.model.layers[0].mlp.up_proj.weight)


@pytest.mark.parametrize("model_type", ["dcformer", "dcpythia"])
def test_every_renaming_has_a_parameter_and_is_of_whole_parts_of_names(model_type):
    models = [tiny_model(name) for name in VARIANTS if tiny_config(name).model_type == model_type]
    theirs = {authors_name(name, model_type) for model in models for name in model.state_dict()}
    assert theirs and all(any(re.search(pattern, name) for name in theirs) for pattern in authors_patterns(model_type))
    for name in ("my_output.weight", "layers.0.my_attention.wo.weight", "layers.0.attention.dyn_w_proj.dd_m"):
        assert all(re.search(pattern, name) is None for pattern in authors_patterns(model_type))


def test_an_id_beyond_the_vocabulary_is_refused_with_its_position():
    model = tiny_model()
    for token in (67, -1, 10**9):
        with pytest.raises(ValueError, match=rf"Token id {token} at position \[1, 2\] has no row .* which has 67"):
            model(torch.tensor([[1, 2, 3], [4, 5, token]]))
    with pytest.raises(ValueError, match="Token id 67"):
        model.generate(torch.tensor([[1, 67]]), max_new_tokens=2)


def test_oov_pad_is_refused_with_what_does_it_today(tmp_path):
    """Also where Transformers sets it in a configuration that was made already."""
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"got 'pad'; to add rows call model.resize_token_embeddings\("):
        AutoModelForCausalLM.from_pretrained(tmp_path, oov_policy="pad")
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "oov_policy": "pad"}))
    with pytest.raises(ValueError, match="one of error, clamp, got 'pad'"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
