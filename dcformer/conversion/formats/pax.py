"""PAX checkpoints to plans: a flat .npz, a folder of .npy files, or the zarr arrays of the checkpoint itself."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ..leaves import Leaf
from ..mapping import PAX_ROWS, axis_sizes, leaf_shape, piece_for
from ..plan import Origin, Plan, complete, listed
from ..stores import is_remote
from .config_file import make_config, read_values, shapes_of
from .contents import Contents
from .numpy_files import open_npy_folder, open_npz
from .orbax import open_orbax


_SUB_BLOCK = re.compile(r"\.x_layers_(\d+)\.")
_ROOT = "mdl_vars.params.lm."
_TRAINING_STATE = re.compile(r"(state\.)?(opt_states?[._].*|step|.*\.(count|mu|nu|m|v)\..*)")
# Their vocabulary is longer than the model's, up to a multiple that shards well.
_PADDED = {"embedding_lookup.emb_var", "softmax.logits_ffn.linear.w"}


def plan_pax(
    source: str | os.PathLike, config: str | os.PathLike, *, step: int | None = None, dtype: str = "keep"
) -> Plan:
    """
    Plan the conversion of a PAX checkpoint.

    Args:
        source: A flat `.npz`, a folder of `.npy` files named by their keys, or a checkpoint folder of zarr arrays.
        config: `config.json` in the authors' keys or ours. A PAX tree says nothing of windows, epsilons or RoPE.
        step (`int`, *optional*): Step of a run folder. None: the latest.
        dtype (`str`): dtype of the parameters; `"keep"` for that of each array.

    Raises:
        FileNotFoundError, ValueError: if it cannot be converted whole; the message says why.
    """
    values = read_values(Path(config))
    contents = pax_contents(source, step)
    leaves = contents.leaves
    for name in leaves:
        if not name.removeprefix("state.").startswith(_ROOT):
            raise ValueError(
                f"{str(source)!r} holds {name!r}, which is neither below {_ROOT!r} nor optimizer state; it is not a "
                "PAX DCFormer checkpoint."
            )
    if not leaves:
        raise ValueError(f"{str(source)!r} holds no array below {_ROOT!r}; it is not a PAX DCFormer checkpoint.")
    where = f"the arrays of {str(source)!r}, from x_layers_0 on,"
    model_config = make_config(values, Path(config), _count_layers(leaves), where)
    plan = Plan(
        model_config,
        leaves,
        [],
        contents.source(),
        ignored=dict.fromkeys(sorted([*contents.optimizer, *contents.state]), "optimizer state"),
        origins=[Origin(name, value, Path(config).name) for name, value in sorted(model_config.to_diff_dict().items())],
    )
    shapes = shapes_of(model_config, Path(config))
    _add_pieces(plan)
    return complete(plan, dtype, shapes)


def _count_layers(leaves: dict[str, Leaf]) -> int | None:
    """How many layers the arrays hold; None if it cannot be told."""
    stacks = [(int(match[1]), leaf.shape) for name, leaf in leaves.items() if (match := _SUB_BLOCK.search(name))]
    if not stacks or not all(shape for _, shape in stacks):
        return None
    return (1 + max(sub for sub, _ in stacks)) * max(shape[0] for _, shape in stacks)


def _add_pieces(plan: Plan) -> None:
    sizes = axis_sizes(plan.config)
    found, unknown = [], []
    for name in plan.leaves:
        below = name.split(_ROOT, 1)[1]
        matching = [(index, sub) for index, row in enumerate(PAX_ROWS) if (sub := row.matches(below)) is not None]
        if matching:
            found.append((*matching[0], name))
        else:
            unknown.append(name)
    where = plan.source["location"]
    if unknown:
        raise ValueError(f"{where} holds arrays that a DCFormer does not have: {listed(sorted(unknown))}.")
    per_block = 1 + max((sub for row, sub, _ in found if PAX_ROWS[row].per_layer), default=0)
    layers = plan.config.num_hidden_layers
    if layers % per_block != 0:
        raise ValueError(
            f"num_hidden_layers is {layers} in the configuration, which blocks of {per_block} layers "
            f"(x_layers_0 to x_layers_{per_block - 1} in {where}) do not divide."
        )
    blocks = layers // per_block
    for row_index, sub, name in sorted(found):
        row, leaf = PAX_ROWS[row_index], plan.leaves[name]
        expected = leaf_shape(row, sizes, 0, blocks)
        padded = row.axes.split().index("vocab") if row.leaf in _PADDED and len(leaf.shape) == len(expected) else None
        if padded is not None and leaf.shape[padded] > expected[padded]:
            plan.ignored[f"{name}, {expected[padded]} to {leaf.shape[padded] - 1} of axis {padded}"] = (
                "padding of the vocabulary"
            )
            actual = leaf.shape[:padded] + (expected[padded],) + leaf.shape[padded + 1 :]
        else:
            actual = leaf.shape
        if actual != expected:
            raise ValueError(
                f"{name} has shape {leaf.shape} in {where}, but by the configuration it must be {expected} "
                f"({row.axes}); correct the configuration."
            )
        if not row.per_layer:
            plan.pieces.append(piece_for(row, name, row.parameter, sizes))
            continue
        for block in range(blocks):
            parameter = f"model.layers.{block * per_block + sub}.{row.parameter}"
            plan.pieces.append(piece_for(row, name, parameter, sizes, 0, block))


def pax_contents(source: str | os.PathLike, step: int | None = None) -> Contents:
    """
    What a PAX checkpoint stores.

    Args:
        source, step: As in [`plan_pax`].

    Raises:
        FileNotFoundError, ValueError: if there is no checkpoint or its arrays cannot be listed.
    """
    path = Path(source)
    if not is_remote(source):
        if not path.exists():
            raise FileNotFoundError(f"There is no PAX checkpoint {str(source)!r}; check the path.")
        if path.is_file():
            return _by_kind("PAX (flat .npz)", str(source), open_npz(path))
        if any(path.glob("*.npy")):
            return _by_kind("PAX (folder of .npy files)", str(source), open_npy_folder(path))
    checkpoint = open_orbax(source, step)
    names = checkpoint.names()
    opened = {name: checkpoint.leaf(name) for name in names if not _TRAINING_STATE.fullmatch(name)}
    contents = _by_kind(f"PAX ({checkpoint.format})", checkpoint.store.location, {**dict.fromkeys(names), **opened})
    contents.step, contents.skipped_steps = checkpoint.step, checkpoint.skipped_steps
    return contents


def _by_kind(format: str, location: str, arrays: Mapping[str, Leaf | None]) -> Contents:
    """The contents by kind; the arrays of the training state need not be open."""
    contents = Contents(format, location, {})
    for name, leaf in arrays.items():
        if not _TRAINING_STATE.fullmatch(name) and leaf is not None:
            contents.leaves[name] = leaf
        elif name.removeprefix("state.") == "step":
            contents.state.append(name)
        else:
            contents.optimizer.append(name)
    return contents
