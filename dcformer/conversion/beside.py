"""The files beside the weights of a source, which go beside those of the result: tokenizer, settings, licence."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from ..configuration_dcformer import DCFormerConfig
from ..loading import load_tokenizer
from .conversion_report import read_report
from .plan import Files, Origin
from .settings import read_json


_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Files of a tokenizer, by which Transformers or `load_tokenizer` knows that there is one.
_TOKENIZERS = ("*tokenizer*.json", "vocab.*", "*.model")
_LICENCES = ("LICEN[CS]E*", "NOTICE*")


def remembered_source(folder: Path) -> dict[str, Any]:
    """`step` and `layers_per_block` of the checkpoint from which a folder was converted, if known."""
    source = (read_report(folder) or {}).get("source", {})
    return {name: source[name] for name in ("step", "layers_per_block") if source.get(name) is not None}


def find_files(
    folder: Path | None,
    config: DCFormerConfig,
    tokenizer: str | os.PathLike | PreTrainedTokenizerBase | None = None,
    *,
    is_run: bool = False,
    generation: bytes | None = None,
) -> Files:
    """
    Collect what comes along from a folder, if there is one.

    Args:
        folder: A local folder with the source's tokenizer, settings for `generate` and licence.
        config: The configuration of the model, by the source.
        tokenizer (*optional*): Folder, `tokenizer.json` or tokenizer to take instead of the source's. Its special
            tokens replace those that the source states; those of the source's tokenizer only add to them.
        is_run (defaults to `False`): The folder is a MaxText run, whose special tokens are in generation_config.json.
        generation (*optional*): Content of generation_config.json, where the folder has none.
    """
    stated: dict[str, Any] = {}
    if folder is not None:
        path = folder / GENERATION_CONFIG_NAME
        if path.is_file():
            read_json(path)  # refuses what is no JSON
            generation = path.read_bytes()
        path = path if is_run else folder / "config.json"
        stated = {key: value for key, value in read_json(path).items() if value is not None} if path.is_file() else {}
    has_one = folder is not None and any(any(folder.glob(names)) for names in _TOKENIZERS)
    loaded: Any = folder if tokenizer is None and has_one else tokenizer
    if isinstance(loaded, str | os.PathLike):
        loaded = load_tokenizer(loaded)
    ids = {key: stated[key] for key in _TOKEN_IDS if is_run and key in stated}
    origins, settings = [], json.loads(generation or b"{}")
    changed: dict[str, int] = {}
    for key in _TOKEN_IDS:
        value = getattr(loaded, key, None)
        if value is None or value >= config.vocab_size or (tokenizer is None and key in stated):
            continue
        if not _has(ids.get(key, getattr(config, key)), value):
            ids[key] = value
            origins.append(Origin(key, value, "tokenizer"))
        if tokenizer is not None and not _has(settings.get(key), value):
            changed[key] = value
    if generation is not None and changed:
        generation = json.dumps(settings | changed, indent=2).encode() + b"\n"
    licences = [path for names in _LICENCES if folder is not None for path in folder.glob(names) if path.is_file()]
    return Files(loaded, generation, licences, ids, origins)


def _has(stated: int | list[int] | None, value: int) -> bool:
    """True if a configuration states an id, which may be one of several that end a text."""
    return value in (stated if isinstance(stated, list) else [stated])


def save_files(files: Files, config: DCFormerConfig, folder: Path) -> None:
    """Write the settings for `generate`, the tokenizer and the licence into a folder."""
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    if files.generation is not None:
        (folder / GENERATION_CONFIG_NAME).write_bytes(files.generation)
    if files.tokenizer is not None:
        files.tokenizer.save_pretrained(folder)
    for path in files.licences:
        shutil.copyfile(path, folder / path.name)
