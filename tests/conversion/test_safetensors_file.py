"""Safetensors files are read by the library's slices, box by box, and refused where they are cut short."""

import pytest
import torch
from safetensors.torch import save_file

from dcformer.conversion.formats.safetensors_file import list_safetensors


TENSORS = {
    "cube": torch.arange(120, dtype=torch.bfloat16).view(4, 5, 6),
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 4),
}


@pytest.fixture
def path(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("name", TENSORS)
def test_whole_tensors_of_any_shape(path, name):
    leaf = {leaf.name: leaf for leaf in list_safetensors(path)}[name]
    values = leaf.read(leaf.whole())
    assert (leaf.shape, leaf.dtype) == (tuple(TENSORS[name].shape), TENSORS[name].dtype)
    assert values.dtype == leaf.dtype and torch.equal(values, TENSORS[name])


@pytest.mark.parametrize("box", [((1, 3), (0, 5), (0, 6)), ((0, 4), (4, 5), (2, 3)), ((3, 4), (0, 1), (5, 6))], ids=str)
def test_a_box_is_a_slice(path, box):
    leaf = {leaf.name: leaf for leaf in list_safetensors(path)}["cube"]
    assert torch.equal(leaf.read(box), TENSORS["cube"][tuple(slice(*interval) for interval in box)])


def test_a_file_that_is_cut_short_after_it_was_listed_is_one_sentence(path):
    leaves = list_safetensors(path)
    path.write_bytes(path.read_bytes()[:-5])
    for leaf in leaves:
        with pytest.raises(ValueError, match=r"model\.safetensors is truncated, .*copy or download it again\.$"):
            leaf.read(leaf.whole())
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated"):
        list_safetensors(path)


def test_what_was_read_does_not_change_with_the_file(path):
    leaf = {leaf.name: leaf for leaf in list_safetensors(path)}["cube"]
    values = leaf.read(leaf.whole())
    path.unlink()
    assert torch.equal(values, TENSORS["cube"])
