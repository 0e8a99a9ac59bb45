"""Text while it is generated: a streamer of Transformers that ends before stop strings and can be told to stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import TextStreamer

from .stopping import possible_start, text_before


class TextWriter(TextStreamer):
    """
    Hands on the text of new tokens as soon as whole words are there.

    Args:
        tokenizer: Of the model.
        write: Called with every piece; the pieces together are the text.
        stop_strings (*optional*): The text ends before the first of them, so what may begin one is held back.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], None], stop_strings: Sequence[str] = ()):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write
        self.stop_strings = tuple(stop_strings)
        self._held_back = ""
        self._has_ended = False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self._has_ended:
            return
        text = self._held_back + text
        kept = text_before(self.stop_strings, text)
        self._has_ended = stream_end or len(kept) < len(text)
        end = len(kept) if self._has_ended else possible_start(self.stop_strings, kept)
        self._held_back = kept[end:]
        if end > 0:
            self.write(kept[:end])
