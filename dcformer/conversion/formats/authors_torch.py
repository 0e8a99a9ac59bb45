"""The authors' torch files to plans: renaming, and joining projections where old files have them split.

Folders of ours are read in the same way; their tensors keep their names.
"""

from __future__ import annotations

import os
import re

from ...loading_dcformer import AUTHORS_NAMES, AUTHORS_OUTPUT_NAMES
from ..mapping import axis_sizes, part_offset
from ..pieces import Piece
from ..plan import Origin, Plan, complete
from .config_file import make_config, read_values, shapes_of
from .contents import Contents
from .transformers_folder import count_layers, local_folder, open_weights


# What the authors' files hold besides parameters.
_IGNORED = {
    r"dyn_w_proj\.(dw_m|qkw_m)$": "merged copy of dw1, dd and qkw, out of date in published files",
    r"dyn_w_proj\.((pre|post)_proj\.w|sw)$": "static projection that no configuration of the authors' switches on",
    r"attention\.kv_cache\.": "cache of a generation",
    r"(^|\.)(freqs_cis|causal_mask|mask_cache)$": "table computed from the configuration",
}
_SPLIT = re.compile(r"(layers\.\d+)\.attention\.w([qkv])\.(weight|bias)")
_PARTS = {"q": "query", "k": "key", "v": "value"}


def plan_torch(source: str | os.PathLike, *, dtype: str = "keep") -> Plan:
    """
    Plan the conversion of a folder of the authors' torch files (or of our own).

    Args:
        source: A folder with `config.json` and safetensors or torch weights, or a name on the Hub.
        dtype (`str`): dtype of the parameters; `"keep"` for that of the files.

    Raises:
        FileNotFoundError, ValueError: if it cannot be converted whole; the message says why.
    """
    folder = local_folder(source)
    path = folder / "config.json"
    values = read_values(path)
    leaves = open_weights(folder)
    ignored: dict[str, str] = {}
    config = make_config(values, path, count_layers(leaves))
    shapes = shapes_of(config, path)
    for name in list(leaves):
        for pattern, reason in _IGNORED.items():
            if re.search(pattern, name):
                ignored[name] = reason
                del leaves[name]
                break
    plan = Plan(
        config,
        leaves,
        [],
        Contents("torch files", str(folder), leaves).source(),
        ignored=ignored,
        origins=[Origin(name, value, "config.json") for name, value in sorted(config.to_diff_dict().items())],
    )
    table = _NAMES[config.model_type]
    for name, leaf in leaves.items():
        if match := _SPLIT.fullmatch(name):
            layer, letter, kind = match.groups()
            sizes = axis_sizes(config)
            if kind == "bias":
                sizes = {**sizes, "embed": 1}
            offset, words = part_offset(_PARTS[letter], sizes), f"as its {_PARTS[letter]} part"
            parameter = f"model.{layer}.self_attn.qkv_proj.{kind}"
        else:
            parameter, offset = _our_name(name, table), 0
            words = "as is" if parameter == name else "renamed"
        if parameter in shapes and offset == 0 and not _SPLIT.fullmatch(name) and leaf.shape != shapes[parameter]:
            raise ValueError(
                f"{name} has shape {leaf.shape} in {leaf.where} but {shapes[parameter]} by config.json; one of the two "
                "is not from this model."
            )
        plan.pieces.append(Piece(name, leaf.whole(), tuple(range(len(leaf.shape))), parameter, offset, words))
    position = {name: i for i, name in enumerate(shapes)}
    plan.pieces.sort(key=lambda piece: (position.get(piece.parameter, -1), piece.offset))
    return complete(plan, dtype, shapes)


def torch_contents(source: str | os.PathLike, step: int | None = None) -> Contents:
    """
    What a folder of torch files or safetensors stores.

    Args:
        source: As in [`plan_torch`].
        step: Torch files belong to no step; accepted as by the other formats.

    Raises:
        FileNotFoundError, ValueError: if there are no weights or they are damaged.
    """
    folder = local_folder(source)
    return Contents("torch files", str(folder), open_weights(folder))


def _with_prefix(names: dict[str, str]) -> dict[str, str]:
    """Renaming parts that start a name start it below `model.` in a model with a head."""
    return {old: new if old.startswith(".") else f"model.{new}" for old, new in names.items()}


_NAMES = {model_type: {**_with_prefix(names), **AUTHORS_OUTPUT_NAMES} for model_type, names in AUTHORS_NAMES.items()}


def _our_name(name: str, table: dict[str, str]) -> str:
    """Our name of one of the authors' parameters; a name of ours stays."""
    for old, new in table.items():
        if not old.startswith("."):
            name = new + name[len(old) :] if name.startswith(old) else name
        elif old.endswith("."):
            name = name.replace(old, new)
        else:
            name = name[: -len(old)] + new if name.endswith(old) else name
    return f"model.{name}" if re.match(r"(layers\.\d+|norm)\.", name) else name
