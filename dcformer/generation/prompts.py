"""Many prompts from a file, and their answers as JSONL."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.files import unfinished_path
from ..common.quoting import quoted
from .generator import TextGenerator


FIELD = "prompt"
ANSWER = "generated_text"  # as the pipeline of Transformers calls it
_JSON_LINES = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True)
class Prompt:
    """
    A prompt of a file.

    Attributes:
        where: Its line, for messages.
        text: What the model continues.
        record: What is written with the answer.
    """

    where: str
    text: str
    record: dict[str, Any]


def read_prompts(path: str | os.PathLike, field: str | None = None) -> list[Prompt]:
    """
    Prompts from a file: one on each line, or in a field of each line of a `.jsonl` file.

    Args:
        path: The file, in UTF-8.
        field (*optional*): The field of a `.jsonl` file that holds the prompt; `None`: `prompt`.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it holds no prompt, or a line is empty or cannot be read; the message has its number.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"There is no file of prompts {str(path)!r}; check the path.")
    is_jsonl = file.suffix.lower() in _JSON_LINES
    if field is not None and not is_jsonl:
        raise ValueError(f"{str(path)!r} has one prompt on each line and no fields; leave --field out, or give .jsonl.")
    try:
        with file.open(encoding="utf-8-sig") as stream:
            lines = [line.removesuffix("\n") for line in stream]
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is no text in UTF-8 ({error.reason}); write it in this encoding.") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        where = f"Line {number} of {str(path)!r}"
        if not line.strip():
            raise ValueError(f"{where} is empty; take it out, or write a prompt in it.")
        prompts.append(_from_json(line, where, field or FIELD) if is_jsonl else Prompt(where, line, {FIELD: line}))
    if not prompts:
        raise ValueError(f"{str(path)!r} is empty; write a prompt on each line.")
    return prompts


def _from_json(line: str, where: str, field: str) -> Prompt:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON ({error}).") from error
    if not isinstance(record, dict):
        raise ValueError(f'{where} is no JSON object, but {quoted(record)}; write {{"{field}": "..."}}.')
    if field not in record:
        names = f"; its fields are {', '.join(map(repr, record))}" if record else ""
        raise ValueError(f"{where} has no field {field!r}{names}; name the one that holds the prompt by --field.")
    text = record[field]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where} has {quoted(text)} in its field {field!r}, which is no prompt; write text there.")
    return Prompt(where, text, record)


def answer_prompts(
    generator: TextGenerator,
    prompts: Sequence[Prompt],
    write: Callable[[str], None],
    *,
    batch_size: int = 8,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """
    Answer prompts in batches, in the order in which they stand.

    Args:
        generator: Of the texts.
        prompts: From [`read_prompts`].
        write: Called with one line of JSON at a time: the record of a prompt with the field `generated_text`.
        batch_size (defaults to 8): Prompts in one call of generate().
        on_progress (*optional*): Called with the numbers of prompts done and in all.

    Raises:
        ValueError: if `batch_size` is below 1, or a prompt cannot be encoded; nothing is generated then.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
    ids = [generator.loaded.encode(prompt.text, prompt.where) for prompt in prompts]
    for start in range(0, len(prompts), batch_size):
        if on_progress is not None:
            on_progress(start, len(prompts))
        batch = slice(start, start + batch_size)
        for prompt, answer in zip(prompts[batch], generator.generate_batch(ids[batch])):
            write(json.dumps({**prompt.record, ANSWER: answer.text}, ensure_ascii=False) + "\n")
    if on_progress is not None:
        on_progress(len(prompts), len(prompts))


def check_output(path: str | os.PathLike, prompts: str | os.PathLike) -> None:
    """Refuse, with one sentence, a file that cannot be written or is that of the prompts."""
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"{str(path)!r} is a folder; give a file to write answers to.")
    if file.exists() and not file.is_file():
        raise ValueError(f"{str(path)!r} is no ordinary file; leave it out to have answers on stdout.")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {str(file.parent)!r} to write {file.name!r} in; make it first.")
    if file.exists() and Path(prompts).exists() and file.samefile(prompts):
        raise ValueError(f"{str(path)!r} holds the prompts; give another file to write answers to.")


@contextlib.contextmanager
def whole_lines(path: str | os.PathLike) -> Iterator[Callable[[str], None]]:
    """
    A file of lines that appears when all are there; lines of a run that was stopped stay under another name.

    Every line reaches the system in one piece, so that not even a killed process leaves half of one.

    Args:
        path: The file, which is replaced if it is there.

    Yields:
        What writes a line.
    """
    file = Path(path)
    unfinished = unfinished_path(file)
    try:
        with unfinished.open("wb", buffering=0) as stream:

            def write(line: str) -> None:
                end, content = stream.tell(), line.encode()
                try:
                    written = stream.write(content)
                except OSError:
                    stream.truncate(end)
                    raise
                if written != len(content):
                    stream.truncate(end)
                    raise OSError(f"The disk has no room for {str(unfinished)!r}; free some space and start again.")

            yield write
            os.fsync(stream.fileno())
    except BaseException:
        if unfinished.is_file() and unfinished.stat().st_size == 0:
            unfinished.unlink()
        raise
    unfinished.replace(file)
