"""Writing MaxText checkpoints: the way back from a converted folder gives the original arrays."""

import copy
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from golden_runs import convert_jax
from orbax_writer import maxtext_leaves, write_checkpoint
from tiny_models import tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import GENERATION_CONFIG_NAME

from dcformer.conversion import Files, Plan, convert_maxtext, convert_to_maxtext, convert_torch, make_plan
from dcformer.conversion.maxtext import TRAIN_CONFIG_FILE, open_maxtext, read_maxtext
from dcformer.conversion.orbax import open_orbax


# What the JAX code computes, in a small model.
JAX = {"compose_activation": "gelu_pytorch_tanh", "norm_eps": 1e-5, "qk_norm_eps": 1e-5}
# What a training YAML does not say.
NOT_IN_YAML = {"dtype", "bos_token_id", "eos_token_id", "architectures", "transformers_version"}


def read_params(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_orbax(folder)
    arrays = checkpoint.open([name for name in checkpoint.names if name.startswith("params.")])
    return {name: array.read() for name, array in arrays.items()}


def plan_maxtext(folder: Path, train_config: Path | None = None) -> Plan:
    return make_plan(read_maxtext(open_maxtext(folder), train_config))


def assert_identical(actual: Plan | dict[str, torch.Tensor], expected: dict[str, torch.Tensor]):
    if isinstance(actual, Plan):
        actual = actual.read(actual.model_parameters)
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        assert actual[name].dtype == values.dtype, name
        assert torch.equal(actual[name], values), name


@pytest.fixture(scope="module", params=["A1", "A2", "A4", "A6"])
def converted(request, golden, tmp_path_factory) -> tuple[Path, Path]:
    """A golden run, and the folder that it was converted to, with the training YAML beside it."""
    folder = tmp_path_factory.mktemp("converted") / "ours"
    convert_jax(golden, request.param, folder, verify=False)
    return golden / "A_jax" / request.param / "checkpoints", folder


def test_golden_run_comes_back_bit_for_bit_with_its_config(converted, tmp_path):
    golden, folder = converted
    report = convert_to_maxtext(folder, tmp_path / "back")
    assert (report.step, Path(report.destination)) == (14000, tmp_path / "back")
    original = read_params(golden)
    assert_identical(read_params(tmp_path / "back" / "14000" / "state"), original)
    assert {array["name"] for array in report.arrays} == set(original)
    first, again = plan_maxtext(golden, train_config=folder.parent / "run.yml"), plan_maxtext(tmp_path / "back")
    assert again.config.to_dict() == first.config.to_dict()
    assert not any(origin.is_default for origin in again.origins)
    assert_identical(again, first.read(first.model_parameters))


def save(folder: Path, variant: str = "dcformer", **overrides) -> tuple[Path, torch.nn.Module]:
    model = tiny_model(variant, **{**JAX, **overrides})
    model.save_pretrained(folder)
    return folder, model


# The training YAML of the run below, but for how the arrays are laid out.
SETTINGS = {"decoder_block": "dcformer", "mlp_activations": ["silu", "linear"], "logits_via_embedding": False}
SETTINGS |= {"base_emb_dim": 32, "base_num_query_heads": 4, "base_num_kv_heads": 4, "base_mlp_dim": 48, "head_dim": 8}
SETTINGS |= {"vocab_size": 67, "qk_norm": True, "normalization_layer_epsilon": 1e-5, "num_layers_per_block": 3}
SETTINGS |= {"param_scan_axis": 1, "window_size": [None, 7, None], "max_target_length": 65}
SETTINGS |= dict.fromkeys(("static_proj", "pre_compose", "post_compose"), True)


@pytest.mark.parametrize("scan_layers", [True, False], ids=["scan", "no_scan"])
@pytest.mark.parametrize("fused", [{}, {"fused_qkv": True, "fused_mlp": True}], ids=["split", "fused"])
def test_layouts_read_back_identically(tmp_path, scan_layers, fused):
    windows = {"layer_types": ["full_attention", "sliding_attention", "full_attention"] * 2, "sliding_window": 7}
    folder, model = save(tmp_path / "ours", "all_branches", num_hidden_layers=6, **windows)
    convert_to_maxtext(folder, tmp_path / "run", step=7, scan_layers=scan_layers, **fused)
    layout = {"base_num_decoder_layers": 6 if scan_layers else 2, "scan_layers": scan_layers}
    layout |= {"fused_qkv": bool(fused), "fused_mlp": bool(fused)}
    assert yaml.safe_load((tmp_path / "run" / TRAIN_CONFIG_FILE).read_text()) == SETTINGS | layout
    plan = plan_maxtext(tmp_path / "run")
    assert plan.source.step == 7
    assert_identical(plan, model.state_dict())
    there = {key: value for key, value in plan.config.to_dict().items() if key not in NOT_IN_YAML}
    assert there == {key: value for key, value in model.config.to_dict().items() if key not in NOT_IN_YAML}
    names = {name.split(".")[2] for name in read_params(tmp_path / "run") if ".layers" in name}
    assert names == ({"layers"} if scan_layers else {"layers_0", "layers_1"})


def test_a_given_training_yaml_wins_over_that_beside_the_step_and_either_must_fit(tmp_path):
    folder, _ = save(tmp_path / "ours", num_hidden_layers=2)
    convert_to_maxtext(folder, tmp_path / "run")
    (tmp_path / "given.yml").write_text("window_size: [5, null]")
    assert plan_maxtext(tmp_path / "run", train_config=tmp_path / "given.yml").config.sliding_window == 5
    path = tmp_path / "run" / TRAIN_CONFIG_FILE
    path.write_text(path.read_text().replace("vocab_size: 67", "vocab_size: 68"))
    assert plan_maxtext(tmp_path / "run", train_config=tmp_path / "given.yml").config.vocab_size == 67
    with pytest.raises(ValueError, match=rf"vocab_size is 68 in '{re.escape(str(path))}', .* \(--train-config\)"):
        convert_maxtext(tmp_path / "run" / "0", tmp_path / "back")
    with pytest.raises(FileNotFoundError, match=r"none\.yml' cannot be read: No such file"):
        plan_maxtext(tmp_path / "run", train_config=tmp_path / "none.yml")


def test_a_plan_changes_nothing_of_what_it_is_made_of(tmp_path):
    write_checkpoint(tmp_path, maxtext_leaves(0, layers=2))
    checkpoint = read_maxtext(open_maxtext(tmp_path))
    before = copy.deepcopy((checkpoint.config.to_dict(), checkpoint.layout, checkpoint.origins))
    plan = make_plan(checkpoint, "float16", Files(token_ids={"bos_token_id": 1}))
    assert (checkpoint.config.to_dict(), checkpoint.layout, checkpoint.origins) == before
    assert (plan.config.bos_token_id, plan.config.dtype, checkpoint.config.bos_token_id) == (1, torch.float16, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.parameters = {}


@pytest.mark.parametrize("by", [convert_torch, convert_to_maxtext])
def test_what_lies_beside_the_weights_comes_along(tmp_path, by):
    folder, model = save(tmp_path / "ours", eos_token_id=5)
    model.generation_config.update(eos_token_id=[3, 5], do_sample=True, top_k=7)
    model.generation_config.save_pretrained(folder)
    words = WordLevel({f"word{number}": number for number in range(60)}, unk_token="word0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="word9", pad_token="word8")
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder)
    (folder / "LICENSE").write_text("mine")
    by(folder, tmp_path / "other")
    convert = convert_maxtext if by is convert_to_maxtext else convert_torch
    convert(tmp_path / "other", tmp_path / "back", verify=False)
    for name in ("generation_config.json", "LICENSE"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()
    back = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert back.get_vocab() == tokenizer.get_vocab()
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["eos_token_id"] == (5 if by is convert_torch else [3, 5])
    assert config["pad_token_id"] == 8  # which only the tokenizer states
    convert(tmp_path / "other", tmp_path / "given", tokenizer=tokenizer, verify=False)
    settings = [json.loads((tmp_path / "given" / name).read_text()) for name in ("config.json", GENERATION_CONFIG_NAME)]
    assert [values["eos_token_id"] for values in settings] == [9, 9] and settings[1]["top_k"] == 7
    assert (tmp_path / "given" / "chat_template.jinja").read_text() == "{{ messages }}"
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer.json").rename(folder / "20B_tokenizer.json")  # as the authors have it, alone
    convert_torch(folder, tmp_path / "authors", verify=False)
    assert AutoTokenizer.from_pretrained(tmp_path / "authors").get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize(
    "variant, overrides",
    [
        *((variant, {}) for variant in ("grouped_query_attention", "pre_only", "all_global", "wide_heads")),
        ("dcformer", {"compose_activation": "gelu", "qk_norm_eps": 1e-6}),  # slight differences, which are accepted
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_architectures_read_back_identically(tmp_path, variant, overrides):
    folder, model = save(tmp_path / "ours", variant, compose_static=True, **overrides)
    convert_to_maxtext(folder, tmp_path / "run", approximate=bool(overrides))
    expected = model.state_dict()
    if variant == "pre_only":  # JAX has no matrix for the stage that is off
        for name in expected:
            if name.endswith("static_weight"):
                expected[name][1] = 0
    assert_identical(plan_maxtext(tmp_path / "run"), expected)


def test_parts_of_the_disk_layout(tmp_path):
    folder, _ = save(tmp_path / "ours", num_hidden_layers=4)
    convert_to_maxtext(folder, tmp_path / "run", param_dtype="bfloat16")
    leaf = tmp_path / "run" / "0" / "state" / "params.decoder.layers.self_attention_1.query.kernel"
    metadata = json.loads((leaf / ".zarray").read_text())
    assert metadata["dtype"] == "bfloat16" and metadata["fill_value"] is None
    assert metadata["compressor"] == {"id": "zstd", "level": 1}
    assert (metadata["shape"], metadata["chunks"]) == ([32, 2, 4, 8], [32, 1, 4, 8])
    assert sorted(path.name for path in leaf.iterdir()) == [".zarray", "0.0.0.0", "0.1.0.0"]
    assert {values.dtype for values in read_params(tmp_path / "run").values()} == {torch.bfloat16}
    (leaf / "0.1.0.0").unlink()
    with pytest.raises(ValueError, match=r"Chunks of params\.decoder\.layers\.self_attention_1\.query\.kernel in"):
        read_params(tmp_path / "run")


def test_unused_arrays_of_another_layout_become_zeros(golden, tmp_path):
    (tmp_path / "run.yml").write_text("{window_size: [null, null], pre_compose: false, post_compose: false}")
    run = golden / "A_jax" / "A6" / "checkpoints"
    convert_maxtext(run, tmp_path / "ours", train_config=tmp_path / "run.yml", verify=False)
    report = convert_to_maxtext(tmp_path / "ours", tmp_path / "run", layers_per_block=1)
    assert read_params(tmp_path / "run")["params.decoder.layers.mlp_0.wo.kernel"].shape[1] == 2
    sources = {array["name"]: array["sources"] for array in report.arrays}
    for name, values in read_params(tmp_path / "run").items():
        assert (not values.any()) == ("dyn_w_proj" in name) == (not sources[name])


@pytest.mark.parametrize(
    "variant, overrides, options, reasons",
    [
        ("dcpythia", {}, {}, ["model_type is 'dcpythia'", "attention_bias is True", "mlp_bias", "parallel_residual"]),
        ("dcpythia", {}, {}, ["norm_type is 'layer_norm'", "mlp_type is 'plain'", "partial_rotary_factor is 0.25"]),
        ("mlp_gate_and_one_global_in_four", {}, {}, ["mlp_gate_dim is 4", "rope_theta is 500000.0"]),
        ("plain_transformer_with_learned_positions", {}, {}, ["position_embedding_type", "hidden_act is 'gelu'"]),
        ("talking_heads", {}, {}, ["compose_query is False", "compose_key is False"]),
        ("low_rank_only", {}, {}, ["compose_gate is False"]),
        ("gates_only", {}, {}, ["compose_low_rank is False"]),
        ("grouped", {}, {}, ["compose_groups is 2", "compose_rank is 1"]),
        ("grouped_query_attention", {}, {"fused_qkv": True}, ["as many key/value heads as query heads"]),
        ("dcformer", {"tie_word_embeddings": True}, {}, ["tie_word_embeddings is True"]),
        ("dcformer", {"compose_activation": "gelu", "norm_eps": 1e-6}, {}, ["'gelu'", "norm_eps is 1e-06", "=True"]),
        ("dcformer", {"compose_norm_eps": 1e-5}, {}, ["compose_norm_eps is 1e-05"]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_maxtext_cannot_express_is_refused(tmp_path, variant, overrides, options, reasons):
    folder, _ = save(tmp_path / "ours", variant, **overrides)
    with pytest.raises(ValueError, match="cannot be written as a MaxText checkpoint") as error:
        convert_to_maxtext(folder, tmp_path / "run", **options)
    assert all(reason in str(error.value) for reason in reasons), error.value
    assert not list(tmp_path.glob("*run*"))


@pytest.mark.parametrize(
    "options, words",
    [
        *(({"layers_per_block": layers}, rf"must be 2, 4, so .* got {layers}\.") for layers in (0, 1, 3, 8)),
        ({"param_dtype": "float16"}, "param_dtype"),
        ({"step": -1}, "step"),
    ],
    ids=str,
)
def test_blocks_that_do_not_repeat_the_windows_and_bad_options_are_refused(tmp_path, options, words):
    folder, _ = save(tmp_path / "ours", num_hidden_layers=4)
    with pytest.raises(ValueError, match=words):
        convert_to_maxtext(folder, tmp_path / "run", **options)


RESTORE = """
import sys, numpy, orbax.checkpoint
tree = orbax.checkpoint.PyTreeCheckpointer().restore(sys.argv[1])
head, layers = tree["params"]["decoder"]["logits_dense"], tree["params"]["decoder"]["layers"]
arrays = {"head": head["kernel"], "gate": layers["mlp_1"]["wi_0"]["kernel"][:, 0]}
numpy.savez(sys.argv[2], step=tree["step"], states=len(tree["opt_state"]), **arrays)
"""


def test_orbax_restores_the_tree(tmp_path):
    folder, model = save(tmp_path / "ours")
    convert_to_maxtext(folder, tmp_path / "run", step=3)
    # In a process of its own: what JAX leaves behind when a process ends, nanobind reports as leaked.
    command = [sys.executable, "-c", RESTORE, tmp_path / "run" / "3" / "state", tmp_path / "restored.npz"]
    subprocess.run(command, check=True, capture_output=True)
    restored = np.load(tmp_path / "restored.npz")
    assert (restored["step"], restored["states"]) == (3, 0)
    assert (restored["head"] == model.lm_head.weight.detach().numpy().T).all()
    assert (restored["gate"] == model.model.layers[1].mlp.gate_proj.weight.detach().numpy().T).all()


@pytest.mark.parametrize("per_block", [1, 2])
def test_blocks_and_step_survive_a_rewriting_and_options_win(per_block, tmp_path):
    """Of a run of four layers with equal windows, in blocks of so many."""
    write_checkpoint(tmp_path / "run" / "40" / "state", maxtext_leaves(0, layers=4, per_block=per_block))
    (tmp_path / "run.yml").write_text(f"window_size: {[None] * per_block}".replace("None", "null"))
    convert_maxtext(tmp_path / "run", tmp_path / "ours", train_config=tmp_path / "run.yml", verify=False)
    original = read_params(tmp_path / "run")
    convert_torch(tmp_path / "ours", tmp_path / "rewritten", verify=False)
    report = convert_to_maxtext(tmp_path / "rewritten", tmp_path / "back")
    assert report.step == 40
    assert_identical(read_params(tmp_path / "back"), original)
    report = convert_to_maxtext(tmp_path / "ours", tmp_path / "other", layers_per_block=4, step=7)
    assert report.step == 7
    assert read_params(tmp_path / "other")["params.decoder.layers.mlp_3.wo.kernel"].shape[1] == 1
