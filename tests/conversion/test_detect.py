"""Which format a checkpoint has, whatever its place is called; and what each format lists without a model."""

import json

import numpy as np
import pytest
from orbax_writer import maxtext_leaves, write_checkpoint
from test_convert_errors import PAX_CONFIG, pax_arrays
from tiny_models import tiny_model

from dcformer.conversion import convert_pax, convert_torch, inspect_checkpoint
from dcformer.conversion.detect import detect_format, list_contents, open_checkpoint


STATE = {"step": np.array(7, np.int32), "opt_states_0.no_prefix_0.count": np.zeros((), np.int32)}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A checkpoint of every form, by its name."""
    folder = tmp_path_factory.mktemp("checkpoints")
    write_checkpoint(folder / "maxtext_run" / "7" / "state", maxtext_leaves(0, layers=2))
    write_checkpoint(folder / "pax_zarr", {**pax_arrays(), **STATE})
    np.savez(folder / "pax.npz", **pax_arrays(), **STATE)
    (folder / "pax_npy").mkdir()
    for name, values in pax_arrays().items():
        np.save(folder / "pax_npy" / f"{name}.npy", values)
    tiny_model(num_hidden_layers=1).save_pretrained(folder / "transformers")
    (folder / "config.json").write_text(json.dumps(PAX_CONFIG))
    return folder


FORMATS = {
    "maxtext_run": "maxtext",
    "maxtext_run/7/state": "maxtext",
    "pax_zarr": "pax",
    "pax.npz": "pax",
    "pax_npy": "pax",
    "transformers": "torch",
}


@pytest.mark.parametrize("place", FORMATS)
def test_the_format_is_told_by_what_is_there(checkpoints, place):
    assert detect_format(checkpoints / place) == FORMATS[place]


def test_what_is_no_checkpoint_is_refused_by_name(checkpoints, tmp_path):
    with pytest.raises(ValueError, match=r"config\.json' is a file; give the folder"):
        detect_format(checkpoints / "config.json")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        detect_format(tmp_path / "nowhere")


@pytest.mark.parametrize("place", ["pax_zarr", "pax.npz"])
def test_the_training_state_of_pax_is_listed_and_accounted_for(checkpoints, place, tmp_path):
    contents = list_contents(checkpoints / place)
    assert contents.state == ["step"] and contents.optimizer == ["opt_states_0.no_prefix_0.count"]
    assert contents.leaves.keys() == pax_arrays().keys()
    assert inspect_checkpoint(checkpoints / place).optimizer_arrays == 1
    report = convert_pax(checkpoints / place, tmp_path / "model", config=checkpoints / "config.json", verify=False)
    assert set(STATE) <= report.ignored.keys()


def test_pax_without_its_configuration_is_listed_but_cannot_be_opened(checkpoints):
    with pytest.raises(ValueError, match="needs its configuration: pass --config"):
        open_checkpoint(checkpoints / "pax.npz")
    found = inspect_checkpoint(checkpoints / "pax.npz")
    assert found.note.endswith("pass --config.") and len(found.tensors) == len(pax_arrays())


def test_an_unknown_option_is_an_error_before_anything_is_read(checkpoints, tmp_path):
    with pytest.raises(TypeError, match="'shard_size' is no option of a conversion; choose from max_shard_size, "):
        convert_torch(checkpoints / "nowhere", tmp_path / "out", shard_size="1GB")
