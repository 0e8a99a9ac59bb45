"""Strings that end a text, for every tokenizer.

`stop_strings` of generate() looks at the vocabulary, token by token, which fails for a tokenizer of whole words: it
cannot spell the letters that are tried. Here the end of the text itself is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria


# Tokens before those that a string can lie in: the first of them may be decoded otherwise than inside a text.
_TOKENS_BEFORE = 4


class StopStrings(StoppingCriteria):
    """
    Ends a row when one of some strings stands at the end of its new text.

    Args:
        strings: None of them empty.
        tokenizer: That decodes the rows.
        prompt_length: Tokens before the new text.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Any, prompt_length: int):
        self.strings = tuple(strings)
        self.tokenizer = tokenizer
        self.prompt_length = prompt_length
        # Every token of a string has a byte of it at least.
        self.tokens = max(len(text.encode()) for text in self.strings) + _TOKENS_BEFORE

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """(rows,) booleans for (rows, length) ids."""
        new = input_ids[:, self.prompt_length :][:, -self.tokens :].tolist()
        ends = self.tokenizer.batch_decode(new, skip_special_tokens=True)
        is_done = [any(text in end for text in self.strings) for end in ends]
        return torch.tensor(is_done, dtype=torch.bool, device=input_ids.device)


def text_before(strings: Sequence[str], text: str) -> str:
    """A text up to the first of the strings in it."""
    ends = [position for position in (text.find(string) for string in strings) if position >= 0]
    return text[: min(ends)] if ends else text


def possible_start(strings: Sequence[str], text: str) -> int:
    """Where the end of a text may begin one of the strings; its length if it cannot."""
    for start in range(max(0, len(text) - max(map(len, strings), default=0)), len(text)):
        if any(string.startswith(text[start:]) for string in strings):
            return start
    return len(text)
