"""Where the documents of a task come from: a folder of files, or the Hub.

    <data_dir>/<column>/<split>.parquet     or .jsonl, or .txt where a task reads plain text

With a folder nothing is fetched; without one the sources of `sources.py` are asked, and nothing is taken from anywhere
else.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

from ..common.digests import file_digest
from ..common.optional import import_optional
from .sources import SOURCES, Source


if TYPE_CHECKING:
    from datasets import Dataset


SUFFIXES = (".parquet", ".jsonl", ".txt", ".zst")
# Names of folders in the cache of `datasets` and in that of the Hub.
_REVISION_OF_ROWS = re.compile(r"/([0-9a-f]{40})/[^/]*$")
_REVISION_OF_FILE = re.compile(r"/snapshots/([0-9a-f]{40})/")
# Folders of the tasks that are not called like theirs; the first that holds files is read.
_FOLDERS = {
    **{f"head_tasks_authors_k{shots}": ("synthetic",) for shots in range(2, 8)},
    "pile_ppl": ("pile", "pile_sample"),
    "flan_ppl": ("flan",),
    "wikitext2_ppl": ("wikitext2",),
    **{f"{column}_lm_eval_0_4_13": (column,) for column in ("lambada_openai", "sciq", "race_middle", "race_high")},
}


def import_datasets():
    """
    The module `datasets`.

    Raises:
        ImportError: if it is not installed.
    """
    return import_optional("datasets", "Reading evaluation data needs datasets: pip install 'dcformer[eval]'.")


def data_folders(task: str) -> tuple[str, ...]:
    """Names of the folders below `data_dir` that may hold a task's data; the first one that holds files is read."""
    return _FOLDERS.get(task, (task,))


def data_folder(data_dir: str | os.PathLike, column: str) -> Path:
    """
    Folder of a column's files.

    Raises:
        FileNotFoundError: if it is not there.
    """
    root = Path(data_dir)
    if not root.is_dir():
        raise FileNotFoundError(
            f"There is no folder {str(data_dir)!r}; give a --data-dir that holds a folder per task, such as {column}/."
        )
    folder = root / column
    if not folder.is_dir():
        origin = f" with the files of {SOURCES[column]}" if column in SOURCES else ""
        raise FileNotFoundError(
            f"There is no folder {str(folder)!r}; make one{origin}, or leave out --data-dir to fetch the data."
        )
    return folder


def find_file(
    data_dir: str | os.PathLike, column: str, split: str, suffixes: tuple[str, ...] = (".parquet", ".jsonl")
) -> Path | None:
    """
    The file of a split, or `None` if the folder holds none; the first suffix that is there counts.

    Raises:
        FileNotFoundError: if the folder of the column is not there.
    """
    folder = data_folder(data_dir, column)
    return next((file for suffix in suffixes if (file := folder / f"{split}{suffix}").is_file()), None)


def require_file(
    data_dir: str | os.PathLike, column: str, split: str, suffixes: tuple[str, ...] = (".parquet", ".jsonl")
) -> Path:
    """
    The file of a split.

    Raises:
        FileNotFoundError: if it is not there.
    """
    file = find_file(data_dir, column, split, suffixes)
    if file is None:
        origin = f" of {SOURCES[column]}" if column in SOURCES else ""
        others = f" (or {', '.join(suffixes[1:])})" if len(suffixes) > 1 else ""
        raise FileNotFoundError(
            f"There is no file {str(Path(data_dir) / column / (split + suffixes[0]))!r}{others}; put the {split} "
            f"split{origin} there."
        )
    return file


def read_rows(file: Path) -> Dataset:
    """
    The rows of a .parquet or .jsonl file, held in memory.

    Raises:
        ValueError: if the file is damaged, or has no rows.
    """
    datasets = import_datasets()
    import pyarrow
    from pyarrow import parquet

    try:
        if file.suffix == ".parquet":
            rows = datasets.Dataset(parquet.read_table(file))
        else:
            lines = file.read_text(encoding="utf-8").split("\n")  # other separators may stand in a string
            rows = datasets.Dataset.from_list([json.loads(line) for line in lines if line.strip()])
    except (ValueError, AttributeError, TypeError, OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{str(file)!r} cannot be read as {file.suffix[1:]}: write it again.") from error
    if len(rows) == 0:
        raise ValueError(f"{str(file)!r} holds no documents; write it again.")
    return rows


def require_columns(rows: Dataset, columns: tuple[str, ...], where: str | os.PathLike) -> Dataset:
    """
    The rows themselves, if they have all the columns that a task reads.

    Raises:
        ValueError: if one is missing.
    """
    missing = [name for name in columns if name not in rows.column_names]
    if missing:
        raise ValueError(
            f"{str(where)!r} has no column {missing[0]!r}; it must have {', '.join(columns)}, and has "
            f"{', '.join(rows.column_names)}."
        )
    return rows


def hub_splits(source: Source) -> tuple[dict[str, Dataset], str | None]:
    """
    All splits of a data set on the Hub, from the cache of `datasets` if they are there.

    Returns:
        The splits, and the git revision that they are of, as far as `datasets` tells.

    Raises:
        OSError: if the Hub cannot be reached and the cache does not hold them.
        ValueError: if the data set cannot be read.
    """
    datasets = import_datasets()
    from .hub import without_waiting_for

    with without_waiting_for(source.path):
        try:
            splits = dict(datasets.load_dataset(source.path, source.name, revision=source.revision))
        except OSError:
            raise
        except (datasets.exceptions.DatasetsError, RuntimeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(f"it cannot be read ({reason})") from error
    files = [Path(file["filename"]).as_posix() for rows in splits.values() for file in rows.cache_files]
    revisions = {match[1] for file in files if (match := _REVISION_OF_ROWS.search(file))}
    return splits, revisions.pop() if len(revisions) == 1 else source.revision


def fetch_file(source: Source, split: str) -> tuple[Path, str | None]:
    """
    The file of a split, from a cache if it is there.

    Returns:
        The file, and the git revision that it is of, if it has one.

    Raises:
        OSError: if it cannot be reached and no cache holds it.
        ValueError: if it is not the file that was asked for.
    """
    name, sha256 = source.files[split]
    where = f"{source.address or source.path}/{name}"
    revision = source.revision
    if source.address is None:
        from huggingface_hub import hf_hub_download

        from .hub import without_waiting_for

        with without_waiting_for(source.path):
            file = Path(hf_hub_download(source.path, name, repo_type="dataset", revision=source.revision))
        if match := _REVISION_OF_FILE.search(file.as_posix()):
            revision = match[1]
    else:
        datasets = import_datasets()
        # The sum is checked, so what the cache holds needs no question to the server.
        settings = datasets.DownloadConfig(use_etag=sha256 is None)
        file = Path(datasets.DownloadManager(download_config=settings).download(where))
    if sha256 is not None and (found := file_digest(file)) != sha256:
        raise ValueError(
            f"{where} has the sha256 {found} instead of {sha256}; download it yourself, check it, and give its "
            "folder as --data-dir."
        )
    return file, revision


def data_fingerprint(data_dir: str | os.PathLike | None, column: str) -> str:
    """
    Which data a result rests on, as one string for its record.

    Args:
        data_dir: The folder given to the task, or `None`.
        column (`str`): Name of a task without prefix, such as `"piqa"`, `"head_tasks_authors_k2"` or `"pile_ppl"`.

    Returns:
        `"sha256:..."` of the names and contents of all data files in the task's folder; without a folder, the source
        that is asked first and its newest git revision, `"allenai/sciq@<revision>"`, with `unknown` for the revision
        if neither the Hub nor its cache tells. Which source was read is in a record's `observed`.

    Raises:
        FileNotFoundError: if the folder is not there.
        ValueError: if there is no folder and the task has no known source.
    """
    folders = data_folders(column)
    if data_dir is not None:
        chosen = next((folder for folder in folders if any((Path(data_dir) / folder).glob("*.jsonl*"))), folders[0])
        files = sorted(file for file in data_folder(data_dir, chosen).iterdir() if file.suffix in SUFFIXES)
        contents = "".join(f"{file.name} {file_digest(file)}\n" for file in files)
        return f"sha256:{hashlib.sha256(contents.encode()).hexdigest()}"
    if folders[0] not in SOURCES:
        raise ValueError(f"The data of {column!r} have no known source; give a --data-dir.")
    source = SOURCES[folders[0]]
    return f"{source}@{source.revision or _newest_revision(source.path) or 'unknown'}"


@cache
def _newest_revision(path: str) -> str | None:
    from huggingface_hub import constants, hf_hub_download

    # Not by the Hub's own client, which tries five times, half a minute in all, for every data set while offline.
    if not constants.HF_HUB_OFFLINE:
        with suppress(OSError), urlopen(f"{constants.ENDPOINT}/api/datasets/{path}", timeout=10) as answer:
            return json.load(answer)["sha"]
    # `datasets` begins with this file, so the cache holds it if it holds the data.
    with suppress(OSError):
        return Path(hf_hub_download(path, "README.md", repo_type="dataset", local_files_only=True)).parent.name
    return None
