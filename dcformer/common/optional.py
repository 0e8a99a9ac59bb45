"""Packages of the extras, imported where they are used."""

import importlib
from types import ModuleType


def import_optional(name: str, missing: str) -> ModuleType:
    """A module that may not be installed; if it is not, ImportError with a sentence that names the extra."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(missing) from error
