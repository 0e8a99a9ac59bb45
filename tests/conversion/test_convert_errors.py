"""Damaged, incomplete and contradicting sources: one telling line, and nothing left behind."""

import errno
import json
import os
import shutil
import subprocess
from collections import namedtuple

import numpy as np
import pytest
import torch
import yaml
from orbax_writer import BFLOAT16, maxtext_leaves, write_checkpoint, write_metadata
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from dcformer.conversion import convert_maxtext, convert_pax, convert_torch


ERRORS = (ValueError, FileNotFoundError, FileExistsError, OSError)
MLP = "params.decoder.layers.mlp_1.wi_0.kernel"
QKW = "params.decoder.layers.self_attention_0.AttentionOp_0.dyn_w_proj.qkw"
NORM = "params.decoder.decoder_norm.scale"
OUT = "params.decoder.layers.self_attention_1.out.kernel"
PAX_ROOT = "state.mdl_vars.params.lm."
PAX_MLP = PAX_ROOT + "transformer.repeat.sub.x_layers_0.ff_layer.ffn_layer1.linear.w"
PAX_CONFIG = {
    "vocab_size": 30,
    "n_layer": 2,
    "n_head": 4,
    "dim": 16,
    "intermediate_size": 24,
    "window_size": 6,
    "window_type": "LG",
    "use_qk_norm": True,
    "norm_eps": 1e-6,
    "block_size": 64,
    "is_training": True,
}


def pax_arrays():
    generator = np.random.default_rng(3)
    shapes = {"embedding_lookup.emb_var": (32, 16), "final_ln.scale": (16,), "softmax.logits_ffn.linear.w": (16, 32)}
    for sub in range(2):
        layer = f"transformer.repeat.sub.x_layers_{sub}"
        shapes |= {
            f"{layer}.layer_norm.scale": (1, 16),
            f"{layer}.ff_layer.layer_norm.scale": (1, 16),
            f"{layer}.self_attention.query.w": (1, 16, 4, 4),
            f"{layer}.self_attention.key.w": (1, 16, 4, 4),
            f"{layer}.self_attention.value.w": (1, 16, 4, 4),
            f"{layer}.self_attention.post.w": (1, 16, 4, 4),
            f"{layer}.self_attention.q_norm.scale": (1, 4),
            f"{layer}.self_attention.k_norm.scale": (1, 4),
            f"{layer}.self_attention.dyn_w_proj.dw1": (1, 16, 1, 4, 16),
            f"{layer}.self_attention.dyn_w_proj.qkw": (1, 1, 4, 16, 4, 4),
            f"{layer}.self_attention.dyn_w_proj.dd": (1, 16, 1, 16),
            f"{layer}.ff_layer.ffn_layer1_gate.linear.w": (1, 16, 24),
            f"{layer}.ff_layer.ffn_layer1.linear.w": (1, 16, 24),
            f"{layer}.ff_layer.ffn_layer2.linear.w": (1, 24, 16),
        }
    return {PAX_ROOT + name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


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


def assert_refused(work, words, convert, source, destination=None, **options):
    """The call fails with one line that holds every word, and leaves nothing behind."""
    destination = work / "out" if destination is None else destination
    before = sorted(path.relative_to(work) for path in work.rglob("*"))
    with pytest.raises(Exception) as caught:
        convert(source, destination, **options)
    assert isinstance(caught.value, ERRORS), repr(caught.value)
    message = str(caught.value)
    assert "\n" not in message
    for word in [words] if isinstance(words, str) else words:
        assert word in message, message
    assert not list(work.rglob(".*.partial"))
    assert sorted(path.relative_to(work) for path in work.rglob("*")) == before


def test_the_originals_are_valid(work):
    convert_maxtext(work / "src", work / "a")
    convert_maxtext(work / "ocdbt", work / "b")
    convert_torch(work / "hub", work / "c")
    convert_pax(work / "pax.npz", work / "d", config=work / "config.json")


# --- MaxText: every corruption gets the item's folder -----------------------------------------------------------------


def chunk(item, name):
    return next(path for path in sorted((item / name).iterdir()) if path.name != ".zarray")


def cut(path, keep=0.5):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


def set_zarray(name, **changes):
    def corrupt(item):
        path = item / name / ".zarray"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return corrupt


def put(*changes, remove=()):
    """Write arrays (name, values) anew and remove others, with `_METADATA` that lists what is there."""

    def corrupt(item):
        for name in remove:
            shutil.rmtree(item / name)
        for name, _ in changes:
            shutil.rmtree(item / name, ignore_errors=True)
        write_checkpoint(item, dict(changes), metadata=False)
        write_metadata(item, [path.name for path in item.iterdir() if path.is_dir()])

    return corrupt


def floats(*shape, bad=None):
    values = np.full(shape, 0.5, np.float32)
    if bad is not None:
        values.flat[0] = bad
    return values


def rename_leaf(item):
    (item / MLP).rename(item / MLP.replace("wi_0", "wi_9"))
    write_metadata(item, [path.name for path in item.iterdir() if path.is_dir()])


def remove_sub_block(item):
    names = [path.name for path in item.iterdir() if path.is_dir()]
    put(remove=[name for name in names if "_1." in name and "decoder.layers" in name and "mlp" in name])(item)


def cut_metadata(item):
    cut(item / "_METADATA")


def extra_declaration(item):
    write_metadata(item, [*(path.name for path in item.iterdir() if path.is_dir()), "params.decoder.layers.lost.scale"])


def garbage(item):
    chunk(item, MLP).write_bytes(b"\x00\x01 no zstd frame " * 20)


MAXTEXT = {
    "chunk_truncated": (lambda item: cut(chunk(item, MLP)), MLP),
    "chunk_empty": (lambda item: chunk(item, MLP).write_bytes(b""), MLP),
    "chunk_garbage": (garbage, MLP),
    "chunk_missing": (lambda item: chunk(item, MLP).unlink(), [MLP, "0.0.0"]),
    "chunk_of_bfloat16_truncated": (lambda item: cut(chunk(item, QKW)), QKW),
    "chunk_is_a_folder": (lambda item: (chunk(item, MLP).unlink(), (item / MLP / "0.0.0").mkdir()), MLP),
    "leaf_missing": (lambda item: shutil.rmtree(item / MLP), [MLP, "_METADATA"]),
    "leaf_missing_undeclared": (put(remove=[MLP]), "mlp.gate_proj"),
    "leaf_folder_empty": (lambda item: [path.unlink() for path in (item / MLP).iterdir()], [MLP, ".zarray"]),
    "embedding_missing": (put(remove=["params.token_embedder.embedding"]), "token_embedder.embedding"),
    "norm_missing": (put(remove=[NORM]), "model.norm.weight"),
    "zarray_missing": (lambda item: (item / MLP / ".zarray").unlink(), [MLP, ".zarray"]),
    "zarray_not_json": (lambda item: cut(item / MLP / ".zarray"), [MLP, ".zarray"]),
    "zarray_empty": (lambda item: (item / MLP / ".zarray").write_text(""), [MLP, ".zarray"]),
    "zarray_a_list": (lambda item: (item / MLP / ".zarray").write_text("[]"), [MLP, ".zarray"]),
    "zarray_not_utf8": (lambda item: (item / MLP / ".zarray").write_bytes(b"\xff\xfe{"), [MLP, ".zarray"]),
    "zarray_unknown_dtype": (set_zarray(MLP, dtype="<q9"), [MLP, "<q9"]),
    "zarray_dtype_a_number": (set_zarray(MLP, dtype=4), MLP),
    "zarray_complex_dtype": (set_zarray(MLP, dtype="<c8"), [MLP, "<c8"]),
    "zarray_wider_dtype": (set_zarray(MLP, dtype="<f8"), MLP),
    "zarray_narrower_dtype": (set_zarray(MLP, dtype="<f2"), MLP),
    "zarray_negative_shape": (set_zarray(MLP, shape=[16, -1, 24]), [MLP, "-1"]),
    "zarray_shape_a_string": (set_zarray(MLP, shape="16"), MLP),
    "zarray_no_shape": (set_zarray(MLP, shape=None), MLP),
    "zarray_wrong_chunks": (set_zarray(MLP, chunks=[16, 1, 12]), MLP),
    "zarray_larger_chunks": (set_zarray(MLP, chunks=[16, 1, 48]), MLP),
    "zarray_endless_chunks": (set_zarray(MLP, chunks=[10**9, 1, 24]), MLP),
    "zarray_zero_chunks": (set_zarray(MLP, chunks=[16, 0, 24]), MLP),
    "zarray_too_few_chunks": (set_zarray(MLP, chunks=[16, 24]), MLP),
    "zarray_swapped_shape": (set_zarray(MLP, shape=[24, 1, 16]), MLP),
    "zarray_longer_stack": (set_zarray(MLP, shape=[16, 2, 24]), MLP),
    "zarray_unknown_compressor": (set_zarray(MLP, compressor={"id": "snappy9"}), MLP),
    "zarray_other_compressor": (set_zarray(MLP, compressor={"id": "gzip", "level": 1}), MLP),
    "zarray_filters": (set_zarray(MLP, filters=[{"id": "delta"}]), MLP),
    "zarray_wrong_version": (set_zarray(MLP, zarr_format=7), MLP),
    "zarray_bad_order": (set_zarray(MLP, order="Z"), MLP),
    "zarray_bad_separator": (set_zarray(MLP, dimension_separator=5), MLP),
    "leaf_extra": (put(("params.decoder.layers.mlp_0.router.kernel", floats(16, 1, 4))), "mlp_0.router.kernel"),
    "leaf_outside_root": (put(("other.weights", floats(4))), "other.weights"),
    "leaf_renamed": (rename_leaf, "wi_9"),
    "sub_block_missing": (remove_sub_block, "model.layers.1.mlp"),
    "sub_block_of_another_run": (put((MLP.replace("mlp_1", "mlp_2"), floats(16, 1, 24))), "Blocks of 3 layers"),
    "layer_count_differs": (put((MLP, floats(16, 2, 24))), MLP),
    "width_differs": (put((MLP, floats(16, 1, 25))), MLP),
    "extra_axis": (put((MLP, floats(16, 1, 24, 1))), [MLP, "axes"]),
    "scalar_for_a_matrix": (put((MLP, np.float32(3))), MLP),
    "empty_array": (put((MLP, floats(16, 0, 24))), MLP),
    "odd_ranks": (put((QKW, np.zeros((1, 1, 4, 16, 3, 4), BFLOAT16))), QKW),
    "integers_for_weights": (put((MLP, np.zeros((16, 1, 24), np.int32))), MLP),
    "stacked_and_unstacked": (put(("params.decoder.layers_0.mlp_0.wo.kernel", floats(24, 16))), "decoder.layers_0"),
    "nan": (put((MLP, floats(16, 1, 24, bad=np.nan))), "layer 1"),
    "infinity": (put((OUT, floats(4, 1, 4, 16, bad=np.inf))), "layer 1"),
    "metadata_truncated": (cut_metadata, "_METADATA"),
    "metadata_a_list": (lambda item: (item / "_METADATA").write_text("[]"), "_METADATA"),
    "metadata_not_utf8": (lambda item: (item / "_METADATA").write_bytes(b"\xff\xfe\x00"), "_METADATA"),
    "metadata_lists_what_is_not_there": (extra_declaration, "params.decoder.layers.lost.scale"),
    "only_metadata": (lambda item: [shutil.rmtree(path) for path in item.iterdir() if path.is_dir()], "_METADATA"),
}


@pytest.mark.parametrize("case", MAXTEXT)
def test_damaged_maxtext(work, case):
    corrupt, words = MAXTEXT[case]
    corrupt(work / "src" / "7" / "state")
    assert_refused(work, words, convert_maxtext, work / "src")


OCDBT = {
    "manifest_truncated": lambda item: cut(item / "manifest.ocdbt"),
    "manifest_empty": lambda item: (item / "manifest.ocdbt").write_bytes(b""),
    "manifest_garbage": lambda item: (item / "manifest.ocdbt").write_bytes(b"garbage" * 30),
    "manifest_missing": lambda item: (item / "manifest.ocdbt").unlink(),
    "data_missing": lambda item: shutil.rmtree(item / "d"),
    "data_truncated": lambda item: [cut(path) for path in (item / "d").iterdir()],
    "data_empty": lambda item: [path.write_bytes(b"") for path in (item / "d").iterdir()],
    "data_shifted": lambda item: [
        path.write_bytes(b"\x00" + path.read_bytes()[:-1]) for path in (item / "d").iterdir()
    ],
    "metadata_lists_what_is_not_there": lambda item: write_metadata(
        item, ["params.lost", *maxtext_leaves(0, layers=2)]
    ),
}


@pytest.mark.parametrize("case", OCDBT)
def test_damaged_ocdbt(work, case):
    item = work / "ocdbt" / "7" / "state"
    OCDBT[case](item)
    assert_refused(work, str(item), convert_maxtext, work / "ocdbt")


def test_ocdbt_that_lost_one_of_its_data_files(work):
    """A file of the database is either needed, and missed, or superseded, and makes no difference."""
    item = work / "ocdbt" / "7" / "state"
    convert_maxtext(work / "ocdbt", work / "whole")
    expected = (work / "whole" / "model.safetensors").read_bytes()
    refused = 0
    for i, path in enumerate(sorted((item / "d").iterdir())[::4]):
        lost = path.rename(work / "lost")
        try:
            convert_maxtext(work / "ocdbt", work / f"out{i}", verify=False)
        except ERRORS as error:
            assert str(item) in str(error)
            assert not (work / f"out{i}").exists()
            refused += 1
        else:
            assert (work / f"out{i}" / "model.safetensors").read_bytes() == expected
        lost.rename(path)
    assert refused > 0


SOURCES = {
    "missing": (lambda work: work / "nowhere", {}, "nowhere"),
    "file": (lambda work: work / "pax.npz", {}, "pax.npz"),
    "empty_folder": (lambda work: make(work / "empty"), {}, "empty"),
    "empty_run": (lambda work: make(work / "run" / "checkpoints").parent, {}, "run"),
    "run_of_empty_steps": (lambda work: make(work / "run" / "5").parent, {}, "5"),
    "folder_without_checkpoint": (lambda work: work / "hub", {}, "hub"),
    "step_missing": (lambda work: work / "src", {"step": 8}, ["8", "7"]),
    "other_step_of_an_item": (lambda work: work / "src" / "7" / "state", {"step": 8}, ["7", "8"]),
    "unknown_scheme": (lambda work: "ftp://host/run", {}, "ftp://host/run"),
    "unknown_dtype": (lambda work: work / "src", {"dtype": "float8"}, "float8"),
    "shard_size_no_number": (lambda work: work / "src", {"max_shard_size": "much"}, "much"),
    "shard_size_zero": (lambda work: work / "src", {"max_shard_size": 0}, "max_shard_size"),
    "shard_size_negative": (lambda work: work / "src", {"max_shard_size": "-4GB"}, "-4GB"),
    "tokenizer_missing": (lambda work: work / "src", {"tokenizer": "no/tokenizer.json"}, "no/tokenizer.json"),
}


def make(folder):
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("case", SOURCES)
def test_bad_arguments(work, case):
    source, options, words = SOURCES[case]
    assert_refused(work, words, convert_maxtext, source(work), **options)


def test_float16_overflow(work):
    item = work / "src" / "7" / "state"
    put((MLP, floats(16, 1, 24, bad=1e6)))(item)
    assert_refused(work, [MLP, "float16"], convert_maxtext, work / "src", dtype="float16")


YAMLS = {
    "missing": (None, "train.yml"),
    "not_yaml": ("a: [1, 2", "train.yml"),
    "binary": (b"\xff\xfe\x00\x01", "train.yml"),
    "control_characters": (b"a: \x00\x07", "train.yml"),
    "list": ([1, 2], "train.yml"),
    "empty": ("", "train.yml"),
    "window_a_string": ({"window_size": "256"}, "window_size"),
    "window_a_number": ({"window_size": 256}, "window_size"),
    "window_negative": ({"window_size": [-5, None]}, "window_size"),
    "window_zero": ({"window_size": [0, None]}, "window_size"),
    "window_of_booleans": ({"window_size": [True, None]}, "window_size"),
    "window_of_strings": ({"window_size": ["5", None]}, "window_size"),
    "window_too_short": ({"window_size": [5]}, "window_size"),
    "windows_contradict": ({"window_size": [5, 6]}, "window_size"),
    "epsilon_a_string": ({"normalization_layer_epsilon": "small"}, "normalization_layer_epsilon"),
    "epsilon_null": ({"normalization_layer_epsilon": None}, "normalization_layer_epsilon"),
    "epsilon_negative": ({"normalization_layer_epsilon": -1e-5}, "eps"),
    "epsilon_nan": ({"normalization_layer_epsilon": float("nan")}, "eps"),
    "length_zero": ({"max_target_length": 0}, ["max_"]),
    "length_a_string": ({"max_target_length": "long"}, "max_target_length"),
    "pre_compose_a_string": ({"pre_compose": "yes please"}, "pre_compose"),
    "scan_axis_a_string": ({"param_scan_axis": "one"}, "param_scan_axis"),
    "scan_axis_two": ({"param_scan_axis": 2}, "param_scan_axis"),
    "emb_dim_contradicts": ({"base_emb_dim": 32}, "base_emb_dim"),
    "layers_contradict": ({"base_num_decoder_layers": 3}, "base_num_decoder_layers"),
    "vocab_contradicts": ({"vocab_size": 33}, "vocab_size"),
    "qk_norm_contradicts": ({"qk_norm": False}, "qk_norm"),
    "block_contradicts": ({"num_layers_per_block": 4}, "num_layers_per_block"),
    "scan_contradicts": ({"scan_layers": False}, "scan_layers"),
    "other_architecture": ({"decoder_block": "llama2"}, ["decoder_block", "llama2"]),
    "other_activations": ({"mlp_activations": ["gelu", "linear"]}, "mlp_activations"),
    "embedding_shared": ({"logits_via_embedding": True}, "logits_via_embedding"),
    "scale_a_string": ({"global_parameter_scale": "big"}, "global_parameter_scale"),
}


@pytest.mark.parametrize("case", YAMLS)
def test_bad_train_config(work, case):
    content, words = YAMLS[case]
    path = work / "train.yml"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    assert_refused(work, words, convert_maxtext, work / "src", train_config=path)


# --- Destinations -----------------------------------------------------------------------------------------------------


def existing(work):
    (make(work / "out") / "notes.txt").write_text("keep me")
    return work / "out"


def existing_file(work):
    (work / "out").write_text("keep me")
    return work / "out"


DESTINATIONS = {
    "inside_source": (lambda work: work / "src" / "out", {}, ["inside", "src"]),
    "deep_inside_source": (lambda work: work / "src" / "7" / "a" / "b", {}, ["inside", "src"]),
    "around_source": (lambda work: work, {}, "inside"),
    "around_source_forced": (lambda work: work, {"force": True}, "inside"),
    "source_itself": (lambda work: work / "src", {"force": True}, "src"),
    "source_by_another_name": (lambda work: work / "hub" / ".." / "src", {"force": True}, "src"),
    "exists": (existing, {}, ["out", "--force"]),
    "no_model": (existing, {"force": True}, ["out", "not a converted model"]),
    "file": (existing_file, {}, "out"),
    "file_forced": (existing_file, {"force": True}, "out"),
    "model_without_force": (lambda work: work / "hub", {}, ["hub", "--force"]),
    "below_a_file": (lambda work: work / "pax.npz" / "out", {}, ["pax.npz", "file"]),
    "deep_below_a_file": (lambda work: work / "pax.npz" / "a" / "out", {}, ["pax.npz", "file"]),
    "bucket": (lambda work: "gs://bucket/out", {}, "gs://bucket/out"),
}


@pytest.mark.parametrize("case", DESTINATIONS)
def test_bad_destination(work, case):
    destination, options, words = DESTINATIONS[case]
    assert_refused(work, words, convert_maxtext, work / "src", destination(work), **options)


def test_failure_leaves_the_model_that_force_would_replace(work):
    convert_maxtext(work / "src", work / "out")
    garbage(work / "src" / "7" / "state")
    assert_refused(work, MLP, convert_maxtext, work / "src", force=True)


def test_disk_full_before_writing(work, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 1000, 1000))
    assert_refused(work, [str(work), "free"], convert_maxtext, work / "src")


def test_disk_full_while_writing(work, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert_refused(work, "No space left", convert_maxtext, work / "src")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_destination_not_writable(work):
    make(work / "locked").chmod(0o500)
    assert_refused(work, "locked", convert_maxtext, work / "src", work / "locked" / "out")


@pytest.mark.parametrize("content", ["{}", "no json", '{"version": "1.0"}'], ids=["empty_object", "no_json", "partial"])
def test_tokenizer_that_is_none(work, content):
    (work / "tokenizer.json").write_text(content)
    assert_refused(work, "tokenizer.json", convert_maxtext, work / "src", tokenizer=work / "tokenizer.json")


def test_tokenizer_folder_that_is_none(work):
    make(work / "tokens")
    assert_refused(work, "tokens", convert_maxtext, work / "src", tokenizer=work / "tokens")


TOKENS = np.zeros((1, 4), np.int32)
REFERENCES = {
    "missing": (None, "io.npz"),
    "no_npz": (b"nothing", "io.npz"),
    "wrong_keys": ({"inputs": TOKENS, "outputs": floats(1, 4, 32)}, "io.npz"),
    "wrong_vocabulary": ({"tokens": TOKENS, "logits": floats(1, 4, 33)}, ["io.npz", "33"]),
    "wrong_length": ({"tokens": TOKENS, "logits": floats(1, 5, 32)}, "io.npz"),
    "wrong_axes": ({"tokens": TOKENS[0], "logits": floats(4, 32)}, "io.npz"),
    "token_outside": ({"tokens": TOKENS + 32, "logits": floats(1, 4, 32)}, ["io.npz", "32"]),
    "token_negative": ({"tokens": TOKENS - 1, "logits": floats(1, 4, 32)}, ["io.npz", "-1"]),
    "no_tokens": ({"tokens": TOKENS[:, :0], "logits": floats(1, 0, 32)}, "io.npz"),
    "objects": ({"tokens": TOKENS, "logits": np.array([{}], dtype=object)}, "io.npz"),
    "tokens_of_strings": ({"tokens": TOKENS.astype(str), "logits": floats(1, 4, 32)}, "io.npz"),
    "other_logits": ({"tokens": TOKENS, "logits": floats(1, 4, 32)}, ["io.npz", "max abs"]),
    "nan_logits": ({"tokens": TOKENS, "logits": floats(1, 4, 32, bad=np.nan)}, "io.npz"),
}


@pytest.mark.parametrize("case", REFERENCES)
def test_bad_reference_logits(work, case):
    content, words = REFERENCES[case]
    if isinstance(content, bytes):
        (work / "io.npz").write_bytes(content)
    elif content is not None:
        np.savez(work / "io.npz", **content)
    assert_refused(work, words, convert_maxtext, work / "src", reference_logits=work / "io.npz")


# --- Torch files ------------------------------------------------------------------------------------------------------


class Malicious:
    """Unpickling it makes a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return subprocess.call, (["touch", str(self.marker)],)


def set_config(**changes):
    def corrupt(hub):
        values = json.loads((hub / "config.json").read_text())
        (hub / "config.json").write_text(json.dumps({**values, **changes}))

    return corrupt


def set_tensors(change, torch_file=False):
    def corrupt(hub):
        tensors = load_file(hub / "model.safetensors")
        change(tensors)
        if torch_file:
            (hub / "model.safetensors").unlink()
            torch.save(tensors, hub / "pytorch_model.bin")
        else:
            save_file(tensors, hub / "model.safetensors", metadata={"format": "pt"})

    return corrupt


def set_index(text):
    def corrupt(hub):
        shutil.copy(hub / "model.safetensors", hub.parent / "x.safetensors")
        (hub / "model.safetensors").unlink()
        (hub / "model.safetensors.index.json").write_text(text.replace("PARENT", str(hub.parent)))

    return corrupt


def torch_bytes(change):
    def corrupt(hub):
        set_tensors(lambda tensors: None, torch_file=True)(hub)
        change(hub / "pytorch_model.bin")

    return corrupt


def torch_object(values):
    return torch_bytes(lambda path: torch.save(values, path))


GATE = "model.layers.1.mlp.gate_proj.weight"
HUB = {
    "config_missing": (lambda hub: (hub / "config.json").unlink(), "config.json"),
    "config_not_json": (lambda hub: cut(hub / "config.json"), "config.json"),
    "config_not_utf8": (lambda hub: (hub / "config.json").write_bytes(b"\xff\xfe{"), "config.json"),
    "config_a_list": (lambda hub: (hub / "config.json").write_text("[]"), "config.json"),
    "config_other_model": (set_config(model_type="llama"), ["config.json", "llama"]),
    "config_bad_head_count": (set_config(num_attention_heads=-4), "num_attention_heads"),
    "config_bad_type": (set_config(hidden_size="wide"), "hidden_size"),
    "config_bad_layer_types": (set_config(layer_types=["full_attention"]), "layer_types"),
    "config_more_layers": (set_config(num_hidden_layers=3, layer_types=["full_attention"] * 3), "model.layers.2"),
    "config_fewer_layers": (set_config(num_hidden_layers=1, layer_types=["full_attention"]), "layers.1"),
    "config_other_vocabulary": (set_config(vocab_size=66), "lm_head.weight"),
    "no_weights": (lambda hub: (hub / "model.safetensors").unlink(), "hub"),
    "safetensors_truncated": (lambda hub: cut(hub / "model.safetensors"), "model.safetensors"),
    "safetensors_header_truncated": (lambda hub: cut(hub / "model.safetensors", 0.001), "model.safetensors"),
    "safetensors_empty": (lambda hub: (hub / "model.safetensors").write_bytes(b""), "model.safetensors"),
    "safetensors_garbage": (lambda hub: (hub / "model.safetensors").write_bytes(b"\xff" * 999), "model.safetensors"),
    "bin_truncated": (torch_bytes(cut), "pytorch_model.bin"),
    "bin_empty": (torch_bytes(lambda path: path.write_bytes(b"")), "pytorch_model.bin"),
    "bin_garbage": (torch_bytes(lambda path: path.write_bytes(b"garbage" * 99)), "pytorch_model.bin"),
    "bin_a_list": (torch_object([torch.zeros(2)]), "pytorch_model.bin"),
    "bin_of_numbers": (torch_object({"a": 1}), "pytorch_model.bin"),
    "bin_with_numbers_as_names": (torch_object({1: torch.zeros(2)}), "pytorch_model.bin"),
    "index_outside": (set_index('{"weight_map": {"a": "../x.safetensors"}}'), "../x.safetensors"),
    "index_absolute": (set_index('{"weight_map": {"a": "PARENT/x.safetensors"}}'), "x.safetensors"),
    "index_missing_file": (set_index('{"weight_map": {"a": "gone.safetensors"}}'), "gone.safetensors"),
    "index_not_json": (set_index("{"), "model.safetensors.index.json"),
    "index_without_map": (set_index("{}"), "model.safetensors.index.json"),
    "index_empty_map": (set_index('{"weight_map": {}}'), "hub"),
    "index_of_numbers": (set_index('{"weight_map": {"a": 1, "b": "c"}}'), "model.safetensors.index.json"),
    "index_of_lists": (set_index('{"weight_map": {"a": []}}'), "model.safetensors.index.json"),
    "tensor_missing": (set_tensors(lambda tensors: tensors.pop(GATE)), GATE),
    "tensor_extra": (set_tensors(lambda tensors: tensors.update(extra=torch.zeros(3))), "extra"),
    "tensor_wrong_shape": (set_tensors(lambda tensors: tensors.update({GATE: torch.zeros(48, 31)})), GATE),
    "tensor_transposed": (set_tensors(lambda tensors: tensors.update({GATE: tensors[GATE].t().contiguous()})), GATE),
    "tensor_twice": (
        set_tensors(lambda tensors: tensors.update({"layers.1.feed_forward.w1.weight": tensors[GATE].clone()})),
        "layers.1",
    ),
    "tensor_of_integers": (set_tensors(lambda tensors: tensors.update({GATE: tensors[GATE].to(torch.uint8)})), GATE),
    "tensor_of_float8": (
        set_tensors(lambda tensors: tensors.update({GATE: tensors[GATE].to(torch.float8_e4m3fn)})),
        GATE,
    ),
    "tensor_nan": (set_tensors(lambda tensors: tensors[GATE].fill_(float("nan"))), "layer 1"),
    "bin_tensor_complex": (
        set_tensors(lambda tensors: tensors.update({GATE: tensors[GATE].to(torch.complex64)}), torch_file=True),
        GATE,
    ),
}


@pytest.mark.parametrize("case", HUB)
def test_damaged_torch_folder(work, case):
    corrupt, words = HUB[case]
    corrupt(work / "hub")
    assert_refused(work, words, convert_torch, work / "hub")


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before_torch_1.6"])
def test_a_malicious_pickle_is_not_executed(work, zipped):
    (work / "hub" / "model.safetensors").unlink()
    values = {"a": Malicious(work / "marker")}
    torch.save(values, work / "hub" / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    assert_refused(work, "pytorch_model.bin", convert_torch, work / "hub")
    assert not (work / "marker").exists()


def test_torch_folder_that_is_a_file_or_nothing(work):
    assert_refused(work, "pax.npz", convert_torch, work / "pax.npz")
    assert_refused(work, "nowhere", convert_torch, work / "nowhere")


# --- PAX --------------------------------------------------------------------------------------------------------------


def set_arrays(change):
    def corrupt(work):
        arrays = pax_arrays()
        change(arrays)
        np.savez(work / "pax.npz", **arrays)

    return corrupt


def pax_config(**changes):
    return lambda work: (work / "config.json").write_text(json.dumps({**PAX_CONFIG, **changes}))


def flip_data(work):
    """A flipped byte in the stored data, which the archive's checksum tells."""
    content = bytearray((work / "pax.npz").read_bytes())
    content[len(content) // 2] ^= 0xFF
    (work / "pax.npz").write_bytes(content)


PAX = {
    "config_missing": (lambda work: (work / "config.json").unlink(), "config.json"),
    "config_not_json": (lambda work: cut(work / "config.json"), "config.json"),
    "config_bad_value": (pax_config(n_head="four"), ["head"]),
    "npz_missing": (lambda work: (work / "pax.npz").unlink(), "pax.npz"),
    "npz_truncated": (lambda work: cut(work / "pax.npz"), "pax.npz"),
    "npz_empty": (lambda work: (work / "pax.npz").write_bytes(b""), "pax.npz"),
    "npz_flipped_byte": (flip_data, "pax.npz"),
    "npz_without_arrays": (lambda work: np.savez(work / "pax.npz"), "pax.npz"),
    "object_array": (set_arrays(lambda arrays: arrays.update({PAX_MLP: np.array([{}], object)})), "pax.npz"),
    "text_array": (set_arrays(lambda arrays: arrays.update({PAX_MLP: np.array(["a"])})), PAX_MLP),
    "key_extra": (set_arrays(lambda arrays: arrays.update({f"{PAX_ROOT}router.w": floats(3)})), "router.w"),
    "key_outside": (set_arrays(lambda arrays: arrays.update({"weights": floats(3)})), "weights"),
    "key_missing": (set_arrays(lambda arrays: arrays.pop(PAX_MLP)), "mlp.up_proj"),
    "wrong_shape": (set_arrays(lambda arrays: arrays.update({PAX_MLP: floats(1, 16, 23)})), PAX_MLP),
    "layers_do_not_divide": (pax_config(n_layer=3), "num_hidden_layers"),
    "more_layers": (pax_config(n_layer=4), "x_layers_0"),
    "vocabulary_too_large": (pax_config(vocab_size=33), ["emb_var", "33"]),
    "other_width": (pax_config(dim=32), "emb_var"),
    "nan": (set_arrays(lambda arrays: arrays[PAX_MLP].fill(np.nan)), "layer 0"),
}


@pytest.mark.parametrize("case", PAX)
def test_damaged_pax(work, case):
    corrupt, words = PAX[case]
    corrupt(work)
    assert_refused(work, words, convert_pax, work / "pax.npz", config=work / "config.json")


def test_damaged_npy_folder(work):
    folder = make(work / "arrays")
    for name, values in pax_arrays().items():
        np.save(folder / f"{name}.npy", values)
    path = folder / f"{PAX_MLP}.npy"
    for keep in (0.9, 0.01, 0.0):
        content = path.read_bytes()
        cut(path, keep)
        assert_refused(work, PAX_MLP, convert_pax, folder, config=work / "config.json")
        path.write_bytes(content)
