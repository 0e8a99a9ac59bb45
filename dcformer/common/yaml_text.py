"""YAML texts: read with numbers as people write them, and refused where YAML would hide a mistake.

PyYAML reads YAML 1.1, in which `1e-3` is text and the last of two equal keys wins without a word.
"""

from __future__ import annotations

import re
from functools import cache
from types import ModuleType
from typing import Any

from .optional import import_optional


_DEEPEST = 50
_MOST_VALUES = 100_000
_FLOAT_TAG = "tag:yaml.org,2002:float"
# As YAML 1.2 reads it: a number with an exponent is one without a dot as well, and without a sign.
_EXPONENT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")


def read_yaml(text: str, what: str) -> Any:
    """
    The value of a YAML text.

    Args:
        text (`str`): Of one document.
        what (`str`): What errors call it.

    Raises:
        ValueError: if it is no YAML; for a key that is given twice in a mapping; if it is nested too deeply, or grows
            beyond measure by its aliases.
    """
    yaml = _import_yaml()
    loader = None
    try:
        loader = _loader_class()(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(yaml, node, what)
        _check_keys(yaml, node, what)
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f"line {mark.line + 1}: "
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ValueError(f"{what} is no YAML ({line}{problem}).") from error
    except RecursionError as error:
        raise _too_deep(what) from error
    except _ConstructionError as error:
        raise ValueError(f"{what} holds a value that cannot be read ({error}); correct it.") from error
    finally:
        if loader is not None:
            loader.dispose()


def write_yaml(values: dict[str, Any] | list[Any]) -> str:
    """The YAML text of a mapping or a list, of which `read_yaml` makes the same again."""
    return _import_yaml().dump(values, Dumper=_dumper_class(), sort_keys=False, allow_unicode=True)


class _ConstructionError(Exception):
    """What Python says of a value that it cannot make, such as a date of month 13 or a number of 5000 digits."""


def _import_yaml() -> ModuleType:
    return import_optional("yaml", 'Reading YAML needs PyYAML; install it with `pip install "dcformer[train]"`.')


@cache
def _loader_class() -> type:
    yaml: Any = _import_yaml()

    class Loader(yaml.SafeLoader):
        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            # What is nested without end would take long before it could be measured.
            self.depth += 1
            if self.depth > _DEEPEST + 1:
                raise RecursionError
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep)
            except (ValueError, OverflowError) as error:
                raise _ConstructionError(f"line {node.start_mark.line + 1}: {error}") from error

    Loader.add_implicit_resolver(_FLOAT_TAG, _EXPONENT, list("-+0123456789."))
    return Loader


@cache
def _dumper_class() -> type:
    yaml: Any = _import_yaml()

    class Dumper(yaml.SafeDumper):
        """Quotes text that would be read as a number."""

    Dumper.add_implicit_resolver(_FLOAT_TAG, _EXPONENT, list("-+0123456789."))
    return Dumper


def _check_size(yaml: ModuleType, root: Any, what: str) -> None:
    """Refuse what is nested too deeply, and what has too many values once its aliases are written out."""
    measured: dict[int, tuple[int, int]] = {}

    def measure(node: Any, depth: int) -> tuple[int, int]:
        """Values and levels of a node; one that holds itself by an alias has no end of levels."""
        if id(node) not in measured:
            if depth > _DEEPEST:
                raise _too_deep(what)
            values, levels = 1, 0
            for child in _children(yaml, node):
                of_child = measure(child, depth + 1)
                values, levels = values + of_child[0], max(levels, of_child[1])
            if values > _MOST_VALUES:
                raise ValueError(
                    f"{what} holds more than {_MOST_VALUES:,} values, aliases written out; no configuration has."
                )
            measured[id(node)] = values, levels + 1
        if depth + measured[id(node)][1] > _DEEPEST:
            raise _too_deep(what)
        return measured[id(node)]

    measure(root, 0)


def _check_keys(yaml: ModuleType, root: Any, what: str) -> None:
    """Refuse a key that is given twice in one mapping."""
    waiting, seen = [root], {id(root)}
    while waiting:
        node = waiting.pop()
        if isinstance(node, yaml.MappingNode):
            lines: dict[tuple[str, str], int] = {}
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                line = key.start_mark.line + 1
                if (key.tag, key.value) in lines:
                    first = lines[key.tag, key.value]
                    where = f"lines {first} and {line}" if first != line else f"line {line}"
                    raise ValueError(f"{what} gives {key.value!r} twice ({where}); remove one.")
                lines[key.tag, key.value] = line
        for child in _children(yaml, node):
            if id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)


def _children(yaml: ModuleType, node: Any) -> list:
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _too_deep(what: str) -> ValueError:
    return ValueError(f"{what} nests more than {_DEEPEST} levels; no configuration does.")
