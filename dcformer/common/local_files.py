"""
Documents of files on this machine.

The builders of `datasets` take a path for a pattern, fail where a column that nobody reads changes its type, and drop
documents of CSV that read NA. This one has a module to itself, since `datasets` exchanges `Path`, `open` and others in
the module of a builder.
"""

import codecs
import io
import itertools
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import pandas
from datasets import BuilderConfig, DatasetInfo, GeneratorBasedBuilder, SplitGenerator
from fsspec.implementations.local import LocalFileSystem
from pyarrow import parquet


# Endings of files that are read; an ending of compression may follow.
ENDINGS = (".jsonl", ".ndjson", ".json", ".txt", ".parquet", ".csv", ".tsv")
_ROWS_AT_ONCE = 1000


def ending_of(file: str) -> str | None:
    """The ending in lower case by which a file is read, `None` if it has none of `ENDINGS`."""
    return next((end for end in map(str.lower, reversed(PurePath(file).suffixes)) if end in ENDINGS), None)


@dataclass
class LocalFilesConfig(BuilderConfig):
    """The configuration of `LocalFiles`; `sample_by` as in [`DataRecipe`]."""

    sample_by: str = "document"


class LocalFiles(GeneratorBasedBuilder):
    """A builder that reads the columns of its features only: documents, which are strings, and perhaps `answers`."""

    BUILDER_CONFIG_CLASS = LocalFilesConfig
    DEFAULT_WRITER_BATCH_SIZE = 100  # documents in memory; each may be a book

    def _info(self) -> DatasetInfo:
        return DatasetInfo()

    def _split_generators(self, _: Any) -> list[SplitGenerator]:
        return [SplitGenerator(name, {"files": list(files)}) for name, files in self.config.data_files.items()]

    def _generate_examples(self, files: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        columns, system = list(self.info.features), LocalFileSystem()
        for file in files:
            unit, number = "line", 1
            with system.open(file, "rb", compression="infer") as opened:
                try:
                    unit, read, rows = _rows(io.BufferedReader(opened), ending_of(file), columns, self.config.sample_by)
                    for number, row in enumerate(rows, start=1):
                        if read is not json.loads or row.strip():
                            yield f"{file} {number}", _example(read(row), columns)
                except json.JSONDecodeError as error:
                    line = f"line {number + error.lineno - 1}, column {error.colno}"
                    raise ValueError(f"{file!r} is not JSON in {line}: {error.msg}.") from error
                except (ValueError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
                    raise ValueError(f"{file!r}, {unit} {number}: {error}") from error


def _rows(
    file: io.BufferedReader, ending: str | None, columns: list[str], sample_by: str
) -> tuple[str, Callable[[Any], Any], Iterable[Any]]:
    """The name of a row of a file, a function that reads one (its errors are of that row), and the rows."""
    if ending == ".parquet":
        content = parquet.ParquetFile(file)
        _check_columns(columns, content.schema_arrow.names)
        batches = content.iter_batches(_ROWS_AT_ONCE, columns=columns)
        return "row", dict, itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
    if ending in (".csv", ".tsv"):
        options = {"sep": "\t" if ending == ".tsv" else ",", "encoding": "utf-8-sig", "chunksize": _ROWS_AT_ONCE}
        frames = pandas.read_csv(file, dtype=str, keep_default_na=False, **options)
        return "row", dict, itertools.chain.from_iterable(map(_records, frames))
    if ending == ".txt" and sample_by == "document":
        return "document", lambda text: text.decode("utf-8-sig"), [file.read()]
    first = file.readline().removeprefix(codecs.BOM_UTF8)
    lines = itertools.chain([first], file)
    if ending == ".txt":
        return "line", lambda line: line.decode().rstrip("\r\n"), lines
    if first.lstrip().startswith(b"["):  # an array, read at once
        return "item", lambda row: row, json.loads(first + file.read())
    return "line", json.loads, map(bytes.rstrip, lines)


def _records(frame: pandas.DataFrame) -> list[dict[str, Any]]:
    if not isinstance(frame.index, pandas.RangeIndex):  # pandas would take the first field for the name of the row
        raise ValueError(f"there are more fields than the header has: {', '.join(frame.columns)}.")
    return frame.to_dict("records")


def _check_columns(columns: list[str], names: Iterable[str]) -> None:
    if missing := [column for column in columns if column not in names]:
        raise ValueError(f"there is no {missing[0]!r}; the columns are {', '.join(names)}.")


def _example(row: Any, columns: list[str]) -> dict[str, Any]:
    """The columns of a row, which is a mapping or a text alone. ValueError if they hold something else."""
    text, *answers = columns
    row = row if isinstance(row, dict) else {"text": row}
    _check_columns(columns, row)
    if not isinstance(row[text], str | None):
        raise ValueError(f"{text!r} must be a string, got {row[text]!r:.80}.")
    (row[text] or "").encode()  # raises for half of a surrogate pair, which JSON can hold
    for start_end in (answers and row["answers"]) or ():
        if not isinstance(start_end, list) or [*map(type, start_end)] != [int, int]:
            raise ValueError(f"'answers' must be a list of [start, end], got {row['answers']!r:.80}.")
    return {column: row[column] for column in columns}
