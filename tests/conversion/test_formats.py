"""Conversions of every format: values against hand-written slicing, dtypes, the report."""

import json

import numpy as np
import pytest
import torch
from orbax_writer import BFLOAT16, maxtext_leaves, write_checkpoint
from pax_arrays import PAX_CONFIG, PAX_ROOT, pax_arrays
from safetensors.torch import load_file

from dcformer.conversion import SourceArray, convert_maxtext, convert_pax


MLP, NORM = "params.decoder.layers.mlp_1.wo.kernel", "params.decoder.decoder_norm.scale"


def weights(folder):
    """All tensors of a converted folder as float32 numpy arrays."""
    tensors = {}
    for path in folder.glob("model*.safetensors"):
        tensors |= {name: values.float().numpy() for name, values in load_file(path).items()}
    return tensors


# The layout of the files, and what the tree in them looks like.
VARIANTS = {
    "plain": {"root": "", "optimizer": True},
    "unstacked": {"scan": False},
    "fused": {"fused_qkv": True, "fused_mlp": True},
    "fused_unstacked": {"fused_qkv": True, "fused_mlp": True, "scan": False},
    "grouped_rank_1_static": {"groups": 2, "rank": 1, "static": True},
    "rank_4_no_qk_norm": {"rank": 4, "qk_norm": False},
    "blocks_of_4": {"per_block": 4},
    "single_blocks": {"per_block": 1, "bf16_qkw": False},
    "heads_wider_than_model": {"channels": 6, "root": "params.params."},
    "stacked_along_axis_0": {"stack_axis": 0},
}


def expected_parameters(
    leaves, layer, *, root="params.", per_block=2, scan=True, fused_qkv=False, fused_mlp=False, static=False, **_
):
    """Parameters of one layer, sliced by hand: the stack is axis 1, layer l is block l // n, sub-block l % n."""
    block, sub = divmod(layer, per_block)

    def get(name):
        name = name.format(sub=sub)
        if scan:
            return leaves[f"{root}decoder.layers.{name}"].astype(np.float32)[:, block]
        return leaves[f"{root}decoder.layers_{block}.{name}"].astype(np.float32)

    embed = get("pre_self_attention_layer_norm_{sub}.scale").shape[0]
    if fused_qkv:
        parts = [get("self_attention_{sub}.qkv_proj.kernel")[:, i] for i in range(3)]
    else:
        parts = [get(f"self_attention_{{sub}}.{kind}.kernel") for kind in ("query", "key", "value")]
    if fused_mlp:
        gate, up = (get("mlp_{sub}.wi.kernel")[:, i] for i in range(2))
    else:
        gate, up = get("mlp_{sub}.wi_0.kernel"), get("mlp_{sub}.wi_1.kernel")
    operator = "self_attention_{sub}.AttentionOp_0"
    matrices = [get(f"{operator}.{stage}_proj.w") for stage in ("pre", "post")] if static else []
    return {
        **({"self_attn.compose.static_weight": matrices} if static else {}),
        "self_attn.qkv_proj.weight": np.concatenate([part.reshape(embed, -1).T for part in parts]),
        "self_attn.o_proj.weight": get("self_attention_{sub}.out.kernel").reshape(-1, embed).T,
        "self_attn.compose.hidden_weight": get(f"{operator}.dyn_w_proj.dw1.kernel"),
        "self_attn.compose.low_rank_weight": get(f"{operator}.dyn_w_proj.qkw"),
        "self_attn.compose.gate_weight": get(f"{operator}.dyn_w_proj.dd.kernel"),
        "mlp.gate_proj.weight": gate.T,
        "mlp.up_proj.weight": up.T,
        "mlp.down_proj.weight": get("mlp_{sub}.wo.kernel").T,
        "input_layernorm.weight": get("pre_self_attention_layer_norm_{sub}.scale"),
        "post_attention_layernorm.weight": get("post_self_attention_layer_norm_{sub}.scale"),
    }


def check_values(folder, leaves, *, root="params.", **tree):
    actual = weights(folder)
    np.testing.assert_array_equal(actual["model.embed_tokens.weight"], leaves[f"{root}token_embedder.embedding"])
    np.testing.assert_array_equal(actual["lm_head.weight"], leaves[f"{root}decoder.logits_dense.kernel"].T)
    np.testing.assert_array_equal(actual["model.norm.weight"], leaves[f"{root}decoder.decoder_norm.scale"])
    for layer in range(4):
        for name, values in expected_parameters(leaves, layer, root=root, **tree).items():
            np.testing.assert_array_equal(actual[f"model.layers.{layer}.{name}"], values, err_msg=f"{layer} {name}")


@pytest.mark.parametrize(
    "layout,variant",
    [("zarr", variant) for variant in VARIANTS] + [("ocdbt", "fused_unstacked"), ("zarr3", "blocks_of_4")],
)
def test_values_are_the_slices_of_the_arrays(tmp_path, layout, variant):
    options = dict(VARIANTS[variant])
    axis = options.pop("stack_axis", 1)
    leaves = maxtext_leaves(5, **options)
    stored = {name: np.moveaxis(values, 1, axis) if ".layers." in name else values for name, values in leaves.items()}
    write_checkpoint(tmp_path / "src", stored, layout=layout, metadata=variant != "single_blocks")
    (tmp_path / "train.yml").write_text(f"param_scan_axis: {axis}")
    report = convert_maxtext(tmp_path / "src", tmp_path / "out", train_config=tmp_path / "train.yml", verify=False)
    check_values(tmp_path / "out", leaves, **options)
    of_training = {name for name in leaves if name.startswith("opt_state") or name == "step"}
    assert report.ignored.keys() == of_training
    assert {part["array"] for record in report.tensors for part in record["sources"]} == leaves.keys() - of_training
    formats = {"zarr": "MaxText (zarr 2)", "ocdbt": "MaxText (OCDBT, zarr 2)", "zarr3": "MaxText (zarr 3)"}
    assert report.source["format"] == formats[layout]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["compose_rank"] == options.get("rank", 2)
    assert config["compose_groups"] == options.get("groups", 1)
    assert config["qk_norm"] == options.get("qk_norm", True)


@pytest.mark.parametrize("form", ["npz", "npy"])
def test_values_of_pax_are_the_slices_of_its_arrays(tmp_path, form):
    """As the authors' reader of PAX puts them into their torch model: layer l is block l // 2, sub-block l % 2."""
    arrays = pax_arrays(blocks=3, mlp_gate=4)
    stored = {name: values.astype(BFLOAT16) if "scale" not in name else values for name, values in arrays.items()}
    arrays = {name: values.astype(np.float32) for name, values in stored.items()}
    np.savez(tmp_path / "pax.npz", **stored)
    (tmp_path / "pax.npy").mkdir()
    for name, values in stored.items():
        np.save(tmp_path / "pax.npy" / f"{name}.npy", values)
    config = {**PAX_CONFIG, "n_layer": 6, "mgate": True, "mgate_dim": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    convert_pax(tmp_path / f"pax.{form}", tmp_path / "out", config=tmp_path / "config.json", verify=False)
    dtypes = {values.dtype for values in load_file(tmp_path / "out" / "model.safetensors").values()}
    assert dtypes == {torch.float32, torch.bfloat16}
    expected = {
        "model.embed_tokens.weight": arrays[f"{PAX_ROOT}embedding_lookup.emb_var"][:30],  # the others are padding
        "lm_head.weight": arrays[f"{PAX_ROOT}softmax.logits_ffn.linear.w"].T[:30],
        "model.norm.weight": arrays[f"{PAX_ROOT}final_ln.scale"],
    }
    for layer in range(6):
        below = f"{PAX_ROOT}transformer.repeat.sub.x_layers_{layer % 2}."
        stored = {
            name.removeprefix(below): array[layer // 2] for name, array in arrays.items() if name.startswith(below)
        }
        qkv = [stored[f"self_attention.{kind}.w"].reshape(16, 16).T for kind in ("query", "key", "value")]
        parameters = {
            "input_layernorm.weight": stored["layer_norm.scale"],
            "self_attn.qkv_proj.weight": np.concatenate(qkv),
            "self_attn.q_norm.weight": stored["self_attention.q_norm.scale"],
            "self_attn.k_norm.weight": stored["self_attention.k_norm.scale"],
            "self_attn.o_proj.weight": stored["self_attention.post.w"].reshape(16, 16),  # not transposed
            "self_attn.compose.hidden_weight": stored["self_attention.dyn_w_proj.dw1"],
            "self_attn.compose.low_rank_weight": stored["self_attention.dyn_w_proj.qkw"],
            "self_attn.compose.gate_weight": stored["self_attention.dyn_w_proj.dd"],
            "post_attention_layernorm.weight": stored["ff_layer.layer_norm.scale"],
            "mlp.gate_proj.weight": stored["ff_layer.ffn_layer1_gate.linear.w"].T,
            "mlp.up_proj.weight": stored["ff_layer.ffn_layer1.linear.w"].T,
            "mlp.down_proj.weight": stored["ff_layer.ffn_layer2.linear.w"].T,
            "mlp.gate_mix.weight": stored["ff_layer.mgate_layer.linear.w"].T,
        }
        expected |= {f"model.layers.{layer}.{name}": values for name, values in parameters.items()}
    actual = weights(tmp_path / "out")
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(actual[name], values, err_msg=name)


@pytest.mark.parametrize("fill", [None, 0.0, 0.5], ids="fill {}".format)
@pytest.mark.parametrize("layout", ["zarr", "ocdbt", "zarr3"])
def test_chunks_that_do_not_divide_the_arrays_or_are_not_stored(tmp_path, layout, fill):
    leaves = maxtext_leaves(7, static=True)
    if fill is not None:  # in whole chunks, the last ones too
        leaves[MLP][:10], leaves[MLP][20:], leaves[NORM][:] = fill, fill, fill
    write_checkpoint(
        tmp_path / "src", leaves, layout=layout, chunks=lambda name, shape: [-(-n // 3) for n in shape], fill=fill
    )
    report = convert_maxtext(tmp_path / "src", tmp_path / "out", verify=False)
    filled = {reason for name, reason in report.ignored.items() if name in (f"chunks of {MLP}", f"chunks of {NORM}")}
    assert len(report.ignored) == (0 if fill is None else 2)
    assert filled == (set() if fill is None else {"not stored, so read as the fill value"})
    check_values(tmp_path / "out", leaves, static=True)


# dtype -> half a unit in the last place, relative to the largest value.
HALF_ULP = {"keep": 0.0, "float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}


@pytest.mark.parametrize("dtype", HALF_ULP)
def test_dtype_and_its_rounding_error(tmp_path, dtype):
    leaves = maxtext_leaves(8, layers=2)
    write_checkpoint(tmp_path / "src", leaves)
    report = convert_maxtext(tmp_path / "src", tmp_path / "out", dtype=dtype, verify=False)
    written = load_file(tmp_path / "out" / "model.safetensors")
    is_kept = dtype == "keep"
    narrow = {name for name in written if name.endswith("low_rank_weight")} if is_kept else set()
    dtypes = {name: "bfloat16" if name in narrow else "float32" if is_kept else dtype for name in written}
    assert {name: str(values.dtype).removeprefix("torch.") for name, values in written.items()} == dtypes
    assert {record["parameter"]: record["dtype"] for record in report.tensors} == dtypes
    saved = json.loads((tmp_path / "out" / "conversion_report.json").read_text())
    assert saved == json.loads(json.dumps(report.to_dict(), default=str))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtypes["lm_head.weight"]
    target = np.dtype(dtypes["lm_head.weight"])
    for record in report.tensors:
        arrays = [leaves[source["array"]].astype(np.float64) for source in record["sources"]]
        largest = max(np.abs(values).max() for values in arrays)
        assert record["max_rounding_error"] <= HALF_ULP[dtype] * largest
        if record["parameter"] == "lm_head.weight":
            exact = arrays[0].astype(np.float32)
            error = np.abs(exact.astype(np.float64) - exact.astype(target).astype(np.float64)).max()
            assert record["max_rounding_error"] == error
            assert (error == 0) == (dtype in ("keep", "float32"))


def test_defaults_are_marked_in_the_origins(tmp_path):
    write_checkpoint(tmp_path / "src", maxtext_leaves(1, layers=2))
    (tmp_path / "train.yml").write_text(
        "window_size: [5, null]\nnormalization_layer_epsilon: 1.0e-6\nmax_target_length: 129\n"
        "pre_compose: true\npost_compose: true\n"
    )
    without = convert_maxtext(tmp_path / "src", tmp_path / "a", verify=False)
    given = convert_maxtext(tmp_path / "src", tmp_path / "b", train_config=tmp_path / "train.yml", verify=False)
    defaults = {origin.field: origin for origin in without.origins if origin.is_default}
    windows, lengths = {"sliding_window", "layer_types"}, {"max_position_embeddings"}
    assert set(defaults) == windows | lengths | {"norm_eps", "compose_pre", "compose_post"}
    assert all("default" in origin.origin and "--train-config" in origin.origin for origin in defaults.values())
    assert defaults["sliding_window"].value == 256
    assert not [origin for origin in given.origins if origin.is_default]
    values = {origin.field: origin.value for origin in given.origins}
    assert (values["sliding_window"], values["norm_eps"], values["max_position_embeddings"]) == (5, 1e-6, 128)
    assert next(o.origin for o in given.origins if o.field == "sliding_window") == "window_size in train.yml"


def test_an_array_is_read_once_for_all_parameters_of_a_shard(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "src", maxtext_leaves(0, optimizer=True))
    read, names = SourceArray.read, []
    monkeypatch.setattr(SourceArray, "read", lambda self, region: (names.append(self.name), read(self, region))[1])
    report = convert_maxtext(tmp_path / "src", tmp_path / "out", verify=False)
    assert len(names) == len(set(names)) == len({part["array"] for r in report.tensors for part in r["sources"]})
