"""Documents of JSON files: the builder of `datasets` fails where a column that nobody reads changes its type."""

import codecs
import io
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import fsspec
from datasets import DatasetInfo, GeneratorBasedBuilder, SplitGenerator


class JsonColumns(GeneratorBasedBuilder):
    """A builder that reads the columns of its features only: documents, which are strings, and perhaps `answers`."""

    def _info(self) -> DatasetInfo:
        return DatasetInfo()

    def _split_generators(self, _: Any) -> list[SplitGenerator]:
        return [SplitGenerator(name, {"files": list(files)}) for name, files in self.config.data_files.items()]

    def _generate_examples(self, files: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        for file in files:
            unit, number = "line", 1
            with fsspec.open(file, "rb", compression="infer") as opened:
                lines = io.BufferedReader(opened)
                try:
                    first = lines.readline()
                    rows: Iterable[Any] = itertools.chain([first], lines)
                    if first.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):  # an array, read at once
                        unit, rows = "item", json.loads(first + lines.read())
                    for number, row in enumerate(rows, start=1):
                        if not isinstance(row, bytes) or row.strip():
                            yield f"{file} {number}", _example(row, list(self.info.features))
                except json.JSONDecodeError as error:
                    line = f"line {number + error.lineno - 1}, column {error.colno}"
                    raise ValueError(f"{file!r} is not JSON in {line}: {error.msg}.") from error
                except (ValueError, EOFError, zlib.error) as error:  # the last two of what was compressed
                    raise ValueError(f"{file!r}, {unit} {number}: {error}") from error


def _example(row: Any, columns: list[str]) -> dict[str, Any]:
    """The columns of a row: a line of JSON, an object, or a text alone. ValueError if they hold something else."""
    row = json.loads(row) if isinstance(row, bytes) else row
    row = row if isinstance(row, dict) else {"text": row}
    if missing := [column for column in columns if column not in row]:
        raise ValueError(f"there is no {missing[0]!r}; the columns are {', '.join(row)}.")
    text, *answers = columns
    if not isinstance(row[text], str | None):
        raise ValueError(f"{text!r} must be a string, got {row[text]!r:.80}.")
    (row[text] or "").encode()  # raises for half of a surrogate pair, which JSON can hold
    for start_end in (answers and row["answers"]) or ():
        if not isinstance(start_end, list) or [*map(type, start_end)] != [int, int]:
            raise ValueError(f"'answers' must be a list of [start, end], got {row['answers']!r:.80}.")
    return {column: row[column] for column in columns}
