"""From a name to a model: a bundled one, a folder, or a name on the Hub, with its tokenizer, device and dtype."""

import difflib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from . import public as public  # registers the models with the Auto classes
from .common.files import json_digest
from .configuration_dcformer import DCFormerConfig
from .pretrained import find_model_folder, pretrained_names


@dataclass(frozen=True)
class FoundModel:
    """A causal language model whose weights have not been read yet, and what they will be read with."""

    name: str  # as it was given
    path: str  # its folder, or its name on the Hub
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    revision: str = "main"
    trust_remote_code: bool = False

    @property
    def has_ids_without_embedding(self) -> bool:
        """Whether the tokenizer makes ids beyond the embedding, as that of the published checkpoints does."""
        return len(self.tokenizer) > self.config.get_text_config().vocab_size

    def load(
        self,
        *,
        device: str | torch.device | None = None,
        dtype: str | None = None,
        attn_implementation: str | None = None,
        oov_policy: str | None = None,
    ) -> PreTrainedModel:
        """
        The model in evaluation mode; arguments as of [`load_model`].

        Raises:
            ValueError: if weights are missing or too many, or `oov_policy` is given for a model of another family.
        """
        if oov_policy is not None and not isinstance(self.config, DCFormerConfig):
            raise ValueError(
                f"oov_policy={oov_policy!r} is for DCFormer and DCPythia, and {self.name!r} is a "
                f"{self.config.model_type} model; leave it out."
            )
        place = choose_device(device)
        given = {"attn_implementation": attn_implementation, "oov_policy": oov_policy}
        model, info = AutoModelForCausalLM.from_pretrained(
            self.path,
            dtype=dtype or "auto",
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
            output_loading_info=True,
            **{name: value for name, value in given.items() if value is not None},
        )
        # Transformers draws missing parameters at random, clears missing buffers, learned ones too, leaves out layers
        # that the configuration does not count, and only warns.
        for what, keys in (("lack", info["missing_keys"]), ("hold, unlike config.json,", info["unexpected_keys"])):
            if names := sorted(keys):
                raise ValueError(f"The weights of {self.name!r} {what} {names[0]} and {len(names) - 1} more.")
        return model.to(place).eval()


def find_model(
    name: str | os.PathLike,
    *,
    tokenizer: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> FoundModel:
    """
    Read a model's configuration and tokenizer, without its weights.

    Args:
        name: A bundled model, a folder, or a name on the Hub; the authors' files too.
        tokenizer (*optional*): As [`load_tokenizer`] takes it; `None`: that of the model.
        revision (*optional*): Branch, tag or commit on the Hub; `None`: `main`.
        trust_remote_code (defaults to `False`): Whether code that comes with the model may run.

    Raises:
        OSError: if the model or its tokenizer is not there or cannot be reached.
        ValueError: if it cannot be used as a causal language model.
    """
    name = os.fspath(name)
    path = find_folder(name)
    options: dict[str, Any] = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    refuse_without_model(path)
    if revision not in (None, "main") and looks_like_path(path):
        raise ValueError(f"revision={revision!r} is of a name on the Hub, and {name!r} is a folder; leave it out.")
    config = AutoConfig.from_pretrained(path, **options)
    own_classes = getattr(config, "auto_map", None) or {}
    if type(config) not in AutoModelForCausalLM._model_mapping and "AutoModelForCausalLM" not in own_classes:
        raise ValueError(f"{name!r} is a {config.model_type} model, not a causal language model.")
    own = options if tokenizer is None else {"trust_remote_code": trust_remote_code}  # the revision is the model's
    return FoundModel(name, path, config, load_tokenizer(path if tokenizer is None else tokenizer, **own), **options)


@dataclass(frozen=True)
class LoadedModel:
    """A model to compute with, in evaluation mode and on its device."""

    name: str  # as it was given
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load_model(
    name: str | os.PathLike,
    *,
    device: str | torch.device | None = None,
    dtype: str | None = None,
    attn_implementation: str | None = None,
    oov_policy: str | None = None,
    **source: Any,
) -> LoadedModel:
    """
    Load a causal language model, ours or another of Transformers, and its tokenizer.

    Args:
        name, source: Arguments of [`find_model`].
        device (*optional*): As of [`choose_device`].
        dtype (*optional*): Such as `"bfloat16"`; `None`: that in which the weights are stored.
        attn_implementation (*optional*): As `from_pretrained` takes it.
        oov_policy (*optional*): `"error"` or `"clamp"`; `None`: what the configuration says.

    Raises:
        OSError, ValueError: of [`find_model`]; ValueError: if parameters are missing too.
    """
    found = find_model(name, **source)
    model = found.load(device=device, dtype=dtype, attn_implementation=attn_implementation, oov_policy=oov_policy)
    return LoadedModel(found.name, model, found.tokenizer)


def choose_device(device: str | torch.device | None = None) -> torch.device:
    """
    The device to compute on.

    Args:
        device (*optional*): Such as `"cpu"`, `"cuda:1"` or `"mps"`; `None` or `"auto"`: the first GPU that torch finds,
            else the CPU.

    Raises:
        RuntimeError, AssertionError: of torch, if there is no such device; another is never taken in its place.
    """
    if device is None or str(device) == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.empty(0, device=device)
    return torch.device(device)


def find_folder(name: str) -> str:
    """
    The folder of a bundled model; any other path or name as it is.

    Raises:
        FileNotFoundError: for a misspelt bundled model, so that the Hub is not asked for it.
    """
    folder, bundled = find_model_folder(name), pretrained_names()
    could_be_another = "/" in name or Path(name).exists()
    if folder == name and not could_be_another and difflib.get_close_matches(name.lower(), bundled):
        raise FileNotFoundError(
            f"There is no folder and no bundled model {name!r}; the bundled models are {' and '.join(bundled)}, and "
            "names on the Hub have a slash."
        )
    return folder


def refuse_without_model(path: str, file: str = "config.json") -> None:
    """Raise FileNotFoundError if this is a path, not a name on the Hub, and no folder that holds the file."""
    if looks_like_path(path) and not Path(path, file).is_file():
        raise FileNotFoundError(f"{path!r} is not the folder of a model: there is no {file} in it.")


def looks_like_path(name: str | os.PathLike) -> bool:
    """Whether a name can only be a path: names on the Hub have one slash at most, and begin with none of these."""
    return not isinstance(name, str) or name.startswith(("/", ".", "~")) or name.count("/") > 1 or Path(name).exists()


def load_tokenizer(source: str | os.PathLike, **options: Any) -> PreTrainedTokenizerBase:
    """
    A tokenizer, by wherever it is.

    Args:
        source: A bundled model, a folder, a `tokenizer.json`, a folder that holds one under another name (such as the
            authors' `20B_tokenizer.json`), or a name on the Hub.
        options: Further arguments of `AutoTokenizer.from_pretrained`, such as `revision`.

    Raises:
        OSError: if there is no tokenizer, or no name says which of several is meant.
        ValueError: for a file that is none.
    """
    source = find_folder(os.fspath(source))
    path = Path(source)
    if path.is_dir() and not (path / "tokenizer.json").is_file():
        found = [file for file in sorted(path.glob("*.json")) if _is_tokenizer(file)]
        if len(found) == 1:
            path = found[0]
        elif not any(file for pattern in ("tokenizer*", "vocab.*", "*.model") for file in path.glob(pattern)):
            names = ", ".join(file.name for file in found) or "none"
            raise FileNotFoundError(f"A folder must hold one tokenizer, and {source!r} holds {names}.")
    if not path.is_file():
        loaded = AutoTokenizer.from_pretrained(source, **options)
        if len(loaded) <= len(set(loaded.all_special_ids)):  # Transformers makes some without a file to read
            raise FileNotFoundError(f"The tokenizer of {source!r} has no words; get all of its files.")
        return loaded
    if not _is_tokenizer(path):
        raise ValueError(f"{str(path)!r} holds no tokenizer; give a tokenizer.json.")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    # Nothing is said of special tokens in a bare tokenizer.json.
    if tokenizer.eos_token is None and "<|endoftext|>" in tokenizer.get_vocab():
        tokenizer.eos_token = "<|endoftext|>"
    return tokenizer


def fingerprint_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """`"sha256:..."` of all that turns text into ids, and of the ids that begin, end and pad it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # calls leave these two behind, and every call sets them anew
        rules: Any = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
    else:  # one in Python does not tell its rules; its vocabulary and what it makes of a text stand for them
        rules = [sorted(tokenizer.get_vocab().items()), tokenizer("The 2: İt's\n\n  naïve, 東京!")["input_ids"]]
    return f"sha256:{json_digest([rules, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id])}"


def _is_tokenizer(file: Path) -> bool:
    """Whether a JSON file is a `tokenizer.json`, whatever its name."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(file)!r} is not JSON: {error}.") from error
    return isinstance(values, dict) and values.keys() >= {"model", "added_tokens"}


__all__ = ["FoundModel", "LoadedModel", "find_model", "load_model"]
__all__ += ["choose_device", "fingerprint_tokenizer", "load_tokenizer", "looks_like_path"]
