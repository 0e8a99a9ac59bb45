"""The documents of a task, from a folder of files or a published source, and a check of which documents they are.

    <data_dir>/<folder>/<split>.parquet     or .jsonl, or .txt where a task reads plain text

Documents are identified by a hash of their contents (see [`documents_hash`]), so that a copy in another file format is
the same data and a changed data set on the Hub is refused.
"""

from __future__ import annotations

import ast
import codecs
import fnmatch
import functools
import glob
import hashlib
import inspect
import io
import json
import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.files import file_digest
from ..common.hub import load_from_hub
from ..common.optional import import_optional


if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

DEFAULT_SEED = 1234
_DEFINITION = "the task's definition"
LOCAL_FILES = "files of --data-dir"  # as the source of documents
_SUFFIXES = (".parquet", ".jsonl", ".txt", ".zst")
_QUESTION = ("question", "options", "answer")  # fields of RACE


@dataclass(frozen=True)
class Source:
    """A published source of documents, and what it holds."""

    path: str  #: data set on the Hub, or another name if there is an address
    name: str | None = None  #: configuration of the data set
    split: str = "test"  #: the split that is scored
    hash: str | None = None  #: [`documents_hash`] of the scored documents; `None` if it is not known
    revision: str | None = None
    address: str | None = None  #: URL of the files, if they are not on the Hub
    count: int = 0  #: number of scored documents, for the columns of Table 4
    fields: Sequence[str] = ()  #: fields of a row that the task reads, in the order in which they are hashed
    answer: str = ""  #: a field whose values are `answers`; splits without published answers have others
    answers: Sequence[str] = ()
    note: str = ""

    def __str__(self) -> str:
        return self.path if self.name is None else f"{self.path} ({self.name})"


TASKS_FOLDER = Path(__file__).with_name("tasks")
_FILE = Path(__file__).parent / "published" / "sources.json"
# Folder below `data_dir` -> source; those with a number of documents are the columns of Table 4 in order.
SOURCES = {folder: Source(**values) for folder, values in json.loads(_FILE.read_text(encoding="utf-8")).items()}
TABLE4_COLUMNS = tuple(folder for folder, source in SOURCES.items() if source.count)


def data_folder(task: str, data_dir: str | os.PathLike | None = None) -> str:
    """The folder below `data_dir` that holds a task's data; for the Pile a sample if the whole is missing."""
    column = task.removesuffix("_lm_eval_0_4_13").removesuffix("_ppl")
    if column.startswith("head_tasks_authors"):
        return "synthetic"
    if column == "pile" and data_dir is not None and not Path(data_dir, column).is_dir():
        return "pile_sample"
    return column


def data_files(folder: Path, *names: str) -> list[Path]:
    """The files of a folder that are read, by their endings, or those with certain names; in upper or lower case."""
    patterns = names or [f"*{suffix}" for suffix in _SUFFIXES]
    files = sorted(f for f in folder.glob("*") if any(fnmatch.fnmatchcase(f.name.lower(), p) for p in patterns))
    if not files:
        wanted = " or ".join(patterns)
        raise FileNotFoundError(f"There is no file {wanted} in {str(folder)!r}, where documents are read from.")
    return files


def read_text(file: Path) -> str:
    """The text of a file in UTF-8, without a byte order mark."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(file)!r} is no text in UTF-8: {error}.") from error


def source_of(task: str) -> Source:
    """The source of a task's documents; the definition of the task names it if `sources.json` does not."""
    return SOURCES.get(data_folder(task), Source(task, address=_DEFINITION))


def import_extra(name: str) -> Any:
    """A module of the extra `eval`, imported where it is used because some take seconds to import."""
    return import_optional(name, "Evaluation", "eval")


def data_fingerprint(data_dir: str | os.PathLike | None, task: str, definition: Path | None = None) -> str:
    """
    The data of a result: `"sha256:..."` of the files in the task's folder, or of its definition, or the source with its
    revision.
    """
    source = source_of(task)
    if definition is not None and (source.address == _DEFINITION or definition.parent != TASKS_FOLDER):
        return files_fingerprint(_files_of_definition(definition))
    if data_dir is None or source.address == "generated":
        return f"{source}@{source.revision or source.hash or 'main'}"
    return files_fingerprint(data_files(Path(data_dir, data_folder(task, data_dir))))


def _files_of_definition(file: Path) -> list[Path]:
    """The files of a task of lm-eval: its YAML, those that it includes, their Python, and local data that it names."""
    load_yaml = import_extra("lm_eval.tasks._yaml_loader").load_yaml
    definition, texts = load_yaml(file), [file]
    for text in texts:  # which grows
        included = load_yaml(text, resolve_func=False, recursive=False).get("include") or ()
        texts += [text.parent / name for name in ([included] if isinstance(included, str) else included)]
    # The functions' files, and those beside the YAML that they may import.
    python = {*map(Path, _sources(definition)), *(path for text in texts for path in text.parent.glob("*.py"))}
    return [*texts, *sorted(python), *_data_of_definition(definition)]


def _sources(value: Any) -> Iterator[str]:
    """The files of all functions and classes in nested values."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _sources(part)
    elif inspect.isfunction(value) or inspect.isclass(value):
        yield inspect.getfile(value)


def _data_of_definition(definition: Mapping[str, Any]) -> list[Path]:
    """The local files that a task of lm-eval reads: a pattern, or several, perhaps by split, or all of a folder."""
    options = definition.get("dataset_kwargs") or {}
    named = options.get("data_files") or ()
    patterns = [definition.get("dataset_path"), options.get("data_dir")]
    for each in named.values() if isinstance(named, Mapping) else [named]:
        patterns += [each] if isinstance(each, str) else each
    paths = [Path(path) for pattern in patterns if pattern for path in sorted(glob.glob(pattern, recursive=True))]
    files = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return [file for file in files if file.is_file()]


def files_fingerprint(files: Iterable[Path]) -> str:
    """`"sha256:..."` of names and contents."""
    contents = "".join(f"{file.name} {file_digest(file)}\n" for file in files)
    return f"sha256:{hashlib.sha256(contents.encode()).hexdigest()}"


def documents_hash(documents: Iterable[Sequence[Any]], is_ordered: bool = False) -> str:
    """
    The hash of documents: `"sha256:..."` of one line of JSON per document (UTF-8, objects sorted by key, no spaces).

    Args:
        documents: For every document the values that the task reads.
        is_ordered (defaults to `False`): Whether the order of the documents matters, as it does for packed running
            text. Otherwise the lines are sorted, since copies of a data set may have them in another order.
    """
    as_json = functools.partial(json.dumps, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    lines = (f"{as_json(list(values))}\n".encode("utf-8", "surrogatepass") for values in documents)
    digest = hashlib.sha256()
    for line in lines if is_ordered else sorted(lines):
        digest.update(line)
    return f"sha256:{digest.hexdigest()}"


def checked_origin(
    folder: str,
    documents: Iterable[Sequence[Any]],
    data_dir: str | os.PathLike | None,
    required: str | None = None,
    is_ordered: bool = False,
) -> dict[str, Any]:
    """
    `source`, `revision` and `hash` of documents for a record, and `as_known`: whether the hash is the known one.

    Documents that were fetched (no `data_dir`) must have the known hash, or the `required` one (or `"any"`).
    """
    source, documents = SOURCES[folder], list(documents)
    if not any(map(any, documents)):
        raise ValueError(f"There is no text in the {len(documents)} documents of {folder}; give others.")
    digest = documents_hash(documents, is_ordered)
    wanted = required or (source.hash if data_dir is None else None) or "any"
    if wanted not in (digest, "any"):
        raise ValueError(
            f"The documents of {folder} have the hash {digest} instead of {wanted}; check the data, or name the hash "
            "by --data-hash TASK=HASH."
        )
    return {
        "source": str(source) if data_dir is None else LOCAL_FILES,
        "revision": source.revision if data_dir is None else None,
        "hash": digest,
        "as_known": None if source.hash is None else digest == source.hash,
    }


def load_documents(
    column: str,
    data_dir: str | os.PathLike | None = None,
    data_hash: str | None = None,
    process: Callable[[Dataset], Dataset] | None = None,
    **_: Any,
) -> dict[str, Any]:
    """
    The documents of a column of Table 4 as splits for lm-eval, `"scored"` and `"examples"`, and their `"origin"`.

    `process` turns rows into those that the prompts read.
    """
    if column not in SOURCES:
        raise ValueError(f"sources.json must say where the documents of {column!r} are published; add them there.")
    source = SOURCES[column]
    splits, scored, extra = _splits(column, data_dir), source.split, {}
    if scored not in splits and column == "sciq" and "validation" in splits:
        logger.warning("sciq: there is no test split in %s; its validation split is scored instead.", data_dir)
        scored, extra = "validation", {"stands_in_for": "test"}
    if scored not in splits:
        files = "" if data_dir is None else f": {scored}.parquet or {scored}.jsonl in {str(Path(data_dir, column))!r}"
        raise FileNotFoundError(f"There is no {scored} split of {source}{files}.")
    examples = next((split for split in ("train", "validation") if split in splits), scored)
    documents = {split: _documents(column, splits[split]) for split in {scored, examples}}
    # An answer is a number in one copy and a string in another.
    is_answer = {name: name in (source.answer, "label") for name in source.fields}
    values = {name: documents[scored][name][:] for name in source.fields}  # without [:] far slower
    columns = ([str(v).strip() if is_answer[name] else v for v in values[name]] for name in source.fields)
    origin = checked_origin(column, zip(*columns), data_dir, data_hash)
    if process is not None:  # lm-eval's `process_docs` would run at every access
        documents = {split: process(rows) for split, rows in documents.items()}
    origin |= {"examples": examples, **extra}
    return {"scored": documents[scored], "examples": documents[examples], "origin": origin}


def _splits(column: str, data_dir: str | os.PathLike | None) -> dict[str, Any]:
    """The rows of a split on the Hub, or its file."""
    if data_dir is not None:
        # The last of a split wins: .parquet before .jsonl.
        files = data_files(Path(data_dir, column))
        files.sort(key=lambda file: _SUFFIXES.index(file.suffix.lower()), reverse=True)
        return {file.stem.lower(): file for file in files if file.stem.lower() in ("train", "validation", "test")}
    datasets, source = import_extra("datasets"), SOURCES[column]
    if source.address is None:
        return dict(load_from_hub(datasets.load_dataset, source.path, source.name, revision=source.revision))
    addresses = {"train": f"{source.address}/Train.txt", "test": f"{source.address}/Test.txt"}  # LogiQA
    return {split: fetch(address) for split, address in addresses.items()}


def fetch(address: str) -> Path:
    """A file from an address, or from the cache of datasets; FileNotFoundError if it can be had from neither."""
    try:
        return Path(import_extra("datasets").DownloadManager().download(address))
    except (ConnectionError, FileNotFoundError) as error:
        raise FileNotFoundError(
            f"{address} cannot be fetched ({error}); give --data-dir with the data, or leave its task out, which is "
            "--no-authors for the authors' texts of head tasks."
        ) from error


def _documents(column: str, split: Any) -> Dataset:
    """The rows of a file (`split` is a Path) or of a split on the Hub (a Dataset), in one layout."""
    source, rows = SOURCES[column], _read(split, column) if isinstance(split, Path) else split
    where = str(split if isinstance(split, Path) else source)
    is_article = "problems" in source.fields
    for name in source.fields if not is_article or "problems" in rows.column_names else ("article", *_QUESTION):
        if name not in rows.column_names:
            raise ValueError(f"There are no documents with {name!r} in {where!r}; its fields are {rows.column_names}.")
    if is_article:
        rows = import_extra("datasets").Dataset.from_list(_articles(rows.to_list()))
    if source.answer and (unknown := {str(value).strip() for value in rows[source.answer][:]} - set(source.answers)):
        raise ValueError(
            f"{source.answer} must be one of {', '.join(source.answers)} in {where!r}, got {min(unknown)!r}; use "
            f"the {source.split} split, whose answers are published."
        )
    for name in source.fields:
        for number, value in enumerate(rows[name][:], start=1):
            if _has_null(value):
                raise ValueError(f"{name!r} is null or missing in document {number} of {column} in {where!r}; mend it.")
    return rows


def _read(file: Path, column: str) -> Dataset:
    import pyarrow
    from pyarrow import parquet

    datasets = import_extra("datasets")
    try:
        if file.suffix.lower() == ".parquet":
            return datasets.Dataset(parquet.read_table(file))  # in memory, without a copy in a cache
        if column == "logiqa" and file.suffix.lower() != ".jsonl":
            return datasets.Dataset.from_list(_parse_logiqa(read_text(file)))
        return datasets.Dataset.from_list([_parse(where, line) for where, line in _lines([file])])
    except pyarrow.ArrowException as error:
        raise ValueError(f"{str(file)!r} cannot be read: {error}") from error


def _has_null(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value is None or any(map(_has_null, parts))


def _parse_logiqa(text: str) -> list[dict]:
    """Documents of LogiQA's text file; a space is inserted after every full stop, as the harness does."""
    documents = []
    for number, block in enumerate(text.strip().split("\n\n"), start=1):
        letter, *lines = block.split("\n")
        if len(lines) != 6 or letter.strip() not in ("a", "b", "c", "d"):
            raise ValueError(f"Block {number} of LogiQA is not a letter from a to d and six lines, got {block[:80]!r}.")
        plain = (*lines[:2], *(choice[len("A.") :] for choice in lines[2:]))
        passage, question, *choices = (". ".join(line.split(".")).strip() for line in plain)
        documents.append({"label": letter.strip(), "context": passage, "question": question, "options": choices})
    return documents


def _articles(rows: Iterable[dict]) -> list[dict]:
    """Articles of RACE; a row has one question, a list of questions, or the `repr` of a list."""
    articles: dict[Any, list[dict]] = {}
    for number, row in enumerate(rows):
        problems, key = [row], (row["article"], -1)
        if "problems" in row:  # an article that is there twice is two documents
            problems, key = row["problems"], (row["article"], number)
            problems = ast.literal_eval(problems) if isinstance(problems, str) else problems or []
        articles.setdefault(key, []).extend({name: problem[name] for name in _QUESTION} for problem in problems)
    return [{"article": article, "problems": questions or None} for (article, _), questions in articles.items()]


def jsonl_fields(
    files: list[Path], fields: tuple[str, ...], subset: int | None = None, seed: int = DEFAULT_SEED
) -> Iterator[tuple[Any, ...]]:
    """Fields of `subset` lines sampled with `seed`, in the order of the files; of all lines if `subset` is `None`."""
    # Files may be larger than memory: they are read twice, first to count the lines.
    chosen = set(sampled_indices(sum(1 for _ in _lines(files)), subset, seed))
    for index, (where, line) in enumerate(_lines(files)):
        if index in chosen:
            row = _parse(where, line)
            if missing := [field for field in fields if not isinstance(row.get(field), str)]:
                raise ValueError(f"{where} has no {missing[0]!r} that is a text; its keys are {', '.join(row)}.")
            yield tuple(row[field] for field in fields)


def sampled_indices(count: int, subset: int | None, seed: int) -> list[int]:
    """`subset` of `count` indices, sampled with `seed` and ascending; all if `subset` is `None` or larger."""
    if subset is None or subset >= count:
        return list(range(count))
    return sorted(random.Random(seed).sample(range(count), subset))


def spread_indices(count: int, limit: int | None) -> list[int]:
    """`limit` of `count` indices, evenly spread and ascending; all if `limit` is `None` or larger."""
    chosen = count if limit is None else min(limit, count)
    return [number * count // chosen for number in range(chosen)]


def spread_order(count: int) -> list[int]:
    """Indices below `count`, ordered so that every prefix is evenly spread."""
    n_bits = max(count - 1, 0).bit_length()
    # Counting with the bits of each number reversed halves the widest gap again and again.
    indices = (int(f"{number:0{n_bits}b}"[::-1], 2) for number in range(1 << n_bits))
    return [index for index in indices if index < count]


def _lines(files: list[Path]) -> Iterator[tuple[str, bytes]]:
    """The location and text of every line that is not blank; files may be compressed, and begin with a mark."""
    import pyarrow

    for file in files:
        number, compression = 0, "zstd" if file.suffix.lower() == ".zst" else None
        try:
            with pyarrow.input_stream(str(file), compression) as content:
                for number, line in enumerate(io.BufferedReader(content), start=1):
                    if line := line.removeprefix(codecs.BOM_UTF8).strip():
                        yield f"Line {number} of {str(file)!r}", line
        except (OSError, pyarrow.ArrowException) as error:
            raise ValueError(f"{str(file)!r} cannot be read after line {number}: {error}.") from error


def _parse(where: str, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
        if b"\\ud" in line.lower():  # raises for half of a surrogate pair, which is no text
            json.dumps(row, ensure_ascii=False).encode()
    except ValueError as error:
        raise ValueError(f"{where} is no JSON in UTF-8: {error}.") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where} must be an object of JSON, got {row!r:.80}.")
    return row
