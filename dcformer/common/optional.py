"""Packages of the extras, imported where they are used."""

import importlib
from types import ModuleType


def import_optional(name: str, missing: str) -> ModuleType:
    """
    A module that may not be installed.

    Args:
        name: Of the module.
        missing: What the error says: what needs it, and the extra that installs it.

    Raises:
        ImportError: if it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(missing) from error
