"""What makes a saved folder one that can be shared: the code beside the weights, and notes in the weights' headers.

A folder with its code loads with `trust_remote_code=True` where dcformer is not installed. Transformers finds the code
by the `auto_map` of config.json, which names a class for every Auto class.
"""

import contextlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.dynamic_module_utils import get_relative_import_files

from .version_dcformer import __version__


if TYPE_CHECKING:
    from transformers.configuration_utils import PreTrainedConfig as _Base  # what `SharedConfig` is mixed into
else:
    _Base = object

# model_type -> the files of its configuration and its models, and how the names of its classes begin.
_FAMILIES = {
    "dcformer": ("configuration_dcformer", "modeling_dcformer", "DCFormer"),
    "dcpythia": ("configuration_dcformer", "modeling_dcformer", "DCPythia"),
    "dcvit": ("configuration_dcvit", "modeling_dcvit", "DCViT"),
}
# How the names of model classes end -> their Auto class and the Hub's name of their task. A class that the modelling
# file does not have is left out of the map.
AUTO_CLASSES = {
    "Model": ("AutoModel", "feature-extraction"),
    "ForCausalLM": ("AutoModelForCausalLM", "text-generation"),
    "ForSequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
    "ForTokenClassification": ("AutoModelForTokenClassification", "token-classification"),
    "ForQuestionAnswering": ("AutoModelForQuestionAnswering", "question-answering"),
    "ForImageClassification": ("AutoModelForImageClassification", "image-classification"),
}
VERSION_NOTE, SOURCE_NOTE = "dcformer_version", "source_sha256"

_FOLDER = Path(__file__).parent
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_LARGEST_HEADER = 100_000_000  # bytes, as the format allows
_WRITER = threading.RLock()


def auto_map(config: PreTrainedConfig, folder: str | os.PathLike | None = None) -> dict[str, str]:
    """
    The classes that load a model of this configuration from its folder, as `auto_map` in config.json names them.

    Args:
        config: A configuration of one of our classes.
        folder (*optional*): Where the model is saved, for code that is there already.

    Returns:
        Name of the Auto class -> `"file.Class"`.

    Raises:
        ValueError: for a class that is defined elsewhere, such as one that you derived from ours.
    """
    configuration, modeling, prefix = _FAMILIES.get(config.model_type, ("", "", ""))
    if type(config).__name__ != f"{prefix}Config":
        raise ValueError(
            f"{type(config).__name__} (model_type {config.model_type!r}) is defined outside dcformer, whose code would "
            "not load it; save without with_code, or register your own classes with register_for_auto_class."
        )
    # Of a copy beside a checkpoint, Transformers keeps the configuration's files apart from those of the models.
    sources = [file for place in (_FOLDER, Path(folder or _FOLDER)) if (file := place / f"{modeling}.py").is_file()]
    classes = set(re.findall(r"^class (\w+)", sources[0].read_text(encoding="utf-8"), re.M)) if sources else set()
    models = {auto: prefix + ending for ending, (auto, _) in AUTO_CLASSES.items() if prefix + ending in classes}
    return {
        "AutoConfig": f"{configuration}.{prefix}Config",
        **{auto: f"{modeling}.{name}" for auto, name in models.items()},
    }


def has_code(config: PreTrainedConfig) -> bool:
    """Whether the configuration says that the folder with it holds our code too."""
    files = {file for configuration, modeling, _ in _FAMILIES.values() for file in (configuration, modeling)}
    references = [name for name in (getattr(config, "auto_map", None) or {}).values() if isinstance(name, str)]
    return bool(references) and all(name.split("--")[-1].split(".")[0] in files for name in references)


@contextlib.contextmanager
def code_along(
    config: PreTrainedConfig, with_code: bool | None, folder: str | os.PathLike | None = None
) -> Iterator[None]:
    """
    Let a configuration name our classes, or none, for as long as it is saved.

    Args:
        config: The configuration; its `auto_map` is as before at the end.
        with_code: Whether the folder is to hold the code. None: if the folder that the model came from did.
        folder (*optional*): That folder, for code that is there already.

    Raises:
        ValueError: if there is no code for this class, or if the class itself comes from a copy beside a checkpoint,
            which Transformers always saves along.
    """
    before = config.__dict__.get("auto_map")
    was_there = "auto_map" in config.__dict__
    if with_code is False and type(config).__module__.startswith("transformers_modules"):
        raise ValueError(
            "with_code=False is not possible for a model that was loaded by the code beside its weights, which "
            "Transformers always saves along; install and import dcformer, and load the model without "
            "trust_remote_code."
        )
    if with_code or (with_code is None and has_code(config)):
        config.auto_map = auto_map(config, folder)
    elif with_code is False and has_code(config):
        del config.auto_map
    try:
        yield
    finally:
        if was_there:
            config.auto_map = before
        elif "auto_map" in config.__dict__:
            del config.auto_map


def copy_code(config: PreTrainedConfig, folder: str | os.PathLike) -> None:
    """Copy the files that a model needs beside its weights, into a folder that is made if need be."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    *names, _ = _FAMILIES[config.model_type]
    starts = [file for name in names if (file := _FOLDER / f"{name}.py").is_file()]
    files = sorted({*starts, *(Path(file) for start in starts for file in get_relative_import_files(start))})
    for file in files:
        shutil.copyfile(file, Path(folder) / file.name)


def older_files(config: PreTrainedConfig, timestamps: dict[str, float]) -> dict[str, float]:
    """What Transformers takes for unchanged by a push: not the code, which is copied before it looks."""
    return {name: time for name, time in timestamps.items() if not (name.endswith(".py") and has_code(config))}


class SharedConfig(_Base):
    """A configuration that can be saved with the code of its model."""

    def save_pretrained(
        self, save_directory: str | os.PathLike, push_to_hub: bool = False, with_code: bool | None = None, **kwargs: Any
    ) -> None:
        """
        As `PreTrainedConfig.save_pretrained`, and if asked with the code of the model.

        Args:
            with_code (`bool`, *optional*): Copy the Python files of the model into the folder and name its classes in
                config.json, so that it loads with `trust_remote_code=True` where dcformer is not installed. None: if
                the folder that the configuration came from held them.

        Raises:
            ValueError: if there is no code for this class, or if it can only be saved with its code.
        """
        with code_along(self, with_code, save_directory):
            if has_code(self):
                copy_code(self, save_directory)
            super().save_pretrained(os.fspath(save_directory), push_to_hub, **kwargs)

    def _upload_modified_files(
        self, working_dir: str | os.PathLike, repo_id: str, files_timestamps: dict[str, float], **kwargs: Any
    ) -> Any:
        return super()._upload_modified_files(working_dir, repo_id, older_files(self, files_timestamps), **kwargs)


@contextlib.contextmanager
def noted_in_headers(notes: Mapping[str, str]) -> Iterator[None]:
    """
    Add notes to the headers of the safetensors files that this thread saves through Transformers.

    `save_pretrained` has no argument for them and writes `{"format": "pt"}` alone; to add them afterwards would mean
    to write every file again, since a header cannot grow. So its writer is replaced for the time of the save.
    """
    from transformers import modeling_utils  # here, since configurations need no torch

    saver = threading.get_ident()
    with _WRITER:
        write = modeling_utils.safe_save_file

        def write_with_notes(tensors: Any, filename: Any, metadata: Mapping[str, str] | None = None) -> None:
            if threading.get_ident() != saver:
                write(tensors, filename, metadata=metadata)
                return
            write(tensors, filename, metadata={**(metadata or {}), **notes})
            _put_metadata_in_order(filename)

        modeling_utils.safe_save_file = write_with_notes
        try:
            yield
        finally:
            modeling_utils.safe_save_file = write


def _put_metadata_in_order(path: str | os.PathLike) -> None:
    """
    Sort the metadata in a header by name. The safetensors library writes them in an order that changes from call to
    call, so that files of the same weights would differ.
    """
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(size).decode()
        start = header.index("{", header.index('"__metadata__"'))
        metadata, end = json.JSONDecoder().raw_decode(header, start)
        in_order = json.dumps(metadata, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
        room = len(header[start:end].encode())
        if len(in_order) <= room:  # always, unless the two libraries came to write some character in different ways
            file.seek(8 + len(header[:start].encode()))
            file.write(in_order.ljust(room))


def header_notes(source_sha256: str | None) -> dict[str, str]:
    """What we note in a header: the version that writes it and, if known, the checksum of the converted checkpoint."""
    notes = {VERSION_NOTE: __version__}
    return notes | ({SOURCE_NOTE: source_sha256} if source_sha256 else {})


def read_header_notes(folder: str | os.PathLike) -> dict[str, str]:
    """The notes in the header of the first weights file of a local folder; empty if there are none."""
    folder = Path(folder)
    names = sorted(path.name for path in folder.iterdir() if _WEIGHTS.fullmatch(path.name)) if folder.is_dir() else []
    if not names:
        return {}
    with (folder / names[0]).open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(size, _LARGEST_HEADER)))
        except ValueError:  # damaged, of which whoever reads the weights tells
            return {}
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(metadata, dict):
        return {}
    return {name: str(metadata[name]) for name in (VERSION_NOTE, SOURCE_NOTE) if name in metadata}


__all__ = [
    "SharedConfig",
    "auto_map",
    "code_along",
    "copy_code",
    "has_code",
    "header_notes",
    "noted_in_headers",
    "read_header_notes",
]
