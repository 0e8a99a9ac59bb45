"""Files of prompts, and their answers as JSONL: a run that was killed can be resumed."""

import contextlib
import hashlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..common.contexts import refuse_surrogates
from ..common.files import file_lock, is_stream, write_atomically


logger = logging.getLogger(__name__)
_SEAL = 65  # bytes before a line: the digits of its SHA-256 and a space


def read_prompts(path: str | os.PathLike[str], field: str = "prompt") -> list[dict[str, Any]]:
    """
    Read prompts from a file in UTF-8, a prompt a line, or a record with a prompt a line in `.jsonl` files.

    Args:
        path: The file.
        field (defaults to `"prompt"`): The field of a record that holds the prompt, a text or a list of token ids.

    Raises:
        ValueError: for a line that is not UTF-8 or holds no prompt, with its number.
    """
    text = Path(path).read_text(encoding="utf-8-sig", errors="surrogateescape")
    if not text.strip():
        raise ValueError(f"{os.fspath(path)!r} is empty; give it a prompt a line.")
    is_json = Path(path).suffix.lower() in (".jsonl", ".ndjson", ".json")
    records = []
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        where = f"Line {number} of {os.fspath(path)!r}"
        try:
            record = json.loads(line) if is_json else {field: line}
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        refuse_surrogates(json.dumps(record, ensure_ascii=False), where)
        prompt = record.get(field) if isinstance(record, dict) else None
        if not isinstance(prompt, str | list) or not prompt:
            place = f" in the field {field!r}" if is_json else ""
            raise ValueError(f"{where} must hold a prompt{place}, got {line!r}.")
        records.append(record)
    return records


def write_answers(
    records: Sequence[dict[str, Any]],
    answer: Callable[[int, int], Sequence[str]],
    output: str | os.PathLike[str],
    *,
    batch_size: int,
    settings: dict[str, Any],
    on_progress: Callable[[int], object] = lambda done: None,
) -> None:
    """
    Write every record with its answer, `generated_text`, to a JSONL file, which appears when all are answered.

    Until then answers are in `OUTPUT.unfinished`, after the settings; those that are damaged there are made again. A
    link is followed; a device or a pipe gets each batch when it is answered.

    Args:
        records: From [`read_prompts`].
        answer: Called with the range of a batch, the index of its first record and that after its last; returns their
            answers.
        settings: Everything that answers depend on, as JSON.
        on_progress (*optional*): Called with the number of records answered.

    Raises:
        ValueError: if another process writes the file, or its partial answers were made with other settings.
    """
    output = Path(output)

    def answered(done: int) -> Iterator[bytes]:
        for start in range(done, len(records), batch_size):
            on_progress(start)
            batch = records[start : start + batch_size]
            for record, text in zip(batch, answer(start, start + len(batch)), strict=True):
                yield json.dumps({**record, "generated_text": text}, ensure_ascii=False).encode() + b"\n"

    if is_stream(output):
        with output.open("ab") as file:
            for line in answered(0):
                file.write(line)
                file.flush()
        return
    output = output.resolve()
    unfinished = output.with_name(f"{output.name}.unfinished")
    lock = output.with_name(f"{output.name}.lock")
    with file_lock(lock):
        sealed = unfinished.read_bytes().splitlines(keepends=True) if unfinished.exists() else []
        are_whole = (line == _sealed(index, line[_SEAL:]) for index, line in enumerate(sealed))
        lines = [line[_SEAL:] for line, _ in zip(sealed, itertools.takewhile(bool, are_whole))]
        # A line without an end was cut when the run was killed, and is no damage.
        if lost := sum(line.endswith(b"\n") for line in sealed[len(lines) :]):
            logger.warning("%r is damaged; its last %d lines are answered again.", str(unfinished), lost)
        earlier = json.loads(lines[0])["settings"] if len(lines) > 1 else settings
        for name in {**earlier, **settings}:
            if earlier.get(name) != settings.get(name):
                raise ValueError(
                    f"The answers in {str(unfinished)!r} were made with another {name}: {earlier.get(name)!r}, got "
                    f"{settings.get(name)!r}; give the same, or move them away."
                )
        done = max(len(lines) - 1, 0)
        if done < len(records):  # only whole batches: a sampled answer depends on the others in its batch
            done -= done % batch_size
        lines = [json.dumps({"settings": settings}).encode() + b"\n", *lines[1 : 1 + done]]
        write_atomically(unfinished, b"".join(itertools.starmap(_sealed, enumerate(lines))))
        with unfinished.open("ab") as file:
            for line in answered(done):
                file.write(_sealed(len(lines), line))
                file.flush()
                lines.append(line)
        write_atomically(output, b"".join(lines[1:]))
        unfinished.unlink()
        with contextlib.suppress(OSError):  # Windows does not remove open files
            lock.unlink()


def _sealed(index: int, line: bytes) -> bytes:
    """A line after the SHA-256 of its index and itself, by which damage is detected."""
    return hashlib.sha256(b"%d %s" % (index, line)).hexdigest().encode() + b" " + line
