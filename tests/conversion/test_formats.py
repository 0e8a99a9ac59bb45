"""Conversions of every format: every layout of the arrays, dtypes, the report."""

import json

import numpy as np
import pytest
import torch
from orbax_writer import BFLOAT16, maxtext_leaves, relaid, write_checkpoint
from pax_arrays import PAX_CONFIG, pax_arrays
from safetensors.torch import load_file

from dcformer.conversion import SourceArray, convert_maxtext, convert_pax


MLP, NORM = "params.decoder.layers.mlp_1.wo.kernel", "params.decoder.decoder_norm.scale"


def converted(folder, leaves, train="{}", **options):
    """The report and the tensors of a conversion of arrays."""
    write_checkpoint(folder / "src", leaves, **options)
    (folder / "train.yml").write_text(train)
    report = convert_maxtext(folder / "src", folder / "out", train_config=folder / "train.yml", verify=False)
    return report, load_file(folder / "out" / "model.safetensors")


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(actual[name], values), name


# Of the layout of a run that test_golden.py holds to the logits of the authors.
OTHER_LAYOUTS = {
    "another_root": {"root": ""},
    "unstacked": {"scan": False, "root": "params.params."},
    "fused": {"fused_qkv": True, "fused_mlp": True},
    "fused_unstacked": {"fused_qkv": True, "fused_mlp": True, "scan": False},
    "blocks_of_4": {"per_block": 4},
    "single_blocks": {"per_block": 1},
    "stacked_along_axis_0": {"stack_axis": 0},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The arrays of a run, and the tensors that they are converted to."""
    leaves = maxtext_leaves(5, groups=2, rank=4, channels=6, static=True, optimizer=True)
    report, expected = converted(tmp_path_factory.mktemp("plain"), leaves)
    values = {origin.field: origin.value for origin in report.origins}
    assert [values[name] for name in ("compose_rank", "compose_groups", "head_dim", "qk_norm")] == [4, 2, 6, True]
    for ours, theirs in (("hidden_weight", "dw1.kernel"), ("low_rank_weight", "qkw"), ("gate_weight", "dd.kernel")):
        array = leaves[f"params.decoder.layers.self_attention_1.AttentionOp_0.dyn_w_proj.{theirs}"].astype(np.float32)
        np.testing.assert_array_equal(expected[f"model.layers.3.self_attn.compose.{ours}"].float(), array[:, 1])
    return leaves, expected


@pytest.mark.parametrize(
    "layout, name",
    [("zarr", name) for name in OTHER_LAYOUTS] + [("ocdbt", "fused_unstacked"), ("zarr3", "blocks_of_4")],
)
def test_the_same_parameters_come_out_of_every_layout(plain, tmp_path, layout, name):
    leaves, expected = plain
    laid = relaid(leaves, **OTHER_LAYOUTS[name])
    train = f"param_scan_axis: {OTHER_LAYOUTS[name].get('stack_axis', 1)}"
    report, tensors = converted(tmp_path, laid, train, layout=layout, metadata=name != "single_blocks")
    assert_equal(tensors, expected)
    of_training = {array for array in laid if array.startswith("opt_state") or array == "step"}
    assert report.ignored.keys() == of_training
    assert {part["array"] for record in report.tensors for part in record["sources"]} == laid.keys() - of_training
    formats = {"zarr": "MaxText (zarr 2)", "ocdbt": "MaxText (OCDBT, zarr 2)", "zarr3": "MaxText (zarr 3)"}
    assert report.source["format"] == formats[layout]


def test_arrays_of_pax_in_bfloat16_are_kept(tmp_path):
    arrays = {name: array if "scale" in name else array.astype(BFLOAT16) for name, array in pax_arrays().items()}
    np.savez(tmp_path / "exact.npz", **{name: array.astype(np.float32) for name, array in arrays.items()})
    np.savez(tmp_path / "pax.npz", **arrays)
    (tmp_path / "pax.npy").mkdir()
    for name, array in arrays.items():
        np.save(tmp_path / "pax.npy" / f"{name}.npy", array)
    (tmp_path / "config.json").write_text(json.dumps(PAX_CONFIG))
    tensors = []
    for source in ("exact.npz", "pax.npz", "pax.npy"):
        convert_pax(tmp_path / source, tmp_path / f"of_{source}", config=tmp_path / "config.json", verify=False)
        tensors.append(load_file(tmp_path / f"of_{source}" / "model.safetensors"))
    for kept in tensors[1:]:
        assert all((values.dtype == torch.float32) == ("norm" in name) for name, values in kept.items())
        assert_equal({name: values.float() for name, values in kept.items()}, tensors[0])


@pytest.mark.parametrize("layout, fill", [("zarr", None), ("zarr", 0.0), ("zarr", 0.5), ("ocdbt", 0.5), ("zarr3", 0.5)])
def test_chunks_that_do_not_divide_the_arrays_or_are_not_stored(tmp_path, layout, fill):
    leaves = maxtext_leaves(7, layers=2, static=True, qk_norm=False)
    if fill is not None:  # in whole chunks, the last ones too
        leaves[MLP][:10], leaves[MLP][20:], leaves[NORM][:] = fill, fill, fill
    _, expected = converted(tmp_path / "plain", leaves)
    thirds = {"chunks": lambda name, shape: [-(-n // 3) for n in shape]}
    report, tensors = converted(tmp_path, leaves, layout=layout, fill=fill, **thirds)
    reason = "not stored, so read as the fill value"
    assert report.ignored == ({} if fill is None else dict.fromkeys((f"chunks of {MLP}", f"chunks of {NORM}"), reason))
    assert_equal(tensors, expected)


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
    text = "{window_size: [5, null], normalization_layer_epsilon: 1e-6, max_target_length: 129, pre_compose: true"
    (tmp_path / "train.yml").write_text(f"{text}, post_compose: true}}")
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
