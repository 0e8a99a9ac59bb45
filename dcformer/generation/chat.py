"""A conversation: every message is answered in the light of those before it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from jinja2 import TemplateError

from .generator import Generated, TextGenerator


def set_chat_template(tokenizer, path: str | os.PathLike) -> None:
    """
    Give a tokenizer the template of a file.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is empty or no text.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"There is no chat template {str(path)!r}; check the path.")
    try:
        template = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"The chat template {str(path)!r} is no text in UTF-8 ({error.reason}).") from error
    if not template.strip():
        raise ValueError(f"The chat template {str(path)!r} is empty.")
    tokenizer.chat_template = template


class Conversation:
    """
    Messages of a person and a model in turns.

    The cache of an answer is used for the next one if its keys are of exactly the tokens with which the conversation
    then begins. A template that trims answers, or a tokenizer that splits their text in another way than the model
    wrote it, makes them others; the conversation is then read anew.

    Args:
        generator: Of the answers.

    Raises:
        ValueError: if the tokenizer has no chat template.
    """

    def __init__(self, generator: TextGenerator):
        if not generator.loaded.tokenizer.chat_template:
            raise ValueError(
                f"The tokenizer of {generator.loaded.name!r} has no chat template, by which messages become one text; "
                "name a file that holds one by --chat-template, or leave --chat out."
            )
        self.generator = generator
        self.messages: list[dict[str, str]] = []
        self.reused_tokens = 0  # of the last answer's prompt, those that were taken from the cache
        self._last: Generated | None = None

    def answer(self, message: str, write: Callable[[str], None] | None = None) -> str:
        """
        The model's answer to a message, which then belongs to the conversation.

        Args:
            message: What the person says.
            write (*optional*): Called with the answer piece by piece.

        Raises:
            ValueError: if the message is empty or the template cannot be used.
        """
        if not message.strip():
            raise ValueError("The message is empty; write something to be answered.")
        messages = [*self.messages, {"role": "user", "content": message}]
        ids = self._encode(messages)
        cache = None
        if self._last is not None and self._last.cache is not None:
            held = self._last.cache.get_seq_length()
            if held < len(ids) and self._last.sequence[:held] == ids[:held]:
                cache = self._last.cache
        self.reused_tokens = 0 if cache is None else cache.get_seq_length()
        self._last = None  # generating changes its cache
        self._last = self.generator.generate(ids, write, cache=cache, keeps_cache=True)
        self.messages = [*messages, {"role": "assistant", "content": self._last.text}]
        return self._last.text

    def _encode(self, messages: list[dict[str, str]]) -> list[int]:
        loaded = self.generator.loaded
        try:
            text = loaded.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError) as error:
            raise ValueError(f"The chat template of {loaded.name!r} cannot be used: {error}") from error
        return loaded.encode(text, "The conversation", add_special_tokens=False)
