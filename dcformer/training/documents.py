"""Documents as `datasets` reads them, from files, the Hub or the generator; each of its errors told in one sentence."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.optional import import_optional
from ..common.paths import is_path
from ..head_tasks.practice import FORMS
from .data_recipe import HEAD_TASKS, DataRecipe


if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


_BUILDERS = {".jsonl": "json", ".json": "json", ".txt": "text", ".parquet": "parquet", ".csv": "csv"}
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_DOCUMENTS_AT_ONCE = 1000  # tokenizers work on the documents of a batch in parallel


def load_documents(recipe: DataRecipe, seed: int) -> Dataset | IterableDataset:
    """
    The documents that a recipe names, all of them and in their order; an `IterableDataset` where it streams.

    Args:
        recipe (`DataRecipe`): What to read.
        seed (`int`): Seed of documents that are generated.

    Raises:
        FileNotFoundError: if a path does not exist, or the Hub does not answer.
        ValueError: for a damaged or empty file, or a split that is missing.
    """
    documents = _generated_documents(recipe, seed) if recipe.source == HEAD_TASKS else _read_documents(recipe)
    if recipe.streaming and isinstance(documents, import_datasets().Dataset):
        return documents.to_iterable_dataset()
    return documents


def check_documents(documents: Dataset | IterableDataset, columns: tuple[str, ...], recipe: DataRecipe) -> None:
    """Raise ValueError if there are no documents, or if the first one lacks a column."""
    with _reading(recipe):
        first = next(iter(documents), None)
    if first is None:
        raise _no_documents(recipe)
    for column in columns:
        if column not in first:
            raise ValueError(f"{described(recipe)} has no column {column!r}; it has {', '.join(first)}.")


def document_batches(documents: Dataset | IterableDataset, recipe: DataRecipe) -> Iterator[dict[str, list]]:
    """Documents by the thousand, each batch a list per column."""
    batches = iter(documents.iter(batch_size=_DOCUMENTS_AT_ONCE))
    while True:
        with _reading(recipe):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def described(recipe: DataRecipe) -> str:
    """Source and split, for messages."""
    split = "" if recipe.split == "train" else f" (split {recipe.split})"
    return f"{recipe.source!r}{split}"


def import_datasets():
    """
    The module `datasets`.

    Raises:
        ImportError: if it is not installed.
    """
    return import_optional("datasets", 'Reading training data needs datasets: pip install "dcformer[train]".')


def _generated_documents(recipe: DataRecipe, seed: int) -> Dataset:
    from ..head_tasks import generate_documents, iterate_practice

    def lines(given: list | None) -> dict[str, tuple]:
        return {} if given is None else {"lines": tuple(given)}

    if recipe.stages is None:
        documents = generate_documents(recipe.documents, seed, split=recipe.split, **lines(recipe.lines))
    else:
        documents = [
            document
            for place, stage in enumerate(recipe.stages)
            for document in iterate_practice(
                stage["documents"],
                f"{seed} {place}",
                {form: stage[form] for form in FORMS if form in stage},
                recipe.split,
                longest=recipe.sequence_length,
                words=stage.get("words"),
                facts=stage.get("facts") or 3,
                **lines(stage.get("lines") or recipe.lines),
            )
        ]
    # The line feed behind an answer belongs to it in training, so that generation ends there, and in the evaluation,
    # so that the two losses are means over the same kind of tokens.
    for document in documents:
        document["answers"] = [[start, end + 1] for start, end in document["answers"]]
    # Without a fingerprint of their own, documents made in memory get one that differs in every process.
    fingerprint = hashlib.sha256(json.dumps(documents).encode()).hexdigest()[:16]
    dataset = import_datasets().Dataset.from_list(documents)
    dataset._fingerprint = fingerprint
    return dataset


def _read_documents(recipe: DataRecipe) -> Dataset | IterableDataset:
    datasets = import_datasets()
    path = Path(recipe.source).expanduser()
    options = {"split": recipe.split, "streaming": recipe.streaming}
    if path.is_file():
        builder = _builder(path)
        if path.stat().st_size == 0:
            raise _no_documents(recipe)
        with _reading(recipe):
            return datasets.load_dataset(builder, data_files=str(path), **options)
    if path.is_dir() and any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        with _reading(recipe):
            saved = datasets.load_from_disk(str(path))
        return _saved_split(saved, recipe)
    looks_local = path.suffix in _BUILDERS or is_path(recipe.source)
    if looks_local and not path.is_dir():
        raise FileNotFoundError(f"There is no file or folder {recipe.source!r}; check data.source.")
    with _reading(recipe):
        return datasets.load_dataset(str(path), recipe.configuration, **options)


def _builder(path: Path) -> str:
    """Which of the file readers of `datasets` reads a file; it unpacks by itself."""
    suffixes = [suffix for suffix in path.suffixes if suffix not in _COMPRESSIONS]
    if not suffixes or suffixes[-1] not in _BUILDERS:
        raise ValueError(f"{str(path)!r} cannot be read as documents; its name must end in {', '.join(_BUILDERS)}.")
    return _BUILDERS[suffixes[-1]]


def _saved_split(saved, recipe: DataRecipe) -> Dataset:
    """A split of what `save_to_disk` wrote; data saved without splits are `"train"`."""
    splits = saved if isinstance(saved, dict) else {str(saved.split or "train"): saved}
    if recipe.split not in splits:
        raise ValueError(f"{recipe.source!r} has no split {recipe.split!r}; it has {', '.join(splits)}.")
    return splits[recipe.split]


@contextlib.contextmanager
def _reading(recipe: DataRecipe) -> Iterator[None]:
    """Turn the errors of `datasets` and of the readers below it, which are of all kinds, into one sentence."""
    try:
        yield
    except Exception as error:
        raise _reading_error(recipe, error) from error


def _reading_error(recipe: DataRecipe, error: Exception) -> Exception:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
        return cause
    path = Path(recipe.source).expanduser()
    reason = " ".join(str(cause).split()).rstrip(".") or type(cause).__name__
    if "corresponds to no data" in reason:
        return _no_documents(recipe)
    if not path.exists():
        message = f"{recipe.source!r} is no file or folder here, and cannot be read from the Hub ({reason})"
        return FileNotFoundError(f"{message}; check data.source, data.configuration, data.split and the network.")
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.suffix in (".jsonl", ".json") and (broken := _broken_line(file)) is not None:
            return ValueError(f"Line {broken} of {str(file)!r} is not JSON; correct or remove it.")
    return ValueError(f"{described(recipe)} cannot be read ({reason}); correct the file or data.split.")


def _broken_line(file: Path) -> int | None:
    """The number of the first line that is not JSON; a .json file may also be a single array over many lines."""
    with file.open(encoding="utf-8", errors="replace") as stream:
        if file.suffix == ".json" and stream.read(1) == "[":
            stream.seek(0)
            try:
                json.load(stream)
            except json.JSONDecodeError as error:
                return error.lineno
            return None
        stream.seek(0)
        for number, line in enumerate(stream, start=1):
            try:
                if line.strip():
                    json.loads(line)
            except ValueError:
                return number
    return None


def _no_documents(recipe: DataRecipe) -> ValueError:
    return ValueError(f"{described(recipe)} holds no documents; give data that are not empty.")
