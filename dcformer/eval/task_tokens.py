"""Tokens of a task's texts as lm-eval's model makes them, for tasks whose documents are counted or cut by tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..common.tokenizers import load_tokenizer


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_task_tokenizer(
    pretrained: Any = None,
    tokenizer: Any = None,
    revision: str | None = None,
    trust_remote_code: bool | None = None,
    **_: Any,
) -> PreTrainedTokenizerBase:
    """
    The tokenizer of the model under test, from the model's arguments: `tokenizer` if given, else `pretrained`'s own.

    Args:
        pretrained: Folder or Hub id of the model.
        tokenizer: Folder or Hub id of a tokenizer, or a tokenizer.
        revision: Git revision of either on the Hub.
        trust_remote_code: Run code that comes with the tokenizer.

    Raises:
        ValueError: if neither names a tokenizer.
    """
    if tokenizer is not None and not isinstance(tokenizer, str):
        return tokenizer
    source = tokenizer or pretrained
    if not isinstance(source, str):
        raise ValueError(
            "This task counts tokens and must know the model's tokenizer: give `pretrained` or `tokenizer` in the "
            'arguments of the model, or lm-eval\'s --metadata \'{"tokenizer": "FOLDER OR HUB ID"}\'.'
        )
    try:
        return load_tokenizer(source, revision=revision or "main", trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"There is no tokenizer in {source!r}; name one with `tokenizer`.") from error


def encode(tokenizer: PreTrainedTokenizerBase, text: str, add_bos_token: bool | None = None) -> list[int]:
    """Token ids as lm-eval's model makes them of the same text; `add_bos_token` as in the model's arguments."""
    prefix = tokenizer.bos_token if tokenizer.bos_token is not None else tokenizer.eos_token
    if prefix is not None and text.startswith(prefix):
        add_bos_token = False
    special = {} if add_bos_token is None else {"add_special_tokens": add_bos_token}
    # Streams are longer than any model takes at once, of which the tokenizer would warn.
    return tokenizer(text, verbose=False, **special)["input_ids"]


def continuation_ids(
    tokenizer: PreTrainedTokenizerBase, context: str, continuation: str, add_bos_token: bool | None = None
) -> list[int]:
    """The ids that lm-eval scores for a context, which must not end in white space, and its continuation."""
    if not context:
        return encode(tokenizer, continuation, add_bos_token=False)
    whole = encode(tokenizer, context + continuation, add_bos_token)
    return whole[len(encode(tokenizer, context, add_bos_token)) :]
