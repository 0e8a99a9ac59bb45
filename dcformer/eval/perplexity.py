"""
Perplexity of running text (Pile, WikiText-2) and of target spans (Flan): data, token counts and scores for lm-eval.

The authors' training code evaluates on rows of 2,049 tokens cut from a packed validation set, with the end-of-text
tokens between documents as targets. Here documents are packed in the same way and lm-eval scores them in windows of
2,048 targets, each of which begins with the last token of the window before, so that every token counts exactly once.

The paper's documents of the Pile and examples of Flan are not published.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.contexts import encode_context
from ..common.hub import load_from_hub, naming_what_is_missing
from ..loading import load_tokenizer
from . import task_data
from .task_data import DEFAULT_SEED, SOURCES, import_extra


if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PAPER_WINDOW = 2048
WINDOWS_PER_STREAM = 64
_JSONL = ("*.jsonl", "*.jsonl.zst")
_HEADING = re.compile(r"(?<=\n \n) = [^=\n](?:[^\n]*[^=\n])? = \n \n")


def load_pile(
    data_dir: str | None = None, subset: int | None = None, seed: int = DEFAULT_SEED, **settings: Any
) -> dict[str, Any]:
    """Documents of the Pile, or `subset` of them sampled with `seed`, packed into streams; `settings` of `_packed`."""
    if data_dir is None:
        from huggingface_hub import hf_hub_download

        source = SOURCES["pile"]
        with naming_what_is_missing(source.path):
            where = {"repo_type": "dataset", "revision": source.revision}
            files = [Path(hf_hub_download(source.path, "val.jsonl.zst", **where))]
    else:
        folder = Path(data_dir, task_data.data_folder("pile", data_dir))
        files = task_data.data_files(folder, *(["test.jsonl"] if folder.name == "pile_sample" else _JSONL))
    documents = [text for (text,) in task_data.jsonl_fields(files, ("text",), subset, seed)]
    return _packed("pile", documents, data_dir, **settings)


def load_wikitext2(data_dir: str | None = None, **settings: Any) -> dict[str, Any]:
    """Articles of the test split of WikiText-2, packed like the documents of [`load_pile`]."""
    if data_dir is None:
        source = SOURCES["wikitext2"]
        rows = load_from_hub(import_extra("datasets").load_dataset, source.path, source.name, split="test")
        # In the Hub's copy blank lines are empty; in the file they are a space and a line feed.
        text = "".join(line or " \n" for line in rows["text"])
    else:
        (file,) = task_data.data_files(Path(data_dir, "wikitext2"), "wikitext2_test.txt")
        text = task_data.read_text(file)
    return _packed("wikitext2", wikitext_articles(text), data_dir, **settings)


def _packed(
    folder: str,
    documents: list[str],
    data_dir: str | None,
    subset: int | None = None,
    seed: int = DEFAULT_SEED,
    window: int = PAPER_WINDOW,
    windows: int | None = None,
    data_hash: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Streams of all documents or of `windows` windows; `settings` are the model's arguments as lm-eval passes them."""
    check_window(window, **settings)
    origin = task_data.checked_origin(folder, ((text,) for text in documents), data_dir, data_hash, is_ordered=True)
    chosen = [documents[index] for index in task_data.sampled_indices(len(documents), subset, seed)]
    packed = pack_documents(chosen, task_tokenizer(**settings), window, windows, settings)
    return {"test": packed, "origin": origin}


def load_flan(
    data_dir: str | None = None,
    subset: int | None = 320_000,
    seed: int = DEFAULT_SEED,
    window: int = PAPER_WINDOW,
    data_hash: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Examples of Flan, scored on their targets; examples with no target or one longer than a window are left out."""
    check_window(window, **settings)
    tokenizer = task_tokenizer(**settings)
    if data_dir is None:
        rows = load_from_hub(import_extra("datasets").load_dataset, SOURCES["flan"].path, split="train")
        chosen = rows.select(task_data.sampled_indices(len(rows), subset, seed))
        pairs = [(row["prompt"], row["completion"]) for row in chosen]
    else:
        files = task_data.data_files(Path(data_dir, "flan"), *_JSONL)
        pairs = list(task_data.jsonl_fields(files, ("inputs", "targets"), subset, seed))
    origin = task_data.checked_origin("flan", pairs, data_dir, data_hash)
    examples = []
    for given, target in pairs:
        context, continuation = given.strip(), " " + target.strip()  # the space is part of the target's first word
        n_tokens = len(continuation_ids(tokenizer, context, continuation, **settings))
        if target.strip() and n_tokens <= window:
            examples.append({"context": context, "continuation": continuation, "n_tokens": n_tokens})
    if left_out := len(pairs) - len(examples):
        reason = f"they have no target, or one of more than {window} tokens"
        if not examples:
            raise ValueError(f"There is nothing to score in {len(pairs)} examples of flan: {reason}.")
        logger.warning("dcformer_flan_ppl leaves out %d of %d examples: %s.", left_out, len(pairs), reason)
    return {"test": import_extra("datasets").Dataset.from_list(examples), "origin": origin}


def score_stream(doc: dict, results: list) -> dict[str, tuple[float, float]]:
    """`(log-likelihood in nats, weight)` of a stream; end-of-text tokens count as tokens but have no bytes."""
    log_likelihood = float(results[0])
    return {"token_perplexity": (log_likelihood, doc["n_tokens"]), "bits_per_byte": (log_likelihood, doc["n_bytes"])}


def score_target(doc: dict, results: list) -> dict[str, tuple[float, float]]:
    """`(log-likelihood, number of tokens)` of one target span, in nats."""
    return {"token_perplexity": (float(results[0][0]), doc["n_tokens"])}


def wikitext_articles(text: str) -> list[str]:
    """Split WikiText at the headings of articles; joined, the articles are the text again."""
    # The file begins with a blank line, so a line feed before it makes the first heading like the others.
    starts = [match.start() - 1 for match in _HEADING.finditer("\n" + text)]
    return [text[start:end] for start, end in itertools.pairwise([0, *starts[1:], len(text)])]


def check_window(window: int, max_length: int | None = None, pretrained: Any = None, **options: Any) -> None:
    """Refuse windows of another length than the task's `window`: lm-eval uses the model's `max_length`."""
    if max_length is None and isinstance(pretrained, str):
        from transformers import AutoConfig

        hub = {"revision": options.get("revision") or "main", "trust_remote_code": options.get("trust_remote_code")}
        resolve_max_length = import_extra("lm_eval.models.utils").resolve_max_length
        max_length = resolve_max_length(AutoConfig.from_pretrained(pretrained, **hub), None, default=PAPER_WINDOW)
    if max_length is None or int(max_length) != window:
        raise ValueError(
            f"The task scores windows of {window} tokens, but the model would take {max_length}: give "
            f"`max_length={window}` to the model, or lm-eval's --metadata '{{\"window\": {max_length}}}' for figures "
            "that compare with no other window."
        )


def task_tokenizer(
    pretrained: Any = None, tokenizer: Any = None, revision: str | None = None, trust_remote_code: Any = None, **_: Any
) -> PreTrainedTokenizerBase:
    """The tokenizer of the model under test, from the model's arguments: `tokenizer`, else that of `pretrained`."""
    if tokenizer is not None and not isinstance(tokenizer, str):
        return tokenizer
    source = tokenizer or pretrained
    if not isinstance(source, str):
        raise ValueError(
            "The task must know the model's tokenizer, got none: give `pretrained` or `tokenizer` in the arguments of "
            'the model, or lm-eval\'s --metadata \'{"tokenizer": "FOLDER OR HUB NAME"}\'.'
        )
    return load_tokenizer(source, revision=revision or "main", trust_remote_code=trust_remote_code)


def encode(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    /,
    add_bos_token: bool | None = None,
    prefix_token_id: int | None = None,
    **_: Any,
) -> list[int]:
    """
    Token ids of a context as the model under test reads them.

    `add_bos_token` and `prefix_token_id` are the model's arguments; of all these, as lm-eval passes them on, only they
    matter. A text that begins with the token before empty contexts gets no other one.
    """
    candidates = (prefix_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    prefix = next((token for token in candidates if token is not None), None)
    if prefix is not None and text.startswith(tokenizer.decode(prefix)):
        add_bos_token = False
    if add_bos_token is None:
        return encode_context(tokenizer, text)
    if add_bos_token and tokenizer.bos_token_id is None:
        raise ValueError(f"add_bos_token=True, and {tokenizer.name_or_path!r} has no beginning of text; leave it out.")
    ids = tokenizer(text, verbose=False, add_special_tokens=False)["input_ids"]
    return [tokenizer.bos_token_id, *ids] if add_bos_token else ids


def continuation_ids(
    tokenizer: PreTrainedTokenizerBase, context: str, continuation: str, /, **settings: Any
) -> list[int]:
    """The ids that lm-eval scores for a continuation; the context must not end in white space."""
    if not context:
        return encode(tokenizer, continuation, add_bos_token=False)
    whole = encode(tokenizer, context + continuation, **settings)
    return whole[len(encode(tokenizer, context, **settings)) :]


def pack_documents(
    documents: list[str], tokenizer: PreTrainedTokenizerBase, window: int, windows: int | None, settings: dict[str, Any]
) -> Dataset:
    """
    Join documents, with an end-of-text token after every one, into streams of about 64 windows; `settings` of `encode`.

    With `windows`, documents spread evenly over all are taken until they fill that many windows. The last one is cut
    and followed by an artificial end-of-text token.
    """
    separator = tokenizer.eos_token
    if separator is None or encode(tokenizer, separator, add_bos_token=False) != [tokenizer.eos_token_id]:
        raise ValueError(
            f"The tokenizer {tokenizer.name_or_path!r} does not encode its end-of-text token in a text as one id, and "
            "documents are packed with it; use the GPT-NeoX tokenizer."
        )
    lengths = [len(encode(tokenizer, document, add_bos_token=False)) + 1 for document in documents]
    taken = _taken(lengths, math.inf if windows is None else windows * window)
    cut = {index for index, n_tokens in taken.items() if n_tokens < lengths[index]}
    texts = {
        index: _first_tokens(tokenizer, documents[index], n_tokens - 1) if index in cut else documents[index]
        for index, n_tokens in taken.items()
    }
    streams, n_unscored = _streams(taken, window), 0
    if len(taken) < len(documents) or cut:
        n_unscored = max(1, len(_streams(dict(enumerate(lengths)), window)) - len(streams))
    rows = []
    for stream in streams:
        text = "".join(texts[index] + separator for index in stream)
        rows.append(
            {
                "text": text,
                "n_documents": len(stream),
                # Counted in the text that the model will be asked about, so that it is right for any tokenizer.
                "n_tokens": len(encode(tokenizer, text, **settings)),
                "n_bytes": sum(len(texts[index].encode("utf-8")) for index in stream),
                "window": window,
                "n_unscored": n_unscored,
                "n_artificial_ends": len(cut),
            }
        )
    return import_extra("datasets").Dataset.from_list(rows)


def _taken(lengths: list[int], budget: float) -> dict[int, int]:
    """Index of a document, ascending -> number of its tokens to take, `budget` tokens together."""
    taken: dict[int, int] = {}
    for index in task_data.spread_order(len(lengths)):
        if budget > 0:
            taken[index] = int(min(lengths[index], budget))
            budget -= taken[index]
    return dict(sorted(taken.items()))


def _streams(lengths: dict[int, int], window: int) -> list[list[int]]:
    """The documents of every stream, by index; a stream ends with the document that fills its last window."""
    streams: list[list[int]] = []
    length = 0
    for index, n_tokens in lengths.items():
        if length == 0:
            streams.append([])
        streams[-1].append(index)
        length = (length + n_tokens) if length + n_tokens < WINDOWS_PER_STREAM * window else 0
    return streams


def _first_tokens(tokenizer: PreTrainedTokenizerBase, document: str, n_tokens: int) -> str:
    encoding = tokenizer(document, verbose=False, add_special_tokens=False, return_offsets_mapping=True)
    return document[: [0, *(end for _, end in encoding["offset_mapping"])][n_tokens]]
