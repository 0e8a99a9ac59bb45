"""The model that is to be served, looked at before a server is started, whose own messages about it are long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..common.quiet import quiet_libraries
from ..configuration_dcformer import DCFormerConfig
from ..eval.provenance import Model, find_model
from ..pretrained import find_model_folder
from .options import has_option


@dataclass(frozen=True)
class ServedModel:
    """
    A model that is there, with a tokenizer.

    Attributes:
        name: As it was given, which requests call it by.
        place: The folder, or the name on the Hub.
        found: Its configuration and tokenizer.
        revision: On the Hub, as it was given.
        tokenizer: In place of the model's own, as it was given.
    """

    name: str
    place: str
    found: Model
    revision: str | None = None
    tokenizer: str | None = None

    @property
    def is_bundled(self) -> bool:
        return self.place != self.name

    @property
    def is_stored_in_float32(self) -> bool:
        """Whether its configuration says so."""
        return self.found.config.get_text_config().dtype == torch.float32

    @property
    def composes_heads(self) -> bool:
        config = self.found.config
        return isinstance(config, DCFormerConfig) and config.composes_heads

    @property
    def has_chat_template(self) -> bool:
        return bool(self.found.tokenizer.chat_template)


def find_served_model(
    name: str,
    *,
    revision: str | None = None,
    tokenizer: str | None = None,
    arguments: Sequence[str] = (),
) -> ServedModel:
    """
    Read a model's configuration and tokenizer, without its weights.

    Args:
        name: A bundled model, a folder, or a name on the Hub.
        revision (*optional*): On the Hub; `None`: `main`.
        tokenizer (*optional*): Folder or name on the Hub; `None`: that of the model.
        arguments (defaults to none): Of the engine, among which `trust-remote-code` lets the model's code run.

    Raises:
        FileNotFoundError: if the model or its tokenizer is not there or cannot be reached.
        ValueError: if it cannot be used.
    """
    if name.startswith("-"):
        raise ValueError(f"{name!r} stands where the model is to be; give MODEL first and options after it.")
    place = find_model_folder(name)
    trusts = has_option(arguments, "trust-remote-code")
    with quiet_libraries():
        found = find_model(place, revision=revision, tokenizer=tokenizer, trust_remote_code=trusts, begins_texts=False)
    return ServedModel(name, place, found, revision, tokenizer)
