"""Whether the Hub has a repository, asked once and without the retries of those who read from it."""

import contextlib
from collections.abc import Iterator

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, HTTPError


_NOT_SHOWN = (401, 403, 404)
_TOO_MANY_REQUESTS = 429
_SERVER_ERRORS = 500


def is_on_hub(name: str, revision: str, kind: str) -> bool:
    """
    Ask the Hub once for a repository; Transformers would ask for half a minute if it does not answer.

    Args:
        name (`str`): Name of the repository.
        revision (`str`): Git revision in it.
        kind (`str`): What it is, for the message: `"model"` or `"tokenizer"`.

    Returns:
        Whether it is there; `False` if the Hub cannot be reached or is not to be, so that only the cache can hold it.

    Raises:
        FileNotFoundError: if the Hub does not have it or does not show it.
    """
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision))
    except EntryNotFoundError:
        return True  # a tokenizer need not have one
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in _NOT_SHOWN:
            raise FileNotFoundError(
                f"There is no {kind} {name!r}: it is no folder, and the Hub has no such {kind} at {revision!r}, or "
                f"shows it only to others (status {status}); check the name, or log in by `hf auth login`."
            ) from error
        return status == _TOO_MANY_REQUESTS
    except HFValidationError as error:
        raise FileNotFoundError(
            f"There is no {kind} {name!r}: it is no folder, and no name on the Hub can be such; check the path."
        ) from error
    except (HTTPError, OSError):
        return False
    return True


@contextlib.contextmanager
def without_waiting_for(dataset: str) -> Iterator[None]:
    """
    Let `datasets` look in its cache at once if the Hub does not answer, instead of trying for half a minute.

    Args:
        dataset (`str`): Name of a data set on the Hub.
    """
    from datasets import config

    if _answers(dataset):
        yield
        return
    before = constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE = before


def _answers(dataset: str) -> bool:
    try:
        get_hf_file_metadata(hf_hub_url(dataset, "README.md", repo_type="dataset"))
    except HfHubHTTPError as error:
        return error.response.status_code < _SERVER_ERRORS
    except (HTTPError, OSError):
        return False
    return True
