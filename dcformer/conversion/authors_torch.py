"""The authors' torch files to plans: renaming, and joining projections where old files have them split.

Folders of ours are read in the same way; their tensors keep their names.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from huggingface_hub import snapshot_download

from ..configuration_dcformer import DCFormerConfig, DCPythiaConfig
from ..hub_dcformer import AUTHORS_NAMES, AUTHORS_OUTPUT_NAMES
from .arrays import file_stamps, open_weights
from .mapping import axis_sizes, part_offset
from .plan import Origin, Part, Plan, complete, parameter_shapes


# Entries of the authors' files that are not parameters, with the reason to leave them out.
_IGNORED = {
    r"dyn_w_proj\.(dw_m|qkw_m)$": "merged copy of dw1, dd and qkw, out of date in published files",
    r"dyn_w_proj\.((pre|post)_proj\.w|sw)$": "static projection that no configuration of the authors' switches on",
    r"attention\.kv_cache\.": "cache of a generation",
    r"(^|\.)(freqs_cis|causal_mask|mask_cache)$": "table computed from the configuration",
}
_SPLIT = re.compile(r"(layers\.\d+)\.attention\.w([qkv])\.(weight|bias)")
PARTS = {"q": "query", "k": "key", "v": "value"}


def plan_torch(source: str | os.PathLike, *, dtype: str = "keep") -> Plan:
    """The plan of a folder of the authors' torch files, or of our own; arguments as of [`convert_torch`]."""
    folder = local_folder(source)
    config, arrays = read_config(folder / "config.json"), open_weights(folder)
    shapes = parameter_shapes(config)
    plan = Plan(
        config,
        {},
        {"format": "torch files", "location": str(folder), "step": None},
        file_stamps({Path(array.where) for array in arrays.values()}),
        origins=[Origin(name, value, "config.json") for name, value in sorted(config.to_diff_dict().items())],
    )
    found: list[tuple[str, Part]] = []
    for name, array in arrays.items():
        if reason := next((reason for pattern, reason in _IGNORED.items() if re.search(pattern, name)), None):
            plan.ignored[name] = reason
            continue
        plan.arrays[name] = array
        offset, words = 0, "as is"
        if match := _SPLIT.fullmatch(name):
            layer, letter, kind = match.groups()
            sizes = axis_sizes(config) | ({"embed": 1} if kind == "bias" else {})
            offset, words = part_offset(PARTS[letter], sizes), f"as its {PARTS[letter]} part"
            parameter = f"model.{layer}.self_attn.qkv_proj.{kind}"
        else:
            parameter = our_name(name, _NAMES[config.model_type])
            words = words if parameter == name else "renamed"
            if array.shape != shapes.get(parameter, array.shape):
                raise ValueError(f"{name} has shape {array.shape} but {shapes[parameter]} by config.json of {folder}.")
        found.append((parameter, Part(name, array.whole, tuple(range(len(array.shape))), offset, words)))
    position = {name: i for i, name in enumerate(shapes)}
    for parameter, part in sorted(found, key=lambda entry: (position.get(entry[0], -1), entry[1].offset)):
        plan.parts[parameter].append(part)
    whose = "our" if all(part.transform == "as is" for _, part in found) else "the authors'"
    plan.source["format"] += f", {whose} names"
    return complete(plan, dtype)


def local_folder(source: str | os.PathLike) -> Path:
    """The folder itself, or the download of a name on the Hub."""
    if Path(source).exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(source)):
        return Path(source)
    return Path(
        snapshot_download(str(source), allow_patterns=["*.json", "*.safetensors", "*.bin", "*.jinja", "tokenizer*"])
    )


def read_config(path: Path) -> DCFormerConfig:
    """A configuration in the authors' keys or ours."""
    values = json.loads(path.read_bytes())
    model_type = values.get("model_type", "dcformer")
    if model_type not in ("dcformer", "dcpythia"):
        raise ValueError(f"{path} is of the model type {model_type!r}; it must be 'dcformer' or 'dcpythia'.")
    # The code beside the authors' weights is not the one that reads ours.
    values.pop("auto_map", None)
    return (DCPythiaConfig if model_type == "dcpythia" else DCFormerConfig).from_dict(values)


def our_name(name: str, table: dict[str, str]) -> str:
    """Our name of a parameter that has another in some family's files, by a table of parts; a name of ours stays."""
    for old, new in table.items():
        if not old.startswith("."):
            name = new + name[len(old) :] if name.startswith(old) else name
        elif old.endswith("."):
            name = name.replace(old, new)
        else:
            name = name[: -len(old)] + new if name.endswith(old) else name
    return f"model.{name}" if re.match(r"(layers\.\d+|norm)\.", name) else name


def _with_prefix(names: dict[str, str]) -> dict[str, str]:
    """Names that start with a part of the decoder stand below `model.` in a model with a head."""
    return {old: new if old.startswith(".") else f"model.{new}" for old, new in names.items()}


_NAMES = {model_type: {**_with_prefix(names), **AUTHORS_OUTPUT_NAMES} for model_type, names in AUTHORS_NAMES.items()}
