"""The authors' torch checkpoints to plans: renaming, and joining projections where old files have them split."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..loading_dcformer import AUTHORS_NAMES
from .config_file import make_config, read_config, read_values, shapes_of
from .mapping import axis_sizes, part_offset
from .pieces import Piece
from .plan import Origin, Plan, complete
from .weights_folder import count_layers, open_weights


__all__ = ["local_folder", "our_name", "plan_hub", "read_config"]


# What the authors' files hold besides parameters.
_IGNORED = {
    r"dyn_w_proj\.(dw_m|qkw_m)$": "merged copy of dw1, dd and qkw, out of date in published files",
    r"dyn_w_proj\.((pre|post)_proj\.w|sw)$": "static projection that no configuration of the authors' switches on",
    r"attention\.kv_cache\.": "cache of a generation",
    r"(^|\.)(freqs_cis|causal_mask|mask_cache)$": "table computed from the configuration",
}
_SPLIT = re.compile(r"(layers\.\d+)\.attention\.w([qkv])\.(weight|bias)")
_PARTS = {"q": "query", "k": "key", "v": "value"}


def plan_hub(source: str | os.PathLike, *, dtype: str = "keep") -> Plan:
    """
    Plan the conversion of a folder of the authors' torch files (or of our own).

    Args:
        source: A folder with `config.json` and safetensors or torch weights, or a name on the Hub.
        dtype (`str`): Of the parameters; `"keep"` for that of the files.

    Raises:
        FileNotFoundError, ValueError: if it cannot be converted whole; the message says why.
    """
    folder = local_folder(source)
    path = folder / "config.json"
    values = read_values(path)
    leaves, ignored = open_weights(folder), {}
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
        {"format": "torch files", "location": str(folder), "step": None},
        ignored=ignored,
        origins=[Origin(name, value, "config.json") for name, value in sorted(config.to_diff_dict().items())],
    )
    tables = {**_SHARED_TABLES[config.model_type]}
    for name, leaf in leaves.items():
        if match := _SPLIT.fullmatch(name):
            layer, letter, kind = match.groups()
            sizes = axis_sizes(config)
            if kind == "bias":
                sizes = {**sizes, "embed": 1}
            offset, words = part_offset(_PARTS[letter], sizes), f"as its {_PARTS[letter]} part"
            parameter = f"model.{layer}.self_attn.qkv_proj.{kind}"
        else:
            parameter, offset = our_name(name, tables), 0
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


def local_folder(source: str | os.PathLike) -> Path:
    """The folder itself, or the download of a name on the Hub."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"{str(source)!r} is a file; give the folder that holds config.json and the weights.")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)) or str(source).startswith("."):
        raise FileNotFoundError(f"There is no folder {str(source)!r}; check the path.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(source), allow_patterns=["*.json", "*.safetensors", "*.bin", "tokenizer*"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"There is no folder {str(source)!r}, and it cannot be downloaded from the Hub; check the name and the "
            "network."
        ) from error


def _with_prefix(names: dict[str, str]) -> dict[str, str]:
    """Renaming parts that start a name start it below `model.` in a model with a head."""
    return {old: new if old.startswith(".") else f"model.{new}" for old, new in names.items()}


_SHARED_TABLES = {
    "dcformer": {**_with_prefix(AUTHORS_NAMES["DCFormerModel"]), **AUTHORS_NAMES["DCFormerForCausalLM"]},
    "dcpythia": {**_with_prefix(AUTHORS_NAMES["DCPythiaModel"]), **AUTHORS_NAMES["DCPythiaForCausalLM"]},
}


def our_name(name: str, table: dict[str, str]) -> str:
    """Our name of one of the authors' parameters; a name of ours stays."""
    for old, new in table.items():
        if not old.startswith("."):
            name = new + name[len(old) :] if name.startswith(old) else name
        elif old.endswith("."):
            name = name.replace(old, new)
        else:
            name = name[: -len(old)] + new if name.endswith(old) else name
    return f"model.{name}" if re.match(r"(layers\.\d+|norm)\.", name) else name
