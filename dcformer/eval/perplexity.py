"""
Perplexity of running text (Pile, WikiText-2) and of target spans (Flan): data, token counts and scores for lm-eval.

Table 4 of the paper has two columns of perplexity, taken here as per token of the GPT-NeoX tokenizer. The authors'
training code evaluates on rows of 2,049 tokens cut from a packed validation set: a row's first 2,048 tokens are the
input and its last 2,048 the targets, and the end-of-text tokens between documents are targets as well. Here documents
are packed in the same way and lm-eval walks through them in windows of 2,048 targets, each of which begins with the
last token of the window before. So a target has from 1 to 2,048 tokens before it in both, and the only difference is
that the first token of every row, which the authors never predict (1 of 2,049), is predicted here: each token counts
exactly once.

Which documents the paper used beyond "the validation set" is not published for the Pile, and its 320,000 examples of
Flan are not published at all. `dcformer_flan_ppl` therefore reproduces a protocol, and its figures compare models with
each other but not with the paper's column.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .data import fetch_file, hub_splits, import_datasets
from .origin import check_required, documents_hash, origin, read_published, remember
from .sources import Source
from .task_tokens import continuation_ids, load_task_tokenizer
from .text_files import DEFAULT_SEED, drawn_places, existing_file, jsonl_fields
from .windows import PAPER_WINDOW, check_window, pack_documents


if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

_HEADING = re.compile(r"(?<=\n \n) = [^=\n](?:[^\n]*[^=\n])? = \n \n")


def load_pile(
    data_dir: str | None = None,
    subset: int | None = None,
    seed: int = DEFAULT_SEED,
    window: int = PAPER_WINDOW,
    windows: int | None = None,
    data_hash: str | None = None,
    **settings: Any,
) -> dict[str, Dataset]:
    """
    Documents of the Pile, packed into streams of about 64 windows.

    With `data_dir` they are the `text` fields of `pile/*.jsonl` or `*.jsonl.zst` (put the Pile's `val.jsonl.zst` there
    for the paper's set) or, if there are none, of `pile_sample/test.jsonl`. Without, they come from the Pile's own
    validation file, which is no longer published by its makers, in the copy that `sources.py` names and checks by its
    checksum. The authors' copy, `Caiyun-AI/Pile_tfrecord`, holds token ids and is not read; the order of documents, and
    so where windows begin, need not be the same there.

    Args:
        data_dir: Folder with local data; the Hub if not given.
        subset: Number of documents, drawn by `seed` and kept in their order; all if `None` or more than there are.
        seed: Which documents `subset` takes.
        window (in tokens): Targets per forward pass; must be what the model is asked to take at most.
        windows: Take so many windows of documents spread evenly over all, the last of which is cut; for quick runs.
        data_hash: The hash that the documents must have, or `"any"`; by default the hash that is known.
        settings: The model's arguments as lm-eval passes them: `pretrained`, `tokenizer`, `revision`,
            `trust_remote_code`, `add_bos_token`, `max_length`.

    Returns:
        One split `test`; a row is a stream: `text`, `n_documents`, `n_tokens`, `n_bytes`, `window`, `n_unscored`, the
        number of streams that `windows` left out or cut, and `n_artificial_ends`, of documents that it cut. The rows
        remember their origin, see [`dcformer.eval.origin.origin_of`].

    Raises:
        FileNotFoundError: if the data are not there or cannot be reached.
        ValueError: if the tokenizer or the model's length is not known or does not fit, or a file is damaged.
    """
    check_window("dcformer_pile_ppl", window, **settings)
    tokenizer = load_task_tokenizer(**settings)
    if data_dir is None:

        def read(source: Source) -> tuple[list[str], str | None]:
            file, revision = fetch_file(source, "validation")
            return _texts([file], subset, seed), revision

        documents, found = read_published("pile", read, _hash_of, data_hash)
    else:
        documents = _texts(_pile_files(Path(data_dir)), subset, seed)
        found = _local_origin("pile", documents, data_hash)
    packed = pack_documents(documents, tokenizer, window, windows, settings.get("add_bos_token"))
    return {"test": remember(packed, found)}


def load_wikitext2(
    data_dir: str | None = None,
    subset: int | None = None,
    seed: int = DEFAULT_SEED,
    window: int = PAPER_WINDOW,
    windows: int | None = None,
    data_hash: str | None = None,
    **settings: Any,
) -> dict[str, Dataset]:
    """
    Articles of the test split of WikiText-2, packed as the documents of [`load_pile`].

    With `data_dir` the split is `wikitext2/wikitext2_test.txt`, otherwise `wikitext-2-raw-v1` of
    `Salesforce/wikitext`. WikiText-2 is published raw and with rare words replaced by `<unk>`, and both are read, but
    they give different figures. An article is the text from its heading (` = Title = ` between blank lines) to the
    next; nothing is removed. Arguments, result and errors are those of [`load_pile`].
    """
    check_window("dcformer_wikitext2_ppl", window, **settings)
    tokenizer = load_task_tokenizer(**settings)
    if data_dir is None:
        articles, found = read_published("wikitext2", _articles_of_the_hub, _hash_of, data_hash)
    else:
        file = existing_file(Path(data_dir) / "wikitext2" / "wikitext2_test.txt", "the test split")
        articles = wikitext_articles(file.read_text(encoding="utf-8"))
        found = _local_origin("wikitext2", articles, data_hash)
    chosen = [articles[index] for index in drawn_places(len(articles), subset, seed)]
    packed = pack_documents(chosen, tokenizer, window, windows, settings.get("add_bos_token"))
    return {"test": remember(packed, found)}


def load_flan(
    data_dir: str | None = None,
    subset: int | None = 320_000,
    seed: int = DEFAULT_SEED,
    window: int = PAPER_WINDOW,
    data_hash: str | None = None,
    **settings: Any,
) -> dict[str, Dataset]:
    """
    Examples of the Flan Collection: the loss is taken on the target span, given the input.

    A reproduction of the paper's protocol, not of its figures, since its 320,000 examples are unpublished. With
    `data_dir` the examples are the `inputs` and `targets` fields of `flan/*.jsonl`, which is how the Flan Collection is
    distributed; otherwise `prompt` and `completion` of `itay1itzhak/flan_2022_350k` on the Hub, a published sample of
    350,023. Input and target are stripped of surrounding white space and joined by one space, which the tokenizer makes
    part of the target's first word; so exactly the target's tokens are scored. Long inputs are cut from the left by
    lm-eval to what the window leaves. Examples without a target, or with one of more tokens than the window, are left
    out, with a warning that counts them.

    Args:
        data_dir: Folder with local data; the Hub if not given.
        subset: Number of examples, drawn by `seed` and kept in their order; all if `None` or more than there are.
        seed: Which examples `subset` takes.
        window (in tokens): Most tokens of input and target together; must be what the model is asked to take at most.
        data_hash: As for [`load_pile`].
        settings: The model's arguments, as for [`load_pile`].

    Returns:
        One split `test`; a row is an example: `context`, `continuation`, `n_tokens` (of the target).

    Raises:
        FileNotFoundError, ValueError: as for [`load_pile`].
    """
    check_window("dcformer_flan_ppl", window, **settings)
    tokenizer = load_task_tokenizer(**settings)
    if data_dir is None:

        def read(source: Source) -> tuple[list[tuple[str, str]], str | None]:
            splits, revision = hub_splits(source)
            rows = splits["train"]
            chosen = rows.select(drawn_places(len(rows), subset, seed))
            return [(row["prompt"], row["completion"]) for row in chosen], revision

        pairs, found = read_published("flan", read, documents_hash, data_hash)
    else:
        files = sorted((Path(data_dir) / "flan").glob("*.jsonl"))
        if not files:
            raise FileNotFoundError(
                f"There is no file {str(Path(data_dir) / 'flan' / '*.jsonl')!r}; put examples of Flan there, one "
                'object with "inputs" and "targets" per line.'
            )
        pairs = list(jsonl_fields(files, ("inputs", "targets"), subset, seed))
        found = origin(None, documents_hash(pairs), "flan")
        check_required("flan", found["hash"], data_hash)
    examples, left_out = [], 0
    for given, target in pairs:
        context, continuation = given.strip(), " " + target.strip()
        n_tokens = len(continuation_ids(tokenizer, context, continuation, settings.get("add_bos_token")))
        if not target.strip() or n_tokens > window:
            left_out += 1
        else:
            examples.append({"context": context, "continuation": continuation, "n_tokens": n_tokens})
    if left_out:
        logger.warning(
            "dcformer_flan_ppl leaves out %d of %d examples: they have no target, or one of more than %d tokens.",
            left_out,
            left_out + len(examples),
            window,
        )
    if not examples:
        raise ValueError(
            f"No example of Flan has a target that fits the window of {window} tokens; check the files, or take a "
            "longer window (--max-length, or `window` with lm-eval)."
        )
    return {"test": remember(import_datasets().Dataset.from_list(examples), found)}


def score_stream(doc: dict, results: list) -> dict[str, tuple[float, float]]:
    """
    Sums of one stream: `(log-likelihood, weight)` in nats, to be divided after all streams have been added up.

    The log-likelihood includes the end-of-text tokens, which a model of documents has to predict too. They are counted
    as tokens but have no bytes: bits per byte are per byte (UTF-8) of the documents themselves.
    """
    log_likelihood = _log_likelihood(results[0])
    return {
        "token_perplexity": (log_likelihood, doc["n_tokens"]),
        "bits_per_byte": (log_likelihood, doc["n_bytes"]),
    }


def score_target(doc: dict, results: list) -> dict[str, tuple[float, float]]:
    """`(log-likelihood, number of tokens)` of one target span, in nats."""
    return {"token_perplexity": (_log_likelihood(results[0]), doc["n_tokens"])}


def _log_likelihood(result: Any) -> float:
    # Rolling requests answer with a number, others with a pair of it and whether decoding would find the continuation.
    return float(result[0] if isinstance(result, (tuple, list)) else result)


def wikitext_articles(text: str) -> list[str]:
    """Split WikiText into articles, each from its heading to the next; joined they are the text again."""
    # The file begins with a blank line, so a line feed before it makes the first heading like the others.
    starts = [match.start() - 1 for match in _HEADING.finditer("\n" + text)]
    starts = [0, *starts[1:]]
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)])]


def _texts(files: list[Path], subset: int | None, seed: int) -> list[str]:
    return [text for (text,) in jsonl_fields(files, ("text",), subset, seed)]


def _hash_of(texts: list[str]) -> str:
    return documents_hash(((text,) for text in texts), is_ordered=True)


def _local_origin(column: str, texts: list[str], required: str | None) -> dict[str, Any]:
    found = origin(None, _hash_of(texts), column)
    check_required(column, found["hash"], required)
    return found


def _articles_of_the_hub(source: Source) -> tuple[list[str], str | None]:
    splits, revision = hub_splits(source)
    # The Hub's copy leaves blank lines empty where the file has a space and a line feed.
    return wikitext_articles("".join(line or " \n" for line in splits["test"]["text"])), revision


def _pile_files(data_dir: Path) -> list[Path]:
    files = sorted(file for file in (data_dir / "pile").glob("*.jsonl*") if file.suffix in (".jsonl", ".zst"))
    return files or [
        existing_file(data_dir / "pile_sample" / "test.jsonl", 'documents of the Pile, {"text": ...} per line,')
    ]
