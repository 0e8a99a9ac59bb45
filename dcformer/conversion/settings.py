"""Settings beside weights, in JSON and YAML: a key that stands twice in them, or is misspelt, is refused."""

import contextlib
import difflib
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml


_NEAR = 0.76  # ratio of difflib; of 945 keys in the configurations of MaxText and its forks, 7 are that near to ours


@contextlib.contextmanager
def naming(path: str | os.PathLike, *errors: type[Exception]) -> Iterator[None]:
    """Turn what a library raises about a file into a ValueError that names the file."""
    try:
        yield
    except OSError as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else OSError
        reason = error.strerror or str(error).removesuffix(f": {path}").rstrip(".")
        raise kind(f"{str(path)!r} cannot be read: {reason}.") from error
    except errors as error:
        # Without torch's advice to run the code in a file that it refuses.
        reason = re.split(r"\n\nCheck | Please use ", str(error).rpartition("WeightsUnpickler error:")[2].strip())[0]
        raise ValueError(f"{str(path)!r} cannot be read: {reason or 'it ends too early.'}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError if it is none, or holds a key twice."""
    with naming(path, ValueError, RecursionError):
        return _mapping(json.loads(path.read_bytes(), object_pairs_hook=_without_doubles))


def read_yaml(path: str | os.PathLike, content: bytes | None = None) -> dict[Any, Any]:
    """The mapping in a YAML file, whose content may be given; ValueError if it is none, or holds a key twice."""
    with naming(path, yaml.YAMLError, ValueError, RecursionError):
        return _mapping(yaml.load(Path(path).read_bytes() if content is None else content, _Loader))


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        _without_doubles([(key.value, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)])
        return super().construct_mapping(node, deep)


def refuse_misspelt(
    keys: Iterable[Any], read: Collection[str], known: Collection[str], path: str | os.PathLike
) -> None:
    """Raise ValueError for a key of a file spelt almost as one that is read, unless it is known for something else."""
    for key in keys:
        if key not in read and key not in known:
            spelt = str(key).lower().replace("-", "_")
            if near := difflib.get_close_matches(spelt, sorted(read), n=1, cutoff=_NEAR):
                raise ValueError(
                    f"{str(path)!r} has the key {key!r}, which means nothing; write {near[0]!r}, or remove it."
                )


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise ValueError(f"it has the key {key!r} twice; keep one of them.")
    return dict(pairs)


def _mapping(values: Any) -> dict[Any, Any]:
    if not isinstance(values, dict):
        raise ValueError(f"it must hold keys with values, got {values!r:.60}.")
    return values
