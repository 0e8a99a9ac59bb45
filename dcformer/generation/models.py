"""A model and its tokenizer, by the name of a bundled model, a folder or a name on the Hub, ready to write text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ..common.quiet import quiet_libraries
from ..configuration_dcformer import DCFormerConfig
from ..eval.devices import choose_device
from ..eval.model_files import check_complete
from ..eval.provenance import find_model
from ..pretrained import find_model_folder


@dataclass
class LoadedModel:
    """
    What text is generated with.

    Attributes:
        name: As it was given.
        model: In evaluation mode, on its device.
        tokenizer: Of the model.
    """

    name: str
    model: Any
    tokenizer: Any

    @property
    def context_length(self) -> int | None:
        """Tokens that the model was made for, if its configuration says so."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text: those of generation_config.json, else the tokenizer's."""
        found = self.model.generation_config.eos_token_id
        if found is None:
            found = self.tokenizer.eos_token_id
        if found is None:
            return ()
        return (found,) if isinstance(found, int) else tuple(found)

    @property
    def pad_token_id(self) -> int:
        """An id that fills rows of a batch; the mask hides it, so that any will do where none is named."""
        named = (self.model.generation_config.pad_token_id, self.tokenizer.pad_token_id, *self.eos_token_ids, 0)
        return next(number for number in named if number is not None)

    def encode(self, text: str, what: str = "The prompt", *, add_special_tokens: bool = True) -> list[int]:
        """
        Token ids of a prompt.

        Args:
            text: The prompt.
            what (defaults to `"The prompt"`): What messages call it.
            add_special_tokens (defaults to `True`): Whether the tokenizer adds those of its own; templates of
                conversations have them already.

        Raises:
            ValueError: if there is nothing in it, or an id has no embedding and the model's `oov_policy` does not
                clamp it.
        """
        if not text.strip():
            raise ValueError(f"{what} is empty; give some text to continue.")
        ids = self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        if not ids:
            raise ValueError(f"The tokenizer makes no token of {what.lower()}; give other text, or another tokenizer.")
        rows = self.model.get_input_embeddings().num_embeddings
        is_ours = isinstance(self.model.config, DCFormerConfig)
        if max(ids) >= rows and not (is_ours and self.model.config.oov_policy == "clamp"):
            advice = "--oov-policy clamp or pad" if is_ours else "a tokenizer of the model's own vocabulary"
            raise ValueError(
                f"{what} has token id {max(ids)} at position {ids.index(max(ids))}, and {self.name!r} has embeddings "
                f"for ids below {rows}; use {advice}."
            )
        return ids


def load_model(
    name: str | os.PathLike,
    *,
    tokenizer: str | None = None,
    revision: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    attn_implementation: str | None = None,
    oov_policy: str | None = None,
) -> LoadedModel:
    """
    Load a causal language model of Transformers, ours or another.

    Args:
        name: A bundled model, a folder, or a name on the Hub; the authors' files too.
        tokenizer (*optional*): Folder, `tokenizer.json` or name on the Hub; `None`: that of the model.
        revision (*optional*): On the Hub; `None`: `main`.
        dtype (*optional*): Such as `"bfloat16"`; `None`: that in which the weights are stored.
        device (*optional*): As [`dcformer.eval.devices.choose_device`] takes it.
        attn_implementation (*optional*): As `from_pretrained` takes it.
        oov_policy (*optional*): `"error"`, `"clamp"` or `"pad"`, of DCFormer and DCPythia; `None`: what the
            configuration says.

    Raises:
        FileNotFoundError: if the model or its tokenizer is not there or cannot be reached.
        ValueError: if it cannot be used, or this machine has no such device.
    """
    place, where = choose_device(device), find_model_folder(os.fspath(name))
    with quiet_libraries():
        found = find_model(where, revision=revision, tokenizer=tokenizer, begins_texts=False)
        options: dict[str, Any] = {"revision": found.revision, "local_files_only": found.local_files_only}
        if oov_policy is not None:
            if not isinstance(found.config, DCFormerConfig):
                raise ValueError(
                    f"oov_policy={oov_policy!r} is for DCFormer and DCPythia, and {name!r} is a "
                    f"{found.config.model_type} model; leave it out."
                )
            options["oov_policy"] = oov_policy
        if attn_implementation is not None:
            options["attn_implementation"] = attn_implementation
        chosen = "auto" if dtype is None else getattr(torch, dtype)
        try:
            model, info = AutoModelForCausalLM.from_pretrained(where, dtype=chosen, output_loading_info=True, **options)
        except (OSError, ImportError) as error:
            raise ValueError(f"{str(name)!r} cannot be loaded: {error}") from error
        check_complete(model, info, str(name))
    return LoadedModel(str(name), model.to(place).eval(), found.tokenizer)


def context_warning(prompts: Sequence[Sequence[int]], new_tokens: int | None, model: LoadedModel) -> str | None:
    """What to say of prompts that leave the context which the model was made for, or `None`."""
    context = model.context_length
    longest = max(map(len, prompts))
    if context is None or longest + (new_tokens or 0) <= context:
        return None
    if longest > context:
        what = f"The prompt has {longest} tokens"
        if len(prompts) > 1:
            what = f"{sum(len(ids) > context for ids in prompts)} of {len(prompts)} prompts have up to {longest} tokens"
    else:
        what = f"{longest} tokens of the prompt and {new_tokens} new ones are more"
        return f"{what} than the {context} that the model was made for; what it writes beyond them may be poor."
    return f"{what}, more than the {context} that the model was made for; what it writes may be poor."
