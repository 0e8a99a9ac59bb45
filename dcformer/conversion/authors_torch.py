"""The authors' torch files: renaming, and joining projections where old files have them split.

Folders of ours are read in the same way; their tensors keep their names.
"""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import PreTrainedConfig

from ..common.hub import naming_what_is_missing
from ..configuration_dcformer import AUTHORS_KEYS, DCFormerConfig, DCPythiaConfig
from ..hub_dcformer import authors_patterns
from .arrays import Source, SourceArray, file_stamps, open_weights
from .mapping import axis_sizes, part_offset
from .plan import Checkpoint, Layout, Origin, Part, group_parts, parameter_shapes
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


def open_torch(source: str | os.PathLike, **facts: Any) -> Source:
    """The arrays of a folder of torch or safetensors files, or a name on the Hub; `facts` go into the report."""
    folder = local_folder(source)
    arrays = open_weights(folder)
    stamps = file_stamps({Path(array.where) for array in arrays.values()})
    return Source("torch files", str(folder), arrays, stamps, facts=facts)


def read_torch(source: Source) -> Checkpoint:
    """The model in the authors' torch files, or in ours."""
    config = read_config(Path(source.location, "config.json"))
    shapes, patterns = parameter_shapes(config), authors_patterns(config.model_type)
    ignored: dict[str, str] = {}
    parts: list[tuple[str, Part]] = []
    for name, array in source.arrays.items():
        if reason := next((reason for pattern, reason in _IGNORED.items() if re.search(pattern, name)), None):
            ignored[name] = reason
        elif match := _SPLIT.fullmatch(name):
            layer, letter, kind = match.groups()
            parts.append((f"model.{layer}.self_attn.qkv_proj.{kind}", qkv_part(config, array, letter, kind)))
        else:
            parameter = our_name(name, patterns)
            if array.shape != (shape := shapes.get(parameter, array.shape)):
                where = f"config.json of {source.location}"
                raise ValueError(f"{name} has shape {array.shape} but {shape} by {where}.")
            parts.append((parameter, Part.all_of(array, transform="as is" if parameter == name else "renamed")))
    position = {name: i for i, name in enumerate(shapes)}
    parts.sort(key=lambda entry: (position.get(entry[0], -1), entry[1].offset))
    names = "our names" if all(part.transform == "as is" for _, part in parts) else "the authors' names"
    source = replace(source, format=f"{source.format}, {names}")
    return Checkpoint(source, config, origins_of(config, "config.json"), Layout(group_parts(parts), ignored))


def origins_of(config: DCFormerConfig, file: str) -> list[Origin]:
    """The origins of a configuration that a file states."""
    return [Origin(name, value, file) for name, value in sorted(config.to_diff_dict().items())]


def qkv_part(config: DCFormerConfig, array: SourceArray, letter: str, kind: str) -> Part:
    """The part of `qkv_proj` that a weight or bias of queries ("q"), keys ("k") or values ("v") fills."""
    sizes = axis_sizes(config) | ({"embed": 1} if kind == "bias" else {})
    return Part.all_of(array, part_offset(PARTS[letter], sizes), f"as its {PARTS[letter]} part")


def local_folder(source: str | os.PathLike, revision: str | None = None) -> Path:
    """The folder (or file) itself, or the download of a branch, tag or commit (`None`: `main`) of a name on the Hub."""
    if Path(source).exists():
        refuse_revision(source, revision)
        return Path(source)
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(source)):
        refuse_no_folder(source)
    patterns = [f"*{ending}" for ending in (".json", ".safetensors", ".bin", ".jinja", ".model", ".txt", ".md", ".py")]
    patterns += ["LICEN*", "NOTICE*"]
    with naming_what_is_missing(str(source), revision):
        return Path(snapshot_download(str(source), revision=revision, allow_patterns=patterns))


def refuse_revision(path: str | os.PathLike, revision: str | None) -> None:
    if revision not in (None, "main") and Path(path).exists():
        raise ValueError(f"revision={revision!r} is of a name on the Hub, not of {str(path)!r}; leave it out.")


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
