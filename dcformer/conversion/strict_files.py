"""JSON and YAML files that others wrote, read strictly: no key twice, no endless nesting, no value quoted at length."""

from __future__ import annotations

import json
import re
import reprlib
from pathlib import Path
from typing import Any

import yaml


# Values that a YAML file may expand to. A training configuration has a few hundred; aliases of aliases make billions.
_MOST_YAML_VALUES = 100_000
_LONGEST_QUOTE = 80

_QUOTING = reprlib.Repr()
_QUOTING.maxlevel, _QUOTING.maxlist, _QUOTING.maxtuple, _QUOTING.maxdict = 3, 8, 8, 4
_QUOTING.maxstring = _QUOTING.maxother = _QUOTING.maxlong = _LONGEST_QUOTE // 2


def quoted(value: Any) -> str:
    """A value as messages show it, shortened before it is formatted: some stand for billions of values."""
    text = _QUOTING.repr(value)
    return text if len(text) <= _LONGEST_QUOTE else text[: _LONGEST_QUOTE - 3] + "..."


def parse_json(text: str | bytes) -> Any:
    """
    The value of a JSON text.

    Raises:
        ValueError: with the reason, if it is not valid, holds a key twice or is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"it holds the key {quoted(twice)} twice")
    return values


class _YamlLoader(yaml.SafeLoader):
    """YAML 1.1 takes `1e-5`, without a dot, for a string; YAML 1.2 and everyone who writes it take it for a number."""


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+\Z"), list("-+0123456789")
)


def read_yaml(path: Path) -> Any:
    """
    The value of a YAML file.

    Raises:
        ValueError: naming file and line, if it is not valid, holds a key twice, is nested too deeply or expands to
            more values than any configuration has.
    """
    try:
        loader = _YamlLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if node is None:
            return None
        _check_node(node, {}, set())
        return loader.construct_document(node)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        at = "" if line is None else f", line {line + 1}"
        raise ValueError(f"{str(path)!r} is not valid YAML{at}; correct it.") from error
    except RecursionError:
        raise ValueError(f"{str(path)!r} is not valid YAML: it is nested too deeply; correct it.") from None
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not valid YAML: {error}; correct it.") from error


def _check_node(node: yaml.Node, sizes: dict[int, int], open_nodes: set[int]) -> int:
    """How many values a node stands for with all aliases expanded, each counted once however often it is used."""
    if id(node) in sizes:
        return sizes[id(node)]
    line = node.start_mark.line + 1
    if id(node) in open_nodes:
        raise ValueError(f"the value on line {line} holds itself")
    open_nodes.add(id(node))
    children = []
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                here = key.start_mark.line + 1
                if key.value in lines:
                    raise ValueError(
                        f"the key {quoted(key.value)} is there twice, on lines {lines[key.value]} and {here}"
                    )
                lines[key.value] = here
            children += [key, value]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    size = 1 + sum(_check_node(child, sizes, open_nodes) for child in children)
    if size > _MOST_YAML_VALUES:
        raise ValueError(f"the aliases in the value on line {line} expand it to more than {_MOST_YAML_VALUES} values")
    open_nodes.remove(id(node))
    sizes[id(node)] = size
    return size
