"""Names on the Hub: the commit that a revision is, and what lies in the cache if the Hub cannot be reached."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers.utils import cached_file


@contextlib.contextmanager
def naming_what_is_missing(name: str, revision: str | None = None) -> Iterator[None]:
    """Name a model that is neither in the cache nor to be fetched, which the libraries' messages do not."""
    try:
        yield
    except OSError as error:
        if not any(isinstance(cause, LocalEntryNotFoundError) for cause in (error, error.__cause__)):
            raise
        which = "" if revision in (None, "main") else f" in its revision {revision!r}"
        raise FileNotFoundError(
            f"There is no folder or bundled model {name!r}, and the name{which} is not in the cache of the Hub, which "
            "cannot be reached."
        ) from error


def find_commit(name: str, revision: str | None = None) -> str:
    """
    The commit that a branch, tag or commit (`None`: `main`) of a model on the Hub is.

    Raises:
        OSError: if there is no such model or revision, or it can be neither reached nor found in the cache.
    """
    with naming_what_is_missing(name, revision):
        return Path(cached_file(name, "config.json", revision=revision)).parent.name  # the folder of the commit


def load_from_hub(load: Callable[..., Any], name: str, configuration: str | None = None, **options: Any) -> Any:
    """
    A data set of the Hub, or its builder, by a function of `datasets`.

    Without the Hub that library finds only what it has prepared itself; here also files that were downloaded.
    """
    try:
        return load(name, configuration, **options)
    except ConnectionError:
        with contextlib.suppress(LocalEntryNotFoundError):
            where = {"repo_type": "dataset", "revision": options.pop("revision", None), "local_files_only": True}
            return load(snapshot_download(name, **where), configuration, **options)
        raise FileNotFoundError(
            f"There is no file or folder {name!r}, and the data set is not in the cache of the Hub, which cannot be "
            "reached."
        ) from None
