"""Reading a mapping of a YAML file into a dataclass; every error is one sentence that names the key and its value."""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..common.quoting import quoted


Fields = TypeVar("Fields")
_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text", dict: "a mapping", list: "a list"}


def check_range(name: str, value: int, least: int, most: int) -> None:
    """Raise ValueError, which names the key and what is allowed, for an integer below `least` or above `most`."""
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {quoted(value)}.")
    if value > most:
        raise ValueError(f"{name} must be at most {most:,}, got {quoted(value)}.")


def read_fields(cls: type[Fields], values: dict, where: str) -> Fields:
    """
    An instance of a dataclass from the values that a YAML file gives its fields.

    Numbers that YAML 1.1 reads as text (`3e-4`) or as floats (`7e9` for an integer) are taken as the numbers they are.

    Args:
        cls (`type`): Dataclass with fields of int, float, bool, str, list, dict, `Literal`, or one of these or None.
        values (`dict`): Value of every field that has no default, and of any other.
        where (`str`): Key of the mapping in the file, such as `"training"`; empty at the top.

    Raises:
        ValueError: for an unknown or missing key, or a value of another type.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{where or 'A recipe'} must be a mapping of keys to values, got {quoted(values)}.")
    names = [field.name for field in fields(cls)]
    check_keys(values, names, where)
    for field in fields(cls):
        if field.name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{full_key(where, field.name)} is missing; give it a value.")
    hints = get_type_hints(cls)
    return cls(**{name: _value(value, hints[name], full_key(where, name)) for name, value in values.items()})


def check_keys(values: Iterable[str], allowed: Iterable[str], where: str) -> None:
    """Raise ValueError for the first key that is not allowed, with the nearest ones that are."""
    allowed = list(allowed)
    for key in values:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, n=3) or allowed
            raise ValueError(f"{quoted(full_key(where, key))} is no key of a recipe; did you mean {' or '.join(near)}?")


def full_key(where: str, key: str) -> str:
    """The full name of a key, such as `training.max_steps`."""
    return f"{where}.{key}" if where else str(key)


def _value(value: Any, hint: Any, name: str) -> Any:
    allowed = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for option in allowed:
        matched, converted = _matches(value, option)
        if matched:
            return converted
    words = []
    for option in allowed:
        words += map(repr, get_args(option)) if get_origin(option) is Literal else [_NAMES.get(option, "null")]
    raise ValueError(f"{name} must be {' or '.join(words)}, got {quoted(value)}.")


def _matches(value: Any, option: Any) -> tuple[bool, Any]:
    """Whether a value is of a type, and the value as that type."""
    if get_origin(option) is Literal:
        return value in get_args(option), value
    if option in (int, float):
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isnan(number):
            return False, value
        if option is float:
            return True, number
        whole = number.is_integer()
        return whole, value if isinstance(value, int) or not whole else int(number)
    return option is Any or isinstance(value, option if get_origin(option) is None else get_origin(option)), value
