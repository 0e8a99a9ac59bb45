"""
The loss on running text of one's own, in windows with a stride.

Models are compared over pieces of the documents, each about 512 characters long and cut before a space, whatever the
tokenizer: a token belongs to the piece in which it begins. Windows would be others with another tokenizer.
"""

from __future__ import annotations

import itertools
import os
import re
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.contexts import encode_context
from .task_data import import_extra, spread_indices


if TYPE_CHECKING:
    from .lm_eval_model import LogLikelihoods
    from .records import Settings

TEXT = "text/"  # begins the names of such tasks
WINDOW = 2048  # tokens, or the context length of a model that has fewer
_PIECE = 512  # characters, the least; a piece has less than twice as many
_SPACE = re.compile(r"(?<=\S)\s")


def text_files(path: str | os.PathLike) -> list[Path]:
    """The files of a text: the file itself, or all of a folder and below it that have the ending of documents."""
    import_extra("datasets")
    from ..common.local_files import ENDINGS, ending_of

    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"There is no {str(path)!r}; --text names a file or a folder.")
    found = [file for file in (sorted(path.rglob("*")) if path.is_dir() else [path]) if file.is_file()]
    if not (files := [file for file in found if ending_of(str(file))]):
        verb = "has no file that ends" if path.is_dir() else "does not end"
        raise ValueError(f"{str(path)!r} {verb} in {', '.join(ENDINGS)}.")
    return files


def read_documents(path: str | os.PathLike, column: str) -> list[list[str]]:
    """All documents of a text that are not empty, each as its pieces."""
    datasets, files = import_extra("datasets"), [str(file.absolute()) for file in text_files(path)]
    from datasets.data_files import DataFilesDict, DataFilesList

    from ..common.local_files import LocalFiles

    features = datasets.Features({column: datasets.Value("large_string")})
    builder = LocalFiles(features=features, data_files=DataFilesDict({"train": DataFilesList(files, [])}))
    documents = [_cut(row[column]) for row in builder.as_streaming_dataset("train") if row[column]]
    if not documents:
        raise ValueError(f"There is no text in {os.fspath(path)!r}; give another.")
    return documents


def _cut(text: str) -> list[str]:
    starts = [0]
    while len(text) - starts[-1] >= 2 * _PIECE:
        least, most = starts[-1] + _PIECE, starts[-1] + 2 * _PIECE - 1
        space = _SPACE.search(text, least, most)
        starts.append(space.start() if space else least)
    return [text[start:end] for start, end in itertools.pairwise([*starts, len(text)])]


def score_text(
    scorer: LogLikelihoods, task: str, documents: Sequence[Sequence[str]], settings: Settings
) -> tuple[list[dict[str, Any]], dict[str, None], int, dict[str, Any]]:
    """
    Samples of the pieces of documents, or of `limit` pieces that are spread evenly; the metrics, the number of pieces
    and what was observed.

    Every token is scored once, with at least `max_length - stride` tokens before it, or all that there are. A document
    begins with the tokens that the tokenizer puts before texts, or with the model's token for empty contexts.
    """
    pieces = [piece for document in documents for piece in document]
    chosen, counts, windows, first = spread_indices(len(pieces), settings.limit), [0] * len(pieces), [], 0
    for document in documents:
        windows += _windows(scorer, document, first, settings.stride or settings.max_length, {*chosen})
        first += len(document)
    if not windows:
        raise ValueError(f"The tokenizer makes no token of what is scored of {task.removeprefix(TEXT)!r}.")
    for number, _, tokens, _ in itertools.chain(*windows):
        counts[number] += len(tokens)
    with scorer.whole_documents():
        sums = scorer.score_windows(windows, [(task, number) for number in range(len(pieces))])
    samples = []
    for number in chosen:
        request = {"context": "", "continuation": pieces[number], "log_likelihood": sums[number], "is_greedy": None}
        metrics = {name: [sums[number], counts[number]] for name in ("nats_per_token", "token_perplexity")}
        metrics["bits_per_byte"] = [sums[number], len(pieces[number].encode())]
        digest = import_extra("lm_eval.utils").hash_string(pieces[number])
        samples.append({"doc_id": number, "doc_hash": digest, "metrics": metrics, "requests": [request]})
    observed = {"documents": {"source": task.removeprefix(TEXT), "hash": None, "as_known": None}}
    return samples, dict.fromkeys(samples[0]["metrics"]), len(pieces), observed


def _windows(scorer: Any, document: Sequence[str], first: int, stride: int, chosen: set[int]) -> list[list[tuple]]:
    """The windows of a document, as `score_windows` takes them; its pieces have numbers from `first` on."""
    utils, starts = import_extra("lm_eval.utils"), [0, *itertools.accumulate(map(len, document[:-1]))]
    options = {"verbose": False, "add_special_tokens": False, "return_offsets_mapping": True}
    encoding = scorer.tokenizer("".join(document), **options)
    before, *lead = encode_context(scorer.tokenizer, "") or [scorer.prefix_token_id]
    numbers = [None] * len(lead) + [first + bisect_right(starts, begin) - 1 for begin, _ in encoding["offset_mapping"]]
    ids, longest, windows, position = lead + encoding["input_ids"], scorer.max_length, [], 0
    for window in utils.get_rolling_token_windows(ids, before, longest, longest - stride + 1):
        context, targets = utils.make_disjoint_window(window)
        parts, end = [], 0
        for number, tokens in itertools.groupby(numbers[position : position + len(targets)]):
            start, end = end, end + len(list(tokens))
            if number in chosen:
                parts.append((number, context + targets[:start], targets[start:end], targets[end:]))
        position += len(targets)
        if parts:
            windows.append(parts)
    return windows
