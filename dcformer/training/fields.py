"""Mappings of recipes, merged and checked against a dataclass by OmegaConf; every error is one sentence.

OmegaConf knows types, defaults, missing values and references (`${training.batch_tokens}`). What it would take for
something else than it is written as (`yes` for true, 1 for text) is refused here.
"""

from __future__ import annotations

import contextlib
import difflib
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..common.optional import import_optional
from ..common.quoting import quoted


Fields = TypeVar("Fields")
_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text", dict: "a mapping", list: "a list"}


def read_fields(cls: type[Fields], values: Any, where: str) -> Fields:
    """
    An instance of a dataclass from the values that a recipe gives its fields.

    Numbers may be written as text (`3e-4`) and integers with an exponent (`7e9`).

    Args:
        cls (`type`): Dataclass, with fields of types that OmegaConf knows.
        values (`dict`): Value of every field that has no default, and of any other.
        where (`str`): Key of the mapping in the recipe, such as `"training"`; empty at the top.

    Raises:
        ValueError: for an unknown or missing key, or a value of another type.
    """
    omegaconf = import_omegaconf()
    check_mapping(values, where)
    hints = get_type_hints(cls)
    check_keys(values, hints, where)
    config = omegaconf.OmegaConf.structured(cls)
    omegaconf.OmegaConf.set_readonly(config, False)  # as that of a frozen class is
    for key, value in values.items():
        try:
            omegaconf.OmegaConf.update(config, key, _whole(value), merge=False)
            is_faithful = _is_faithful(value, config[key])
        except (omegaconf.errors.OmegaConfBaseException, OverflowError):
            is_faithful = False
        if not is_faithful:
            raise ValueError(f"{full_key(where, key)} must be {_words(hints[key])}, got {quoted(value)}.")
    for key in hints:
        if omegaconf.OmegaConf.is_missing(config, key):
            raise ValueError(f"{full_key(where, key)} is missing; give it a value.")
    with omegaconf_errors(where):
        return omegaconf.OmegaConf.to_object(config)


def merge_mappings(base: Mapping, update: Mapping, resolve: bool = False) -> dict:
    """
    `base` with the values of `update`: mappings merge, anything else replaces, lists as a whole.

    With `resolve`, references such as `${training.batch_tokens}` become what they stand for in the whole.
    """
    configurations = import_omegaconf().OmegaConf
    with omegaconf_errors():
        return configurations.to_container(configurations.merge(base, update), resolve=resolve)


@contextlib.contextmanager
def omegaconf_errors(where: str = "") -> Iterator[None]:
    """Raise what OmegaConf says over several lines as a ValueError of one sentence that names the key."""
    errors = import_omegaconf().errors
    try:
        yield
    except errors.OmegaConfBaseException as error:
        key = full_key(where, error.full_key) if error.full_key else where or "A recipe"
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(f"{key} cannot be read ({reason}); correct it.") from error


def import_omegaconf() -> types.ModuleType:
    """
    The module `omegaconf`.

    Raises:
        ImportError: if it is not installed.
    """
    return import_optional("omegaconf", 'Recipes need OmegaConf; install it with `pip install "dcformer[train]"`.')


def check_range(name: str, value: int, least: int, most: int) -> None:
    """Raise ValueError, which names the key and what is allowed, for an integer below `least` or above `most`."""
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {quoted(value)}.")
    if value > most:
        raise ValueError(f"{name} must be at most {most:,}, got {quoted(value)}.")


def check_mapping(values: Any, where: str) -> None:
    """Raise ValueError for anything else than a mapping."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where or 'A recipe'} must be a mapping of keys to values, got {quoted(values)}.")


def check_keys(values: Iterable[str], allowed: Iterable[str], where: str) -> None:
    """Raise ValueError for the first key that is not allowed, with the nearest ones that are."""
    allowed = list(allowed)
    for key in values:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, n=3) or allowed
            raise ValueError(f"{quoted(full_key(where, key))} is no key of a recipe; did you mean {' or '.join(near)}?")


def full_key(where: str, key: Any) -> str:
    """The full name of a key, such as `training.max_steps`."""
    return f"{where}.{key}" if where else str(key)


def first_difference(found: Mapping, wanted: Mapping, ignored: tuple[str, ...]) -> str | None:
    """
    The first value in which two recipes differ, for messages; `None` if they are the same.

    Args:
        found (`Mapping`): The recipe of something on the disk, "there".
        wanted (`Mapping`): The recipe that is asked for, "here".
        ignored (`tuple[str, ...]`): Beginnings of keys that may differ, such as `"training.save_steps"`.
    """
    there, here = _flattened(found), _flattened(wanted)
    for key in sorted({*there, *here}):
        if not key.startswith(ignored) and there.get(key) != here.get(key):
            return f"{key} is {there.get(key)!r} there and {here.get(key)!r} here"
    return None


def _flattened(values: Mapping, where: str = "") -> dict[str, Any]:
    """Nested mappings as one, with keys such as `training.max_steps`."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        name = full_key(where, key)
        result |= _flattened(value, name) if isinstance(value, Mapping) else {name: value}
    return result


def _whole(value: Any) -> Any:
    """A number without a fraction as an integer, which OmegaConf takes for numbers of both kinds."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if is_number and float(value).is_integer() else value


def _is_faithful(value: Any, converted: Any) -> bool:
    """Whether OmegaConf has kept a value, or read text as a number, and made nothing else of it."""
    if not isinstance(value, bool | int | float | str):
        return True
    if isinstance(value, str):
        return not isinstance(converted, bool)
    return value == converted and isinstance(value, bool) == isinstance(converted, bool)


def _words(hint: Any) -> str:
    """The types of a field, in words."""
    words: list[str] = []
    for option in get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,):
        words += map(repr, get_args(option)) if get_origin(option) is Literal else [_NAMES.get(option, "null")]
    return " or ".join(words)
