"""PAX checkpoints to plans: a flat .npz, a folder of .npy files, or the zarr arrays of the checkpoint itself."""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from ..common.quoting import quoted
from .config_file import make_config, read_values, shapes_of
from .leaves import ArrayLeaf, Leaf
from .mapping import PAX_ROWS, axis_sizes, leaf_shape, piece_for
from .orbax_checkpoint import open_orbax
from .plan import Origin, Plan, complete, listed
from .stores import is_remote


_SUB_BLOCK = re.compile(r"\.x_layers_(\d+)\.")
_ROOT = "mdl_vars.params.lm."
_IGNORED = re.compile(r"(state\.)?(opt_states?[._].*|step|.*\.(count|mu|nu|m|v)\..*)")
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
        dtype (`str`): Of the parameters; `"keep"` for that of each array.

    Raises:
        FileNotFoundError, ValueError: if it cannot be converted whole; the message says why.
    """
    values = read_values(Path(config))
    arrays, origin = open_pax(source, step)
    ignored, leaves = {}, {}
    for name, leaf in arrays.items():
        if _IGNORED.fullmatch(name):
            ignored[name] = "optimizer state"
        elif _ROOT in name and name.removeprefix("state.").startswith(_ROOT):
            leaves[name] = leaf
        else:
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
        origin,
        ignored=ignored,
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
        matching = [(row, row.matches(below)) for row in PAX_ROWS if row.matches(below) is not None]
        if matching:
            found.append((PAX_ROWS.index(matching[0][0]), matching[0][1], name))
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


def open_pax(source, step: int | None) -> tuple[dict[str, Leaf], dict[str, Any]]:
    """The arrays of a PAX checkpoint, and what a report says of where they come from."""
    path = Path(source)
    if not is_remote(source):
        if not path.exists():
            raise FileNotFoundError(f"There is no PAX checkpoint {str(source)!r}; check the path.")
        if path.is_file():
            return _open_npz(path), {"format": "PAX (flat .npz)", "location": str(source), "step": None}
        if any(path.glob("*.npy")):
            source = {"format": "PAX (folder of .npy files)", "location": str(source), "step": None}
            return _open_npy_folder(path), source
    checkpoint = open_orbax(source, step)
    names = [name for name in checkpoint.names() if not _IGNORED.fullmatch(name)]
    origin = checkpoint.source(f"PAX ({checkpoint.format})")
    return {name: checkpoint.leaf(name) for name in names}, origin


def _open_npz(path: Path) -> dict[str, Leaf]:
    headers: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                key = info.filename.removesuffix(".npy")
                if key in headers:
                    raise ValueError(f"it holds {quoted(key)} twice")
                headers[key] = _npy_header(archive.open(info))
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, RuntimeError, NotImplementedError, zlib.error) as error:
        raise ValueError(f"{path} is not a complete .npz file of arrays ({error}); copy it again.") from error

    def loader(key: str):
        def load():
            with np.load(path, allow_pickle=False) as arrays:
                return arrays[key]

        return load

    return {key: ArrayLeaf(key, str(path), shape, dtype, loader(key)) for key, (shape, dtype) in headers.items()}


def _open_npy_folder(folder: Path) -> dict[str, Leaf]:
    leaves: dict[str, Leaf] = {}
    for path in sorted(folder.glob("*.npy")):
        try:
            with path.open("rb") as file:
                shape, dtype = _npy_header(file)
        except (ValueError, OSError, EOFError) as error:
            raise ValueError(f"{path} is not a complete .npy file ({error}); copy it again.") from error
        key = path.name.removesuffix(".npy")

        def load(path=path):
            return np.load(path, allow_pickle=False, mmap_mode="r")

        leaves[key] = ArrayLeaf(key, str(path), shape, dtype, load)
    return leaves


def _npy_header(file) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("it holds pickled objects, which are not read")
    return shape, dtype
