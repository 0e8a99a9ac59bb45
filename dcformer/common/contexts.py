"""Token ids of a text that something follows."""

import functools
import itertools
import logging
from typing import Any


_say_once = functools.cache(logging.getLogger(__name__).warning)


def encode_context(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """
    Token ids of a text, without what the tokenizer appends to it, such as an end of text; what begins it stays.

    `options` are further arguments of the tokenizer.
    """
    # Some texts are longer than any model takes at once, of which the tokenizer would warn.
    encode = functools.partial(tokenizer, verbose=False, return_special_tokens_mask=True, **options)
    encoding = encode(text)
    ids, is_added = encoding["input_ids"], encoding["special_tokens_mask"]
    if 0 not in is_added:  # nothing of the text is there, to tell what stands before it from what follows
        is_added = encode("a")["special_tokens_mask"]
    end = len(ids) - sum(1 for _ in itertools.takewhile(bool, reversed(is_added)))
    if end < len(ids):
        appended = tokenizer.decode(ids[end:])
        _say_once(f"The tokenizer appends {appended!r} to texts; it is left out here, where texts are continued.")
    return ids[:end]
