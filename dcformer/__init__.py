"""
DCFormer for Transformers.

Importing this package registers its models with the Auto classes, which imports torch and Transformers. The `dcformer`
command alone leaves that to its subcommands that load models (`cli/running.py`), so that help comes at once.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version_dcformer import __version__ as __version__


if TYPE_CHECKING or not getattr(sys.modules.get("dcformer_command"), "is_running", False):
    from .public import *  # noqa: F403
    from .public import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        return getattr(import_module(".public", __name__), name)
