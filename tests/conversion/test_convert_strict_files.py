"""JSON and YAML of others: misspelt and double keys, endless nesting, absurd values; errors name file and field."""

import io
import json
import time
import zipfile

import numpy as np
import pytest
import yaml
from orbax_writer import maxtext_leaves, write_checkpoint
from test_convert_errors import PAX_CONFIG, PAX_MLP, pax_arrays
from tiny_models import tiny_model

from dcformer.common.json_text import quoted
from dcformer.conversion import convert_pax, convert_to_maxtext
from dcformer.conversion.formats.authors_torch import plan_torch
from dcformer.conversion.formats.maxtext import plan_maxtext
from dcformer.conversion.formats.maxtext_yaml import READ_KEYS, TrainConfig
from dcformer.conversion.formats.pax import plan_pax


# An alias bomb or a billion layers take gigabytes and minutes if they are expanded.
SOON_SECONDS = 60
NESTED = 10**5


def message_of(call, kind=ValueError):
    started = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    assert time.monotonic() - started < SOON_SECONDS
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    return message


# --- Training YAML ----------------------------------------------------------------------------------------------------


def train_config(tmp_path, text):
    path = tmp_path / "train.yml"
    path.write_text(text)
    return TrainConfig(path)


MISSPELT = {
    "windw_size": "window_size",
    "window-size": "window_size",
    "WindowSize": "window_size",
    "window_sizes": "window_size",
    "normalisation_layer_epsilon": "normalization_layer_epsilon",
    "pre_composed": "pre_compose",
    "post_compse": "post_compose",
    "max_target_lenght": "max_target_length",
    "num_layer_per_block": "num_layers_per_block",
    "head_dims": "head_dim",
    "qknorm": "qk_norm",
    "scan_layer": "scan_layers",
}


@pytest.mark.parametrize("key", MISSPELT)
def test_a_misspelt_key_is_refused_with_the_one_that_was_meant(tmp_path, key):
    message = message_of(lambda: train_config(tmp_path, f"{key}: [11, null]"))
    assert "train.yml" in message
    assert repr(key) in message
    assert repr(MISSPELT[key]) in message


# Settings of MaxText and of the authors' fork, the ones that come closest to a key that is read among them.
OTHERS = """
attention base_moe_mlp_dim base_num_kv_heads base_output_directory capacity_factor checkpoint_period dropout_rate
dtype emb_dim enable_dropout eval_interval final_logits_soft_cap fused_qkv gradient_clipping_threshold learning_rate
max_prefill_predict_length max_target_length_eval_steps mla_naive_kvcache mlp_activations_limit mlp_dim model_name
num_decoder_layers num_experts num_kv_heads num_layers_per_pipeline_stage num_query_heads param_dtype
qk_nope_head_dim qk_rope_head_dim query_chunk_size remat_policy run_name scan_pipeline_iterations
sliding_window_size static_proj tokenizer_path use_qk_norm v_head_dim vocab_relative_path weight_dtype window
"""


def test_other_keys_of_maxtext_are_accepted(tmp_path):
    keys = {*OTHERS.split(), *READ_KEYS}
    assert train_config(tmp_path, yaml.safe_dump(dict.fromkeys(keys, 1))).values.keys() == keys


def test_the_keys_compared_with_are_the_ones_that_are_read(tmp_path):
    write_checkpoint(tmp_path / "src", maxtext_leaves(0, layers=2))
    asked = set()

    class Watched(dict):
        def __contains__(self, key):
            asked.add(key)
            return super().__contains__(key)

        def get(self, key, default=None):
            asked.add(key)
            return super().get(key, default)

    def watching(self, path):
        self.path, self.values = tmp_path / "train.yml", Watched(static_proj=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainConfig, "__init__", watching)
        plan_maxtext(tmp_path / "src", train_config=tmp_path / "train.yml")
    # This one matters only where the embedding is shared.
    assert asked | {"normalize_embedding_logits"} == set(READ_KEYS)


def test_a_key_that_is_there_twice_is_refused_with_its_lines(tmp_path):
    message = message_of(lambda: train_config(tmp_path, "a: 1\nwindow_size: [5, null]\nb: 2\nwindow_size: [6, null]\n"))
    assert "gives 'window_size' twice (lines 2 and 4)" in message


@pytest.mark.parametrize("text", ["1e-5", "1.0e-5", "1E-5", "1.e-05", "0.00001"])
def test_numbers_without_a_dot_are_numbers(tmp_path, text):
    config = train_config(tmp_path, f"normalization_layer_epsilon: {text}\n")
    assert config.get("normalization_layer_epsilon", (float, int)) == 1e-5


@pytest.mark.parametrize("text", ["e5", "1e", "1e5x", "'1e-5'", "0x1e5"])
def test_what_only_looks_like_a_number_is_none(tmp_path, text):
    assert not isinstance(train_config(tmp_path, f"learning_rate: {text}\n").values["learning_rate"], float)


def bomb(levels=30):
    lines = ["a0: &a0 [5, 5, 5, 5]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join([*lines, f"window_size: *a{levels - 1}"])


STRANGE_YAML = {
    "aliases_of_aliases": (bomb(), "aliases written out"),
    "an_alias_of_itself": ("window_size: &a [*a]", "nests more than 50 levels"),
    "nested": ("window_size: " + "[" * 5000, "nests more than 50 levels"),
    "a_huge_number": ("vocab_size: " + "9" * 5000, "train.yml"),
    "a_list_as_key": ("[1, 2]: 3", "line 1"),
}


@pytest.mark.parametrize("case", STRANGE_YAML)
def test_strange_yaml_is_refused_soon(tmp_path, case):
    text, words = STRANGE_YAML[case]
    message = message_of(lambda: train_config(tmp_path, text))
    assert "train.yml" in message
    assert words in message


def test_a_long_value_is_not_quoted_whole(tmp_path):
    write_checkpoint(tmp_path / "src", maxtext_leaves(0, layers=2))
    numbers = list(range(2000))
    for text in (f"window_size: {[-1, *numbers]}", f"qk_norm: {numbers}", "decoder_block: " + "x" * 9999):
        (tmp_path / "train.yml").write_text(text)
        message = message_of(lambda: plan_maxtext(tmp_path / "src", train_config=tmp_path / "train.yml"))
        assert "..." in message


VALUES = {
    "epsilon_true": ("normalization_layer_epsilon: true", "normalization_layer_epsilon"),
    "epsilon_infinite": ("normalization_layer_epsilon: .inf", "normalization_layer_epsilon"),
    "epsilon_above_one": ("normalization_layer_epsilon: 1.5", "normalization_layer_epsilon"),
    "length_true": ("max_target_length: true", "max_target_length"),
    "length_negative": ("max_target_length: -7", "max_"),
}


@pytest.mark.parametrize("case", VALUES)
def test_bad_values_of_the_yaml_are_named_with_their_file(tmp_path, case):
    text, field = VALUES[case]
    write_checkpoint(tmp_path / "src", maxtext_leaves(0, layers=2))
    (tmp_path / "train.yml").write_text(text)
    message = message_of(lambda: plan_maxtext(tmp_path / "src", train_config=tmp_path / "train.yml"))
    assert "train.yml" in message
    assert field in message


@pytest.mark.parametrize("value", ["x" * 10**6, [[[[1]]]] * 10**5, 10**4000, {i: i for i in range(10**5)}])
def test_quoted_is_short(value):
    assert len(quoted(value)) <= 80


# --- config.json ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    tiny_model(num_hidden_layers=2).save_pretrained(folder)
    return folder


@pytest.fixture
def plan_with(hub, tmp_path):
    """Function that plans the conversion of a small model with another `config.json`: a text, or values to change."""

    def plan(content):
        (tmp_path / "model.safetensors").symlink_to(hub / "model.safetensors")
        if isinstance(content, dict):
            values = json.loads((hub / "config.json").read_text())
            if "num_hidden_layers" in content or "n_layer" in content:
                values.pop("layer_types")
                values.pop("num_hidden_layers")
            content = json.dumps({**values, **content})
        (tmp_path / "config.json").write_text(content)
        return plan_torch(tmp_path)

    return plan


LAYERS = [3, 10**6, 10**9, 2**62, 10**30]


@pytest.mark.parametrize("count", LAYERS)
@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer"])
def test_more_layers_than_the_weights_have_are_refused_soon(plan_with, tmp_path, key, count):
    message = message_of(lambda: plan_with({key: count}))
    assert f"{tmp_path / 'config.json'}: {key} is" in message
    assert "hold 2 layers" in message


def test_layers_are_compared_with_the_weights_on_the_way_to_maxtext_too(plan_with, tmp_path):
    with pytest.raises(ValueError):
        plan_with({"num_hidden_layers": 10**9})
    message = message_of(lambda: convert_to_maxtext(tmp_path, tmp_path.with_name("jax")))
    assert f"{tmp_path / 'config.json'}: num_hidden_layers is" in message


WRONG = {
    "layers_a_text": {"num_hidden_layers": "many"},
    "vocab_size_huge": {"vocab_size": 10**30},
    "vocab_size_overflows": {"vocab_size": 2**62},
    "hidden_size_huge": {"hidden_size": 10**30, "head_dim": 8},
    "intermediate_size_huge": {"intermediate_size": 10**30},
    "intermediate_size_overflows": {"intermediate_size": 2**62},
    "rope_base_a_text": {"rope_base": "abc"},
    "rope_base_true": {"rope_base": True},
    "rope_base_infinite": {"rope_base": float("inf")},
    "rope_base_negative": {"rope_base": -1},
    "rotary_pct_a_list": {"rotary_pct": []},
    "torch_dtype_unknown": {"torch_dtype": "abc"},
    "torch_dtype_a_list": {"torch_dtype": []},
    "dtype_of_no_tensor": {"dtype": "nn"},
    "num_attention_heads_negative": {"num_attention_heads": -4},
    "norm_eps_a_text": {"norm_eps": "small"},
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_are_refused_with_file_and_field(plan_with, tmp_path, case):
    message = message_of(lambda: plan_with(WRONG[case]))
    assert message.startswith(f"{tmp_path / 'config.json'}: ")
    assert message.count("config.json") == 1
    assert next(iter(WRONG[case])) in message


def test_rope_theta_in_its_group_is_named(plan_with):
    message = message_of(lambda: plan_with({"rope_parameters": {"rope_type": "default", "rope_theta": "abc"}}))
    assert "rope_parameters['rope_theta']" in message


STRANGE_JSON = {
    "a_key_twice": ('{"dim": 16, "n_layer": 2, "dim": 32}', "'dim' twice"),
    "a_key_twice_inside": ('{"rope_parameters": {"rope_theta": 1, "rope_theta": 2}}', "'rope_theta' twice"),
    "nested": ('{"a": ' + "[" * NESTED, "nested too deeply"),
    "a_list": ("[]", "JSON object"),
    "nothing": ("", "not valid JSON"),
    "a_long_model_type": (json.dumps({"model_type": "x" * 9999}), "model type"),
    "a_list_as_model_type": ('{"model_type": ["dcformer"]}', "model type"),
}


@pytest.mark.parametrize("case", STRANGE_JSON)
def test_strange_json_is_refused_by_file(plan_with, tmp_path, case):
    text, words = STRANGE_JSON[case]
    message = message_of(lambda: plan_with(text))
    assert str(tmp_path / "config.json") in message
    assert words in message


def test_json_with_a_byte_order_mark_is_read(plan_with, hub):
    assert plan_with("\ufeff" + (hub / "config.json").read_text()).config.num_hidden_layers == 2


def test_nested_metadata_of_other_files_is_refused_by_file(hub, tmp_path):
    (tmp_path / "config.json").write_bytes((hub / "config.json").read_bytes())
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": ' + "[" * NESTED)
    assert str(index) in message_of(lambda: plan_torch(tmp_path))
    for file in ("_METADATA", "params.decoder.decoder_norm.scale/.zarray"):
        item = tmp_path / file.split("/")[-1].strip(".") / "src"
        write_checkpoint(item, maxtext_leaves(0, layers=2))
        (item / file).write_text('{"tree_metadata": ' + "[" * NESTED)
        assert str(item / file) in message_of(lambda item=item: plan_maxtext(item))


# --- PAX --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pax(tmp_path):
    np.savez(tmp_path / "pax.npz", **pax_arrays())
    (tmp_path / "config.json").write_text(json.dumps(PAX_CONFIG))
    return tmp_path


@pytest.mark.parametrize("count", LAYERS)
def test_more_layers_than_pax_arrays_have_are_refused_soon(pax, count):
    (pax / "config.json").write_text(json.dumps({**PAX_CONFIG, "n_layer": count}))
    message = message_of(lambda: plan_pax(pax / "pax.npz", pax / "config.json"))
    assert f"{pax / 'config.json'}: n_layer is" in message


@pytest.mark.parametrize("changes", [{"rope_base": "abc"}, {"vocab_size": 10**30}, {"norm_eps": "small"}])
def test_wrong_values_for_pax_are_refused_with_file_and_field(pax, changes):
    (pax / "config.json").write_text(json.dumps({**PAX_CONFIG, **changes}))
    message = message_of(lambda: plan_pax(pax / "pax.npz", pax / "config.json"))
    assert message.startswith(f"{pax / 'config.json'}: ")
    assert next(iter(changes)) in message


def test_an_array_that_is_twice_in_an_npz_is_refused_by_name(pax):
    content = io.BytesIO()
    np.save(content, np.zeros((1, 16, 24), np.float32))
    for name in (f"{PAX_MLP}.npy", PAX_MLP):
        np.savez(pax / "pax.npz", **pax_arrays())
        with zipfile.ZipFile(pax / "pax.npz", "a") as archive, pytest.MonkeyPatch.context() as patch:
            patch.setattr("warnings.warn", lambda *arguments, **options: None)
            archive.writestr(name, content.getvalue())
        message = message_of(lambda: plan_pax(pax / "pax.npz", pax / "config.json"))
        assert str(pax / "pax.npz") in message
        assert f"{PAX_MLP[:10]}" in message
        assert "twice" in message


@pytest.mark.parametrize("form", ["npz", "npy"])
def test_arrays_of_the_other_byte_order_are_read(pax, form):
    swapped = {name: values.astype(values.dtype.newbyteorder()) for name, values in pax_arrays().items()}
    source = pax / "swapped"
    source.mkdir()
    if form == "npz":
        source /= "pax.npz"
        np.savez(source, **swapped)
    else:
        for name, values in swapped.items():
            np.save(source / f"{name}.npy", values)
    reports = [
        convert_pax(path, pax / f"out{number}", config=pax / "config.json")
        for number, path in enumerate([pax / "pax.npz", source])
    ]
    hashes = [[record["sha256"] for record in report.tensors] for report in reports]
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_flipped_bit_anywhere_in_the_arrays_of_an_npz_is_refused(pax, save):
    path = pax / "pax.npz"
    for which in (0, 7, -1):
        save(path, **pax_arrays())
        with zipfile.ZipFile(path) as archive:
            member = archive.infolist()[which]
        content = bytearray(path.read_bytes())
        content[member.header_offset + 30 + len(member.filename) + 20 + member.compress_size - 25] ^= 1
        path.write_bytes(content)
        message = message_of(lambda: convert_pax(path, pax / "out", config=pax / "config.json", verify=False))
        assert str(path) in message
