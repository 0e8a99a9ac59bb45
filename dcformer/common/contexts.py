"""Token ids of a text that is to be continued."""

import functools
import itertools
import logging
from typing import Any


_warn_once = functools.cache(logging.getLogger(__name__).warning)


def encode_context(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """
    Token ids of a text, without those that the tokenizer appends, such as an end of text, but with those before it.

    `options` are further arguments of the tokenizer.
    """
    # verbose=False: the tokenizer would warn of texts longer than the model's context.
    encode = functools.partial(tokenizer, verbose=False, return_special_tokens_mask=True, **options)
    encoding = encode(text)
    ids, is_added = encoding["input_ids"], encoding["special_tokens_mask"]
    if 0 not in is_added:  # an empty text does not divide added tokens into those before and after
        is_added = encode("a")["special_tokens_mask"]
    end = len(ids) - sum(1 for _ in itertools.takewhile(bool, reversed(is_added)))
    if end < len(ids):
        appended = tokenizer.decode(ids[end:])
        _warn_once(f"The tokenizer appends {appended!r} to texts; it is left out here, where texts are continued.")
    return ids[:end]


def refuse_surrogates(text: str, what: str) -> None:
    """Raise ValueError, with `what` and the line, for text that holds bytes that were not decoded, as Python does."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(error.start - 20, 0) : error.start + 20]
        line = f" in line {text.count(chr(10), 0, error.start) + 1}" if "\n" in text else ""
        raise ValueError(f"{what} must be UTF-8, got {around!r}{line}.") from error
