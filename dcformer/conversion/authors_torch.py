"""The authors' torch files to plans: renaming, and joining projections where old files have them split.

Folders of ours are read in the same way; their tensors keep their names.
"""

import os
import re
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers import PreTrainedConfig

from ..common.hub import naming_what_is_missing
from ..configuration_dcformer import AUTHORS_KEYS, DCFormerConfig, DCPythiaConfig
from ..hub_dcformer import authors_patterns
from .arrays import SourceArray, file_stamps, open_weights
from .mapping import axis_sizes, part_offset
from .plan import Origin, Part, Plan, complete, parameter_shapes
from .settings import read_json, refuse_misspelt
from .stores import refuse_no_folder


# Entries of the authors' files that are not parameters, with the reason to leave them out.
_IGNORED = {
    r"dyn_w_proj\.(dw_m|qkw_m)$": "merged copy of dw1, dd and qkw, out of date in published files",
    r"dyn_w_proj\.((pre|post)_proj\.w|sw)$": "static projection that no configuration of the authors' switches on",
    r"attention\.kv_cache\.": "cache of a generation",
    r"(^|\.)(freqs_cis|causal_mask|mask_cache)$": "table computed from the configuration",
}
# The keys of config.json that mean something, ours and the authors', and others of Transformers that look like them.
_READ = DCFormerConfig.__annotations__.keys() | AUTHORS_KEYS | {"rope_scaling", "rope_theta", "partial_rotary_factor"}
_ALIKE = {"model_type", *(f"{kind}_token_id" for kind in ("sep", "cls", "mask", "forced_bos", "forced_eos"))}
_SPLIT = re.compile(r"(layers\.\d+)\.attention\.w([qkv])\.(weight|bias)")
PARTS = {"q": "query", "k": "key", "v": "value"}


def plan_torch(source: str | os.PathLike, *, dtype: str = "keep") -> Plan:
    """The plan of a folder of the authors' torch files, or of ours; arguments as of [`convert_torch`]."""
    folder = local_folder(source)
    config, arrays = read_config(folder / "config.json"), open_weights(folder)
    shapes, patterns = parameter_shapes(config), authors_patterns(config.model_type)
    plan = Plan(
        config,
        {},
        {"format": "torch files", "location": str(folder), "step": None},
        file_stamps({Path(array.where) for array in arrays.values()}),
        origins=[Origin(name, value, "config.json") for name, value in sorted(config.to_diff_dict().items())],
    )
    entries: list[tuple[str, Part]] = []
    for name, array in arrays.items():
        if reason := next((reason for pattern, reason in _IGNORED.items() if re.search(pattern, name)), None):
            plan.ignored[name] = reason
            continue
        plan.arrays[name] = array
        if match := _SPLIT.fullmatch(name):
            layer, letter, kind = match.groups()
            parameter = f"model.{layer}.self_attn.qkv_proj.{kind}"
            entries.append((parameter, qkv_part(config, array, letter, kind)))
            continue
        parameter = our_name(name, patterns)
        if array.shape != shapes.get(parameter, array.shape):
            raise ValueError(f"{name} has shape {array.shape} but {shapes[parameter]} by config.json of {folder}.")
        entries.append((parameter, Part.all_of(array, transform="as is" if parameter == name else "renamed")))
    position = {name: i for i, name in enumerate(shapes)}
    for parameter, part in sorted(entries, key=lambda entry: (position.get(entry[0], -1), entry[1].offset)):
        plan.parts[parameter].append(part)
    are_ours = all(part.transform == "as is" for _, part in entries)
    plan.source["format"] += ", our names" if are_ours else ", the authors' names"
    return complete(plan, dtype)


def qkv_part(config: DCFormerConfig, array: SourceArray, letter: str, kind: str) -> Part:
    """The part of `qkv_proj` that a weight or bias of queries ("q"), keys ("k") or values ("v") fills."""
    sizes = axis_sizes(config) | ({"embed": 1} if kind == "bias" else {})
    return Part.all_of(array, part_offset(PARTS[letter], sizes), f"as its {PARTS[letter]} part")


def local_folder(source: str | os.PathLike) -> Path:
    """The folder (or file) itself, or the download of a name on the Hub."""
    if Path(source).exists():
        return Path(source)
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(source)):
        refuse_no_folder(source)
    patterns = [f"*{ending}" for ending in (".json", ".safetensors", ".bin", ".jinja", ".model", ".txt", ".md", ".py")]
    with naming_what_is_missing(str(source)):
        return Path(snapshot_download(str(source), allow_patterns=[*patterns, "LICEN*", "NOTICE*"]))


def read_config(path: Path) -> DCFormerConfig:
    """A configuration in the authors' keys or ours."""
    values = read_json(path)
    model_type = values.get("model_type", "dcformer")
    if model_type not in ("dcformer", "dcpythia"):
        raise ValueError(f"{path} is of the model type {model_type!r}; it must be 'dcformer' or 'dcpythia'.")
    # The code beside the authors' weights is not the one that reads ours.
    values.pop("auto_map", None)
    refuse_misspelt(values, _READ, _ALIKE | vars(PreTrainedConfig()).keys(), path)
    return (DCPythiaConfig if model_type == "dcpythia" else DCFormerConfig).from_dict(values)


def our_name(name: str, patterns: dict[str, str]) -> str:
    """Our name of a parameter that has another in some family's files: regular expressions and what replaces them."""
    for pattern, ours in patterns.items():
        name = re.sub(pattern, ours, name)
    return f"model.{name}" if re.match(r"(layers\.\d+|norm|embed_tokens)\.", name) else name
