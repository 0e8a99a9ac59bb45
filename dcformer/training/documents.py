"""The documents of a recipe: from files on this machine, a data set on the Hub, or the generator of head tasks."""

import contextlib
import glob
import itertools
import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, DatasetBuilder, Features, IterableDataset, List, Value
from datasets.data_files import DataFilesDict, DataFilesList, EmptyDatasetError, get_data_patterns

from ..common.files import check_relative, file_digest, json_digest
from ..common.hub import load_from_hub
from ..common.local_files import ENDINGS, LocalFiles, ending_of
from ..head_tasks import FORMS, iterate_documents, iterate_practice
from ..loading import looks_like_path
from .recipe import HEAD_TASKS, DataRecipe


_TEXT_TYPES = ("string", "large_string", "string_view", "null")
_RANGES = List(List(Value("int64")))  # of answers: [start, end) in characters


def read_documents(recipe: DataRecipe, seed: int) -> Dataset | IterableDataset:
    """
    The documents that a recipe names, in their order: the column of texts, and `answers` if the loss is on these.
    `seed` is that of head tasks. ValueError if there is no document, or one of these columns is missing.
    """
    columns = [recipe.text_column, *(["answers"] if recipe.loss_on == "answers" else [])]
    documents = _generate(recipe, seed) if recipe.source == HEAD_TASKS else _read(recipe, columns)
    if (first := next(iter(documents), None)) is None:
        raise ValueError(f"{recipe.source!r}, split {recipe.split!r}, has no documents.")
    if missing := [column for column in columns if column not in first]:
        raise ValueError(f"{recipe.source!r} has no documents with {missing[0]!r}; its columns are {', '.join(first)}.")
    documents = documents.select_columns(columns)
    kind = (documents.features or {}).get(recipe.text_column)
    if kind is not None and getattr(kind, "dtype", "") not in _TEXT_TYPES:
        raise ValueError(f"{recipe.source!r}: column {recipe.text_column!r} must hold strings, it holds {kind}.")
    if recipe.source != HEAD_TASKS:  # the fingerprint of datasets is of a file's time of change, not of its content
        documents._fingerprint = fingerprint_documents(recipe)
    if recipe.documents is None:
        return documents
    if recipe.streaming:
        return documents.take(recipe.documents)
    return documents.select(range(min(recipe.documents, len(documents))))


def fingerprint_documents(recipe: DataRecipe, local_only: bool = False) -> str | None:
    """A hash of the content of files, or of the revision of data on the Hub, for which `local_only` gives None."""
    if recipe.source == HEAD_TASKS:  # the same for the same recipe
        content = []
    elif _path(recipe).exists():
        files = _files_read(recipe)
        content = fingerprint_files(files)
        if any(".txt" in file.name.lower() for file in files):
            content.append(recipe.sample_by)
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


def _generate(recipe: DataRecipe, seed: int) -> Dataset | IterableDataset:
    """Documents of head tasks. Answers include the line feed after them, so that the model learns to end there."""
    documents: list[dict[str, Any]] = []
    lines = recipe.lines or (1, 8)
    if recipe.stages is None:
        documents += iterate_documents(recipe.documents or 0, seed, recipe.split, lines)
    for index, stage in enumerate(recipe.stages or ()):
        mixture = {form: getattr(stage, form) for form in FORMS}
        options: dict[str, Any] = {"split": recipe.split, "lines": stage.lines or lines}
        options |= {"longest": recipe.sequence_length, "words": stage.words, "facts": stage.facts}
        documents += iterate_practice(stage.documents, f"{seed} {index}", mixture, **options)
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
    builder = load_from_hub(datasets.load_dataset_builder, source, recipe.configuration, **options)
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
    saved = datasets.load_from_disk(str(path), keep_in_memory=False)
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
