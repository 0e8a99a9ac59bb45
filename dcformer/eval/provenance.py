"""What decides a result, as values that can be compared: contents of models and tokenizers, versions, revisions."""

import hashlib
import os
import platform
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

import dcformer

from ..common.paths import is_path
from ..common.tokenizers import load_tokenizer
from .hub import is_on_hub
from .model_files import check_path, check_weights, weight_files


LIBRARIES = ("torch", "transformers", "lm_eval", "datasets", "tokenizers")


@dataclass(frozen=True)
class Model:
    """
    A model that is there and can be evaluated.

    Attributes:
        name (`str`): As it was given.
        config: Its configuration.
        tokenizer: Its tokenizer.
        revision (`str`): On the Hub.
        trust_remote_code (`bool`): Run code that comes with it.
        local_files_only (`bool`): Read it from the cache of the Hub, which cannot be reached.
    """

    name: str
    config: Any
    tokenizer: Any
    revision: str = "main"
    trust_remote_code: bool = False
    local_files_only: bool = False

    @property
    def misses_ids(self) -> bool:
        """Whether the tokenizer has ids beyond the embedding."""
        return len(self.tokenizer) > self.config.get_text_config().vocab_size


def find_model(
    name: str,
    *,
    revision: str | None = None,
    tokenizer: str | None = None,
    trust_remote_code: bool = False,
    begins_texts: bool = True,
) -> Model:
    """
    Read a model's configuration and tokenizer, without its weights.

    Args:
        name (`str`): Folder or Hub id.
        revision (`str`, *optional*): On the Hub; None: `main`.
        tokenizer (`str`, *optional*): Folder, `tokenizer.json` or Hub id; None: that of the model.
        trust_remote_code (`bool`, defaults to `False`): Run code that comes with the model.
        begins_texts (`bool`, defaults to `True`): Refuse a tokenizer without a token to put before a text.

    Raises:
        FileNotFoundError: if there is no such model, no weights or no tokenizer, or the Hub cannot be reached.
        ValueError: if the model is no causal language model, or a file is damaged.
    """
    check_path(name)
    is_folder, revision = Path(name).is_dir(), revision or "main"
    offline = not is_folder and not is_on_hub(name, revision, "model")
    options = {"revision": revision, "trust_remote_code": trust_remote_code, "local_files_only": offline}
    try:
        config = AutoConfig.from_pretrained(name, **options)
    except OSError as error:
        if is_folder:
            raise ValueError(f"{str(Path(name) / 'config.json')!r} is damaged: {_first_sentence(error)}") from error
        reason = (
            "the cache of the Hub, which cannot be reached, does not hold it"
            if offline
            else "what the Hub has by that name holds no configuration that can be read"
        )
        raise FileNotFoundError(
            f"There is no model {name!r}: it is no folder, and {reason}; check the name and the network, or give "
            "a folder."
        ) from error
    except (ValueError, TypeError, AttributeError) as error:  # of values that a class of configurations does not take
        raise ValueError(f"The configuration of {name!r} cannot be used: {_first_sentence(error)}") from error
    if type(config) not in AutoModelForCausalLM._model_mapping and "AutoModelForCausalLM" not in (
        getattr(config, "auto_map", None) or {}
    ):
        raise ValueError(
            f"{name!r} is a {config.model_type} model, which is no causal language model; give one that is."
        )
    model = Model(name, config, _load_tokenizer(tokenizer or name, tokenizer is None, options), **options)
    if begins_texts:
        _check_special_tokens(model.tokenizer, tokenizer or name)
    if is_folder:
        check_weights(Path(name))
    return model


def _load_tokenizer(source: str, is_model: bool, options: dict):
    if not is_model and not Path(source).exists() and not is_path(source):
        options = {**options, "local_files_only": not is_on_hub(source, options["revision"], "tokenizer")}
    try:
        return load_tokenizer(source, **options)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"There is no tokenizer in {source!r}; name one by --tokenizer (a folder, a tokenizer.json or a Hub id)."
        ) from error


def _check_special_tokens(tokenizer, source: str) -> None:
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise ValueError(
            f"The tokenizer {source!r} has neither a begin-of-text nor an end-of-text token, one of which precedes a "
            "text without context; set eos_token in its tokenizer_config.json."
        )


def model_fingerprint(model: Model) -> str:
    """`"sha256:..."` of a folder's config.json and weights, or `"commit:..."` of a model on the Hub."""
    folder = Path(model.name)
    if not folder.is_dir():
        return f"commit:{model.config._commit_hash}"
    files = (folder / "config.json", *weight_files(folder))
    stats = [file.stat() for file in files]
    return _contents_fingerprint(files, tuple((stat.st_size, stat.st_mtime_ns) for stat in stats))


@cache
def _contents_fingerprint(files: tuple[Path, ...], _sizes_and_times: tuple) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 24):
                digest.update(block)
    return f"sha256:{digest.hexdigest()}"


def tokenizer_fingerprint(tokenizer) -> str:
    """`"sha256:..."` of what turns text into ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    return f"sha256:{hashlib.sha256(f'{content}{special}'.encode()).hexdigest()}"


def adds_special_tokens(tokenizer) -> bool:
    """Whether the tokenizer puts a token of its own before a text."""
    return tokenizer("a")["input_ids"] != tokenizer("a", add_special_tokens=False)["input_ids"]


def library_versions() -> dict[str, str]:
    versions = {"dcformer": dcformer.__version__}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError as error:
            raise ImportError(f"Evaluation needs {name}: pip install 'dcformer[eval]'.") from error
    return versions


@cache
def git_revision() -> str | None:
    """Commit of the checkout that this package runs from, with `-modified` if files differ; None if it is none."""
    root = Path(dcformer.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):  # no git, or a repository of somebody else
        return None
    return f"{commit}-modified" if changed else commit


def hardware_name(device) -> str:
    """Name of the GPU, or of the processor."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _first_sentence(error: Exception) -> str:
    return " ".join(str(error).split()).split(". ")[0][:300].rstrip(".") + "."
