"""Gradio, which few need, imported with everything off by which it would ask other machines."""

from __future__ import annotations

import os
from types import ModuleType

from ..common.optional import import_optional


def import_gradio() -> ModuleType:
    """
    The library of the page.

    Raises:
        ImportError: if it is not installed.
    """
    # Read where it is imported: it would report its use and look for a newer version.
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    return import_optional("gradio", "The page needs gradio and matplotlib: pip install 'dcformer[demo]'.")
