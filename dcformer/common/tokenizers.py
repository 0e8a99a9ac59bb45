"""Loading tokenizers from folders, files and the Hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .paths import is_path


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_END_OF_TEXT = "<|endoftext|>"
# One of these is in every folder that Transformers reads a tokenizer from.
_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")


def load_tokenizer(source: str | os.PathLike, *, ends_text: bool = True, **options: Any) -> PreTrainedTokenizerBase:
    """
    A tokenizer, by wherever it is.

    Args:
        source (`str` or path): A folder, a `tokenizer.json`, a folder whose only JSON file is one under another name,
            or a name on the Hub.
        ends_text (`bool`, defaults to `True`): Whether `<|endoftext|>`, if there is such a token, ends a text where
            nothing is said of special tokens, as in a bare `tokenizer.json`.
        options: Further arguments of `AutoTokenizer.from_pretrained`, such as `revision` and `trust_remote_code`.

    Raises:
        FileNotFoundError: if there is no tokenizer; the message ends without advice, for the caller to add.
        ValueError: if it cannot be read.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path, name = Path(source), os.fspath(source)
    if path.is_dir() and not any((path / file).is_file() for file in _FILES):
        candidates = list(path.glob("*.json"))
        if [file.name for file in candidates] in ([], ["config.json"]) or len(candidates) > 1:
            raise FileNotFoundError(f"There is no tokenizer in {name!r}.")
        path = candidates[0]
    elif not path.exists() and is_path(name):
        raise FileNotFoundError(f"There is no tokenizer in {name!r}.")
    try:
        if not path.is_file():
            return AutoTokenizer.from_pretrained(name, **options)
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    except OSError as error:
        raise FileNotFoundError(f"There is no tokenizer in {name!r}.") from error
    except Exception as error:  # the tokenizers library raises bare Exception
        reason = " ".join(str(error).split()).split(". ")[0][:300].rstrip(".")
        raise ValueError(f"The tokenizer {name!r} cannot be read: {reason}.") from error
    if ends_text and tokenizer.eos_token is None and _END_OF_TEXT in tokenizer.get_vocab():
        tokenizer.eos_token = _END_OF_TEXT
    return tokenizer
