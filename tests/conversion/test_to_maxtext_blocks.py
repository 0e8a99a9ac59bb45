"""Layers per block survive the way from MaxText and back, also where the windows do not tell them."""

import json

import pytest
import torch
import yaml
from golden_runs import JAX_RUNS
from orbax_writer import maxtext_leaves, write_checkpoint
from test_to_maxtext import assert_identical, read_params

from dcformer.conversion import convert_maxtext, convert_to_maxtext, convert_torch
from dcformer.conversion.formats.maxtext import plan_maxtext


@pytest.mark.parametrize("name", JAX_RUNS)
def test_every_golden_run_comes_back_without_options_on_its_blocks(fixtures, tmp_path, name):
    root = fixtures / "golden" / "A_jax"
    info = json.loads((root / JAX_RUNS[name] / "info.json").read_text())["config"]
    values = {key: info[key] for key in ("window_size", "pre_compose", "post_compose") if key in info}
    (tmp_path / "run.yml").write_text(yaml.safe_dump(values))
    source = root / name / "checkpoints"
    convert_maxtext(source, tmp_path / "ours", train_config=tmp_path / "run.yml", verify=False)
    original = read_params(source)
    scanned = any(".layers." in array for array in original)
    report = convert_to_maxtext(tmp_path / "ours", tmp_path / "back", scan_layers=scanned)
    assert_identical(read_params(tmp_path / "back"), original)
    assert report.step == plan_maxtext(source).source["step"]


@pytest.fixture(params=[1, 2, 3, 6], ids="{} per block".format)
def equal_layers(request, tmp_path):
    """A run of six layers that all see everything, in blocks of n, and a folder of ours made from it."""
    leaves = maxtext_leaves(0, layers=6, per_block=request.param)
    write_checkpoint(tmp_path / "jax" / "7" / "state", leaves)
    (tmp_path / "run.yml").write_text(yaml.safe_dump({"window_size": [None] * request.param}))
    convert_maxtext(tmp_path / "jax", tmp_path / "ours", train_config=tmp_path / "run.yml")
    return request.param, tmp_path


def test_blocks_of_equal_layers_come_back(equal_layers):
    n, folder = equal_layers
    convert_to_maxtext(folder / "ours", folder / "back")
    assert_identical(read_params(folder / "back"), read_params(folder / "jax"))
    assert yaml.safe_load((folder / "back" / "train_config.yml").read_text())["num_layers_per_block"] == n


def test_blocks_and_step_survive_a_rewriting(equal_layers):
    _, folder = equal_layers
    convert_torch(folder / "ours", folder / "rewritten", max_shard_size="10KB")
    report = convert_to_maxtext(folder / "rewritten", folder / "back")
    assert report.step == 7
    assert_identical(read_params(folder / "back"), read_params(folder / "jax"))


def test_the_option_wins_over_the_source(equal_layers):
    _, folder = equal_layers
    convert_to_maxtext(folder / "ours", folder / "back", layers_per_block=2)
    assert read_params(folder / "back")["params.decoder.layers.mlp_1.wo.kernel"].shape[1] == 3


@pytest.mark.parametrize("remembered", [2, 4, 10**30], ids=str)
def test_blocks_that_do_not_fit_the_windows_are_not_used(tmp_path, remembered):
    """The windows in config.json may have been changed since."""
    write_checkpoint(tmp_path / "jax" / "7" / "state", maxtext_leaves(0, layers=6, per_block=2))
    (tmp_path / "run.yml").write_text(yaml.safe_dump({"window_size": [None, None]}))
    convert_maxtext(tmp_path / "jax", tmp_path / "ours", train_config=tmp_path / "run.yml", verify=False)
    for name, change in (
        ("config.json", lambda values: values.update(sliding_window=4, layer_types=KINDS)),
        ("conversion_report.json", lambda values: values["source"].update(layers_per_block=remembered)),
    ):
        values = json.loads((tmp_path / "ours" / name).read_text())
        change(values)
        (tmp_path / "ours" / name).write_text(json.dumps(values))
    convert_to_maxtext(tmp_path / "ours", tmp_path / "back")
    found = read_params(tmp_path / "back")
    assert found["params.decoder.layers.mlp_2.wo.kernel"].shape[1] == 2
    assert torch.equal(
        found["params.token_embedder.embedding"], read_params(tmp_path / "jax")["params.token_embedder.embedding"]
    )


KINDS = ["sliding_attention", "full_attention", "full_attention"] * 2
