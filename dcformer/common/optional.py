"""Packages of the extras, imported where they are used."""

import importlib
from types import ModuleType


def install_hint(extra: str) -> str:
    """How an extra is installed, as the end of a sentence."""
    return f'pip install ".[{extra}]" in a clone of the repository of dcformer'


def import_optional(name: str, what: str, extra: str) -> ModuleType:
    """A module that may not be installed; ImportError if it is not: what needs it, and how its extra is installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or name).partition(".")[0]
        raise ImportError(f"{what} needs {missing}: {install_hint(extra)}.", name=missing) from error
