"""Saving a model: our parameter names, notes in the weights' headers, a model card and, if asked, the code."""

import contextlib
import os
from pathlib import Path
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from .loading_dcformer import saved_in_authors_names
from .model_card import (
    CARD_FILE,
    is_transformers_template,
    known_origin,
    read_metadata,
    users_card,
    write_card,
)
from .sharing_dcformer import code_along, copy_code, has_code, header_notes, noted_in_headers, older_files


class SavedModel(PreTrainedModel):
    # Of the checkpoint that was converted, if the weights descend from one.
    _source_sha256: str | None = None
    # For as long as the model is being saved: what somebody else has written in the README.md of the folder.
    _others_card: bytes | None = None

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict | None = None,
        push_to_hub: bool = False,
        *args: Any,
        with_code: bool | None = None,
        save_original_format: bool = False,
        **kwargs: Any,
    ) -> None:
        """
        As `PreTrainedModel.save_pretrained`, but under our parameter names also where the authors' were read, and with
        a model card, README.md, unless there is one that somebody else has written or edited.

        Args:
            save_original_format (`bool`, defaults to `False`): Write the authors' names.
            with_code (`bool`, *optional*): Copy the Python files of the model beside the weights and name its classes
                in config.json, so that the folder loads with `trust_remote_code=True` where dcformer is not installed.
                None: if the folder that the model came from held them.

        Raises:
            ValueError: if there is no code for this class, or if it can only be saved with its code.
        """
        is_adapter = getattr(self, "_hf_peft_config_loaded", False)
        is_writer = self.should_save_on_this_rank(is_main_process) and not os.path.isfile(save_directory)
        self._others_card = users_card(save_directory)
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(code_along(self.config, with_code))
                stack.enter_context(noted_in_headers(header_notes(self._source_sha256)))
                if save_original_format:
                    stack.enter_context(saved_in_authors_names(self, self._authors_patterns()))
                if is_writer and not is_adapter and has_code(self.config):
                    copy_code(self.config, save_directory)
                super().save_pretrained(
                    save_directory,
                    is_main_process,
                    state_dict,
                    push_to_hub,
                    *args,
                    save_original_format=save_original_format,
                    **kwargs,
                )
                card = Path(save_directory, CARD_FILE)
                if is_adapter or not is_writer:
                    return
                if self._others_card is not None:
                    if card.read_bytes() != self._others_card:  # a push puts the card of the repository there
                        card.write_bytes(self._others_card)
                elif not push_to_hub:
                    card.write_text(self._card(card.parent.resolve().name), encoding="utf-8")
        finally:
            self._others_card = None

    @classmethod
    def _authors_patterns(cls) -> dict[str, str]:
        """The authors' name of a parameter, as a regular expression -> ours; empty if they have published none."""
        return {}

    def push_to_hub(self, repo_id: str, *, with_code: bool | None = None, **kwargs: Any) -> str:
        """
        As `PreTrainedModel.push_to_hub`, with the model card that `save_pretrained` writes unless the repository has
        one.

        Args:
            with_code (`bool`, *optional*): As for `save_pretrained`.
        """
        with code_along(self.config, with_code):
            return super().push_to_hub(repo_id, **kwargs)

    def _upload_modified_files(
        self, working_dir: str | os.PathLike, repo_id: str, files_timestamps: dict[str, float], **kwargs: Any
    ) -> Any:
        # Transformers has just put a card there: that of the repository or, if it has none, an empty form.
        card = Path(working_dir, CARD_FILE)
        text = card.read_text(encoding="utf-8")
        if is_transformers_template(text) and not getattr(self, "_hf_peft_config_loaded", False):
            tags = read_metadata(text).get("tags") or ()
            card.write_bytes(self._others_card or self._card(repo_id, tags).encode())
            files_timestamps = {name: time for name, time in files_timestamps.items() if name != CARD_FILE}
        files_timestamps = older_files(self.config, files_timestamps)
        return super()._upload_modified_files(working_dir, repo_id, files_timestamps, **kwargs)

    def _card(self, name: str, tags: Any = ()) -> str:
        source = getattr(self.config, "_name_or_path", "") or ""
        licence, base_model = known_origin(source, name)
        return write_card(
            name,
            self.config,
            class_name=type(self).__name__,
            # Under DeepSpeed a parameter is elsewhere, and knows its size by another name.
            parameters=sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in self.parameters()),
            dtype=str(self.dtype).removeprefix("torch."),
            tags=[*(self.model_tags or ()), *tags],
            licence=licence,
            base_model=base_model,
        )


__all__ = ["SavedModel"]
