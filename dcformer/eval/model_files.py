"""The files of a model's folder, looked at before anything is read from them."""

import json
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..common.paths import is_path


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))


def check_path(name: str) -> None:
    """
    Refuse a path that is no model, as far as a look at its files tells; names on the Hub are let through.

    Raises:
        FileNotFoundError: if there is no such folder, or it has no configuration or no weights.
    """
    folder = Path(name)
    if folder.is_file():
        raise FileNotFoundError(f"{name!r} is a file; give the folder of a model.")
    if not folder.is_dir():
        if is_path(name):
            raise FileNotFoundError(f"There is no model folder {name!r}; check the path.")
        return
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{name!r} is no model: it has no config.json; check the path, or convert it first.")
    if not weight_files(folder):
        raise FileNotFoundError(f"{name!r} has a config.json but no weights (*.safetensors or *.bin); add them.")


def check_weights(folder: Path) -> None:
    """
    Look whether the files of weights that Transformers will read are there, and as long as they say.

    Raises:
        FileNotFoundError: if one is missing.
        ValueError: if one is damaged.
    """
    for suffix, stem in (("safetensors", "model"), ("bin", "pytorch_model")):
        index, single = folder / f"{stem}.{suffix}.index.json", folder / f"{stem}.{suffix}"
        if single.is_file():
            _check_weights_file(single)
            return
        if index.is_file():
            try:
                shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{str(index)!r} is damaged; copy or download it again.") from error
            for name in shards:
                _check_weights_file(folder / name)
            return


def _check_weights_file(file: Path) -> None:
    if not file.is_file():
        raise FileNotFoundError(f"The weights file {str(file)!r} is missing; copy or download it.")
    damaged = ValueError(f"The weights file {str(file)!r} is truncated or damaged; copy or download it again.")
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, framework="pt"):  # reads where tensors are, and that the file ends with the last
                return
        except (SafetensorError, OSError) as error:
            raise damaged from error
    with file.open("rb") as stream:
        signature = stream.read(2)
    if not signature or (signature == b"PK" and not zipfile.is_zipfile(file)):
        raise damaged


def check_complete(model, loading_info: dict, name: str) -> None:
    """
    Refuse a model with parameters that were not in its files, which Transformers draws at random.

    Args:
        model: What `from_pretrained` returned.
        loading_info: What it returned beside, with `output_loading_info=True`.
        name: Folder or Hub id, for the message.

    Raises:
        ValueError: if parameters are missing.
    """
    parameters = {key for key, _ in model.named_parameters()}
    missing = sorted(parameters.intersection(loading_info["missing_keys"]))
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"The weights of {name!r} lack {missing[0]}{others}; copy or download them again.")
