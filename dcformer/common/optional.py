"""Packages of the extras, imported where they are used."""

import importlib
import os
from types import ModuleType


def install_hint(extra: str) -> str:
    """The end of a sentence that says how to install an extra."""
    return f'pip install ".[{extra}]" in a clone of the repository of dcformer'


def import_optional(name: str, what: str, extra: str) -> ModuleType:
    """A module of an extra; the ImportError for a missing one says what needs it, and how to install the extra."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or name).partition(".")[0]
        raise ImportError(f"{what} needs {missing}: {install_hint(extra)}.", name=missing) from error


def import_vllm(what: str, **environment: str) -> ModuleType:
    """Import vLLM without usage statistics, its log on stderr; `environment` has more variables for it."""
    defaults = {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_NO_USAGE_STATS": "1", **environment}
    os.environ.update(defaults | os.environ)
    return import_optional("vllm", what, "vllm")
