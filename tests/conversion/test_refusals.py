"""Damaged, incomplete and contradicting sources are refused, and nothing is left behind."""

import json
import re
import shutil
import zipfile

import numpy as np
import pytest
import torch
import yaml
from damage import cut, flip_bit
from orbax_writer import BFLOAT16, maxtext_leaves, write_checkpoint, write_metadata
from pax_arrays import PAX_CONFIG, PAX_MLP, pax_arrays
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from dcformer.conversion import convert_maxtext, convert_pax, convert_torch


MLP = "params.decoder.layers.mlp_1.wi_0.kernel"
QKW = "params.decoder.layers.self_attention_0.AttentionOp_0.dyn_w_proj.qkw"
OUT = "params.decoder.layers.self_attention_1.out.kernel"
NORM = "params.decoder.decoder_norm.scale"


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Valid checkpoints, copied for every test: src (zarr), ocdbt, hub and pax.npz."""
    folder = tmp_path_factory.mktemp("originals")
    leaves = maxtext_leaves(0, layers=2)
    write_checkpoint(folder / "src" / "7" / "state", leaves)
    write_checkpoint(folder / "ocdbt" / "7" / "state", leaves, layout="ocdbt")
    tiny_model(num_hidden_layers=2).save_pretrained(folder / "hub")
    np.savez(folder / "pax.npz", **pax_arrays())
    (folder / "config.json").write_text(json.dumps(PAX_CONFIG))
    return folder


@pytest.fixture
def work(originals, tmp_path):
    shutil.copytree(originals, tmp_path, dirs_exist_ok=True)
    return tmp_path


def assert_refused(work, word, convert, source, **options):
    """The call fails with a message that holds a word, and leaves nothing behind."""
    before = sorted(path.relative_to(work) for path in work.rglob("*"))
    with pytest.raises((ValueError, OSError)) as caught:
        convert(source, work / "out", **options)
    assert word in str(caught.value) and not re.search(r"\[Errno|tensorstore_spec|os error", str(caught.value))
    assert sorted(path.relative_to(work) for path in work.rglob("*")) == before


def put(*changes, remove=(), declared=()):
    """Write arrays (name, values) anew and remove others, with `_METADATA` that lists what is there, and more."""

    def corrupt(item):
        for name in [*remove, *dict(changes)]:
            shutil.rmtree(item / name, ignore_errors=True)
        write_checkpoint(item, dict(changes), metadata=False)
        write_metadata(item, [*(path.name for path in item.iterdir() if path.is_dir()), *declared])

    return corrupt


def floats(*shape, bad=0.5):
    values = np.full(shape, 0.5, np.float32)
    values.flat[0] = bad
    return values


MAXTEXT = {
    "chunk_truncated": (lambda item: cut(item / MLP / "0.0.0"), "is damaged (Error reading local file"),
    "declaration_cut": (lambda item: cut(item / "_METADATA"), "_METADATA' cannot be read: "),
    "chunk_missing": (lambda item: (item / MLP / "0.0.0").unlink(), f"Chunks of {MLP} in"),
    "array_missing": (lambda item: shutil.rmtree(item / MLP), "state is missing; copy the checkpoint again"),
    "array_missing_undeclared": (put(remove=[MLP]), "mlp.gate_proj"),
    "embedding_missing": (put(remove=["params.token_embedder.embedding"]), "token_embedder.embedding"),
    "metadata_of_an_array_truncated": (lambda item: cut(item / MLP / ".zarray"), "Invalid JSON); copy the checkpoint"),
    "array_unknown": (put(("params.decoder.layers.mlp_0.router.kernel", floats(16, 1, 4))), "router"),
    "array_outside_the_root": (put(("other.weights", floats(4))), "other.weights"),
    "array_declared_and_not_there": (put(declared=["params.decoder.layers.lost.scale"]), "layers.lost.scale"),
    "array_declared_elsewhere": (put(declared=["/../../../" + MLP]), "must stay inside its folder"),
    "sub_block_of_another_run": (put((MLP.replace("mlp_1", "mlp_2"), floats(16, 1, 24))), "3"),
    "layer_count_differs": (put((MLP, floats(16, 2, 24))), MLP),
    "extra_axis": (put((MLP, floats(16, 1, 24, 1))), MLP),
    "odd_ranks": (put((QKW, np.zeros((1, 1, 4, 16, 3, 4), BFLOAT16))), "dyn_w_proj"),
    "integers_for_weights": (put((MLP, np.zeros((16, 1, 24), np.int32))), MLP),
    "stacked_and_unstacked": (put(("params.decoder.layers_0.mlp_0.wo.kernel", floats(24, 16))), "layers_0"),
    "nan": (put((OUT, floats(4, 1, 4, 16, bad=np.nan))), "[0, 0]"),
    "float16_overflow": (put((MLP, floats(16, 1, 24, bad=1e6))), MLP, {"dtype": "float16"}),
}


def leave_out_zeros(item):
    """Write arrays without their chunks of zeros, and `_METADATA` that says that all are stored."""
    shutil.rmtree(item)
    leaves = {name: values * (name != NORM) for name, values in maxtext_leaves(0, layers=2).items()}
    write_checkpoint(item, leaves, layout="ocdbt", fill=0.0)
    write_metadata(item, leaves)


OCDBT = {
    "chunk_missing": (leave_out_zeros, f"Chunks of {NORM} in"),
    "manifest_truncated": (lambda item: cut(item / "manifest.ocdbt"), "The database of arrays in"),
    "data_missing": (lambda item: shutil.rmtree(item / "d"), "copy the checkpoint again"),
    "data_truncated": (lambda item: [cut(path) for path in (item / "d").iterdir()], "copy the checkpoint again"),
    "array_declared_and_not_there": (
        lambda item: write_metadata(item, ["params.lost", *maxtext_leaves(0, layers=2)]),
        "params.lost",
    ),
}


@pytest.mark.parametrize("layout, case", [*(("src", case) for case in MAXTEXT), *(("ocdbt", case) for case in OCDBT)])
def test_damaged_maxtext(work, layout, case):
    corrupt, word, *options = (MAXTEXT if layout == "src" else OCDBT)[case]
    corrupt(work / layout / "7" / "state")
    assert_refused(work, word, convert_maxtext, work / layout, **dict(*options))


@pytest.mark.parametrize(
    "source, options, word",
    [
        ("src", {"step": 8}, "8"),
        ("src", {"dtype": "float8"}, "float8"),
        ("src", {"max_shard_size": "much"}, "size"),
        ("nowhere", {}, "nowhere"),
        ("hub", {}, "hub"),
    ],
)
def test_bad_options_and_sources_without_a_checkpoint(originals, tmp_path, source, options, word):
    assert_refused(tmp_path, word, convert_maxtext, originals / source, **options)


# Training YAMLs of other runs, between bars; the refusal holds the key, or the words below.
OTHER_RUNS = "window_size: 256 | window_size: [0, null] | window_size: [5] | window_size: [5, 6] | base_emb_dim: 32"
OTHER_RUNS += " | window_size: [5, null, 5] | normalization_layer_epsilon: small | param_scan_axis: 0 | vocab_size: 33"
OTHER_RUNS += " | base_num_decoder_layers: 3 | qk_norm: false | num_layers_per_block: 4 | scan_layers: false"
OTHER_RUNS += " | decoder_block: llama2 | mlp_activations: [gelu, linear] | logits_via_embedding: true | num_experts: 8"
OTHER_RUNS += " | base_num_kv_heads: 2 | num_decoder_layers: 3 | fused_qkv: true | fused_mlp: true"
OTHER_RUNS += " | use_untrainable_positional_embedding: true"
OTHER_WORDS = {
    "window_size": "window",
    "window_size: [5, null, 5]": "must list one window length",
    "normalization_layer_epsilon": "'small'",
    "param_scan_axis": "got 4",
}
MISSPELT = {
    **dict.fromkeys(("windw_size", "windows_size", "window-size", "Window_Size"), "window_size"),
    **{"post_compos": "post_compose", "statc_proj": "static_proj", "qknorm": "qk_norm"},
}
MALFORMED = [
    ("window_size: [5, null]\nqk_norm: true\nwindow_size: [7, null]\n", "'window_size' twice"),
    ("window_size: [5, null]\n'window_size': [7, null]\n", "'window_size' twice"),
    ("window_size: [5, null]\ndataset_path: {train: a, train: b}\n", "'train' twice"),
    ("- window_size\n", "train.yml"),
    ("", "train.yml"),
    ("window_size: [5, ", "train.yml' cannot be read: while parsing"),
]


def yaml_cases():
    for text in OTHER_RUNS.split(" | "):
        key = text.partition(":")[0]
        yield text, OTHER_WORDS.get(text, OTHER_WORDS.get(key, key))
    for key, right in MISSPELT.items():
        text = f"window_size: [5, null]\nlearning_rate: 0.001\n{key}: [7, null]\n"
        yield text, f"{key!r}, which means nothing; write {right!r}"
    yield from MALFORMED


@pytest.mark.parametrize("text, words", yaml_cases())
def test_a_training_yaml_of_another_run_misspelt_or_malformed_is_refused(originals, tmp_path, text, words):
    (tmp_path / "train.yml").write_text(text)
    assert_refused(tmp_path, words, convert_maxtext, originals / "src", train_config=tmp_path / "train.yml")


# As in the authors' configurations and those of MaxText: of them, these look most like keys that are read.
OTHERS = ["load_parameters_path", "num_experts_per_tok", "base_moe_mlp_dim", "v_head_dim", "eval_max_target_length"]
OTHERS += ["sliding_window_size", "use_qk_norm", "mtp_use_compose", "query_chunk_size", "max_prefill_predict_length"]
OTHERS += ["dropout_rate", "enable_dropout", "attention", "weight_dtype", "logits_dot_in_fp32", "remat_policy", "steps"]


def test_other_keys_of_maxtext_are_accepted(originals, tmp_path):
    values = {"window_size": [5, None], "emb_dim": 16, "num_query_heads": 4, "num_kv_heads": 4, "mlp_dim": 24}
    text = yaml.safe_dump({**dict.fromkeys(OTHERS, 1), **values}) + "num_decoder_layers: 2\nstatic_proj: null\n"
    (tmp_path / "train.yml").write_text(text)
    options = {"train_config": tmp_path / "train.yml", "verify": False}
    report = convert_maxtext(originals / "src", tmp_path / "out", **options)
    assert next(origin.value for origin in report.origins if origin.field == "sliding_window") == 5


LACKS = "lacks pre_proj.w, lacks post_proj.w"
SWITCHES = {
    "static, no arrays": (False, (), {"static_proj": True}, LACKS),
    "composed too": (False, (), {"static_proj": True, "pre_compose": True, "post_compose": True}, LACKS),
    "not static, arrays": (True, (), {"static_proj": False}, "has pre_proj.w, has post_proj.w"),
    "pre off, its array is there": (True, (), {"pre_compose": False}, "pre_compose: False, but the checkpoint has pre"),
    "post on, no array": (True, ("post_proj",), {"static_proj": True, "post_compose": True}, "lacks post_proj.w"),
    "composed, no dynamic arrays": (False, ("dyn_w_proj",), {"pre_compose": True}, "lacks dyn_w_proj.qkw"),
    "gates alone": (False, ("dw1", "qkw"), {}, "no layer has dyn_w_proj.dw1.kernel, dyn_w_proj.qkw"),
}


@pytest.mark.parametrize("case", SWITCHES)
def test_switches_of_the_yaml_must_fit_the_arrays_of_the_composition(tmp_path, case):
    static, lost, values, word = SWITCHES[case]
    leaves = maxtext_leaves(0, layers=2, static=static).items()
    write_checkpoint(tmp_path / "src", {name: a for name, a in leaves if not any(part in name for part in lost)})
    (tmp_path / "train.yml").write_text(yaml.safe_dump({"window_size": [5, None], **values}))
    assert_refused(tmp_path, word, convert_maxtext, tmp_path / "src", train_config=tmp_path / "train.yml")


def test_a_static_composition_of_one_stage_fits_its_switches(tmp_path):
    leaves = maxtext_leaves(0, layers=2, static=True)
    write_checkpoint(tmp_path / "src", {name: a for name, a in leaves.items() if "post_proj" not in name})
    for index, values in enumerate(({"static_proj": True, "post_compose": False}, {"static_proj": True}, {})):
        (tmp_path / "train.yml").write_text(yaml.safe_dump({"window_size": [5, None], **values}))
        report = convert_maxtext(tmp_path / "src", tmp_path / str(index), train_config=tmp_path / "train.yml")
        values = {origin.field: origin.value for origin in report.origins}
        assert (values["compose_static"], values["compose_pre"], values["compose_post"]) == (True, True, False)


def set_config(**changes):
    def corrupt(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return corrupt


def save_object(values):
    """Put an object that torch saved in the place of the weights."""

    def corrupt(folder):
        (folder / "model.safetensors").unlink()
        torch.save(values, folder / "pytorch_model.bin")

    return corrupt


def set_tensors(change, torch_file=False):
    """Change the tensors of a folder; `torch_file` saves them as `pytorch_model.bin`."""

    def corrupt(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        if torch_file:
            save_object(tensors)(folder)
        else:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return corrupt


class Malicious:
    def __reduce__(self):
        return pytest.fail, ("this code must not run",)


INDEX = "model.safetensors.index.json"


def index(names):
    def corrupt(folder):
        (folder / "model.safetensors").rename(folder / "other.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": names}))

    return corrupt


def split(letters):
    """Changes the fused projections into these of their three parts."""

    def change(tensors):
        for layer in range(2):
            parts = tensors.pop(f"model.layers.{layer}.self_attn.qkv_proj.weight").chunk(3)
            for letter, part in zip(letters, parts):
                tensors[f"layers.{layer}.attention.w{letter}.weight"] = part.clone()

    return change


def copy_weights(folder):
    shutil.copy(folder / "model.safetensors", folder / "b.safetensors")
    index({"a": "other.safetensors", "b": "b.safetensors"})(folder)


def put_tensor(name, values):
    return lambda tensors: tensors.update({name: values})


def replace_text(old, new, file="config.json"):
    return lambda folder: (folder / file).write_text((folder / file).read_text().replace(old, new))


def flip_byte(folder):
    set_tensors(lambda tensors: None, torch_file=True)(folder)
    path = folder / "pytorch_model.bin"
    flip_bit(path, path.stat().st_size // 2)


def garbage(file, content=b"\x93garbage"):
    def corrupt(folder):
        if file.endswith(".bin"):
            (folder / "model.safetensors").unlink()
        (folder / file).write_bytes(content)

    return corrupt


HEAD = "lm_head.weight"
TORCH = {
    "key_misspelt": (replace_text('"sliding_window"', '"sliding_windw"'), "'sliding_windw'"),
    "key_of_the_authors_misspelt": (set_config(use_qknorm=True), "'use_qk_norm'"),
    "key_twice": (replace_text('"hidden_size"', '"norm_eps": 1e-3, "hidden_size"'), "'norm_eps' twice"),
    "config_no_object": (lambda folder: (folder / "config.json").write_text("[]"), "config.json"),
    "byte_flipped_in_a_torch_file": (flip_byte, "pytorch_model.bin' is damaged: the checksum of"),
    "weights_missing": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    "weights_truncated": (lambda folder: cut(folder / "model.safetensors"), "model.safetensors' cannot be read: Error"),
    "config_garbage": (garbage("config.json"), "config.json' cannot be read: 'utf-8' codec"),
    "config_deep": (garbage("config.json", b"[" * 100_000), "config.json' cannot be read: maximum recursion"),
    "report_garbage": (garbage("conversion_report.json"), "conversion_report.json' cannot be read: 'utf-8'"),
    "torch_file_empty": (garbage("pytorch_model.bin", b""), "pytorch_model.bin' cannot be read: it ends too early"),
    "torch_file_cut": (garbage("pytorch_model.bin", b"PK\3\4"), "pytorch_model.bin' cannot be read: it ends too early"),
    "torch_file_garbage": (garbage("pytorch_model.bin"), "pytorch_model.bin' cannot be read: Unsupported operand"),
    "window_beyond_integers": (set_config(sliding_window=10**30), "sliding_window must be at least 2 and at most"),
    "layers_beyond_memory": (set_config(num_hidden_layers=10**9, layer_types=None), "num_hidden_layers must be"),
    "tensor_missing": (set_tensors(lambda tensors: tensors.pop(HEAD)), HEAD),
    "tensor_unknown": (set_tensors(put_tensor("router.weight", torch.ones(3))), "router.weight"),
    "tensor_transposed": (set_tensors(put_tensor(HEAD, torch.ones(32, 67))), HEAD),
    "tensor_quantised": (set_tensors(put_tensor(HEAD, torch.ones(67, 32, dtype=torch.int8))), HEAD),
    "tensor_float8": (set_tensors(put_tensor(HEAD, torch.ones(67, 32).to(torch.float8_e4m3fn))), "the unquantised"),
    "value_missing": (set_tensors(split("qk")), "qkv_proj.weight has shape (96, 32) and is not filled exactly"),
    "not_finite_in_a_torch_file": (set_tensors(put_tensor(HEAD, torch.full((67, 32), torch.inf)), True), HEAD),
    "code": (save_object({HEAD: Malicious()}), "pytorch_model.bin' cannot be read: Unsupported global"),
    "not_tensors": (save_object({"model": {"a": torch.ones(1)}}), "pytorch_model.bin"),
    "quantised": (set_config(quantization_config={"quant_method": "torchao"}), "quantization_config"),
    "other_model": (set_config(model_type="llama"), "llama"),
    "other_width": (set_config(hidden_size=64), "32"),
    "more_layers": (set_config(num_hidden_layers=3, layer_types=None), "model.layers.2"),
    "index_outside_the_folder": (index({"a": "../hub/other.safetensors"}), "../hub/other.safetensors"),
    **{f"index_of_{name!r}": (index({"a": name}), repr(name)) for name in ("..", "a/b.safetensors", 7)},
    "index_names_a_tensor_twice": (
        lambda folder: (index({"a": "x", "b": "y"})(folder), replace_text('"b"', '"a"', INDEX)(folder)),
        "'a' twice",
    ),
    "tensor_in_two_files": (copy_weights, "other.safetensors"),
    "index_of_a_missing_file": (index({"a": "lost.safetensors"}), "lost.safetensors' cannot be read: No such file"),
    "index_of_a_folder": (lambda folder: (index({"a": "lost"})(folder), (folder / "lost").mkdir()), "lost' cannot be"),
    "generation_config_cut": (lambda folder: cut(folder / "generation_config.json"), "generation_config.json' cannot"),
}


@pytest.mark.parametrize("case", TORCH)
def test_damaged_torch_folder(work, case):
    corrupt, word = TORCH[case]
    corrupt(work / "hub")
    assert_refused(work, word, convert_torch, work / "hub")


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "compressed"])
def test_a_torch_file_with_split_projections_is_read_as_one_of_safetensors(work, compression):
    convert_torch(work / "hub", work / "whole")
    set_tensors(split("qkv"), torch_file=True)(work / "hub")
    path = work / "hub" / "pytorch_model.bin"
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    convert_torch(work / "hub", work / "split")
    whole, parts = (load_file(work / name / "model.safetensors") for name in ("whole", "split"))
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)


def set_arrays(change):
    def corrupt(work):
        arrays = pax_arrays()
        change(arrays)
        np.savez(work / "pax.npz", **arrays)

    return corrupt


def add_twice(work):
    with zipfile.ZipFile(work / "pax.npz", "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(f"{PAX_MLP}.npy", archive.read(f"{PAX_MLP}.npy"))


PAX = {
    "array_missing": (set_arrays(lambda arrays: arrays.pop(PAX_MLP)), "mlp.up_proj"),
    "array_unknown": (set_arrays(lambda arrays: arrays.update({f"{PAX_MLP}.b": floats(1)})), f"{PAX_MLP}.b"),
    "array_elsewhere": (set_arrays(lambda arrays: arrays.update(other=floats(1))), "other"),
    "not_finite": (set_arrays(lambda arrays: arrays.update({PAX_MLP: floats(1, 16, 24, bad=np.nan)})), "up_proj"),
    "float8": (set_arrays(lambda arrays: arrays.update({PAX_MLP: floats(1).astype("float8_e4m3fn")})), f"{PAX_MLP} in"),
    "vocabulary_longer": (set_config(vocab_size=40), "emb_var"),
    "layers_do_not_divide": (set_config(n_layer=3), "3"),
    "layers_beyond_memory": (set_config(n_layer=10**30), "num_hidden_layers must be at least 1 and at most 4000"),
    "cut": (lambda work: cut(work / "pax.npz"), "pax.npz' cannot be read: "),
    "array_twice": (add_twice, f"{PAX_MLP!r} twice"),
}


@pytest.mark.parametrize("case", PAX)
def test_damaged_pax(work, case):
    corrupt, word = PAX[case]
    corrupt(work)
    assert_refused(work, word, convert_pax, work / "pax.npz", config=work / "config.json")


def test_objects_in_npy_files_are_not_unpickled(work):
    (work / "arrays").mkdir()
    np.save(work / "arrays" / "a.npy", np.array([Malicious()]), allow_pickle=True)
    assert_refused(work, "objects", convert_pax, work / "arrays", config=work / "config.json")


def test_reference_logits_of_another_vocabulary_are_refused(work):
    np.savez(work / "reference.npz", tokens=np.zeros((1, 3), np.int64), logits=np.zeros((1, 3, 66), np.float32))
    assert_refused(work, "66", convert_torch, work / "hub", reference_logits=work / "reference.npz")
