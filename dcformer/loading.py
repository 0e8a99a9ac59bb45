"""Load a model by a name: a bundled one, a folder, or a name on the Hub, with its tokenizer, device and dtype."""

import difflib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
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
from .common.hub import find_commit, naming_what_is_missing
from .configuration_dcformer import DCFormerConfig
from .pretrained import pretrained_names, pretrained_path


# Why a result may be NaN, and what to do.
NOT_A_NUMBER = (
    "the weights hold NaN or infinity, or the dtype is too narrow for them; check the weights, or give a wider dtype."
)


@dataclass(frozen=True)
class FoundModel:
    """A causal language model before its weights are read, and how they will be read."""

    name: str  # as it was given
    path: str  # its folder, or its name on the Hub
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    revision: str = "main"
    trust_remote_code: bool = False
    commit: str | None = None  # of the revision; None for a folder

    @property
    def full_name(self) -> str:
        """The name with its revision, unless that is `main`."""
        return self.name if self.revision == "main" else f"{self.name}@{self.revision}"

    @property
    def has_ids_without_embedding(self) -> bool:
        """True if the tokenizer has ids beyond the embedding, as that of the published checkpoints does."""
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
            ValueError: if weights are damaged, missing or too many, or `oov_policy` is given for another family.
        """
        if oov_policy is not None and not isinstance(self.config, DCFormerConfig):
            raise ValueError(
                f"oov_policy={oov_policy!r} is for DCFormer and DCPythia, and {self.name!r} is a "
                f"{self.config.model_type} model; leave it out."
            )
        device = choose_device(device)
        given = {"attn_implementation": attn_implementation, "oov_policy": oov_policy}
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                self.path,
                dtype=dtype or "auto",
                revision=self.commit or self.revision,
                trust_remote_code=self.trust_remote_code,
                output_loading_info=True,
                **{name: value for name, value in given.items() if value is not None},
            )
        except SafetensorError as error:  # which names no file
            raise ValueError(f"The weights of {self.name!r} are damaged ({error}); get them again.") from error
        # Transformers only warns when it initialises missing parameters at random, zeroes missing buffers (also learned
        # ones), and leaves out layers beyond those of the configuration.
        for what, keys in (("lack", info["missing_keys"]), ("hold, unlike config.json,", info["unexpected_keys"])):
            if names := sorted(keys):
                raise ValueError(f"The weights of {self.name!r} {what} {names[0]} ({len(names)} in all).")
        return model.to(device).eval()


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
    refuse_without_model(path)
    is_path = looks_like_path(path)
    if revision not in (None, "main") and is_path:
        raise ValueError(f"revision={revision!r} is of a name on the Hub, and {name!r} is a folder; leave it out.")
    # All files are of one commit, also if somebody adds another one meanwhile.
    commit = None if is_path else find_commit(path, revision)
    options: dict[str, Any] = {"revision": commit or "main", "trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(path, **options)
    classes = getattr(config, "auto_map", None) or {}  # of remote code
    if type(config) not in AutoModelForCausalLM._model_mapping and "AutoModelForCausalLM" not in classes:
        raise ValueError(f"{name!r} is a {config.model_type} model, not a causal language model.")
    if tokenizer is None:
        loaded = load_tokenizer(path, **options)
    else:  # the revision is the model's
        loaded = load_tokenizer(tokenizer, trust_remote_code=trust_remote_code)
    return FoundModel(name, path, config, loaded, revision or "main", trust_remote_code, commit)


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode on its device, and its tokenizer."""

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
    Load a causal language model, a DCFormer or any other of Transformers, and its tokenizer.

    Args:
        name, source: Arguments of [`find_model`].
        device (*optional*): As of [`choose_device`].
        dtype (*optional*): Such as `"bfloat16"`; `None`: that in which the weights are stored.
        attn_implementation (*optional*): As `from_pretrained` takes it.
        oov_policy (*optional*): `"error"` or `"clamp"`; `None`: what the configuration says.

    Raises:
        OSError, ValueError: of [`find_model`]; ValueError: if parameters are missing too.
    """
    unread = find_model(name, **source)
    model = unread.load(device=device, dtype=dtype, attn_implementation=attn_implementation, oov_policy=oov_policy)
    return LoadedModel(unread.name, model, unread.tokenizer)


def choose_device(device: str | torch.device | None = None) -> torch.device:
    """
    The device to compute on.

    Args:
        device (*optional*): Such as `"cpu"`, `"cuda:1"` or `"mps"`; `None` or `"auto"`: the first GPU that torch finds,
            else the CPU.

    Raises:
        RuntimeError, AssertionError: of torch, if there is no such device; another is never used instead.
    """
    if device is None or str(device) == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    torch.empty(0, device=device)
    return torch.device(device)


def find_folder(name: str) -> str:
    """
    The folder of a bundled model; any other name, and that of a folder in the working directory, as it is.

    Raises:
        FileNotFoundError: for a misspelt bundled model, so that the Hub is not asked for it.
    """
    bundled = pretrained_names()
    if name in bundled and not Path(name).is_dir():
        return pretrained_path(name)
    if "/" not in name and not Path(name).exists() and difflib.get_close_matches(name.lower(), bundled):
        raise FileNotFoundError(
            f"There is no folder and no bundled model {name!r}; the bundled models are {' and '.join(bundled)}, and "
            "names on the Hub have a slash."
        )
    return name


def refuse_without_model(path: str, file: str = "config.json") -> None:
    """Raise FileNotFoundError for a path (not a name on the Hub) that is no folder with the file."""
    if looks_like_path(path) and not Path(path, file).is_file():
        if Path(path, "adapter_config.json").is_file():
            raise FileNotFoundError(
                f"{path!r} is an adapter of PEFT; give what its merge_and_unload() makes and saves."
            )
        raise FileNotFoundError(f"{path!r} is not the folder of a model: there is no {file} in it.")


def looks_like_path(name: str | os.PathLike) -> bool:
    """True if this must be a path: names on the Hub have at most one slash and do not start with `/`, `.` or `~`."""
    return not isinstance(name, str) or name.startswith(("/", ".", "~")) or name.count("/") > 1 or Path(name).exists()


def load_tokenizer(source: str | os.PathLike, **options: Any) -> PreTrainedTokenizerBase:
    """
    Load a tokenizer.

    Args:
        source: A bundled model, a folder, a `tokenizer.json`, a folder that holds one under another name (such as the
            authors' `20B_tokenizer.json`), or a name on the Hub.
        options: Further arguments of `AutoTokenizer.from_pretrained`, such as `revision`.

    Raises:
        OSError: if there is no tokenizer, or a folder holds several and none is named `tokenizer.json`.
        ValueError: for a file that is no tokenizer.
    """
    source = find_folder(os.fspath(source))
    path = Path(source)
    if path.is_dir() and not (path / "tokenizer.json").is_file():
        files = [file for file in sorted(path.glob("*.json")) if _is_tokenizer(file)]
        if len(files) == 1:
            path = files[0]
        elif not any(file for pattern in ("tokenizer*", "vocab.*", "*.model") for file in path.glob(pattern)):
            names = ", ".join(file.name for file in files) or "none"
            raise FileNotFoundError(f"A folder must hold one tokenizer, and {source!r} holds {names}.")
    if not path.is_file():
        with naming_what_is_missing(source, options.get("revision")):
            loaded = AutoTokenizer.from_pretrained(source, **options)
        if len(loaded) <= len(set(loaded.all_special_ids)):  # Transformers makes some without reading a file
            raise FileNotFoundError(f"The tokenizer of {source!r} has no words; get all of its files.")
        return loaded
    if not _is_tokenizer(path):
        raise ValueError(f"{str(path)!r} holds no tokenizer; give a tokenizer.json.")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    # A tokenizer.json alone does not name the special tokens.
    if tokenizer.eos_token is None and "<|endoftext|>" in tokenizer.get_vocab():
        tokenizer.eos_token = "<|endoftext|>"
    return tokenizer


def fingerprint_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """`"sha256:..."` of everything that turns text into ids, and of the ids that begin, end and pad it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # every call sets padding and truncation, and leaves them set
        rules: Any = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
    else:  # the rules of a tokenizer in Python cannot be read; its vocabulary and the ids of a text represent them
        rules = [sorted(tokenizer.get_vocab().items()), tokenizer("The 2: İt's\n\n  naïve, 東京!")["input_ids"]]
    return f"sha256:{json_digest([rules, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id])}"


def _is_tokenizer(file: Path) -> bool:
    """True if a JSON file is a `tokenizer.json`, whatever its name."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(file)!r} is not JSON: {error}.") from error
    return isinstance(values, dict) and values.keys() >= {"model", "added_tokens"}


__all__ = ["FoundModel", "LoadedModel", "find_model", "load_model"]
__all__ += ["choose_device", "fingerprint_tokenizer", "load_tokenizer", "looks_like_path"]
