"""PAX checkpoints: a flat .npz, a folder of .npy files, or the zarr arrays of the checkpoint itself."""

import os
import re
from pathlib import Path

from .arrays import Source, file_stamps, open_npy_folder, open_npz
from .authors_torch import origins_of, read_config
from .mapping import PAX_ROWS, array_shape, axis_sizes, check_shape, find_rows, parts_of
from .orbax import open_orbax
from .plan import Checkpoint, Layout, Part, group_parts, listed
from .stores import is_remote


PAX_ROOT = "mdl_vars.params.lm."
_TRAINING_STATE = re.compile(r"(state\.)?(opt_states?[._].*|step|.*\.(count|mu|nu|m|v)\..*)")


def open_pax(source: str | os.PathLike, step: int | None = None) -> Source:
    """The arrays of a PAX checkpoint; arguments and errors as of [`convert_pax`]."""
    path = Path(source)
    if is_remote(source) or (path.is_dir() and not any(path.glob("*.npy"))):
        return open_orbax(source, step).source("PAX", _TRAINING_STATE)
    if path.is_dir():
        arrays, form, files = open_npy_folder(path), "PAX (folder of .npy files)", list(path.glob("*.npy"))
    else:
        arrays, form, files = open_npz(path), "PAX (flat .npz)", [path]
    state = [name for name in arrays if _TRAINING_STATE.fullmatch(name)]
    weights = {name: array for name, array in arrays.items() if name not in state}
    return Source(form, str(source), weights, file_stamps(files), training_state=state)


def read_pax(source: Source, config: str | os.PathLike | None) -> Checkpoint:
    """The model of a PAX checkpoint, by a `config.json` in the authors' keys or ours."""
    where = source.location
    if config is None:
        raise ValueError(f"{where!r} is a PAX checkpoint, which needs its configuration: pass --config.")
    ours = read_config(Path(config))
    for name in source.arrays:
        if not name.removeprefix("state.").startswith(PAX_ROOT):
            raise ValueError(f"{where!r} holds {name!r}, neither below {PAX_ROOT!r} nor optimizer state.")
    matches = {name: find_rows(PAX_ROWS, name.split(PAX_ROOT, 1)[1]) for name in source.arrays}
    if unknown := sorted(name for name, (rows, _) in matches.items() if not rows):
        raise ValueError(f"{where} holds arrays that a DCFormer does not have: {listed(unknown)}.")
    per_block = 1 + max((sub for _, sub in matches.values()), default=0)
    sizes, layers = axis_sizes(ours), ours.num_hidden_layers
    if layers % per_block != 0:
        raise ValueError(f"num_hidden_layers is {layers}, which blocks of {per_block} layers in {where} do not divide.")
    parts: list[tuple[str, Part]] = []
    ignored = dict.fromkeys(sorted(source.training_state), "optimizer state")
    for index, sub, name in sorted((PAX_ROWS.index(row), sub, name) for name, ((row,), sub) in matches.items()):
        row, shape = PAX_ROWS[index], source.arrays[name].shape
        expected = array_shape(row, sizes, 0, layers // per_block)
        axes = row.axes.split()
        if "vocab" in axes and len(shape) == len(expected):
            axis = axes.index("vocab")
            if shape[axis] > expected[axis]:  # padded to a multiple that shards well
                rows = f"{name}, {expected[axis]} to {shape[axis] - 1} of axis {axis}"
                ignored[rows] = "padding of the vocabulary"
                shape = (*shape[:axis], expected[axis], *shape[axis + 1 :])
        check_shape(name, shape, row, expected, where)
        parts += parts_of(row, name, sizes, range(sub, layers, per_block), 0)
    return Checkpoint(source, ours, origins_of(ours, Path(config).name), Layout(group_parts(parts), ignored))
