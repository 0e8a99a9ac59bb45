"""Arrays in many chunks, read and written in parts smaller than a parameter, give the same files."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from orbax_writer import maxtext_leaves, write_checkpoint

from dcformer.conversion import convert_maxtext, leaves, shard_writer
from dcformer.conversion.pieces import Piece


CHUNKS = {
    "whole": None,
    "first_axis": lambda name, shape: (max(1, shape[0] // 4), *shape[1:]) if shape else (),
    "one_layer": lambda name, shape: (shape[0], 1, *shape[2:]) if ".layers." in name else shape,
    "last_axis": lambda name, shape: (*shape[:-1], max(1, shape[-1] // 2)) if shape else (),
    "uneven": lambda name, shape: tuple(-(-size * 2 // 3) for size in shape),
}


@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_parts_of_any_size_give_the_same_tensors(tmp_path, monkeypatch, chunks, dtype):
    write_checkpoint(tmp_path / "whole" / "3" / "state", maxtext_leaves(1))
    write_checkpoint(tmp_path / "parts" / "3" / "state", maxtext_leaves(1), chunks=CHUNKS[chunks])
    expected = convert_maxtext(tmp_path / "whole", tmp_path / "expected", dtype=dtype)
    monkeypatch.setattr(leaves, "_READ_BYTES", 64)
    monkeypatch.setattr(shard_writer, "PART_BYTES", 128)
    report = convert_maxtext(tmp_path / "parts", tmp_path / "model", dtype=dtype, workers=3)
    keys = ("parameter", "sha256", "max_rounding_error")
    found = {tuple(record[key] for key in keys) for record in report.tensors}
    assert found == {tuple(record[key] for key in keys) for record in expected.tensors}


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_piece_goes_and_comes_back(data):
    """Any box, order of axes and parts: the parameter holds the transposed box, and the inverse restores it."""
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    box = []
    for size in shape:
        start = data.draw(st.integers(0, size - 1))
        box.append((start, data.draw(st.integers(start + 1, size))))
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    offset = data.draw(st.integers(0, 3))
    piece = Piece("leaf", tuple(box), order, "parameter", offset, "")
    values = torch.randn(shape)
    whole = tuple((0, size) for size in shape)
    parameter = torch.zeros(offset + piece.size + 2)
    parts = list(piece.split(data.draw(st.integers(1, piece.size))))
    for part in parts:
        run = parameter[part.offset : part.offset + part.size]
        assert part.write_to_parameter(values, whole, run) == 0.0
    selected = values[tuple(slice(*interval) for interval in box)]
    assert torch.equal(parameter[offset : offset + piece.size].view(piece.shape), selected.permute(order))
    assert not parameter[:offset].any() and not parameter[offset + piece.size :].any()
    back = torch.zeros(shape)
    for part in parts:
        part.write_to_leaf(parameter[part.offset : part.offset + part.size], back, whole)
    assert torch.equal(back[tuple(slice(*interval) for interval in box)], selected)
    assert back.count_nonzero() == selected.count_nonzero()
