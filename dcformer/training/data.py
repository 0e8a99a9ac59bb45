"""
Documents from files, the Hub or the generator of head tasks, tokenised and packed into rows of one length.

A row holds documents, or parts of them, one after another. Position ids restart at 0 with every document, by which
Transformers and our masks let a token see its document only. The label of a document's first token is -100, so that
nothing is predicted across documents either. Padding comes last; its positions restart too, and its labels are -100.
There is no attention mask: beside one, Transformers would not separate documents by their position ids.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import (
    Dataset,
    DatasetBuilder,
    Features,
    IterableDataset,
    List,
    Value,
    load_dataset_builder,
    load_from_disk,
)
from datasets.data_files import DataFilesDict, DataFilesList, EmptyDatasetError, get_data_patterns
from datasets.exceptions import DatasetGenerationError
from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase

from ..common.files import check_relative, file_digest, json_digest
from ..common.hub import load_from_hub
from ..head_tasks import FORMS, iterate_documents, iterate_practice
from ..loading import fingerprint_tokenizer, looks_like_path
from .local_files import ENDINGS, LocalFiles, ending_of
from .recipe import HEAD_TASKS, DataRecipe


Document = tuple[Sequence[int], Sequence[int]]  # token ids and labels

IGNORED_LABEL = -100  # left out by the loss functions of torch and Transformers
EVALUATION_SEED = 0  # runs of all seeds are evaluated on the same generated documents
_COLUMNS = ("input_ids", "labels", "position_ids")
_SHUFFLE_BUFFER = 10_000
_DOCUMENTS_AT_ONCE = 100  # read at once; each may be a book
_CHARACTERS_AT_ONCE = 2**18  # given to a tokenizer, which takes 170 bytes for each, and works on documents in parallel
_OVERLAP = 2**12  # characters that pieces of a longer document have in common
_OPEN_ROWS = 16  # rows among which "whole" packing chooses
_TEXT_TYPES = ("string", "large_string", "string_view", "null")
_RANGES = List(List(Value("int64")))  # of answers: [start, end) in characters
_LAYOUT_VERSION = 2  # part of the name of packed rows on disk; raise it when the same documents pack differently


def build_datasets(
    recipe: DataRecipe, tokenizer: PreTrainedTokenizerBase, seed: int = 0
) -> tuple[Dataset | IterableDataset, Dataset | IterableDataset | None]:
    """Build the rows for training and, if the recipe has an evaluation, for it."""
    try:
        train = _build_rows(recipe, tokenizer, seed, shuffle=recipe.stages is None)
        if recipe.evaluation is None:
            return train, None
        return train, _build_rows(recipe.evaluation, tokenizer, EVALUATION_SEED, shuffle=False)
    except DatasetGenerationError as error:
        # The message of datasets says only that there was an error.
        raise error.__cause__ or error from error


def fingerprint_documents(recipe: DataRecipe, local_only: bool = False) -> str | None:
    """A hash of the content of files, or of the revision of data on the Hub, for which `local_only` gives None."""
    if recipe.source == HEAD_TASKS:  # the same for the same recipe
        content = []
    elif _path(recipe).exists():
        files = _files_read(recipe)
        content = fingerprint_files(files) + [recipe.sample_by] * any(".txt" in file.name.lower() for file in files)
    elif local_only:
        return None
    else:
        builder = _find_builder(recipe)  # in the cache of the Hub the folder has the name of the commit
        content = [Path(builder.base_path).name if os.path.isabs(builder.base_path) else builder.hash]
    return json_digest([recipe.configuration, recipe.split, *content])


def fingerprint_files(files: Iterable[Path]) -> list[str]:
    """The SHA-256 of files."""
    return [_digest(file, file.stat().st_size, file.stat().st_ctime_ns) for file in files]


@cache  # the runs of a sweep have the same data
def _digest(file: Path, size: int, changed: int) -> str:
    return file_digest(file)


def pack(
    documents: Iterable[Document], sequence_length: int, packing: str, padding_token_id: int
) -> Iterator[dict[str, list[int]]]:
    """
    Pack documents, pairs of token ids and labels, into rows of `sequence_length` tokens; `packing` as in
    [`DataRecipe`].
    """
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
    columns = [recipe.text_column, *(["answers"] if recipe.loss_on == "answers" else [])]
    documents = _generate(recipe, seed) if recipe.source == HEAD_TASKS else _read(recipe, columns)
    _check_first_document(recipe, columns, documents)
    documents = documents.select_columns(columns)
    kind = (documents.features or {}).get(recipe.text_column)
    if kind is not None and getattr(kind, "dtype", "") not in _TEXT_TYPES:
        raise ValueError(f"{recipe.source!r}: column {recipe.text_column!r} must hold strings, it holds {kind}.")
    if recipe.source != HEAD_TASKS:  # the fingerprint of datasets is of a file's time of change, not of its content
        documents._fingerprint = fingerprint_documents(recipe)
    if recipe.documents is not None and recipe.streaming:
        documents = documents.take(recipe.documents)
    elif recipe.documents is not None:
        documents = documents.select(range(min(recipe.documents, len(documents))))
    if shuffle:
        documents = documents.shuffle(seed=seed, **({"buffer_size": _SHUFFLE_BUFFER} if recipe.streaming else {}))
    encoder = _Encoder(tokenizer, recipe)
    features = Features(dict.fromkeys(_COLUMNS, List(Value("int32"), length=recipe.sequence_length)))
    arguments = {"generator": _rows, "features": features, "gen_kwargs": {"documents": documents, "encoder": encoder}}
    if recipe.streaming:
        return IterableDataset.from_generator(**arguments)
    # Later runs and other processes reuse packed rows by this fingerprint, a hash of all that they depend on.
    return Dataset.from_generator(**arguments, fingerprint=encoder.fingerprint(documents._fingerprint))


def _check_first_document(recipe: DataRecipe, columns: list[str], documents: Dataset | IterableDataset) -> None:
    if (first := next(iter(documents), None)) is None:
        raise ValueError(f"{recipe.source!r}, split {recipe.split!r}, has no documents.")
    if missing := [column for column in columns if column not in first]:
        raise ValueError(f"{recipe.source!r} has no documents with {missing[0]!r}; its columns are {', '.join(first)}.")


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


def _generate(recipe: DataRecipe, seed: int) -> Dataset | IterableDataset:
    """Documents of head tasks. Answers include the line feed after them, so that the model learns to end there."""
    documents: list[dict[str, Any]] = []
    lines = recipe.lines or (1, 8)
    if recipe.stages is None:
        documents += iterate_documents(recipe.documents or 0, seed, recipe.split, lines)
    for index, stage in enumerate(recipe.stages or ()):
        documents += iterate_practice(
            stage.documents,
            seed=f"{seed} {index}",
            mixture={form: getattr(stage, form) for form in FORMS},
            split=recipe.split,
            lines=stage.lines or lines,
            longest=recipe.sequence_length,
            words=stage.words,
            facts=stage.facts,
        )
    for document in documents:
        document["answers"] = [[start, end + 1] for start, end in document["answers"]]
    dataset = Dataset.from_list(documents)
    # The fingerprint of documents made in memory would differ in every process.
    dataset._fingerprint = json_digest(documents)
    return dataset.to_iterable_dataset() if recipe.streaming else dataset


def _read(recipe: DataRecipe, columns: list[str]) -> Dataset | IterableDataset:
    """Documents of a file, a folder or the Hub, in their order; of local files only these columns, where possible."""
    if (documents := _load_saved(recipe)) is not None:
        return documents.to_iterable_dataset() if recipe.streaming else documents
    if not _path(recipe).exists():
        builder = _find_builder(recipe)
    else:
        kinds = {column: _RANGES if column == "answers" else Value("large_string") for column in columns}
        builder = LocalFiles(
            features=Features(kinds),
            data_files=_files_by_split(recipe),
            sample_by=recipe.sample_by,
            # Part of the name under which datasets caches documents, which it would tell apart by paths alone.
            description=fingerprint_documents(recipe),
        )
    if recipe.streaming:
        return builder.as_streaming_dataset(recipe.split)
    builder.download_and_prepare()
    return builder.as_dataset(recipe.split)


def _path(recipe: DataRecipe) -> Path:
    return Path(os.path.expanduser(recipe.source)).absolute()


def _find_builder(recipe: DataRecipe, **options: Any) -> DatasetBuilder:
    """The builder of datasets for a folder or a name on the Hub."""
    path = _path(recipe)
    if not path.exists() and (looks_like_path(recipe.source) or glob.has_magic(recipe.source)):
        raise FileNotFoundError(
            f"There is no {recipe.source!r}; data.source names a file, a folder or a data set on the Hub, "
            "not an address or a pattern."
        )
    source = str(path) if path.exists() else recipe.source
    builder = load_from_hub(load_dataset_builder, source, recipe.configuration, **options)
    return _find_builder(recipe, sample_by=recipe.sample_by) if builder.name == "text" and not options else builder


def _files_by_split(recipe: DataRecipe) -> DataFilesDict:
    """The files of a source on this machine, by split; datasets takes paths for patterns."""
    path = _path(recipe)
    described = path.is_dir() and any((path / name).is_file() for name in ("README.md", ".huggingface.yaml"))
    if path.is_dir() and ("::" in str(path) or (described and glob.has_magic(str(path)))):
        raise ValueError(
            f"data.source {recipe.source!r} has characters in its path that datasets gives a meaning; rename it."
        )
    splits: Mapping[Any, Iterable[str]] = {}
    if path.is_file():
        splits = {"train": [str(path)]}
    elif described:
        splits = _find_builder(recipe).config.data_files
    else:
        base = glob.escape(str(path.resolve()))
        with contextlib.suppress(EmptyDatasetError):
            splits = DataFilesDict.from_patterns(get_data_patterns(base), base_path=base)
    read = {str(split): [file for file in dict.fromkeys(files) if ending_of(file)] for split, files in splits.items()}
    if not any(read.values()):
        raise FileNotFoundError(f"{recipe.source!r} has no file that ends in {', '.join(ENDINGS)}.")
    return DataFilesDict({split: DataFilesList(files, []) for split, files in read.items() if files})


def _load_saved(recipe: DataRecipe) -> Dataset | None:
    """Documents of a folder of `Dataset.save_to_disk`, read from there; `None` for other sources."""
    path = _path(recipe)
    if not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return None
    saved = load_from_disk(str(path), keep_in_memory=False)
    splits = saved if isinstance(saved, dict) else {str(saved.split or "train"): saved}
    if recipe.split not in splits:
        raise ValueError(f"{recipe.source!r} has no split {recipe.split!r}; it has {', '.join(splits)}.")
    for file in splits[recipe.split].cache_files:
        check_relative(os.path.relpath(file["filename"], path))
    return splits[recipe.split]


def _files_read(recipe: DataRecipe) -> list[Path]:
    """The files on this machine that documents come from."""
    if (documents := _load_saved(recipe)) is not None:
        return [Path(file["filename"]) for file in documents.cache_files]
    splits = _files_by_split(recipe)
    return [Path(file) for file in splits.get(recipe.split) or itertools.chain(*splits.values())]


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
    """
    Append rows without labels until evaluation rows divide into batches of `multiple`, the rows of all processes.

    Otherwise accelerate would give some rows to two processes, which would count them twice.
    """
    rows = list(rows)
    empty = {**rows[0], "labels": [IGNORED_LABEL] * len(rows[0]["labels"])}
    return rows + [empty] * (-len(rows) % multiple)


class _Encoder:
    """Encodes documents as token ids and labels, by the recipe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, recipe: DataRecipe):
        self.tokenizer = tokenizer
        self.recipe = recipe
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
        Return what the tokenizer would make of a text that is too long for it, by pieces that overlap, each joined to
        those before it amid the overlap, where a token begins in both.
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
