"""PAX checkpoints: a flat .npz, a folder of .npy files, or the zarr arrays of the checkpoint itself."""

import os
import re
from dataclasses import replace
from pathlib import Path

from .arrays import Source, file_stamps, open_npy_folder, open_npz
from .authors_torch import origins_of, read_config
from .mapping import PAX_ROWS, axis_sizes, find_entries, lay_out
from .orbax import open_orbax
from .plan import Checkpoint, Layout, group_parts
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
    entries = find_entries(PAX_ROWS, source, "PAX")
    per_block = 1 + max(entry.sub for entry in entries.values())
    sizes, layers = axis_sizes(ours), ours.num_hidden_layers
    if layers % per_block != 0:
        raise ValueError(f"num_hidden_layers is {layers}, which blocks of {per_block} layers in {where} do not divide.")
    ignored = dict.fromkeys(sorted(source.training_state), "optimizer state")
    for name, entry in entries.items():
        axes, shape = entry.rows[0].axes.split(), entry.shape
        if "vocab" in axes and len(shape) == len(axes):
            axis, size = axes.index("vocab"), sizes["vocab"]
            if shape[axis] > size:  # padded to a multiple that shards well
                ignored[f"{name}, {size} to {shape[axis] - 1} of axis {axis}"] = "padding of the vocabulary"
                entries[name] = replace(entry, shape=(*shape[:axis], size, *shape[axis + 1 :]))
    parts = lay_out(entries, sizes, layers, per_block, 0, where)
    return Checkpoint(source, ours, origins_of(ours, Path(config).name), Layout(group_parts(parts), ignored))
