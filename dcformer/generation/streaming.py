"""Text while it is generated: a streamer of Transformers that ends before stop strings and can be told to stop."""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, TextStreamer

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


class _Abandoned(StoppingCriteria):
    """Ends a text when nobody reads it any more."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), self.event.is_set(), device=input_ids.device, dtype=torch.bool)


def iterate_pieces(generate: Callable[[Callable[[str], None], StoppingCriteria], Any]) -> Iterator[str | Any]:
    """
    What a function writes, as an iterator, while it runs in a thread; at last what it returns.

    Args:
        generate: Called with what to write pieces to, and a criterion to generate by: it ends the text when the
            iterator is closed.

    Raises:
        Exception: that of the function.
    """
    pieces: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    abandoned = _Abandoned()

    def run() -> None:
        try:
            result = generate(lambda piece: pieces.put(("piece", piece)), abandoned)
        except BaseException as error:
            pieces.put(("error", error))
        else:
            pieces.put(("result", result))

    # What belongs to the caller's task, such as the visitor whom a message is for, is found in the thread too.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True)
    thread.start()
    try:
        while True:
            kind, value = pieces.get()
            if kind == "error":
                raise value
            yield value
            if kind == "result":
                return
    finally:
        abandoned.event.set()
        thread.join()
