"""Documents from files, the Hub or the generator of head tasks, tokenised and packed into rows of one length.

A row holds pieces of documents one behind the other. Position ids restart at 0 with every piece, which is how
Transformers (and our own masks) know that a token sees its own document only; the label of a piece's first token is
-100, so nothing is predicted across documents either. Padding is a piece of its own, without labels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .data_recipe import DataRecipe
from .documents import check_documents, described, document_batches, import_datasets, load_documents


if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase


IGNORED_LABEL = -100  # what the loss functions of torch and Transformers leave out
_SHUFFLE_BUFFER = 10_000
EVALUATION_SEED = 0  # runs of all seeds are evaluated on the same generated documents
_OPEN_ROWS = 16  # rows among which "whole" packing chooses
_LAYOUT_VERSION = 1  # part of the name of packed rows on disk; to be raised when the same documents pack differently


def build_datasets(
    recipe: DataRecipe, tokenizer: PreTrainedTokenizerBase, seed: int = 0
) -> tuple[Dataset | IterableDataset, Dataset | IterableDataset | None]:
    """
    Rows for training and, if the recipe has an evaluation, for it.

    Args:
        recipe (`DataRecipe`): What to read and how to pack it.
        tokenizer (`PreTrainedTokenizerBase`): What it adds to a text by itself (mostly a first token) begins every
            document; if that is nothing, its end-of-text token, if it has one, ends every document.
        seed (`int`, defaults to 0): Seed of the order of the training documents and of generated ones.

    Returns:
        Training rows and evaluation rows or `None`: an `IterableDataset` where the recipe streams, else a `Dataset`.
        A row has `input_ids`, `labels` and `position_ids`, lists of `sequence_length` integers; labels are the input
        ids themselves, to be shifted in the loss, and -100 where nothing is predicted. Every pass over the rows gives
        the same ones.

    Raises:
        FileNotFoundError: if a path does not exist, or the Hub does not answer.
        ValueError: for a damaged file, a split or column that is missing, documents without a token, or if no token
            would be scored. While streaming, what is wrong later in the data is found when it is read.
        ImportError: without `datasets`.
    """
    train = _build_rows(recipe, tokenizer, seed, shuffle=recipe.stages is None)
    if recipe.evaluation is None:
        return train, None
    return train, _build_rows(recipe.evaluation, tokenizer, EVALUATION_SEED, shuffle=False)


def collate(rows: Iterable[Mapping[str, list[int]]]) -> dict[str, Tensor]:
    """
    A batch of rows: `input_ids`, `labels` and `position_ids`, each a `LongTensor` (batch, sequence length). There is
    no attention mask, since Transformers finds packed documents by their position ids only without one.
    """
    rows = list(rows)
    return {key: torch.tensor([row[key] for row in rows]) for key in ("input_ids", "labels", "position_ids")}


def pack(
    documents: Iterable[tuple[list[int], list[int]]], sequence_length: int, packing: str, padding_token_id: int
) -> Iterator[dict[str, list[int]]]:
    """
    Lay documents into rows.

    Args:
        documents: Token ids and labels of every document, lists of one length.
        sequence_length (`int`): Tokens of a row.
        packing (`str`): `"split"`, `"whole"` or `"none"`, as in [`DataRecipe`].
        padding_token_id (`int`): Fills rows that end early.

    Yields:
        `input_ids`, `labels` and `position_ids` of a row, each of `sequence_length` integers.
    """
    if packing == "split":
        rows = _filled_rows(documents, sequence_length)
    elif packing == "whole":
        rows = _fitted_rows(_pieces(documents, sequence_length), sequence_length)
    else:
        rows = (_append(_empty_row(), *piece) for piece in _pieces(documents, sequence_length))
    for row in rows:
        padding = sequence_length - len(row["input_ids"])
        if padding > 0:
            _append(row, [padding_token_id] * padding, [IGNORED_LABEL] * padding)
        yield row


def _filled_rows(documents: Iterable[tuple[list[int], list[int]]], sequence_length: int) -> Iterator[dict]:
    """Rows without a gap, but for the last; a document continues in the next row."""
    row = _empty_row()
    for input_ids, labels in documents:
        start = 0
        while start < len(input_ids):
            stop = start + sequence_length - len(row["input_ids"])
            _append(row, input_ids[start:stop], labels[start:stop])
            start = stop
            if len(row["input_ids"]) == sequence_length:
                yield row
                row = _empty_row()
    if row["input_ids"]:
        yield row


def _fitted_rows(pieces: Iterable[tuple[list[int], list[int]]], sequence_length: int) -> Iterator[dict]:
    """Every piece in the fullest of a few rows that has space for it; if none has, the fullest of all is done."""

    def tokens(row: dict) -> int:
        return len(row["input_ids"])

    rows: list[dict] = []
    for input_ids, labels in pieces:
        fitting = [row for row in rows if tokens(row) + len(input_ids) <= sequence_length]
        if not fitting:
            if len(rows) == _OPEN_ROWS:
                yield rows.pop(rows.index(max(rows, key=tokens)))
            rows.append(_empty_row())
            fitting = rows[-1:]
        _append(max(fitting, key=tokens), input_ids, labels)
    yield from rows


def _pieces(documents: Iterable[tuple[list[int], list[int]]], sequence_length: int) -> Iterator[tuple[list, list]]:
    """Documents, those longer than a row in pieces."""
    for input_ids, labels in documents:
        for start in range(0, len(input_ids), sequence_length):
            stop = start + sequence_length
            yield input_ids[start:stop], labels[start:stop]


def _empty_row() -> dict[str, list[int]]:
    return {"input_ids": [], "labels": [], "position_ids": []}


def _append(row: dict[str, list[int]], input_ids: list[int], labels: list[int]) -> dict[str, list[int]]:
    """Put a piece behind what the row holds."""
    row["input_ids"] += input_ids
    row["labels"] += [IGNORED_LABEL, *labels[1:]]
    row["position_ids"] += range(len(input_ids))
    return row


def _build_rows(
    recipe: DataRecipe, tokenizer: PreTrainedTokenizerBase, seed: int, shuffle: bool
) -> Dataset | IterableDataset:
    datasets = import_datasets()
    documents = load_documents(recipe, seed)
    columns = (recipe.text_column, "answers") if recipe.loss_on == "answers" else (recipe.text_column,)
    check_documents(documents, columns, recipe)
    documents = documents.select_columns(list(columns))
    if recipe.documents is not None and recipe.streaming:
        documents = documents.take(recipe.documents)
    elif recipe.documents is not None:
        documents = documents.select(range(min(recipe.documents, len(documents))))
    if shuffle:
        documents = documents.shuffle(seed=seed, **({"buffer_size": _SHUFFLE_BUFFER} if recipe.streaming else {}))
    encoder = _Encoder(tokenizer, recipe)
    features = datasets.Features(
        {key: datasets.Sequence(datasets.Value("int32"), length=recipe.sequence_length) for key in _empty_row()}
    )
    arguments = {"generator": _rows, "features": features, "gen_kwargs": {"documents": documents, "encoder": encoder}}
    if recipe.streaming:
        return datasets.IterableDataset.from_generator(**arguments)
    try:
        # Under a name that says all that they depend on, rows packed once are found again by later runs and by the
        # other processes of this one.
        return datasets.Dataset.from_generator(**arguments, fingerprint=encoder.fingerprint(documents._fingerprint))
    except datasets.exceptions.DatasetGenerationError as error:
        if isinstance(error.__cause__, ValueError | OSError):
            raise error.__cause__ from error
        raise


def _rows(documents: Dataset | IterableDataset, encoder: _Encoder) -> Iterator[dict[str, list[int]]]:
    """Rows of all documents; at the end an error if there was nothing to learn from."""
    recipe = encoder.recipe
    tokens = scored = 0
    for row in pack(encoder.encode(documents), recipe.sequence_length, recipe.packing, encoder.padding_token_id):
        tokens += recipe.sequence_length
        scored += recipe.sequence_length - row["labels"].count(IGNORED_LABEL)
        yield row
    if tokens == 0:
        raise ValueError(f"Every document of {described(recipe)} is empty; give documents with text.")
    if scored == 0:
        hint = (
            "its answers must be spans of characters that cover whole tokens"
            if recipe.loss_on == "answers"
            else "its documents must have more than one token"
        )
        raise ValueError(f"No token of {described(recipe)} would be scored; {hint}.")


class _Encoder:
    """Token ids and labels of documents, as the recipe says."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, recipe: DataRecipe):
        if recipe.loss_on == "answers" and not tokenizer.is_fast:
            raise ValueError(
                f"loss_on 'answers' needs a fast tokenizer, which knows the characters of a token, got "
                f"{type(tokenizer).__name__}; use one with a tokenizer.json."
            )
        self.tokenizer = tokenizer
        self.recipe = recipe
        self.special_tokens = len(tokenizer("")["input_ids"])
        ends_documents = self.special_tokens == 0 and tokenizer.eos_token_id is not None
        self.ending = [tokenizer.eos_token_id] if ends_documents else []
        candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self.padding_token_id = next(token for token in candidates if token is not None)

    def encode(self, documents: Dataset | IterableDataset) -> Iterator[tuple[list[int], list[int]]]:
        """Token ids and labels of every document that is not empty."""
        recipe = self.recipe
        by_answers = recipe.loss_on == "answers"
        for batch in document_batches(documents, recipe):
            texts = ["" if text is None else text for text in batch[recipe.text_column]]
            for text in texts:
                if not isinstance(text, str):
                    raise ValueError(
                        f"A document of {described(recipe)} has {text!r} in its column {recipe.text_column!r}; write "
                        "it as text."
                    )
            encoding = self.tokenizer(
                texts, return_attention_mask=False, return_offsets_mapping=by_answers, verbose=False
            )
            for index, input_ids in enumerate(encoding["input_ids"]):
                if len(input_ids) <= self.special_tokens:
                    continue
                input_ids = input_ids + self.ending
                labels = input_ids
                if by_answers:
                    offsets = encoding["offset_mapping"][index] + [(0, 0)] * len(self.ending)
                    labels = _answer_labels(input_ids, offsets, batch["answers"][index], described(recipe))
                yield input_ids, labels

    def fingerprint(self, documents: str) -> str:
        """A name for the rows that this encoder makes of the documents of a fingerprint."""
        recipe, tokenizer = self.recipe, self.tokenizer
        if tokenizer.is_fast:
            vocabulary = tokenizer.backend_tokenizer.to_str()
        else:
            vocabulary = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
        settings = [_LAYOUT_VERSION, documents, recipe.text_column, recipe.sequence_length, recipe.packing]
        settings += [recipe.loss_on, self.ending, self.padding_token_id, self.special_tokens, vocabulary]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:32]


def _answer_labels(
    input_ids: list[int], offsets: list[tuple[int, int]], spans: list[list[int]] | None, where: str
) -> list[int]:
    """The ids of tokens whose characters lie in a span, -100 for others and for tokens without characters."""
    try:
        bounds = [(first, last) for first, last in spans or ()]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"A document of {where} has {spans!r} as answers, which must be a list of [start, end) in characters."
        ) from error
    return [
        token if any(first <= start < end <= last for first, last in bounds) else IGNORED_LABEL
        for token, (start, end) in zip(input_ids, offsets)
    ]
