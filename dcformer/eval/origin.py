"""Which documents were read, and from where: found by their contents, and kept with the rows for the record."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from .sources import DOCUMENT_HASHES, Source, sources_of


if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

T = TypeVar("T")

ANY_HASH = "any"
_OF_A_FOLDER = "files of --data-dir"


def documents_hash(documents: Iterable[Sequence[Any]], is_ordered: bool = False) -> str:
    """
    The hash of documents: of the values that the task reads of each.

    Args:
        documents: Of every document the values of its fields, in the order in which the task names them.
        is_ordered (`bool`, defaults to `False`): Hash documents in their order, as running text is packed in it;
            otherwise sorted, since questions are scored one by one and copies have them in different orders.

    Returns:
        `"sha256:..."` of one line of JSON per document (UTF-8, objects sorted by key, no spaces between elements).
    """
    lines = (
        json.dumps(list(values), ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode(
            "utf-8", "surrogatepass"
        )
        + b"\n"
        for values in documents
    )
    digest = hashlib.sha256()
    for line in lines if is_ordered else sorted(lines):
        digest.update(line)
    return f"sha256:{digest.hexdigest()}"


def read_published(
    column: str,
    read: Callable[[Source], tuple[T, str | None]],
    hash_of: Callable[[T], str],
    required: str | None = None,
) -> tuple[T, dict[str, Any]]:
    """
    What the first source has that is reached and whose documents have the right hash.

    Args:
        column (`str`): Name of a folder of data, such as `"piqa"` or `"pile"`.
        read: Reads what a source holds, and the git revision of that, if it is known; an `OSError` says that it cannot
            be reached, a `ValueError` that it holds something else.
        hash_of: [`documents_hash`] of what was read.
        required (`str`, *optional*): The hash that the documents must have, or `"any"` to take the first that are
            reached; by default the hash that is known. Where none is known, the first source alone is taken.

    Returns:
        What was read, and its origin as [`remember`] takes it.

    Raises:
        FileNotFoundError: if no source can be reached.
        ValueError: if those that can be reached hold other documents.
    """
    wanted = required or DOCUMENT_HASHES.get(column)
    sources = sources_of(column)
    refused: list[str] = []
    unreachable: OSError | None = None
    for place, source in enumerate(sources):
        try:
            content, revision = read(source)
            found = hash_of(content)
        except OSError as error:
            unreachable = unreachable or error
            continue
        except ValueError as error:
            refused.append(f"{source}: {error}")
            continue
        if wanted in (found, ANY_HASH) or (wanted is None and place == 0):
            if place > 0:
                logger.warning("%s: %s is read in place of %s.", column, source, sources[0])
            return content, {**origin(str(source), found, column), "revision": revision}
        refused.append(f"the documents of {source} have the hash {found}")
    if not refused:
        others = f", nor from {', '.join(map(str, sources[1:]))}" if len(sources) > 1 else ""
        raise FileNotFoundError(
            f"The data of {column} ({sources[0]}) cannot be downloaded{others}; check the network, or give a "
            f"--data-dir that holds {column}/."
        ) from unreachable
    expected = "no hash is known that could tell whether they are the right ones" if wanted is None else f"not {wanted}"
    raise ValueError(
        f"No source of {column} has the documents that were expected: {'; '.join(refused)}, {expected}. Check them and "
        "name the hash by --data-hash TASK=HASH, or give the files by --data-dir."
    )


def check_required(column: str, found: str, required: str | None) -> None:
    """
    Raises:
        ValueError: if the documents of a folder do not have the hash that was asked for.
    """
    if required not in (None, ANY_HASH, found):
        raise ValueError(
            f"The documents of {column} have the hash {found} instead of {required}; check the files of --data-dir, or "
            "give another --data-hash."
        )


def origin(source: str | None, found: str, column: str) -> dict[str, Any]:
    """
    What a record says of documents.

    Args:
        source (`str`, *optional*): Where they were read; `None` for a folder.
        found (`str`): Their hash.
        column (`str`): Name of the folder of data.

    Returns:
        `source`, `hash`, and `as_known`: whether the hash is the one that is known, `None` where none is. Those that
        were fetched say besides their git `revision`, `None` if it is not known, and documents of another split than
        the one that is to be scored which one they stand in for, `stands_in_for`.
    """
    known = DOCUMENT_HASHES.get(column)
    return {"source": source or _OF_A_FOLDER, "hash": found, "as_known": None if known is None else found == known}


def remember(rows: Dataset, origin: dict[str, Any]) -> Dataset:
    """The rows, which keep their origin from now on."""
    rows.info.description = json.dumps(origin)
    return rows


def origin_of(rows: Dataset) -> dict[str, Any]:
    """What [`remember`] was told of rows."""
    return json.loads(rows.info.description)
