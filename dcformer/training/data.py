"""
The rows of a recipe: its documents, tokenised and packed into rows of one length; and a tokenizer of these documents.

A row holds documents, or parts of them. Position ids restart at 0 with every document, by which Transformers and our
masks let a token see its document only. The label of a document's first token is -100, so that nothing is predicted
across documents either. Padding comes last; its positions restart too, and its labels are -100. There is no attention
mask: beside one, Transformers would not separate documents by their position ids.
"""

from __future__ import annotations

import contextlib
import itertools
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence
from typing import Any

import torch
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.exceptions import DatasetGenerationError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..common.files import json_digest
from ..loading import fingerprint_tokenizer
from .documents import read_documents
from .recipe import DataRecipe, TokenizerRecipe


Document = tuple[Sequence[int], Sequence[int]]  # token ids and labels

IGNORED_LABEL = -100  # left out by the loss functions of torch and Transformers
EVALUATION_SEED = 0  # runs of all seeds are evaluated on the same generated documents
_COLUMNS = ("input_ids", "labels", "position_ids")
_SHUFFLE_BUFFER = 10_000
_DOCUMENTS_AT_ONCE = 100  # read at once; each may be a book
_CHARACTERS_AT_ONCE = 2**18  # given to a tokenizer, which takes 170 bytes for each, and works on documents in parallel
_OVERLAP = 2**12  # characters that pieces of a longer document have in common
_OPEN_ROWS = 16  # rows among which "whole" packing chooses
_LAYOUT_VERSION = 2  # part of the name of packed rows on disk; raise it when the same documents pack differently


@contextlib.contextmanager
def _naming_the_cause() -> Iterator[None]:
    """Raise what is wrong with the data, where `datasets` says only that there was an error."""
    try:
        yield
    except DatasetGenerationError as error:
        raise error.__cause__ or error from error


@_naming_the_cause()
def build_datasets(
    recipe: DataRecipe, tokenizer: PreTrainedTokenizerBase, seed: int = 0
) -> tuple[Dataset | IterableDataset, Dataset | IterableDataset | None]:
    """Build the rows for training and, if the recipe has an evaluation, for it."""
    train, evaluation = _build_rows(recipe, tokenizer, seed, shuffle=recipe.stages is None), recipe.evaluation
    return train, evaluation and _build_rows(evaluation, tokenizer, EVALUATION_SEED, shuffle=False)


@_naming_the_cause()
def train_tokenizer(recipe: TokenizerRecipe, data: DataRecipe) -> PreTrainedTokenizerFast:
    """Train byte-level BPE, which gives back every text, on the training data; the same data give the same tokens."""
    tokenizer, end = Tokenizer(models.BPE()), "<|endoftext|>"
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)  # to those of words, which answers cover
    tokenizer.decoder = decoders.ByteLevel()
    options: dict[str, Any] = {"special_tokens": [end], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=recipe.train, show_progress=False, **options)
    documents = itertools.islice(read_documents(data, seed=0), recipe.documents)
    texts = (document[data.text_column] or "" for document in documents)
    pieces = (text[at : at + _CHARACTERS_AT_ONCE] for text in texts for at in range(0, len(text), _CHARACTERS_AT_ONCE))
    tokenizer.train_from_iterator(pieces, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end)


def pack(
    documents: Iterable[Document], sequence_length: int, packing: str, padding_token_id: int
) -> Iterator[dict[str, list[int]]]:
    """Pack documents, pairs of token ids and labels, into rows of so many tokens; `packing` as in [`DataRecipe`]."""
    rows: list[dict[str, list[int]]] = []  # those that are not full yet
    most_rows = _OPEN_ROWS if packing == "whole" else 1

    def free(row: dict[str, list[int]]) -> int:
        return sequence_length - len(row["input_ids"])

    def padded(row: dict[str, list[int]]) -> dict[str, list[int]]:
        return _append(row, [padding_token_id] * free(row), [IGNORED_LABEL] * free(row)) if free(row) else row

    for input_ids, labels in documents:
        start = 0
        while start < len(input_ids):
            size = min(len(input_ids) - start, sequence_length)
            needed = {"split": 1, "whole": size, "none": sequence_length}[packing]
            fitting = [row for row in rows if free(row) >= needed]
            if not fitting:
                if len(rows) == most_rows:
                    yield padded(rows.pop(rows.index(min(rows, key=free))))
                rows.append({"input_ids": [], "labels": [], "position_ids": []})
                fitting = rows[-1:]
            row = min(fitting, key=free)  # the fullest
            stop = start + min(size, free(row))
            _append(row, input_ids[start:stop], labels[start:stop])
            start = stop
    yield from map(padded, rows)


def _append(row: dict[str, list[int]], input_ids: Sequence[int], labels: Sequence[int]) -> dict[str, list[int]]:
    row["input_ids"] += input_ids
    row["labels"] += [IGNORED_LABEL, *labels[1:]]
    row["position_ids"] += range(len(input_ids))
    return row


def _build_rows(
    recipe: DataRecipe, tokenizer: PreTrainedTokenizerBase, seed: int, shuffle: bool
) -> Dataset | IterableDataset:
    documents = read_documents(recipe, seed)
    if shuffle:
        documents = documents.shuffle(seed=seed, **({"buffer_size": _SHUFFLE_BUFFER} if recipe.streaming else {}))
    encoder = _Encoder(tokenizer, recipe)
    features = Features(dict.fromkeys(_COLUMNS, List(Value("int32"), length=recipe.sequence_length)))
    arguments = {"generator": _rows, "features": features, "gen_kwargs": {"documents": documents, "encoder": encoder}}
    if recipe.streaming:
        return IterableDataset.from_generator(**arguments)
    # Later runs and other processes reuse packed rows by this fingerprint, a hash of all that they depend on.
    return Dataset.from_generator(**arguments, fingerprint=encoder.fingerprint(documents._fingerprint))


def _rows(documents: Dataset | IterableDataset, encoder: _Encoder) -> Iterator[dict[str, list[int]]]:
    """Rows of all documents; at the end an error if none of their tokens has a loss."""
    recipe, scored = encoder.recipe, 0
    for row in pack(encoder.encode(documents), recipe.sequence_length, recipe.packing, encoder.padding_token_id):
        scored += recipe.sequence_length - row["labels"].count(IGNORED_LABEL)
        yield row
    if scored == 0:
        raise ValueError(
            f"No token of {recipe.source!r} would be scored: it is empty, its documents are of one token, or its "
            "answers are no character ranges that cover whole tokens."
        )


class RowOrder(Sampler):
    """
    `total` indices of `rows` rows, pass after pass, every pass shuffled by the seed, or in order without a seed.

    The order depends neither on the number of processes nor on where a run stopped.
    """

    def __init__(self, rows: int, total: int, seed: int | None):
        self.rows, self.total, self.seed = rows, total, seed

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(itertools.chain.from_iterable(map(self._order, itertools.count())), self.total)

    def _order(self, number: int) -> Iterable[int]:
        if self.seed is None:
            return range(self.rows)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        return torch.randperm(self.rows, generator=generator).tolist()


def fill_batches(rows: Sequence[dict[str, list[int]]], multiple: int) -> list[dict[str, list[int]]]:
    """Append rows without labels until accelerate needs no row twice for batches of `multiple`, of all processes."""
    empty = {**rows[0], "labels": [IGNORED_LABEL] * len(rows[0]["labels"])}
    return [*rows, *[empty] * (-len(rows) % multiple)]


class _Encoder:
    """Encodes documents as token ids and labels, by the recipe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, recipe: DataRecipe):
        self.tokenizer, self.recipe = tokenizer, recipe
        self.special_tokens = len(tokenizer("")["input_ids"])
        candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self.padding_token_id = next(token for token in candidates if token is not None)

    def encode(self, documents: Dataset | IterableDataset) -> Iterator[Document]:
        """Token ids and labels of every document that is not empty; an end of text closes each."""
        by_answers, end = self.recipe.loss_on == "answers", self.tokenizer.eos_token_id
        for batch in documents.iter(batch_size=_DOCUMENTS_AT_ONCE):
            texts = ["" if text is None else text for text in batch[self.recipe.text_column]]
            answers = batch["answers"] if by_answers else texts
            for (input_ids, offsets), ranges in zip(self._encodings(texts, by_answers), answers):
                if len(input_ids) <= self.special_tokens:
                    continue
                if end is not None and input_ids[-1] != end:
                    input_ids.append(end)
                labels = _answer_labels(input_ids, offsets, ranges or []) if by_answers else input_ids
                yield input_ids, labels

    def _encodings(
        self, texts: list[str], with_offsets: bool
    ) -> Iterator[tuple[MutableSequence[int], Iterable[tuple[int, int]]]]:
        """Token ids of texts, and the characters of every token; as many texts at once as memory holds."""
        first = 0
        for last in range(1, len(texts) + 1):
            if last < len(texts) and sum(map(len, texts[first : last + 1])) <= _CHARACTERS_AT_ONCE:
                continue
            if len(texts[first]) > _CHARACTERS_AT_ONCE and self.tokenizer.is_fast:
                yield self._encode_long(texts[first], with_offsets)
            else:
                encoding = self._tokenize(texts[first:last], return_offsets_mapping=with_offsets)
                yield from zip(encoding["input_ids"], encoding.get("offset_mapping") or itertools.repeat(()))
            first = last

    def _encode_long(self, text: str, with_offsets: bool) -> tuple[array, list[tuple[int, int]]]:
        """
        Encode a text that is too long to do so at once, by pieces that overlap; each is joined to those before it amid
        the overlap, where a token begins in both.
        """
        ids, starts, ends = array("i"), array("q"), array("q")
        for begin in range(0, max(len(text) - _OVERLAP, 1), _CHARACTERS_AT_ONCE):
            piece = text[begin : begin + _CHARACTERS_AT_ONCE + _OVERLAP]
            encoding = self._tokenize(piece, add_special_tokens=False, return_offsets_mapping=True)
            new_starts, new_ends = ([begin + span[side] for span in encoding["offset_mapping"]] for side in (0, 1))
            joints = {0} if begin == 0 else {*starts[bisect_left(starts, begin) :]}.intersection(new_starts)
            if not joints:  # one word is longer than the overlap
                encoding = self._tokenize(text, return_offsets_mapping=True)
                return array("i", encoding["input_ids"]), encoding["offset_mapping"]
            joint = min(joints, key=lambda place: abs(place - begin - _OVERLAP // 2))
            old, new = bisect_left(starts, joint), bisect_left(new_starts, joint)
            for values, added in ((ids, encoding["input_ids"]), (starts, new_starts), (ends, new_ends)):
                values[old:] = array(values.typecode, added[new:])
        inner, outer = (self._tokenize(text[:_OVERLAP], add_special_tokens=add)["input_ids"] for add in (False, True))
        lead = next(n for n in range(self.special_tokens + 1) if outer[n : n + len(inner)] == inner)
        before, after = array("i", outer[:lead]), array("i", outer[lead + len(inner) :])
        offsets = [(0, 0)] * lead + [*zip(starts, ends)] + [(0, 0)] * len(after) if with_offsets else []
        return before + ids + after, offsets

    def _tokenize(self, text: str | list[str], **options: Any) -> Mapping[str, Any]:
        return self.tokenizer(text, return_attention_mask=False, verbose=False, **options)

    def fingerprint(self, documents: str) -> str:
        """A name for the packed rows of documents, given the fingerprint of these."""
        recipe, layout = self.recipe, [_LAYOUT_VERSION, fingerprint_tokenizer(self.tokenizer), documents]
        settings = [recipe.text_column, recipe.sequence_length, recipe.packing, recipe.loss_on]
        return json_digest(layout + settings)[:32]


def _answer_labels(input_ids: Sequence[int], offsets: Iterable[tuple[int, int]], answers: list[list[int]]) -> list[int]:
    """The ids of tokens that lie in an answer, -100 for others and for tokens without characters."""
    return [
        token if any(first <= start < end <= last for first, last in answers) else IGNORED_LABEL
        for token, (start, end) in zip(input_ids, [*offsets, (0, 0)])  # that of an end of text which was added
    ]
