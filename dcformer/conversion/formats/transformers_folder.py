"""Folders as Transformers saves them, ours or of the authors' torch code: where they are, and which files hold weights.

The weights are safetensors or torch files, whole or sharded. What their tensors are called, and where they go, is in
`authors_torch.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from ...common.json_text import parse_json
from ...common.quoting import quoted
from ..leaves import Leaf
from .safetensors_file import list_safetensors
from .torch_file import list_torch


# In the order in which Transformers looks for them.
_SINGLE_AND_INDEX = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def local_folder(source: str | os.PathLike) -> Path:
    """
    The folder itself, or the download of a name on the Hub.

    Raises:
        FileNotFoundError: if there is no such folder and no such name on the Hub.
        ValueError: if it is a file.
    """
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


def weight_files(folder: Path) -> list[Path]:
    """
    The files that hold a folder's weights.

    Raises:
        FileNotFoundError: if there are none, or one that the index names is missing.
        ValueError: if the index is damaged or points outside its folder.
    """
    for single, index in _SINGLE_AND_INDEX:
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            return _indexed(folder, folder / index)
    raise FileNotFoundError(
        f"{str(folder)!r} holds no weights: there is none of "
        f"{', '.join(name for pair in _SINGLE_AND_INDEX for name in pair)}."
    )


def _indexed(folder: Path, index: Path) -> list[Path]:
    try:
        names = sorted(set(parse_json(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not a valid index of weights; copy or download it again.") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise ValueError(
                f"{index} names the file {quoted(name)}, which is not in its own folder; refusing to read it."
            )
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{index} names {name!r}, which is missing; copy or download it again.")
    return [folder / name for name in names]


def open_weights(folder: str | Path) -> dict[str, Leaf]:
    """
    Every tensor of a folder, by name. No pickle is unpickled beyond tensors.

    Raises:
        FileNotFoundError, ValueError: as `weight_files`, or if a file is damaged or two files hold the same name.
    """
    leaves: dict[str, Leaf] = {}
    for path in weight_files(Path(folder)):
        listing = list_safetensors if path.suffix == ".safetensors" else list_torch
        for leaf in listing(path):
            if leaf.name in leaves:
                raise ValueError(f"{leaf.name} is in {leaves[leaf.name].where} and in {path}; remove one of the two.")
            leaves[leaf.name] = leaf
    return leaves


def count_layers(names: Iterable[str]) -> int:
    """How many layers tensors of these names make."""
    return 1 + max((int(match[1]) for name in names if (match := _LAYER.search(name))), default=-1)
