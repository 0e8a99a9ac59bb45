"""Windows of running text: documents packed into streams, and the length that a window must have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .data import import_datasets
from .task_tokens import encode
from .text_files import spread_order


if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

PAPER_WINDOW = 2048
WINDOWS_PER_STREAM = 64


def check_window(
    task: str,
    window: int,
    max_length: int | None = None,
    pretrained: Any = None,
    revision: str | None = None,
    trust_remote_code: bool | None = None,
    **_: Any,
) -> None:
    """
    Refuse to score windows of another length than the task says.

    lm-eval takes windows as long as the model's `max_length`, which is an argument of the model or comes from its
    configuration (`max_position_embeddings`). Perplexities over other windows are other quantities.

    Raises:
        ValueError: if the length is not known or is not `window`.
    """
    if max_length is None:
        if not isinstance(pretrained, str):
            raise ValueError(
                f"{task} must know the length of the model's windows: give `max_length={window}` to the model, and in "
                "lm-eval's --metadata if the model is not named by `pretrained`."
            )
        from lm_eval.models.utils import resolve_max_length
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(
            pretrained, revision=revision or "main", trust_remote_code=trust_remote_code
        )
        max_length = resolve_max_length(config, None, default=PAPER_WINDOW)
    if int(max_length) != window:
        raise ValueError(
            f"{task} scores windows of {window} tokens, but the model would take {max_length}: give "
            f"`max_length={window}` to the model, or lm-eval's --metadata '{{\"window\": {max_length}}}' for figures "
            "that compare with no other window."
        )


def pack_documents(
    documents: list[str],
    tokenizer: PreTrainedTokenizerBase,
    window: int,
    windows: int | None,
    add_bos_token: bool | None,
) -> Dataset:
    """
    Join documents, each followed by the end-of-text token, to streams of about 64 windows.

    With `windows`, documents are taken one by one, spread evenly over all, until their tokens fill so many windows. The
    last of them is cut, and the end-of-text token that follows what is left of it is artificial: the text does not end
    there. It is one target of `windows * window`.

    Args:
        documents: Texts in their order.
        tokenizer: Tokenizer of the model under test.
        window: Number of tokens of a window.
        windows: Number of windows to take; `None` for all.
        add_bos_token: As in the model's arguments.

    Returns:
        Rows of `text`, `n_documents`, `n_tokens`, `n_bytes`, `window`, `n_unscored`, `n_artificial_ends`.

    Raises:
        ValueError: if the tokenizer has no end-of-text token for texts, or `windows` is not positive.
    """
    separator = tokenizer.eos_token
    if separator is None or encode(tokenizer, separator, add_bos_token=False) != [tokenizer.eos_token_id]:
        raise ValueError(
            f"The tokenizer {tokenizer.name_or_path!r} has no end-of-text token that stands for itself in text, and "
            "documents are packed with one; use the GPT-NeoX tokenizer."
        )
    if windows is not None and windows < 1:
        raise ValueError(f"windows must be at least 1, got {windows}; leave it out to score everything.")
    lengths = [len(encode(tokenizer, document, add_bos_token=False)) + 1 for document in documents]
    taken = dict(enumerate(lengths)) if windows is None else _taken(lengths, windows * window)
    texts, kept, n_cut = [], [], 0
    for place in sorted(taken):
        is_cut = taken[place] < lengths[place]
        texts.append(_beginning(tokenizer, documents[place], taken[place] - 1) if is_cut else documents[place])
        kept.append(taken[place])
        n_cut += is_cut
    groups = _groups(kept, window)
    is_whole = len(taken) == len(documents) and n_cut == 0
    n_unscored = 0 if is_whole else max(1, len(_groups(lengths, window)) - len(groups))
    rows = [
        {
            **_stream([texts[index] for index in group], separator, tokenizer, window, add_bos_token),
            "n_unscored": n_unscored,
            "n_artificial_ends": n_cut,
        }
        for group in groups
    ]
    return import_datasets().Dataset.from_list(rows)


def _taken(lengths: list[int], budget: int) -> dict[int, int]:
    """Places of documents that fill a number of tokens, with how many of each one's are taken."""
    taken: dict[int, int] = {}
    for place in range(len(lengths)) if sum(lengths) <= budget else spread_order(len(lengths)):
        if budget > 0:
            taken[place] = min(lengths[place], budget)
            budget -= taken[place]
    return taken


def _groups(lengths: list[int], window: int) -> list[range]:
    """Which documents make a stream: so many that they fill its windows."""
    groups, start, length = [], 0, 0
    for index, n_tokens in enumerate(lengths, start=1):
        length += n_tokens
        if length >= WINDOWS_PER_STREAM * window or index == len(lengths):
            groups.append(range(start, index))
            start, length = index, 0
    return groups


def _stream(
    documents: list[str], separator: str, tokenizer: PreTrainedTokenizerBase, window: int, add_bos_token: bool | None
) -> dict[str, Any]:
    text = "".join(document + separator for document in documents)
    return {
        "text": text,
        "n_documents": len(documents),
        # Counted in the text that the model will be asked about, so that it is right for any tokenizer.
        "n_tokens": len(encode(tokenizer, text, add_bos_token)),
        "n_bytes": sum(len(document.encode("utf-8")) for document in documents),
        "window": window,
    }


def _beginning(tokenizer: PreTrainedTokenizerBase, document: str, n_tokens: int) -> str:
    if n_tokens == 0:
        return ""
    offsets = tokenizer(document, verbose=False, add_special_tokens=False, return_offsets_mapping=True)[
        "offset_mapping"
    ]
    return document[: offsets[n_tokens - 1][1]]
