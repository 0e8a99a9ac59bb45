"""PAX checkpoints to plans: a flat .npz, a folder of .npy files, or the zarr arrays of the checkpoint itself."""

import os
import re
from pathlib import Path
from typing import Any

from .arrays import SourceArray, file_stamps, open_npy_folder, open_npz
from .authors_torch import read_config
from .mapping import PAX_ROWS, add_parts, array_shape, axis_sizes, check_shape, find_rows
from .orbax import open_orbax
from .plan import Origin, Plan, complete, listed
from .stores import is_remote


PAX_ROOT = "mdl_vars.params.lm."
TRAINING_STATE = re.compile(r"(state\.)?(opt_states?[._].*|step|.*\.(count|mu|nu|m|v)\..*)")


def plan_pax(
    source: str | os.PathLike, config: str | os.PathLike, *, step: int | None = None, dtype: str = "keep"
) -> Plan:
    """The plan of a PAX checkpoint; arguments and errors as of [`convert_pax`]."""
    model_config = read_config(Path(config))
    arrays, training_state, report, stamps = open_pax(source, step)
    for name in arrays:
        if not name.removeprefix("state.").startswith(PAX_ROOT):
            raise ValueError(f"{str(source)!r} holds {name!r}, neither below {PAX_ROOT!r} nor optimizer state.")
    plan = Plan(
        model_config,
        arrays,
        report,
        stamps,
        ignored=dict.fromkeys(sorted(training_state), "optimizer state"),
        origins=[Origin(name, value, Path(config).name) for name, value in sorted(model_config.to_diff_dict().items())],
    )
    _add_parts(plan)
    return complete(plan, dtype)


def open_pax(
    source: str | os.PathLike, step: int | None = None
) -> tuple[dict[str, SourceArray], list[str], dict[str, Any], list]:
    """The parameters, the names of the training state, the report's `source`, and the files' stamps."""
    path = Path(source)
    if is_remote(source) or (path.is_dir() and not any(path.glob("*.npy"))):
        checkpoint = open_orbax(source, step)
        state = [name for name in checkpoint.names if TRAINING_STATE.fullmatch(name)]
        arrays = checkpoint.open([name for name in checkpoint.names if name not in state])
        return arrays, state, checkpoint.source("PAX"), checkpoint.store.stamps(checkpoint.folder)
    if path.is_dir():
        arrays, form, files = open_npy_folder(path), "PAX (folder of .npy files)", list(path.glob("*.npy"))
    else:
        arrays, form, files = open_npz(path), "PAX (flat .npz)", [path]
    state = [name for name in arrays if TRAINING_STATE.fullmatch(name)]
    arrays = {name: array for name, array in arrays.items() if name not in state}
    return arrays, state, {"format": form, "location": str(source), "step": None}, file_stamps(files)


def _add_parts(plan: Plan) -> None:
    sizes, where = axis_sizes(plan.config), plan.source["location"]
    matches = {name: find_rows(PAX_ROWS, name.split(PAX_ROOT, 1)[1]) for name in plan.arrays}
    if unknown := sorted(name for name, (rows, _) in matches.items() if not rows):
        raise ValueError(f"{where} holds arrays that a DCFormer does not have: {listed(unknown)}.")
    per_block = 1 + max((sub for _, sub in matches.values()), default=0)
    layers = plan.config.num_hidden_layers
    if layers % per_block != 0:
        raise ValueError(f"num_hidden_layers is {layers}, which blocks of {per_block} layers in {where} do not divide.")
    for index, sub, name in sorted((PAX_ROWS.index(row), sub, name) for name, ((row,), sub) in matches.items()):
        row, shape = PAX_ROWS[index], plan.arrays[name].shape
        expected = array_shape(row, sizes, 0, layers // per_block)
        axes = row.axes.split()
        if "vocab" in axes and len(shape) == len(expected):
            axis = axes.index("vocab")
            if shape[axis] > expected[axis]:  # padded to a multiple that shards well
                rows = f"{name}, {expected[axis]} to {shape[axis] - 1} of axis {axis}"
                plan.ignored[rows] = "padding of the vocabulary"
                shape = (*shape[:axis], expected[axis], *shape[axis + 1 :])
        check_shape(name, shape, row, expected, where)
        add_parts(plan, [row], name, sizes, range(sub, layers, per_block), 0)
