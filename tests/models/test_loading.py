"""Reading and writing checkpoints: the authors' files, damaged files, vocabularies with holes, Auto classes."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import VARIANTS, random_tokens, tiny_config, tiny_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from dcformer import DCFormerConfig, DCFormerForCausalLM, DCFormerModel, DCPythiaForCausalLM
from dcformer.input_checks import checked_input_ids


# Ours -> the authors', for writing small files as they do.
AUTHORS_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
    "self_attn.qkv_proj": "attention.wqkv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm.weight": "attention.q_norm.scale",
    "self_attn.k_norm.weight": "attention.k_norm.scale",
    "self_attn.compose.hidden_weight": "attention.dyn_w_proj.dw1",
    "self_attn.compose.low_rank_weight": "attention.dyn_w_proj.qkw",
    "self_attn.compose.gate_weight": "attention.dyn_w_proj.dd",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.gate_mix": "feed_forward.mg",
}


def authors_name(name: str) -> str:
    for ours, theirs in AUTHORS_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def write_authors_folder(folder, model, **changes):
    """A DCFormer folder as the authors' class saves it, with the copies and caches their files hold."""
    config = model.config
    layers = config.num_hidden_layers
    state = {authors_name(name): weight.clone() for name, weight in model.state_dict().items()}
    heads, head_dim, hidden = config.num_attention_heads, config.head_dim, config.hidden_size
    for layer in range(layers):
        prefix = f"layers.{layer}.attention"
        state[f"{prefix}.dyn_w_proj.dw_m"] = torch.zeros(hidden, 20 * heads)  # stale, as in published files
        state[f"{prefix}.dyn_w_proj.qkw_m"] = torch.zeros(4, 4 * heads, 4 * heads)
        state[f"{prefix}.dyn_w_proj.sw"] = torch.eye(heads).repeat(2, 1, 1)
        state[f"{prefix}.dyn_w_proj.pre_proj.w"] = torch.eye(heads)[None].clone()
        state[f"{prefix}.dyn_w_proj.post_proj.w"] = torch.eye(heads)[None].clone()
        state[f"{prefix}.kv_cache.k_cache"] = torch.zeros(1, heads, 8, head_dim)
        state[f"{prefix}.kv_cache.v_cache"] = torch.zeros(1, heads, 8, head_dim)
        state[f"{prefix}.kv_cache.kw_cache"] = torch.zeros(1, 8, 2, heads, heads)
    state.update(changes.pop("extra", {}))
    values = {
        "model_type": "dcformer",
        "architectures": ["DCFormer"],
        "auto_map": {"AutoModelForCausalLM": "modeling_dcformer.DCFormer"},
        "vocab_size": config.vocab_size,
        "dim": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_local_heads": heads,
        "head_dim": head_dim,
        "intermediate_size": config.intermediate_size,
        "block_size": config.max_position_embeddings,
        "norm_eps": config.norm_eps,
        "rope_base": 10000,
        "window_size": config.sliding_window,
        "window_type": None,
        "use_qk_norm": config.qk_norm,
        "torch_dtype": "float32",
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return state


@pytest.fixture
def authors_folder(tmp_path):
    """A folder in the authors' layout and the model that it holds."""
    model = tiny_model()
    torch.save(write_authors_folder(tmp_path / "authors", model), tmp_path / "authors" / "pytorch_model.bin")
    return tmp_path / "authors", model


@torch.no_grad()
@pytest.mark.parametrize("file_format", ["bin", "safetensors", "sharded_bin"])
def test_authors_folder_loads_with_nothing_missing_or_unexpected(file_format, tmp_path):
    model = tiny_model("mlp_gate_and_one_global_in_four")
    state = write_authors_folder(tmp_path, model, mgate=True, mgate_dim=4, window_type="LGLL", rope_base=500000)
    if file_format == "bin":
        torch.save(state, tmp_path / "pytorch_model.bin")
    elif file_format == "safetensors":
        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    else:
        names = sorted(state)
        files = {f"pytorch_model-0000{i + 1}-of-00002.bin": names[i::2] for i in range(2)}
        for file, keys in files.items():
            torch.save({key: state[key] for key in keys}, tmp_path / file)
        index = {"metadata": {}, "weight_map": {key: file for file, keys in files.items() for key in keys}}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert type(loaded) is DCFormerForCausalLM
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    tokens = random_tokens(1, 20)
    assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_saving_and_loading_is_bit_identical(variant, tmp_path):
    model, tokens = tiny_model(variant), random_tokens(1, 15)
    model.save_pretrained(tmp_path)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert type(again) is type(model)
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys()
    assert torch.equal(again.eval()(tokens).logits, model(tokens).logits)


@torch.no_grad()
def test_base_model_and_head_load_from_each_other(authors_folder, tmp_path):
    folder, model = authors_folder
    base = AutoModel.from_pretrained(folder)
    assert type(base) is DCFormerModel
    tokens = random_tokens(1, 9)
    hidden = model.model(tokens).last_hidden_state
    assert torch.equal(base.eval()(tokens).last_hidden_state, hidden)
    base.save_pretrained(tmp_path / "base")
    head = DCFormerForCausalLM.from_pretrained(tmp_path / "base").eval()
    assert torch.equal(head.model(tokens).last_hidden_state, hidden)


@torch.no_grad()
def test_tied_embeddings(tmp_path):
    model = tiny_model(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert again.lm_head.weight is again.model.embed_tokens.weight
    tokens = random_tokens(1, 9)
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_split_projections_are_refused(authors_folder):
    folder, _ = authors_folder
    state = torch.load(folder / "pytorch_model.bin")
    for key in [key for key in state if "wqkv" in key]:
        for name, part in zip("qkv", state.pop(key).chunk(3)):
            state[key.replace("wqkv", f"w{name}")] = part.clone()
    torch.save(state, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"split query, key and value projections.*dcformer convert torch"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no model folder .*nowhere"):
        DCFormerForCausalLM.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(OSError, match="nowhere"):
        AutoModelForCausalLM.from_pretrained(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("kept", [0.0, 0.02, 0.5, 0.99], ids=lambda kept: f"{kept:.0%}")
def test_a_truncated_file_is_refused_and_left_alone(file, kept, authors_folder):
    folder, model = authors_folder
    if file == "model.safetensors":
        (folder / "pytorch_model.bin").unlink()
        save_file(write_authors_folder(folder, model), folder / file, metadata={"format": "pt"})
    whole = (folder / file).read_bytes()
    (folder / file).write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(ValueError, match=r"weights file in .*authors.* is truncated or damaged"):
        AutoModelForCausalLM.from_pretrained(folder)
    assert (folder / file).read_bytes() == whole[: int(kept * len(whole))]


def test_a_folder_without_weights_is_named(authors_folder):
    folder, _ = authors_folder
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_weights_of_another_shape_are_refused_unless_asked_for(authors_folder):
    folder, _ = authors_folder
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "intermediate_size": 40}))
    with pytest.raises(ValueError, match=r"down_proj.weight has shape \(32, 48\) .* but \(32, 40\) by its config.json"):
        AutoModelForCausalLM.from_pretrained(folder)
    _, info = AutoModelForCausalLM.from_pretrained(folder, ignore_mismatched_sizes=True, output_loading_info=True)
    assert len(info["mismatched_keys"]) == 6


def test_an_unknown_window_type_in_a_file_is_refused(authors_folder):
    folder, _ = authors_folder
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "window_type": "LLG"}))
    with pytest.raises(ValueError, match=r"window_type must be one of .* got 'LLG'"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_an_id_beyond_the_vocabulary_is_refused_with_its_position():
    model = tiny_model()
    for token in (67, -1, 10**9):
        with pytest.raises(ValueError, match=rf"Token id {token} at position \[1, 2\] has no row .* which has 67"):
            model(torch.tensor([[1, 2, 3], [4, 5, token]]))
    with pytest.raises(ValueError, match="Token id 67"):
        model.generate(torch.tensor([[1, 67]]), max_new_tokens=2)


@torch.no_grad()
def test_oov_clamp_takes_the_nearest_row():
    model = tiny_model(oov_policy="clamp")
    outside, inside = torch.tensor([[1, 67, -5, 1000]]), torch.tensor([[1, 66, 0, 66]])
    assert torch.equal(model(outside).logits, model(inside).logits)


@torch.no_grad()
def test_oov_pad_adds_rows_at_load(authors_folder, tmp_path):
    folder, model = authors_folder
    padded = AutoModelForCausalLM.from_pretrained(folder, oov_policy="pad").eval()
    assert (
        padded.config.vocab_size == padded.get_input_embeddings().num_embeddings == padded.lm_head.out_features == 128
    )
    tokens = random_tokens(1, 12)
    assert torch.equal(padded(tokens).logits[..., :67], model(tokens).logits)
    logits = padded(torch.tensor([[1, 67, 127]])).logits
    assert logits.shape == (1, 3, 128)
    # An added logit is the mean of the old ones, so it is never chosen.
    torch.testing.assert_close(logits[..., 67], logits[..., :67].mean(-1), atol=1e-5, rtol=1e-4)
    assert (logits.argmax(-1) < 67).all()
    with pytest.raises(ValueError, match=r"Token id 128 .* which has 128"):
        padded(torch.tensor([[128]]))
    padded.save_pretrained(tmp_path / "padded")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "padded").eval()
    assert again.config.vocab_size == 128
    assert torch.equal(again(tokens).logits, padded(tokens).logits)
    # Drawn nearly at random, an added row would come up in every other token.
    for sampler in (padded, again):
        drawn = sampler.generate(random_tokens(8, 3), do_sample=True, temperature=50.0, top_k=0, max_new_tokens=9)
        assert drawn[:, 3:].max() < 67


@torch.no_grad()
def test_compiled_lookup_never_leaves_the_embedding():
    lookup = torch.compile(lambda ids: checked_input_ids(ids, 67, "error"), fullgraph=True, backend="eager")
    assert lookup(torch.tensor([[-7, 3, 99]])).tolist() == [[0, 3, 66]]


def test_auto_classes_know_both_model_types():
    for variant, causal_lm in (("dcformer", DCFormerForCausalLM), ("dcpythia", DCPythiaForCausalLM)):
        config = tiny_config(variant)
        assert type(AutoModelForCausalLM.from_config(config)) is causal_lm
        assert type(AutoModel.from_config(config)) is causal_lm._model_class
        assert type(AutoConfig.for_model(config.model_type)) is type(config)


def test_the_file_read_is_not_changed(authors_folder):
    folder, _ = authors_folder
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    AutoModelForCausalLM.from_pretrained(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_weights_load_in_the_dtype_asked_for(authors_folder):
    folder, _ = authors_folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in AutoModelForCausalLM.from_pretrained(folder).parameters()} == {torch.float32}


def test_a_model_saved_with_its_code_loads_without_the_package(tmp_path, monkeypatch):
    """Transformers copies a modelling file and what it imports relatively; that must be enough without the package."""
    model, folders = tiny_model(), [tmp_path / "ours", tmp_path / "authors"]
    monkeypatch.setattr(DCFormerConfig, "_auto_class", "AutoConfig")  # what register_for_auto_class sets
    monkeypatch.setattr(DCFormerForCausalLM, "_auto_class", "AutoModelForCausalLM")
    model.save_pretrained(folders[0])
    save_file(write_authors_folder(folders[1], model), folders[1] / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folders[1] / "config.json").read_text())
    values["auto_map"] = json.loads((folders[0] / "config.json").read_text())["auto_map"]
    (folders[1] / "config.json").write_text(json.dumps(values))
    for module in folders[0].glob("*.py"):
        shutil.copy(module, folders[1])
    program = (
        "import sys, torch; from transformers import AutoModelForCausalLM\n"
        f"for folder in {list(map(str, folders))!r}:\n"
        "    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()\n"
        "    assert type(model).__module__.startswith('transformers_modules'), type(model).__module__\n"
        "    assert 'dcformer' not in sys.modules\n"
        "    torch.save(model(torch.arange(20)[None]).logits, folder + '/logits.pt')"
    )
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, env=environment)
    with torch.no_grad():
        for folder in folders:
            assert torch.equal(torch.load(folder / "logits.pt"), model(torch.arange(20)[None]).logits)
