"""Settings beside weights, in JSON and YAML: a key that stands twice in them, or is misspelt, is refused."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import yaml


_NEAR = 0.76  # ratio of difflib; of 945 keys in the configurations of MaxText and its forks, 7 are that near to ours


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError if it is none, or holds a key twice."""

    def read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_twice((key for key, _ in pairs), path)
        return dict(pairs)

    return _mapping(json.loads(path.read_bytes(), object_pairs_hook=read_object), path)


def read_yaml(path: Path) -> dict[Any, Any]:
    """The mapping in a YAML file; ValueError if it is none, or holds a key twice."""

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            _refuse_twice((key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)), path)
            return super().construct_mapping(node, deep)

    return _mapping(yaml.load(path.read_text(encoding="utf-8"), Loader), path)


def refuse_misspelt(keys: Iterable[Any], read: Collection[str], known: Collection[str], path: Path) -> None:
    """Raise ValueError for a key of a file spelt almost as one that is read, unless it is known for something else."""
    for key in keys:
        if key not in read and key not in known:
            spelt = str(key).lower().replace("-", "_")
            if near := difflib.get_close_matches(spelt, sorted(read), n=1, cutoff=_NEAR):
                raise ValueError(
                    f"{str(path)!r} has the key {key!r}, which means nothing; write {near[0]!r}, or remove it."
                )


def _refuse_twice(keys: Iterable[Any], path: Path) -> None:
    if twice := [key for key, count in Counter(keys).items() if count > 1]:
        raise ValueError(f"{str(path)!r} has the key {twice[0]!r} twice; keep one of them.")


def _mapping(values: Any, path: Path) -> dict[Any, Any]:
    if not isinstance(values, dict):
        raise ValueError(f"{str(path)!r} must hold keys with values, got {values!r:.60}.")
    return values
